"""Processes that work for this one: their start, their limits, their end, and typed messages.

Nothing here imports torch.
"""

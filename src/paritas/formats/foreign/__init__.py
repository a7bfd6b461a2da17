"""Other systems' files and names: Ascend's graph engine, torchair, msit, msprobe, SGLang, vLLM.

What reads a file raises `UsageError` if the file is missing, damaged or not supported.
"""

"""Proofs that a split is right for every shape and every number of ranks, over the reals.

`definitions` writes operators as index algebra, `validation` compares what it writes with torch,
`algebra` brings both sides of a split to a normal form, and `prove` compares them. `checker` checks
a certificate again; it is written apart, and imports nothing of the others.
"""

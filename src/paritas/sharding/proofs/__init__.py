"""Proofs that a split is right for every shape and every number of ranks, over the reals.

`core.operators` writes operators as index algebra, `validation` compares that with torch, `claims`
states what a rule says about a call, `algebra` brings both sides of a split to a normal form, and
`prove` compares them. `checker` derives a certificate again from the theorem in it; `kernel`, which
is written apart and imports nothing of the others, compares its two sides.
"""

"""Annotations of the common torch operators, and those that users register.

A rule claims what is true for the shapes and keywords of a call. It is derived from the operator's
definition (`derivation`), except where a module of this folder has a rule of its own, and says why.
`tests/quality/test_partition_library.py` checks every claim.
"""

from __future__ import annotations

from paritas.sharding.operators.library import (
    contractions,
    norms_and_losses,
    rearrangements,
)
from paritas.sharding.operators.library.registry import (
    annotated,
    annotation_for,
    annotation_of_call,
    is_registered,
    known,
    register,
    unregister,
)

__all__ = [
    "annotated",
    "annotation_for",
    "annotation_of_call",
    "is_registered",
    "known",
    "register",
    "unregister",
]

# Importing a family registers its exceptions.
FAMILIES = (contractions, norms_and_losses, rearrangements)

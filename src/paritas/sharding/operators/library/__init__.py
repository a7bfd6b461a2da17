"""Annotations of the common torch operators, and those that users register.

Each module holds the rules of one family of operators. A rule claims what is true for the shapes
and keywords of a call; `tests/quality/test_partition_library.py` checks every claim.
"""

from __future__ import annotations

from paritas.sharding.operators.library import (
    contractions,
    elementwise,
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

# Importing a family registers its rules.
FAMILIES = (contractions, elementwise, norms_and_losses, rearrangements)

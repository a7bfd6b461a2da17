"""The definitions of the library's operators, in the families of the library."""

from __future__ import annotations

from paritas.partition.proofs.operators import (
    contractions,
    elementwise,
    norms_and_losses,
    rearrangements,
)

# Importing a family registers its definitions.
FAMILIES = (contractions, elementwise, norms_and_losses, rearrangements)

"""An exported program with its narrow casts widened: the same program in float64."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from paritas._torch.compiled import LiftedBackend

if TYPE_CHECKING:
    from torch import Tensor
    from torch.export import ExportedProgram

__all__ = ["lift_captured"]


def lift_captured(
    program: ExportedProgram, tensors: tuple[Tensor, ...], used: frozenset[torch.dtype]
) -> tuple[ExportedProgram, frozenset[str]]:
    """Rewrite the casts of a program that was captured on float64 tensors, and capture it again.

    Args:
        program: of float64 state and inputs; explicit casts to less are still in it.
        tensors: what it takes.
        used: the floating dtypes that the reference uses.

    Returns:
        The program, and what of it could not be lifted, in words.
    """
    lifting = LiftedBackend(lambda graph, _: graph, torch.float64, used)
    module: Any = lifting(program.module(), [])
    return torch.export.export(module, tensors), frozenset(lifting.leaks)

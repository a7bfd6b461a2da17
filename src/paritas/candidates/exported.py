"""What `torch.export` makes of the model, run as it is or in core ATen operators.

Its program is a module with the model's own parameters by their own names, so everything can be
compared: gradients, state, aliases.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from paritas._torch.quiet import quietly
from paritas.candidates.capturing import check_model, told
from paritas.checking.config import input_sets
from paritas.checking.isolation import copied
from paritas.errors import UsageError

if TYPE_CHECKING:
    from torch import nn
    from torch.export import ExportedProgram

__all__ = ["export", "export_decomposed"]


def export(model: nn.Module, inputs: Any) -> nn.Module:
    """The module of `torch.export.export`.

    Args:
        model: the reference, an `nn.Module`. It is not changed.
        inputs: one set of inputs, as for `paritas.verify`; shapes are taken as they are.

    Raises:
        UsageError: the model cannot be exported.
    """
    with quietly():
        return _exported(model, inputs, "export").module()


def export_decomposed(model: nn.Module, inputs: Any) -> nn.Module:
    """The same after `run_decompositions()`, in core ATen operators: what a backend is given."""
    program = _exported(model, inputs, "export-decomposed")
    try:
        with quietly():
            module: nn.Module = program.run_decompositions().module()
            return module
    except Exception as error:
        raise UsageError(f"the exported model cannot be decomposed: {told(error)}") from error


def _exported(model: Any, inputs: Any, name: str) -> ExportedProgram:
    check_model(model, name)
    sets = input_sets(inputs)
    if len(sets) > 1:
        raise UsageError(
            f"candidate {name!r} has the shapes of one set of inputs, and here are {len(sets)}; "
            "verify them one at a time"
        )
    fresh = copied(sets[0])
    try:
        with quietly():
            return torch.export.export(model, fresh.args, fresh.kwargs)
    except Exception as error:
        raise UsageError(f"torch.export refuses the model: {told(error)}") from error

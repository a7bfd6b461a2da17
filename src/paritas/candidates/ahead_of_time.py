"""The model compiled ahead of time by AOTInductor."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paritas._torch.ahead_of_time import compiled_package
from paritas._torch.quiet import quietly
from paritas.candidates.runtimes import Built, foreign_program

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor, nn

    from paritas.candidates.capturing import Capture
    from paritas.checking.foreign import ForeignProgram

__all__ = ["aot_inductor"]

NAME = "aot_inductor"


def aot_inductor(model: nn.Module, inputs: Any) -> ForeignProgram:
    """Export a model, compile it to a package of machine code, and load that.

    Args:
        model: the reference, an `nn.Module`. It is not changed.
        inputs: as for `paritas.verify`; shapes are taken as they are.

    Raises:
        UsageError: the model cannot be exported or compiled.
    """
    return foreign_program(NAME, model, inputs, _build)


def _build(captured: Capture) -> Built:
    # Once loaded, the code does not need its file any more.
    with tempfile.TemporaryDirectory(prefix="paritas-aot-") as folder, quietly():
        package = compiled_package(captured.program, Path(folder) / "model.pt2")

    def run(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        return list(package(*tensors))

    return Built(run)

"""AOTInductor: an exported program compiled to a package of machine code."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from paritas.errors import UnsupportedTorchError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from torch.export import ExportedProgram

__all__ = ["compiled_package"]


def compiled_package(program: ExportedProgram, path: Path) -> Callable[..., Any]:
    """Compile a program into the file `path`, and load it."""
    import torch._inductor

    for name in ("aoti_compile_and_package", "aoti_load_package"):
        if not hasattr(torch._inductor, name):
            raise UnsupportedTorchError(f"torch {torch.__version__} has no torch._inductor.{name}")
    written = torch._inductor.aoti_compile_and_package(program, package_path=str(path))
    loaded: Callable[..., Any] = torch._inductor.aoti_load_package(written)
    return loaded

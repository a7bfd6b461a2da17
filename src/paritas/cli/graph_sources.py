"""Which graph `--graph` names, and which values `--inputs` names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from paritas.cli.loading import call, check_form, resolve
from paritas.errors import UsageError

__all__ = ["find_graph", "find_inputs"]


def find_graph(spec: str) -> Any:
    """A file as it is; of `module:factory`, what the factory returns.

    Raises:
        UsageError: there is neither such a file nor such a function.
    """
    path = Path(spec)
    if path.exists():
        return path
    if not _names_function(spec):
        raise UsageError(
            f"--graph {spec!r}: there is no such file; give a .pt2, a .ckp, or module:factory"
        )
    check_form(spec, "--graph")
    return call(resolve(spec, "--graph"), spec, "--graph")


def find_inputs(spec: str) -> Any:
    """The inputs of a graph, by name or by position; the folder of a dump as it is.

    Raises:
        UsageError: there is no such thing, or it holds no tensors.
    """
    path = Path(spec)
    if path.is_dir():
        return path
    if path.is_file():
        return _read(path)
    if not _names_function(spec):
        raise UsageError(
            f"--inputs {spec!r}: there is no such file; give a .safetensors, a .pt, the folder of "
            "a dump, or module:function"
        )
    check_form(spec, "--inputs")
    return call(resolve(spec, "--inputs"), spec, "--inputs")


def _names_function(spec: str) -> bool:
    return ":" in spec and not Path(spec.partition(":")[0]).suffix


def _read(path: Path) -> Any:
    if path.suffix == ".safetensors":
        return _read_safetensors(path)
    import torch

    try:
        found = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises whatever a file makes it raise
        text = (str(error).strip().splitlines() or [""])[0]
        raise UsageError(
            f"--inputs {str(path)!r} cannot be read: {type(error).__name__}: {text:.200}; give "
            "tensors alone, by name or by position, saved by torch.save or as .safetensors"
        ) from error
    if isinstance(found, torch.Tensor):
        return (found,)
    if isinstance(found, (dict, list, tuple)):
        return found
    raise UsageError(
        f"--inputs {str(path)!r} holds a {type(found).__name__}; give tensors, by name or by "
        "position"
    )


def _read_safetensors(path: Path) -> Any:
    import safetensors
    from safetensors.torch import load_file

    try:
        return load_file(path)
    except (OSError, ValueError, safetensors.SafetensorError) as error:
        raise UsageError(f"--inputs {str(path)!r} cannot be read: {error}") from error

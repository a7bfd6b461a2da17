"""Whatever a graph is kept in, opened."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.fx import GraphModule

from paritas.checking.config import Inputs
from paritas.errors import UsageError
from paritas.graphs.calls import Graph
from paritas.graphs.reading.archives import is_zip
from paritas.graphs.reading.exported import read_exported
from paritas.graphs.reading.fx import read_fx, read_program

__all__ = ["open_graph"]

_PAIR = 2
_KNOWN = "a .pt2 of torch.export.save, a .ckp of nnScaler, or module:factory"


def open_graph(source: Any, *, inputs: Any = None, imports: Sequence[str] = ()) -> Graph:
    """Read a graph, without running anything that a file holds.

    Args:
        source: a path (`.pt2`, `.ckp`); a `Graph`, which is given back; an `ExportedProgram`; a
            `torch.fx.GraphModule`; an `nn.Module`, which is exported on the fly (non-strict, which
            takes most models); or `(model, inputs)`.
        inputs: sample arguments: a tensor, a list or tuple of them, a dict by name, or `Inputs`.
            Needed for an `nn.Module`, and for a graph module whose nodes say no shapes.
        imports: modules of the user's, which a checkpoint may refer to; they are not imported here.

    Raises:
        UsageError: it is nothing of these, cannot be read, or cannot be exported.
    """
    if (
        isinstance(source, tuple)
        and len(source) == _PAIR
        and isinstance(source[0], torch.nn.Module)
    ):
        source, inputs = source[0], source[1] if inputs is None else inputs
    if isinstance(source, Graph):
        return source
    if isinstance(source, str | Path):
        return _open_file(Path(source), imports)
    if isinstance(source, ExportedProgram):
        return read_program(source)
    if isinstance(source, GraphModule):
        return read_fx(source, None if inputs is None else _bound(source, inputs))
    if isinstance(source, torch.nn.Module):
        return _exported(source, inputs)
    raise UsageError(
        f"a graph cannot be read from {type(source).__name__} {source!r:.80}; give {_KNOWN}, an "
        "ExportedProgram, a torch.fx.GraphModule, or a model with its inputs"
    )


def _open_file(path: Path, imports: Sequence[str]) -> Graph:
    if path.is_dir():
        raise UsageError(f"{path} is a folder, not a graph; give {_KNOWN}")
    if not path.exists():
        raise UsageError(f"{path} does not exist; give {_KNOWN}")
    if path.suffix == ".ckp":
        from paritas.graphs.reading.checkpoints import read_checkpoint

        return read_checkpoint(path, modules=imports)
    if path.suffix == ".pt2" or is_zip(path):
        return read_exported(path)
    if path.suffix in {".pt", ".pth", ".pkl", ".pickle", ".bin"}:
        raise UsageError(
            f"{path} is a pickle, and loading it would run code that it holds. Give "
            "module:factory, a function of yours that loads and returns it, or a .pt2 of "
            "torch.export.save"
        )
    raise UsageError(f"{path} is no graph that paritas reads; give {_KNOWN}")


def _exported(model: torch.nn.Module, inputs: Any) -> Graph:
    name = type(model).__name__
    if inputs is None:
        raise UsageError(f"{name} is to be exported, but no inputs are given: give (model, inputs)")
    args, kwargs = _arguments(inputs)
    try:
        program = torch.export.export(model, args, kwargs, strict=False)
    except Exception as error:
        first = next(iter(str(error).strip().splitlines()), "")
        raise UsageError(
            f"torch.export cannot export {name}: {type(error).__name__}: {first:.300}. Export it "
            "yourself, or give a torch.fx.GraphModule"
        ) from error
    return read_program(program, name)


def _arguments(inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(inputs, Inputs):
        return inputs.args, inputs.kwargs
    if isinstance(inputs, Mapping):
        return (), dict(inputs)
    if isinstance(inputs, Sequence) and not isinstance(inputs, str):
        return tuple(inputs), {}
    return (inputs,), {}


def _bound(module: GraphModule, inputs: Any) -> dict[str, Any]:
    """Arguments by the names of a graph's placeholders."""
    args, kwargs = _arguments(inputs)
    nodes = module.graph.find_nodes(op="placeholder")
    given = [
        inspect.Parameter(
            str(node.target),
            inspect.Parameter.POSITIONAL_OR_KEYWORD,
            default=node.args[0] if node.args else inspect.Parameter.empty,
        )
        for node in nodes
    ]
    try:
        bound = inspect.Signature(given).bind(*args, **kwargs)
    except (TypeError, ValueError) as error:
        names = ", ".join(str(node.target) for node in nodes)
        raise UsageError(f"the inputs do not fit the graph ({error}): it takes {names}") from None
    bound.apply_defaults()
    return {node.name: bound.arguments[str(node.target)] for node in nodes}

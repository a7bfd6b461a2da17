"""Opens graphs from files and from programs in memory."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.fx import GraphModule

from paritas.core.errors import UsageError, in_one_line
from paritas.sharding.graphs.calls import Graph, split_arguments
from paritas.sharding.graphs.exported import is_zip, read_exported
from paritas.sharding.graphs.programs import read_fx, read_program

_PAIR = 2
_KNOWN = "a .pt2 of torch.export.save, a .ckp of nnScaler, or module:factory"


def open_graph(source: Any, *, inputs: Any = None, imports: Sequence[str] = ()) -> Graph:
    """Read a graph, without running any code from a file.

    Args:
        source: a path (`.pt2`, `.ckp`); a `Graph`, which is returned; an `ExportedProgram`; a
            `torch.fx.GraphModule`; an `nn.Module`, which is exported (non-strict, which works for
            most models); or `(model, inputs)`.
        inputs: sample arguments: a tensor, a list or tuple of them, a dict by name, or `Inputs`.
            Required for an `nn.Module`, and for a graph module without shapes.
        imports: your modules that a checkpoint may refer to; they are not imported here.

    Raises:
        UsageError: it is something else, cannot be read, or cannot be exported.
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
        return read_fx(source, None if inputs is None else _bind_placeholders(source, inputs))
    if isinstance(source, torch.nn.Module):
        return _export_model(source, inputs)
    raise UsageError(
        f"cannot read a graph from {type(source).__name__} {source!r:.80}; give {_KNOWN}, an "
        "ExportedProgram, a torch.fx.GraphModule, or a model with its inputs"
    )


def _open_file(path: Path, imports: Sequence[str]) -> Graph:
    if path.is_dir():
        raise UsageError(f"{path} is a folder, not a graph; give {_KNOWN}")
    if not path.exists():
        raise UsageError(f"{path} does not exist; give {_KNOWN}")
    if path.suffix == ".ckp":
        from paritas.sharding.graphs.checkpoints import read_checkpoint

        return read_checkpoint(path, modules=imports)
    if path.suffix == ".pt2" or is_zip(path):
        return read_exported(path)
    if path.suffix in {".pt", ".pth", ".pkl", ".pickle", ".bin"}:
        raise UsageError(
            f"{path} is a pickle, and loading it would run the code in it. Give "
            "module:factory, a function of yours that loads and returns it, or a .pt2 of "
            "torch.export.save"
        )
    raise UsageError(f"{path} is not a graph that paritas can read; give {_KNOWN}")


def _export_model(model: torch.nn.Module, inputs: Any) -> Graph:
    name = type(model).__name__
    if inputs is None:
        raise UsageError(f"{name} cannot be exported without inputs; give (model, inputs)")
    args, kwargs = split_arguments(inputs)
    try:
        program = torch.export.export(model, args, kwargs, strict=False)
    except Exception as error:
        raise UsageError(
            f"torch.export cannot export {name}: {in_one_line(error, 300)}. Export it "
            "yourself, or give a torch.fx.GraphModule"
        ) from error
    return read_program(program, name)


def _bind_placeholders(module: GraphModule, inputs: Any) -> dict[str, Any]:
    args, kwargs = split_arguments(inputs)
    nodes = module.graph.find_nodes(op="placeholder")
    parameters = [
        inspect.Parameter(
            str(node.target),
            inspect.Parameter.POSITIONAL_OR_KEYWORD,
            default=node.args[0] if node.args else inspect.Parameter.empty,
        )
        for node in nodes
    ]
    try:
        bound = inspect.Signature(parameters).bind(*args, **kwargs)
    except (TypeError, ValueError) as error:
        names = ", ".join(str(node.target) for node in nodes)
        raise UsageError(f"the inputs do not fit the graph ({error}); it takes {names}") from None
    bound.apply_defaults()
    return {node.name: bound.arguments[str(node.target)] for node in nodes}

"""An exported program, `.pt2`, read as the description it is: nothing of it is executed.

Operators that are not registered here are read like all others, under their names.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from paritas.errors import UsageError
from paritas.graphs.calls import Graph, GraphCall, Kind, TensorValue, tensor_values
from paritas.graphs.reading.archives import Archive
from paritas.graphs.reading.exported_arguments import Values
from paritas.graphs.reading.exported_schema import (
    KNOWN_MAJOR,
    GraphPart,
    Node,
    Program,
    Versioned,
    decode,
)
from paritas.graphs.reading.exported_sources import module_of_stack, source_of
from paritas.graphs.reading.exported_symbols import Symbols, Unknown
from paritas.graphs.reading.exported_weights import read_state

__all__ = ["APART", "BRACKET", "BRANCHES", "NO_TENSOR", "idle_reason", "read_exported"]

APART = "takes a tuple apart"
BRANCHES = "a higher-order operator; the calls inside its graphs are listed after it"
BRACKET = "only says whether gradients are kept by the calls after it"
NO_TENSOR = "gives no tensor"
_SIZES = "works on sizes, not on tensors"
_ASSUMES = "checks an assumption and computes nothing"

_ASSERTION = re.compile(r"aten\.(_assert|_functional_assert|sym_constrain|_functional_sym)\w*\..*")
_OF_SIZES = re.compile(
    r"(aten\.sym_|operator\.|torch\.sym_|math\.|torch\.Tensor\.(size|dim|numel|stride)|getattr).*"
)
_GRAD_BRACKET = "higher_order.wrap_with_set_grad_enabled"
# What a description of another form than the known makes of reading it.
_MISREAD = (LookupError, TypeError, ValueError, AttributeError, RecursionError, ArithmeticError)
_POSITIONAL = 1
_LONGEST_NAME = 200

# By the key of a specification: where the name in the model stands, and what the input is.
_SPECIFIED: dict[str, tuple[str, Kind]] = {
    "parameter": ("parameter_name", "parameter"),
    "buffer": ("buffer_name", "buffer"),
    "tensor_constant": ("tensor_constant_name", "constant"),
}


def read_exported(path: Path) -> Graph:
    """The graph of a `.pt2` file.

    Raises:
        UsageError: it is no such file, is damaged, or comes from another version.
    """
    archive = Archive(path)
    told = f"{path}: models/{archive.model}.json"
    text = archive.text(f"models/{archive.model}.json")
    _check_version(decode(text, Versioned, told), path)
    program = decode(text, Program, told)
    symbols = Symbols(program.range_constraints)
    part = program.graph_module.graph
    values = Values(part, symbols)
    try:
        names = _specify(program, values)
        known = _inputs(part, values)
        calls: list[GraphCall] = []
        _read_part(part, values, symbols, calls)
    except (Unknown, *_MISREAD) as error:
        raise UsageError(f"{told} cannot be understood: {error!s:.200}") from None
    return Graph(
        name=path.name,
        kind="torch.export",
        calls=tuple(calls),
        values=known,
        state=lambda: read_state(archive, names),
        notes=_notes(program, symbols),
    )


def idle_reason(operator: str, outputs: tuple[TensorValue, ...]) -> str:
    """Why there is nothing to check of an operator; empty if there is."""
    if _ASSERTION.fullmatch(operator):
        return _ASSUMES
    if outputs:
        return ""
    return _SIZES if _OF_SIZES.fullmatch(operator) else NO_TENSOR


def _check_version(found: Versioned, path: Path) -> None:
    version = found.schema_version
    if version.major == KNOWN_MAJOR:
        return
    age = "an older" if version.major < KNOWN_MAJOR else "a newer"
    raise UsageError(
        f"{path} is a graph from {age} version: torch {found.torch_version:.40} wrote it in schema "
        f"{version.major}.{version.minor}, and schema {KNOWN_MAJOR} (torch 2.11 to 2.13) is known. "
        "Export it again with such a torch"
    )


def _specify(program: Program, values: Values) -> dict[str, str]:
    """Tell the values what the inputs are; the name in the graph by that in the model."""
    names: dict[str, str] = {}
    for specified in program.graph_module.signature.input_specs:
        ((kind, about),) = specified.items()
        if kind in _SPECIFIED:
            key, what = _SPECIFIED[kind]
            name = about["arg"]["name"]
            values.kinds[name] = what
            names[about[key]] = name
        elif kind == "user_input" and "as_tensor" in about["arg"]:
            values.kinds[about["arg"]["as_tensor"]["name"]] = "input"
        elif kind == "constant_input":
            ((_, value),) = about["value"].items()
            values.plain[about["name"]] = value
    return names


def _inputs(part: GraphPart, values: Values) -> dict[str, TensorValue]:
    named = [given["as_tensor"]["name"] for given in part.inputs if "as_tensor" in given]
    return {name: values.tensor(name) for name in named}


def _read_part(part: GraphPart, values: Values, symbols: Symbols, calls: list[GraphCall]) -> None:
    """Add the calls of a graph, and of the graphs inside it, in order."""
    for node in part.nodes:
        call, made = _read_node(node, values, len(calls))
        calls.append(call)
        for name, inner in _graphs_inside(node):
            within = Values(inner, symbols, f"{call.name}.{name}.")
            if call.idle == BRACKET:
                _hand_on(call, inner, within)
            _read_part(inner, within, symbols, calls)
        # Of a higher-order operator the archive says whether one tensor is a tuple of one.
        in_tuple = node.is_hop_single_tensor_return is False
        calls.extend(_taken_apart(call, made, len(calls), in_tuple=in_tuple))


def _hand_on(call: GraphCall, inner: GraphPart, within: Values) -> None:
    """Let a graph that is only put in brackets take and give the tensors around it."""
    for held, tensors in ((inner.inputs, call.tensors()), (inner.outputs, iter(call.outputs))):
        for one, tensor in zip((x for x in held if "as_tensor" in x), tensors, strict=False):
            within.hand_on(one["as_tensor"]["name"], tensor)


def _read_node(node: Node, values: Values, position: int) -> tuple[GraphCall, list[Any]]:
    """A call, and what it gives as it gives it: tensors, lists of them, numbers."""
    operator = _operator_name(node.target)
    bracket = operator == _GRAD_BRACKET
    obstacle = BRANCHES if operator.startswith("higher_order.") and not bracket else ""
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    for given in node.inputs:
        try:
            value = values.argument(given.arg)
        except Unknown as error:
            if "as_graph" not in given.arg:
                obstacle = obstacle or f"{error}, which paritas does not read"
            value = None
        if given.kind is None:
            obstacle = obstacle or f"the archive does not say how it is given {given.name!r:.40}"
        if given.kind == _POSITIONAL:
            args.append(value)
        else:
            kwargs[given.name] = value
    made: list[Any] = []
    for one in node.outputs:
        try:
            made.append(values.argument(one))
        except Unknown as error:
            obstacle = obstacle or f"{error}, which paritas does not read"
    outputs = tuple(tensor_values(made))
    idle = BRACKET if bracket else idle_reason(operator, outputs)
    name = f"{values.prefix}{node.name or _name_of(node, position)}"
    source, code = source_of(node.metadata.get("stack_trace", ""))
    module = module_of_stack(node.metadata.get("nn_module_stack", ""))
    call = GraphCall(
        position=position,
        name=name[:_LONGEST_NAME],
        operator=operator,
        args=tuple(args),
        kwargs=kwargs,
        outputs=outputs,
        source=source,
        code=code,
        module=module,
        idle="" if obstacle and outputs else idle,
        obstacle=obstacle if outputs or not idle else "",
    )
    return call, made


def _taken_apart(
    call: GraphCall, made: list[Any], position: int, *, in_tuple: bool
) -> list[GraphCall]:
    """The calls that take a result apart: the archive leaves them out, and names what they give."""
    results = made[0] if len(made) == 1 and isinstance(made[0], list) else made
    if results is made and len(made) < 2 and not in_tuple:  # noqa: PLR2004
        return []
    found: list[GraphCall] = []
    for index, one in enumerate(results):
        if isinstance(one, TensorValue) and f"{call.name}_unused_" not in one.name:
            part = GraphCall(
                position=position + len(found),
                name=one.name,
                operator="operator.getitem",
                args=(tuple(results), index),
                outputs=(one,),
                source=call.source,
                code=call.code,
                module=call.module,
                idle=APART,
            )
            found.append(part)
    return found


def _graphs_inside(node: Node) -> list[tuple[str, GraphPart]]:
    given = [one.arg["as_graph"] for one in node.inputs if "as_graph" in one.arg]
    return [(str(one["name"]), msgspec.convert(one["graph"], GraphPart)) for one in given]


def _operator_name(target: str) -> str:
    name = target.removeprefix("torch.ops.")[:_LONGEST_NAME]
    return name.removeprefix("_") if name.startswith("_operator.") else name


def _name_of(node: Node, position: int) -> str:
    """What a node without a name is called: as its result, if it has one."""
    for one in node.outputs:
        held: Mapping[str, Any] = next(iter(one.values()), {})
        if isinstance(held, Mapping) and ("name" in held or "as_name" in held):
            return str(held.get("name") or held.get("as_name"))
    return f"{_operator_name(node.target).split('.')[-2:][0]}_{position}"


def _notes(program: Program, symbols: Symbols) -> tuple[str, ...]:
    version = program.schema_version
    made = f"exported by torch {program.torch_version:.40}, schema {version.major}.{version.minor}"
    return (made, *symbols.notes())

"""Write the text graphs of Ascend's graph engine."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from paritas.formats.foreign.ge_tensors import name_of_dtype
from paritas.formats.foreign.npy_tree import call_name

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence


# The syntax is protobuf's text format, the fields are those of Ascend's graphs. Tools find the
# files of an operator by the attribute `_fx_tensor_name` of its outputs, and the parts of a fused
# operator by `_datadump_original_op_names`.

_ESCAPES = {'"': '\\"', "\\": "\\\\", "\n": "\\n", "\r": "\\r", "\t": "\\t"}
_PRINTABLE = range(0x20, 0x7F)
# Well-known readers of these files look for braces in a line before they look for quotes.
_BRACES = frozenset("{}")


def original_graph_text(name: str, nodes: Sequence[NodeFacts]) -> str:
    """The graph as captured."""
    return _format_graph(name, ((node, _format_origin(node)) for node in nodes))


def optimized_graph_text(name: str, buffers: Sequence[FusedFacts]) -> str:
    """The fused graph: an operator for each buffer."""
    return _format_graph(
        name,
        (
            (buffer.node, (*_format_origin(buffer.node), *_format_fusion(buffer)))
            for buffer in buffers
        ),
    )


@dataclasses.dataclass(frozen=True)
class ValueFacts:
    """One result of an operator.

    `dtype` is torch's name without `torch.`, or "" if it is unknown or not a tensor. In `shape`, -1
    is a dynamic size.
    """

    dtype: str = ""
    shape: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True)
class NodeFacts:
    """An operator of a graph.

    Attributes:
        op: what the node calls, for example `aten.mm.default`.
        inputs: the sources of its arguments, `mm:0` for the first result of `mm`.
        module: path of the module it belongs to.
        line: the user's line.
        call: the beginning of its file names in a dump of the captured graph; default: made from
            name and operator.
    """

    name: str
    op: str
    inputs: tuple[str, ...] = ()
    outputs: tuple[ValueFacts, ...] = ()
    module: str = ""
    line: str = ""
    call: str = ""


@dataclasses.dataclass(frozen=True)
class FusedFacts:
    """A buffer that fused code writes.

    Attributes:
        node: how the dump names the buffer.
        buffer: its name in the fused code.
        kernel: the kernel that wrote it.
        originals: its nodes of the captured graph, in order.
    """

    node: NodeFacts
    buffer: str
    kernel: str
    originals: tuple[str, ...]


def _format_origin(node: NodeFacts) -> Iterator[str]:
    for key, value in (("module", node.module), ("line", node.line)):
        if value:
            yield from _format_attribute(key, [f"s: {_quote(value)}"])


def _format_fusion(fused_facts: FusedFacts) -> Iterator[str]:
    yield from _format_attribute("buffer", [f"s: {_quote(fused_facts.buffer)}"])
    yield from _format_attribute("kernel", [f"s: {_quote(fused_facts.kernel)}"])
    names = [f"s: {_quote(name)}" for name in fused_facts.originals]
    listed = _format_block("list", [*names, "val_type: VT_LIST_STRING"])
    yield from _format_attribute("_datadump_original_op_names", listed)


def _format_graph(name: str, nodes: Iterable[tuple[NodeFacts, Iterable[str]]]) -> str:
    lines = [f"name: {_quote(name)}"]
    for node, attributes in nodes:
        lines += _format_block("op", [*_format_head(node), *attributes, *_format_outputs(node)])
    return "\n".join(lines) + "\n"


def _format_head(node: NodeFacts) -> Iterator[str]:
    yield f"name: {_quote(node.name)}"
    yield f"type: {_quote(node.op)}"
    for source in node.inputs:
        yield f"input: {_quote(source)}"


def _format_outputs(node: NodeFacts) -> Iterator[str]:
    for position, value in enumerate(node.outputs):
        stem = f"{node.call or call_name(node.name, node.op)}.OUTPUT.{position}"
        body = [
            f"dtype: {name_of_dtype(value.dtype)}",
            *_format_block("shape", [f"dim: {size}" for size in value.shape]),
            'layout: "ND"',
            *_format_attribute("_fx_tensor_name", [f"s: {_quote(stem)}"]),
        ]
        if value.dtype:
            meaning = f"torch.{value.dtype} of {list(value.shape)}"
            body += _format_attribute("_meta", [f"s: {_quote(meaning)}"])
        yield from _format_block("output_desc", body)


def _format_attribute(key: str, value: Iterable[str]) -> list[str]:
    return _format_block("attr", [f"key: {_quote(key)}", *_format_block("value", value)])


def _format_block(name: str, body: Iterable[str]) -> list[str]:
    return [f"{name} {{", *(f"  {line}" for line in body), "}"]


def _quote(text: str) -> str:
    """A string in the text format, in ASCII."""
    pieces: list[str] = []
    for character in text:
        if character == " " and pieces and pieces[-1] == ":":
            pieces.append("\\040")
        elif character in _ESCAPES:
            pieces.append(_ESCAPES[character])
        elif ord(character) in _PRINTABLE and character not in _BRACES:
            pieces.append(character)
        else:
            pieces += [f"\\{byte:03o}" for byte in character.encode("utf-8", "surrogateescape")]
    return '"' + "".join(pieces) + '"'

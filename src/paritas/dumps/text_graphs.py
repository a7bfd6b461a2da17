"""Two graphs in words, as torchair writes them beside its tensors: as captured, and as fused.

The syntax is protobuf's text format, the fields those of Ascend's graphs. Tools find the files of
an operator by the attribute `_fx_tensor_name` of what it gives, and what was fused into it by
`_datadump_original_op_names`.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from paritas.dumps.msit_layout import call_name

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

__all__ = ["FusedFacts", "NodeFacts", "ValueFacts", "optimized_graph_text", "original_graph_text"]

_DTYPES = {
    "float32": "DT_FLOAT",
    "float16": "DT_FLOAT16",
    "float64": "DT_DOUBLE",
    "bfloat16": "DT_BF16",
    "int8": "DT_INT8",
    "int16": "DT_INT16",
    "int32": "DT_INT32",
    "int64": "DT_INT64",
    "uint8": "DT_UINT8",
    "uint16": "DT_UINT16",
    "uint32": "DT_UINT32",
    "uint64": "DT_UINT64",
    "bool": "DT_BOOL",
    "complex32": "DT_COMPLEX32",
    "complex64": "DT_COMPLEX64",
    "complex128": "DT_COMPLEX128",
    "float8_e4m3fn": "DT_FLOAT8_E4M3FN",
    "float8_e5m2": "DT_FLOAT8_E5M2",
    "float8_e8m0fnu": "DT_FLOAT8_E8M0",
}
_ESCAPES = {'"': '\\"', "\\": "\\\\", "\n": "\\n", "\r": "\\r", "\t": "\\t"}
_PRINTABLE = range(0x20, 0x7F)
# Well known readers of these files look for these in a line before they look for its quotes.
_BRACES = frozenset("{}")


@dataclasses.dataclass(frozen=True)
class ValueFacts:
    """One result of an operator.

    Attributes:
        dtype: torch's name without `torch.`; "" for what is no tensor, or not known.
        shape: -1 where it varies.
    """

    dtype: str = ""
    shape: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True)
class NodeFacts:
    """An operator of a graph.

    Attributes:
        name: of the node.
        op: what it calls, for example `aten.mm.default`.
        inputs: where its arguments come from, `mm:0` for the first result of `mm`.
        outputs: its results, in order.
        module: path of the module it belongs to.
        line: the user's line.
        call: what the files of its value are named after in a dump of the captured graph; made of
            name and operator, unless it is given.
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
        node: what the buffer is named after in the dump.
        buffer: its name in the fused code.
        kernel: what wrote it.
        originals: the nodes of the captured graph that it stands for, in order.
    """

    node: NodeFacts
    buffer: str
    kernel: str
    originals: tuple[str, ...]


def original_graph_text(name: str, nodes: Sequence[NodeFacts]) -> str:
    """The graph as it was captured."""
    return _text(name, ((node, _origin(node)) for node in nodes))


def optimized_graph_text(name: str, buffers: Sequence[FusedFacts]) -> str:
    """The graph as it was fused: an operator for each buffer."""
    return _text(name, ((one.node, (*_origin(one.node), *_fusion(one))) for one in buffers))


def _origin(node: NodeFacts) -> Iterator[str]:
    for key, value in (("module", node.module), ("line", node.line)):
        if value:
            yield from _attribute(key, [f"s: {_quoted(value)}"])


def _fusion(one: FusedFacts) -> Iterator[str]:
    yield from _attribute("buffer", [f"s: {_quoted(one.buffer)}"])
    yield from _attribute("kernel", [f"s: {_quoted(one.kernel)}"])
    names = [f"s: {_quoted(name)}" for name in one.originals]
    listed = _block("list", [*names, "val_type: VT_LIST_STRING"])
    yield from _attribute("_datadump_original_op_names", listed)


def _text(name: str, nodes: Iterable[tuple[NodeFacts, Iterable[str]]]) -> str:
    lines = [f"name: {_quoted(name)}"]
    for node, attributes in nodes:
        lines += _block("op", [*_head(node), *attributes, *_outputs(node)])
    return "\n".join(lines) + "\n"


def _head(node: NodeFacts) -> Iterator[str]:
    yield f"name: {_quoted(node.name)}"
    yield f"type: {_quoted(node.op)}"
    for source in node.inputs:
        yield f"input: {_quoted(source)}"


def _outputs(node: NodeFacts) -> Iterator[str]:
    for position, value in enumerate(node.outputs):
        stem = f"{node.call or call_name(node.name, node.op)}.OUTPUT.{position}"
        body = [
            f"dtype: {_DTYPES.get(value.dtype, 'DT_UNDEFINED')}",
            *_block("shape", [f"dim: {size}" for size in value.shape]),
            'layout: "ND"',
            *_attribute("_fx_tensor_name", [f"s: {_quoted(stem)}"]),
        ]
        if value.dtype:
            meaning = f"torch.{value.dtype} of {list(value.shape)}"
            body += _attribute("_meta", [f"s: {_quoted(meaning)}"])
        yield from _block("output_desc", body)


def _attribute(key: str, value: Iterable[str]) -> list[str]:
    return _block("attr", [f"key: {_quoted(key)}", *_block("value", value)])


def _block(name: str, body: Iterable[str]) -> list[str]:
    return [f"{name} {{", *(f"  {line}" for line in body), "}"]


def _quoted(text: str) -> str:
    """A string as the format wants it, in ASCII."""
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

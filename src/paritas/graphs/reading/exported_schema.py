"""What stands in the JSON of an exported program, as far as it is needed.

Fields that are not named here are passed over: torch adds some with each minor version. What an
argument is (`{"as_int": 8}`) is left as it stands, for `exported_arguments` to tell.
"""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec

from paritas.errors import UsageError

__all__ = ["KNOWN_MAJOR", "GraphPart", "Node", "Payloads", "Program", "TensorMeta", "decode"]

# Torch counts it up with every breaking change: 8 from torch 2.7 to 2.13.
KNOWN_MAJOR = 8

Union = dict[str, Any]
T = TypeVar("T")


class TensorMeta(msgspec.Struct, frozen=True):
    """What is known of a tensor."""

    dtype: int
    sizes: list[Union]
    requires_grad: bool = False
    strides: list[Union] = []
    storage_offset: Union = {}
    layout: int = 7


class NamedArgument(msgspec.Struct, frozen=True):
    """An argument; `kind` is 1 by position, 2 by name."""

    name: str
    arg: Union
    kind: int | None = None


class Node(msgspec.Struct, frozen=True):
    """A call."""

    target: str
    inputs: list[NamedArgument]
    outputs: list[Union]
    metadata: dict[str, str] = {}
    name: str | None = None
    is_hop_single_tensor_return: bool | None = None


class GraphPart(msgspec.Struct, frozen=True):
    """A graph, or one inside an argument of a higher-order operator."""

    inputs: list[Union]
    outputs: list[Union]
    nodes: list[Node]
    tensor_values: dict[str, TensorMeta]
    sym_int_values: dict[str, Union] = {}
    sym_bool_values: dict[str, Union] = {}
    sym_float_values: dict[str, Union] = {}


class Signature(msgspec.Struct, frozen=True):
    """What the inputs are."""

    input_specs: list[Union]


class GraphModule(msgspec.Struct, frozen=True):
    """The graph with its signature."""

    graph: GraphPart
    signature: Signature


class Range(msgspec.Struct, frozen=True):
    """Between what a symbol lies."""

    min_val: int | None = None
    max_val: int | None = None


class SchemaVersion(msgspec.Struct, frozen=True):
    """Of this description."""

    major: int
    minor: int


class Versioned(msgspec.Struct, frozen=True):
    """What can be read of any version."""

    schema_version: SchemaVersion
    torch_version: str = "<=2.4"


class Program(msgspec.Struct, frozen=True):
    """The whole."""

    graph_module: GraphModule
    schema_version: SchemaVersion
    range_constraints: dict[str, Range] = {}
    verifiers: list[str] = []
    torch_version: str = "<=2.4"


class Payload(msgspec.Struct, frozen=True):
    """Where the bytes of a tensor are."""

    path_name: str
    use_pickle: bool
    tensor_meta: TensorMeta | None = None


class Payloads(msgspec.Struct, frozen=True):
    """Those of all tensors, by name."""

    config: dict[str, Payload]


def decode(text: bytes, kind: type[T], told: str) -> T:
    """JSON as one of these.

    Raises:
        UsageError: it is not JSON, or not of this form.
    """
    try:
        return msgspec.json.decode(text, type=kind)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise UsageError(f"{told} cannot be understood: {error}") from None

"""The contents of an exported program's JSON: schema, symbolic sizes, arguments."""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import msgspec
import torch

from paritas.core.errors import UsageError
from paritas.sharding.graphs.calls import Kind, TensorValue

# --- The schema of an exported program's JSON, where it is needed ---------------------------------

# Other fields are ignored: torch adds some with each minor version. An argument (`{"as_int": 8}`)
# stays a dict here; `ExportedValues` reads it.

# Torch increments it with every breaking change: 8 from torch 2.7 to 2.13.
KNOWN_MAJOR = 8

Union = dict[str, Any]
T = TypeVar("T")


class TensorMeta(msgspec.Struct, frozen=True):
    """The description of a tensor."""

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


class ExportedSignature(msgspec.Struct, frozen=True):
    """What the inputs and outputs are."""

    input_specs: list[Union]
    output_specs: list[Union] = []


class GraphModule(msgspec.Struct, frozen=True):
    """The graph with its signature."""

    graph: GraphPart
    signature: ExportedSignature


class SymbolRange(msgspec.Struct, frozen=True):
    """The range of a symbol."""

    min_val: int | None = None
    max_val: int | None = None


class SchemaVersion(msgspec.Struct, frozen=True):
    """The version of this schema."""

    major: int
    minor: int


class Versioned(msgspec.Struct, frozen=True):
    """The part that can be read in any version."""

    schema_version: SchemaVersion
    torch_version: str = "<=2.4"


class ExportedProgramData(msgspec.Struct, frozen=True):
    """The whole program."""

    graph_module: GraphModule
    schema_version: SchemaVersion
    range_constraints: dict[str, SymbolRange] = {}
    torch_version: str = "<=2.4"


class WeightPayload(msgspec.Struct, frozen=True):
    """Where the bytes of a tensor are."""

    path_name: str
    use_pickle: bool
    tensor_meta: TensorMeta | None = None


class WeightPayloads(msgspec.Struct, frozen=True):
    """The payloads of all tensors, by name."""

    config: dict[str, WeightPayload]


def decode(text: bytes, kind: type[T], where: str) -> T:
    """Decode JSON as one of these structs."""
    try:
        return msgspec.json.decode(text, type=kind)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise UsageError(f"{where} cannot be read: {error}") from None


# --- The numbers of symbolic sizes ----------------------------------------------------------------

# The program says which number each symbol had during export. Where it could not know (how many
# elements are not zero), a number inside the symbol's range is used. Expressions are stored as the
# text of a Python call, which is parsed here and never evaluated.

_LONGEST = 10_000
_LARGEST = 1 << 62
# Divisible by the usual numbers of ranks.
_GUESS = 8


class Unknown(Exception):  # noqa: N818  (not a failure: the call is reported as unsupported)
    """A value that the archive does not contain, or not in a known form."""


class Symbols:
    """The numbers that symbols stand for; `guessed` has those that are not known."""

    def __init__(self, ranges: Mapping[str, SymbolRange]) -> None:
        self._ranges = ranges
        self.guessed: dict[str, int] = {}

    def notes(self) -> tuple[str, ...]:
        """What was guessed, for people."""
        shown = ", ".join(f"{name} = {value}" for name, value in self.guessed.items())
        return (f"sizes that depend on values are guessed: {shown}",) if shown else ()

    def number(self, archived: Mapping[str, Any]) -> int | float | bool:
        """A `SymInt`, `SymFloat` or `SymBool` as the archive has it."""
        for key in ("as_int", "as_float", "as_bool"):
            if isinstance(archived.get(key), int | float):
                return archived[key]  # type: ignore[no-any-return]
        written = archived.get("as_expr")
        if not isinstance(written, Mapping):
            raise Unknown(f"a size is given as {archived!r:.80}")
        hint = written.get("hint")
        if isinstance(hint, Mapping) and hint:
            return self.number(hint)
        return self._evaluate_size(written.get("expr_str"))

    def size(self, archived: Mapping[str, Any]) -> int:
        """The length of a dimension."""
        length = self.number(archived)
        if type(length) is not int or not 0 <= length < _LARGEST:
            raise Unknown(f"a dimension has length {length!r:.40}")
        return length

    def _evaluate_size(self, text: Any) -> int | float | bool:
        if not isinstance(text, str) or len(text) > _LONGEST:
            raise Unknown(f"a size is given as {text!r:.80}")
        try:
            number = self._value(ast.parse(text, mode="eval").body)
        except (SyntaxError, ValueError, ArithmeticError, TypeError, IndexError, RecursionError):
            raise Unknown(f"a size is given as {text:.80}") from None
        if abs(number) >= _LARGEST:
            raise Unknown(f"a size is given as {text:.80}")
        return number

    def _value(self, node: ast.expr) -> int | float | bool:
        if isinstance(node, ast.Constant) and isinstance(node.value, int | float):
            return node.value
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            return -self._value(node.operand)
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
            raise TypeError
        name = node.func.id
        if name == "Symbol":
            symbol = node.args[0]
            if not isinstance(symbol, ast.Constant) or not isinstance(symbol.value, str):
                raise ValueError
            return self.guess(symbol.value)
        values = [self._value(operand) for operand in node.args]
        if name in {"Pow", "PowByNatural"} and (abs(values[0]) > _LARGEST or abs(values[1]) > 64):  # noqa: PLR2004
            raise ValueError
        if name not in _FUNCTIONS:
            raise ValueError(name)
        return _FUNCTIONS[name](*values)

    def guess(self, symbol: str) -> int:
        """A number inside the range of a symbol."""
        within = self._ranges.get(symbol, SymbolRange())
        low = within.min_val if within.min_val is not None else 0
        high = within.max_val if within.max_val is not None else _LARGEST
        self.guessed[symbol] = max(low, min(_GUESS, high))
        return self.guessed[symbol]


_FUNCTIONS: dict[str, Callable[..., int | float | bool]] = {
    "Integer": int,
    "Float": float,
    "Rational": operator.truediv,
    "Add": lambda *terms: sum(terms),
    "Mul": lambda *factors: math.prod(factors),
    "Pow": operator.pow,
    "PowByNatural": operator.pow,
    "FloorDiv": operator.floordiv,
    "CleanDiv": operator.floordiv,
    "IntTrueDiv": operator.truediv,
    "FloatTrueDiv": operator.truediv,
    "Mod": operator.mod,
    "PythonMod": operator.mod,
    "ModularIndexing": lambda base, by, modulus: base // by % modulus,
    "CeilToInt": math.ceil,
    "FloorToInt": math.floor,
    "TruncToInt": math.trunc,
    "ToFloat": float,
    "GreaterThan": operator.ge,
    "LessThan": operator.le,
    "StrictGreaterThan": operator.gt,
    "StrictLessThan": operator.lt,
    "Equality": operator.eq,
    "Unequality": operator.ne,
    "Max": max,
    "Min": min,
}


# --- The arguments of a node: tensors by name, everything else as values --------------------------

# By torch.export's numbers.
DTYPES = {
    1: torch.uint8,
    2: torch.int8,
    3: torch.int16,
    4: torch.int32,
    5: torch.int64,
    6: torch.float16,
    7: torch.float32,
    8: torch.float64,
    9: torch.complex32,
    10: torch.complex64,
    11: torch.complex128,
    12: torch.bool,
    13: torch.bfloat16,
    28: torch.uint16,
    29: torch.float8_e4m3fn,
    30: torch.float8_e5m2,
    31: torch.float8_e4m3fnuz,
    32: torch.float8_e5m2fnuz,
    33: torch.float8_e8m0fnu,
    34: torch.uint32,
    35: torch.uint64,
}
STRIDED = 7
_LAYOUTS = {
    1: torch.sparse_coo,
    2: torch.sparse_csr,
    3: torch.sparse_csc,
    4: torch.sparse_bsr,
    5: torch.sparse_bsc,
    STRIDED: torch.strided,
}
_MEMORY_FORMATS = {
    1: torch.contiguous_format,
    2: torch.channels_last,
    3: torch.channels_last_3d,
    4: torch.preserve_format,
}
_NOT_FINITE = {"Infinity": math.inf, "-Infinity": -math.inf, "NaN": math.nan}


def makes_gradients(dtype: torch.dtype, kind: Kind, *, stored: bool) -> bool:
    """Whether a gradient is checked for a tensor.

    Intermediates always have one, whatever the export says: a program exported for inference has
    none, and the backward passes of its operators would go unchecked.
    """
    if not (dtype.is_floating_point or dtype.is_complex):
        return False
    return kind == "intermediate" or (stored and kind in {"parameter", "input"})


class ExportedValues:
    """The values that the names of a graph stand for.

    Attributes:
        prefix: added to each name, so that a nested graph has its own names.
        kinds: of the inputs; everything else is computed.
        plain: inputs that are not tensors.
    """

    def __init__(self, part: GraphPart, symbols: Symbols, prefix: str = "") -> None:
        self._part = part
        self._symbols = symbols
        self._found: dict[str, TensorValue] = {}
        self.prefix = prefix
        self.kinds: dict[str, Kind] = {}
        self.plain: dict[str, Any] = {}

    def bind(self, name: str, value: TensorValue) -> None:
        """Let a name stand for a tensor of the enclosing graph."""
        self._found[name] = value

    def tensor(self, name: str) -> TensorValue:
        """The tensor with this name."""
        if name not in self._found:
            meta = self._part.tensor_values.get(name)
            if meta is None:
                raise Unknown(f"the tensor {name!r:.80} has no description")
            self._found[name] = self._describe_tensor(name, meta)
        return self._found[name]

    def _describe_tensor(self, name: str, meta: TensorMeta) -> TensorValue:
        dtype = DTYPES.get(meta.dtype)
        if dtype is None:
            raise Unknown(f"{name} has the unknown dtype number {meta.dtype}")
        if meta.layout != STRIDED:
            raise Unknown(f"{name} has layout {_LAYOUTS.get(meta.layout)}, not torch.strided")
        kind = self.kinds.get(name, "intermediate")
        shape = tuple(self._symbols.size(size) for size in meta.sizes)
        grad = makes_gradients(dtype, kind, stored=meta.requires_grad)
        return TensorValue(f"{self.prefix}{name}", shape, dtype, kind, grad)

    def argument(self, archived: Mapping[str, Any]) -> Any:
        """An argument as the operator receives it."""
        if len(archived) != 1:
            raise Unknown(f"an argument is given as {archived!r:.80}")
        ((kind, value),) = archived.items()
        read = _READERS.get(kind)
        if read is None:
            raise Unknown(f"an argument has the kind {kind.removeprefix('as_')!r:.40}")
        try:
            return read(self, value)
        except (TypeError, KeyError, ValueError, AttributeError, RuntimeError) as error:
            raise Unknown(f"an argument is given as {archived!r:.80}") from error

    def number(self, archived: Mapping[str, Any]) -> Any:
        """A number, or the number that a name stands for."""
        if "as_name" not in archived:
            return self._symbols.number(archived)
        name = archived["as_name"]
        if name in self.plain:
            return self.plain[name]
        part = self._part
        for symbol_values in (part.sym_int_values, part.sym_float_values, part.sym_bool_values):
            if name in symbol_values:
                return self._symbols.number(symbol_values[name])
        raise Unknown(f"the number {name!r:.80} has no value")


def _read_tensor(values: ExportedValues, archived: Mapping[str, Any]) -> TensorValue:
    return values.tensor(archived["name"])


def _read_tensors(values: ExportedValues, archived: list[Any]) -> list[Any]:
    return [_read_tensor(values, archived_tensor) for archived_tensor in archived]


def _read_optional(values: ExportedValues, archived: Mapping[str, Any]) -> TensorValue | None:
    return _read_tensor(values, archived["as_tensor"]) if "as_tensor" in archived else None


def _read_numbers(values: ExportedValues, archived: list[Any]) -> list[Any]:
    return [values.number(archived_number) for archived_number in archived]


def _float(_values: ExportedValues, archived: Any) -> float:
    # JSON has no literal for infinity and NaN.
    return _NOT_FINITE[archived] if isinstance(archived, str) else float(archived)


def _device(_values: ExportedValues, archived: Mapping[str, Any]) -> torch.device:
    index = archived.get("index")
    return (
        torch.device(archived["type"]) if index is None else torch.device(archived["type"], index)
    )


def _as_it_is(_values: ExportedValues, archived: Any) -> Any:
    return archived


_READERS: dict[str, Callable[[ExportedValues, Any], Any]] = {
    "as_none": lambda _values, _given: None,
    "as_tensor": _read_tensor,
    "as_tensors": _read_tensors,
    "as_optional_tensor": _read_optional,
    "as_optional_tensors": lambda values, archived: [
        _read_optional(values, optional_tensor) for optional_tensor in archived
    ],
    "as_nested_tensors": lambda values, archived: [
        _read_tensors(values, archived_tensors) for archived_tensors in archived
    ],
    "as_int": _as_it_is,
    "as_ints": _as_it_is,
    "as_int_lists": _as_it_is,
    "as_bool": _as_it_is,
    "as_bools": _as_it_is,
    "as_string": _as_it_is,
    "as_strings": _as_it_is,
    "as_float": _float,
    "as_floats": lambda values, archived: [
        _float(values, archived_float) for archived_float in archived
    ],
    "as_float_lists": lambda values, archived: [
        [_float(values, x) for x in archived_floats] for archived_floats in archived
    ],
    "as_complex": lambda values, archived: complex(
        _float(values, archived["real"]), _float(values, archived["imag"])
    ),
    "as_sym_int": lambda values, archived: values.number(archived),
    "as_sym_float": lambda values, archived: values.number(archived),
    "as_sym_bool": lambda values, archived: values.number(archived),
    "as_sym_ints": _read_numbers,
    "as_sym_floats": _read_numbers,
    "as_sym_bools": _read_numbers,
    "as_scalar_type": lambda _values, archived: DTYPES[archived],
    "as_memory_format": lambda _values, archived: _MEMORY_FORMATS[archived],
    "as_layout": lambda _values, archived: _LAYOUTS[archived],
    "as_device": _device,
    "as_string_to_argument": lambda values, archived: {
        key: values.argument(value) for key, value in archived.items()
    },
}

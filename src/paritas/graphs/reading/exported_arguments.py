"""The arguments of a node of an exported program: tensors by their names, all else as it is."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch

from paritas.graphs.calls import Kind, TensorValue
from paritas.graphs.reading.exported_symbols import Symbols, Unknown

if TYPE_CHECKING:
    from paritas.graphs.reading.exported_schema import GraphPart, TensorMeta

__all__ = ["DTYPES", "Values", "makes_gradients"]

# By the numbers that torch.export gives them.
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
    """Whether a gradient is asked of a tensor.

    An intermediate has one whatever the export says: exported in inference, it would have none, and
    the backward pass of its operators would go unchecked.
    """
    if not (dtype.is_floating_point or dtype.is_complex):
        return False
    return kind == "intermediate" or (stored and kind in {"parameter", "input"})


class Values:
    """What the names of a graph stand for.

    Attributes:
        prefix: before each name, so that a graph inside a graph has names of its own.
        kinds: of the inputs; everything else is computed.
        plain: inputs that are no tensors.
    """

    def __init__(self, part: GraphPart, symbols: Symbols, prefix: str = "") -> None:
        self._part = part
        self._symbols = symbols
        self._found: dict[str, TensorValue] = {}
        self.prefix = prefix
        self.kinds: dict[str, Kind] = {}
        self.plain: dict[str, Any] = {}

    def hand_on(self, name: str, value: TensorValue) -> None:
        """Let a name stand for a tensor of the graph around this one."""
        self._found[name] = value

    def tensor(self, name: str) -> TensorValue:
        """The tensor of a name.

        Raises:
            Unknown: there is none, or of a kind that is not known.
        """
        if name not in self._found:
            meta = self._part.tensor_values.get(name)
            if meta is None:
                raise Unknown(f"nothing is said of the tensor {name!r:.80}")
            self._found[name] = self._described(name, meta)
        return self._found[name]

    def _described(self, name: str, meta: TensorMeta) -> TensorValue:
        dtype = DTYPES.get(meta.dtype)
        if dtype is None:
            raise Unknown(f"the dtype of {name} has the unknown number {meta.dtype}")
        if meta.layout != STRIDED:
            raise Unknown(f"{name} is not strided but of layout {_LAYOUTS.get(meta.layout)}")
        kind = self.kinds.get(name, "intermediate")
        shape = tuple(self._symbols.size(size) for size in meta.sizes)
        grad = makes_gradients(dtype, kind, stored=meta.requires_grad)
        return TensorValue(f"{self.prefix}{name}", shape, dtype, kind, grad)

    def argument(self, given: Mapping[str, Any]) -> Any:
        """An argument as the operator is to be given it.

        Raises:
            Unknown: it is of a kind that is not known, or that only torch can make.
        """
        if len(given) != 1:
            raise Unknown(f"an argument is given as {given!r:.80}")
        ((kind, value),) = given.items()
        read = _READERS.get(kind)
        if read is None:
            raise Unknown(f"an argument is of the kind {kind.removeprefix('as_')!r:.40}")
        try:
            return read(self, value)
        except (TypeError, KeyError, ValueError, AttributeError, RuntimeError) as error:
            raise Unknown(f"an argument is given as {given!r:.80}") from error

    def number(self, given: Mapping[str, Any]) -> Any:
        """A number, or the name of one."""
        if "as_name" not in given:
            return self._symbols.number(given)
        name = given["as_name"]
        if name in self.plain:
            return self.plain[name]
        part = self._part
        for known in (part.sym_int_values, part.sym_float_values, part.sym_bool_values):
            if name in known:
                return self._symbols.number(known[name])
        raise Unknown(f"nothing is said of the number {name!r:.80}")


def _tensor(values: Values, given: Mapping[str, Any]) -> TensorValue:
    return values.tensor(given["name"])


def _tensors(values: Values, given: list[Any]) -> list[Any]:
    return [_tensor(values, one) for one in given]


def _optional(values: Values, given: Mapping[str, Any]) -> TensorValue | None:
    return _tensor(values, given["as_tensor"]) if "as_tensor" in given else None


def _numbers(values: Values, given: list[Any]) -> list[Any]:
    return [values.number(one) for one in given]


def _float(_values: Values, given: Any) -> float:
    # JSON has no word for what is not finite.
    return _NOT_FINITE[given] if isinstance(given, str) else float(given)


def _device(_values: Values, given: Mapping[str, Any]) -> torch.device:
    index = given.get("index")
    return torch.device(given["type"]) if index is None else torch.device(given["type"], index)


def _named(values: Values, given: Mapping[str, Any]) -> dict[str, Any]:
    return {key: values.argument(value) for key, value in given.items()}


def _as_it_is(_values: Values, given: Any) -> Any:
    return given


_READERS: dict[str, Callable[[Values, Any], Any]] = {
    "as_none": lambda _values, _given: None,
    "as_tensor": _tensor,
    "as_tensors": _tensors,
    "as_optional_tensor": _optional,
    "as_optional_tensors": lambda values, given: [_optional(values, one) for one in given],
    "as_nested_tensors": lambda values, given: [_tensors(values, one) for one in given],
    "as_int": _as_it_is,
    "as_ints": _as_it_is,
    "as_int_lists": _as_it_is,
    "as_bool": _as_it_is,
    "as_bools": _as_it_is,
    "as_string": _as_it_is,
    "as_strings": _as_it_is,
    "as_float": _float,
    "as_floats": lambda values, given: [_float(values, one) for one in given],
    "as_float_lists": lambda values, given: [[_float(values, x) for x in one] for one in given],
    "as_complex": lambda values, given: complex(
        _float(values, given["real"]), _float(values, given["imag"])
    ),
    "as_sym_int": lambda values, given: values.number(given),
    "as_sym_float": lambda values, given: values.number(given),
    "as_sym_bool": lambda values, given: values.number(given),
    "as_sym_ints": _numbers,
    "as_sym_floats": _numbers,
    "as_sym_bools": _numbers,
    "as_scalar_type": lambda _values, given: DTYPES[given],
    "as_memory_format": lambda _values, given: _MEMORY_FORMATS[given],
    "as_layout": lambda _values, given: _LAYOUTS[given],
    "as_device": _device,
    "as_string_to_argument": _named,
}

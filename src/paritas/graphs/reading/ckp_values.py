"""Tensors and plain values of a checkpoint."""

from __future__ import annotations

import math
import re
from typing import Any

import torch

from paritas.dumps.foreign.pickles import Call, Name, plain_text
from paritas.errors import UsageError
from paritas.graphs.calls import Kind, TensorValue, tensor_values
from paritas.graphs.reading.ckp_names import loaded_type
from paritas.graphs.reading.ckp_records import Record, record_of, text_of

__all__ = ["Values"]

_DEEPEST = 32
_MOST_DIMENSIONS = 64
_MOST_ELEMENTS = 1 << 62
_DTYPES: dict[str, torch.dtype] = {
    str(dtype): dtype
    for name in dir(torch)
    if isinstance(dtype := getattr(torch, name), torch.dtype)
}
_FORMATS = {
    name: getattr(torch, name)
    for name in ("contiguous_format", "preserve_format", "channels_last", "channels_last_3d")
}
_DEVICE = re.compile(r"[a-z]{1,20}(:\d{1,4})?")


class Values:
    """Turns descriptions into values, and gives every tensor one name throughout the graph.

    Args:
        most: how many parts the arguments of all nodes can have together. Parts may be shared, and
            so be far more than the file.

    Attributes:
        missing: what of the last arguments the file has no value of.
    """

    def __init__(self, most: int) -> None:
        self.missing: list[str] = []
        self._names: dict[int, str] = {}
        self._taken: set[str] = set()
        self._inputs: set[int] = set()
        self._collecting = False
        self._most = most
        self._parts = 0

    def inputs(self, tree: Any) -> list[TensorValue]:
        """The tensors that the graph is given; from then on they are known as such."""
        self._collecting = True
        found = list(tensor_values(self.arguments(tree)))
        self._collecting = False
        return found

    def arguments(self, tree: Any) -> Any:
        """The arguments of a node: tensors as `TensorValue`, all else as it is."""
        self.missing = []
        return self._value(tree, 0)

    def _value(self, value: Any, depth: int) -> Any:
        self._parts += 1
        if depth > _DEEPEST or self._parts > self._most:
            limits = f"more than {_DEEPEST} deep, or {self._most} parts in all"
            raise UsageError(f"its arguments are larger than any can be: {limits}")
        record = record_of(value)
        if record is not None:
            return self._object(record, depth)
        if isinstance(value, dict):
            return {self._key(key): self._value(item, depth + 1) for key, item in value.items()}
        if isinstance(value, list):
            return [self._value(item, depth + 1) for item in value]
        if isinstance(value, tuple):
            return tuple(self._value(item, depth + 1) for item in value)
        if isinstance(value, str):
            return text_of(value)
        return self._leaf(value, depth)

    def _key(self, key: Any) -> Any:
        return text_of(key) if isinstance(key, str) else key

    def _leaf(self, value: Any, depth: int) -> Any:
        match value:
            case Name(path=path) if path in _DTYPES:
                return _DTYPES[path]
            case Name(path=path) if (short := path.rpartition(".")[2]) in _FORMATS:
                return _FORMATS[short]
            case Call(what=Name(path="torch.Size"), arguments=(tuple(sizes),)):
                return self._value(sizes, depth + 1)
            case Call(what=Name(path="dill._dill._eval_repr")):
                return ...
            case Call(what=Name(path="torch.device"), arguments=(str(device), *index)):
                if _DEVICE.fullmatch(device):
                    return self._device(":".join([device, *map(str, index)]))
            case Call(what=what, arguments=(start, stop, step)) if loaded_type(what) == "slice":
                return slice(*(self._value(part, depth + 1) for part in (start, stop, step)))
            case Call() | Name():
                pass
            case _ if plain_text(value) is not None:
                return value
        self.missing.append(_words(value))
        return None

    def _device(self, text: str) -> torch.device | None:
        try:
            return torch.device(text)
        except RuntimeError:  # a kind of device that this build of torch does not know
            self.missing.append(f"the device {text!r}")
            return None

    def _object(self, record: Record, depth: int) -> Any:
        if record.kind in ("IRSubTensor", "IRFullTensor"):
            return self.tensor(record)
        if record.kind != "IRObject":
            raise UsageError(f"{record.words} stands among the arguments of a node")
        value = record["_value"]
        if isinstance(value, Call) and loaded_type(value.what) == "object":
            self.missing.append(f"`{record.text('name'):.60}`")
            return None
        return self._value(value, depth + 1)

    # --- tensors ----------------------------------------------------------------------------------

    def tensor(self, record: Record) -> TensorValue:
        """A tensor: what a node has of it, under the name of the whole."""
        whole = record
        if record.kind == "IRSubTensor":
            whole = record.record("_full_tensor", "IRFullTensor")
        dtype = whole["_dtype"]
        if not isinstance(dtype, Name) or dtype.path not in _DTYPES:
            raise whole.wrong("_dtype", dtype, "a dtype of torch is due")
        # A tensor without dimensions is written as one with a single element, and a flag.
        shape = () if whole.flag("_is_scalar_tensor") else _shape(record)
        return TensorValue(
            name=self._name(whole),
            shape=shape,
            dtype=_DTYPES[dtype.path],
            kind=self._kind(whole),
            requires_grad=whole.flag("_requires_grad"),
        )

    def _kind(self, whole: Record) -> Kind:
        if whole.flag("_is_attr") and not whole.flag("_is_grad"):
            return "parameter" if whole.flag("_requires_grad") else "buffer"
        if self._collecting:
            self._inputs.add(whole.number("_id"))
        return "input" if whole.number("_id") in self._inputs else "intermediate"

    def _name(self, whole: Record) -> str:
        number = whole.number("_id")
        if number not in self._names:
            name = whole.text("name")
            if name in self._taken:
                name = f"{name}_{number}"
            while name in self._taken:
                name += "_"
            self._taken.add(name)
            self._names[number] = name
        return self._names[number]


def _shape(record: Record) -> tuple[int, ...]:
    shape = record.items("_shape")
    if len(shape) > _MOST_DIMENSIONS or not all(type(size) is int and size >= 0 for size in shape):
        raise record.wrong("_shape", shape, "the lengths of dimensions are due")
    if math.prod(shape) > _MOST_ELEMENTS:
        raise UsageError(f"{record.words} has the shape {shape}: no tensor is so large")
    return shape


def _words(value: Any) -> str:
    if isinstance(value, Name):
        return f"`{value.path:.60}`"
    if isinstance(value, Call) and isinstance(value.what, Name):
        return f"what `{value.what.path:.60}` gives"
    return f"a {type(value).__name__}"

"""The contents of nnScaler graph checkpoints as inert data: allowed names, records, values."""

from __future__ import annotations

import math
import re
import sys
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from paritas.core.errors import UsageError
from paritas.formats.files.torch_files import Call, Name, plain_text
from paritas.sharding.graphs.calls import Kind, TensorValue, tensor_values

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

# --- The names that a graph checkpoint may contain ------------------------------------------------

# The pickle is parsed, never loaded: no name is looked up and nothing is called. A file with names
# that nnScaler does not write is damaged, from another version, or made to harm whoever unpickles
# it. It is refused.

_DIMOPS = "nnscaler.graph.function.dimops"
# Plain attribute objects: each is created without arguments, and then its attributes are set.
CLASSES = {
    "nnscaler.graph.graph.IRGraph",
    "nnscaler.graph.segment.IRSegment",
    *(f"{_DIMOPS}.{name}" for name in ("IRDimops", "OpAnno", "ShapeAnno", "DimAnno")),
    *(f"{_DIMOPS}.{name}" for name in ("DimopSplit", "TransformRule")),
    "nnscaler.graph.function.anchor.IRGraphAnchor",
    *(f"nnscaler.graph.function.conv.{name}" for name in ("IRPad", "IRConv2D", "IRConv3D")),
    "nnscaler.graph.function.pyfunc.IRPyFunc",
    *(f"nnscaler.ir.cten.{name}" for name in ("IRObject", "ValueTrack")),
    *(f"nnscaler.ir.operator.IR{name}Operation" for name in ("Fw", "Bp", "Data")),
    *(f"nnscaler.ir.tensor.{name}" for name in ("IRFullTensor", "IRSubTensor")),
    *(f"nnscaler.ir.tensor.{name}" for name in ("IndexMap", "ValueMap")),
}
_REDUCE_TYPE = f"{_DIMOPS}.DimAnno.ReduceType"
_DILL = "dill._dill"
_DILL_MAKERS = {
    f"{_DILL}.{name}"
    for name in ("_create_cell", "_create_code", "_create_function", "_create_namedtuple")
} | {f"{_DILL}._eval_repr", f"{_DILL}._load_type"}
_OTHERS = {
    _DILL, "builtins.getattr", "builtins.setattr", "collections.OrderedDict", "torch.Size",
    "torch.device",
}  # fmt: skip
# Referred to and never called: functions that make nodes, the namespaces of these functions, types
# in their signatures, dtypes, memory formats (under any module that imports torch, because pickle
# takes the first it finds) and module classes.
_REFERENCES = re.compile(
    r"nnscaler\.graph\.function\.(?:function|wrapnn)\.\w+"
    r"|nnscaler\.graph\.(?:function\.\w+|parser\.register)\.__dict__"
    r"|nnscaler\.graph\.function\.dimops\.TransformRule\.default_modifier"
    r"|typing\.\w+"
    r"|torch\.(?:float|bfloat|complex|u?int)\d+|torch\.float\d\w+|torch\.bool"
    r"|(?:\w+\.)*torch\.(?:contiguous_format|preserve_format|channels_last(?:_3d)?)"
    r"|torch\.nn(?:\.\w+)+"
)
_DOTTED = re.compile(r"[^\W\d]\w*(?:\.[^\W\d]\w*){1,30}")
_TYPES = {"object", "int", "float", "bool", "str", "tuple", "list", "dict", "slice", "NoneType"}
_LONGEST_NAME = 300
_VERSION = "the checkpoint is from another version; paritas reads those of nnScaler 0.9"


def loaded_type(value: Any) -> str:
    """The builtin type that dill's `_load_type` stands for; empty for anything else."""
    match value:
        case Call(what=Name(path="dill._dill._load_type"), arguments=(str(name),)):
            return name
    return ""


class NameGuard:
    """Refuses unexpected names and calls of a checkpoint; those of `modules` are allowed."""

    def __init__(self, modules: Iterable[str] = ()) -> None:
        self._prefixes = tuple(f"{module}." for module in modules)
        self._strangers: dict[str, int] = {}

    def see_name(self, name: Name, at: int) -> None:
        """Refuse a name that no graph has; remember one that may be a module class."""
        path = name.path
        if path in CLASSES or path in _DILL_MAKERS or path in _OTHERS or path == _REDUCE_TYPE:
            return
        if len(path) > _LONGEST_NAME or not _DOTTED.fullmatch(path):
            _refuse_name(path, at, "this is not a valid name")
        if _REFERENCES.fullmatch(path) or path.startswith(self._prefixes):
            return
        top = path.partition(".")[0]
        if top == "nnscaler":
            _refuse_name(path, at, _VERSION)
        if top == "dill":
            _refuse_name(
                path, at, "it is code or a class of the script itself; put the model in a module"
            )
        if top in sys.stdlib_module_names or top == "torch":
            _refuse_name(path, at, "nnScaler graphs do not contain it; do not unpickle this file")
        self._strangers.setdefault(path, at)

    def see_call(self, call: Call, at: int) -> None:
        """Refuse a call that graphs do not contain in exactly this form."""
        if isinstance(call.what, Name):
            if not _is_known(call.what.path, call.arguments):
                _refuse_name(call.what.path, at, f"it is called with {_brief_text(call.arguments)}")
        elif not _is_known_result(call):
            _refuse_name(
                _brief_text(call.what), at, f"it is called with {_brief_text(call.arguments)}"
            )

    def close(self, module_classes: Iterable[str]) -> None:
        """Refuse unknown names that are not module classes of the model."""
        classes = set(module_classes)
        for path, at in self._strangers.items():
            if path not in classes:
                module = path.rpartition(".")[0]
                hint = f"if it is yours, import its module (`--import {module}`)"
                _refuse_name(path, at, f"it is not a module class of the model; {hint}")


def _is_known(path: str, arguments: Any) -> bool:
    """Whether a call of a name occurs in graphs."""
    if path in CLASSES or path == "collections.OrderedDict":
        return bool(arguments == ())
    match path, arguments:
        case (
            ("nnscaler.graph.function.dimops.DimAnno.ReduceType", ("" | "+" | "^",))
            | ("torch.Size", (tuple(),))
            | ("torch.device", (str(),) | (str(), int()))
            | ("builtins.getattr", (Name("dill._dill"), "_setattr", Name("builtins.setattr")))
        ):
            return True
    return path in _DILL_MAKERS and _is_known_of_dill(path, arguments)


def _is_known_of_dill(path: str, arguments: Any) -> bool:
    """Whether a call of dill occurs in graphs, including the code of a split rule."""
    match path.removeprefix(f"{_DILL}."), arguments:
        case "_load_type", (str(kind),):
            return kind in _TYPES
        case "_create_namedtuple", (str(), tuple(fields), str()):
            return all(isinstance(field, str) for field in fields)
        case "_create_function", (Call(what=Name("dill._dill._create_code")), Name(scope), *_):
            return scope.endswith(".__dict__")
        case ("_eval_repr", ("Ellipsis",)) | ("_create_cell", (_,)) | ("_create_code", tuple()):
            return True
    return False


def _is_known_result(call: Call) -> bool:
    """Whether a call of another call's result occurs in graphs.

    That is an object of a builtin type, a named tuple, or dill filling a closure cell.
    """
    match call.what, call.arguments:
        case (
            (Call(what=Name("dill._dill._load_type"), arguments=("object",)), ())
            | (Call(what=Name("dill._dill._load_type"), arguments=("slice",)), (_, _, _))
            | (Call(what=Name("dill._dill._create_namedtuple")), tuple())
            | (
                Call(what=Name("builtins.getattr")),
                (Call(what=Name("dill._dill._create_cell")), "cell_contents", _),
            )
        ):
            return True
    return False


def _brief_text(value: Any) -> str:
    """A short text, even for a large or recursive value."""
    if isinstance(value, Name):
        return f"{value.path:.60}"
    if isinstance(value, str):
        return repr(value[:60])
    if isinstance(value, Call):
        return (
            f"the result of {_brief_text(value.what)}"
            if isinstance(value.what, Name)
            else "a result"
        )
    if isinstance(value, tuple):
        inner = ", ".join(
            "(...)" if isinstance(item, tuple) else _brief_text(item) for item in value[:3]
        )
        return f"({inner}{', ...' if len(value) > 3 else ''})"  # noqa: PLR2004
    return type(value).__name__


def _refuse_name(path: str, at: int, why: str) -> NoReturn:
    raise UsageError(f"it refers to `{path:.{_LONGEST_NAME}}` at byte {at}: {why}")


# --- The objects of a checkpoint as inert records: a class name and attributes --------------------

LONGEST_TEXT = 10_000


class CheckpointRecord:
    """One object: its class name and the attributes in the file."""

    def __init__(self, kind: str, identity: int, fields: Mapping[Any, Any]) -> None:
        self.kind = kind
        self.identity = identity
        self._fields = fields

    @property
    def words(self) -> str:
        """What to call it in a message."""
        named = (self._fields.get("name"), self._fields.get("_id"))
        parts = [self.kind, *(str(part)[:60] for part in named if isinstance(part, (str, int)))]
        return " ".join(parts)

    def get(self, name: str) -> Any:
        """An attribute; None if it is missing."""
        return self._fields.get(name)

    def __getitem__(self, name: str) -> Any:
        if name not in self._fields:
            raise UsageError(f"{self.words} has no `{name}`: {_VERSION}")
        return self._fields[name]

    def items(self, name: str) -> tuple[Any, ...]:
        """An attribute that must be a list or a tuple."""
        value = self[name]
        if not isinstance(value, (list, tuple)):
            raise self.wrong(name, value, "a list")
        return tuple(value)

    def mapping(self, name: str) -> dict[str, Any]:
        """An attribute that must be a dict with string keys."""
        value = self[name]
        if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
            raise self.wrong(name, value, "a dict with string keys")
        return dict(value)

    def text(self, name: str) -> str:
        """An attribute that must be a string."""
        value = text_of(self[name])
        if value is None:
            raise self.wrong(name, self[name], "a string")
        return value

    def number(self, name: str) -> int:
        """An attribute that must be an integer."""
        value = self[name]
        if type(value) is not int:
            raise self.wrong(name, value, "an integer")
        return value

    def flag(self, name: str) -> bool:
        """An attribute that must be True or False; False if it is missing."""
        value = self.get(name)
        if value is not None and not isinstance(value, bool):
            raise self.wrong(name, value, "True or False")
        return bool(value)

    def record(self, name: str, *kinds: str) -> CheckpointRecord:
        """An attribute that must be an object of one of these classes."""
        record = record_of(self[name])
        if record is None or record.kind not in kinds:
            raise self.wrong(name, self[name], " or ".join(kinds))
        return record

    def wrong(self, name: str, value: Any, expected: str) -> UsageError:
        """The error for an attribute with an unexpected value."""
        record = record_of(value)
        have = type(value).__name__ if record is None else record.kind
        return UsageError(
            f"`{name}` of {self.words} is {have}, expected {expected}: the file is damaged"
        )


def record_of(value: Any) -> CheckpointRecord | None:
    """The described object as a record; None if its class is not one of nnScaler's."""
    match value:
        case Call(what=Name(path=path), state=state) if path in CLASSES:
            fields = state if isinstance(state, dict) else {}
            return CheckpointRecord(path.rpartition(".")[2], id(value), fields)
    return None


def records_of(owner: CheckpointRecord, name: str, *kinds: str) -> Iterator[CheckpointRecord]:
    """The objects in a list attribute of an object."""
    for value in owner.items(name):
        record = record_of(value)
        if record is None or (kinds and record.kind not in kinds):
            raise owner.wrong(name, value, f"a list of {' or '.join(kinds) or 'nodes'}")
        yield record


def text_of(value: Any) -> str | None:
    """A string of plausible length; None for anything else."""
    if not isinstance(value, str):
        return None
    if len(value) > LONGEST_TEXT:
        raise UsageError(f"it has a string of {len(value)} characters; {LONGEST_TEXT} are allowed")
    return value


# --- Tensors and plain values of a checkpoint -----------------------------------------------------

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


class CheckpointValues:
    """Turns descriptions into values, and gives each tensor one name in the whole graph.

    Shared parts count each time, so a small file can describe very many: at most `most` are read.
    `missing` lists the last arguments without a value in the file.
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
        """The input tensors of the graph; later uses of them have kind `input`."""
        self._collecting = True
        tensors = list(tensor_values(self.arguments(tree)))
        self._collecting = False
        return tensors

    def arguments(self, tree: Any) -> Any:
        """The arguments of a node, with tensors as `TensorValue`."""
        self.missing = []
        return self._value(tree, 0)

    def _value(self, value: Any, depth: int) -> Any:
        self._parts += 1
        if depth > _DEEPEST or self._parts > self._most:
            raise UsageError(
                f"its arguments are nested more than {_DEEPEST} deep, or have more than "
                f"{self._most} parts in total"
            )
        record = record_of(value)
        if record is not None:
            return self._object(record, depth)
        if isinstance(value, dict):
            return {
                text_of(key) if isinstance(key, str) else key: self._value(item, depth + 1)
                for key, item in value.items()
            }
        if isinstance(value, list):
            return [self._value(item, depth + 1) for item in value]
        if isinstance(value, tuple):
            return tuple(self._value(item, depth + 1) for item in value)
        if isinstance(value, str):
            return text_of(value)
        return self._leaf(value, depth)

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
        self.missing.append(_kind_of_value(value))
        return None

    def _device(self, text: str) -> torch.device | None:
        try:
            return torch.device(text)
        except RuntimeError:  # a device type that this build of torch does not know
            self.missing.append(f"the device {text!r}")
            return None

    def _object(self, record: CheckpointRecord, depth: int) -> Any:
        if record.kind in ("IRSubTensor", "IRFullTensor"):
            return self.tensor(record)
        if record.kind != "IRObject":
            raise UsageError(f"{record.words} is an argument of a node, where it cannot be")
        value = record["_value"]
        if isinstance(value, Call) and loaded_type(value.what) == "object":
            self.missing.append(f"`{record.text('name'):.60}`")
            return None
        return self._value(value, depth + 1)

    # --- tensors ----------------------------------------------------------------------------------

    def tensor(self, record: CheckpointRecord) -> TensorValue:
        """A tensor with the shape the node sees and the name of the full tensor."""
        full_tensor = record
        if record.kind == "IRSubTensor":
            full_tensor = record.record("_full_tensor", "IRFullTensor")
        dtype = full_tensor["_dtype"]
        if not isinstance(dtype, Name) or dtype.path not in _DTYPES:
            raise full_tensor.wrong("_dtype", dtype, "a torch dtype")
        # A 0-d tensor is written as one with a single element, and a flag.
        shape = () if full_tensor.flag("_is_scalar_tensor") else _shape(record)
        return TensorValue(
            name=self._name(full_tensor),
            shape=shape,
            dtype=_DTYPES[dtype.path],
            kind=self._kind(full_tensor),
            requires_grad=full_tensor.flag("_requires_grad"),
        )

    def _kind(self, checkpoint_record: CheckpointRecord) -> Kind:
        if checkpoint_record.flag("_is_attr") and not checkpoint_record.flag("_is_grad"):
            return "parameter" if checkpoint_record.flag("_requires_grad") else "buffer"
        if self._collecting:
            self._inputs.add(checkpoint_record.number("_id"))
        return "input" if checkpoint_record.number("_id") in self._inputs else "intermediate"

    def _name(self, checkpoint_record: CheckpointRecord) -> str:
        number = checkpoint_record.number("_id")
        if number not in self._names:
            name = checkpoint_record.text("name")
            if name in self._taken:
                name = f"{name}_{number}"
            while name in self._taken:
                name += "_"
            self._taken.add(name)
            self._names[number] = name
        return self._names[number]


def _shape(record: CheckpointRecord) -> tuple[int, ...]:
    shape = record.items("_shape")
    if len(shape) > _MOST_DIMENSIONS or not all(type(size) is int and size >= 0 for size in shape):
        raise record.wrong("_shape", shape, "dimension lengths")
    if math.prod(shape) > _MOST_ELEMENTS:
        raise UsageError(f"{record.words} has the shape {shape}, which is too large for a tensor")
    return shape


def _kind_of_value(value: Any) -> str:
    if isinstance(value, Name):
        return f"`{value.path:.60}`"
    if isinstance(value, Call) and isinstance(value.what, Name):
        return f"the result of `{value.what.path:.60}`"
    return f"a {type(value).__name__}"

"""What a graph checkpoint may ask for: everything else is refused, by name.

The pickle is only followed, so that no name of it is ever looked up and nothing is called. The list
is here for the meaning: a file that asks for more than nnScaler writes is damaged, of another
version, or made to harm whoever unpickles it, and none of these is a graph to be verified.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable
from typing import Any, NoReturn

from paritas.dumps.foreign.pickles import Call, Name
from paritas.errors import UsageError

__all__ = ["CLASSES", "Gate", "loaded_type"]

_DIMOPS = "nnscaler.graph.function.dimops"
# Plain attribute objects: each is made without arguments, and then told its attributes.
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
# Written down as references and never called: functions that make nodes, the namespaces of such
# functions, types in their signatures, dtypes, memory formats (of whatever module pickle found to
# have torch first) and the classes of modules.
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
_VERSION = "a checkpoint of another version: nnScaler 0.9 is known"


def loaded_type(value: Any) -> str:
    """The builtin type that dill's way to name one stands for; empty for anything else."""
    match value:
        case Call(what=Name(path="dill._dill._load_type"), arguments=(str(name),)):
            return name
    return ""


class Gate:
    """Sees every name and call of a checkpoint.

    Args:
        modules: those of the user, the names of which may be referred to as well.
    """

    def __init__(self, modules: Iterable[str] = ()) -> None:
        self._prefixes = tuple(f"{module}." for module in modules)
        self._strangers: dict[str, int] = {}

    def see_name(self, name: Name, at: int) -> None:
        """Refuse what no graph has; remember what only a module's class can be."""
        path = name.path
        if path in CLASSES or path in _DILL_MAKERS or path in _OTHERS or path == _REDUCE_TYPE:
            return
        if len(path) > _LONGEST_NAME or not _DOTTED.fullmatch(path):
            _refuse(path, at, "it is no name")
        if _REFERENCES.fullmatch(path) or path.startswith(self._prefixes):
            return
        top = path.partition(".")[0]
        if top == "nnscaler":
            _refuse(path, at, _VERSION)
        if top == "dill":
            _refuse(path, at, "code or a class of the script itself: keep the model in a module")
        if top in sys.stdlib_module_names or top == "torch":
            _refuse(path, at, "no graph of nnScaler has it: do not unpickle this file")
        self._strangers.setdefault(path, at)

    def see_call(self, call: Call, at: int) -> None:
        """Refuse any call that graphs do not have in this very form."""
        if isinstance(call.what, Name):
            if not _is_known(call.what.path, call.arguments):
                _refuse(call.what.path, at, f"called with {_brief(call.arguments)}")
        elif not _is_known_result(call):
            _refuse(_brief(call.what), at, f"called with {_brief(call.arguments)}")

    def close(self, module_classes: Iterable[str]) -> None:
        """Refuse names that are not known and are no class of a module of the model."""
        classes = set(module_classes)
        for path, at in self._strangers.items():
            if path not in classes:
                module = path.rpartition(".")[0]
                hint = f"if it is yours, name its module (`--import {module}`)"
                _refuse(path, at, f"no class of a module of the model, and unknown: {hint}")


def _is_known(path: str, arguments: Any) -> bool:
    """Whether a call of a name is one that graphs have."""
    if path in CLASSES or path == "collections.OrderedDict":
        return bool(arguments == ())
    match path, arguments:
        case "nnscaler.graph.function.dimops.DimAnno.ReduceType", ("" | "+" | "^",):
            known = True
        case "torch.Size", (tuple(),):
            known = True
        case "torch.device", (str(),) | (str(), int()):
            known = True
        case "builtins.getattr", (Name("dill._dill"), "_setattr", Name("builtins.setattr")):
            known = True
        case _:
            known = path in _DILL_MAKERS and _is_known_of_dill(path, arguments)
    return known


def _is_known_of_dill(path: str, arguments: Any) -> bool:
    """Whether dill is asked for something that graphs have. Code of a rule is one such thing."""
    match path.removeprefix(f"{_DILL}."), arguments:
        case "_load_type", (str(kind),):
            known = kind in _TYPES
        case "_eval_repr", ("Ellipsis",):
            known = True
        case "_create_namedtuple", (str(), tuple(fields), str()):
            known = all(isinstance(field, str) for field in fields)
        case ("_create_cell", (_,)) | ("_create_code", tuple()):
            known = True
        case "_create_function", (Call(what=Name("dill._dill._create_code")), Name(scope), *_):
            known = scope.endswith(".__dict__")
        case _:
            known = False
    return known


def _is_known_result(call: Call) -> bool:
    """Whether a call of what a call gave is one that graphs have.

    That is an object of a builtin type, a named tuple, or a cell of a closure that dill fills.
    """
    match call.what, call.arguments:
        case Call(what=Name(path="dill._dill._load_type"), arguments=("object",)), ():
            return True
        case Call(what=Name(path="dill._dill._load_type"), arguments=("slice",)), (_, _, _):
            return True
        case Call(what=Name(path="dill._dill._create_namedtuple")), tuple():
            return True
        case (
            Call(what=Name(path="builtins.getattr")),
            (Call(what=Name(path="dill._dill._create_cell")), "cell_contents", _),
        ):
            return True
    return False


def _brief(value: Any) -> str:
    """A few words that are not longer for a large or self-containing value."""
    if isinstance(value, Name):
        return f"{value.path:.60}"
    if isinstance(value, str):
        return repr(value[:60])
    if isinstance(value, Call):
        return f"the result of {_brief(value.what)}" if isinstance(value.what, Name) else "a result"
    if isinstance(value, tuple):
        inner = ", ".join(
            "(...)" if isinstance(item, tuple) else _brief(item) for item in value[:3]
        )
        return f"({inner}{', ...' if len(value) > 3 else ''})"  # noqa: PLR2004
    return type(value).__name__


def _refuse(path: str, at: int, why: str) -> NoReturn:
    raise UsageError(f"it asks for `{path:.{_LONGEST_NAME}}` at byte {at}: {why}")

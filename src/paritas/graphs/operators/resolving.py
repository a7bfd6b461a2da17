"""From the name that a graph gives an operator to the function, without trusting the graph.

A file may name anything: `os.system`, `torch.load`, `torch.ops.aten.from_file`. What is run is what
the graph in memory holds, torch's own tensor operators, nnScaler's functions as paritas wrote them,
and functions of modules that the user, not the graph, asked to import. No name is imported because
a graph has it.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import operator
import sys
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch

from paritas._torch.named_operators import operator_named
from paritas.errors import UsageError
from paritas.graphs.operators.values import CallValues
from paritas.partition.configuration import nnscaler_functions
from paritas.partition.library import known
from paritas.partition.library.registry import name_of, shipped

if TYPE_CHECKING:
    from paritas.graphs.calls import GraphCall

__all__ = ["Subject", "function_of", "import_modules", "is_known_by_name", "subject_of"]

# Where torch keeps tensor operators that people call; what else lies there is refused by name.
_HOMES: dict[str, Any] = {
    "torch": torch,
    "torch.Tensor": torch.Tensor,
    "torch.nn.functional": torch.nn.functional,
    "torch.special": torch.special,
    "torch.linalg": torch.linalg,
    "torch.fft": torch.fft,
}
_NNSCALER = (
    "nnscaler.runtime.function.function.",
    "nnscaler.runtime.function.",
    "nnscaler.graph.function.wrapnn.",
)
_SUBSCRIPT = "nnscaler.runtime.function.fullslice"
# Operators that draw random numbers, and are programs' own all the same: they touch nothing but
# torch's generator, which a check sets back.
_DRAWING = frozenset(
    """
    aten.alpha_dropout.default aten.bernoulli.default aten.bernoulli.p aten.dropout.default
    aten.feature_dropout.default aten.native_dropout.default aten.rrelu.default
    """.split()  # noqa: SIM905
)
_DRAWING_NAMES = frozenset({"dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout"})
# Beside those that share their name with an operator of aten: functions of torch that are written
# in Python out of such operators, and methods that only convert. Each takes tensors and numbers,
# and gives tensors.
_FURTHER = frozenset(
    """
    adaptive_max_pool2d adjoint bfloat16 bool contiguous double float half hardsigmoid int
    interpolate long normalize pixel_unshuffle type type_as unsafe_chunk softmin logsigmoid
    """.split()  # noqa: SIM905
)
# Python's operators on tensors, and the rule that each goes by.
_PYTHON = {
    "add": "torch.add",
    "iadd": "torch.add",
    "sub": "torch.sub",
    "isub": "torch.sub",
    "mul": "torch.mul",
    "imul": "torch.mul",
    "truediv": "torch.true_divide",
    "itruediv": "torch.true_divide",
    "floordiv": "torch.floor_divide",
    "mod": "torch.remainder",
    "pow": "torch.pow",
    "neg": "torch.neg",
    "pos": "torch.positive",
    "abs": "torch.abs",
    "matmul": "torch.matmul",
    "and_": "torch.bitwise_and",
    "or_": "torch.bitwise_or",
    "xor": "torch.bitwise_xor",
    "invert": "torch.bitwise_not",
    "eq": "torch.eq",
    "ne": "torch.ne",
    "lt": "torch.lt",
    "le": "torch.le",
    "gt": "torch.gt",
    "ge": "torch.ge",
    "getitem": "torch.Tensor.__getitem__",
}
# The same operator of aten and of torch, in the words of the one that the library has.
_ALIASES = {
    "aten.adaptive_avg_pool1d": "torch.nn.functional.adaptive_avg_pool1d",
    "aten.adaptive_avg_pool2d": "torch.nn.functional.adaptive_avg_pool2d",
    "aten._adaptive_avg_pool2d": "torch.nn.functional.adaptive_avg_pool2d",
    "aten.adaptive_avg_pool3d": "torch.nn.functional.adaptive_avg_pool3d",
    "aten.contiguous": "torch.Tensor.contiguous",
    "aten.to": "torch.Tensor.to",
    "aten.type_as": "torch.Tensor.type_as",
    "aten.expand_as": "torch.Tensor.expand_as",
    "aten.swapaxes": "torch.swapaxes",
    "aten.one_hot": "torch.nn.functional.one_hot",
    "aten.log_sigmoid": "torch.nn.functional.logsigmoid",
    "aten.pixel_unshuffle": "torch.pixel_unshuffle",
    "aten.concat": "torch.concat",
    "aten.lift_fresh_copy": "aten.clone",
}


def _dropout_and_mask(
    tensor: torch.Tensor,
    p: float,
    train: bool | None,  # noqa: FBT001  (aten's own)
) -> tuple[torch.Tensor, torch.Tensor]:
    """What `aten.native_dropout` means, with its draw where a rank can be given its part of it."""
    if train is False:
        return tensor.clone(), torch.ones_like(tensor, dtype=torch.bool)
    kept = torch.empty_like(tensor).bernoulli_(1 - p)
    return tensor * kept * (1 / (1 - p) if p < 1 else 0.0), kept.bool()


# Run in place of operators that cannot be run on parts of a tensor, rank by rank.
_SAME_MEANING: dict[str, Callable[..., Any]] = {
    "aten.detach_": torch.detach,
    "torch.Tensor.detach_": torch.detach,
    "aten.native_dropout": _dropout_and_mask,
}


@dataclasses.dataclass(frozen=True)
class Subject:
    """What is run for a call, and the name by which rules and fitting values are looked up.

    Attributes:
        name: the operator in the library's spelling.
        args: of the call, with what a subscript has in its brackets one by one.
    """

    name: str
    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    def spread(self, values: CallValues) -> CallValues:
        """Recorded values in the order of these arguments."""
        if self.function is not nnscaler_functions.fullslice or len(values.args) == len(self.args):
            return values
        return CallValues(_spread(values.args), values.kwargs)


def _spread(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """`x, (a, b)` as `x, a, b`."""
    inside = args[1] if isinstance(args[1], tuple) else (args[1],)
    return args[0], *inside


def subject_of(call: GraphCall, imports: Sequence[str] = ()) -> Subject:
    """What is run for a call.

    Raises:
        UsageError: paritas does not run this; the message says why.
    """
    function = function_of(call, imports)
    name = _library_name(call.operator, function)
    if function in {operator.getitem, torch.Tensor.__getitem__}:
        return Subject(_SUBSCRIPT, nnscaler_functions.fullslice, _spread(call.args), {})
    function = _SAME_MEANING.get(name_of(call.operator), function)
    # How far up a warning points: softmax takes it in one of its homes, and not in the others.
    kwargs = {key: value for key, value in call.kwargs.items() if key != "_stacklevel"}
    return Subject(name, function, call.args, kwargs)


def function_of(call: GraphCall, imports: Sequence[str] = ()) -> Callable[..., Any]:
    """The function that a call calls, with the call's own arguments.

    Args:
        imports: modules of the user's; they are imported, and their functions may be run.

    Raises:
        UsageError: paritas does not run what this name says; the message says why.
    """
    modules = import_modules(imports)
    if call.function is not None:
        return call.function
    name = call.operator.strip().replace("::", ".").removeprefix("torch.ops.")
    found = _of_the_user(name, modules) or _by_name(name)
    if found is None:
        raise UsageError(
            f"paritas does not run {call.operator[:100]}: it is none of torch's tensor operators "
            "that it knows; if it is yours, import it with --import MODULE"
        )
    return found


def is_known_by_name(call: GraphCall) -> bool:
    """Whether the operator's name says what is run, in every graph that has it.

    A function that a graph holds in memory may be another one of the same name the next time.
    """
    if call.function is None or getattr(call.function, "namespace", "") in {"aten", "prims"}:
        return True
    return _by_name(call.operator) is call.function


def import_modules(names: Sequence[str]) -> list[ModuleType]:
    """Import what the user asked for.

    Raises:
        UsageError: one cannot be imported.
    """
    return [_import(name) for name in names]


def _import(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except Exception as error:
        raise UsageError(
            f"--import {name}: importing it raised {type(error).__name__}: {error}"
        ) from error


def _of_the_user(name: str, modules: Sequence[ModuleType]) -> Callable[..., Any] | None:
    """A function that is defined in a module that the user named, or in a part of its package.

    A module that imports `os` has `os.system` too, and did not offer it to the graph.
    """
    for module in modules:
        if not name.startswith(f"{module.__name__}."):
            continue
        found: Any = module
        path = module.__name__
        for part in name.removeprefix(f"{module.__name__}.").split("."):
            path = f"{path}.{part}"
            if part.startswith("_"):
                found = None
            elif isinstance(found, ModuleType) and path in sys.modules:
                found = sys.modules[path]
            else:
                found = getattr(found, part, None) if _is_own(found, module) else None
        is_function = callable(found) and not isinstance(found, type)
        if is_function and _is_own(found, module):
            return found  # type: ignore[no-any-return]
    return None


def _is_own(found: Any, module: ModuleType) -> bool:
    """Whether something is the module, below it, or defined there."""
    if isinstance(found, ModuleType):
        home = found.__name__
    else:
        owner = getattr(found, "__self__", None)  # `MyFunction.apply` belongs to its class
        home = getattr(owner if isinstance(owner, type) else found, "__module__", None) or ""
    return home == module.__name__ or home.startswith(f"{module.__name__}.")


@functools.lru_cache(maxsize=4096)
def _by_name(name: str) -> Callable[..., Any] | None:
    """A function that is harmless by its name; None for every other."""
    if name.startswith(("aten.", "prims.")):
        return _of_aten(name)
    for start in _NNSCALER:
        rest = name.removeprefix(start)
        if rest != name and rest in nnscaler_functions.__all__:
            return getattr(nnscaler_functions, rest)  # type: ignore[no-any-return]
    home, _, last = name.rpartition(".")
    if home in {"operator", "_operator"} and last in _PYTHON:
        return getattr(operator, last)  # type: ignore[no-any-return]
    if home in _HOMES and _is_harmless(home, last):
        found = getattr(_HOMES[home], last, None)
        if callable(found) and not isinstance(found, type | ModuleType):
            return found  # type: ignore[no-any-return]
    return None


def _of_aten(name: str) -> Callable[..., Any] | None:
    parts = name.split(".")
    if len(parts) == 2:  # noqa: PLR2004  (without an overload)
        name = f"{name}.default"
    if name in _DRAWING:
        return functools.reduce(getattr, name.split("."), torch.ops)  # type: ignore[return-value]
    try:
        return operator_named(name).run
    except UsageError:
        return None


def _is_harmless(home: str, last: str) -> bool:
    """Whether a name of torch's is a tensor operator: the library knows it, or aten has it."""
    plain = last.removesuffix("_") if not last.startswith("_") else last
    if last == "__getitem__":
        return home == "torch.Tensor"
    if f"{home}.{plain}" in _own_names() or plain in _FURTHER or plain in _DRAWING_NAMES:
        return True
    return not last.startswith("_") and _is_of_aten(plain)


@functools.cache
def _own_names() -> frozenset[str]:
    """The library's names, without what users registered: that must not open a door."""
    return frozenset(name for name in shipped() if name.startswith("torch."))


def _is_of_aten(name: str) -> bool:
    """Whether aten has a pure operator of that name, by torch's own account of it."""
    packet = getattr(torch.ops.aten, name, None)
    if packet is None:
        return False
    return any(_of_aten(f"aten.{name}.{overload}") is not None for overload in packet.overloads())


def _library_name(written: str, function: Callable[..., Any]) -> str:
    """The spelling under which the library has a rule; what the graph says where it has none."""
    own = name_of(written)
    for start in _NNSCALER:
        if own.startswith(start):
            own = own.replace(_NNSCALER[0], _NNSCALER[1])
            break
    home, _, last = own.rpartition(".")
    spellings = [own, name_of(function), _ALIASES.get(own, "")]
    if home in {"operator", "_operator"}:
        spellings.append(_PYTHON.get(last, ""))
    # What writes to its first argument also gives it back, and is split as its twin that does not.
    spellings += [name[:-1] for name in spellings if name.endswith("_") and name[-2:] != "__"]
    names = set(known())
    return next((name for name in spellings if name in names), own)

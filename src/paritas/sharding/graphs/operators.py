"""The operator of a call: the function its name means, its result sizes, capped dimensions."""

from __future__ import annotations

import dataclasses
import functools
import math
import operator
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch

from paritas.core.errors import UsageError
from paritas.core.importing import ImportFailedError, import_module
from paritas.core.numerics.contents import leaves
from paritas.core.operators.calls import OperatorCall
from paritas.core.operators.catalogue import operator_names
from paritas.core.torch_private.global_state import quietly
from paritas.core.torch_private.named_operators import operator_named
from paritas.sharding.graphs.calls import (
    CallValues,
    TensorValue,
    items_in,
    map_items,
    on_meta,
    tensor_values,
)
from paritas.sharding.operators import nnscaler_functions
from paritas.sharding.operators.annotation import expand
from paritas.sharding.operators.library import known
from paritas.sharding.operators.library.registry import name_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from paritas.sharding.graphs.calls import GraphCall, GraphSettings
    from paritas.sharding.operators.annotation import Annotation, Expansion
    from paritas.sharding.operators.grammar import Dim


# --- The function that an operator name means; the graph is not trusted ---------------------------

# A file may name anything: `os.system`, `torch.load`, `torch.ops.aten.from_file`. Only these run:
# functions held by a graph in memory, torch's own tensor operators, paritas's versions of
# nnScaler's functions, and functions of modules that the user, not the graph, asked to import. A
# name in a graph is never imported.

# The modules with torch's public tensor operators; their other contents are refused by name.
_HOMES: dict[str, Any] = {
    "torch": torch,
    "torch.Tensor": torch.Tensor,
    "torch.nn.functional": torch.nn.functional,
    "torch.special": torch.special,
    "torch.linalg": torch.linalg,
    "torch.fft": torch.fft,
}
# Allowed operators that draw random numbers: they change only torch's generator, which a check
# restores.
_DRAWING = frozenset(
    """
    aten.alpha_dropout.default aten.bernoulli.default aten.bernoulli.p aten.dropout.default
    aten.feature_dropout.default aten.native_dropout.default aten.rrelu.default
    """.split()  # noqa: SIM905
)
_DRAWING_NAMES = frozenset({"dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout"})
# In addition to the names that aten has: torch functions written in Python with such operators, and
# methods that only convert. Each takes tensors and numbers, and returns tensors.
_FURTHER = frozenset(
    """
    adaptive_max_pool2d adjoint bfloat16 bool contiguous double float half hardsigmoid int
    interpolate long normalize pixel_unshuffle type type_as unsafe_chunk softmin logsigmoid
    """.split()  # noqa: SIM905
)
# Python's operators on tensors, and the operator whose rule applies.
_SAME_NAMES = (
    "add",
    "sub",
    "mul",
    "pow",
    "neg",
    "abs",
    "matmul",
    "eq",
    "ne",
    "lt",
    "le",
    "gt",
    "ge",
)
_PYTHON = {name: f"torch.{name}" for name in _SAME_NAMES} | {
    "iadd": "torch.add",
    "isub": "torch.sub",
    "imul": "torch.mul",
    "truediv": "torch.true_divide",
    "itruediv": "torch.true_divide",
    "floordiv": "torch.floor_divide",
    "mod": "torch.remainder",
    "pos": "torch.positive",
    "and_": "torch.bitwise_and",
    "or_": "torch.bitwise_or",
    "xor": "torch.bitwise_xor",
    "invert": "torch.bitwise_not",
    "getitem": "torch.Tensor.__getitem__",
}
# The same operator of aten and of torch: the second is the library's spelling.
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
    """`aten.native_dropout`, with a draw that can be divided among the ranks."""
    if train is False:
        return tensor.clone(), torch.ones_like(tensor, dtype=torch.bool)
    keep_mask = torch.empty_like(tensor).bernoulli_(1 - p)
    return tensor * keep_mask * (1 / (1 - p) if p < 1 else 0.0), keep_mask.bool()


# Replacements for operators that cannot run on parts of a tensor, rank by rank.
_SAME_MEANING: dict[str, Callable[..., Any]] = {
    "aten.detach_": torch.detach,
    "torch.Tensor.detach_": torch.detach,
    "aten.native_dropout": _dropout_and_mask,
}


@dataclasses.dataclass(frozen=True)
class GraphSubject:
    """What runs for a call, and the name for looking up rules and suitable values.

    Attributes:
        name: the operator in the library's spelling.
        args: of the call, with the items of a subscript as separate arguments.
    """

    name: str
    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    def spread(self, values: CallValues) -> CallValues:
        """Recorded values in the order of these arguments."""
        if self.function is not nnscaler_functions.fullslice or len(values.args) == len(self.args):
            return values
        return CallValues(nnscaler_functions.as_fullslice(values.args), values.kwargs)

    def meta_call(self) -> OperatorCall:
        """The call on meta tensors."""
        meta_arguments = on_meta(self.args, self.kwargs)
        return OperatorCall(
            self.function, meta_arguments.args, dict(meta_arguments.kwargs), name=self.name
        )


def subject_of(call: GraphCall, imports: Sequence[str] = ()) -> GraphSubject:
    """What runs for a call; the `UsageError` for anything else says why not."""
    function = function_of(call, imports)
    name = _library_name(call.operator, function)
    if function in {operator.getitem, torch.Tensor.__getitem__}:
        args = nnscaler_functions.as_fullslice(call.args)
        return GraphSubject(nnscaler_functions.SUBSCRIPT, nnscaler_functions.fullslice, args, {})
    function = _SAME_MEANING.get(name_of(call.operator), function)
    # A stack depth for warnings, which only some variants of softmax accept.
    kwargs = {key: value for key, value in call.kwargs.items() if key != "_stacklevel"}
    return GraphSubject(name, function, call.args, kwargs)


def function_of(call: GraphCall, imports: Sequence[str] = ()) -> Callable[..., Any]:
    """The function of a call, which takes the call's own arguments.

    Args:
        imports: your modules; they are imported, and their functions may run.
    """
    modules = import_modules(imports)
    if call.function is not None:
        return call.function
    name = call.operator.strip().replace("::", ".").removeprefix("torch.ops.")
    function = _find_users_function(name, modules) or _by_name(name)
    if function is None:
        raise UsageError(
            f"paritas does not run {call.operator[:100]}: it is not a known tensor operator of "
            "torch; if it is yours, import it with --import MODULE"
        )
    return function


def is_known_by_name(call: GraphCall) -> bool:
    """Whether the operator's name alone says what runs, in every graph.

    A function that a graph holds in memory may differ from another of the same name.
    """
    if call.function is None or getattr(call.function, "namespace", "") in {"aten", "prims"}:
        return True
    return _by_name(call.operator) is call.function


def import_modules(names: Sequence[str]) -> list[ModuleType]:
    """Import the user's modules."""
    modules: list[ModuleType] = []
    for name in names:
        try:
            modules.append(import_module(name))
        except ImportFailedError as error:
            cause = error.cause
            raise UsageError(
                f"--import {name}: importing it raised {type(cause).__name__}: {cause}"
            ) from cause
    return modules


def _find_users_function(name: str, modules: Sequence[ModuleType]) -> Callable[..., Any] | None:
    """A function defined in a module that the user named, or in its package.

    A module that imports `os` also has `os.system`, but does not offer it to the graph.
    """
    for module in modules:
        if not name.startswith(f"{module.__name__}."):
            continue
        resolved: Any = module
        path = module.__name__
        for part in name.removeprefix(f"{module.__name__}.").split("."):
            path = f"{path}.{part}"
            if part.startswith("_"):
                resolved = None
            elif isinstance(resolved, ModuleType) and path in sys.modules:
                resolved = sys.modules[path]
            else:
                resolved = getattr(resolved, part, None) if _is_own(resolved, module) else None
        is_function = callable(resolved) and not isinstance(resolved, type)
        if is_function and _is_own(resolved, module):
            return resolved  # type: ignore[no-any-return]
    return None


def _is_own(resolved: Any, module: ModuleType) -> bool:
    """Whether something is the module, a submodule, or defined there."""
    if isinstance(resolved, ModuleType):
        home = resolved.__name__
    else:
        owner = getattr(resolved, "__self__", None)  # `MyFunction.apply` belongs to its class
        home = getattr(owner if isinstance(owner, type) else resolved, "__module__", None) or ""
    return home == module.__name__ or home.startswith(f"{module.__name__}.")


@functools.lru_cache(maxsize=4096)
def _by_name(name: str) -> Callable[..., Any] | None:
    """A function whose name says it is harmless; None for any other."""
    if name.startswith(("aten.", "prims.")):
        return _find_aten(name)
    nnscaler_function = nnscaler_functions.our_function(name)
    if nnscaler_function is not None:
        return nnscaler_function
    home, _, last = name.rpartition(".")
    if home in {"operator", "_operator"} and last in _PYTHON:
        return getattr(operator, last)  # type: ignore[no-any-return]
    if home in _HOMES and _is_harmless(home, last):
        function = getattr(_HOMES[home], last, None)
        if callable(function) and not isinstance(function, type | ModuleType):
            return function  # type: ignore[no-any-return]
    return None


def _find_aten(name: str) -> Callable[..., Any] | None:
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
    """Whether a name of torch is a tensor operator: the library or aten has it."""
    plain = last.removesuffix("_") if not last.startswith("_") else last
    if last == "__getitem__":
        return home == "torch.Tensor"
    if f"{home}.{plain}" in _own_names() or plain in _FURTHER or plain in _DRAWING_NAMES:
        return True
    return not last.startswith("_") and _is_of_aten(plain)


@functools.cache
def _own_names() -> frozenset[str]:
    """The library's names without user registrations, which must not allow new functions."""
    return frozenset(name for name in operator_names() if name.startswith("torch."))


def _is_of_aten(name: str) -> bool:
    """Whether aten has a pure operator of that name, according to torch."""
    packet = getattr(torch.ops.aten, name, None)
    if packet is None:
        return False
    return any(_find_aten(f"aten.{name}.{overload}") is not None for overload in packet.overloads())


def _library_name(written: str, function: Callable[..., Any]) -> str:
    """The spelling for which the library has a rule; otherwise the graph's own."""
    written_name = nnscaler_functions.name_in_library(name_of(written))
    home, _, last = written_name.rpartition(".")
    spellings = [written_name, name_of(function), _ALIASES.get(written_name, "")]
    if home in {"operator", "_operator"}:
        spellings.append(_PYTHON.get(last, ""))
    # An in-place operator also returns its first argument, and is split like its functional twin.
    spellings += [name[:-1] for name in spellings if name.endswith("_") and name[-2:] != "__"]
    names = set(known())
    return next((name for name in spellings if name in names), written_name)


# --- The results of a call, predicted from shapes: nothing is computed ----------------------------

_UNITS = ("bytes", "KiB", "MiB", "GiB", "TiB")
_WIDEST = 16  # bytes of a complex number
# The position of the first of the two factors of a matrix product.
_FACTORS = {"linear": 0, "matmul": 0, "mm": 0, "bmm": 0, "addmm": 1, "baddbmm": 1}


@dataclasses.dataclass(frozen=True)
class PredictedResults:
    """The tensors that a call will return."""

    shapes: tuple[tuple[int, ...], ...]
    bytes: int


def predict_results(subject: GraphSubject) -> PredictedResults | None:
    """What a call will return; None if that depends on values, or torch cannot say."""
    kwargs = dict(subject.kwargs)
    if not any(True for _ in tensor_values((subject.args, kwargs))):
        kwargs["device"] = torch.device("meta")  # a factory function
    meta_arguments = on_meta(subject.args, kwargs)
    try:
        with quietly(), torch.no_grad(), torch.random.fork_rng(devices=[]):
            predicted = subject.function(*meta_arguments.args, **meta_arguments.kwargs)
    except Exception:  # noqa: BLE001  (no prediction: callers have another way)
        return None
    tensors = [leaf for _, leaf in leaves(predicted, "output") if isinstance(leaf, torch.Tensor)]
    shapes = tuple(tuple(tensor.shape) for tensor in tensors)
    return PredictedResults(
        shapes, sum(math.prod(tensor.shape) * tensor.dtype.itemsize for tensor in tensors)
    )


def most_bytes(subject: GraphSubject) -> int:
    """A quick upper bound of the result size: asking torch costs a second the first time.

    Every element of a result is made from one of each tensor, and numbers can repeat it as often as
    they say. Matrix products lose the dimension they sum over.
    """
    first = _FACTORS.get(subject.name.rpartition(".")[2])
    if first is not None:
        factors = subject.args[first : first + 2]
        match [value.shape for value in factors if isinstance(value, TensorValue)]:
            case [left, right] if left and right:
                rows = math.prod(left) // max(left[-1], 1)
                columns = math.prod(right) // max(min(right[-2:]), 1)
                return rows * columns * _WIDEST
    tree = (subject.args, dict(subject.kwargs))
    sizes = [math.prod(value.shape) for value in tensor_values(tree)]
    return math.prod(max(n, 1) for n in [*sizes, *numbers_in(tree)]) * _WIDEST


def numbers_in(tree: Any) -> Iterator[int]:
    """The absolute numbers among the arguments, such as repeat counts and padding."""
    for item in items_in(tree):
        if type(item) is int:
            yield abs(item)
        elif isinstance(item, float):
            yield math.ceil(abs(item)) if math.isfinite(item) else 1


def bytes_words(count: int) -> str:
    """`1.5 GiB`."""
    step = min((max(count, 1).bit_length() - 1) // 10, len(_UNITS) - 1)
    return f"{count / 1024**step:.4g} {_UNITS[step]}"


# --- Shorter dimensions for a call that would take too long ---------------------------------------

# Lengths that belong together shrink together: those with one name in the operator's rule, and
# sizes among its other arguments. The shorter call is tried on meta tensors; if it fails, the real
# shapes are kept and a note says so.

Lengths = dict[int, int]
# Operators whose integers are all lengths, and prefixes of keywords that are dimension indices.
_TAKE_SIZES = {"broadcast_to", "expand", "repeat", "reshape", "view", "_unsafe_view"}
_POSITIONS = ("dim", "axis", "start_dim", "end_dim")


def cap_lengths(
    subject: GraphSubject,
    outputs: tuple[TensorValue, ...],
    settings: GraphSettings,
    annotation: Annotation | None,
    *,
    declared: bool,
) -> tuple[GraphSubject, str]:
    """The call with no dimension longer than the cap, or unchanged, and a note about that.

    The note is empty if every dimension is already short enough.

    Args:
        annotation: says which lengths belong together.
        declared: whether the graph declares it. It then has to fit the shorter shapes too,
            including any lengths it has as numbers. An undeclared rule is looked up again for the
            new shapes.
    """
    cap = settings.cap
    assert cap is not None  # noqa: S101  (only called where one is set)
    values = list(tensor_values((subject.args, dict(subject.kwargs))))
    long = sorted({n for value in values for n in value.shape if n > cap}, reverse=True)
    if not long:
        return subject, ""
    before = predict_results(subject)
    expected = before.shapes if before is not None else tuple(out.shape for out in outputs)
    fixed = annotation if declared else None
    for lengths in _propose_lengths(subject, long, settings, annotation, declared=declared):
        if not any(new < old for old, new in lengths.items()):
            continue
        small = _with_lengths(subject, lengths, cap)
        if _has_similar_results(small, expected) and (
            fixed is None or _rule_still_fits(fixed, small)
        ):
            changed = [f"{old} -> {new}" for old, new in sorted(lengths.items()) if old != new]
            return small, f"capped: {', '.join(changed)}"
    return subject, f"not capped: it does not run with {', '.join(map(str, long))} cut to {cap}"


def _propose_lengths(
    subject: GraphSubject,
    long: list[int],
    settings: GraphSettings,
    annotation: Annotation | None,
    *,
    declared: bool,
) -> Iterator[Lengths]:
    """New lengths by old length: by the rule, by a common factor, and each on its own."""
    cap = settings.cap or 1
    step = math.lcm(*settings.ranks)
    if annotation is not None:
        by_rule = _shorten_by_rule(subject, annotation, cap, step, declared=declared)
        if by_rule:
            yield by_rule
    # Integers among the arguments that are not lengths but parts of one.
    items = items_in((subject.args, subject.kwargs))
    parts = {n for n in items if type(n) is int and cap < n < long[0]}
    together = sorted({*long, *parts}, reverse=True)
    common = _common_factor(together, cap)
    if common > 1:
        yield {length: length // common for length in together}
    yield {length: _shorter(length, cap, step, at) for at, length in enumerate(long)}
    yield {length: _shorter(length, cap, step, 0) for length in long}


def _shorter(length: int, cap: int, step: int, at: int) -> int:
    """A distinct length below the cap, divisible by the ranks if the real one is."""
    if length <= cap:
        return length
    if length % step == 0 and cap >= step:
        steps = cap // step
        return max(1, steps - at) * step
    return max(1, cap - at)


def _common_factor(long: list[int], cap: int) -> int:
    """The smallest number that divides all lengths and brings them down to the cap."""
    common = math.gcd(*long)
    need = math.ceil(long[0] / cap)
    return next((n for n in range(need, common + 1) if common % n == 0), 1)


def _shorten_by_rule(
    subject: GraphSubject, annotation: Annotation, cap: int, step: int, *, declared: bool
) -> Lengths:
    """New lengths for the rule's names; products follow from their factors."""
    try:
        expansion = expand(annotation.signature, subject.meta_call())
    except UsageError:
        return {}
    lengths_by_name = dict(expansion.lengths)
    if not declared:
        factors = [
            f for operand in expansion.operands for d in operand.dims or () for f in d.factors
        ]
        lengths_by_name |= {factor.name: int(factor.name) for factor in factors if factor.is_number}
    long = sorted({n for n in lengths_by_name.values() if n > cap}, reverse=True)
    sizes = {
        name: _shorter(length, cap, step, long.index(length)) if length in long else length
        for name, length in lengths_by_name.items()
    }
    _shrink_products(expansion, sizes, cap, step)
    lengths: Lengths = {}
    for dim, length in _measure_dims(expansion, lengths_by_name):
        new = _product_length(dim.factors, sizes)
        if length == 1 or new is None:
            continue
        if lengths.setdefault(length, new) != new:
            return {}  # one length with two meanings: an equal integer argument is ambiguous
    lengths = {lengths_by_name[name]: sizes[name] for name in sizes} | lengths
    return {old: new for old, new in lengths.items() if old > 1}


def _measure_dims(
    expansion: Expansion, lengths_by_name: Mapping[str, int]
) -> Iterator[tuple[Dim, int]]:
    """Every dimension and its length; those of results follow from their names."""
    for operand in expansion.inputs:
        for shape in operand.shapes:
            yield from zip(operand.dims or (), shape, strict=False)
    for operand in expansion.outputs:
        for dim in operand.dims or ():
            length = _product_length(dim.factors, lengths_by_name)
            if length is not None:
                yield dim, length


def _shrink_products(expansion: Expansion, sizes: dict[str, int], cap: int, step: int) -> None:
    """Halve the largest factor of a product until the product is below the cap."""
    for operand in expansion.inputs:
        for dim in operand.dims or ():
            names = [factor.name for factor in dim.factors if factor.name in sizes]
            while (
                len(dim.factors) > 1 and names and (_product_length(dim.factors, sizes) or 0) > cap
            ):
                largest = max(names, key=lambda name: sizes[name])
                if sizes[largest] % 2 or sizes[largest] // 2 < step:
                    break
                sizes[largest] //= 2


def _product_length(factors: tuple[Any, ...], sizes: Mapping[str, int]) -> int | None:
    """The length of a product; a numeric factor without another size counts as itself."""
    factor_lengths = [
        sizes.get(factor.name, int(factor.name) if factor.is_number else None) for factor in factors
    ]
    return (
        None
        if any(n is None for n in factor_lengths)
        else math.prod(n for n in factor_lengths if n is not None)
    )


def _with_lengths(subject: GraphSubject, lengths: Lengths, cap: int) -> GraphSubject:
    """The same call with these lengths in its tensors and other arguments."""

    def map_lengths(tree: Any, *, is_size: bool) -> Any:
        def change(item: Any) -> Any:
            if isinstance(item, TensorValue):
                shape = tuple(lengths.get(n, n) for n in item.shape)
                return dataclasses.replace(item, shape=shape)
            if isinstance(item, slice):
                return slice(*map(change, (item.start, item.stop, item.step)))
            # A small integer may be a dimension index as well as a length.
            is_length = type(item) is int and (is_size or item > cap)
            return lengths.get(item, item) if is_length else item

        return map_items(tree, change)

    sizes = subject.name.rpartition(".")[2] in _TAKE_SIZES
    args = tuple(map_lengths(value, is_size=sizes) for value in subject.args)
    kwargs = {
        key: map_lengths(value, is_size=sizes or not key.startswith(_POSITIONS))
        for key, value in subject.kwargs.items()
    }
    return dataclasses.replace(subject, args=args, kwargs=kwargs)


def _rule_still_fits(annotation: Annotation, small: GraphSubject) -> bool:
    """Whether the rule still fits: it may contain lengths as numbers."""
    try:
        annotation.check(small.meta_call())
    except UsageError:
        return False
    return True


def _has_similar_results(small: GraphSubject, expected: tuple[tuple[int, ...], ...]) -> bool:
    """Whether it runs and returns as many tensors with as many dimensions, none empty or longer."""
    predicted = predict_results(small)
    if predicted is None or len(predicted.shapes) != len(expected):
        return False
    return all(
        len(new) == len(old) and all(0 < n <= m or n == m for n, m in zip(new, old, strict=True))
        for new, old in zip(predicted.shapes, expected, strict=True)
    )

"""An operator with one argument changed: every way that its schema suggests.

What an argument is called and what type it has decides what is tried: another axis, a flag the
other way round, another usual eps, a mask one position off, an operand left out.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from paritas.core.diagnosis.calls import step_names
from paritas.core.diagnosis.patterns.steps import (
    with_altered,
    with_argument,
    with_arguments,
    with_factor,
    with_swapped,
)
from paritas.core.results.findings import PatternKind
from paritas.core.torch_private.operators import optional_tensors

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor

    from paritas.core.diagnosis.calls import Step


@dataclasses.dataclass(frozen=True)
class Variation:
    """A way in which one operator may be computed wrongly.

    Attributes:
        change: what it gives instead.
        fitted: how many numbers of it were fitted to the candidate.
        chosen: for how many elements it was chosen, by the candidate, where they come from.
    """

    kind: PatternKind
    sentence: str
    change: Callable[[Step], Any]
    fitted: int = 0
    chosen: int = 0


_ADDED = {
    **dict.fromkeys(("add", "sub", "rsub"), ("self", "other")),
    **dict.fromkeys(step_names("products added to a tensor") | {"addbmm"}, ("self",)),
}


def is_summand(operator: str, argument: str) -> bool:
    """Whether zeros in an argument mean that it is left out there."""
    return argument == "bias" or argument in _ADDED.get(operator, ())


def argument_variations(step: Step, *, tensors: bool = True) -> Iterator[Variation]:
    """The operator with one of its arguments changed, the most likely first.

    Args:
        tensors: its tensors, too; of others, only the classes that are wanted.
    """
    for name, value in step.values.items():
        if isinstance(value, bool):
            yield from _flag_variations(step, name, value=value)
        elif isinstance(value, str) or name == "rounding_mode":
            yield from _word_variations(name, value)
        elif name in _AXES:
            yield from _axis_variations(step, name, value)
        elif isinstance(value, float) or (name in NUMBERS and isinstance(value, int)):
            yield from _number_variations(step, name, float(value))
        elif isinstance(value, int):
            yield from _integer_variations(step, name, value)
        elif value is None and name in EPSILONS:
            yield from _eps_variations(name, torch.finfo(torch.float32).eps)
        elif isinstance(value, list | tuple):
            yield from _list_variations(step, name, list(value))
    target = step.values.get("target")
    if tensors:
        yield from _tensor_variations(step)
    elif isinstance(target, torch.Tensor) and not target.is_floating_point():
        yield from _index_variations("target", target, _size_of(step, "target"))
    numbers = [step.values.get(name) for name in ("alpha", "beta")]
    if None not in numbers and numbers[0] != numbers[1]:
        sentence = "alpha and beta are swapped"
        yield Variation(PatternKind.SWAPPED_OPERANDS, sentence, with_swapped("alpha", "beta"))


# --- Flags and words ------------------------------------------------------------------------------

_STATISTICS = "the statistics of the batch are used, not the running ones"
_RUNNING = "the running statistics are used, not those of the batch"
_NO_FLAGS = frozenset(
    {
        *("keepdim", "half_to_float", "pin_memory", "non_blocking", "sparse", "sorted", "stable"),
        *("compute_log_sumexp", "cudnn_enabled", "benchmark", "deterministic", "allow_tf32"),
        *("sparse_grad", "is_causal", "return_debug_mask"),
    }
)
_FLAG_KINDS = {
    "unbiased": PatternKind.OFF_BY_ONE,
    "accumulate": PatternKind.LOST_ACCUMULATION,
    "training": PatternKind.STATISTICS,
    "train": PatternKind.STATISTICS,
}
_WORDS: dict[str, tuple[str | None, ...]] = {
    "approximate": ("none", "tanh"),
    "rounding_mode": (None, "trunc", "floor"),
    "reduce": ("sum", "mean", "prod", "amax", "amin"),
    "side": ("left", "right"),
    "reduction": ("mean", "sum"),
}


def _flag_variations(step: Step, name: str, *, value: bool) -> Iterator[Variation]:
    if name in _NO_FLAGS:
        return
    kind = _FLAG_KINDS.get(name, PatternKind.ARGUMENT)
    saved = [step.values[key] for key in ("running_mean", "save_mean") if key in step.values]
    if kind is PatternKind.STATISTICS and any(
        statistic is None or not len(statistic) for statistic in saved
    ):
        return  # there are no others, and torch reads them all the same
    sentence = f"{name} is {not value} instead of {value}"
    if kind is PatternKind.STATISTICS:
        sentence = _RUNNING if value else _STATISTICS
    yield Variation(kind, sentence, with_argument(name, not value))


def _word_variations(name: str, value: str | None) -> Iterator[Variation]:
    is_reduction = name in ("reduce", "reduction")
    kind = PatternKind.WRONG_REDUCTION if is_reduction else PatternKind.ARGUMENT
    for other in _WORDS.get(name, ()):
        if other != value:
            sentence = f"{name} is {other!r} instead of {value!r}"
            yield Variation(kind, sentence, with_argument(name, other))


# --- Axes -----------------------------------------------------------------------------------------

# What they give along other axes is another order of the same values.
_REARRANGING = frozenset({"permute", "transpose", "unsqueeze", "squeeze"})
_AXES = frozenset({"dim", "dims", "axis", "dim0", "dim1", "dimension"})


def _axis_variations(step: Step, name: str, value: Any) -> Iterator[Variation]:
    first = next(
        (tensor for tensor in step.values.values() if isinstance(tensor, torch.Tensor)), None
    )
    if first is None or step.name in _REARRANGING:
        return
    rank = first.dim()
    chosen = [value] if isinstance(value, int) else list(value or ())
    if not all(isinstance(dim, int) and -rank <= dim < rank for dim in chosen):
        return
    chosen = [dim % rank for dim in chosen]
    index = step.values.get("index")
    # Indices must stay within the bounds: GPUs do not survive others.
    bound = int(index.max()) if isinstance(index, torch.Tensor) and index.numel() else -1
    others = [
        axis for axis in reversed(range(rank)) if axis not in chosen and bound < first.shape[axis]
    ]
    for position, other in itertools.product(range(len(chosen)), others):
        dims = [*chosen[:position], other, *chosen[position + 1 :]]
        sentence = f"along axis {other} instead of axis {chosen[position]}"
        dim_argument = other if isinstance(value, int) else dims
        yield Variation(PatternKind.WRONG_AXIS, sentence, with_argument(name, dim_argument))


# --- Numbers --------------------------------------------------------------------------------------

EPSILONS = frozenset({"eps", "epsilon"})
_USUAL_EPS = (0.0, 1e-12, 1e-10, 1e-8, 1e-7, 1e-6, 1e-5, 1e-4, 1e-3, 1e-2)
LARGEST_EPS = 1e-2
# Arguments that are numbers even if they are given as integers.
NUMBERS = frozenset(
    {
        *("alpha", "beta", "scale", "input_scale", "negative_slope", "exponent", "value", "ord"),
        *("lambd", "threshold", "min", "max", "min_val", "max_val", "other", "weight", "momentum"),
        *("delta", "p", "scale_factor", "correction", "lower", "upper"),
    }
)
FACTORS = frozenset({"alpha", "beta", "scale", "input_scale"})
# Functions whose form depends on what is called a factor elsewhere.
_SHAPES = frozenset({*("elu", "celu", "softplus", "elu_backward", "softplus_backward")})
# With these, other numbers give a factor or an offset, which have kinds of their own.
AFFINE = step_names("arithmetic") | {"rsub", "full", "fill", "full_like"}
# The dtypes in which a constant may have been rounded.
_NARROW = (torch.bfloat16, torch.float16)
# Scores that hide little.
NOT_HIDING = (0.0, -1.0, -2.0, -5.0, -10.0, -20.0, -50.0, -100.0)
_MASK_VALUES = (
    *(*NOT_HIDING, -1e3, -1e4, -1e9, -65504.0),
    *(-math.inf, float(torch.finfo(torch.float32).min)),
)


def _number_variations(step: Step, name: str, value: float) -> Iterator[Variation]:
    small = step.name == "add" and name == "other" and 0 < value <= LARGEST_EPS
    if name in EPSILONS or small:
        yield from _eps_variations(name, value)
        return
    if name == "correction":
        for less in (0, 1, 2):
            if less != value:
                sentence = f"the variance is divided by n - {less} instead of n - {value:g}"
                sentence = sentence.replace("n - 0", "n")
                yield Variation(PatternKind.OFF_BY_ONE, sentence, with_argument(name, less))
        return
    for narrow in _NARROW:
        other = float(torch.tensor(value, dtype=torch.float64).to(narrow))
        if other != value and math.isfinite(other) and other != 0:
            dtype = str(narrow).removeprefix("torch.")
            sentence = f"{name} is rounded to {dtype}: {other:.9g} instead of {value:.9g}"
            yield Variation(PatternKind.FACTOR, sentence, with_argument(name, other))
    is_neutral = name in FACTORS and value == 1
    if step.name in AFFINE or name == "dropout_p" or is_neutral:
        return
    kind = kind_of_number(step.name, name)
    is_fill = name == "value" and step.name == "masked_fill"
    if is_fill or (step.name == "scalar_tensor" and value == -math.inf):
        kind = PatternKind.MASK  # what hides scores
    if name in ("min", "max"):  # before numbers that nothing reaches
        yield Variation(kind, f"{name} is left out", with_argument(name, None))
    for other in list(_MASK_VALUES) if is_fill else _other_numbers(value):
        if other != value:
            sentence = f"{name} is {other:g} instead of {value:g}"
            yield Variation(kind, sentence, with_argument(name, other))


def kind_of_number(operator: str, name: str) -> PatternKind:
    """The kind if this number of an operator is another one."""
    is_factor = name in FACTORS and operator not in _SHAPES and "loss" not in operator
    return PatternKind.FACTOR if is_factor else PatternKind.ARGUMENT


def kind_of_argument(operator: str, name: str, right: Any, wrong: Any) -> PatternKind:
    """The kind if any argument of an operator is another one, as a call shows it."""
    numbers = [number for number in (right, wrong) if isinstance(number, int | float)]
    is_small = len(numbers) == len((right, wrong)) and all(
        0 <= number <= LARGEST_EPS for number in numbers
    )
    kinds = {
        **_FLAG_KINDS,
        **dict.fromkeys(EPSILONS, PatternKind.EPS),
        **dict.fromkeys(_AXES, PatternKind.WRONG_AXIS),
        **dict.fromkeys(("index", "offset", "shifts", "start"), PatternKind.SHIFT),
        **dict.fromkeys(("diagonal", "is_causal"), PatternKind.MASK),
        **dict.fromkeys(("reduce", "reduction"), PatternKind.WRONG_REDUCTION),
        "correction": PatternKind.OFF_BY_ONE,
    }
    if name in kinds:
        return kinds[name]
    if operator in ("add", "sub") and name == "other":
        return PatternKind.EPS if is_small else PatternKind.OFFSET
    if operator in ("mul", "div") and name == "other":
        is_negated = len(numbers) == len((right, wrong)) and right == -wrong
        return PatternKind.SIGN if is_negated else PatternKind.FACTOR
    return kind_of_number(operator, name)


def _eps_variations(name: str, value: float) -> Iterator[Variation]:
    for other in (*_USUAL_EPS, 2 * value, value * value, math.sqrt(value)):
        if not math.isclose(other, value):
            sentence = f"eps is {other:.3g} instead of {value:.3g}" if other else "eps is left out"
            yield Variation(PatternKind.EPS, sentence, with_argument(name, other))


def _other_numbers(value: float) -> list[float]:
    numbers = [0.0, 1.0, -value, 2 * value, value / 2, value * value]
    numbers += [1 - value, value + 1, value - 1]
    if value > 0:
        numbers.append(math.sqrt(value))
    if value:
        numbers.append(1 / value)
    numbers += [10 * value, value / 10, 0.01, 0.1, 0.2, 0.5, 2.0, 3.0]
    finite = [number for number in numbers if math.isfinite(number)]
    return list(dict.fromkeys(finite))


# --- Integers and lists of them -------------------------------------------------------------------

_REDUCTIONS = {0: "no reduction", 1: "the mean", 2: "the sum"}
# Of a quantisation, with what is usual.
_OF_LEVELS = {"zero_point": (128,), "quant_min": (-128, -127, -8), "quant_max": (255, 127, 15, 7)}
_GROUPS = frozenset({"groups", "group", "num_groups"})


def _integer_variations(step: Step, name: str, value: int) -> Iterator[Variation]:
    if name == "diagonal":
        yield from _near(name, value, PatternKind.MASK, "the mask is off by one: the diagonal")
        if step.name in step_names("triangles"):
            sentence = "the mask is not applied"
            yield Variation(PatternKind.MASK, sentence, lambda step: step.values["self"])
    elif name == "index" and step.name == "select":
        yield from _other_items(step, value)
    elif name == "start" and step.name == "slice":
        yield from _other_slices(step, value)
    elif name in ("index", "offset"):
        yield from _near(name, value, PatternKind.SHIFT, name)
    else:
        for kind, sentence, other in _other_integers(step, name, value):
            yield Variation(kind, sentence, with_argument(name, other))


# Of more items than this, only the nearest are tried.
_MOST_ITEMS = 64


def _other_items(step: Step, value: int) -> Iterator[Variation]:
    size = step.values["self"].shape[step.values["dim"]]
    right = value % size
    nearest = sorted(
        (index for index in range(size) if index != right), key=lambda index: abs(index - right)
    )
    for other in nearest[:_MOST_ITEMS]:
        sentence = f"index is {other} instead of {right}"
        yield Variation(PatternKind.SHIFT, sentence, with_argument("index", other))


def _other_slices(step: Step, value: int) -> Iterator[Variation]:
    """As many elements, from another place."""
    size = step.values["self"].shape[step.values["dim"]]
    start, stop, _ = slice(value, step.values["end"], None).indices(size)
    length = stop - start
    for by in dict.fromkeys((1, -1, 2, -2, length, -length, -start, size - stop)):
        if by and start + by >= 0 and stop + by <= size:
            sentence = f"taken from {start + by} on instead of {start}"
            change = with_arguments(start=start + by, end=stop + by)
            yield Variation(PatternKind.SHIFT, sentence, change)


def _other_integers(  # noqa: C901  (a branch for each kind of argument)
    step: Step, name: str, value: int
) -> Iterator[tuple[PatternKind, str, int]]:
    if name == "reduction":
        right = _REDUCTIONS.get(value, "another reduction")
        # To a gradient it is a factor.
        is_gradient = "backward" in step.name
        kind = PatternKind.FACTOR if is_gradient else PatternKind.WRONG_REDUCTION
        for other, words in _REDUCTIONS.items():
            if other not in (0, value):
                yield kind, f"{words} instead of {right}", other
    elif name in ("ignore_index", "padding_idx") and _has_no_negative_target(step):
        for other in (-1, -100):
            yield PatternKind.ARGUMENT, f"{name} is ignored", other
        for other in _other_classes(step, value):
            yield PatternKind.ARGUMENT, f"{name} is {other} instead of {value}", other
    elif name in _OF_LEVELS:
        usual = (0, -value, value + 1, value - 1, value // 2, *_OF_LEVELS[name])
        for other in dict.fromkeys(usual):
            if other != value:
                yield PatternKind.ARGUMENT, f"{name} is {other} instead of {value}", other
    elif name in _GROUPS:
        for other in (1, value * 2, value // 2):
            if other not in (0, value):
                yield PatternKind.ARGUMENT, f"{name} is {other} instead of {value}", other


def _has_no_negative_target(step: Step) -> bool:
    """A target that is no longer ignored must be a class: GPUs do not survive other indices."""
    target = step.values.get("target")
    return not isinstance(target, torch.Tensor) or bool((target >= 0).all())


# So many classes may be the one that is ignored.
_MOST_CLASSES = 32


def _other_classes(step: Step, value: int) -> list[int]:
    target = step.values.get("target")
    classes: list[int] = [] if not isinstance(target, torch.Tensor) else target.unique().tolist()
    return [int(class_) for class_ in classes[:_MOST_CLASSES] if class_ != value]


def _near(name: str, value: int, kind: PatternKind, words: str) -> Iterator[Variation]:
    for other in (value + 1, value - 1):
        yield Variation(kind, f"{words} is {other} instead of {value}", with_argument(name, other))


def _list_variations(step: Step, name: str, value: list[Any]) -> Iterator[Variation]:
    if name == "indices":
        axis = 0
        for position, index in enumerate(value):
            if isinstance(index, torch.Tensor) and index.dtype in (torch.int64, torch.int32):
                yield from _index_variations(name, index, step.values["self"].shape[axis], position)
            # A mask stands for as many dimensions as it has.
            is_mask = isinstance(index, torch.Tensor) and index.dtype in (torch.bool, torch.uint8)
            axis += index.dim() if is_mask else 1
    elif name == "tensors":
        sentence = "the tensors are joined in the reverse order"
        reverse = with_altered(name, lambda tensors: list(tensors)[::-1])
        yield Variation(PatternKind.SWAPPED_OPERANDS, sentence, reverse)
        for source, position in itertools.permutations(range(min(len(value), _MOST_JOINED)), 2):
            if value[source].shape == value[position].shape:
                sentence = f"tensor {source} is joined in the place of tensor {position} as well"
                change = with_altered(name, partial(_repeat_item, source=source, position=position))
                yield Variation(PatternKind.COPY, sentence, change)
    else:
        for kind, other in _other_lists(name, value):
            sentence = f"{name} is {other} instead of {value}"
            yield Variation(kind, sentence, with_argument(name, other))


def _other_lists(name: str, value: list[Any]) -> Iterator[tuple[PatternKind, list[int]]]:
    if name == "shifts":
        near = [[-number for number in value], [number + 1 for number in value]]
        for other in (*near, [0] * len(value)):
            if other != value:
                yield PatternKind.SHIFT, other
    elif name == "pad":
        for position, by in itertools.product(range(0, len(value), 2), (1, -1)):
            other = list(value)
            other[position], other[position + 1] = value[position] + by, value[position + 1] - by
            yield PatternKind.SHIFT, other
    elif name in ("stride", "padding", "dilation", "kernel_size"):
        for by in (1, -1, 2):
            other = [number + by for number in value]
            if min(other, default=-1) >= (0 if name == "padding" else 1):
                yield PatternKind.ARGUMENT, other


# Of more tensors that are joined, only these are tried in the place of each other.
_MOST_JOINED = 6


def _repeat_item(tensors: Any, source: int, position: int) -> list[Any]:
    items = list(tensors)
    items[position] = items[source]
    return items


# --- Tensors --------------------------------------------------------------------------------------

_NEGATIVE = -1e4
_BIASES = step_names("products added to a tensor")


def _tensor_variations(step: Step) -> Iterator[Variation]:
    tensors = {n: v for n, v in step.values.items() if isinstance(v, torch.Tensor)}
    for name, value in tensors.items():
        if value.dtype == torch.bool:
            yield from _mask_variations(name, value)
        elif not (value.is_floating_point() or value.is_complex()):
            if name in ("index", "indices", "target"):
                yield from _index_variations(name, value, _size_of(step, name))
        elif name == "target" and _is_factor_mask(value):
            inverted = with_altered(name, lambda tensor: 1 - tensor)
            yield Variation(PatternKind.SIGN, "every target is inverted", inverted)
        elif _is_additive_mask(value) or _is_factor_mask(value):
            yield from _mask_variations(name, value)
    floats = {n: v for n, v in tensors.items() if v.is_floating_point()}
    # With these exchanged, `where` has its mask negated.
    pairs = itertools.combinations(floats, 2) if step.name != "where" else ()
    for left, right in pairs:
        sentence = f"{left} and {right} are swapped"
        yield Variation(PatternKind.SWAPPED_OPERANDS, sentence, with_swapped(left, right))
    for name, value in floats.items():
        yield from _operand_variations(step, name, value, alone=len(floats) == 1)


# A mask has mistakes of its own; statistics that are missing are read all the same.
_NEVER_LEFT_OUT = frozenset({"attn_mask", "running_mean", "running_var"})


def _operand_variations(
    step: Step, name: str, value: Tensor, *, alone: bool
) -> Iterator[Variation]:
    is_bias = name == "bias" or (name == "self" and step.name in _BIASES)
    called = "the bias" if is_bias else name
    if not alone:
        yield Variation(PatternKind.SIGN, f"{called} is negated", with_altered(name, torch.neg))
    if name in optional_tensors(step.operator) and name not in _NEVER_LEFT_OUT:
        kind = PatternKind.MISSING_BIAS if is_bias else PatternKind.MISSING_OPERAND
        yield Variation(kind, f"{called} is left out", with_argument(name, None))
    elif is_bias:
        zero = with_altered(name, torch.zeros_like)
        yield Variation(PatternKind.MISSING_BIAS, f"{called} is left out", zero)
    if is_bias:
        yield Variation(PatternKind.REPEATED_BIAS, f"{called} is added twice", with_factor(name, 2))
    elif name == "weight" and value.dim() == 1:
        sentence = f"{called} is applied twice"
        yield Variation(PatternKind.FACTOR, sentence, with_altered(name, torch.square))
        sentence = f"1 + {called} is the factor instead of {called}"
        yield Variation(PatternKind.FACTOR, sentence, with_altered(name, lambda tensor: 1 + tensor))
    if value.dim() > 1 and value.shape[-1] == value.shape[-2] > 1:
        transposed = with_altered(name, lambda tensor: tensor.mT)
        yield Variation(PatternKind.TRANSPOSE, f"{called} is transposed", transposed)
    if alone and step.name not in _ALONG:
        return  # it is the result that is shifted
    for axis in (axis for axis in range(value.dim()) if value.shape[axis] > 1):
        sentence = f"{called} is read in the reverse order along axis {axis}"
        flipped = with_altered(name, partial(_flip, axis=axis))
        yield Variation(PatternKind.PERMUTATION, sentence, flipped)
        for words, move in moves_along(axis, value.shape[axis]):
            change = with_altered(name, move)
            if move.func is not roll:
                change = partial(_with_shifted, name, move, axis=axis)
            yield Variation(PatternKind.SHIFT, words.format(called), change)


_ALONG = frozenset(
    {
        *("cumsum", "cumprod", "convolution", "max_pool2d_with_indices", "avg_pool2d"),
        *("adaptive_avg_pool2d", "avg_pool1d", "max_pool1d", "max_pool2d"),
    }
)


def moves_along(
    axis: int, size: int, *, pairs: bool = True
) -> Iterator[tuple[str, partial[Tensor]]]:
    """Slices along an axis that are read from other places, with `{}` for what is read.

    Args:
        pairs: also of two slices, of which the other one is the first or the last of them.
    """
    along = f"the right one along axis {axis}"
    for by, where in ((1, "before"), (-1, "after")):
        # Two that are exchanged are in the reverse order.
        several = (roll, shift_in_zeros, repeat_edge) if size > 2 else ()  # noqa: PLR2004
        for move in several or ((shift_in_zeros, repeat_edge) if pairs else ()):
            yield f"{{}} is read one place {where} {along}", partial(move, axis=axis, by=by)
    for by in far_places(size):
        yield f"{{}} is read {describe_distance(by)} {along}", partial(roll, axis=axis, by=by)


def _with_shifted(name: str, shift: Callable[[Tensor], Tensor], step: Step, axis: int) -> Any:
    """Of several results, those that are sums along the axis stay as they are.

    Such a sum only has one term less, or one twice.
    """
    shifted = step.run(**{name: shift(step.values[name])})
    if isinstance(shifted, torch.Tensor):
        return shifted
    right, turned = step.run(), step.run(**{name: step.values[name].roll(1, axis)})
    return tuple(
        moved if isinstance(same, torch.Tensor) and not torch.allclose(same, other) else same
        for moved, same, other in zip(shifted, right, turned, strict=True)
    )


# --- masks --------------------------------------------------------------------------------------


def _is_additive_mask(value: Tensor) -> bool:
    low = value <= _NEGATIVE
    return value.dim() > 0 and bool(low.any()) and bool((value[~low] == 0).all())


def _is_factor_mask(value: Tensor) -> bool:
    if value.dim() == 0 or not value.is_floating_point():
        return False
    ones = value == 1
    return bool(ones.any()) and bool((value[~ones] == 0).all()) and not bool(ones.all())


def _mask_variations(name: str, value: Tensor) -> Iterator[Variation]:
    for sentence, alter in mask_changes(value):
        yield Variation(PatternKind.MASK, sentence, with_altered(name, alter))


def mask_changes(mask: Tensor) -> Iterator[tuple[str, Callable[[Tensor], Tensor]]]:
    """What may be wrong with a mask, which is boolean or added to scores."""
    if _is_factor_mask(mask):
        yield "the mask is negated", lambda value: 1 - value
        yield "the mask is not applied", torch.ones_like
    elif mask.dtype == torch.bool:
        if not _is_one_value(mask):  # or else there is nothing in it that could be exchanged
            yield "the mask is negated", torch.logical_not
        yield "the mask is not applied: it is False everywhere", torch.zeros_like
        yield "the mask is not applied: it is True everywhere", torch.ones_like
    else:
        yield "the mask is not applied", torch.zeros_like
        yield "the mask is negated", _negated_mask
        for least in (-1e4, -1e9, -65504.0, -math.inf, torch.finfo(torch.float32).min):
            if not bool((mask == least).any()):
                sentence = f"the mask adds {least:.6g} instead of {float(mask.min()):.6g}"
                yield sentence, partial(_filled_mask, least=least)
    axes = [axis for axis in reversed(range(mask.dim())) if mask.shape[axis] > 1]
    for axis, by in itertools.product(axes, (1, -1)):
        way = "late" if by > 0 else "early"
        sentence = f"the mask is off by one: it begins one position too {way} along axis {axis}"
        is_pair = mask.shape[axis] == 2  # noqa: PLR2004
        if is_pair and by > 0:  # one position too early is one too late
            words = f"the two masks along axis {axis} are exchanged"
            yield words, partial(roll, axis=axis, by=by)
        for shift in (roll, repeat_edge, shift_in_zeros, _shift_in_ones):
            if not (is_pair and shift is roll):
                yield sentence, partial(shift, axis=axis, by=by)
    for axis in axes:
        yield f"the mask is read from the other end along axis {axis}", partial(_flip, axis=axis)
    if mask.dim() > 1 and mask.shape[-1] == mask.shape[-2] > 1:
        yield "the mask is transposed", lambda value: value.mT


def _is_one_value(mask: Tensor) -> bool:
    return bool(mask.all()) or not bool(mask.any())


def _negated_mask(mask: Tensor) -> Tensor:
    return torch.where(mask <= _NEGATIVE, 0.0, mask.min())


def _filled_mask(mask: Tensor, least: float) -> Tensor:
    return torch.where(mask <= _NEGATIVE, least, mask)


def _flip(value: Tensor, axis: int) -> Tensor:
    return value.flip(axis)


def roll(value: Tensor, axis: int, by: int) -> Tensor:
    """Shifted; what leaves at one end comes in at the other."""
    return value.roll(by, axis)


_FAR = {2: "two", 3: "three"}


def far_places(size: int) -> Iterator[int]:
    """How many places, but one, the slices of an axis may be away from their own.

    Of three slices, two places before are one place after; of more, they are not.
    """
    return (by for far in _FAR for by in (far, -far) if size > far)


def describe_distance(by: int) -> str:
    """Where each slice is read that is moved by so many places."""
    return f"{_FAR[abs(by)]} places {'before' if by > 0 else 'after'}"


def repeat_edge(value: Tensor, axis: int, by: int) -> Tensor:
    """Shifted; the element at the edge is repeated."""
    last = value.shape[axis] - 1
    places = (torch.arange(last + 1, device=value.device) - by).clamp(0, last)
    return value.index_select(axis, places)


def shift_in_zeros(value: Tensor, axis: int, by: int) -> Tensor:
    """Shifted; zeros come in."""
    moved = value.roll(by, axis)
    moved.select(axis, 0 if by > 0 else -1).zero_()
    return moved


def _shift_in_ones(value: Tensor, axis: int, by: int) -> Tensor:
    """Shifted; what comes in is masked the other way than zeros."""
    moved = value.roll(by, axis)
    moved.select(axis, 0 if by > 0 else -1).fill_(
        1 if value.dtype == torch.bool or _is_factor_mask(value) else -math.inf
    )
    return moved


# --- indices ------------------------------------------------------------------------------------


def _size_of(step: Step, name: str) -> int:
    """How many indices are valid; 0 if that is not known."""
    values = step.values
    if step.name == "embedding":
        return int(values["weight"].shape[0])
    if step.name == "embedding_dense_backward":
        return int(values["num_weights"])
    source, dim = values.get("self", values.get("input")), values.get("dim")
    if name == "target" and isinstance(source, torch.Tensor) and source.dim() > 1:
        return int(source.shape[1])
    if isinstance(source, torch.Tensor) and isinstance(dim, int) and source.dim():
        return int(source.shape[dim])
    return 0


def _index_variations(
    name: str, index: Tensor, size: int, position: int | None = None
) -> Iterator[Variation]:
    kind = PatternKind.WRONG_INDEX
    size = size or (int(index.max()) + 1 if index.numel() else 0)

    def change_index(alter: Callable[[Tensor], Tensor]) -> Callable[[Step], Any]:
        if position is None:
            return with_altered(name, alter)

        def run(step: Step) -> Any:
            indices = list(step.values[name])
            indices[position] = alter(indices[position])
            return step.run(**{name: indices})

        return run

    for by in (1, -1):
        way = "large" if by > 0 else "small"
        sentence = f"every index of {name} is one too {way}"
        yield Variation(
            kind, f"{sentence}, up to the bounds", change_index(partial(_clamp_index, by, size))
        )
        yield Variation(
            kind, f"{sentence}, and wraps around", change_index(partial(_wrap_index, by, size))
        )
    for axis, by in itertools.product(range(index.dim()), (1, -1)):
        if index.shape[axis] > 1:
            where = "after" if by < 0 else "before"
            sentence = f"{name} is read one place {where} the right one along axis {axis}"
            for shift in (roll, repeat_edge, shift_in_zeros):
                yield Variation(kind, sentence, change_index(partial(shift, axis=axis, by=by)))
    for axis in range(index.dim()):
        for by in far_places(index.shape[axis]):
            sentence = f"{name} is read {describe_distance(by)} the right one along axis {axis}"
            yield Variation(kind, sentence, change_index(partial(roll, axis=axis, by=by)))
    for axis in range(index.dim()):
        where = f" along axis {axis}" if index.dim() > 1 else ""
        sentence = f"{name} is read in the reverse order{where}"
        yield Variation(kind, sentence, change_index(partial(_flip, axis=axis)))
    for sentence, alter in (
        ("in increasing order", partial(_sort_index, descending=False)),
        ("in decreasing order", partial(_sort_index, descending=True)),
        ("column by column instead of row by row", _by_columns),
        ("row by row, but laid out column by column", _into_columns),
    ):
        yield Variation(kind, f"{name} is read {sentence}", change_index(alter))


def _sort_index(index: Tensor, *, descending: bool) -> Tensor:
    return index.flatten().sort(descending=descending).values.reshape(index.shape)


def _by_columns(index: Tensor) -> Tensor:
    return index.T.reshape(index.shape) if index.dim() == 2 else index  # noqa: PLR2004


def _into_columns(index: Tensor) -> Tensor:
    return index.reshape(index.T.shape).T if index.dim() == 2 else index  # noqa: PLR2004


def _clamp_index(by: int, size: int, index: Tensor) -> Tensor:
    # Negative values count from the end, or say that an element is left out.
    return torch.where(index >= 0, (index + by).clamp(0, size - 1), index)


def _wrap_index(by: int, size: int, index: Tensor) -> Tensor:
    return torch.where(index >= 0, (index + by) % size, index)

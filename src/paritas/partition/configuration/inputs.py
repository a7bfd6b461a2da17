"""What a user writes of an operator and its arguments, and the tensors made from it."""

from __future__ import annotations

import dataclasses
import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch

from paritas.errors import UsageError
from paritas.placement.recipes import OperatorCall, Place

# --- What a user writes ---------------------------------------------------------------------------

# The names and the order of the fields are those of nnScaler's partition check, so that its users'
# configurations run with another import line.

_OPTION_KEYS = {"idx", "dim", "num"}


@dataclasses.dataclass(frozen=True)
class IRObject:
    """A value that a graph knows by name: a size, a slice's end. Only the value takes part.

    Attributes:
        name: what the graph calls it.
        value: what it is; may hold further ones.
        is_constant: whether it is the same for every input of the graph.
    """

    name: str | None = None
    value: Any = None
    is_constant: bool = True


def unwrap(value: Any) -> Any:
    """The same value with the value of every `IRObject` in its place, however deep it is."""
    if isinstance(value, IRObject):
        return unwrap(value.value)
    if isinstance(value, slice):
        return slice(unwrap(value.start), unwrap(value.stop), unwrap(value.step))
    if isinstance(value, tuple):
        items = [unwrap(item) for item in value]
        # A named tuple takes its items one by one; torch.Size and plain ones take them all.
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if isinstance(value, list):
        return [unwrap(item) for item in value]
    if isinstance(value, dict):
        return {unwrap(key): unwrap(item) for key, item in value.items()}
    return value


@dataclasses.dataclass(slots=True)
class TensorInfo:
    """One argument: a tensor of a shape, filled with numbers that fit, or a value as it is.

    Attributes:
        value_type: 'shape' or 'value'.
        value: the shape, or the value.
        dtype: of a 'shape'; otherwise what the operator takes there (indices are int64, masks
            bool), and float32 where it takes any.
        requires_grad: False if no gradient is asked of it; otherwise each floating tensor has one.
        generator: what fills a 'shape': a `torch.Generator` to draw from, or a function that is
            given the shape and makes the tensor.
    """

    value_type: Literal["shape", "value"]
    value: Any
    dtype: torch.dtype | None = None
    requires_grad: bool | None = None
    generator: torch.Generator | Callable[[tuple[int, ...]], torch.Tensor] | None = None

    def __post_init__(self) -> None:
        if self.value_type not in {"shape", "value"}:
            raise UsageError(
                f"TensorInfo({self.value_type!r}, ...): the first argument must be 'shape' "
                "(a tensor is made) or 'value' (it is passed as it is)"
            )
        if self.dtype is not None and not isinstance(self.dtype, torch.dtype):
            raise UsageError(f"dtype must be a torch.dtype such as torch.int64, not {self.dtype!r}")
        if self.value_type == "value":
            if self.dtype is not None or self.generator is not None:
                raise UsageError(
                    f"TensorInfo('value', {self.value!r:.60}): a value has its own dtype and needs "
                    "no generator; leave them out, or say 'shape'"
                )
            return
        shape = unwrap(self.value)
        sizes = shape if isinstance(shape, Sequence) and not isinstance(shape, str) else [None]
        if not all(isinstance(n, int) and not isinstance(n, bool) and n >= 0 for n in sizes):
            raise UsageError(
                f"TensorInfo('shape', {self.value!r}): a shape is a tuple of sizes such as "
                "(8, 32); to pass the value itself, say 'value'"
            )

    @property
    def shape(self) -> tuple[int, ...] | None:
        """The shape of the tensor that this is; None if it is none."""
        if self.value_type == "shape":
            return tuple(unwrap(self.value))
        value = unwrap(self.value)
        return tuple(value.shape) if isinstance(value, torch.Tensor) else None

    @property
    def numel(self) -> int:
        """How many elements that tensor has; 0 if it is none."""
        return 0 if self.shape is None else math.prod(self.shape)


@dataclasses.dataclass(slots=True)
class VerifyConfig:
    """An operator, its arguments, and the splits to check.

    Fields may be assigned until it is used, those of its arguments too; there they are checked
    again.

    Attributes:
        fsig: the operator by its full name, such as `torch.nn.functional.linear`; of a method,
            `torch.Tensor.view`, the first argument is the tensor.
        args: the positional arguments.
        kwargs: the arguments by name; a `TensorInfo` among them is a tensor too.
        noutputs: how many tensors the operator gives.
        parti_options: which dimension of which input is split: `{'idx': 1, 'dim': 0}`; `idx` goes
            on with the outputs after the inputs, and a `num` is the number of ranks for this one.
        import_customized_func: import statements that `fsig` needs.
        non_grad_indices: arguments of which no gradient is asked, such as running statistics.
    """

    fsig: str
    args: Sequence[TensorInfo]
    kwargs: Mapping[str, Any]
    noutputs: int
    parti_options: Sequence[Mapping[str, int]]
    import_customized_func: str = ""
    non_grad_indices: Sequence[int] = dataclasses.field(default_factory=list)

    def __post_init__(self) -> None:
        if not isinstance(self.fsig, str) or not self.fsig:
            raise UsageError(f"fsig must be an operator's name such as 'torch.add': {self.fsig!r}")
        for position, info in enumerate(self.args):
            if not isinstance(info, TensorInfo):
                raise UsageError(
                    f"args[{position}] of {self.fsig} is {info!r:.60}; write "
                    "TensorInfo('shape', ...) or TensorInfo('value', ...)"
                )
        if _whole_number(self.noutputs, least=1) is None:
            raise UsageError(f"noutputs must be a whole number from 1 on, not {self.noutputs!r}")
        for index in self.non_grad_indices:
            if _whole_number(index) is None or index >= len(self.args):
                raise UsageError(
                    f"non_grad_indices names argument {index!r}, but {self.fsig} has arguments "
                    f"0 to {len(self.args) - 1}"
                )
        for option in self.parti_options:
            _check_option_keys(option)

    def as_used(self) -> VerifyConfig:
        """A copy, checked again: fields may have been assigned since this one was made."""
        args = [_copy_info(info) for info in self.args]
        kwargs = {name: _copy_info(value) for name, value in self.kwargs.items()}
        return dataclasses.replace(self, args=args, kwargs=kwargs)


def _copy_info(value: Any) -> Any:
    return dataclasses.replace(value) if isinstance(value, TensorInfo) else value


def _check_option_keys(option: Any) -> None:
    """Raise `UsageError` unless it has the form of a split; whether it is one is checked later."""
    form = "write {'idx': 0, 'dim': 1}: input 0 is split along dimension 1"
    if not isinstance(option, Mapping):
        raise UsageError(f"parti_options has {option!r}; {form}")
    unknown = sorted(map(str, set(option) - _OPTION_KEYS))
    missing = [key for key in ("idx", "dim") if key not in option]
    if unknown or missing:
        fault = f"unknown key {unknown[0]!r}" if unknown else f"no {missing[0]!r}"
        raise UsageError(f"parti_options has {dict(option)!r} with {fault}; {form}")
    for key, value in option.items():
        if _whole_number(value, least=2 if key == "num" else 0) is None:
            least = "2" if key == "num" else "0"
            raise UsageError(
                f"parti_options has {dict(option)!r}: {key!r} must be a whole number from {least} "
                f"on; {form}"
            )


def _whole_number(value: Any, least: int = 0) -> int | None:
    """The value if it is a whole number of at least that; None otherwise (a bool is none)."""
    fits = isinstance(value, int) and not isinstance(value, bool) and value >= least
    return value if fits else None


# --- Random tensors of the kinds that operators take: indices, masks, probabilities and so on -----

# Each function is given a shape and a generator. Numbers are drawn in float64, so that a dtype
# changes their rounding and not the numbers; what is huge is drawn in float32.

Shape = tuple[int, ...]
Domain = Callable[[Shape, torch.Generator], torch.Tensor]

# Above so many elements, float64 costs more than it tells.
_HUGE = 1 << 22


def _dtype(shape: Shape) -> torch.dtype:
    return torch.float64 if math.prod(shape) <= _HUGE else torch.float32


def normal(shape: Shape, generator: torch.Generator) -> torch.Tensor:
    """Any numbers: what most operators take."""
    return torch.randn(shape, generator=generator, dtype=_dtype(shape))


def between(low: float, high: float) -> Domain:
    """Numbers of an open interval: positive ones, probabilities, an arc sine's arguments."""

    def draw(shape: Shape, generator: torch.Generator) -> torch.Tensor:
        unit = torch.rand(shape, generator=generator, dtype=_dtype(shape))
        # A hundredth at each end is left out: the ends are where the operator has its poles.
        return low + (high - low) * (0.01 + 0.98 * unit)

    return draw


def away_from_zero(shape: Shape, generator: torch.Generator) -> torch.Tensor:
    """Denominators of both signs."""
    return between(0.5, 2.0)(shape, generator) * signs(shape, generator)


def signs(shape: Shape, generator: torch.Generator) -> torch.Tensor:
    """+1 and -1: the targets of margin losses."""
    return mask(shape, generator).to(_dtype(shape)) * 2 - 1


def mask(shape: Shape, generator: torch.Generator) -> torch.Tensor:
    """True and False, each half of the time."""
    return torch.rand(shape, generator=generator) < 0.5  # noqa: PLR2004


def distribution(shape: Shape, generator: torch.Generator, dim: int = -1) -> torch.Tensor:
    """Probabilities that sum up to 1 along a dimension."""
    return torch.softmax(normal(shape, generator), dim if shape else 0)


def log_distribution(shape: Shape, generator: torch.Generator) -> torch.Tensor:
    """Logarithms of such."""
    return torch.log_softmax(normal(shape, generator), -1 if shape else 0)


def whole_numbers(low: int, high: int) -> Domain:
    """Whole numbers from `low` up to, and without, `high`."""

    def draw(shape: Shape, generator: torch.Generator) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=generator)

    return draw


def constant(value: int) -> Domain:
    """One number: a counter."""
    return lambda shape, _: torch.full(shape, value)


def indices(low: int, high: int) -> Domain:
    """Indices from `low` up to, and without, `high`; the ends are hit before anything else.

    A rank that is off by one in where its part begins or ends is wrong at the ends of the range,
    and at its middle; among many rows, random indices may miss all of these.
    """

    def draw(shape: Shape, generator: torch.Generator) -> torch.Tensor:
        drawn = torch.randint(low, max(high, low + 1), shape, generator=generator)
        middle = (low + high) // 2
        wanted = [high - 1, low, middle, middle - 1]
        telling = list(dict.fromkeys(n for n in wanted if low <= n < high))
        flat = drawn.reshape(-1)
        count = min(len(telling), flat.numel())
        places = torch.randperm(flat.numel(), generator=generator)[:count]
        flat[places] = torch.tensor(telling[:count], dtype=flat.dtype)
        return flat.reshape(shape)

    return draw


def permutations(size: int, dim: int) -> Domain:
    """Indices below `size` of which none comes twice along a dimension.

    Written to twice, an element is whichever comes last: no operator promises which that is.
    """

    def draw(shape: Shape, generator: torch.Generator) -> torch.Tensor:
        if not shape:
            return torch.randint(0, max(size, 1), shape, generator=generator)
        lanes = list(shape)
        lanes[dim] = size
        keys = torch.rand(lanes, generator=generator)
        return keys.argsort(dim).narrow(dim, 0, min(shape[dim], size)).contiguous()

    return draw


def sorted_values(shape: Shape, generator: torch.Generator) -> torch.Tensor:
    """Rising numbers: the borders of bins."""
    values = normal(shape, generator)
    return values.sort(-1).values if shape else values


def conditioned(shape: Shape, generator: torch.Generator) -> torch.Tensor:
    """Square matrices that can be inverted without losing digits."""
    values = normal(shape, generator)
    size = shape[-1]
    return values / math.sqrt(size) + 3 * torch.eye(shape[-2], size, dtype=values.dtype)


def positive_definite(shape: Shape, generator: torch.Generator) -> torch.Tensor:
    """Symmetric matrices with eigenvalues well above zero."""
    values = normal(shape, generator)
    product = values @ values.mT / shape[-1]
    return product + torch.eye(shape[-1], dtype=values.dtype)


# --- What an operator takes for an argument, by the names of both ---------------------------------

# An embedding's ids are indices of its table, a mask is of bools, a variance is positive. What is
# not in the table here takes any numbers.

_IGNORED_SHARE = 4  # one target in so many


@dataclasses.dataclass(frozen=True)
class WantedCall:
    """An operator's name and arguments before the tensors are made."""

    name: str
    args: Sequence[TensorInfo]
    kwargs: Mapping[str, Any]

    @property
    def short_name(self) -> str:
        """The last part of the name, the same for the in-place variant."""
        last = self.name.rpartition(".")[2]
        return last.rstrip("_") if not last.startswith("_") else last

    def info(self, position: int, name: str) -> TensorInfo | None:
        """An argument, wherever it is given."""
        if position < len(self.args):
            return self.args[position]
        given = self.kwargs.get(name)
        return given if given is None or isinstance(given, TensorInfo) else _as_value(given)

    def value(self, position: int, name: str, default: Any = None) -> Any:
        """The value of an argument that is no tensor."""
        info = self.info(position, name)
        return default if info is None or info.value_type == "shape" else unwrap(info.value)

    def shape(self, position: int, name: str) -> tuple[int, ...]:
        """The shape of an argument; empty if it is no tensor."""
        info = self.info(position, name)
        return (info.shape or ()) if info is not None else ()

    def size(self, position: int, name: str, dim: int) -> int:
        """How long an argument is along a dimension; 1 where it has no such."""
        shape = self.shape(position, name)
        return shape[dim] if -len(shape) <= dim < len(shape) else 1


def _as_value(value: Any) -> TensorInfo:
    return TensorInfo("value", value)


# --- what an operator takes -----------------------------------------------------------------------

Rule = Callable[[WantedCall], Domain]


def _always(domain: Domain) -> Rule:
    return lambda _: domain


def _row_ids(asked: WantedCall) -> Domain:
    """The ids of an embedding: of its table, or of the part of the vocabulary that it holds."""
    of_nnscaler = asked.name.startswith("nnscaler.")  # torch's fourth argument is another one
    start = asked.value(3, "start", 0) if of_nnscaler else 0
    return indices(start, start + asked.size(1, "weight", 0))


def _table_rows(asked: WantedCall) -> Domain:
    """The same where the table comes first."""
    return indices(0, asked.size(0, "weight", 0))


def _attention_mask(asked: WantedCall) -> Domain:
    """Which keys a query sees, one at least: of none, an average is not a number."""
    info = asked.info(3, "attn_mask")
    if info is None or info.dtype != torch.bool:
        return normal

    def draw(shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
        seen = mask(shape, generator)
        if shape and shape[-1]:
            seen[..., 0] = True
        return seen

    return draw


def _indices_along(dim_position: int, *, unique: bool = False) -> Rule:
    """Indices into the first argument along the dimension that another argument names."""

    def rule(asked: WantedCall) -> Domain:
        dim = asked.value(dim_position, "dim")
        shape = asked.shape(0, "input")
        if not isinstance(dim, int):
            return indices(0, math.prod(shape))
        size = asked.size(0, "input", dim)
        if unique:
            index = asked.shape(3 - dim_position, "index")
            return permutations(size, dim if len(index) == len(shape) else 0)
        return indices(0, size)

    return rule


def _classes(asked: WantedCall) -> Domain:
    """The targets of a classification: classes, or probabilities if they are shaped like scores."""
    scores = asked.shape(0, "input")
    dim = 1 if len(scores) > 1 else 0
    if asked.short_name == "cross_entropy" and asked.shape(1, "target") == scores:
        return lambda shape, generator: distribution(shape, generator, dim)
    draw = indices(0, asked.size(0, "input", dim))
    ignored = asked.kwargs.get("ignore_index")
    if not isinstance(ignored, int):
        return draw

    def with_ignored(shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
        targets = draw(shape, generator).reshape(-1)
        # All at the front: ranks that divide the batch then have different numbers that count.
        targets[: len(targets) // _IGNORED_SHARE] = ignored
        return targets.reshape(shape)

    return with_ignored


def _one_hot(asked: WantedCall) -> Domain:
    classes = asked.value(1, "num_classes", -1)
    return indices(0, classes if classes > 0 else 10)


def _kl_target(asked: WantedCall) -> Domain:
    logs = asked.kwargs.get("log_target", False)
    return log_distribution if logs else distribution


def _base(asked: WantedCall) -> Domain:
    """The base of a power: positive unless the exponent is a whole number."""
    exponent = asked.value(1, "exponent")
    whole = isinstance(exponent, int) or (isinstance(exponent, float) and exponent.is_integer())
    return away_from_zero if whole else between(0.5, 2.0)


_POSITIVE = _always(between(0.1, 4.0))
_PROBABILITY = _always(between(0.0, 1.0))
_SINE = _always(between(-0.95, 0.95))
_MASK = _always(mask)
_SIGNS = _always(signs)
_DENOMINATOR = _always(away_from_zero)
_SORTED = _always(sorted_values)
_FACTORS = _always(between(0.6, 1.6))
_BITS = _always(whole_numbers(0, 256))
_GROUP = _always(whole_numbers(0, 3))
_INVERTIBLE = _always(conditioned)
_DEFINITE = _always(positive_definite)
_COUNTER = _always(constant(3))

# Operators, and (position, name) of an argument with what is drawn for it.
_Arguments = dict[tuple[int, str], Rule]
_TABLE: list[tuple[str, _Arguments]] = [
    ("sqrt rsqrt log log2 log10 log1p lgamma digamma poisson", {(0, "input"): _POSITIVE}),
    ("asin arcsin acos arccos atanh erfinv", {(0, "input"): _SINE}),
    ("logit bernoulli multinomial", {(0, "input"): _PROBABILITY}),
    ("acosh", {(0, "input"): _always(between(1.1, 4.0))}),
    ("grid_sample", {(1, "grid"): _SINE}),
    ("reciprocal", {(0, "input"): _DENOMINATOR}),
    ("div divide true_divide truediv", {(1, "other"): _DENOMINATOR}),
    ("floor_divide remainder fmod", {(1, "other"): _DENOMINATOR}),
    ("pow float_power", {(0, "input"): _base}),
    ("xlogy", {(0, "input"): _POSITIVE, (1, "other"): _POSITIVE}),
    ("prod cumprod", {(0, "input"): _FACTORS}),
    # masks and whole numbers
    ("where", {(0, "condition"): _MASK}),
    ("masked_fill masked_select masked_scatter", {(1, "mask"): _MASK}),
    ("any all logical_not", {(0, "input"): _MASK}),
    ("logical_and logical_or logical_xor", {(0, "input"): _MASK, (1, "other"): _MASK}),
    ("bitwise_and bitwise_or bitwise_xor", {(0, "input"): _BITS, (1, "other"): _BITS}),
    ("bitwise_not", {(0, "input"): _BITS}),
    ("count_nonzero nonzero bincount", {(0, "input"): _GROUP}),
    ("one_hot", {(0, "tensor"): _one_hot}),
    ("scaled_dot_product_attention", {(3, "attn_mask"): _attention_mask}),
    # indices
    ("embedding embedding_bag", {(0, "input"): _row_ids}),
    ("gather index_select index_add index_fill", {(2, "index"): _indices_along(1)}),
    ("scatter_add scatter_reduce", {(2, "index"): _indices_along(1)}),
    ("index_copy scatter", {(2, "index"): _indices_along(1, unique=True)}),
    ("take_along_dim", {(1, "indices"): _indices_along(2)}),
    ("take", {(1, "index"): _indices_along(2)}),
    ("bucketize", {(1, "boundaries"): _SORTED}),
    ("searchsorted", {(0, "sorted_sequence"): _SORTED}),
    # losses
    ("nll_loss cross_entropy", {(1, "target"): _classes, (2, "weight"): _POSITIVE}),
    ("multi_margin_loss", {(1, "target"): _classes}),
    (
        "binary_cross_entropy",
        {(0, "input"): _PROBABILITY, (1, "target"): _PROBABILITY, (2, "weight"): _POSITIVE},
    ),
    (
        "binary_cross_entropy_with_logits",
        {(1, "target"): _PROBABILITY, (2, "weight"): _POSITIVE, (6, "pos_weight"): _POSITIVE},
    ),
    ("kl_div", {(0, "input"): _always(log_distribution), (1, "target"): _kl_target}),
    ("poisson_nll_loss", {(1, "target"): _POSITIVE}),
    ("gaussian_nll_loss", {(2, "var"): _POSITIVE}),
    ("hinge_embedding_loss soft_margin_loss", {(1, "target"): _SIGNS}),
    ("margin_ranking_loss cosine_embedding_loss", {(2, "target"): _SIGNS}),
    # norms and matrices
    ("batch_norm instance_norm", {(2, "running_var"): _POSITIVE}),
    (
        "wrap_batchnorm2d_func",
        {(4, "running_var"): _POSITIVE, (5, "num_batches_tracked"): _COUNTER},
    ),
    ("wrap_instancenorm2d_func", {(4, "running_var"): _POSITIVE}),
    ("inv inverse solve det slogdet logdet", {(0, "A"): _INVERTIBLE}),
    ("cholesky", {(0, "input"): _DEFINITE}),
]
_RULES = {name: arguments for names, arguments in _TABLE for name in names.split()}
# Where one short name has two orders of arguments.
_FULL_NAMES: dict[str, _Arguments] = {
    "nnscaler.runtime.function.index_select": {(1, "index"): _indices_along(2)},
    "torch.batch_norm": {(4, "running_var"): _POSITIVE},
    "torch.instance_norm": {(4, "running_var"): _POSITIVE},
    "torch.embedding": {(1, "indices"): _table_rows},
    "aten.embedding": {(1, "indices"): _table_rows},
    "aten.embedding_bag": {(1, "indices"): _table_rows},
    "aten.batch_norm": {(4, "running_var"): _POSITIVE},
    "aten.native_batch_norm": {(4, "running_var"): _POSITIVE},
    "aten.instance_norm": {(4, "running_var"): _POSITIVE},
    "aten._native_batch_norm_legit": {(4, "running_var"): _POSITIVE},
    "aten._native_batch_norm_legit_no_training": {(4, "running_var"): _POSITIVE},
    "aten.cross_entropy_loss": {(1, "target"): _classes, (2, "weight"): _POSITIVE},
    "aten.nll_loss_forward": {(1, "target"): _classes, (2, "weight"): _POSITIVE},
    "aten.nll_loss_nd": {(1, "target"): _classes, (2, "weight"): _POSITIVE},
}

# Running statistics: written to, and without a gradient whether the user says so or not.
_STATISTICS = {"running_mean", "running_var", "num_batches_tracked"}
_BUFFERS: dict[str, set[int | str]] = {
    "batch_norm": {1, 2},
    "instance_norm": {1, 2},
    "torch.batch_norm": {3, 4},
    "torch.instance_norm": {3, 4},
    "aten.batch_norm": {3, 4},
    "aten.native_batch_norm": {3, 4},
    "aten.instance_norm": {3, 4},
    "aten._native_batch_norm_legit": {3, 4},
    "aten._native_batch_norm_legit_no_training": {3, 4},
    # Torch has no derivative by these.
    "cross_entropy": {2, "weight"},
    "cross_entropy_loss": {2, "weight"},
    "nll_loss": {2, "weight"},
    "soft_margin_loss": {1, "target"},
    "wrap_batchnorm2d_func": {3, 4, 5},
    "wrap_instancenorm2d_func": {3, 4},
}


def is_buffer(asked: WantedCall, place: Place) -> bool:
    """Whether an operator takes no gradient of an argument, though it may be floating."""
    places = _BUFFERS.get(asked.name) or _BUFFERS.get(asked.short_name)
    return places is not None and (place in places or place in _STATISTICS)


def domain_of(asked: WantedCall, place: Place) -> Domain:
    """What is drawn for an argument that is given by its shape."""
    rules = _FULL_NAMES.get(asked.name) or _RULES.get(asked.short_name, {})
    for (position, name), rule in rules.items():
        if place in (position, name):
            return rule(asked)
    return normal


# --- The arguments of a call, made from a configuration: random tensors that fit the operator -----

# A shape is used as it is given: where it does not fit, the operator says so.


def make_call(config: VerifyConfig, function: Callable[..., Any], *, seed: int = 0) -> OperatorCall:
    """The call that a configuration describes, the same for the same seed."""
    name = config.fsig.replace(":", ".")
    asked = WantedCall(name, config.args, config.kwargs)
    args = [make_value(asked, position, info, seed) for position, info in enumerate(config.args)]
    kwargs = {
        key: make_value(asked, key, value, seed) if isinstance(value, TensorInfo) else unwrap(value)
        for key, value in config.kwargs.items()
    }
    named = [(key, info) for key, info in config.kwargs.items() if isinstance(info, TensorInfo)]
    places: list[tuple[Place, TensorInfo]] = [*enumerate(config.args), *named]
    without = {
        place for place, info in places if info.requires_grad is False or is_buffer(asked, place)
    }
    return OperatorCall(
        function,
        tuple(args),
        kwargs,
        name=name,
        without_gradient=frozenset(without | set(config.non_grad_indices)),
        seed=seed,
    )


def make_value(asked: WantedCall, place: Place, info: TensorInfo, seed: int) -> Any:
    """One argument of a call: its value, or a tensor drawn to fit.

    Raises:
        UsageError: no tensor of this shape and dtype can fit.
    """
    if info.value_type == "value":
        value = unwrap(info.value)
        return value.detach() if isinstance(value, torch.Tensor) else value
    shape = info.shape or ()
    if info.generator is not None and not isinstance(info.generator, torch.Generator):
        return _from_the_user(asked, place, info.generator(shape), info)
    generator = info.generator or generator_for(seed, place)
    drawn = _domain_for(domain_of(asked, place), info.dtype)(shape, generator)
    if tuple(drawn.shape) != shape:
        # Only unique indices can be fewer than asked for: there are no more of them.
        raise UsageError(
            f"{_argument_name(place)} of {asked.name} has the shape {shape}, "
            f"but only indices of the shape {tuple(drawn.shape)} can all be different; "
            "give a smaller shape, or the indices as a 'value'"
        )
    return _in_dtype(drawn, info.dtype, asked, place)


def generator_for(seed: int, place: Place) -> torch.Generator:
    """An own stream for each argument: one more argument leaves the others as they were."""
    digest = hashlib.sha256(f"{seed}:{place}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))


def _domain_for(domain: Domain, dtype: torch.dtype | None) -> Domain:
    """What is drawn when the user asks for a dtype that holds no fractions."""
    if dtype is None or dtype.is_floating_point:
        return domain
    if dtype.is_complex:
        return lambda shape, generator: torch.complex(
            normal(shape, generator), normal(shape, generator)
        )

    def whole(shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
        drawn = domain(shape, generator)
        if not drawn.is_floating_point():
            return drawn
        if dtype == torch.bool:
            return mask(shape, generator)
        signed = domain is normal and dtype.is_signed
        return whole_numbers(-9 if signed else 1, 10)(shape, generator)

    return whole


def _in_dtype(
    drawn: torch.Tensor, dtype: torch.dtype | None, asked: WantedCall, place: Place
) -> torch.Tensor:
    if dtype is None:
        return drawn.to(torch.float32) if drawn.is_floating_point() else drawn
    cast = drawn.to(dtype)
    exact = drawn.is_floating_point() or drawn.is_complex()
    if not exact and not torch.equal(cast.to(drawn.dtype), drawn):
        raise UsageError(
            f"{_argument_name(place)} of {asked.name} takes whole numbers "
            f"up to {int(drawn.max())}, which {dtype} does not hold; "
            "leave dtype out, or give torch.int64"
        )
    return cast


def _from_the_user(asked: WantedCall, place: Place, made: Any, info: TensorInfo) -> torch.Tensor:
    """What the user's own function made; anything but the tensor that was asked for is refused."""
    told = f"the generator of {_argument_name(place)} of {asked.name}"
    if not isinstance(made, torch.Tensor):
        raise UsageError(f"{told} gave {made!r:.60}; it must give a tensor")
    if tuple(made.shape) != info.shape:
        raise UsageError(f"{told} gave the shape {tuple(made.shape)}, not {info.shape}")
    if info.dtype is not None and made.dtype != info.dtype:
        raise UsageError(f"{told} gave {made.dtype}, not {info.dtype}")
    return made.detach()


def _argument_name(place: Place) -> str:
    return f"args[{place}]" if isinstance(place, int) else repr(place)

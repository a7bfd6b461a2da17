"""The configuration of a partition check, and the tensors that are made from it."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch

from paritas.core.errors import UsageError
from paritas.core.numerics.bits import is_inexact
from paritas.core.numerics.random_tensors import (
    Domain,
    away_from_zero,
    between,
    constant,
    distribution,
    indices,
    log_distribution,
    mask,
    normal,
    permutations,
    positive_definite,
    signs,
    sorted_values,
    well_conditioned,
    whole_numbers,
)
from paritas.core.operators.calls import OperatorCall, Place
from paritas.core.operators.catalogue import operator_called
from paritas.sharding.operators.annotation import Option
from paritas.sharding.operators.nnscaler_functions import name_in_library

# --- The configuration ----------------------------------------------------------------------------

# The fields have the names and order of nnScaler's partition check, so its users need to change
# only an import.


@dataclasses.dataclass(frozen=True)
class IRObject:
    """A value that a graph knows by name, such as a size. Only the value is used.

    Attributes:
        name: its name in the graph.
        value: the value; it may contain further `IRObject`s.
        is_constant: whether it is the same for every input of the graph.
    """

    name: str | None = None
    value: Any = None
    is_constant: bool = True


def unwrap(value: Any) -> Any:
    """Replace every `IRObject` by its value, at any depth."""
    if isinstance(value, IRObject):
        return unwrap(value.value)
    if isinstance(value, slice):
        return slice(unwrap(value.start), unwrap(value.stop), unwrap(value.step))
    if isinstance(value, tuple):
        items = [unwrap(item) for item in value]
        # A named tuple takes its items one by one.
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if isinstance(value, list):
        return [unwrap(item) for item in value]
    if isinstance(value, dict):
        return {unwrap(key): unwrap(item) for key, item in value.items()}
    return value


@dataclasses.dataclass(slots=True)
class TensorInfo:
    """One argument: a random tensor of a given shape, or a value.

    Attributes:
        value_type: 'shape' or 'value'.
        value: the shape or the value.
        dtype: of a 'shape'; by default what the operator needs (int64 for indices, bool for masks),
            otherwise float32.
        requires_grad: False if it needs no gradient; by default every floating tensor has one.
        generator: fills a 'shape': a `torch.Generator`, or a function from the shape to a tensor.
    """

    value_type: Literal["shape", "value"]
    value: Any
    dtype: torch.dtype | None = None
    requires_grad: bool | None = None
    generator: torch.Generator | Callable[[tuple[int, ...]], torch.Tensor] | None = None

    def __post_init__(self) -> None:
        if self.value_type not in {"shape", "value"}:
            raise UsageError(
                f"TensorInfo({self.value_type!r}, ...): the first argument must be 'shape' (makes "
                "a tensor) or 'value' (passes the value)"
            )
        if self.dtype is not None and not isinstance(self.dtype, torch.dtype):
            raise UsageError(f"dtype must be a torch.dtype such as torch.int64, got {self.dtype!r}")
        if self.value_type == "value":
            if self.dtype is not None or self.generator is not None:
                raise UsageError(
                    f"TensorInfo('value', {self.value!r:.60}): a value takes no dtype and no "
                    "generator; remove them, or use 'shape'"
                )
            return
        shape = unwrap(self.value)
        sizes = shape if isinstance(shape, Sequence) and not isinstance(shape, str) else [None]
        if not all(map(_is_integer, sizes)):
            raise UsageError(
                f"TensorInfo('shape', {self.value!r}): a shape is a tuple of sizes such as "
                "(8, 32); to pass the value itself, use 'value'"
            )

    @property
    def shape(self) -> tuple[int, ...] | None:
        """The shape of the tensor; None if it is not a tensor."""
        if self.value_type == "shape":
            return tuple(unwrap(self.value))
        value = unwrap(self.value)
        return tuple(value.shape) if isinstance(value, torch.Tensor) else None

    @property
    def numel(self) -> int:
        """The number of elements of the tensor; 0 if it is not a tensor."""
        return 0 if self.shape is None else math.prod(self.shape)


@dataclasses.dataclass(slots=True)
class PartitionConfig:
    """An operator, its arguments, and the splits to check.

    You can assign fields, also those of the arguments, until it is used; it is then checked again.

    Attributes:
        fsig: full name of the operator, such as `torch.nn.functional.linear`; for a method such as
            `torch.Tensor.view`, the first argument is the tensor.
        args: the positional arguments.
        kwargs: the keyword arguments; a `TensorInfo` among them is a tensor.
        noutputs: number of tensors that the operator returns.
        parti_options: the dimensions to split, such as `{'idx': 1, 'dim': 0}`; `idx` counts inputs
            and then outputs, and an optional `num` is the number of ranks.
        import_customized_func: import statements that `fsig` needs.
        non_grad_indices: arguments that need no gradient, such as running statistics.
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
            raise UsageError(
                f"fsig must be the name of an operator such as 'torch.add', got {self.fsig!r}"
            )
        for position, info in enumerate(self.args):
            if not isinstance(info, TensorInfo):
                raise UsageError(
                    f"args[{position}] of {self.fsig} must be TensorInfo('shape', ...) or "
                    f"TensorInfo('value', ...), got {info!r:.60}"
                )
        if not _is_integer(self.noutputs, least=1):
            raise UsageError(f"noutputs must be an integer of 1 or more, got {self.noutputs!r}")
        for index in self.non_grad_indices:
            if not _is_integer(index) or index >= len(self.args):
                raise UsageError(
                    f"non_grad_indices names argument {index!r}, but {self.fsig} has arguments "
                    f"0 to {len(self.args) - 1}"
                )
        for option in self.parti_options:
            Option.of(option, least_ranks=2)

    def as_used(self) -> PartitionConfig:
        """A copy, checked again: fields may have been assigned since this one was made."""
        args = [_copy_info(info) for info in self.args]
        kwargs = {name: _copy_info(value) for name, value in self.kwargs.items()}
        return dataclasses.replace(self, args=args, kwargs=kwargs)


VerifyConfig = PartitionConfig  # the name in nnScaler, for scripts that were written for it


def _copy_info(value: Any) -> Any:
    return dataclasses.replace(value) if isinstance(value, TensorInfo) else value


def _is_integer(value: Any, least: int = 0) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


# --- The values that an operator needs, by the names of operator and parameter --------------------

# Ids of an embedding are indices into its table, a mask is bool, a variance is positive. Arguments
# that are not in the table below can be any numbers. An operator's definition says where its
# parameters are.

_IGNORED_SHARE = 4  # one target in 4 is ignored


_NORM = "x weight bias running_mean running_var"


@dataclasses.dataclass(frozen=True)
class WantedCall:
    """The name and arguments of an operator before the tensors are made."""

    name: str
    args: Sequence[TensorInfo]
    kwargs: Mapping[str, Any]

    @property
    def short_name(self) -> str:
        """The last part of the name, without the underscore of in-place variants."""
        last = self.name.rpartition(".")[2]
        return last.rstrip("_") if not last.startswith("_") else last

    @functools.cached_property
    def parameters(self) -> list[str]:
        """The names of the parameters in order, as far as they are known."""
        homes = (f"{home}.{self.short_name}" for home in _HOMES)
        names = (name_in_library(self.name), *homes)
        operator = next(filter(None, map(operator_called, names)), None)
        undefined = _UNDEFINED.get(self.name) or _UNDEFINED.get(self.short_name)
        return (undefined or (operator.parameters if operator else "x other")).split()

    def parameter(self, argument_place: Place) -> str | None:
        """The name of the parameter of an argument."""
        if isinstance(argument_place, str):
            return "x" if argument_place == "input" else argument_place
        in_order = argument_place < len(self.parameters)
        return self.parameters[argument_place] if in_order else None

    def info(self, parameter: str) -> TensorInfo | None:
        """An argument, given by position or by name."""
        named = {self.parameter(key): value for key, value in self.kwargs.items()}
        named |= {self.parameter(position): info for position, info in enumerate(self.args)}
        argument_info = named.get(parameter)
        if argument_info is None or isinstance(argument_info, TensorInfo):
            return argument_info
        return TensorInfo("value", argument_info)

    def value(self, parameter: str, default: Any = None) -> Any:
        """The value of an argument that is not a tensor."""
        info = self.info(parameter)
        return default if info is None or info.value_type == "shape" else unwrap(info.value)

    def shape(self, parameter: str = "x") -> tuple[int, ...]:
        """The shape of an argument; empty if it is not a tensor."""
        info = self.info(parameter)
        return (info.shape or ()) if info is not None else ()

    def size(self, parameter: str, dim: int) -> int:
        """The length of an argument along a dimension; 1 if there is no such dimension."""
        shape = self.shape(parameter)
        return shape[dim] if -len(shape) <= dim < len(shape) else 1


# Where an operator of another place may have its definition, as `torch.Tensor.sqrt_` has.
_HOMES = ("torch.nn.functional", "torch", "torch.linalg", "aten", "nnscaler.graph.function.wrapnn")

# The parameters of operators without a definition, other than `x other`.
_UNDEFINED = {
    name: parameters
    for names, parameters in (
        ("masked_select masked_scatter", "x mask"),
        ("scatter_reduce", "x dim index"),
        ("solve slogdet", "A"),
        ("aten.nll_loss_forward aten.nll_loss_nd", "x target weight"),
        ("aten.embedding_bag", "weight indices"),
        ("aten.native_batch_norm aten._native_batch_norm_legit", _NORM),
        ("torch.instance_norm aten.instance_norm", _NORM),
    )
    for name in names.split()
}


Rule = Callable[[WantedCall], Domain]


def _always(domain: Domain) -> Rule:
    return lambda _: domain


def _row_ids(wanted_call: WantedCall) -> Domain:
    """Ids for an embedding, which may hold only a part of the vocabulary."""
    start = wanted_call.value("start", 0)
    return indices(start, start + wanted_call.size("weight", 0))


def _attention_mask(wanted_call: WantedCall) -> Domain:
    """A mask that lets each query see at least one key, because otherwise the result is NaN."""
    info = wanted_call.info("attn_mask")
    if info is None or info.dtype != torch.bool:
        return normal

    def draw(shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
        visible_keys = mask(shape, generator)
        if shape and shape[-1]:
            visible_keys[..., 0] = True
        return visible_keys

    return draw


def _indices_along(wanted_call: WantedCall, *, unique: bool = False) -> Domain:
    """Indices into the first argument along a dimension."""
    dim = wanted_call.value("dim")
    if not isinstance(dim, int):
        return indices(0, math.prod(wanted_call.shape()))
    size = wanted_call.size("x", dim)
    if unique:
        index = wanted_call.shape("index")
        return permutations(size, dim if len(index) == len(wanted_call.shape()) else 0)
    return indices(0, size)


def _classes(wanted_call: WantedCall) -> Domain:
    """Targets of a classification: classes, or probabilities if they have the shape of scores."""
    scores = wanted_call.shape()
    dim = 1 if len(scores) > 1 else 0
    if wanted_call.short_name == "cross_entropy" and wanted_call.shape("target") == scores:
        return lambda shape, generator: distribution(shape, generator, dim)
    draw = indices(0, wanted_call.size("x", dim))
    ignored = wanted_call.kwargs.get("ignore_index")
    if not isinstance(ignored, int):
        return draw

    def with_ignored(shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
        targets = draw(shape, generator).reshape(-1)
        # All at the front, so that ranks with different samples ignore different numbers of them.
        targets[: len(targets) // _IGNORED_SHARE] = ignored
        return targets.reshape(shape)

    return with_ignored


def _one_hot(wanted_call: WantedCall) -> Domain:
    classes = wanted_call.value("num_classes", -1)
    return indices(0, classes if classes > 0 else 10)


def _kl_target(wanted_call: WantedCall) -> Domain:
    logs = wanted_call.kwargs.get("log_target", False)
    return log_distribution if logs else distribution


def _base(wanted_call: WantedCall) -> Domain:
    """The base of a power: positive unless the exponent is an integer."""
    exponent = wanted_call.value("exponent", wanted_call.value("other"))
    is_whole_number = isinstance(exponent, int) or (
        isinstance(exponent, float) and exponent.is_integer()
    )
    return away_from_zero if is_whole_number else between(0.5, 2.0)


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
_INVERTIBLE = _always(well_conditioned)
_DEFINITE = _always(positive_definite)
_COUNTER = _always(constant(3))

# Operators, and the rule for an argument by its parameter.
_Arguments = dict[str, Rule]
_TABLE: list[tuple[str, _Arguments]] = [
    ("sqrt rsqrt log log2 log10 log1p lgamma digamma poisson", {"x": _POSITIVE}),
    ("asin arcsin acos arccos atanh erfinv", {"x": _SINE}),
    ("logit bernoulli multinomial", {"x": _PROBABILITY}),
    ("acosh", {"x": _always(between(1.1, 4.0))}),
    ("grid_sample", {"grid": _SINE}),
    ("reciprocal", {"x": _DENOMINATOR}),
    ("div divide true_divide truediv", {"other": _DENOMINATOR}),
    ("floor_divide remainder fmod", {"other": _DENOMINATOR}),
    ("pow float_power", {"x": _base}),
    ("xlogy", {"x": _POSITIVE, "other": _POSITIVE}),
    ("prod cumprod", {"x": _FACTORS}),
    # masks and integers
    ("where", {"condition": _MASK}),
    ("masked_fill masked_select masked_scatter", {"mask": _MASK}),
    ("any all logical_not", {"x": _MASK}),
    ("logical_and logical_or logical_xor", {"x": _MASK, "other": _MASK}),
    ("bitwise_and bitwise_or bitwise_xor", {"x": _BITS, "other": _BITS}),
    ("bitwise_not", {"x": _BITS}),
    ("count_nonzero nonzero bincount", {"x": _GROUP}),
    ("one_hot", {"tensor": _one_hot}),
    ("scaled_dot_product_attention", {"attn_mask": _attention_mask}),
    # indices
    ("embedding embedding_bag", {"x": _row_ids, "indices": _row_ids}),
    ("gather index_select index_add index_fill", {"index": _indices_along}),
    ("scatter_add scatter_reduce", {"index": _indices_along}),
    ("index_copy scatter", {"index": functools.partial(_indices_along, unique=True)}),
    ("take_along_dim", {"indices": _indices_along}),
    ("take", {"index": _indices_along}),
    ("bucketize", {"boundaries": _SORTED}),
    ("searchsorted", {"sorted_sequence": _SORTED}),
    # losses
    ("nll_loss cross_entropy", {"target": _classes, "weight": _POSITIVE}),
    ("aten.cross_entropy_loss", {"target": _classes, "weight": _POSITIVE}),
    ("aten.nll_loss_forward aten.nll_loss_nd", {"target": _classes, "weight": _POSITIVE}),
    ("multi_margin_loss", {"target": _classes}),
    (
        "binary_cross_entropy",
        {"x": _PROBABILITY, "target": _PROBABILITY, "weight": _POSITIVE},
    ),
    (
        "binary_cross_entropy_with_logits",
        {"target": _PROBABILITY, "weight": _POSITIVE, "pos_weight": _POSITIVE},
    ),
    ("kl_div", {"x": _always(log_distribution), "target": _kl_target}),
    ("poisson_nll_loss", {"target": _POSITIVE}),
    ("gaussian_nll_loss", {"var": _POSITIVE}),
    ("hinge_embedding_loss soft_margin_loss", {"target": _SIGNS}),
    ("margin_ranking_loss cosine_embedding_loss", {"target": _SIGNS}),
    # norms and matrices
    ("batch_norm instance_norm wrap_instancenorm2d_func", {"running_var": _POSITIVE}),
    ("aten.native_batch_norm aten._native_batch_norm_legit", {"running_var": _POSITIVE}),
    ("aten._native_batch_norm_legit_no_training", {"running_var": _POSITIVE}),
    (
        "wrap_batchnorm2d_func",
        {"running_var": _POSITIVE, "num_batches_tracked": _COUNTER},
    ),
    ("inv inverse solve det slogdet logdet", {"A": _INVERTIBLE}),
    ("cholesky", {"A": _DEFINITE, "x": _DEFINITE}),
]
_RULES = {name: arguments for names, arguments in _TABLE for name in names.split()}

# Arguments that never have a gradient. Running statistics are written to, and torch has no
# derivative for the others.
_STATISTICS = {"running_mean", "running_var", "num_batches_tracked"}
_BUFFERS: list[tuple[str, set[str]]] = [
    ("batch_norm instance_norm wrap_batchnorm2d_func wrap_instancenorm2d_func", _STATISTICS),
    ("aten.native_batch_norm aten._native_batch_norm_legit", _STATISTICS),
    ("aten._native_batch_norm_legit_no_training", _STATISTICS),
    ("cross_entropy cross_entropy_loss nll_loss", {"weight"}),
    ("soft_margin_loss", {"target"}),
]
_WITHOUT_GRADIENT = {name: parameters for names, parameters in _BUFFERS for name in names.split()}


def is_buffer(wanted_call: WantedCall, argument_place: Place) -> bool:
    """Whether an argument never has a gradient, even if it is floating."""
    names = wanted_call.name, wanted_call.short_name
    parameters = next((_WITHOUT_GRADIENT[n] for n in names if n in _WITHOUT_GRADIENT), set[str]())
    return wanted_call.parameter(argument_place) in parameters


def domain_of(wanted_call: WantedCall, argument_place: Place) -> Domain:
    """The domain of an argument that is given by its shape."""
    rules = _RULES.get(wanted_call.name) or _RULES.get(wanted_call.short_name, {})
    rule = rules.get(wanted_call.parameter(argument_place) or "")
    return rule(wanted_call) if rule else normal


# --- Making a call from a configuration -----------------------------------------------------------

# Shapes are used as given. If they do not fit, the operator raises an error.


def make_call(
    config: PartitionConfig, function: Callable[..., Any], *, seed: int = 0
) -> OperatorCall:
    """The call that a configuration describes; the same seed gives the same call."""
    name = config.fsig.replace(":", ".")
    wanted_call = WantedCall(name, config.args, config.kwargs)
    args = [
        make_value(wanted_call, position, info, seed) for position, info in enumerate(config.args)
    ]
    kwargs = {
        key: make_value(wanted_call, key, value, seed)
        if isinstance(value, TensorInfo)
        else unwrap(value)
        for key, value in config.kwargs.items()
    }
    named = [(key, info) for key, info in config.kwargs.items() if isinstance(info, TensorInfo)]
    places: list[tuple[Place, TensorInfo]] = [*enumerate(config.args), *named]
    without = {
        argument_place
        for argument_place, info in places
        if info.requires_grad is False or is_buffer(wanted_call, argument_place)
    }
    return OperatorCall(
        function,
        tuple(args),
        kwargs,
        name=name,
        without_gradient=frozenset(without | set(config.non_grad_indices)),
        seed=seed,
    )


def make_value(wanted_call: WantedCall, argument_place: Place, info: TensorInfo, seed: int) -> Any:
    """One argument of a call: its value, or a random tensor.

    Raises:
        UsageError: no tensor of this shape and dtype fits.
    """
    if info.value_type == "value":
        value = unwrap(info.value)
        return value.detach() if isinstance(value, torch.Tensor) else value
    shape = info.shape or ()
    if info.generator is not None and not isinstance(info.generator, torch.Generator):
        return _check_generated(wanted_call, argument_place, info.generator(shape), info)
    generator = info.generator or generator_for(seed, argument_place)
    drawn = _domain_for(domain_of(wanted_call, argument_place), info.dtype)(shape, generator)
    if tuple(drawn.shape) != shape:
        # Only unique indices can be fewer than requested.
        raise UsageError(
            f"{_argument_name(argument_place)} of {wanted_call.name} has the shape {shape}, "
            "but its indices must "
            f"be unique, so the shape can be at most {tuple(drawn.shape)}; use a smaller shape, or "
            "pass the indices as a 'value'"
        )
    return _in_dtype(drawn, info.dtype, wanted_call, argument_place)


def generator_for(seed: int, argument_place: Place) -> torch.Generator:
    """A stream for each argument, so that adding an argument does not change the others."""
    digest = hashlib.sha256(f"{seed}:{argument_place}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))


def _domain_for(domain: Domain, dtype: torch.dtype | None) -> Domain:
    """The domain for a dtype that is complex or cannot hold fractions."""
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
    drawn: torch.Tensor, dtype: torch.dtype | None, wanted_call: WantedCall, argument_place: Place
) -> torch.Tensor:
    if dtype is None:
        return drawn.to(torch.float32) if drawn.is_floating_point() else drawn
    cast = drawn.to(dtype)
    if not is_inexact(drawn) and not torch.equal(cast.to(drawn.dtype), drawn):
        raise UsageError(
            f"{_argument_name(argument_place)} of {wanted_call.name} needs integers up to "
            f"{int(drawn.max())}, "
            f"which {dtype} cannot represent; remove dtype, or use torch.int64"
        )
    return cast


def _check_generated(
    wanted_call: WantedCall, argument_place: Place, generated: Any, info: TensorInfo
) -> torch.Tensor:
    """The tensor that the user's function returned, if it is the requested one."""
    what = f"the generator of {_argument_name(argument_place)} of {wanted_call.name}"
    if not isinstance(generated, torch.Tensor):
        raise UsageError(f"{what} must return a tensor, got {generated!r:.60}")
    if tuple(generated.shape) != info.shape:
        raise UsageError(f"{what} returned the shape {tuple(generated.shape)}, not {info.shape}")
    if info.dtype is not None and generated.dtype != info.dtype:
        raise UsageError(f"{what} returned {generated.dtype}, not {info.dtype}")
    return generated.detach()


def _argument_name(argument_place: Place) -> str:
    return f"args[{argument_place}]" if isinstance(argument_place, int) else repr(argument_place)

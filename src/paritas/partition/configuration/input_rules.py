"""What an operator takes for an argument, by the names of both.

An embedding's ids are indices of its table, a mask is of bools, a variance is positive. What is
not in the table here takes any numbers.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from paritas.partition.configuration import input_domains as domains
from paritas.partition.configuration.config import TensorInfo, unwrap

if TYPE_CHECKING:
    from paritas.partition.recipes import Place

__all__ = ["Asked", "domain_of", "is_buffer"]

_IGNORED_SHARE = 4  # one target in so many


@dataclasses.dataclass(frozen=True)
class Asked:
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

Rule = Callable[[Asked], domains.Domain]


def _always(domain: domains.Domain) -> Rule:
    return lambda _: domain


def _rows(asked: Asked) -> domains.Domain:
    """The ids of an embedding: of its table, or of the part of the vocabulary that it holds."""
    of_nnscaler = asked.name.startswith("nnscaler.")  # torch's fourth argument is another one
    start = asked.value(3, "start", 0) if of_nnscaler else 0
    return domains.indices(start, start + asked.size(1, "weight", 0))


def _table_rows(asked: Asked) -> domains.Domain:
    """The same where the table comes first."""
    return domains.indices(0, asked.size(0, "weight", 0))


def _attention_mask(asked: Asked) -> domains.Domain:
    """Which keys a query sees, one at least: of none, an average is not a number."""
    info = asked.info(3, "attn_mask")
    if info is None or info.dtype != torch.bool:
        return domains.normal

    def draw(shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
        seen = domains.mask(shape, generator)
        if shape and shape[-1]:
            seen[..., 0] = True
        return seen

    return draw


def _along(dim_position: int, *, unique: bool = False) -> Rule:
    """Indices into the first argument along the dimension that another argument names."""

    def rule(asked: Asked) -> domains.Domain:
        dim = asked.value(dim_position, "dim")
        shape = asked.shape(0, "input")
        if not isinstance(dim, int):
            return domains.indices(0, math.prod(shape))
        size = asked.size(0, "input", dim)
        if unique:
            index = asked.shape(3 - dim_position, "index")
            return domains.permutations(size, dim if len(index) == len(shape) else 0)
        return domains.indices(0, size)

    return rule


def _classes(asked: Asked) -> domains.Domain:
    """The targets of a classification: classes, or probabilities if they are shaped like scores."""
    scores = asked.shape(0, "input")
    dim = 1 if len(scores) > 1 else 0
    if asked.short_name == "cross_entropy" and asked.shape(1, "target") == scores:
        return lambda shape, generator: domains.distribution(shape, generator, dim)
    draw = domains.indices(0, asked.size(0, "input", dim))
    ignored = asked.kwargs.get("ignore_index")
    if not isinstance(ignored, int):
        return draw

    def with_ignored(shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
        targets = draw(shape, generator).reshape(-1)
        # All at the front: ranks that divide the batch then have different numbers that count.
        targets[: len(targets) // _IGNORED_SHARE] = ignored
        return targets.reshape(shape)

    return with_ignored


def _one_hot(asked: Asked) -> domains.Domain:
    classes = asked.value(1, "num_classes", -1)
    return domains.indices(0, classes if classes > 0 else 10)


def _kl_target(asked: Asked) -> domains.Domain:
    logs = asked.kwargs.get("log_target", False)
    return domains.log_distribution if logs else domains.distribution


def _base(asked: Asked) -> domains.Domain:
    """The base of a power: positive unless the exponent is a whole number."""
    exponent = asked.value(1, "exponent")
    whole = isinstance(exponent, int) or (isinstance(exponent, float) and exponent.is_integer())
    return domains.away_from_zero if whole else domains.between(0.5, 2.0)


_POSITIVE = _always(domains.between(0.1, 4.0))
_PROBABILITY = _always(domains.between(0.0, 1.0))
_SINE = _always(domains.between(-0.95, 0.95))
_MASK = _always(domains.mask)
_SIGNS = _always(domains.signs)
_DENOMINATOR = _always(domains.away_from_zero)
_SORTED = _always(domains.sorted_values)
_FACTORS = _always(domains.between(0.6, 1.6))
_BITS = _always(domains.whole_numbers(0, 256))
_GROUP = _always(domains.whole_numbers(0, 3))
_INVERTIBLE = _always(domains.conditioned)
_DEFINITE = _always(domains.positive_definite)
_COUNTER = _always(domains.constant(3))

# Operators, and (position, name) of an argument with what is drawn for it.
_Arguments = dict[tuple[int, str], Rule]
_TABLE: list[tuple[str, _Arguments]] = [
    ("sqrt rsqrt log log2 log10 log1p lgamma digamma poisson", {(0, "input"): _POSITIVE}),
    ("asin arcsin acos arccos atanh erfinv", {(0, "input"): _SINE}),
    ("logit bernoulli multinomial", {(0, "input"): _PROBABILITY}),
    ("acosh", {(0, "input"): _always(domains.between(1.1, 4.0))}),
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
    ("embedding embedding_bag", {(0, "input"): _rows}),
    ("gather index_select index_add index_fill", {(2, "index"): _along(1)}),
    ("scatter_add scatter_reduce", {(2, "index"): _along(1)}),
    ("index_copy scatter", {(2, "index"): _along(1, unique=True)}),
    ("take_along_dim", {(1, "indices"): _along(2)}),
    ("take", {(1, "index"): _along(2)}),
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
    ("kl_div", {(0, "input"): _always(domains.log_distribution), (1, "target"): _kl_target}),
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
    "nnscaler.runtime.function.index_select": {(1, "index"): _along(2)},
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


def is_buffer(asked: Asked, place: Place) -> bool:
    """Whether an operator takes no gradient of an argument, though it may be floating."""
    places = _BUFFERS.get(asked.name) or _BUFFERS.get(asked.short_name)
    return places is not None and (place in places or place in _STATISTICS)


def domain_of(asked: Asked, place: Place) -> domains.Domain:
    """What is drawn for an argument that is given by its shape."""
    rules = _FULL_NAMES.get(asked.name) or _RULES.get(asked.short_name, {})
    for (position, name), rule in rules.items():
        if place in (position, name):
            return rule(asked)
    return domains.normal

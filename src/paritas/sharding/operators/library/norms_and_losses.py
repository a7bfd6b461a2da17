"""Normalisations and losses, also under the names of lowered graphs and of nnScaler."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import torch

from paritas.core.operators.calls import Bound, broadcast, dim_of, letters, named, positive_dims
from paritas.sharding.operators.library.elementwise import same
from paritas.sharding.operators.library.rearrangements import index_select
from paritas.sharding.operators.library.registry import AVERAGE, SUM, RuleClaim, frozen, rule, unary

if TYPE_CHECKING:
    from paritas.sharding.operators.library.registry import Rule

# --- Normalisations: what is normalised together is not split -------------------------------------


@rule("softmax log_softmax softmin _softmax _log_softmax cumsum cumprod logcumsumexp")
def _along(bound: Bound) -> RuleClaim | None:
    """One dimension is needed as a whole; the shape stays the same."""
    return _whole_along(bound, bound.get("dim")) if isinstance(bound.get("dim"), int) else None


@rule("normalize")
def _normalize(bound: Bound) -> RuleClaim | None:
    return _whole_along(bound, bound.get("dim", 1))


def _whole_along(bound: Bound, dim: object) -> RuleClaim | None:
    dims, whole = bound.dims(), positive_dims(dim, bound.shape())
    return None if dims is None or whole is None else unary(frozen(dims, whole))


@rule("layer_norm rms_norm")
def _last(bound: Bound) -> RuleClaim | None:
    dims, normalized = bound.dims(), bound.get("normalized_shape")
    if dims is None or not isinstance(normalized, list | tuple):
        return None
    start = len(dims) - len(normalized)
    dims = frozen(dims, range(start, len(dims)))
    inputs = {"x": dims, "weight": dims[start:], "bias": dims[start:]}
    return RuleClaim({n: d for n, d in inputs.items() if bound.has(n)}, (dims,))


@rule("native_layer_norm")
def _last_with_statistics(bound: Bound) -> RuleClaim | None:
    """The mean and the inverse deviation are results too."""
    claim = _last(bound)
    if claim is None:
        return None
    count = len(bound.get("normalized_shape"))
    statistics = [*claim.inputs["x"][:-count], *["1"] * count]
    return RuleClaim(claim.inputs, (*claim.outputs, statistics, statistics))


@rule("group_norm")
def _groups(bound: Bound) -> RuleClaim | None:
    """Samples can be split, and groups, whose number is divided."""
    shape = bound.shape()
    if shape is None or len(shape) < 2:  # noqa: PLR2004 - samples and channels
        return None
    divided = bound.get("num_groups", 1) > 1
    channels = "(g c^)" if divided else "c^"
    dims = [dim_of(shape[0], "b"), channels, *(f"{n}^" for n in letters(len(shape) - 2, 3))]
    inputs = {"x": dims, "weight": [channels], "bias": [channels]}
    numbers = (("num_groups", None, "g"),) if divided else ()
    return RuleClaim({n: d for n, d in inputs.items() if bound.has(n)}, (dims,), numbers)


_VECTORS = ("running_mean", "running_var", "weight", "bias")


def _channelwise(
    bound: Bound, whole: tuple[int, ...], vectors: tuple[str, ...] = _VECTORS
) -> RuleClaim | None:
    """Vectors have one entry for each channel."""
    dims = bound.dims()
    if dims is None or len(dims) < 2:  # noqa: PLR2004 - samples and channels
        return None
    dims = frozen(dims, whole)
    inputs = {"x": dims} | {name: dims[1:2] for name in vectors if bound.has(name)}
    return RuleClaim(inputs, (dims,))


@rule("batch_norm")
def _batch(bound: Bound) -> RuleClaim | None:
    """With statistics of the batch, only channels can be split; with given ones, everything."""
    shape = bound.shape() or ()
    return _channelwise(bound, (0, *range(2, len(shape))) if bound.get("training", False) else ())


@rule("instance_norm")
def _instance(bound: Bound) -> RuleClaim | None:
    """Samples are independent, except for running statistics, which all of them update."""
    if not bound.get("use_input_stats", True):
        return _channelwise(bound, ())
    space = tuple(range(2, len(bound.shape() or ())))
    samples = (0,) if bound.has("running_mean") or bound.has("running_var") else ()
    return _channelwise(bound, samples + space)


@rule("local_response_norm")
def _response(bound: Bound) -> RuleClaim | None:
    """Each channel depends on its neighbours."""
    return _channelwise(bound, (1,), ())


@rule("cosine_similarity")
def _cosine(bound: Bound) -> RuleClaim | None:
    return _paired(bound, bound.get("dim", 1))


@rule("pairwise_distance")
def _pairwise(bound: Bound) -> RuleClaim | None:
    return None if bound.get("keepdim") else _paired(bound, -1)


def _paired(bound: Bound, dim: int) -> RuleClaim | None:
    """Two tensors that broadcast, reduced over one dimension."""
    first, second = bound.shape("x1"), bound.shape("x2")
    if first is None or second is None or len(first) != len(second):
        return None
    found = broadcast((first, second))
    whole = positive_dims(dim, first)
    if found is None or whole is None:
        return None
    (left, right), outside = found
    kept = [d for i, d in enumerate(outside) if i != whole[0]]
    return RuleClaim({"x1": frozen(left, whole), "x2": frozen(right, whole)}, (kept,))


# --- Losses: samples are split as the reduction says; a mean only if every element counts ---------

# A mean over targets of which some are ignored, or weighted by class, is not the mean of the ranks'
# means. This depends on the targets, so the rules look at them.

_MARKS = {"sum": SUM, "mean": AVERAGE}
_OLD = ("size_average", "reduce")


def _reduction(bound: Bound) -> str | None:
    """The reduction of the loss; None if it is unknown or given by the old switches."""
    reduction = bound.get("reduction", "mean")
    if any(bound.get(name) is not None for name in _OLD) or reduction not in ("none", *_MARKS):
        return None
    return str(reduction)


def _reduced(dims: list[str], reduction: str) -> tuple[list[str], list[str]]:
    """The dimensions of the elements, and those of the result."""
    if reduction == "none":
        return dims, dims
    return [d if d == "1" else d + _MARKS[reduction] for d in dims], []


def _elementwise_loss(*names: str) -> Rule:
    """A rule for a loss with one element for each element of these tensors."""

    def claim(bound: Bound) -> RuleClaim | None:
        dims, reduction = bound.dims(names[0]), _reduction(bound)
        if dims is None or reduction is None or len({bound.shape(name) for name in names}) > 1:
            return None
        inside, left = _reduced(dims, reduction)
        return RuleClaim(dict.fromkeys(names, inside), (left,))

    return claim


_OF_TARGET = _elementwise_loss("x", "target")

rule("gaussian_nll_loss")(_elementwise_loss("x", "target", "var"))
rule("margin_ranking_loss")(_elementwise_loss("input1", "input2", "target"))


@rule(
    "functional.mse_loss functional.l1_loss functional.smooth_l1_loss",
    "functional.huber_loss functional.soft_margin_loss poisson_nll_loss",
    "hinge_embedding_loss",
)
def _by_element(bound: Bound) -> RuleClaim | None:
    return None if bound.has("weight") else _OF_TARGET(bound)


@rule("binary_cross_entropy binary_cross_entropy_with_logits")
def _binary(bound: Bound) -> RuleClaim | None:
    """The mean is over all elements, whatever their weights, which broadcast."""
    claim = _OF_TARGET(bound)
    if claim is None:
        return None
    dims = claim.inputs["x"]
    weights = {n: s for n in ("weight", "pos_weight") if (s := bound.shape(n)) is not None}
    if any(len(shape) > len(dims) for shape in weights.values()):
        return None
    own = {name: named(shape, dims) for name, shape in weights.items()}
    return RuleClaim({**claim.inputs, **own}, claim.outputs)


@rule("kl_div")
def _divergence(bound: Bound) -> RuleClaim | None:
    """`batchmean` averages over samples and sums over everything else."""
    dims = bound.dims()
    if not dims or bound.shape("target") != bound.shape():
        return None
    if bound.get("reduction") == "batchmean" and all(bound.get(n) is None for n in _OLD):
        marks = [AVERAGE, *[SUM] * (len(dims) - 1)]
        dims = [d if d == "1" else d + mark for d, mark in zip(dims, marks, strict=True)]
        return RuleClaim({"x": dims, "target": dims}, ([],))
    return _OF_TARGET(bound)


@rule(
    "cosine_embedding_loss triplet_margin_loss multi_margin_loss multilabel_margin_loss",
    "multilabel_soft_margin_loss",
)
def _samples(bound: Bound) -> RuleClaim | None:
    """One loss for each vector; class weights apply within a sample."""
    reduction = _reduction(bound)
    names = ("x", "input1", "input2", "target", "anchor", "positive", "negative")
    shapes = {n: s for n in names if (s := bound.shape(n)) is not None}
    if reduction is None or not shapes:
        return None
    vectors = next(iter(shapes.values()))
    if len(vectors) != 2 or any(s not in (vectors, vectors[:1]) for s in shapes.values()):  # noqa: PLR2004
        return None
    sample, left = _reduced(named(vectors[:1], ["b"]), reduction)
    classes = dim_of(vectors[1], "c^")
    inputs = {
        name: [*sample, classes] if len(shape) > 1 else sample for name, shape in shapes.items()
    }
    if bound.has("weight"):
        inputs["weight"] = [classes]
    return RuleClaim(inputs, (left,))


@rule("cross_entropy nll_loss")
def _by_class(bound: Bound) -> RuleClaim | None:
    """Classes are not split; samples and positions are averaged only if each counts as one."""
    shape, target = bound.shape(), bound.shape("target")
    reduction = _reduction(bound)
    if shape is None or target is None or reduction is None or len(shape) < 2:  # noqa: PLR2004
        return None
    names = named(shape, letters(len(shape)))
    dims, left = _reduced([names[0], *names[2:]], reduction)
    if reduction == "mean" and not _all_alike(bound):
        dims = [d if d == "1" else f"{d.removesuffix(AVERAGE)}^" for d in dims]
    classes = dim_of(shape[1], "k^")
    inputs = {"x": [dims[0], classes, *dims[1:]], "target": dims}
    if target == shape:
        inputs["target"] = inputs["x"]
    elif target != (shape[0], *shape[2:]):
        return None
    if bound.has("weight"):
        inputs["weight"] = [classes]
    return RuleClaim(inputs, (left,))


@rule("ctc_loss")
def _sequences(bound: Bound) -> RuleClaim | None:
    """Sequences are independent; the mean is over sequences, each divided by its own length.

    Concatenated targets cannot be split by sample, and lengths must be tensors to be split.
    """
    scores, targets = bound.shape("log_probs"), bound.shape("targets")
    lengths = (bound.shape("input_lengths"), bound.shape("target_lengths"))
    reduction = _reduction(bound)
    if scores is None or targets is None or reduction is None or len(scores) != 3:  # noqa: PLR2004
        return None
    if len(targets) != 2 or any(length != (scores[1],) for length in lengths):  # noqa: PLR2004
        return None
    (sample,), left = _reduced(named(scores[1:2], ["b"]), reduction)
    inputs = {
        "log_probs": ["_", sample, "_"],
        "targets": [sample, "_"],
        "input_lengths": [sample],
        "target_lengths": [sample],
    }
    return RuleClaim(inputs, (left,))


def _all_alike(bound: Bound) -> bool:
    """Whether every target has the same weight in a mean."""
    target = bound.get("target")
    if target.is_floating_point():
        return True  # targets that are probabilities are never ignored
    if bound.has("weight") or target.is_meta:
        return False
    return not bool((target == bound.get("ignore_index", -100)).any())


# --- Operators of exported and decomposed graphs --------------------------------------------------

# The numbers of aten for reductions.
_REDUCTIONS = {0: "none", 1: "mean", 2: "sum"}
_IMAGES = 3  # samples, channels, one dimension of space


def _in_words(bound: Bound) -> Bound:
    """The same call with the reduction as a word."""
    number = bound.get("reduction", 1)
    words = _REDUCTIONS.get(number, number) if isinstance(number, int) else number
    return dataclasses.replace(bound, values={**bound.values, "reduction": words})


@rule("cross_entropy_loss")
def _cross_entropy(bound: Bound) -> RuleClaim | None:
    return _by_class(_in_words(bound))


@rule("aten.mse_loss aten.l1_loss aten.soft_margin_loss aten.smooth_l1_loss aten.huber_loss")
def _elements(bound: Bound) -> RuleClaim | None:
    return _by_element(_in_words(bound))


@rule("native_dropout")
def _dropout(bound: Bound) -> RuleClaim | None:
    """The result and the mask."""
    dims = bound.dims()
    return None if dims is None else unary(dims, dims, dims)


@rule("_native_batch_norm_legit_no_training")
def _batch_norm(bound: Bound) -> RuleClaim | None:
    """With given statistics everything can be split; those of the batch are empty."""
    claim = _channelwise(bound, ())
    return None if claim is None else RuleClaim(claim.inputs, (*claim.outputs, "_", "_"))


@rule("native_group_norm")
def _group_norm(bound: Bound) -> RuleClaim | None:
    """Only samples are split, and their number is divided."""
    shape = bound.shape()
    if shape is None or len(shape) < _IMAGES - 1 or "N" not in bound.values:
        return None
    samples = dim_of(shape[0], "b")
    dims = [samples, *["_"] * (len(shape) - 1)]
    inputs = {"x": dims} | {name: ["_"] for name in ("weight", "bias") if bound.has(name)}
    numbers = () if shape[0] == 1 else (("N", None, "b"),)
    return RuleClaim(inputs, (dims, [samples, "_"], [samples, "_"]), numbers)


@rule(
    "upsample_nearest1d upsample_nearest2d upsample_nearest3d upsample_linear1d",
    "upsample_bilinear2d upsample_bicubic2d upsample_trilinear3d",
)
def _upsample(bound: Bound) -> RuleClaim | None:
    """Samples and channels are independent."""
    dims = bound.dims()
    if dims is None or len(dims) < _IMAGES:
        return None
    return unary([*dims[:2], *["_"] * (len(dims) - 2)])


@rule("index")
def _index(bound: Bound) -> RuleClaim | None:
    """Dimensions with an index cannot be split, all others can.

    The dimensions of the indices replace theirs; if theirs are not adjacent, they come first.
    """
    dims, items = bound.dims(), bound.get("indices")
    if dims is None or not isinstance(items, list | tuple) or len(items) > len(dims):
        return None
    picked = [at for at, item in enumerate(items) if item is not None]
    tensors = [item for item in items if item is not None]
    known = all(isinstance(t, torch.Tensor) and t.dtype != torch.bool for t in tensors)
    if not picked or not known:
        return None
    inside = ["_" if at in picked else dim for at, dim in enumerate(dims)]
    made = ["_"] * max(t.dim() for t in tensors)
    adjacent = picked[-1] - picked[0] + 1 == len(picked)
    first = picked[0] if adjacent else 0
    kept = [dim for at, dim in enumerate(dims) if at not in picked]
    return unary(inside, [*kept[:first], *made, *kept[first:]])


# --- Functions of nnScaler, under the names in its users' configurations --------------------------

_RUNNING = ("running_mean", "running_var")

rule("identity nndropout")(same)
rule("function.index_select")(index_select)


@rule("function.embedding")
def _embedding(bound: Bound) -> RuleClaim | None:
    """A rank with a part of the vocabulary returns zeros for all other ids."""
    dims = bound.dims()
    if dims is None or not bound.has("weight") or not {"start", "stop"} <= set(bound.values):
        return None
    inputs = {"x": dims, "weight": [f"v{SUM}", "w"]}
    return RuleClaim(inputs, ([*dims, "w"],), bounds=("start", "stop", "v"))


@rule("fullslice")
def _slice(bound: Bound) -> RuleClaim | None:
    """A dimension with a full slice can be split; one with a cut or an index cannot."""
    dims, slicers = bound.dims(), bound.get("slicers", ())
    if dims is None or not all(s is None or isinstance(s, int | slice) for s in slicers):
        return None
    rest = iter(dims)
    inside: list[str] = []
    outside: list[str] = []
    for slicer in slicers:
        if slicer is None:
            outside.append("1")
            continue
        name = next(rest)
        whole = isinstance(slicer, slice) and slicer == slice(None)
        inside.append(name if whole else "_")
        outside += inside[-1:] if isinstance(slicer, slice) else []
    left = list(rest)
    return unary([*inside, *left], [*outside, *left])


@rule("wrap_batchnorm2d_func")
def _wrapped_batch_norm(bound: Bound) -> RuleClaim | None:
    """In training, ranks with different samples share the statistics of the batch.

    Outside of training they do not, so samples are not split if the batch's statistics are used.
    """
    trains = bound.get("training", True)
    of_batch = trains or not bound.has("running_mean")
    claim = _channelwise(bound, (2, 3) if trains else (0, 2, 3) if of_batch else ())
    if claim is None or not trains:
        return claim
    samples = claim.inputs["x"][0]
    group = None if samples == "1" else ("process_group", samples)
    return dataclasses.replace(claim, group=group)


@rule("wrap_instancenorm2d_func")
def _instance_norm(bound: Bound) -> RuleClaim | None:
    """Samples are independent, but each rank's running statistics are of its own samples.

    nnScaler splits it like this and does not check the statistics, so there is no claim about them.
    """
    if len(bound.shape() or ()) != 4:  # noqa: PLR2004 - images
        return None
    # `num_features` is not divided, so affine channels are not split.
    channels = (1,) if bound.get("affine", False) else ()
    claim = _channelwise(bound, (*channels, 2, 3))
    updates = bound.get("training", True) or not bound.get("track_running_stats", False)
    if claim is None or not updates:
        return claim
    samples = claim.inputs["x"][0]
    running = [] if samples == "1" else [name for name in _RUNNING if bound.has(name)]
    own = {name: [*claim.inputs[name], ":", f"@{samples}"] for name in running}
    return dataclasses.replace(claim, inputs={**claim.inputs, **own})

"""Normalisations and losses, also under the names of lowered graphs and of nnScaler."""

from __future__ import annotations

import dataclasses

import torch

from paritas.partition.library.elementwise import same
from paritas.partition.library.rearrangements import index_select
from paritas.partition.library.registry import (
    AVERAGE,
    SUM,
    Bound,
    RuleClaim,
    broadcast,
    everywhere,
    frozen,
    functional,
    letters,
    named,
    positive_dims,
    rule,
)

# --- Normalisations: what is normalised together stays together -----------------------------------


def _marked(shape: tuple[int, ...], whole: tuple[int, ...]) -> str:
    """The dimensions of a tensor of which some stay whole."""
    return frozen(named(shape, letters(len(shape))), whole)


# --- over dimensions of the tensor ----------------------------------------------------------------


@rule("x dim _stacklevel dtype", functional("softmax log_softmax softmin"))
@rule("x dim dtype", everywhere("softmax log_softmax"))
@rule("x dim dtype", "torch.special.softmax torch.special.log_softmax")
@rule("x dim half_to_float", "aten._softmax aten._log_softmax")
@rule("x dim dtype", everywhere("cumsum cumprod"))
@rule("x dim", everywhere("logcumsumexp"))
def _along(bound: Bound) -> RuleClaim | None:
    """One dimension is gone through as a whole; the shape stays."""
    shape, dim = bound.shape("x"), bound.get("dim")
    whole = positive_dims(dim, shape)
    if shape is None or not isinstance(dim, int) or whole is None:
        return None
    dims = _marked(shape, whole)
    return RuleClaim({"x": dims}, (dims,))


@rule("x p dim eps", functional("normalize"))
def _normalize(bound: Bound) -> RuleClaim | None:
    shape = bound.shape("x")
    whole = positive_dims(bound.get("dim", 1), shape)
    if shape is None or whole is None:
        return None
    dims = _marked(shape, whole)
    return RuleClaim({"x": dims}, (dims,))


@rule("x normalized_shape weight bias eps", functional("layer_norm"))
@rule("x normalized_shape weight bias eps cudnn_enable", "torch.layer_norm aten.layer_norm")
@rule("x normalized_shape weight eps", functional("rms_norm"), "torch.rms_norm aten.rms_norm")
def _last(bound: Bound) -> RuleClaim | None:
    shape, normalized = bound.shape("x"), bound.get("normalized_shape")
    if shape is None or not isinstance(normalized, list | tuple):
        return None
    start = len(shape) - len(normalized)
    dims = _marked(shape, tuple(range(start, len(shape))))
    last = " ".join(dims.split()[start:])
    inputs = {"x": dims, "weight": last, "bias": last}
    return RuleClaim({n: d for n, d in inputs.items() if bound.has(n)}, (dims,))


@rule("x normalized_shape weight bias eps", "aten.native_layer_norm torch.native_layer_norm")
def _last_with_statistics(bound: Bound) -> RuleClaim | None:
    """Mean and spread are results as well, of length 1 where it was normalised."""
    claim = _last(bound)
    if claim is None:
        return None
    count = len(bound.get("normalized_shape"))
    kept = claim.inputs["x"].split()[:-count]
    statistics = " ".join([*kept, *["1"] * count])
    return RuleClaim(claim.inputs, (*claim.outputs, statistics, statistics))


# --- over channels --------------------------------------------------------------------------------


@rule("x num_groups weight bias eps", functional("group_norm"))
@rule("x num_groups weight bias eps cudnn_enabled", "torch.group_norm aten.group_norm")
def _groups(bound: Bound) -> RuleClaim | None:
    """Samples, and groups, whose number is divided."""
    shape = bound.shape("x")
    if shape is None or len(shape) < 2:  # noqa: PLR2004 - samples and channels
        return None
    divided = bound.get("num_groups", 1) > 1
    channels = "(g c^)" if divided else "c^"
    samples = "1" if shape[0] == 1 else "b"
    space = [f"{name}^" for name in letters(len(shape) - 2, 3)]
    dims = " ".join([samples, channels, *space])
    inputs = {"x": dims, "weight": channels, "bias": channels}
    numbers = (("num_groups", None, "g"),) if divided else ()
    return RuleClaim({n: d for n, d in inputs.items() if bound.has(n)}, (dims,), numbers)


def channelwise(bound: Bound, whole: tuple[int, ...], vectors: tuple[str, ...]) -> RuleClaim | None:
    """Vectors with an entry for each channel."""
    shape = bound.shape("x")
    if shape is None or len(shape) < 2:  # noqa: PLR2004 - samples and channels
        return None
    dims = _marked(shape, whole)
    channel = dims.split()[1]
    inputs = {"x": dims} | {name: channel for name in vectors if bound.has(name)}
    return RuleClaim(inputs, (dims,))


_VECTORS = ("running_mean", "running_var", "weight", "bias")


@rule("x running_mean running_var weight bias training momentum eps", functional("batch_norm"))
@rule(
    "x weight bias running_mean running_var training momentum eps cudnn_enabled",
    "torch.batch_norm aten.batch_norm",
)
def _batch(bound: Bound) -> RuleClaim | None:
    """Statistics of the batch bind all but the channels; given ones bind nothing."""
    shape = bound.shape("x") or ()
    together = (0, *range(2, len(shape))) if bound.get("training", False) else ()
    return channelwise(bound, together, _VECTORS)


@rule(
    "x running_mean running_var weight bias use_input_stats momentum eps",
    functional("instance_norm"),
)
def _instance(bound: Bound) -> RuleClaim | None:
    """Each sample by itself; but running statistics are updated by all samples together."""
    shape = bound.shape("x") or ()
    if not bound.get("use_input_stats", True):
        return channelwise(bound, (), _VECTORS)
    space = tuple(range(2, len(shape)))
    samples = (0,) if bound.has("running_mean") or bound.has("running_var") else ()
    return channelwise(bound, samples + space, _VECTORS)


@rule("x size alpha beta k", functional("local_response_norm"))
def _response(bound: Bound) -> RuleClaim | None:
    """Neighbouring channels damp each other."""
    return channelwise(bound, (1,), ())


# --- of two tensors -------------------------------------------------------------------------------


@rule("x1 x2 dim eps", functional("cosine_similarity"), "torch.cosine_similarity")
@rule("x1 x2 dim eps", "aten.cosine_similarity")
def _cosine(bound: Bound) -> RuleClaim | None:
    return _paired(bound, bound.get("dim", 1))


@rule("x1 x2 p eps keepdim", functional("pairwise_distance"), "torch.pairwise_distance")
def _pairwise(bound: Bound) -> RuleClaim | None:
    return None if bound.get("keepdim") else _paired(bound, -1)


def _paired(bound: Bound, dim: int) -> RuleClaim | None:
    """Two tensors that broadcast, and a dimension over which they are taken together."""
    first, second = bound.shape("x1"), bound.shape("x2")
    if first is None or second is None or len(first) != len(second):
        return None
    found = broadcast((first, second))
    whole = positive_dims(dim, first)
    if found is None or whole is None:
        return None
    (left, right), outside, _ = found
    kept = [d for i, d in enumerate(outside) if i != whole[0]]
    return RuleClaim({"x1": frozen(left, whole), "x2": frozen(right, whole)}, (" ".join(kept),))


# --- Losses: samples are split as the reduction says; a mean only where every element counts ------

# A mean over targets of which some are ignored, or weighted by class, is no mean of the ranks'
# means; which it is depends on the targets at hand, so these are looked at.

_MARKS = {"sum": SUM, "mean": AVERAGE}
_OLD = ("size_average", "reduce")


def _reduction(bound: Bound) -> str | None:
    """How the loss is reduced; None if the call uses the old switches or an unknown word."""
    reduction = bound.get("reduction", "mean")
    if any(bound.get(name) is not None for name in _OLD) or reduction not in ("none", *_MARKS):
        return None
    return str(reduction)


def _reduced(dims: list[str], reduction: str) -> tuple[list[str], str]:
    """The dimensions of the elements, and of what is left of them."""
    if reduction == "none":
        return dims, " ".join(dims)
    return [d if d == "1" else d + _MARKS[reduction] for d in dims], ""


# --- element by element ---------------------------------------------------------------------------


@rule("x target size_average reduce reduction weight", functional("mse_loss l1_loss"))
@rule("x target size_average reduce reduction beta", functional("smooth_l1_loss"))
@rule("x target reduction delta weight", functional("huber_loss"))
@rule("x target size_average reduce reduction", functional("soft_margin_loss"))
@rule("x target log_input full size_average eps reduce reduction", functional("poisson_nll_loss"))
@rule("x target margin size_average reduce reduction", functional("hinge_embedding_loss"))
def by_element(bound: Bound) -> RuleClaim | None:
    """An element of the loss for each of the arguments."""
    shape, reduction = bound.shape("x"), _reduction(bound)
    if shape is None or reduction is None or bound.shape("target") != shape or bound.has("weight"):
        return None
    dims, left = _reduced(named(shape, letters(len(shape))).split(), reduction)
    return RuleClaim(dict.fromkeys(("x", "target"), " ".join(dims)), (left,))


@rule("x target weight size_average reduce reduction", functional("binary_cross_entropy"))
@rule(
    "x target weight size_average reduce reduction pos_weight",
    functional("binary_cross_entropy_with_logits"),
)
def _binary(bound: Bound) -> RuleClaim | None:
    """The mean is over all elements, whatever their weights; these broadcast."""
    shape, reduction = bound.shape("x"), _reduction(bound)
    if shape is None or reduction is None or bound.shape("target") != shape:
        return None
    dims, left = _reduced(named(shape, letters(len(shape))).split(), reduction)
    inputs = dict.fromkeys(("x", "target"), " ".join(dims))
    for name in ("weight", "pos_weight"):
        weight = bound.shape(name)
        if weight is not None:
            if len(weight) > len(shape):
                return None
            inputs[name] = named(weight, dims)
    return RuleClaim(inputs, (left,))


@rule("x target size_average reduce reduction log_target", functional("kl_div"))
def _divergence(bound: Bound) -> RuleClaim | None:
    """Of `batchmean`, the samples are averaged and all else is summed."""
    shape = bound.shape("x")
    if not shape or bound.shape("target") != shape:
        return None
    dims = named(shape, letters(len(shape))).split()
    if bound.get("reduction") == "batchmean" and all(bound.get(n) is None for n in _OLD):
        marks = [AVERAGE, *[SUM] * (len(dims) - 1)]
        dims = [d if d == "1" else d + mark for d, mark in zip(dims, marks, strict=True)]
        return RuleClaim(dict.fromkeys(("x", "target"), " ".join(dims)), ("",))
    reduction = _reduction(bound)
    if reduction is None:
        return None
    dims, left = _reduced(dims, reduction)
    return RuleClaim(dict.fromkeys(("x", "target"), " ".join(dims)), (left,))


@rule("x target var full eps reduction", functional("gaussian_nll_loss"))
def _gaussian(bound: Bound) -> RuleClaim | None:
    shape, reduction = bound.shape("x"), _reduction(bound)
    if shape is None or reduction is None or bound.shape("target") != shape:
        return None
    if bound.shape("var") != shape:
        return None
    dims, left = _reduced(named(shape, letters(len(shape))).split(), reduction)
    return RuleClaim(dict.fromkeys(("x", "target", "var"), " ".join(dims)), (left,))


@rule(
    "input1 input2 target margin size_average reduce reduction", functional("margin_ranking_loss")
)
def _ranking(bound: Bound) -> RuleClaim | None:
    shape, reduction = bound.shape("input1"), _reduction(bound)
    names = ("input1", "input2", "target")
    if shape is None or reduction is None or any(bound.shape(name) != shape for name in names):
        return None
    dims, left = _reduced(named(shape, letters(len(shape))).split(), reduction)
    return RuleClaim(dict.fromkeys(names, " ".join(dims)), (left,))


# --- sample by sample -----------------------------------------------------------------------------


@rule(
    "input1 input2 target margin size_average reduce reduction",
    functional("cosine_embedding_loss"),
)
@rule(
    "anchor positive negative margin p eps swap size_average reduce reduction",
    functional("triplet_margin_loss"),
)
@rule("x target p margin weight size_average reduce reduction", functional("multi_margin_loss"))
@rule("x target size_average reduce reduction", functional("multilabel_margin_loss"))
@rule("x target weight size_average reduce reduction", functional("multilabel_soft_margin_loss"))
def _samples(bound: Bound) -> RuleClaim | None:
    """Vectors, a loss for each; a weight of classes counts inside of a sample."""
    reduction = _reduction(bound)
    names = ("x", "input1", "input2", "target", "anchor", "positive", "negative")
    shapes = {n: s for n in names if (s := bound.shape(n)) is not None}
    if reduction is None or not shapes:
        return None
    vectors = next(iter(shapes.values()))
    if len(vectors) != 2 or any(s not in (vectors, vectors[:1]) for s in shapes.values()):  # noqa: PLR2004
        return None
    sample, left = _reduced(["1" if vectors[0] == 1 else "b"], reduction)
    classes = "1" if vectors[1] == 1 else "c^"
    inputs = {
        name: f"{sample[0]} {classes}" if len(shape) > 1 else sample[0]
        for name, shape in shapes.items()
    }
    if bound.has("weight"):
        inputs["weight"] = classes
    return RuleClaim(inputs, (left,))


@rule(
    "x target weight size_average ignore_index reduce reduction label_smoothing",
    functional("cross_entropy"),
)
@rule("x target weight size_average ignore_index reduce reduction", functional("nll_loss"))
def by_class(bound: Bound) -> RuleClaim | None:
    """Classes stay whole; samples and places are averaged only where each counts as one."""
    shape, target = bound.shape("x"), bound.shape("target")
    reduction = _reduction(bound)
    if shape is None or target is None or reduction is None or len(shape) < 2:  # noqa: PLR2004
        return None
    names = named(shape, letters(len(shape))).split()
    dims, left = _reduced([names[0], *names[2:]], reduction)
    if reduction == "mean" and not _all_alike(bound):
        dims = [d if d == "1" else f"{d.removesuffix(AVERAGE)}^" for d in dims]
    classes = "1" if shape[1] == 1 else "k^"
    inputs = {"x": " ".join([dims[0], classes, *dims[1:]]), "target": " ".join(dims)}
    if target == shape:
        inputs["target"] = inputs["x"]
    elif target != (shape[0], *shape[2:]):
        return None
    if bound.has("weight"):
        inputs["weight"] = classes
    return RuleClaim(inputs, (left,))


@rule(
    "log_probs targets input_lengths target_lengths blank reduction zero_infinity",
    functional("ctc_loss"),
)
def _sequences(bound: Bound) -> RuleClaim | None:
    """Each sequence by itself; its mean is over sequences, each divided by its own length.

    Targets that are all in one row have no place for a sample's own, and lengths must be tensors
    to be split with the samples.
    """
    scores, targets = bound.shape("log_probs"), bound.shape("targets")
    lengths = (bound.shape("input_lengths"), bound.shape("target_lengths"))
    reduction = _reduction(bound)
    if scores is None or targets is None or reduction is None or len(scores) != 3:  # noqa: PLR2004
        return None
    if len(targets) != 2 or any(length != (scores[1],) for length in lengths):  # noqa: PLR2004
        return None
    (sample,), left = _reduced(["1" if scores[1] == 1 else "b"], reduction)
    inputs = {
        "log_probs": f"_ {sample} _",
        "targets": f"{sample} _",
        "input_lengths": sample,
        "target_lengths": sample,
    }
    return RuleClaim(inputs, (left,))


def _all_alike(bound: Bound) -> bool:
    """Whether every target counts as one in a mean."""
    target = bound.get("target")
    if target.is_floating_point():
        return True  # of probabilities the mean is over samples, and none is ignored
    if bound.has("weight") or target.is_meta:
        return False
    return not bool((target == bound.get("ignore_index", -100)).any())


# --- Operators that nobody calls by name, and that exported and decomposed graphs are full of -----

# How aten counts the words.
_REDUCTIONS = {0: "none", 1: "mean", 2: "sum"}
_IMAGES = 3  # samples, channels, one dimension of space


def _in_words(bound: Bound) -> Bound:
    """The same call with the reduction as a word."""
    number = bound.get("reduction", 1)
    words = _REDUCTIONS.get(number, number) if isinstance(number, int) else number
    return dataclasses.replace(bound, values={**bound.values, "reduction": words})


@rule("x target weight reduction ignore_index label_smoothing", "aten.cross_entropy_loss")
def _cross_entropy(bound: Bound) -> RuleClaim | None:
    return by_class(_in_words(bound))


@rule("x target reduction", "aten.mse_loss aten.l1_loss aten.soft_margin_loss")
@rule("x target reduction beta", "aten.smooth_l1_loss aten.huber_loss")
def _elements(bound: Bound) -> RuleClaim | None:
    return by_element(_in_words(bound))


@rule("x p train", "aten.native_dropout")
def _dropout(bound: Bound) -> RuleClaim | None:
    """What is kept, and which that is."""
    shape = bound.shape("x")
    if shape is None:
        return None
    dims = named(shape, letters(len(shape)))
    return RuleClaim({"x": dims}, (dims, dims))


@rule(
    "x weight bias running_mean running_var momentum eps",
    "aten._native_batch_norm_legit_no_training",
)
def _batch_norm(bound: Bound) -> RuleClaim | None:
    """Given statistics bind nothing; those of the batch, which are not taken, are empty."""
    claim = channelwise(bound, (), ("weight", "bias", "running_mean", "running_var"))
    return None if claim is None else RuleClaim(claim.inputs, (*claim.outputs, "_", "_"))


@rule("x weight bias N C HxW group eps", "aten.native_group_norm")
def _group_norm(bound: Bound) -> RuleClaim | None:
    """Sample by sample, and the number of samples goes along."""
    shape = bound.shape("x")
    if shape is None or len(shape) < _IMAGES - 1 or "N" not in bound.values:
        return None
    samples = "1" if shape[0] == 1 else "b"
    dims = " ".join([samples, *["_"] * (len(shape) - 1)])
    inputs = {"x": dims} | {name: "_" for name in ("weight", "bias") if bound.has(name)}
    numbers = () if shape[0] == 1 else (("N", None, "b"),)
    return RuleClaim(inputs, (dims, f"{samples} _", f"{samples} _"), numbers)


@rule(
    "x *how",
    "aten.upsample_nearest1d aten.upsample_nearest2d aten.upsample_nearest3d",
    "aten.upsample_linear1d aten.upsample_bilinear2d aten.upsample_bicubic2d",
    "aten.upsample_trilinear3d",
)
def _upsample(bound: Bound) -> RuleClaim | None:
    """Every channel of every sample by itself."""
    shape = bound.shape("x")
    if shape is None or len(shape) < _IMAGES:
        return None
    front = named(shape[:2], letters(2)).split()
    dims = " ".join([*front, *["_"] * (len(shape) - 2)])
    return RuleClaim({"x": dims}, (dims,))


@rule("x indices", "aten.index")
def _index(bound: Bound) -> RuleClaim | None:
    """What is taken whole can be split; dimensions that indices pick from cannot.

    What is picked stands where the indices do; if they do not stand side by side, in front.
    """
    shape, items = bound.shape("x"), bound.get("indices")
    if shape is None or not isinstance(items, list | tuple) or len(items) > len(shape):
        return None
    picked = [at for at, item in enumerate(items) if item is not None]
    tensors = [item for item in items if item is not None]
    known = all(isinstance(t, torch.Tensor) and t.dtype != torch.bool for t in tensors)
    if not picked or not known:
        return None
    dims = named(shape, letters(len(shape))).split()
    inside = ["_" if at in picked else dim for at, dim in enumerate(dims)]
    made = ["_"] * max(t.dim() for t in tensors)
    side_by_side = picked[-1] - picked[0] + 1 == len(picked)
    first = picked[0] if side_by_side else 0
    kept = [dim for at, dim in enumerate(dims) if at not in picked]
    return RuleClaim({"x": " ".join(inside)}, (" ".join([*kept[:first], *made, *kept[first:]]),))


# --- Functions of nnScaler's runtime, under the names that its users' configurations have ---------

_RUNTIME = "nnscaler.runtime.function."
_WRAPPED = "nnscaler.graph.function.wrapnn."
_RUNNING = ("running_mean", "running_var")
_WRAPPED_VECTORS = ("weight", "bias", *_RUNNING)


@rule("x weight padding_idx start stop", f"{_RUNTIME}embedding")
def _embedding(bound: Bound) -> RuleClaim | None:
    """A rank that has a part of the vocabulary gives zeros for all other ids."""
    ids, table = bound.shape("x"), bound.shape("weight")
    if ids is None or table is None or not {"start", "stop"} <= set(bound.values):
        return None
    dims = named(ids, letters(len(ids)))
    return RuleClaim(
        {"x": dims, "weight": f"v{SUM} w"}, (f"{dims} w".strip(),), bounds=("start", "stop", "v")
    )


@rule("x *slicers", f"{_RUNTIME}fullslice")
def _slice(bound: Bound) -> RuleClaim | None:
    """What is taken as a whole can be split; a cut, an index or a new dimension cannot."""
    shape, slicers = bound.shape("x"), bound.get("slicers", ())
    if shape is None or not all(s is None or isinstance(s, int | slice) for s in slicers):
        return None
    rest = iter(zip(shape, letters(len(shape)), strict=True))
    inside: list[str] = []
    outside: list[str] = []
    for slicer in slicers:
        if slicer is None:
            outside.append("1")
            continue
        size, name = next(rest)
        whole = isinstance(slicer, slice) and slicer == slice(None)
        dim = "_" if not whole else "1" if size == 1 else name
        inside.append(dim)
        outside += [dim] if isinstance(slicer, slice) else []
    left = ["1" if size == 1 else name for size, name in rest]
    return RuleClaim({"x": " ".join([*inside, *left])}, (" ".join([*outside, *left]),))


rule("x", f"{_RUNTIME}identity")(same)
rule("x p inplace", f"{_RUNTIME}nndropout")(same)
rule("x index dim", f"{_RUNTIME}index_select")(index_select)


@rule("x weight bias normalized_shape eps", f"{_RUNTIME}layer_norm")
def _layer_norm(bound: Bound) -> RuleClaim | None:
    shape, normalized = bound.shape("x"), bound.get("normalized_shape")
    if shape is None or not isinstance(normalized, list | tuple | torch.Size):
        return None
    start = len(shape) - len(normalized)
    dims = named(shape, letters(len(shape))).split()
    dims = [d if i < start or d == "1" else f"{d}^" for i, d in enumerate(dims)]
    inputs = {"x": " ".join(dims)}
    inputs |= {n: " ".join(dims[start:]) for n in ("weight", "bias") if bound.has(n)}
    return RuleClaim(inputs, (" ".join(dims),))


@rule(
    "x weight bias running_mean running_var num_batches_tracked momentum training "
    "track_running_stats eps process_group",
    f"{_WRAPPED}wrap_batchnorm2d_func",
)
def _wrapped_batch_norm(bound: Bound) -> RuleClaim | None:
    """Split by samples, ranks share the statistics of a training batch; they do in no other case.

    A batch whose statistics are used outside of training is normalised by each rank's own.
    """
    trains = bound.get("training", True)
    apart = trains or not bound.has("running_mean")
    claim = channelwise(bound, (2, 3) if trains else (0, 2, 3) if apart else (), _WRAPPED_VECTORS)
    if claim is None or not trains:
        return claim
    samples = claim.inputs["x"].split()[0]
    group = None if samples == "1" else ("process_group", samples)
    return dataclasses.replace(claim, group=group)


@rule(
    "x weight bias running_mean running_var momentum eps training track_running_stats num_features "
    "affine",
    f"{_WRAPPED}wrap_instancenorm2d_func",
)
def _instance_norm(bound: Bound) -> RuleClaim | None:
    """Each sample by itself; running statistics are those of a rank's own samples.

    nnScaler splits it so, and does not look at what becomes of them: neither is it claimed here.
    """
    if len(bound.shape("x") or ()) != 4:  # noqa: PLR2004 - images
        return None
    # How many channels there are is a number that no rank is told anew.
    channels = (1,) if bound.get("affine", False) else ()
    claim = channelwise(bound, (*channels, 2, 3), _WRAPPED_VECTORS)
    updates = bound.get("training", True) or not bound.get("track_running_stats", False)
    if claim is None or not updates:
        return claim
    samples = claim.inputs["x"].split()[0]
    own = (
        {}
        if samples == "1"
        else {name: f"{claim.inputs[name]} : @{samples}" for name in _RUNNING if bound.has(name)}
    )
    return dataclasses.replace(claim, inputs={**claim.inputs, **own})

"""Losses: samples are split as the reduction says; a mean only where every element counts alike.

A mean over targets of which some are ignored, or weighted by class, is no mean of the ranks' means;
which it is depends on the targets at hand, so these are looked at.
"""

from __future__ import annotations

from paritas.partition.library.claims import AVERAGE, SUM, Bound, Claim, letters, named
from paritas.partition.library.registry import functional, rule

__all__ = ["by_class", "by_element"]

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
def by_element(bound: Bound) -> Claim | None:
    """An element of the loss for each of the arguments."""
    shape, reduction = bound.shape("x"), _reduction(bound)
    if shape is None or reduction is None or bound.shape("target") != shape or bound.has("weight"):
        return None
    dims, left = _reduced(named(shape, letters(len(shape))).split(), reduction)
    return Claim(dict.fromkeys(("x", "target"), " ".join(dims)), (left,))


@rule("x target weight size_average reduce reduction", functional("binary_cross_entropy"))
@rule(
    "x target weight size_average reduce reduction pos_weight",
    functional("binary_cross_entropy_with_logits"),
)
def _binary(bound: Bound) -> Claim | None:
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
    return Claim(inputs, (left,))


@rule("x target size_average reduce reduction log_target", functional("kl_div"))
def _divergence(bound: Bound) -> Claim | None:
    """Of `batchmean`, the samples are averaged and all else is summed."""
    shape = bound.shape("x")
    if not shape or bound.shape("target") != shape:
        return None
    dims = named(shape, letters(len(shape))).split()
    if bound.get("reduction") == "batchmean" and all(bound.get(n) is None for n in _OLD):
        marks = [AVERAGE, *[SUM] * (len(dims) - 1)]
        dims = [d if d == "1" else d + mark for d, mark in zip(dims, marks, strict=True)]
        return Claim(dict.fromkeys(("x", "target"), " ".join(dims)), ("",))
    reduction = _reduction(bound)
    if reduction is None:
        return None
    dims, left = _reduced(dims, reduction)
    return Claim(dict.fromkeys(("x", "target"), " ".join(dims)), (left,))


@rule("x target var full eps reduction", functional("gaussian_nll_loss"))
def _gaussian(bound: Bound) -> Claim | None:
    shape, reduction = bound.shape("x"), _reduction(bound)
    if shape is None or reduction is None or bound.shape("target") != shape:
        return None
    if bound.shape("var") != shape:
        return None
    dims, left = _reduced(named(shape, letters(len(shape))).split(), reduction)
    return Claim(dict.fromkeys(("x", "target", "var"), " ".join(dims)), (left,))


@rule(
    "input1 input2 target margin size_average reduce reduction", functional("margin_ranking_loss")
)
def _ranking(bound: Bound) -> Claim | None:
    shape, reduction = bound.shape("input1"), _reduction(bound)
    names = ("input1", "input2", "target")
    if shape is None or reduction is None or any(bound.shape(name) != shape for name in names):
        return None
    dims, left = _reduced(named(shape, letters(len(shape))).split(), reduction)
    return Claim(dict.fromkeys(names, " ".join(dims)), (left,))


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
def _samples(bound: Bound) -> Claim | None:
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
    return Claim(inputs, (left,))


@rule(
    "x target weight size_average ignore_index reduce reduction label_smoothing",
    functional("cross_entropy"),
)
@rule("x target weight size_average ignore_index reduce reduction", functional("nll_loss"))
def by_class(bound: Bound) -> Claim | None:
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
    return Claim(inputs, (left,))


@rule(
    "log_probs targets input_lengths target_lengths blank reduction zero_infinity",
    functional("ctc_loss"),
)
def _sequences(bound: Bound) -> Claim | None:
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
    return Claim(inputs, (left,))


def _all_alike(bound: Bound) -> bool:
    """Whether every target counts as one in a mean."""
    target = bound.get("target")
    if target.is_floating_point():
        return True  # of probabilities the mean is over samples, and none is ignored
    if bound.has("weight") or target.is_meta:
        return False
    return not bool((target == bound.get("ignore_index", -100)).any())

"""Rules of losses and of some operators of lowered graphs and of nnScaler.

They divide a number, or tell ranks to exchange data. What is derived for a loss is claimed for
equal shapes only.
"""

from __future__ import annotations

import dataclasses

import torch

from paritas.core.operators.calls import Bound, dim_of, letters
from paritas.sharding.operators.library.claims import SUM, RuleClaim, frozen, unary
from paritas.sharding.operators.library.registry import DERIVED, Derived, rule

# --- Normalisations: what is normalised together is not split -------------------------------------


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
    bound: Bound, whole_positions: tuple[int, ...], vectors: tuple[str, ...] = _VECTORS
) -> RuleClaim | None:
    """Vectors have one entry for each channel."""
    dims = bound.dims()
    if dims is None or len(dims) < 2:  # noqa: PLR2004 - samples and channels
        return None
    dims = frozen(dims, whole_positions)
    inputs = {"x": dims} | {name: dims[1:2] for name in vectors if bound.has(name)}
    return RuleClaim(inputs, (dims,))


# --- Losses: a definition covers more shapes than a rule should promise --------------------------


@rule(
    "functional.mse_loss functional.l1_loss functional.smooth_l1_loss",
    "functional.huber_loss functional.soft_margin_loss poisson_nll_loss",
    "hinge_embedding_loss gaussian_nll_loss",
    "aten.mse_loss aten.l1_loss aten.soft_margin_loss aten.smooth_l1_loss aten.huber_loss",
)
def _by_element(bound: Bound) -> RuleClaim | Derived | None:
    """Shapes that broadcast are rarely meant."""
    shapes = {bound.shape(name) for name in ("x", "target", "var") if name in bound.values}
    return None if len(shapes) > 1 or bound.has("weight") else DERIVED


@rule("kl_div")
def _divergence(bound: Bound) -> RuleClaim | Derived | None:
    return _by_element(bound) if bound.dims() else None


@rule(
    "cosine_embedding_loss triplet_margin_loss multilabel_margin_loss multilabel_soft_margin_loss"
)
def _by_sample(bound: Bound) -> RuleClaim | Derived | None:
    names = ("x", "input1", "input2", "target", "anchor", "positive", "negative")
    vectors, *others = [s for name in names if (s := bound.shape(name)) is not None] or [()]
    equal = len(vectors) == 2 and all(s in (vectors, vectors[:1]) for s in others)  # noqa: PLR2004
    return DERIVED if equal else None


@rule("cross_entropy nll_loss cross_entropy_loss")
def _by_class(bound: Bound) -> RuleClaim | Derived | None:
    shape = bound.shape() or ()
    fits = bound.shape("target") in (shape, (*shape[:1], *shape[2:]))
    return DERIVED if fits else None


# --- Operators of exported and decomposed graphs --------------------------------------------------

_IMAGES = 3  # samples, channels, one dimension of space


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
    has_only_index_tensors = all(
        isinstance(t, torch.Tensor) and t.dtype != torch.bool for t in tensors
    )
    if not picked or not has_only_index_tensors:
        return None
    inside = ["_" if at in picked else dim for at, dim in enumerate(dims)]
    index_dims = ["_"] * max(t.dim() for t in tensors)
    adjacent = picked[-1] - picked[0] + 1 == len(picked)
    first = picked[0] if adjacent else 0
    kept_dims = [dim for at, dim in enumerate(dims) if at not in picked]
    return unary(inside, [*kept_dims[:first], *index_dims, *kept_dims[first:]])


# --- Functions of nnScaler, under the names in its users' configurations --------------------------

_RUNNING = ("running_mean", "running_var")


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
        is_full_slice = isinstance(slicer, slice) and slicer == slice(None)
        inside.append(name if is_full_slice else "_")
        outside += inside[-1:] if isinstance(slicer, slice) else []
    remaining_dims = list(rest)
    return unary([*inside, *remaining_dims], [*outside, *remaining_dims])


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
    drifting_inputs = {name: [*claim.inputs[name], ":", f"@{samples}"] for name in running}
    return dataclasses.replace(claim, inputs={**claim.inputs, **drifting_inputs})

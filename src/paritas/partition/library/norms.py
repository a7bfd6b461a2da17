"""Normalisations: what is normalised together stays together."""

from __future__ import annotations

from paritas.partition.library.claims import (
    Bound,
    Claim,
    broadcast,
    frozen,
    letters,
    named,
    positive_dims,
)
from paritas.partition.library.registry import everywhere, functional, rule


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
def _along(bound: Bound) -> Claim | None:
    """One dimension is gone through as a whole; the shape stays."""
    shape, dim = bound.shape("x"), bound.get("dim")
    whole = positive_dims(dim, shape)
    if shape is None or not isinstance(dim, int) or whole is None:
        return None
    dims = _marked(shape, whole)
    return Claim({"x": dims}, (dims,))


@rule("x p dim eps", functional("normalize"))
def _normalize(bound: Bound) -> Claim | None:
    shape = bound.shape("x")
    whole = positive_dims(bound.get("dim", 1), shape)
    if shape is None or whole is None:
        return None
    dims = _marked(shape, whole)
    return Claim({"x": dims}, (dims,))


@rule("x normalized_shape weight bias eps", functional("layer_norm"))
@rule("x normalized_shape weight bias eps cudnn_enable", "torch.layer_norm aten.layer_norm")
@rule("x normalized_shape weight eps", functional("rms_norm"), "torch.rms_norm aten.rms_norm")
def _last(bound: Bound) -> Claim | None:
    shape, normalized = bound.shape("x"), bound.get("normalized_shape")
    if shape is None or not isinstance(normalized, list | tuple):
        return None
    start = len(shape) - len(normalized)
    dims = _marked(shape, tuple(range(start, len(shape))))
    last = " ".join(dims.split()[start:])
    inputs = {"x": dims, "weight": last, "bias": last}
    return Claim({n: d for n, d in inputs.items() if bound.has(n)}, (dims,))


@rule("x normalized_shape weight bias eps", "aten.native_layer_norm torch.native_layer_norm")
def _last_with_statistics(bound: Bound) -> Claim | None:
    """Mean and spread are results as well, of length 1 where it was normalised."""
    claim = _last(bound)
    if claim is None:
        return None
    count = len(bound.get("normalized_shape"))
    kept = claim.inputs["x"].split()[:-count]
    statistics = " ".join([*kept, *["1"] * count])
    return Claim(claim.inputs, (*claim.outputs, statistics, statistics))


# --- over channels --------------------------------------------------------------------------------


@rule("x num_groups weight bias eps", functional("group_norm"))
@rule("x num_groups weight bias eps cudnn_enabled", "torch.group_norm aten.group_norm")
def _groups(bound: Bound) -> Claim | None:
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
    return Claim({n: d for n, d in inputs.items() if bound.has(n)}, (dims,), numbers)


def channelwise(bound: Bound, whole: tuple[int, ...], vectors: tuple[str, ...]) -> Claim | None:
    """Vectors with an entry for each channel."""
    shape = bound.shape("x")
    if shape is None or len(shape) < 2:  # noqa: PLR2004 - samples and channels
        return None
    dims = _marked(shape, whole)
    channel = dims.split()[1]
    inputs = {"x": dims} | {name: channel for name in vectors if bound.has(name)}
    return Claim(inputs, (dims,))


_VECTORS = ("running_mean", "running_var", "weight", "bias")


@rule("x running_mean running_var weight bias training momentum eps", functional("batch_norm"))
@rule(
    "x weight bias running_mean running_var training momentum eps cudnn_enabled",
    "torch.batch_norm aten.batch_norm",
)
def _batch(bound: Bound) -> Claim | None:
    """Statistics of the batch bind all but the channels; given ones bind nothing."""
    shape = bound.shape("x") or ()
    together = (0, *range(2, len(shape))) if bound.get("training", False) else ()
    return channelwise(bound, together, _VECTORS)


@rule(
    "x running_mean running_var weight bias use_input_stats momentum eps",
    functional("instance_norm"),
)
def _instance(bound: Bound) -> Claim | None:
    """Each sample by itself; but running statistics are updated by all samples together."""
    shape = bound.shape("x") or ()
    if not bound.get("use_input_stats", True):
        return channelwise(bound, (), _VECTORS)
    space = tuple(range(2, len(shape)))
    samples = (0,) if bound.has("running_mean") or bound.has("running_var") else ()
    return channelwise(bound, samples + space, _VECTORS)


@rule("x size alpha beta k", functional("local_response_norm"))
def _response(bound: Bound) -> Claim | None:
    """Neighbouring channels damp each other."""
    return channelwise(bound, (1,), ())


# --- of two tensors -------------------------------------------------------------------------------


@rule("x1 x2 dim eps", functional("cosine_similarity"), "torch.cosine_similarity")
@rule("x1 x2 dim eps", "aten.cosine_similarity")
def _cosine(bound: Bound) -> Claim | None:
    return _paired(bound, bound.get("dim", 1))


@rule("x1 x2 p eps keepdim", functional("pairwise_distance"), "torch.pairwise_distance")
def _pairwise(bound: Bound) -> Claim | None:
    return None if bound.get("keepdim") else _paired(bound, -1)


def _paired(bound: Bound, dim: int) -> Claim | None:
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
    return Claim({"x1": frozen(left, whole), "x2": frozen(right, whole)}, (" ".join(kept),))

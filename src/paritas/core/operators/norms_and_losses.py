"""Definitions of normalisations and losses."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from paritas.core.operators import indices
from paritas.core.operators.calls import letters
from paritas.core.operators.definitions import (
    NNSCALER_WRAPPED,
    Array,
    Layout,
    SymbolicCall,
    belongs_to,
    by_slices,
    everywhere,
    functional,
    operator,
    operator_word,
)
from paritas.core.operators.elementwise import accumulate_along
from paritas.core.operators.indices import ONE, ZERO, Poly, floor_divide, remainder, symbol
from paritas.core.operators.terms import OutsideTheoryError, Term, plus, size_term, times

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

# --- Normalisations -------------------------------------------------------------------------------

# `_safe_softmax` is another function: it gives zeros where all scores are masked.
belongs_to("softmaxes", "_softmax _log_softmax")
belongs_to("softmax", "_softmax _safe_softmax")
belongs_to("log softmax", "_log_softmax")
belongs_to("softmax backward", "_softmax_backward_data")
belongs_to("log softmax backward", "_log_softmax_backward_data")
belongs_to("running sum", "cumsum")
belongs_to("running values", "cumsum cumprod logcumsumexp")
belongs_to("layer norm", "native_layer_norm")
belongs_to("layer norm backward", "native_layer_norm_backward")
belongs_to("rms norm", "_fused_rms_norm")
belongs_to("group norm", "native_group_norm")
belongs_to("group norm backward", "native_group_norm_backward")
belongs_to(
    "batch norm",
    "native_batch_norm cudnn_batch_norm miopen_batch_norm _native_batch_norm_legit",
    "_batch_norm_with_update",
)
belongs_to(
    "functional batch norm",
    "_native_batch_norm_legit_functional _batch_norm_with_update_functional",
)
belongs_to("batch norm backward", "native_batch_norm_backward batch_norm_backward")
belongs_to("batch norm backward of cuDNN", "cudnn_batch_norm_backward miopen_batch_norm_backward")


@operator("x dim _stacklevel dtype", functional("softmax log_softmax softmin"))
@operator("x dim dtype", everywhere("softmax log_softmax"))
@operator("x dim dtype", "torch.special.softmax torch.special.log_softmax")
@operator("x dim half_to_float", "aten._softmax aten._log_softmax")
@operator("x dim dtype", everywhere("cumsum cumprod"))
@operator("x dim", everywhere("logcumsumexp"))
def _along_dim(call: SymbolicCall) -> list[Array]:
    dim = call.get("dim")
    if not isinstance(dim, int):
        raise OutsideTheoryError("a call without dim")
    return accumulate_along(call, [dim])


@operator("x p dim eps", functional("normalize"))
def _normalize(call: SymbolicCall) -> list[Array]:
    dim = call.get("dim", 1)
    return accumulate_along(call, dim)


@operator("x size alpha beta k", functional("local_response_norm"))
def _response(call: SymbolicCall) -> list[Array]:
    return accumulate_along(call, [1])


@operator("x normalized_shape weight bias eps", functional("layer_norm"))
@operator("x normalized_shape weight bias eps cudnn_enable", "torch.layer_norm aten.layer_norm")
@operator("x normalized_shape weight eps", functional("rms_norm"), "torch.rms_norm aten.rms_norm")
@operator("x weight bias normalized_shape eps", "nnscaler.runtime.function.layer_norm")
@operator("x normalized_shape weight bias eps", "aten.native_layer_norm torch.native_layer_norm")
def _last(call: SymbolicCall) -> list[Array]:
    """Each vector of the last dimensions alone."""
    x, count = call.given("x"), len(call.get("normalized_shape"))
    names = letters(x.dim)
    outer, inner = names[: x.dim - count], [f"{name}^" for name in names[x.dim - count :]]
    layouts: dict[str, tuple[Array, Layout]] = {"x": (x, [*outer, *inner])}
    for name in ("weight", "bias"):
        array = call.tensor(name)
        if array is not None:
            layouts[name] = (array, inner)
    for size in x.shape[x.dim - count :]:
        call.keep(size)
    outputs = [[*outer, *inner]]
    if operator_word(call.call) == "native_layer_norm":
        outputs += [[*outer, *["1"] * count]] * 2
    return by_slices(call, layouts, outputs)


@operator("x num_groups weight bias eps", functional("group_norm"))
@operator("x num_groups weight bias eps cudnn_enabled", "torch.group_norm aten.group_norm")
def _group_norm(call: SymbolicCall) -> Array:
    """Each group of each sample alone, then a scale and a shift of each channel."""
    x, weight, bias = call.given("x"), call.tensor("weight"), call.tensor("bias")
    width = floor_divide(x.shape[1], call.number("num_groups", 1), {})
    call.same(indices.multiply(width, call.number("num_groups", 1)), x.shape[1])
    shape = call.get("x").shape
    plain = {name: None for name in ("weight", "bias") if name in call.bound.values}
    overrides = {"num_groups": 1, **plain}

    def evaluate(arrays: list[torch.Tensor]) -> torch.Tensor:
        group_values = arrays[0].reshape(1, -1, *shape[2:])
        return call.run({"x": group_values, **overrides})[0][0]

    function = call.function("group_norm", evaluate, overrides)

    def element(*at: Poly) -> Term:
        group = floor_divide(at[1], width, {})
        channel = call.fresh()
        places = [indices.add(indices.multiply(group, width), symbol(channel))]
        binders = [(channel, width)]
        for size in x.shape[2:]:
            name = call.fresh()
            binders += [] if size == ONE else [(name, size)]
            places.append(ZERO if size == ONE else symbol(name))
        sample = ZERO if x.shape[0] == ONE else at[0]
        inside = (remainder(at[1], width, {}), *at[2:])
        inside_places = tuple(p for p, size in zip(inside, (width, *x.shape[2:]), strict=True))
        result: Term = ("fun", function, ((tuple(binders), x[(sample, *places)]),), inside_places)
        if weight is not None:
            result = times(result, weight[(at[1],)])
        return result if bias is None else plus(result, bias[(at[1],)])

    for vector in (weight, bias):
        if vector is not None:
            call.same(vector.shape[0], x.shape[1])
    return Array(x.shape, element)


@operator("x weight bias N C HxW group eps", "aten.native_group_norm")
def _native_group_norm(call: SymbolicCall) -> list[Array]:
    """Each sample alone."""
    x = call.given("x")
    layouts: dict[str, tuple[Array, Layout]] = {"x": (x, ["b", *[None] * (x.dim - 1)])}
    for name in ("weight", "bias"):
        array = call.tensor(name)
        if array is not None:
            layouts[name] = (array, [None])
    call.same(call.number("N"), x.shape[0])
    outputs: list[Layout] = [layouts["x"][1], ["b", None], ["b", None]]
    return by_slices(call, layouts, outputs, settings={"N": 1})


_VECTORS = ("running_mean", "running_var", "weight", "bias")


def _channels(call: SymbolicCall, whole_dims: tuple[int, ...], *, writes: bool) -> list[Array]:
    """Each channel alone; `whole_dims` are the dimensions that are needed as a whole."""
    x = call.given("x")
    names = [f"{name}^" if at in whole_dims else name for at, name in enumerate(letters(x.dim))]
    layouts: dict[str, tuple[Array, Layout]] = {"x": (x, names)}
    for name in _VECTORS:
        array = call.tensor(name)
        if array is not None:
            layouts[name] = (array, [names[1]])
    channel_arrays = by_slices(call, layouts, [names])
    for at, name in enumerate(("running_mean", "running_var")):
        if writes and name in layouts:
            call.writes[str(call.places(name)[0])] = by_slices(
                call,
                layouts,
                [[names[1]]],
                name=f"{name} after",
                pick=_Written(call, at).pick,
            )[0]
    return channel_arrays


class _Written:
    """What a call with slices writes to its running statistics."""

    def __init__(self, call: SymbolicCall, at: int) -> None:
        self._call = call
        self._name = ("running_mean", "running_var")[at]

    def pick(self, result: list[torch.Tensor]) -> list[torch.Tensor]:
        del result
        return [self._call.written[self._name]]


@operator("x running_mean running_var weight bias training momentum eps", functional("batch_norm"))
@operator(
    "x weight bias running_mean running_var training momentum eps cudnn_enabled",
    "torch.batch_norm aten.batch_norm",
)
def _batch_norm(call: SymbolicCall) -> list[Array]:
    x = call.given("x")
    if not call.get("training", False):
        return _channels(call, (), writes=False)
    return _channels(call, (0, *range(2, x.dim)), writes=True)


@operator(
    "x weight bias running_mean running_var momentum eps",
    "aten._native_batch_norm_legit_no_training",
)
def _lowered_batch_norm(call: SymbolicCall) -> list[Array]:
    """The statistics of the batch are empty."""
    empty = Array((ZERO,), lambda _: ("num", "0"))
    return [*_channels(call, (), writes=False), empty, empty]


@operator(
    "x running_mean running_var weight bias use_input_stats momentum eps",
    functional("instance_norm"),
)
def _instance_norm(call: SymbolicCall) -> list[Array]:
    x = call.given("x")
    if not call.get("use_input_stats", True):
        return _channels(call, (), writes=False)
    space = tuple(range(2, x.dim))
    if call.bound.has("running_mean") or call.bound.has("running_var"):
        return _channels(call, (0, *space), writes=True)
    return _channels(call, space, writes=False)


@operator(
    "x weight bias running_mean running_var num_batches_tracked momentum training "
    "track_running_stats eps process_group",
    f"{NNSCALER_WRAPPED}wrap_batchnorm2d_func",
)
def _wrapped_batch_norm(call: SymbolicCall) -> list[Array]:
    if call.get("training", True):
        raise OutsideTheoryError("an operator whose ranks exchange data")
    call.without_values |= set(map(str, call.places("num_batches_tracked")))
    has_statistics = call.bound.has("running_mean")
    return _channels(call, () if has_statistics else (0, 2, 3), writes=False)


@operator(
    "x weight bias running_mean running_var momentum eps training track_running_stats num_features "
    "affine",
    f"{NNSCALER_WRAPPED}wrap_instancenorm2d_func",
)
def _wrapped_instance_norm(call: SymbolicCall) -> list[Array]:
    if call.bound.has("running_mean"):
        raise OutsideTheoryError("running statistics that each rank keeps for itself")
    return _channels(call, (2, 3), writes=False)


@operator("x1 x2 dim eps", functional("cosine_similarity"), "torch.cosine_similarity")
@operator("x1 x2 dim eps", "aten.cosine_similarity")
@operator("x1 x2 p eps keepdim", functional("pairwise_distance"), "torch.pairwise_distance")
def _compare_pairs(call: SymbolicCall) -> list[Array]:
    first, second = call.given("x1"), call.given("x2")
    if first.dim != second.dim or call.get("keepdim"):
        raise OutsideTheoryError("vectors that broadcast")
    dim = call.get("dim", 1) if "cosine" in call.call.name else -1
    names = letters(first.dim)
    names[dim] = f"{names[dim]}^"
    layouts: dict[str, tuple[Array, Layout]] = {"x1": (first, names), "x2": (second, names)}
    return by_slices(call, layouts, [[name for name in names if not name.endswith("^")]])


# --- Losses ---------------------------------------------------------------------------------------

belongs_to(
    "terms of one sign",
    "mse_loss nll_loss_forward nll_loss2d_forward binary_cross_entropy smooth_l1_loss huber_loss",
)
belongs_to(
    "losses of pairs",
    "mse_loss l1_loss smooth_l1_loss huber_loss soft_margin_loss binary_cross_entropy",
    "binary_cross_entropy_with_logits",
)
belongs_to(
    "smooth",
    "_fused_rms_norm_backward _native_batch_norm_legit _native_batch_norm_legit_functional",
    "mse_loss mse_loss_backward native_batch_norm native_batch_norm_backward nll_loss2d_backward",
    "nll_loss_backward",
)
belongs_to("losses of classes", "nll_loss_forward nll_loss2d_forward")

_OLD = ("size_average", "reduce")
_REDUCTIONS = ("none", "mean", "sum")


def _reduction(call: SymbolicCall) -> str:
    reduction = call.get("reduction", "mean")
    if any(call.get(name) is not None for name in _OLD):
        raise OutsideTheoryError("size_average or reduce")
    if isinstance(reduction, int) and not isinstance(reduction, bool):
        reduction = _REDUCTIONS[reduction]
    batchmean = reduction == "batchmean" and operator_word(call.call) == "kl_div"
    if reduction not in _REDUCTIONS and not batchmean:
        raise OutsideTheoryError(f"a reduction {reduction!r:.40}")
    return str(reduction)


def _none_like(call: SymbolicCall) -> dict[str, Any]:
    """The setting for one loss of each element, in the words of the call."""
    by_number = isinstance(call.get("reduction", 1), int) and call.call.name.startswith("aten.")
    return {"reduction": 0 if by_number else "none"}


def _all_of(call: SymbolicCall, each: Array) -> Term:
    """The sum over all elements."""
    names = [call.fresh() for _ in each.shape]
    places = [ZERO if s == ONE else symbol(n) for n, s in zip(names, each.shape, strict=True)]
    term = each[tuple(places)]
    for name, size in zip(names, each.shape, strict=True):
        if size != ONE:
            term = ("sum", name, size, term)
    return term


def _reduce_loss(call: SymbolicCall, each: Array, reduction: str) -> Array:
    if reduction == "none":
        return each
    total = _all_of(call, each)
    if reduction == "sum":
        return Array((), lambda: total)
    sizes = each.shape[:1] if reduction == "batchmean" else each.shape
    return Array((), lambda: times(("inv", size_term(*sizes)), total))


def _losses(
    call: SymbolicCall, layouts: Mapping[str, tuple[Array, Layout]], outside: Layout
) -> Array:
    reduction = _reduction(call)
    each = by_slices(call, layouts, [outside], settings=_none_like(call))[0]
    return _reduce_loss(call, each, reduction)


@operator("x target size_average reduce reduction weight", functional("mse_loss l1_loss"))
@operator("x target size_average reduce reduction beta", functional("smooth_l1_loss"))
@operator("x target reduction delta weight", functional("huber_loss"))
@operator("x target size_average reduce reduction", functional("soft_margin_loss"))
@operator(
    "x target log_input full size_average eps reduce reduction", functional("poisson_nll_loss")
)
@operator("x target margin size_average reduce reduction", functional("hinge_embedding_loss"))
@operator("x target weight size_average reduce reduction", functional("binary_cross_entropy"))
@operator(
    "x target weight size_average reduce reduction pos_weight",
    functional("binary_cross_entropy_with_logits"),
)
@operator("x target size_average reduce reduction log_target", functional("kl_div"))
@operator("x target reduction", "aten.mse_loss aten.l1_loss aten.soft_margin_loss")
@operator("x target reduction beta", "aten.smooth_l1_loss aten.huber_loss")
@operator("x target var full eps reduction", functional("gaussian_nll_loss"))
@operator(
    "input1 input2 target margin size_average reduce reduction", functional("margin_ranking_loss")
)
def _by_element(call: SymbolicCall) -> Array:
    """One loss for each element; weights broadcast."""
    arrays = call.all_tensors()
    count = max(array.dim for array in arrays.values())
    names = letters(count)
    layouts: dict[str, tuple[Array, Layout]] = {
        name: (array, names[count - array.dim :]) for name, array in arrays.items()
    }
    return _losses(call, layouts, names)


@operator(
    "input1 input2 target margin size_average reduce reduction", functional("cosine_embedding_loss")
)
@operator(
    "anchor positive negative margin p eps swap size_average reduce reduction",
    functional("triplet_margin_loss"),
)
@operator("x target p margin weight size_average reduce reduction", functional("multi_margin_loss"))
@operator("x target size_average reduce reduction", functional("multilabel_margin_loss"))
@operator(
    "x target weight size_average reduce reduction", functional("multilabel_soft_margin_loss")
)
def _by_sample(call: SymbolicCall) -> Array:
    """One loss for each vector; class weights apply within a sample."""
    arrays = call.all_tensors()
    if max(array.dim for array in arrays.values()) < 2:  # noqa: PLR2004 - samples and classes
        raise OutsideTheoryError("a loss of one sample")
    layouts: dict[str, tuple[Array, Layout]] = {}
    for name, array in arrays.items():
        layout: Layout = ["c^"] if name == "weight" else ["b", "c^"][: array.dim]
        layouts[name] = (array, layout)
    return _losses(call, layouts, ["b"])


@operator(
    "x target weight size_average ignore_index reduce reduction label_smoothing",
    functional("cross_entropy"),
)
@operator("x target weight size_average ignore_index reduce reduction", functional("nll_loss"))
@operator("x target weight reduction ignore_index label_smoothing", "aten.cross_entropy_loss")
def _by_class(call: SymbolicCall) -> Array:
    """Each position alone; the mean counts targets that are not ignored, by their weights."""
    x, target, weight = call.given("x"), call.given("target"), call.tensor("weight")
    if x.dim < 2:  # noqa: PLR2004 - samples and classes
        raise OutsideTheoryError("a loss of one sample")
    names = letters(x.dim)
    outside = [names[0], *names[2:]]
    classes_apart = [names[0], "k^", *names[2:]]
    of_classes = target.dim < x.dim
    layouts: dict[str, tuple[Array, Layout]] = {
        "x": (x, classes_apart),
        "target": (target, outside if of_classes else classes_apart),
    }
    if weight is not None:
        layouts["weight"] = (weight, ["k^"])
    reduction = _reduction(call)
    each = by_slices(call, layouts, [outside], settings=_none_like(call))[0]
    if reduction != "mean" or not of_classes:
        return _reduce_loss(call, each, reduction)
    ignored = call.get("ignore_index", -100)
    values = call.get("target")
    if weight is None and call.assume(
        f"no target is ignore_index ({ignored})",
        lambda: not (values.is_meta or (values == ignored).any()),
    ):
        return _reduce_loss(call, each, reduction)
    counts = _counts(call, target, weight, ignored)
    shares = ("inv", _all_of(call, Array(target.shape, counts)))
    total = _all_of(call, each)
    return Array((), lambda: times(shares, total))


def _counts(
    call: SymbolicCall, target: Array, weight: Array | None, ignored: int
) -> Callable[..., Term]:
    """The weight of each target in the mean."""

    def evaluate(arrays: list[torch.Tensor]) -> torch.Tensor:
        counts = (arrays[0] != ignored).double()
        classes = arrays[1:] or [torch.ones((), dtype=torch.float64)]
        at = arrays[0].long() if weight is not None else 0
        return counts * (classes[0].reshape(-1)[at] if counts else 1.0)

    function = call.known_function(f"count(ignore_index={ignored})", evaluate)

    def element(*at: Poly) -> Term:
        if weight is None:
            return ("fn", function, (target[at],))
        name = call.fresh()
        classes = (((name, weight.shape[0]),), weight[(symbol(name),)])
        return ("fun", function, (((), target[at]), classes), ())

    return element


@operator(
    "log_probs targets input_lengths target_lengths blank reduction zero_infinity",
    functional("ctc_loss"),
)
def _sequences(call: SymbolicCall) -> Array:
    """Each sequence alone; the mean divides each loss by the length of its target."""
    names = ("log_probs", "targets", "input_lengths", "target_lengths")
    arrays = [call.given(name) for name in names]
    sequence_layouts: list[Layout] = [[None, "b", None], ["b", None], ["b"], ["b"]]
    if arrays[0].dim != 3 or arrays[1].dim != 2:  # noqa: PLR2004 - a batch of sequences
        raise OutsideTheoryError("concatenated targets")
    reduction = _reduction(call)
    layouts = dict(zip(names, zip(arrays, sequence_layouts, strict=True), strict=True))
    if reduction == "mean":
        sequence_means = by_slices(
            call, layouts, [["b"]], name="mean of one sequence", pick=lambda r: [r[0].reshape(1)]
        )[0]
        return _reduce_loss(call, sequence_means, "mean")
    each = by_slices(call, layouts, [["b"]], settings=_none_like(call))[0]
    return _reduce_loss(call, each, reduction)

"""Operators that nobody calls by name, and that exported and decomposed graphs are full of."""

from __future__ import annotations

import dataclasses

import torch

from paritas.partition.library.claims import Bound, Claim, letters, named
from paritas.partition.library.losses import by_class, by_element
from paritas.partition.library.norms import channelwise
from paritas.partition.library.registry import rule

# How aten counts the words.
_REDUCTIONS = {0: "none", 1: "mean", 2: "sum"}
_IMAGES = 3  # samples, channels, one dimension of space


def _in_words(bound: Bound) -> Bound:
    """The same call with the reduction as a word."""
    number = bound.get("reduction", 1)
    words = _REDUCTIONS.get(number, number) if isinstance(number, int) else number
    return dataclasses.replace(bound, values={**bound.values, "reduction": words})


@rule("x target weight reduction ignore_index label_smoothing", "aten.cross_entropy_loss")
def _cross_entropy(bound: Bound) -> Claim | None:
    return by_class(_in_words(bound))


@rule("x target reduction", "aten.mse_loss aten.l1_loss aten.soft_margin_loss")
@rule("x target reduction beta", "aten.smooth_l1_loss aten.huber_loss")
def _elements(bound: Bound) -> Claim | None:
    return by_element(_in_words(bound))


@rule("x p train", "aten.native_dropout")
def _dropout(bound: Bound) -> Claim | None:
    """What is kept, and which that is."""
    shape = bound.shape("x")
    if shape is None:
        return None
    dims = named(shape, letters(len(shape)))
    return Claim({"x": dims}, (dims, dims))


@rule(
    "x weight bias running_mean running_var momentum eps",
    "aten._native_batch_norm_legit_no_training",
)
def _batch_norm(bound: Bound) -> Claim | None:
    """Given statistics bind nothing; those of the batch, which are not taken, are empty."""
    claim = channelwise(bound, (), ("weight", "bias", "running_mean", "running_var"))
    return None if claim is None else Claim(claim.inputs, (*claim.outputs, "_", "_"))


@rule("x weight bias N C HxW group eps", "aten.native_group_norm")
def _group_norm(bound: Bound) -> Claim | None:
    """Sample by sample, and the number of samples goes along."""
    shape = bound.shape("x")
    if shape is None or len(shape) < _IMAGES - 1 or "N" not in bound.values:
        return None
    samples = "1" if shape[0] == 1 else "b"
    dims = " ".join([samples, *["_"] * (len(shape) - 1)])
    inputs = {"x": dims} | {name: "_" for name in ("weight", "bias") if bound.has(name)}
    numbers = () if shape[0] == 1 else (("N", None, "b"),)
    return Claim(inputs, (dims, f"{samples} _", f"{samples} _"), numbers)


@rule(
    "x *how",
    "aten.upsample_nearest1d aten.upsample_nearest2d aten.upsample_nearest3d",
    "aten.upsample_linear1d aten.upsample_bilinear2d aten.upsample_bicubic2d",
    "aten.upsample_trilinear3d",
)
def _upsample(bound: Bound) -> Claim | None:
    """Every channel of every sample by itself."""
    shape = bound.shape("x")
    if shape is None or len(shape) < _IMAGES:
        return None
    front = named(shape[:2], letters(2)).split()
    dims = " ".join([*front, *["_"] * (len(shape) - 2)])
    return Claim({"x": dims}, (dims,))


@rule("x indices", "aten.index")
def _index(bound: Bound) -> Claim | None:
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
    return Claim({"x": " ".join(inside)}, (" ".join([*kept[:first], *made, *kept[first:]]),))

"""Functions of nnScaler's runtime, under the names that its users' configurations have."""

from __future__ import annotations

import dataclasses

import torch

from paritas.partition.library.claims import SUM, Bound, Claim, letters, named
from paritas.partition.library.elementwise import same
from paritas.partition.library.indexing import index_select
from paritas.partition.library.norms import channelwise
from paritas.partition.library.registry import rule

_RUNTIME = "nnscaler.runtime.function."
_WRAPPED = "nnscaler.graph.function.wrapnn."
_RUNNING = ("running_mean", "running_var")
_VECTORS = ("weight", "bias", *_RUNNING)


@rule("x weight padding_idx start stop", f"{_RUNTIME}embedding")
def _embedding(bound: Bound) -> Claim | None:
    """A rank that has a part of the vocabulary gives zeros for all other ids."""
    ids, table = bound.shape("x"), bound.shape("weight")
    if ids is None or table is None or not {"start", "stop"} <= set(bound.values):
        return None
    dims = named(ids, letters(len(ids)))
    return Claim(
        {"x": dims, "weight": f"v{SUM} w"}, (f"{dims} w".strip(),), bounds=("start", "stop", "v")
    )


@rule("x *slicers", f"{_RUNTIME}fullslice")
def _slice(bound: Bound) -> Claim | None:
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
    return Claim({"x": " ".join([*inside, *left])}, (" ".join([*outside, *left]),))


rule("x", f"{_RUNTIME}identity")(same)
rule("x p inplace", f"{_RUNTIME}nndropout")(same)
rule("x index dim", f"{_RUNTIME}index_select")(index_select)


@rule("x weight bias normalized_shape eps", f"{_RUNTIME}layer_norm")
def _layer_norm(bound: Bound) -> Claim | None:
    shape, normalized = bound.shape("x"), bound.get("normalized_shape")
    if shape is None or not isinstance(normalized, list | tuple | torch.Size):
        return None
    start = len(shape) - len(normalized)
    dims = named(shape, letters(len(shape))).split()
    dims = [d if i < start or d == "1" else f"{d}^" for i, d in enumerate(dims)]
    inputs = {"x": " ".join(dims)}
    inputs |= {n: " ".join(dims[start:]) for n in ("weight", "bias") if bound.has(n)}
    return Claim(inputs, (" ".join(dims),))


@rule(
    "x weight bias running_mean running_var num_batches_tracked momentum training "
    "track_running_stats eps process_group",
    f"{_WRAPPED}wrap_batchnorm2d_func",
)
def _batch_norm(bound: Bound) -> Claim | None:
    """Split by samples, ranks share the statistics of a training batch; they do in no other case.

    A batch whose statistics are used outside of training is normalised by each rank's own.
    """
    trains = bound.get("training", True)
    apart = trains or not bound.has("running_mean")
    claim = channelwise(bound, (2, 3) if trains else (0, 2, 3) if apart else (), _VECTORS)
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
def _instance_norm(bound: Bound) -> Claim | None:
    """Each sample by itself; running statistics are those of a rank's own samples.

    nnScaler splits it so, and does not look at what becomes of them: neither is it claimed here.
    """
    if len(bound.shape("x") or ()) != 4:  # noqa: PLR2004 - images
        return None
    # How many channels there are is a number that no rank is told anew.
    channels = (1,) if bound.get("affine", False) else ()
    claim = channelwise(bound, (*channels, 2, 3), _VECTORS)
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

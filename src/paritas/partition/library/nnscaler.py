"""Functions of nnScaler's runtime, under the names that its users' configurations have."""

from __future__ import annotations

import torch

from paritas.partition.library.claims import SUM, Bound, Claim, letters, named
from paritas.partition.library.elementwise import same
from paritas.partition.library.indexing import index_select
from paritas.partition.library.norms import channelwise
from paritas.partition.library.registry import rule

_RUNTIME = "nnscaler.runtime.function."
_WRAPPED = "nnscaler.graph.function.wrapnn."
_VECTORS = ("weight", "bias", "running_mean", "running_var")


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
    """Without a group of processes to ask, a rank has the statistics of its own samples only."""
    statistics = bound.get("training", True) or not bound.has("running_mean")
    return channelwise(bound, (0, 2, 3) if statistics else (), _VECTORS)


@rule(
    "x weight bias running_mean running_var momentum eps training track_running_stats num_features",
    f"{_WRAPPED}wrap_instancenorm2d_func",
)
def _instance_norm(bound: Bound) -> Claim | None:
    """Running statistics are those of all samples together."""
    if len(bound.shape("x") or ()) != 4:  # noqa: PLR2004 - images
        return None
    samples = (0,) if bound.has("running_mean") or bound.has("running_var") else ()
    return channelwise(bound, (*samples, 2, 3), _VECTORS)

"""Tensors split over ranks, and the records of their parts."""

from __future__ import annotations

import itertools
import math
import re

import pytest
import torch

from paritas.comparison.gathering import gather
from paritas.core.errors import UsageError
from paritas.core.placement.assembly import ReplicasDisagreeError
from paritas.core.placement.meshes import coordinates_by_axis
from paritas.core.results.items import LocalPlacement
from paritas.formats.files.records import Payload, Record, Site, TensorFacts


class Ranks:
    """Parts of tensors, by rank, as a dump has them."""

    kind = "paritas"

    def __init__(self) -> None:
        self.parts: list[Record] = []
        self.values: dict[tuple[int, int], torch.Tensor] = {}

    def add(self, rank, tensor, name="x", step=0, **more) -> Record:
        sequence = sum(record.rank == rank for record in self.parts)
        site = Site(source="eager", level="module", name=name)
        facts = TensorFacts(
            dtype=str(tensor.dtype).removeprefix("torch."),
            shape=tuple(tensor.shape),
            stride=tuple(tensor.stride()),
        )
        payload = Payload(file=f"{rank}", nbytes=tensor.nbytes, shape=tuple(tensor.shape))
        given = {"id": site.id, "site": site, "tensor": facts, "payload": payload, **more}
        record = Record(sequence=sequence, step=step, rank=rank, **given)
        self.parts.append(record)
        self.values[rank, sequence] = tensor
        return record

    def read(self, record) -> torch.Tensor:
        return self.values[record.rank, record.sequence]

    def distribute(self, whole, mesh, placements, leave_out=(), **more):
        """Split as a distributed tensor is, one mesh dimension after the other."""
        coordinates = itertools.product(*map(range, mesh))
        for rank, coordinate in enumerate(coordinates):
            if rank not in leave_out:
                local, offset = split(whole, mesh, placements, coordinate)
                place = LocalPlacement(
                    mesh=mesh,
                    mesh_names=("dp", "tp", "cp")[: len(mesh)],
                    coordinate=coordinate,
                    placements=placements,
                    global_shape=tuple(whole.shape),
                    global_offset=offset,
                )
                self.add(rank, local, placement=place, **more)
        return self


def split(whole, mesh, placements, coordinate):
    """What a rank holds, and where that begins."""
    index = [torch.arange(extent) for extent in whole.shape]
    local = whole
    for size, at, placement in zip(mesh, coordinate, placements, strict=True):
        if found := re.fullmatch(r"(?:shard|_S)\((\d)(?:, (\d))?\)", placement):
            axis, pieces = int(found[1]), int(found[2] or 1)
            kept = [
                chunks(piece, size)[at] for piece in chunks(torch.arange(local.shape[axis]), pieces)
            ]
            chosen = torch.cat(kept)
            local = local.index_select(axis, chosen)
            index[axis] = index[axis][chosen]
        elif placement == "partial(sum)":
            # Whole numbers: their sum is exact in any order.
            others = sum(range(1, size))
            local = local - others if at == 0 else torch.full_like(local, at)
    starts = zip(index, whole.shape, strict=True)
    offset = tuple(int(one[0]) if len(one) else extent for one, extent in starts)
    return local, offset


def chunks(tensor, count):
    """`torch.chunk`, with empty ones for those that it leaves out."""
    size = math.ceil(len(tensor) / count)
    return [tensor[at * size : (at + 1) * size] for at in range(count)]


def numbers(*shape):
    """Whole numbers, all of them different."""
    count = torch.Size(shape).numel()
    return torch.randperm(count, generator=torch.Generator().manual_seed(0)).float().reshape(shape)


def gathered(ranks, dims=None, mesh=None, known=True):
    """All operands; `dims` for every record, ranks in row-major order on the mesh."""
    mesh = mesh or {}
    return gather(
        ranks.parts,
        dims_for=lambda _: dims,
        coordinates=lambda rank: coordinates_by_axis(rank, mesh) if mesh and known else None,
        mesh=mesh,
    )


def only(ranks, *given, **more):
    (operand,) = gathered(ranks, *given, **more)
    return operand


def same_bits(a, b):
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)


def refusal(ranks, *given, **more):
    operand = only(ranks, *given, **more)
    with pytest.raises(UsageError) as caught:
        operand.read(ranks.read)
    assert not isinstance(caught.value, ReplicasDisagreeError)
    return str(caught.value)

"""Everything that is compared in a training step, with the ranks' values assembled."""

from __future__ import annotations

import dataclasses
import functools
from typing import TYPE_CHECKING

import torch

from paritas.core.execution.observation import OUTPUT
from paritas.core.placement.meshes import coordinates_by_axis
from paritas.core.placement.plain_parts import ExactMatch, expected_part, find_plain_part
from paritas.core.placement.rank_pieces import Assembled, assemble
from paritas.core.results.items import Item, ItemKind, gradient, output

if TYPE_CHECKING:
    from torch import Tensor

    from paritas.core.placement.plain_parts import PlainPart
    from paritas.core.placement.rank_pieces import RankPiece
    from paritas.sharding.plans.plan import ParallelProgram
    from paritas.sharding.plans.traces import StepTrace, Trace


# --- Which shard of a parameter a plain tensor is, in a model that was split by hand --------------

# Only the numbers show it: before the first step a rank's shard equals the slice that was cut out.
# If several slices are equal (a bias of zeros), the natural order of the ranks decides, or the
# weight beside it.


def find_slots(
    program: ParallelProgram, reference: dict[str, RankPiece], ranks: list[Trace]
) -> dict[str, dict[int, PlainPart]]:
    """Name of a parameter or buffer -> rank -> where its shard lies, for those that are shards."""
    slots_by_name: dict[str, dict[int, PlainPart]] = {}
    for name, reference_piece in reference.items():
        for trace in ranks:
            piece = trace.initial.get(name)
            if piece is None or piece.placement is not None:
                continue
            expected = functools.partial(natural_chunk, program, trace.rank)
            slots = find_plain_part(reference_piece.local, piece.local, expected, ExactMatch())
            if slots is not None:
                slots_by_name.setdefault(name, {})[trace.rank] = slots
    for name in slots_by_name:
        _follow_the_weight(name, slots_by_name, reference)
    return slots_by_name


def natural_chunk(program: ParallelProgram, rank: int, parts: int) -> int:
    """Which of the equal parts is expected on a rank: its place on the last axis of that size.

    Axes along which ranks have different samples come last: there, ranks hold the same parameters.
    """
    places = coordinates_by_axis(rank, program.mesh)
    alike = [axis for axis in program.mesh if program.mesh[axis] == parts]
    if not alike:
        return rank % parts if parts else 0
    return places[max(alike, key=lambda axis: (axis not in program.split, alike.index(axis)))]


def _follow_the_weight(
    name: str, slots_by_name: dict[str, dict[int, PlainPart]], reference: dict[str, RankPiece]
) -> None:
    """Split a bias that fits anywhere, since its numbers are equal, as the weight beside it."""
    path, _, kind = name.rpartition(".")
    beside = slots_by_name.get(f"{path}.weight" if path else "weight")
    if kind == "weight" or beside is None:
        return
    size = reference[name].local.shape[0]
    for rank, slots in slots_by_name[name].items():
        other = beside.get(rank)
        doubtful = slots.ambiguous or not slots.proven
        if other is None or not doubtful or slots.dim != 0 or other.dim != 0:
            continue
        weight = reference[f"{path}.weight" if path else "weight"].local
        if weight.shape[0] == size:
            where = (other.where[0], *slots.where[1:])
            slots_by_name[name][rank] = dataclasses.replace(
                slots, where=where, chunk=other.chunk, natural=other.natural
            )


# --- Everything that is compared in a training step -----------------------------------------------


@dataclasses.dataclass(frozen=True)
class StepItem:
    """One value that is compared.

    Attributes:
        item: what it is, within its step; a `GRADIENT` is what a piece of a model sends back to its
            input, and that of a parameter is a `TRAINING_GRADIENT`.
        reference: its value on one device; None if no gradient arrives.
        ranks: what the ranks hold.
    """

    item: Item
    reference: Tensor | None
    ranks: Assembled

    @property
    def kind(self) -> ItemKind:
        """What kind of value it is."""
        return self.item.kind

    @property
    def name(self) -> str:
        """The name of the parameter or buffer, or the path of another value."""
        return self.item.name


def reference_values(step: StepTrace) -> dict[Item, Tensor | None]:
    """Item -> value on one device."""
    pieces = _pieces_by_item(step)
    return {item: None if piece is None else piece.local for item, piece in pieces.items()}


def _pieces_by_item(step: StepTrace) -> dict[Item, RankPiece | None]:
    """Item -> its piece, in the order of computation; None where no gradient arrives."""
    pieces: dict[Item, RankPiece | None] = {
        output(f"{OUTPUT}{path}"): piece for path, piece in step.outputs.items()
    }
    if step.loss is not None:
        pieces[Item(ItemKind.LOSS, "loss")] = step.loss
    pieces |= {gradient(path): piece for path, piece in step.returned.items()}
    for kind, pieces_by_name in (
        (ItemKind.TRAINING_GRADIENT, step.gradients),
        (ItemKind.PARAMETER, step.parameters),
        (ItemKind.BUFFER, step.buffers),
    ):
        pieces |= {Item(kind, name): piece for name, piece in pieces_by_name.items()}
    return pieces


def step_items(
    program: ParallelProgram,
    reference: StepTrace,
    ranks: list[Trace],
    number: int,
    slots: dict[str, dict[int, PlainPart]],
) -> list[StepItem]:
    """Everything to compare in one step; `number` counts from 0."""
    tables: dict[int, dict[Item, RankPiece | None]] = {}
    for trace in ranks:
        step = trace.steps[number]
        # A parameter that is frozen there has no gradient.
        frozen = {Item(ItemKind.TRAINING_GRADIENT, name): None for name in step.parameters}
        tables[trace.rank] = {**frozen, **_pieces_by_item(step)}
    items: list[StepItem] = []
    for item, value in reference_values(reference).items():
        pieces = {rank: table[item] for rank, table in tables.items() if item in table}
        if item.kind is ItemKind.LOSS:
            together = _average_scalar(program, pieces)
        elif item.kind in {ItemKind.OUTPUT, ItemKind.GRADIENT}:
            together = _assemble_output(program, ranks, pieces, value)
        else:
            together = _assemble_state(pieces, value, slots.get(item.name))
        items.append(StepItem(item, value, together))
    return items


def initial_items(
    reference: Trace, ranks: list[Trace], slots: dict[str, dict[int, PlainPart]]
) -> list[StepItem]:
    """The parameters and buffers before the first step."""
    items: list[StepItem] = []
    for name, piece in reference.initial.items():
        pieces: dict[int, RankPiece | None] = {
            trace.rank: trace.initial[name] for trace in ranks if name in trace.initial
        }
        together = _assemble_state(pieces, piece.local, slots.get(name))
        items.append(StepItem(Item(ItemKind.INITIAL, name), piece.local, together))
    return items


def unmatched_names(reference: Trace, ranks: list[Trace]) -> list[str]:
    """Names of parameters and buffers that the ranks have and the reference does not."""
    names = dict.fromkeys(name for trace in ranks for name in trace.initial)
    return [name for name in names if name not in reference.initial]


def broken_ties(reference: Trace, ranks: list[Trace]) -> list[tuple[str, ...]]:
    """Names of one parameter of the reference that are several parameters on a rank."""
    return [
        tied
        for tied in reference.tied
        if any(
            len(held_names := [name for name in tied if name in trace.initial]) > 1
            and not any(set(held_names) <= set(rank_tied) for rank_tied in trace.tied)
            for trace in ranks
        )
    ]


def _assemble_state(
    pieces: dict[int, RankPiece | None], value: Tensor | None, slots: dict[int, PlainPart] | None
) -> Assembled:
    """Assemble a parameter, its gradient or a buffer."""
    present_pieces = [piece for piece in pieces.values() if piece is not None]
    if value is None:
        if not present_pieces:
            return Assembled(without=tuple(pieces))
        return assemble(pieces, present_pieces[0].whole_shape, slots)
    if pieces and not present_pieces:
        return Assembled(value=torch.zeros_like(value), without=tuple(pieces))
    return assemble(
        _with_zeros(pieces, present_pieces[0] if present_pieces else None), value.shape, slots
    )


def _with_zeros(
    pieces: dict[int, RankPiece | None], like: RankPiece | None
) -> dict[int, RankPiece | None]:
    """The pieces with zero where no gradient arrives for a plain parameter."""
    if like is None or like.placement is not None:
        return pieces
    local = torch.zeros_like(like.local)
    # The sign of such a zero means nothing.
    local = local.copysign(like.local) if local.is_floating_point() else local
    zero = dataclasses.replace(like, local=local)
    return {rank: zero if piece is None else piece for rank, piece in pieces.items()}


# --- values that depend on samples ----------------------------------------------------------------


def _group_by_samples(
    program: ParallelProgram, pieces: dict[int, RankPiece | None]
) -> dict[int, dict[int, RankPiece | None]]:
    """Part of the batch -> the pieces of the ranks that have it."""
    groups: dict[int, dict[int, RankPiece | None]] = {}
    for rank, piece in pieces.items():
        groups.setdefault(program.data_rank(rank), {})[rank] = piece
    return dict(sorted(groups.items()))


def _average_scalar(program: ParallelProgram, pieces: dict[int, RankPiece | None]) -> Assembled:
    """Assemble a scalar: the mean over the parts of the batch."""
    parts = [assemble(group, ()) for group in _group_by_samples(program, pieces).values()]
    about = _merge_groups(parts)
    values = [part.value for part in parts if part.value is not None]
    if about.fault or not values:
        return about
    mean = torch.stack([value.double() for value in values]).mean().to(values[0].dtype)
    return dataclasses.replace(about, value=mean)


def _merge_groups(parts: list[Assembled]) -> Assembled:
    """Merge several groups of ranks, without the value."""
    return Assembled(
        fault=next((part.fault for part in parts if part.fault), "" if parts else "no rank has it"),
        disagreement=next((p.disagreement for p in parts if p.disagreement is not None), None),
        by_rank={rank: value for part in parts for rank, value in part.by_rank.items()},
        without=tuple(rank for part in parts for rank in part.without),
    )


def _assemble_output(
    program: ParallelProgram,
    ranks: list[Trace],
    pieces: dict[int, RankPiece | None],
    value: Tensor | None,
) -> Assembled:
    if value is None:
        return Assembled(fault="the reference returns nothing there")
    if any(piece is not None and piece.where is not None for piece in pieces.values()):
        return assemble(pieces, value.shape)
    if value.dim() == 0:
        return _average_scalar(program, pieces)
    shapes = {piece.whole_shape for piece in pieces.values() if piece}
    if program.data_ranks == 1 or tuple(value.shape) in shapes:
        return _group_output(program, pieces, tuple(value.shape))
    samples = {trace.rank: trace.samples for trace in ranks}
    batch = max((s[1] for s in samples.values() if s is not None), default=0)
    parts: list[Assembled] = []
    for group in _group_by_samples(program, pieces).values():
        rows = sample_rows(samples[next(iter(group))], batch, value.shape[0])
        if rows is None:
            fault = f"its {value.shape[0]} rows are not a multiple of the {batch} samples"
            return dataclasses.replace(_merge_groups(parts), fault=fault)
        parts.append(_group_output(program, group, (rows[1] - rows[0], *value.shape[1:])))
    about = _merge_groups(parts)
    values = [part.value for part in parts if part.value is not None]
    return about if about.fault else dataclasses.replace(about, value=torch.cat(values))


def sample_rows(samples: tuple[int, int] | None, batch: int, rows: int) -> tuple[int, int] | None:
    """The rows of an output that belong to some samples; None if that is unknown."""
    if samples is None or not batch or rows % batch:
        return None
    return samples[0] * rows // batch, samples[1] * rows // batch


def _group_output(
    program: ParallelProgram, pieces: dict[int, RankPiece | None], shape: tuple[int, ...]
) -> Assembled:
    """Assemble the output of ranks with the same samples; plain shards lie in rank order."""
    slots: dict[int, PlainPart] = {}
    for rank, piece in pieces.items():
        if piece is not None and piece.placement is None:
            expected = functools.partial(natural_chunk, program, rank)
            part = expected_part(shape, piece.local.shape, expected)
            if part is not None:
                slots[rank] = part
    return assemble(pieces, shape, slots)

"""Assemble the ranks' values: everything that is compared in a training step."""

from __future__ import annotations

import dataclasses
import itertools
from typing import TYPE_CHECKING

import torch

from paritas.core.errors import UsageError
from paritas.core.numerics.criterion import real_view
from paritas.core.numerics.pooling import populations
from paritas.core.placement.assembly import (
    ReplicaDisagreement,
    Segment,
    box,
    length,
    positions,
    put,
    reduce_terms,
    same_bits,
    take,
)
from paritas.core.placement.assembly import whole as all_of
from paritas.core.placement.meshes import coordinates_by_axis
from paritas.core.placement.placement import Placement
from paritas.core.results.items import Item, ItemKind, Partial, gradient, output

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from paritas.core.placement.assembly import Where
    from paritas.sharding.plans.plan import ParallelProgram
    from paritas.sharding.plans.traces import RankPiece, StepTrace, Trace


# --- Which shard of a parameter a plain tensor is, in a model that was split by hand --------------

# Only the numbers show it: before the first step a rank's shard equals the slice that was cut out.
# If several slices are equal (a bias of zeros), the natural order of the ranks decides, or the
# weight beside it.

_MOST_ROWS = 1 << 16


@dataclasses.dataclass(frozen=True)
class Slots:
    """Where in the whole one rank's plain shard lies.

    Attributes:
        where: which part of the whole it is.
        dim: the dim that is split; None if there are several.
        chunk: which of the equal parts along `dim` it is, from 0; None if the parts are not equal.
        natural: the part that is expected on this rank.
        proven: whether the initial values show it.
        ambiguous: whether they also fit elsewhere.
    """

    where: Where
    dim: int | None = None
    chunk: int | None = None
    natural: int | None = None
    proven: bool = False
    ambiguous: bool = False

    def fits(self, value: Tensor, shape: tuple[int, ...]) -> bool:
        """Whether a tensor has the shape of this part."""
        return len(shape) == len(self.where) and tuple(value.shape) == tuple(
            map(length, self.where)
        )


def find_slots(
    program: ParallelProgram, reference: dict[str, RankPiece], ranks: list[Trace]
) -> dict[str, dict[int, Slots]]:
    """Name of a parameter or buffer -> rank -> where its shard lies, for those that are shards."""
    found: dict[str, dict[int, Slots]] = {}
    for name, whole in reference.items():
        for trace in ranks:
            piece = trace.initial.get(name)
            if piece is None or piece.placement is not None:
                continue
            slots = find_slots_of_rank(program, trace.rank, whole.local, piece.local)
            if slots is not None:
                found.setdefault(name, {})[trace.rank] = slots
    for name in found:
        _follow_the_weight(name, found, reference)
    return found


def natural_chunk(program: ParallelProgram, rank: int, parts: int) -> int:
    """Which of the equal parts is expected on a rank: its place on the last axis of that size.

    Axes along which ranks have different samples come last: there, ranks hold the same parameters.
    """
    places = coordinates_by_axis(rank, program.mesh)
    alike = [axis for axis in program.mesh if program.mesh[axis] == parts]
    if not alike:
        return rank % parts if parts else 0
    return places[max(alike, key=lambda axis: (axis not in program.split, alike.index(axis)))]


def find_slots_of_rank(
    program: ParallelProgram, rank: int, whole: Tensor, local: Tensor
) -> Slots | None:
    """Where `local` lies; None if it is the whole, or not a part of it."""
    if whole.dim() != local.dim() or whole.shape == local.shape or not local.numel():
        return None
    if any(part > length for part, length in zip(local.shape, whole.shape, strict=True)):
        return None
    dims = [d for d in range(whole.dim()) if local.shape[d] < whole.shape[d]]
    if len(dims) > 1:
        return _find_block(whole, local, dims)
    dim = dims[0]
    return (
        _find_chunk(program, rank, whole, local, dim)
        or _find_offset(whole, local, dim)
        or _find_rows(whole, local, dim)
        or _slots_by_order(program, rank, whole, local, dim)
    )


def _along(whole: Tensor, dim: int, where: tuple[Segment, ...]) -> Where:
    """These segments of one dim, and all of the other dims."""
    full = list(map(all_of, whole.shape))
    full[dim] = where
    return tuple(full)


def _chunk(whole: Tensor, dim: int, size: int, number: int) -> Where:
    """One of the equal parts along a dim."""
    return _along(whole, dim, (Segment(0, number * size, size),))


def _find_chunk(
    program: ParallelProgram, rank: int, whole: Tensor, local: Tensor, dim: int
) -> Slots | None:
    """The place of one of the equal parts."""
    size = local.shape[dim]
    parts, rest = divmod(whole.shape[dim], size)
    if rest:
        return None
    equal = [n for n in range(parts) if torch.equal(whole.narrow(dim, n * size, size), local)]
    if not equal:
        return None
    natural = natural_chunk(program, rank, parts)
    chosen = natural if natural in equal else equal[0]
    where = _chunk(whole, dim, size, chosen)
    return Slots(where, dim, chosen, natural, proven=True, ambiguous=len(equal) > 1)


def _find_offset(whole: Tensor, local: Tensor, dim: int) -> Slots | None:
    """The place of a slice that starts anywhere, as uneven parts do."""
    size = local.shape[dim]
    if whole.shape[dim] > _MOST_ROWS:
        return None
    begins = (whole == local.narrow(dim, 0, 1)).movedim(dim, 0)
    begins = begins.reshape(len(begins), -1).all(1)
    places = [
        begin
        for begin in begins.nonzero().flatten().tolist()
        if begin + size <= whole.shape[dim] and torch.equal(whole.narrow(dim, begin, size), local)
    ]
    if len(places) != 1:
        return None
    return Slots(_along(whole, dim, (Segment(0, places[0], size),)), dim, proven=True)


def _find_rows(whole: Tensor, local: Tensor, dim: int) -> Slots | None:
    """The place of rows from anywhere, such as a part of each of queries, keys and values."""
    rows, mine = (t.movedim(dim, 0).reshape(t.shape[dim], -1) for t in (whole, local))
    if len(rows) > _MOST_ROWS:
        return None
    places: dict[bytes, int] = {}
    for number, row in enumerate(rows):
        key = _row_bytes(row)
        if key in places:
            return None  # two rows are equal, so the numbers do not show which it is
        places[key] = number
    chosen = [places.get(_row_bytes(row), -1) for row in mine]
    if min(chosen) < 0:
        return None
    return Slots(_along(whole, dim, positions(chosen)), dim, proven=True)


def _row_bytes(row: Tensor) -> bytes:
    return row.contiguous().view(torch.uint8).numpy().tobytes()


def _slots_by_order(
    program: ParallelProgram, rank: int, whole: Tensor, local: Tensor, dim: int
) -> Slots | None:
    """The part expected by the rank's number; its initial values will then differ."""
    size = local.shape[dim]
    parts, rest = divmod(whole.shape[dim], size)
    if rest:
        return None
    natural = natural_chunk(program, rank, parts)
    where = _chunk(whole, dim, size, natural)
    return Slots(where, dim, natural, natural)


def _find_block(whole: Tensor, local: Tensor, dims: list[int]) -> Slots | None:
    """The place of a block that is split along several dims, by its values."""
    counts = [divmod(whole.shape[d], local.shape[d]) for d in dims]
    if any(rest for _, rest in counts):
        return None
    for chosen in itertools.product(*(range(parts) for parts, _ in counts)):
        offset = [0] * whole.dim()
        for d, n in zip(dims, chosen, strict=True):
            offset[d] = n * local.shape[d]
        where = box(offset, local.shape)
        if torch.equal(take(whole, where), local):
            return Slots(where, proven=True)
    return None


def _follow_the_weight(
    name: str, found: dict[str, dict[int, Slots]], reference: dict[str, RankPiece]
) -> None:
    """Split a bias that fits anywhere, since its numbers are equal, as the weight beside it."""
    path, _, kind = name.rpartition(".")
    beside = found.get(f"{path}.weight" if path else "weight")
    if kind == "weight" or beside is None:
        return
    size = reference[name].local.shape[0]
    for rank, slots in found[name].items():
        other = beside.get(rank)
        doubtful = slots.ambiguous or not slots.proven
        if other is None or not doubtful or slots.dim != 0 or other.dim != 0:
            continue
        weight = reference[f"{path}.weight" if path else "weight"].local
        if weight.shape[0] == size:
            where = (other.where[0], *slots.where[1:])
            found[name][rank] = dataclasses.replace(
                slots, where=where, chunk=other.chunk, natural=other.natural
            )


# --- Assemble the ranks' values: shards by their places, partial values reduced, replicas ---------

# Replicas are compared bit for bit. Ranks compute them from the same numbers or receive them from
# one another; if they differ by a rounding, they will differ by more later.


@dataclasses.dataclass(frozen=True)
class Assembled:
    """The value that the ranks hold together.

    Attributes:
        value: the whole, each element from the first rank that holds it; None if there is none.
        fault: why there is no value.
        disagreement: of ranks that should hold the same.
        by_rank: rank -> the part it holds, before any reduction.
        without: ranks that hold nothing (no gradient arrived).
        where: rank -> which part of the whole it holds, where that is known.
    """

    value: Tensor | None = None
    fault: str = ""
    disagreement: ReplicaDisagreement | None = None
    by_rank: dict[int, Tensor] = dataclasses.field(default_factory=dict)
    without: tuple[int, ...] = ()
    where: dict[int, Where] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class _Placed:
    rank: int
    value: Tensor
    where: Where


def assemble(
    pieces: dict[int, RankPiece | None],
    shape: Sequence[int],
    slots: dict[int, Slots] | None = None,
) -> Assembled:
    """Assemble a value from the pieces of the ranks.

    Args:
        pieces: rank -> what it holds; None if nothing arrived.
        shape: of the whole.
        slots: rank -> where in the whole a plain piece lies; otherwise it should be the whole.
    """
    without = tuple(rank for rank, piece in pieces.items() if piece is None)
    held = {rank: piece for rank, piece in pieces.items() if piece is not None and _holds(piece)}
    by_rank = {rank: piece.local for rank, piece in held.items()}
    about = Assembled(by_rank=by_rank, without=without)
    if not held:
        return dataclasses.replace(about, fault="no rank holds it")
    placed: list[_Placed] = []
    try:
        for rank, value, piece in reduced(held):
            where = _locate_piece(rank, piece, value, tuple(shape), (slots or {}).get(rank))
            placed.append(_Placed(rank, value, where))
    except UsageError as error:
        return dataclasses.replace(about, fault=str(error))
    about = dataclasses.replace(about, where={one.rank: one.where for one in placed})
    return _write_pieces(about, placed, tuple(shape))


def _holds(piece: RankPiece) -> bool:
    """Whether the rank is on the mesh of the distributed tensor; others hold nothing of it."""
    return piece.placement is None or bool(piece.placement.coordinate)


def is_partial(piece: RankPiece) -> bool:
    """Whether it is a term of a value that is not reduced yet."""
    return piece.placement is not None and any(
        isinstance(role, Partial) for role in piece.placement.roles
    )


def reduced(held: dict[int, RankPiece]) -> list[tuple[int, Tensor, RankPiece]]:
    """Rank, value and piece of each, with partial values reduced over their axes."""
    groups: dict[tuple[object, ...], list[int]] = {}
    seen: dict[tuple[int, ...], int] = {}
    found: list[tuple[int, Tensor, RankPiece]] = []
    for rank, piece in held.items():
        place = piece.placement
        if place is None or not is_partial(piece):
            found.append((rank, piece.local, piece))
            continue
        # A submesh exists several times in a larger mesh: the n-th rank at a coordinate belongs to
        # the n-th of them.
        turn = seen.get(place.coordinate, 0)
        seen[place.coordinate] = turn + 1
        axes = zip(place.coordinate, place.roles, strict=True)
        kept = tuple(at for at, role in axes if not isinstance(role, Partial))
        groups.setdefault((turn, kept), []).append(rank)
    for ranks in groups.values():
        terms = [held[rank] for rank in ranks]
        roles = terms[0].placement.roles if terms[0].placement else ()
        operator = next(role.reduction for role in roles if isinstance(role, Partial))
        value = reduce_terms([one.local for one in terms], operator, accumulate="wide")
        found += [(rank, value, held[rank]) for rank in ranks]
    return sorted(found, key=lambda item: item[0])


def locate(rank: int, piece: RankPiece) -> Where:
    """Which part of the whole a rank's piece of a distributed tensor is.

    Raises:
        UsageError: the placement is unknown.
    """
    place, shape = piece.placement, piece.local.shape
    if place is None:
        return tuple(map(all_of, shape))
    return Placement.read(rank, place, shape).locate(rank, place, shape)


def _locate_piece(
    rank: int, piece: RankPiece, value: Tensor, shape: tuple[int, ...], slots: Slots | None
) -> Where:
    """Where in the whole a piece lies.

    Raises:
        UsageError: that is unknown.
    """
    holds = f"rank {rank} holds a"
    if piece.where is not None and tuple(map(length, piece.where)) == tuple(value.shape):
        return piece.where
    if piece.placement is not None:
        if piece.whole_shape != shape:
            raise UsageError(
                f"{holds} shard of a tensor of shape {list(piece.whole_shape)}, not {list(shape)}"
            )
        return locate(rank, piece)
    if slots is not None and slots.fits(value, shape):
        return slots.where
    if tuple(value.shape) == shape:
        return tuple(map(all_of, shape))
    which = f"which part of {list(shape)} it is cannot be known"
    raise UsageError(f"{holds} tensor of shape {list(value.shape)}, and {which}")


def _write_pieces(about: Assembled, placed: list[_Placed], shape: tuple[int, ...]) -> Assembled:
    whole = torch.zeros(shape, dtype=placed[0].value.dtype)
    owner = torch.full(shape, -1, dtype=torch.int32)
    disagreement: ReplicaDisagreement | None = None
    for one in placed:
        known, before = take(owner, one.where), take(whole, one.where)
        value = one.value.to(whole.dtype)
        if disagreement is None and bool((known >= 0).any()):
            disagreement = _find_disagreement(before, value, known, one.rank)
        fresh = known < 0
        put(whole, one.where, torch.where(fresh, value, before))
        put(owner, one.where, torch.where(fresh, one.rank, known))
    missing = int((owner < 0).sum())
    if missing:
        fault = f"{missing} of {owner.numel()} elements are on no rank"
        return dataclasses.replace(about, fault=fault, disagreement=disagreement)
    return dataclasses.replace(about, value=whole, disagreement=disagreement)


def _find_disagreement(
    known: Tensor, value: Tensor, owner: Tensor, rank: int
) -> ReplicaDisagreement | None:
    """How a rank's replica differs from the same elements of earlier ranks."""
    differ = ~same_bits(known, value) & (owner >= 0)
    elements = int(differ.sum())
    if not elements:
        return None
    other = int(owner[differ][0])
    shared = owner == other
    differ &= shared
    wide = torch.complex128 if value.is_complex() else torch.float64
    gap, size = (value.to(wide) - known.to(wide)).abs(), known.to(wide).abs()
    typical = torch.as_tensor(populations(real_view(known)).scale(size)).expand_as(size)
    worst = int(torch.where(gap == 0, 0.0, gap / typical)[differ].argmax())
    counts = int(differ.sum()), int(shared.sum())
    largest, usual = float(gap[differ][worst]), float(typical[differ][worst])
    return ReplicaDisagreement(rank, other, *counts, max_abs=largest, typical=usual)


# --- Everything that is compared in a training step -----------------------------------------------

LOSS, OUTPUT, GRADIENT, PARAMETER, BUFFER = "loss", "output", "gradient", "parameter", "buffer"
INITIAL, RETURNED = "initial", "returned"


@dataclasses.dataclass(frozen=True)
class StepItem:
    """One value that is compared.

    Attributes:
        item: what it is, within its step.
        kind: `loss`, `output`, `gradient`, `parameter`, `buffer` or `initial`; `returned` is the
            gradient that a piece of a model sends back to its input.
        name: of the parameter or buffer.
        reference: its value on one device; None if no gradient arrives.
        ranks: what the ranks hold.
    """

    item: Item
    kind: str
    name: str
    reference: Tensor | None
    ranks: Assembled

    @property
    def path(self) -> str:
        """The item in words."""
        return self.item.text


def reference_values(step: StepTrace) -> dict[Item, Tensor | None]:
    """Item -> value on one device."""
    return {item: None if piece is None else piece.local for item, _, _, piece in _list_step(step)}


def _list_step(step: StepTrace) -> list[tuple[Item, str, str, RankPiece | None]]:
    """Item, kind, name and piece of everything in a step, in the order of computation."""
    found: list[tuple[Item, str, str, RankPiece | None]] = []
    found += [(output(f"{OUTPUT}{p}"), OUTPUT, p, piece) for p, piece in step.outputs.items()]
    if step.loss is not None:
        found.append((Item(ItemKind.LOSS, LOSS), LOSS, "", step.loss))
    found += [(gradient(p), RETURNED, p, piece) for p, piece in step.returned.items()]
    for kind, known, pieces in (
        (GRADIENT, ItemKind.TRAINING_GRADIENT, step.gradients),
        (PARAMETER, ItemKind.PARAMETER, step.parameters),
        (BUFFER, ItemKind.BUFFER, step.buffers),
    ):
        found += [(Item(known, name), kind, name, piece) for name, piece in pieces.items()]
    return found


def _pieces_by_item(step: StepTrace) -> dict[Item, RankPiece | None]:
    """Item -> the piece of a rank; None for the gradient of a parameter that is frozen there."""
    frozen = {Item(ItemKind.TRAINING_GRADIENT, name): None for name in step.parameters}
    return {**frozen, **{item: piece for item, _, _, piece in _list_step(step)}}


def step_items(
    program: ParallelProgram,
    reference: StepTrace,
    ranks: list[Trace],
    number: int,
    slots: dict[str, dict[int, Slots]],
) -> list[StepItem]:
    """Everything to compare in one step; `number` counts from 0."""
    tables = {trace.rank: _pieces_by_item(trace.steps[number]) for trace in ranks}
    found: list[StepItem] = []
    for item, kind, name, piece in _list_step(reference):
        pieces = {rank: table[item] for rank, table in tables.items() if item in table}
        value = None if piece is None else piece.local
        if kind == LOSS:
            together = _average_scalar(program, pieces)
        elif kind in {OUTPUT, RETURNED}:
            together = _assemble_output(program, ranks, pieces, value)
        else:
            together = _assemble_state(pieces, value, slots.get(name))
        found.append(StepItem(item, kind, name, value, together))
    return found


def initial_items(
    reference: Trace, ranks: list[Trace], slots: dict[str, dict[int, Slots]]
) -> list[StepItem]:
    """The parameters and buffers before the first step."""
    found: list[StepItem] = []
    for name, piece in reference.initial.items():
        pieces: dict[int, RankPiece | None] = {
            trace.rank: trace.initial[name] for trace in ranks if name in trace.initial
        }
        together = _assemble_state(pieces, piece.local, slots.get(name))
        item = Item(ItemKind.INITIAL, name)
        found.append(StepItem(item, INITIAL, name, piece.local, together))
    return found


def unmatched(reference: Trace, ranks: list[Trace]) -> list[str]:
    """Names of parameters and buffers that the ranks have and the reference does not."""
    names = dict.fromkeys(name for trace in ranks for name in trace.initial)
    return [name for name in names if name not in reference.initial]


def broken_ties(reference: Trace, ranks: list[Trace]) -> list[tuple[str, ...]]:
    """Names of one parameter of the reference that are several parameters on a rank."""
    return [
        tied
        for tied in reference.tied
        if any(
            len(held := [name for name in tied if name in trace.initial]) > 1
            and not any(set(held) <= set(kept) for kept in trace.tied)
            for trace in ranks
        )
    ]


def _assemble_state(
    pieces: dict[int, RankPiece | None], value: Tensor | None, slots: dict[int, Slots] | None
) -> Assembled:
    """Assemble a parameter, its gradient or a buffer."""
    held = [piece for piece in pieces.values() if piece is not None]
    if value is None:
        if not held:
            return Assembled(without=tuple(pieces))
        return assemble(pieces, held[0].whole_shape, slots)
    if pieces and not held:
        return Assembled(value=torch.zeros_like(value), without=tuple(pieces))
    return assemble(_with_zeros(pieces, held[0] if held else None), value.shape, slots)


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
    slots: dict[int, Slots] = {}
    for rank, piece in pieces.items():
        if piece is None or piece.placement is not None or piece.local.dim() != len(shape):
            continue
        lengths = tuple(piece.local.shape)
        dims = [d for d in range(len(shape)) if lengths[d] != shape[d]]
        if len(dims) != 1 or not lengths[dims[0]] or shape[dims[0]] % lengths[dims[0]]:
            continue
        chunk = natural_chunk(program, rank, shape[dims[0]] // lengths[dims[0]])
        offset = [0] * len(shape)
        offset[dims[0]] = chunk * lengths[dims[0]]
        slots[rank] = Slots(box(offset, lengths), dims[0], chunk, chunk)
    return assemble(pieces, shape, slots)

"""Everything that is compared of a training step, by path: of the reference, and of the ranks."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import torch

from paritas.partition.plans.assembling import Assembled, assemble
from paritas.partition.plans.layouts import Slots, natural_chunk

if TYPE_CHECKING:
    from torch import Tensor

    from paritas.partition.plans.program import Program
    from paritas.partition.plans.traces import Piece, StepTrace, Trace

__all__ = ["Item", "initial_items", "items_of", "reference_values", "sample_rows", "unmatched"]

LOSS, OUTPUT, GRADIENT, PARAMETER, BUFFER = "loss", "output", "gradient", "parameter", "buffer"
INITIAL = "initial"


@dataclasses.dataclass(frozen=True)
class Item:
    """One thing that is compared.

    Attributes:
        path: within its step.
        kind: `loss`, `output`, `gradient`, `parameter`, `buffer` or `initial`.
        name: of the parameter or buffer.
        reference: its value on one device; None if no gradient arrives there.
        ranks: what the ranks hold.
    """

    path: str
    kind: str
    name: str
    reference: Tensor | None
    ranks: Assembled


def reference_values(step: StepTrace) -> dict[str, Tensor | None]:
    """Path -> value on one device."""
    return {path: None if piece is None else piece.local for path, _, _, piece in _listed(step)}


def _listed(step: StepTrace) -> list[tuple[str, str, str, Piece | None]]:
    """Path, kind, name and piece of everything in a step, in the order in which it comes about."""
    found: list[tuple[str, str, str, Piece | None]] = []
    found += [(_output_path(p), OUTPUT, p, piece) for p, piece in step.outputs.items()]
    if step.loss is not None:
        found.append((LOSS, LOSS, "", step.loss))
    found += [(f"{GRADIENT} {n}", GRADIENT, n, piece) for n, piece in step.gradients.items()]
    found += [
        (f"{PARAMETER} {n} after step", PARAMETER, n, piece) for n, piece in step.parameters.items()
    ]
    found += [(f"{BUFFER} {n}", BUFFER, n, piece) for n, piece in step.buffers.items()]
    return found


def _output_path(path: str) -> str:
    return path if path.startswith(OUTPUT) else f"{OUTPUT}{path}"


def items_of(
    program: Program,
    reference: StepTrace,
    ranks: list[Trace],
    number: int,
    slots: dict[str, dict[int, Slots]],
) -> list[Item]:
    """What there is to compare of one step; `number` counts from 0."""
    steps = {trace.rank: trace.steps[number] for trace in ranks}
    found: list[Item] = []
    for path, kind, name, piece in _listed(reference):
        pieces = {rank: held for rank, step in steps.items() for held in _held(step, kind, name)}
        value = None if piece is None else piece.local
        if kind == LOSS:
            together = _averaged(program, pieces)
        elif kind == OUTPUT:
            together = _output(program, ranks, pieces, value)
        else:
            together = _state(pieces, value, slots.get(name))
        found.append(Item(path, kind, name, value, together))
    return found


def initial_items(
    reference: Trace, ranks: list[Trace], slots: dict[str, dict[int, Slots]]
) -> list[Item]:
    """The parameters and buffers before the first step."""
    found: list[Item] = []
    for name, piece in reference.initial.items():
        pieces: dict[int, Piece | None] = {
            trace.rank: trace.initial[name] for trace in ranks if name in trace.initial
        }
        together = _state(pieces, piece.local, slots.get(name))
        found.append(Item(f"{INITIAL} {name}", INITIAL, name, piece.local, together))
    return found


def unmatched(reference: Trace, ranks: list[Trace]) -> list[str]:
    """Names of parameters and buffers that the ranks have and the reference does not."""
    names = dict.fromkeys(name for trace in ranks for name in trace.initial)
    return [name for name in names if name not in reference.initial]


def _held(step: StepTrace, kind: str, name: str) -> list[Piece | None]:
    """What a rank has of it: one piece, or none where it does not know the thing at all."""
    if kind == LOSS:
        return [step.loss] if step.loss is not None else []
    tables: dict[str, dict[str, Piece | None]] = {
        OUTPUT: dict(step.outputs),
        GRADIENT: step.gradients,
        PARAMETER: dict(step.parameters),
        BUFFER: dict(step.buffers),
    }
    table = tables[kind]
    if kind == GRADIENT and name not in table and name in step.parameters:
        return [None]  # frozen there
    return [table[name]] if name in table else []


def _state(
    pieces: dict[int, Piece | None], value: Tensor | None, slots: dict[int, Slots] | None
) -> Assembled:
    """A parameter, its gradient, a buffer."""
    held = [piece for piece in pieces.values() if piece is not None]
    if value is None:
        if not held:
            return Assembled(without=tuple(pieces))
        first = held[0]
        shape = first.global_shape if first.placements is not None else tuple(first.local.shape)
        return assemble(pieces, shape, slots)
    if pieces and not held:
        return Assembled(value=torch.zeros_like(value), without=tuple(pieces))
    return assemble(_with_zeros(pieces, held[0] if held else None), value.shape, slots)


def _with_zeros(pieces: dict[int, Piece | None], like: Piece | None) -> dict[int, Piece | None]:
    """Where no gradient arrives on a rank with a plain parameter, it is zero there."""
    if like is None or like.placements is not None:
        return pieces
    zero = dataclasses.replace(like, local=torch.zeros_like(like.local))
    return {rank: zero if piece is None else piece for rank, piece in pieces.items()}


# --- what depends on samples ----------------------------------------------------------------------


def _groups(
    program: Program, pieces: dict[int, Piece | None]
) -> dict[int, dict[int, Piece | None]]:
    """The part of the batch -> the ranks that have it."""
    groups: dict[int, dict[int, Piece | None]] = {}
    for rank, piece in pieces.items():
        groups.setdefault(program.data_rank(rank), {})[rank] = piece
    return dict(sorted(groups.items()))


def _averaged(program: Program, pieces: dict[int, Piece | None]) -> Assembled:
    """A scalar: the mean over the parts of the batch, equal on all ranks of one part."""
    parts = [assemble(group, ()) for group in _groups(program, pieces).values()]
    about = _common(parts)
    values = [part.value for part in parts if part.value is not None]
    if about.fault or not values:
        return about
    mean = torch.stack([value.double() for value in values]).mean().to(values[0].dtype)
    return dataclasses.replace(about, value=mean)


def _common(parts: list[Assembled]) -> Assembled:
    """What holds for several groups of ranks together, but for the value."""
    return Assembled(
        fault=next((part.fault for part in parts if part.fault), "" if parts else "no rank has it"),
        disagreement=next((p.disagreement for p in parts if p.disagreement is not None), None),
        by_rank={rank: value for part in parts for rank, value in part.by_rank.items()},
        without=tuple(rank for part in parts for rank in part.without),
    )


def _output(
    program: Program, ranks: list[Trace], pieces: dict[int, Piece | None], value: Tensor | None
) -> Assembled:
    if value is None:
        return Assembled(fault="the reference returns nothing there")
    if value.dim() == 0:
        return _averaged(program, pieces)
    shapes = {piece.global_shape for piece in pieces.values() if piece and piece.placements}
    shapes |= {tuple(p.local.shape) for p in pieces.values() if p and p.placements is None}
    if program.data_ranks == 1 or tuple(value.shape) in shapes:
        return _group_output(program, pieces, tuple(value.shape))
    samples = {trace.rank: trace.samples for trace in ranks}
    batch = max((s[1] for s in samples.values() if s is not None), default=0)
    parts: list[Assembled] = []
    for group in _groups(program, pieces).values():
        rows = sample_rows(samples[next(iter(group))], batch, value.shape[0])
        if rows is None:
            fault = f"its {value.shape[0]} rows are no multiple of the {batch} samples"
            return dataclasses.replace(_common(parts), fault=fault)
        parts.append(_group_output(program, group, (rows[1] - rows[0], *value.shape[1:])))
    about = _common(parts)
    values = [part.value for part in parts if part.value is not None]
    return about if about.fault else dataclasses.replace(about, value=torch.cat(values))


def sample_rows(samples: tuple[int, int] | None, batch: int, rows: int) -> tuple[int, int] | None:
    """Which rows of an output belong to some samples; None if that cannot be said."""
    if samples is None or not batch or rows % batch:
        return None
    return samples[0] * rows // batch, samples[1] * rows // batch


def _group_output(
    program: Program, pieces: dict[int, Piece | None], shape: tuple[int, ...]
) -> Assembled:
    """The output of ranks that have the same samples; plain parts lie in the order of ranks."""
    slots: dict[int, Slots] = {}
    for rank, piece in pieces.items():
        if piece is None or piece.placements is not None or piece.local.dim() != len(shape):
            continue
        lengths = tuple(piece.local.shape)
        dims = [d for d in range(len(shape)) if lengths[d] != shape[d]]
        if len(dims) != 1 or not lengths[dims[0]] or shape[dims[0]] % lengths[dims[0]]:
            continue
        length = lengths[dims[0]]
        chunk = natural_chunk(program, rank, shape[dims[0]] // length)
        where = [slice(0, n) for n in shape]
        where[dims[0]] = slice(chunk * length, (chunk + 1) * length)
        slots[rank] = Slots(tuple(where), dims[0], chunk, chunk)
    return assemble(pieces, shape, slots)

"""All pairs of two dumps, measured in batches by whatever workers there are."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import threading
from typing import TYPE_CHECKING

import msgspec
import torch

from paritas.comparison.executors import Failed, opened, run_batches
from paritas.comparison.judging import Measured, measure
from paritas.comparison.sides import described
from paritas.errors import ParitasError
from paritas.numerics.findings import Aspect, Status
from paritas.numerics.mismatch_maps import mismatch_detail

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from concurrent.futures import Executor

    from torch import Tensor

    from paritas.comparison.operands import Operand, Pair
    from paritas.dumps.records import Record
    from paritas.numerics.comparisons import Detail
    from paritas.numerics.diagnoses import Diagnosis
    from paritas.numerics.requirements import Requirement

__all__ = ["How", "Look", "Sources", "details", "measure_all"]

# A batch is worth being sent to a worker, and small enough that all of them have something to do.
_BATCH_PAIRS = 128
_BATCH_BYTES = 64 << 20
# To say what kind of wrong a value is takes many times its own memory, up to some 250 MiB: beyond
# so many elements that is done for one at a time, however many threads there are.
_ELEMENTS_SIDE_BY_SIDE = 1 << 17
_one_large = threading.Lock()


@dataclasses.dataclass(frozen=True)
class Sources:
    """Where the two dumps are, for workers that open them themselves."""

    my: str
    my_kind: str
    golden: str
    golden_kind: str


@dataclasses.dataclass(frozen=True)
class How:
    """How pairs are measured; `judging.measure` says what each means."""

    quick: bool = False
    trust_digests: bool = False


@dataclasses.dataclass(frozen=True)
class _Batch:
    sources: Sources
    pairs: tuple[Pair, ...]
    requirements: tuple[Requirement | None, ...]
    how: How = How()
    look: Look | None = None


@dataclasses.dataclass(frozen=True)
class Look:
    """A pair to look at closely.

    Attributes:
        fails: whether to ask what kind of wrong it is.
        operator: what made it.
        given: what that was given, on the golden side.
    """

    pair: Pair
    fails: bool = False
    operator: str = ""
    given: tuple[Operand, ...] = ()


def measure_all(
    executor: Executor,
    workers: int,
    sources: Sources,
    pairs: Sequence[Pair],
    requirement_for: Callable[[Pair], Requirement | None],
    how: How,
) -> Iterator[list[Measured]]:
    """Measure all pairs, batch by batch, in their order.

    A batch whose worker died is measured no further: its pairs are unverified, and say why.
    """
    batches = (
        dataclasses.replace(batch, how=how) for batch in _batches(sources, pairs, requirement_for)
    )
    for batch, result in run_batches(executor, _measure_batch, batches, ahead=2 * workers):
        if isinstance(result, Failed):
            yield [_lost(pair, batch.sources, result) for pair in batch.pairs]
        else:
            yield result


def details(
    executor: Executor, workers: int, sources: Sources, looks: Sequence[Look]
) -> Iterator[Detail | None]:
    """A closer look at each of a few pairs."""
    batches = (_Batch(sources, (look.pair,), (None,), look=look) for look in looks)
    for _, result in run_batches(executor, _detail_batch, batches, ahead=workers):
        yield None if isinstance(result, Failed) else result


def _batches(
    sources: Sources,
    pairs: Sequence[Pair],
    requirement_for: Callable[[Pair], Requirement | None],
) -> Iterator[_Batch]:
    waiting: list[Pair] = []
    size = 0
    for pair in pairs:
        waiting.append(pair)
        size += sum(_size(side) for side in (pair.my, pair.golden) if side is not None)
        if len(waiting) >= _BATCH_PAIRS or size >= _BATCH_BYTES:
            yield _Batch(sources, tuple(waiting), tuple(map(requirement_for, waiting)))
            waiting, size = [], 0
    if waiting:
        yield _Batch(sources, tuple(waiting), tuple(map(requirement_for, waiting)))


def _size(operand: Operand) -> int:
    """About how many bytes it has."""
    total = 0
    for record in operand.records():
        if record.tensor is not None:
            dtype = getattr(torch, record.tensor.dtype, torch.float32)
            total += math.prod(record.tensor.shape) * getattr(dtype, "itemsize", 4)
    return total


def _measure_batch(batch: _Batch) -> list[Measured]:
    """What a worker does, maybe in another process or on another machine."""
    my = opened(batch.sources.my, batch.sources.my_kind)
    golden = opened(batch.sources.golden, batch.sources.golden_kind)
    how = dataclasses.asdict(batch.how)
    return [
        measure(pair, my, golden, requirement, **how)
        for pair, requirement in zip(batch.pairs, batch.requirements, strict=True)
    ]


def _detail_batch(batch: _Batch) -> Detail | None:
    my = opened(batch.sources.my, batch.sources.my_kind)
    golden = opened(batch.sources.golden, batch.sources.golden_kind)
    (pair,) = batch.pairs
    if pair.my is None or pair.golden is None:
        return None
    try:
        reference, candidate = pair.golden.read(golden.view), pair.my.read(my.view)
        candidate = candidate.reshape(reference.shape)
        found = mismatch_detail(reference, candidate)
        if batch.look is None or not batch.look.fails:
            return found
        told = _diagnosis(batch.look, reference, candidate, golden.view)
        return msgspec.structs.replace(found, diagnosis=told)
    except (ParitasError, OSError, RuntimeError):  # the row says already what is wrong
        return None


def _diagnosis(
    look: Look, reference: Tensor, candidate: Tensor, read: Callable[[Record], Tensor]
) -> Diagnosis | None:
    """What kind of wrong it is; None where nothing can be said of it."""
    from paritas.diagnosis.cases import Context
    from paritas.diagnosis.diagnosing import MOST_ELEMENTS, diagnose

    is_large = reference.numel() > _ELEMENTS_SIDE_BY_SIDE
    try:
        with _one_large if is_large else contextlib.nullcontext():
            # Of a large tensor a part is looked at, to which no part of the inputs belongs.
            given = () if reference.numel() > MOST_ELEMENTS else look.given
            inputs = tuple(operand.read(read) for operand in given)
            context = Context(operator=look.operator, inputs=inputs)
            found = diagnose(candidate, reference, context=context)
    except Exception:  # noqa: BLE001  (an extra: the row stands without it)
        return None
    return found if found.where is not None or found.patterns else None


def _lost(pair: Pair, sources: Sources, failed: Failed[_Batch]) -> Measured:
    return Measured(
        status=Status.UNVERIFIED,
        settled=True,
        my=None if pair.my is None else described(pair.my, sources.my_kind),
        golden=None if pair.golden is None else described(pair.golden, sources.golden_kind),
        aspect=Aspect.HARNESS,
        reason=f"the worker that was to compare it failed: {failed.error}",
        advice="compare again with fewer workers, or with --executor threads",
    )

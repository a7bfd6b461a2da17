"""Right values that were read with other strides: a lane for all lanes, rows of another length."""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING

import torch

from paritas.core.diagnosis.case import Probe, axis_name, first_supported, near, supported_pattern
from paritas.core.results.findings import PatternKind

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from paritas.core.diagnosis.case import Case
    from paritas.core.results.findings import Pattern

# So many places are tried for the second element of an axis.
_MOST_PLACES = 3
_FEWEST = 8


def propose_lanes(case: Case) -> list[Pattern]:
    """`copy`: one lane for many."""
    if case.is_exact:
        # Of whole numbers, only a slice of several values for all: groups may be rounded numbers.
        # Of true and false, any slice is like many others.
        is_number = case.reference.dtype != torch.bool
        may_be = case.is_beyond_noise and is_number and len(torch.unique(case.given)) > 1
        return first_supported(_repeated_lanes(case, Probe(case), groups=False)) if may_be else []
    # One value everywhere is none that was copied.
    may_be = _is_readable(case) and len(torch.unique(case.given)) > 1
    return first_supported(_repeated_lanes(case, Probe(case))) if may_be else []


def propose_readings(case: Case) -> list[Pattern]:
    """`wrong index`: rows that are longer or shorter in memory.

    A shift or a transpose is one, too: only for what has no other name.
    """
    if not _is_readable(case):
        return []
    return first_supported(_other_strides(case, Probe(case)))


def _is_readable(case: Case) -> bool:
    if not case.is_beyond_noise or not case.shape or case.given.is_complex():
        return False
    return not case.is_exact and int(case.wrong.sum()) >= _FEWEST


def _repeated_lanes(case: Case, probe: Probe, *, groups: bool = True) -> Iterator[Pattern | None]:
    for axis, size in enumerate(case.shape):
        widths = [size, *(2**power for power in range(1, 11) if 2**power < size and groups)]
        index = torch.arange(size)
        for width, lane in itertools.product(widths if size > 1 else (), ("first", "last")):
            start = index // width * width
            source = start if lane == "first" else (start + width - 1).clamp(max=size - 1)
            if not probe.meets_map(axis, source):
                continue
            name = axis_name(case.context, axis, len(case.shape))
            group = "all" if width == size else f"each group of {width}"
            yield supported_pattern(
                case,
                case.right.index_select(axis, source),
                PatternKind.COPY,
                f"the {lane} value of {group} along {name} is used for the others",
                cost=math.log2(4 * len(widths) * len(case.shape)),
                noise=case.allowed.index_select(axis, source),
                evidence={"axis": axis},
            )


def _other_strides(case: Case, probe: Probe) -> Iterator[Pattern | None]:
    axes = [axis for axis, size in enumerate(case.shape) if size > 1]
    if len(axes) < 2:  # noqa: PLR2004
        return
    flat, allowed = case.right.reshape(-1), case.allowed.reshape(-1)
    own_strides = [math.prod(case.shape[axis + 1 :]) for axis in range(len(case.shape))]
    steps = [_steps_along(case, axis, flat, allowed) for axis in axes]
    for strides in itertools.product(*steps):
        if list(strides) == [own_strides[axis] for axis in axes]:
            continue
        taken = torch.zeros_like(probe.flat)
        for axis, step in zip(axes, strides, strict=True):
            taken = taken + probe.at[axis] * step
        if not bool((taken < len(flat)).all()) or not probe.meets(flat[taken], allowed[taken]):
            continue
        source = torch.zeros(case.shape, dtype=torch.long)
        for axis, step in zip(axes, strides, strict=True):
            shape = [1] * len(case.shape)
            shape[axis] = case.shape[axis]
            source = source + (torch.arange(case.shape[axis]) * step).reshape(shape)
        if int(source.max()) >= len(flat):
            continue
        right = tuple(own_strides[axis] for axis in axes)
        yield supported_pattern(
            case,
            flat[source],
            PatternKind.WRONG_INDEX,
            f"read with the strides {strides} instead of {right} along the axes {tuple(axes)}",
            cost=len(axes) * math.log2(len(flat)),
            noise=allowed[source],
            evidence={"strides": str(strides)},
        )


def _steps_along(case: Case, axis: int, flat: Tensor, allowed: Tensor) -> list[int]:
    """Where the second element along an axis may come from."""
    at = [0] * len(case.shape)
    at[axis] = 1
    value = case.given[tuple(at)]
    return near(value, flat, allowed).nonzero().reshape(-1)[:_MOST_PLACES].tolist()

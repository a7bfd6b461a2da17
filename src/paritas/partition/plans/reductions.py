"""What became of a sum over ranks: never taken, taken over some of them, or along another axis."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from paritas.numerics.diagnoses import Pattern
from paritas.partition.plans.relating import factor_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from paritas.partition.plans.cases import Case
    from paritas.partition.plans.relating import Near

__all__ = ["one_ranks_part", "some_ranks_only", "unreduced", "wrong_axis"]


def unreduced(case: Case, near: Near) -> Iterator[Pattern]:
    """The ranks' values are terms whose sum, or mean, is what each of them should hold."""
    held = list(case.held.values())
    if not _are_terms(case) or _all_same(held, near):
        return
    stacked = torch.stack([value.double() for value in held])
    expected = case.expected.double()
    noise = near.reach * float(stacked.abs().max())
    along = _axes(case, near)
    if near(stacked.sum(dim=0), expected, noise):
        yield Pattern(
            kind="missing reduction",
            confidence=0.95,
            sentence="the ranks' values add up to the reference: they were never reduced, an "
            f"all-reduce (sum){along} is missing",
            evidence={"collective": "all_reduce", "operator": "sum", "ranks": len(held)},
        )
    elif near(stacked.mean(dim=0), expected, noise):
        own = ": each rank has that of its own samples" if case.program.data_ranks > 1 else ""
        yield Pattern(
            kind="missing reduction",
            confidence=0.95,
            sentence=f"the ranks' values average to the reference{own}; an all-reduce "
            f"(mean){along} is missing",
            evidence={"collective": "all_reduce", "operator": "mean", "ranks": len(held)},
        )


def some_ranks_only(case: Case, near: Near) -> Iterator[Pattern]:
    """Ranks fall into groups that hold the same, and the groups' values add up."""
    if not _are_terms(case):
        return
    groups: list[list[int]] = []
    for rank, value in case.held.items():
        group = next((g for g in groups if near(value, case.held[g[0]])), None)
        if group is None:
            groups.append([rank])
        else:
            group.append(rank)
    if not 1 < len(groups) < len(case.held):
        return
    if any(factor_of(case.held[group[0]], case.expected, near) is not None for group in groups):
        return  # shares of the whole, not sums of some terms
    stacked = torch.stack([case.held[group[0]].double() for group in groups])
    noise = near.reach * float(stacked.abs().max())
    if not near(stacked.sum(dim=0), case.expected.double(), noise):
        return
    told = " and ".join(f"({_listed(group)})" for group in groups)
    yield Pattern(
        kind="missing reduction",
        confidence=0.9,
        sentence=f"ranks {told} each hold one sum, and these add up to the reference: the "
        "all-reduce went over these groups, not over all of the ranks",
        evidence={"collective": "all_reduce", "operator": "sum", "groups": told},
    )


def wrong_axis(case: Case, near: Near) -> Iterator[Pattern]:
    """Summed over ranks along another axis of the mesh than the one that has the terms."""
    wholes, mesh = case.wholes, case.program.mesh
    if len(wholes) != case.program.ranks or len(mesh) < 2:  # noqa: PLR2004
        return
    held = {rank: value.double() for rank, value in case.everywhere.items()}
    if held.keys() != wholes.keys():
        return
    if any(held[rank].shape != wholes[rank].shape for rank in wholes):
        return
    size = max(float(value.abs().max()) for value in held.values()) if case.expected.numel() else 0
    noise = near.reach * size
    for due in mesh:
        for taken in mesh:
            if taken == due or mesh[taken] < 2 or mesh[due] < 2:  # noqa: PLR2004
                continue
            # Each sum along the axis that was left out is one of what should be there, along the
            # axis over which ranks were added up.
            rows = [
                (
                    sum(held[one] for one in _line(case, rank, due)),
                    sum(wholes[one].double() for one in _line(case, rank, taken)),
                )
                for rank in wholes
            ]
            same = all(
                near(held[one], held[rank], noise)
                for rank in wholes
                for one in _line(case, rank, taken)
            )
            if same and all(near(_tensor(a), _tensor(b), noise) for a, b in rows):
                yield Pattern(
                    kind="wrong axis",
                    confidence=0.9,
                    sentence=f"summed over the ranks along {taken}, where the terms are those of "
                    f"the ranks along {due}: an all-reduce over the wrong axis of the mesh",
                    evidence={"collective": "all_reduce", "axis": taken, "due": due},
                )
                return


def one_ranks_part(case: Case, near: Near) -> Iterator[Pattern]:
    """One term in the place of the sum."""
    for rank, part in case.parts.items():
        if case.value is not None and near(case.value, part) and not near(part, case.expected):
            yield Pattern(
                kind="one rank's part",
                confidence=0.9,
                sentence=f"it is the term of rank {rank} alone: the terms of the others were "
                "never added, an all-reduce (sum) is missing or was a broadcast",
                evidence={"rank": rank},
            )
            return


def _are_terms(case: Case) -> bool:
    """Whether what ranks hold can be terms of what is expected, and is not that itself."""
    held = list(case.held.values())
    if len(held) < 2 or case.what in {"parameter", "buffer", "initial", "loss"}:  # noqa: PLR2004
        return False
    return all(value.shape == case.expected.shape for value in held)


def _all_same(held: list[Tensor], near: Near) -> bool:
    return all(near(value, held[0]) for value in held[1:])


def _line(case: Case, rank: int, axis: str) -> list[int]:
    """The ranks that are where a rank is, but for their place along one axis."""
    program = case.program
    place = list(program.mesh).index(axis)

    def rest(one: int) -> tuple[int, ...]:
        coordinate = program.coordinate(one)
        return coordinate[:place] + coordinate[place + 1 :]

    return [one for one in range(program.ranks) if rest(one) == rest(rank)]


def _tensor(value: Tensor | int) -> Tensor:
    return torch.as_tensor(value)


def _axes(case: Case, near: Near) -> str:
    """Over which ranks the terms are: along the axes on which they differ."""
    mesh = case.program.mesh
    if len(mesh) > 1 and len(case.held) == case.program.ranks:
        apart = [
            axis
            for axis in mesh
            if not all(
                near(case.held[one], value)
                for rank, value in case.held.items()
                for one in _line(case, rank, axis)
            )
        ]
        if 0 < len(apart) < len(mesh):
            return f" over the ranks along {' and '.join(apart)}"
    if len(case.held) == case.program.ranks:
        return f" over the {case.program.ranks} ranks"
    return f" over ranks {_listed(list(case.held))}"


def _listed(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers))

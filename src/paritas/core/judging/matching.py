"""Match the leaves of two results by their paths."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import torch

from paritas.core.numerics.contents import SEQUENCE
from paritas.core.results.findings import Aspect, Finding, mismatch
from paritas.core.results.wording import list_first

if TYPE_CHECKING:
    from collections.abc import Iterator

    from paritas.core.judging.pairs import Checks
    from paritas.core.numerics.flattening import Flat
    from paritas.core.results.items import Item

_MOST_NAMED = 5


@dataclasses.dataclass(frozen=True)
class Matching:
    """Pairs of leaves, and the leaves without a partner."""

    pairs: list[tuple[Item, Any, Any]]
    findings: list[Finding]
    unmatched: list[str]
    notes: list[str]


def match(reference: Flat, candidate: Flat, checks: Checks, like: Item) -> Matching:
    """Pair leaves by path; leaves that one side lacks, or has as another kind, are different.

    `like` is the item of the whole value. All paths begin with its name, and each leaf gets a copy
    of it with the leaf's path as name.
    """
    findings: list[Finding] = []
    notes: list[str] = []
    unlike: list[str] = []
    for path, words, is_grave in _find_unlike_kinds(reference, candidate, checks):
        if is_grave:
            unlike.append(path)
        if is_grave or checks.containers:
            kind = candidate.kinds.get(path)
            is_list = kind is not None and kind.family == SEQUENCE
            findings.append(
                mismatch(
                    like.named(path),
                    Aspect.STRUCTURE,
                    words,
                    _ORDER_ADVICE if is_grave and is_list else "",
                )
            )
        else:
            notes.append(words)
    left, right = (
        {path: leaf for path, leaf in side.leaves.items() if not _is_below(path, unlike)}
        for side in (reference, candidate)
    )
    findings += _find_unlike_names(left, right, checks, like)
    pairs = [(like.named(path), leaf, right[path]) for path, leaf in left.items() if path in right]
    unmatched = [f"{path} (reference only)" for path in left if path not in right]
    unmatched += [f"{path} (candidate only)" for path in right if path not in left]
    return Matching(pairs, findings, unmatched, notes)


_ORDER_ADVICE = (
    "if the candidate's compiler always returns lists, set match_by_order=True in VerifyConfig"
)


def _find_unlike_kinds(
    reference: Flat, candidate: Flat, checks: Checks
) -> Iterator[tuple[str, str, bool]]:
    """Where the kinds of the two sides differ: the path, the difference, whether it fails."""
    grave: list[str] = []
    for path in dict.fromkeys((*reference.kinds, *candidate.kinds)):
        left, right = reference.kinds.get(path), candidate.kinds.get(path)
        if left == right or _is_below(path, grave):
            continue
        words = f"{path} is {_kind_name(candidate, path)} instead of {_kind_name(reference, path)}"
        if left is not None and right is not None:
            is_grave = left.family != right.family
        else:
            present_side, other = (
                (reference, candidate) if right is None else (candidate, reference)
            )
            if path not in other.leaves:
                if not checks.size or any(_is_below(leaf, [path]) for leaf in present_side.leaves):
                    continue  # its leaves, or their number, are reported by their names
                words = f"{path} is {'missing' if right is None else 'new'}"
            stands_for = isinstance(other.leaves.get(path), torch.Tensor)
            is_grave = not (present_side.kinds[path].is_tensor and stands_for)
        if is_grave:
            grave.append(path)
        yield path, words, is_grave


def _find_unlike_names(
    left: dict[str, Any], right: dict[str, Any], checks: Checks, like: Item
) -> list[Finding]:
    """A finding about leaves that only one side has."""
    gone = [path for path in left if path not in right]
    new = [path for path in right if path not in left]
    if not gone and not new:
        return []
    if len(left) != len(right):
        reason = f"the reference returns {len(left)} values, the candidate {len(right)}"
        return [mismatch(like, Aspect.STRUCTURE, reason)] if checks.size else []
    reference_paths, ours = (list_first(paths, _MOST_NAMED) for paths in (gone, new))
    reason = f"the reference returns {reference_paths}, the candidate {ours}"
    return [mismatch(like, Aspect.STRUCTURE, reason)]


def _is_below(path: str, tops: list[str]) -> bool:
    return any(path == top or path.startswith((f"{top}.", f"{top}[")) for top in tops)


def _kind_name(side: Flat, path: str) -> str:
    if path in side.kinds:
        return side.kinds[path].name
    leaf = side.leaves.get(path)
    return "a dense tensor" if isinstance(leaf, torch.Tensor) else type(leaf).__name__

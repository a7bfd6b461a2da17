"""The smallest set of nodes that must be compiled together for a difference to appear."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from paritas._torch.graphs import ancestors, returned
from paritas._torch.selecting import ONLY_MARKED, compilable, with_compiled
from paritas.checking.locating.variants import run_variant, shows_it

if TYPE_CHECKING:
    from collections.abc import Callable

    from paritas.checking.guarding.lowered import Suspect

# Settings that turn one of Inductor's liberties off, with the liberty in words.
SWITCHES: tuple[tuple[dict[str, Any], str], ...] = (
    ({"layout_optimization": False}, "layout_optimization=False"),
    ({"max_fusion_size": 1}, "max_fusion_size=1"),
    ({"pattern_matcher": False}, "pattern_matcher=False"),
    ({"inplace_buffers": False}, "inplace_buffers=False"),
    ({"allow_buffer_reuse": False}, "allow_buffer_reuse=False"),
    ({"epilogue_fusion": False}, "epilogue_fusion=False"),
    ({"split_reductions": False}, "split_reductions=False"),
    ({"emulate_precision_casts": True}, "emulate_precision_casts=True"),
)


def remedies(suspect: Suspect) -> list[str]:
    """The compiler options each of which alone makes the difference go away."""
    found = []
    for options, text in SWITCHES:
        if set(options) - set(suspect.lowered.options):
            continue  # this torch has no such option
        if all(suspect.lowered.options[key] == value for key, value in options.items()):
            continue
        variant = run_variant(suspect, options=options)
        if variant.error is None and not shows_it(suspect, variant):
            found.append(text)
    return found


def smallest_set(suspect: Suspect, seconds: float) -> list[str]:
    """The nodes of a smallest compiled set that still shows the difference; none if none does.

    Removing any one of them hides it, unless the time ran out before that was known.
    """
    failed = {finding.path for finding in suspect.failures}
    outputs = returned(suspect.lowered.module)
    named = zip(suspect.runs.reference.outputs, outputs, strict=False)
    wrong = [node for name, node in named if f"{suspect.label}: {name}" in failed]
    before = ancestors(wrong) if wrong else None
    names = [
        name for name in compilable(suspect.lowered.module) if before is None or name in before
    ]

    def shows(kept: list[str]) -> bool:
        module = with_compiled(suspect.lowered.module, set(kept))
        return shows_it(suspect, run_variant(suspect, module, ONLY_MARKED))

    if not names or not shows(names):
        return []
    return minimise(names, shows, time.monotonic() + seconds)


def minimise(items: list[str], shows: Callable[[list[str]], bool], deadline: float) -> list[str]:
    """Delta debugging: drop ever smaller parts as long as `shows` stays true of the rest."""
    asked: dict[tuple[str, ...], bool] = {}

    def still(part: list[str]) -> bool:
        key = tuple(part)
        if key not in asked:
            asked[key] = bool(part) and shows(part)
        return asked[key]

    parts = 2
    while len(items) > 1 and time.monotonic() < deadline:
        size = max(1, -(-len(items) // parts))
        pieces = [items[start : start + size] for start in range(0, len(items), size)]
        smaller = _first_that_shows(items, pieces, still, deadline)
        if smaller is not None:
            parts = 2 if len(smaller) <= size else max(2, parts - 1)
            items = smaller
        elif size == 1:
            break
        else:
            parts = min(len(items), 2 * parts)
    return items


def _first_that_shows(
    items: list[str],
    pieces: list[list[str]],
    still: Callable[[list[str]], bool],
    deadline: float,
) -> list[str] | None:
    alone = pieces if len(pieces) == 2 else []  # noqa: PLR2004  (halves; smaller ones rarely do)
    rests = [[item for item in items if item not in piece] for piece in pieces]
    for part in (*alone, *rests):
        if time.monotonic() >= deadline:
            return None
        if len(part) < len(items) and still(part):
            return part
    return None

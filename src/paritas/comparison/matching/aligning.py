"""Which step of one dump belongs to which of the other."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from paritas.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Sequence

__all__ = ["align_steps", "check_steps", "span_text"]

_SPAN = r"(\d{1,9})(?:-(\d{1,9}))?"
_ASKED = re.compile(rf"{_SPAN}(?::{_SPAN})?")
_FORMS = "write 3, 0-4, or 1:0 and 1-3:0-2 for my steps against golden ones"
_MOST_STEPS = 1_000_000


def align_steps(
    my: Collection[int], golden: Collection[int], asked: Sequence[str] = ()
) -> tuple[dict[int, int], list[str]]:
    """Steps of mine, and the golden steps they belong to; and what should be known of that.

    Steps of the same number belong together. Where there is one step on each side, these do,
    whatever they are called: tools do not agree where to begin to count.

    Args:
        asked: what the user wants instead, `3`, `0-4`, `1:0` or `1-3:0-2`.

    Raises:
        UsageError: what was asked for cannot be read, or a dump has no such step.
    """
    if asked:
        return _as_asked(set(my), set(golden), asked), []
    common = sorted(set(my) & set(golden))
    mapping = {step: step for step in common}
    notes: list[str] = []
    if not common and len(set(my)) == len(set(golden)) == 1:
        ((mine,), (theirs,)) = set(my), set(golden)
        mapping = {mine: theirs}
        notes.append(f"my step {mine} is compared with golden step {theirs}: there is no other")
    elif not common and my and golden:
        notes.append(
            f"no step is in both dumps: mine has {span_text(my)}, the golden one "
            f"{span_text(golden)}; say which belong together, for example "
            f"{min(my)}:{min(golden)}"
        )
    else:
        for whose, extra in (
            ("mine", set(my) - set(golden)),
            ("the golden one", set(golden) - set(my)),
        ):
            if extra:
                advice = f"ask for {span_text(common)} to compare what both have"
                advice = advice if common else "the other one has none"
                notes.append(f"{_steps(extra)} in but one dump, {whose}; {advice}")
    return mapping, notes


def check_steps(asked: Iterable[str]) -> None:
    """See whether what was asked for can be read.

    Raises:
        UsageError: it cannot.
    """
    for text in asked:
        list(_pairs(text))


def span_text(steps: Collection[int]) -> str:
    """Steps in few words: `0-4, 7`."""
    spans: list[list[int]] = []
    for step in sorted(set(steps)):
        if spans and step == spans[-1][1] + 1:
            spans[-1][1] = step
        else:
            spans.append([step, step])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in spans)


def _steps(steps: Collection[int]) -> str:
    return f"steps {span_text(steps)} are" if len(steps) > 1 else f"step {span_text(steps)} is"


def _as_asked(my: set[int], golden: set[int], asked: Sequence[str]) -> dict[int, int]:
    mapping: dict[int, int] = {}
    for text in asked:
        for mine, theirs in _pairs(text):
            for whose, step, there in (("my", mine, my), ("the golden", theirs, golden)):
                if step not in there:
                    raise UsageError(
                        f"steps: {text!r} asks for step {step}, and {whose} dump has "
                        f"{span_text(there) or 'none'}"
                    )
            if mapping.setdefault(mine, theirs) != theirs:
                raise UsageError(
                    f"steps: {text!r} puts my step {mine} against golden step {theirs}, and "
                    f"another against {mapping[mine]}; give it once"
                )
    return mapping


def _pairs(text: str) -> Iterator[tuple[int, int]]:
    for part in re.split(r"[,|]", text):
        found = _ASKED.fullmatch(part.strip())
        if found is None:
            raise UsageError(f"steps: {part!r} cannot be read; {_FORMS}")
        mine = _span(found[1], found[2])
        theirs = mine if found[3] is None else _span(found[3], found[4])
        if not mine or len(mine) != len(theirs) or len(mine) > _MOST_STEPS:
            raise UsageError(
                f"steps: {part!r} has {len(mine)} steps of mine and {len(theirs)} golden ones; "
                f"give as many of each, and the lesser number first"
            )
        yield from zip(mine, theirs, strict=True)


def _span(first: str, last: str | None) -> range:
    return range(int(first), int(last or first) + 1)

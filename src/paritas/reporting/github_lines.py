"""Annotations as GitHub reads them out of the output of a step: `::error file=...::message`."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from paritas.reporting.annotations import Account, Annotation

__all__ = ["MOST", "github_lines"]

# Of one step, GitHub shows this many of each level and drops the rest without a word.
MOST = 10
_MOST_NAMED = 8


def github_lines(account: Account) -> str:
    """A line for each distinct failure and warning, the gravest first; nothing for a pass.

    Items of one source line that are wrong in the same way share an annotation, and where there
    are more than GitHub shows, the last one counts the rest.
    """
    groups: dict[tuple[str, ...], list[Annotation]] = {}
    for one in account.gravest_first:
        # By file and line; without one, by the words, of which the title has the item's name.
        key = (one.path, str(one.line)) if one.path else ("", one.message or one.title)
        groups.setdefault((one.level, one.rule, *key), []).append(one)
    lines = []
    for level in ("error", "warning"):
        found = [same for key, same in groups.items() if key[0] == level]
        shown, dropped = found[: MOST - 1], found[MOST - 1 :]
        if len(dropped) == 1:
            shown, dropped = found, []
        lines += [_line(same) for same in shown]
        if dropped:
            items = [one for same in dropped for one in same]
            named = _enumerated([one.title for one in items])
            rest = dataclasses.replace(
                items[0], title=f"{len(items)} more", message=named, path="", line=0
            )
            lines.append(_line([rest]))
    return "".join(f"{line}\n" for line in lines)


def _line(same: list[Annotation]) -> str:
    first, *others = same
    properties = {"file": first.path, "line": str(first.line)} if first.path else {}
    properties["title"] = f"paritas: {first.title}"
    message = first.message or first.title
    if others:
        message += f"\nlikewise: {_enumerated([one.item for one in others])}"
    given = ",".join(f"{name}={_property(value)}" for name, value in properties.items())
    return f"::{first.level} {given}::{_data(message)}"


def _enumerated(items: list[str]) -> str:
    more = f" and {len(items) - _MOST_NAMED} more" if len(items) > _MOST_NAMED else ""
    return f"{', '.join(items[:_MOST_NAMED])}{more}"


def _data(text: str) -> str:
    """A message, escaped: the percent sign first, which the others are escaped with."""
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    return _data(text).replace(":", "%3A").replace(",", "%2C")

"""The rules of an operator, drawn: which dimensions were split, how that ended, and which are not.

A rule is shown as it is written; the name of each dimension carries the status of its split.
"""

from __future__ import annotations

import dataclasses
import re
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from paritas.numerics.findings import Status
    from paritas.numerics.graph_reports import OperatorResult, OptionResult

__all__ = ["DrawnRule", "Overview", "Token", "drawn_rules", "overview"]

Kind = Literal["split", "whole", "text"]

# A name, or the star that stands for any number of dimensions.
_NAME = re.compile(r"[^\W\d]\w*\d*|\*")
_STAR = re.compile(r"\*\d+")


@dataclasses.dataclass(frozen=True)
class Token:
    """A piece of a rule.

    Attributes:
        kind: a dimension that was split, one that was not, or what stands between.
        status: the gravest of its splits.
        hint: these in words.
    """

    text: str
    kind: Kind = "text"
    status: Status | None = None
    hint: str = ""


@dataclasses.dataclass(frozen=True)
class DrawnRule:
    """A rule with what became of its dimensions.

    Attributes:
        loose: splits whose dimension cannot be found in the rule's text.
    """

    rule: str
    origins: tuple[str, ...]
    tokens: tuple[Token, ...]
    loose: tuple[Token, ...] = ()


@dataclasses.dataclass(frozen=True)
class Overview:
    """Operators of one name whose rules ended alike.

    Attributes:
        place: of the first of them among the operators of the report.
        calls: of all of them together.
        kinds: how many kinds of arguments there are.
    """

    operator: str
    place: int
    calls: int
    kinds: int
    rules: tuple[DrawnRule, ...]


def overview(operators: Iterable[OperatorResult]) -> list[Overview]:
    """Which dimensions of which operator can be split; those that are wrong first."""
    found: dict[tuple[str, tuple[DrawnRule, ...]], Overview] = {}
    for place, one in enumerate(operators):
        if not one.options:
            continue
        rules = drawn_rules(one.options)
        alike = (one.operator, rules)
        seen = found.get(alike, Overview(one.operator, place, 0, 0, rules))
        found[alike] = dataclasses.replace(
            seen, calls=seen.calls + len(one.sites), kinds=seen.kinds + 1
        )
    return sorted(found.values(), key=lambda row: -_gravity(row))


def _gravity(row: Overview) -> int:
    # What passes keeps the order of the graph.
    tokens = [token for rule in row.rules for token in (*rule.tokens, *rule.loose)]
    grave = [token.status.gravity for token in tokens if token.status and not token.status.passes()]
    return max(grave, default=0)


def drawn_rules(options: Iterable[OptionResult]) -> tuple[DrawnRule, ...]:
    """Each rule once, in the order in which they come."""
    by_rule: dict[str, list[OptionResult]] = {}
    for option in options:
        by_rule.setdefault(option.rule, []).append(option)
    return tuple(_drawn(rule, same) for rule, same in by_rule.items())


def _drawn(rule: str, options: list[OptionResult]) -> DrawnRule:
    splits: dict[str, list[OptionResult]] = {}
    for option in options:
        splits.setdefault(_name(option), []).append(option)
    tokens = tuple(_tokens(rule, splits))
    shown = {token.text for token in tokens if token.kind == "split"}
    loose = [_token(name, same) for name, same in splits.items() if name not in shown]
    origins = tuple(dict.fromkeys(option.origin for option in options))
    return DrawnRule(rule, origins, tokens, tuple(loose))


def _name(option: OptionResult) -> str:
    """The dimension's name: the last word of `split by k`; all dimensions of a star are one."""
    words = option.split.split()
    name = words[-1] if words else f"idx {option.idx}, dim {option.dim}"
    return "*" if _STAR.fullmatch(name) else name


def _tokens(rule: str, splits: dict[str, list[OptionResult]]) -> Iterator[Token]:
    """What stands behind a semicolon are arguments: of them only names that are split are shown."""
    end = 0
    dims = rule.partition(";")[0]
    for found in _NAME.finditer(rule):
        name = found.group()
        if found.start() > end:
            yield Token(rule[end : found.start()])
        if name in splits:
            yield _token(name, splits[name])
        elif found.start() < len(dims):
            yield Token(name, "whole", hint="not split")
        else:
            yield Token(name)
        end = found.end()
    if end < len(rule):
        yield Token(rule[end:])


def _token(name: str, options: list[OptionResult]) -> Token:
    hints = [
        f"{option.split} at idx {option.idx}, dim {option.dim}, {option.ranks} ranks: "
        f"{option.status.value}"
        for option in options
    ]
    worst = max((option.status for option in options), key=lambda status: status.gravity)
    return Token(name, "split", worst, "\n".join(hints))

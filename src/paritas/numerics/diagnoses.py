"""What kind of wrong a tensor is: data. `paritas.diagnosis` finds it out."""

from __future__ import annotations

import msgspec

__all__ = ["Diagnosis", "Pattern", "Region"]


class Region(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where in a tensor the wrong elements are.

    Attributes:
        kind: `slices`, `stride`, `tile tail`, `row`, `diagonal`, `above diagonal`, `border`,
            `nonfinite`, `scatter`, `everywhere` ...
        text: as one would index it, `[:, :, 127:, :]`, or in words where it cannot be indexed.
        elements: how many are wrong.
        share: of all elements.
        sentence: for people.
    """

    kind: str
    text: str
    elements: int
    share: float
    sentence: str = ""


class Pattern(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A way of being wrong that explains the numbers.

    Attributes:
        kind: `scale`, `offset`, `shift`, `missing reduction` ...
        confidence: 0 to 1, how often such a statement turned out to be right.
        sentence: what a person would write.
        evidence: the figures it rests on, by name.
    """

    kind: str
    confidence: float
    sentence: str
    evidence: dict[str, int | float | str] = {}


class Diagnosis(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where, and what; `patterns` is empty where none fits, best first otherwise."""

    where: Region | None = None
    patterns: tuple[Pattern, ...] = ()

    @property
    def best(self) -> Pattern | None:
        """The pattern that fits best."""
        return self.patterns[0] if self.patterns else None

    @property
    def sentence(self) -> str:
        """All in one line; empty if there is nothing to say."""
        parts = [self.best.sentence if self.best else "", self.where.sentence if self.where else ""]
        return "; ".join(part for part in parts if part)

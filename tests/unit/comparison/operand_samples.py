"""Operands of dumps that were never written, for the tests of matching."""

from __future__ import annotations

import itertools

from paritas.comparison.operands import Operand
from paritas.comparison.pairing import match
from paritas.comparison.rules import Rules, align_steps
from paritas.comparison.selections import RecordedSelection
from paritas.formats.files.records import Record, Site, TensorFacts

EVERYTHING = RecordedSelection()
_CONTENTS = itertools.count(1000)


def facts(shape):
    return TensorFacts(dtype="float32", shape=tuple(shape), stride=(1,) * len(shape))


class Side:
    """Collects the values of one dump, in the order of its program."""

    def __init__(self, source="eager", level="op", step=0, rank=0, graph=""):
        self.default = {"source": source, "level": level, "graph": graph}
        self.step, self.rank = step, rank
        self.operands = []

    def add(
        self,
        name,
        shape=(2, 3),
        *,
        value=None,
        step=None,
        rank=None,
        alias_of=None,
        content=None,
        **site,
    ):
        """A tensor, or a number if `value` is given; other words go to the site.

        What shares memory with another has its values, too; tensors of the same `content` are
        equal, and all others differ.
        """
        made = Site(name=name, **{**self.default, **site})
        if alias_of is not None:
            digest = self.operands[alias_of].record.digest
        else:
            digest = f"{next(_CONTENTS) if content is None else content:032x}"
        record = Record(
            sequence=len(self.operands),
            step=self.step if step is None else step,
            rank=self.rank if rank is None else rank,
            id=made.id,
            site=made,
            tensor=None if value is not None else facts(shape),
            value=value,
            alias_of=alias_of,
            digest=digest,
        )
        self.operands.append(Operand((record,)))
        return self


def found(my, golden, rules=None, asked=(EVERYTHING, EVERYTHING)):
    """Match two sides whose steps have the same numbers."""
    rules = rules or Rules()
    steps, _ = align_steps(
        {one.step for one in my.operands}, {one.step for one in golden.operands}, rules.steps
    )
    return match(my.operands, golden.operands, rules, steps, asked)


def told(matches):
    """The pairs: how each was found, my name and the golden name, without what all have."""
    return [(pair.matched_by, _short(pair.my), _short(pair.golden)) for pair in matches.pairs]


def _short(operand):
    return None if operand is None else operand.record.id.removeprefix("forward/")

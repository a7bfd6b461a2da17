"""Writing down what the checks of one test said: into its report, and onto pages."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import msgspec

from paritas.pytesting.outcomes import PROPERTY, outcome_of

if TYPE_CHECKING:
    import pytest

    from paritas.numerics.findings import Verdict
    from paritas.pytesting.options import Options
    from paritas.pytesting.outcomes import Kind, Outcome

__all__ = ["Recorder", "short_outcome"]


class Recorder:
    """Takes the verdicts of one test, in the order in which they are given."""

    def __init__(self, item: pytest.Item, options: Options) -> None:
        """`item` is the test."""
        self.item = item
        self.options = options

    def record(self, kind: Kind, verdict: Verdict, **facts: Any) -> Outcome:
        """Attach a verdict to the test's report; `facts` are further fields of the outcome."""
        number = sum(name == PROPERTY for name, _ in self.item.user_properties)
        title = self.item.nodeid
        outcome = short_outcome(kind, verdict, self.options, title, number, **facts)
        self.item.user_properties.append((PROPERTY, outcome.encode()))
        return outcome


def short_outcome(
    kind: Kind, verdict: Verdict, options: Options, title: str, number: int, **facts: Any
) -> Outcome:
    """A verdict in short, with a page of its own if it fails and pages were asked for.

    Args:
        title: what the page is about, the node id of the test.
        number: which verdict of the test it is, from 0.
        facts: further fields of the outcome.
    """
    outcome = msgspec.structs.replace(outcome_of(kind, verdict), **facts)
    if options.report is None or outcome.passed or not outcome.enabled:
        return outcome
    from paritas.pytesting.pages import write_page

    page = write_page(options.report, verdict, outcome, title, number)
    return msgspec.structs.replace(outcome, page=os.path.relpath(page, options.root))

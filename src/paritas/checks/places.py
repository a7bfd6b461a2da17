"""Where the difference between two programs starts: the question and its answer."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from paritas.checks.failures import FailedPair
    from paritas.execution.observation import RunConditions
    from paritas.execution.saved_state import RandomState
    from paritas.execution.subjects import Inputs, Subject, VerifyConfig
    from paritas.results.findings import Finding


@dataclasses.dataclass(frozen=True)
class FailedCall:
    """A call of two programs that gave different results, with all that is needed to repeat it.

    Attributes:
        inputs: the set of inputs that failed.
        rng: the state of the random generators before the call.
        conditions: the conditions of the native runs.
        failures: the findings that do not pass.
        deadline: when the search must have ended, by `time.monotonic`.
        tell: called with a few words before each step that may take long.
    """

    reference: Subject
    candidate: Subject
    inputs: Inputs
    rng: RandomState
    config: VerifyConfig
    conditions: RunConditions
    failures: tuple[Finding, ...]
    deadline: float
    tell: Callable[[str], None]


@dataclasses.dataclass(frozen=True)
class Place:
    """Where a difference starts, or why that is not known.

    Attributes:
        findings: one for each cause, with its origin; empty if no place was found.
        pair: the two programs at the first place, with its inputs, if they can be called alone.
        reason: why no place was found, in one sentence.
        command: the command that can find it, or "".
    """

    findings: tuple[Finding, ...] = ()
    pair: FailedPair | None = None
    reason: str = ""
    command: str = ""

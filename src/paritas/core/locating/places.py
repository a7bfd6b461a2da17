"""Where the difference between two programs starts: the question, its answer, and who answers."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from paritas.core.execution.evidence import Evidence
    from paritas.core.execution.observation import Observation, RunConditions
    from paritas.core.execution.saved_state import RandomState
    from paritas.core.execution.subject_runs import SubjectProgram
    from paritas.core.execution.subjects import Inputs, Subject, VerifyConfig
    from paritas.core.judging.failures import FailedPair
    from paritas.core.results.findings import Finding
    from paritas.core.time_limit import TimeLimit


# --- The question and its answer ------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class FailedCall:
    """A call of two programs that gave different results, with all that is needed to repeat it.

    Attributes:
        inputs: the set of inputs that failed.
        rng: the state of the random generators before the call.
        conditions: the conditions of the native runs.
        failures: the findings that do not pass.
        limit: the time for the search.
        tell: called with a few words before each step that may take long.
        compared: the evidence about the reference, and what both sides gave in their first call;
            None if that is not known.
        is_interrupted: Ctrl-C has come before the search: nothing more is found out.
    """

    reference: Subject
    candidate: Subject
    inputs: Inputs
    rng: RandomState
    config: VerifyConfig
    conditions: RunConditions
    failures: tuple[Finding, ...]
    limit: TimeLimit
    tell: Callable[[str], None]
    compared: tuple[Evidence[SubjectProgram], Observation, Observation] | None = None
    is_interrupted: bool = False


@dataclasses.dataclass(frozen=True)
class Place:
    """Where a difference starts, or why that is not known.

    Attributes:
        findings: one for each cause, with its origin; empty if no place was found.
        pair: the two programs at the first place, with its inputs, if they can be called alone.
        causes: path of a failure -> path of the finding in `findings` that it results from, or ""
            if none of them explains it. All other failures result from the first.
        reason: why no place was found for some of the failures, in one sentence.
        command: the command that can find it, or "".
        is_interrupted: Ctrl-C has ended the search.
    """

    findings: tuple[Finding, ...] = ()
    pair: FailedPair | None = None
    causes: Mapping[str, str] = dataclasses.field(default_factory=dict)
    reason: str = ""
    command: str = ""
    is_interrupted: bool = False


LONGER = "more time: --locate-seconds, or locate_seconds= in Python"

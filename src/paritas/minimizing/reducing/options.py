"""Which compiler option makes a failure go away: it says which part of the compiler to look at."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from paritas.checking.locating.isolating import SWITCHES

if TYPE_CHECKING:
    from paritas.minimizing.oracle import Oracle
    from paritas.minimizing.programs import Program

__all__ = ["decisive_options"]


def decisive_options(oracle: Oracle, program: Program) -> list[str]:
    """Inductor's options each of which alone makes it pass; other compilers are not asked.

    If it fails with all of them together, none is tried alone.
    """
    if oracle.candidate.backend != "inductor" or oracle.candidate.mode is not None:
        return []
    everything = {key: value for options, _ in SWITCHES for key, value in options.items()}
    if not _passes(oracle, program, everything):
        return []
    return [text for options, text in SWITCHES if _passes(oracle, program, options)]


def _passes(oracle: Oracle, program: Program, options: dict[str, Any]) -> bool:
    candidate = oracle.candidate
    changed = dataclasses.replace(candidate, options={**candidate.options, **options})
    answer = oracle.ask(program, changed)
    return answer.signature is None and answer.verdict is not None and answer.verdict.passed

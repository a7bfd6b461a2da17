"""How a sweep compares the ways of running a target."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paritas.core.candidates.target_check import TargetCheck

if TYPE_CHECKING:
    from collections.abc import Callable

    from paritas.core.candidates.loading import CandidateOptions
    from paritas.core.results.findings import Verdict


def check_target(
    target: str, options: CandidateOptions, on_progress: Callable[[str], None]
) -> Verdict:
    """Build a target, and check its invariants."""
    from paritas.core.candidates.makers import build_or_load
    from paritas.relations.checking import invariants

    on_progress(f"building {target}")
    model, inputs = build_or_load(target, options)
    return invariants(model, inputs, target=target, on_progress=on_progress).verdict


CHECK = TargetCheck(check_target, modules=())

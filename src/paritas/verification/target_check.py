"""How a sweep verifies a candidate for a target."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paritas.core.candidates.target_check import TargetCheck

if TYPE_CHECKING:
    from collections.abc import Callable

    from paritas.core.candidates.loading import CandidateOptions
    from paritas.core.results.findings import Verdict


def verify_target(
    target: str,
    options: CandidateOptions,
    on_progress: Callable[[str], None],
    *,
    gradients: bool | None = None,
) -> Verdict:
    """Build a target, make a candidate from it, and compare the two."""
    from paritas.core.candidates.makers import build_candidate, build_or_load
    from paritas.core.execution.subjects import VerifyConfig
    from paritas.verification.verify import verify

    on_progress(f"building {target}")
    model, inputs = build_or_load(target, options)
    on_progress(f"making the candidate {options.candidate_name}")
    candidate = build_candidate(model, inputs, options)
    config = VerifyConfig(
        verify_gradients=gradients,
        raise_on_mismatch=False,
        locate_seconds=0,  # it would take from the time limit of the run
    )
    return verify(inputs, model, candidate, config, on_progress=on_progress)


CHECK = TargetCheck(
    verify_target,
    modules=(
        "paritas.verification.verify",
        "paritas.core.candidates.makers",
        "paritas.core.diagnosis.diagnose",
    ),
)

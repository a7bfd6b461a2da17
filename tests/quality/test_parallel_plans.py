"""A model of Llama's kind under parallel plans: right ones are silent, planted faults are located.

Models, plans and faults: `parallel_models.py`, `parallel_plans.py`, `parallel_faults.py`. Weights
are drawn with seed 0, tokens with seed 1; one step. With PARITAS_WHOLE_CORPUS=1 all of it is
looked at, in two steps, in all dtypes, and each on real ranks as well.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest
import torch

from paritas.core.execution.subjects import Inputs
from paritas.core.results.findings import Status
from paritas.sharding.plans.verify import verify_parallel
from quality import parallel_faults, parallel_group_faults
from quality.parallel_models import Llama, Training, batches
from quality.parallel_plans import RIGHT, Case

if TYPE_CHECKING:
    from paritas.core.results.findings import Origin, Verdict
    from quality.parallel_faults import Fault

FAULTS = [*parallel_faults.FAULTS, *parallel_group_faults.FAULTS]
WHOLE = bool(os.environ.get("PARITAS_WHOLE_CORPUS"))
# A fault shows in the first step. Two steps of right plans are in integration/.
STEPS = 2 if WHOLE else 1
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}
# What a run of all tests has time for: each kind of plan once, on four ranks what is quick there.
# A vocabulary that is split is in test_titan_plans.py.
USUAL_PLANS = {
    ("sequence parallel, 2 ranks", "float32"),
    ("by hand, 4 ranks", "bfloat16"),
    ("by hand, tokens split, biased", "float32"),
    ("tensor parallel, a buffer that follows the data", "float32"),
}
# Those that everybody meets are planted in integration/, in a smaller model, in bfloat16 as well.
# A reduction along another axis of the mesh is in unit/parallel/test_pipelines.py.
USUAL_FAULTS = {
    "a dropped all-reduce, backward, in layers.1.mlp.up alone",
    "positions not shifted to the rank's tokens",
    "an exception on one rank",
}


def check(case: Case, dtype: torch.dtype, ranks: str = "simulated", steps: int = 2) -> Verdict:
    torch.manual_seed(0)
    model = (Training if case.own_loss else Llama)(case.sizes).to(dtype)
    return verify_parallel(
        model,
        case.plan,
        [Inputs([tokens]) for tokens in batches(case.sizes)[:steps]],
        case.mesh,
        loss=case.loss,
        optimizer=case.optimizer,
        split=case.split,
        ranks=ranks,
    )


def origin_of(verdict: Verdict) -> Origin | None:
    """Of the first failure that has one."""
    return next((f.origin for f in verdict.failures if f.origin is not None), None)


def patterns_of(verdict: Verdict) -> set[str]:
    """What is claimed about any of the failures, best first."""
    told = [f.diagnosis.best for f in verdict.failures if f.diagnosis is not None]
    return {pattern.kind for pattern in told if pattern is not None}


def assert_located(fault: Fault, verdict: Verdict) -> None:
    shown = str(verdict)
    assert not verdict.passed, shown
    origin = origin_of(verdict)
    if fault.modules:
        assert origin is not None, shown
        assert origin.name in fault.modules, f"{origin.name}, not {fault.modules}\n{shown}"
        assert not fault.ranks or origin.ranks == fault.ranks, f"{origin.ranks}\n{shown}"
    if fault.pattern:
        assert fault.pattern in patterns_of(verdict), f"{patterns_of(verdict)}\n{shown}"


PLANS = [
    pytest.param(case, DTYPES[name], id=f"{case}, {name}")
    for case in RIGHT
    for name in DTYPES
    if WHOLE or (case.name, name) in USUAL_PLANS
]
PLANTED = [fault for fault in FAULTS if WHOLE or fault.case.name in USUAL_FAULTS]
IN_BFLOAT16 = [fault for fault in FAULTS if fault.main and WHOLE]
REAL = [
    case
    for case in (*RIGHT, *(fault.case for fault in FAULTS))
    if WHOLE  # one of them is in integration/test_verify_parallel.py
]


def test_the_usual_names_are_names_of_the_corpus():
    plans = {case.name for case in RIGHT}
    faults = {fault.case.name for fault in FAULTS}
    assert {name for name, _ in USUAL_PLANS} <= plans
    assert faults >= USUAL_FAULTS
    assert len(faults) == len(FAULTS) >= 16


@pytest.mark.one_in(2)
@pytest.mark.slow
@pytest.mark.parametrize(("case", "dtype"), PLANS)
def test_a_right_plan_raises_no_alarm(case, dtype):
    verdict = check(case, dtype, steps=STEPS)
    assert verdict.passed, str(verdict)
    assert verdict.status in {Status.IDENTICAL, Status.EQUIVALENT}, str(verdict)
    assert verdict.coverage.compared > 0
    assert not verdict.coverage.unmatched


@pytest.mark.slow
@pytest.mark.parametrize("fault", PLANTED, ids=str)
def test_a_planted_fault_is_located_and_explained(fault):
    assert_located(fault, check(fault.case, torch.float32, steps=STEPS))


@pytest.mark.slow
@pytest.mark.parametrize("fault", IN_BFLOAT16, ids=str)
def test_so_is_one_in_bfloat16(fault):
    assert_located(fault, check(fault.case, torch.bfloat16, steps=STEPS))


@pytest.mark.slow
@pytest.mark.parametrize("case", REAL, ids=str)
def test_simulated_and_real_ranks_agree(case):
    simulated, real = (check(case, torch.float32, ranks) for ranks in ("simulated", "gloo"))
    assert simulated.status is real.status, f"{simulated}\n{real}"
    assert origin_of(simulated) == origin_of(real)
    assert patterns_of(simulated) == patterns_of(real)

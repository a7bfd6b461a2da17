"""A slice of the held-out half of benchmarks/detection: faults are caught, rewrites are not.

Programs, seeds and dtypes: below. All of it runs on a CPU; effects are measured in float64.
"""

import os
import sys
from pathlib import Path

import pytest
import torch

# The laboratory is no part of the package: it is found from the root of the repository.
sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.detection.cases import HALVES, Unit, units
from benchmarks.detection.measuring import BENIGN, MUTANT, Measuring, Outcome
from benchmarks.detection.rules import OURS, OURS_NATIVE, Rule, Values, judged, rules
from benchmarks.detection.summing import Cases, report

from diagnosing import without_diagnosis

WHOLE = bool(os.environ.get("PARITAS_WHOLE_CORPUS"))
SLICE = [
    Unit("perceptron", 1, "bfloat16", "cpu", 3, 1, 2),
    Unit("linear", 1, "float32", "cpu", 3, 1, 3),
    Unit("layer_norm", 1, "float32", "cpu", 3, 1, 3),
    *([Unit("softmax", 1, "float16", "cpu", 3, 1, 3)] if WHOLE else []),
]


@pytest.fixture(scope="module")
def outcomes():
    """What is caught, and where it starts; what kind of wrong it is, these tests do not ask."""
    with without_diagnosis():
        return [one for unit in SLICE for one in Measuring(unit).run()]


def test_every_clear_fault_is_caught(outcomes):
    clear = Cases(outcomes).band("clear")
    assert len(clear) >= 8, "the draw left too little to catch"
    missed = [str(one) for one in clear if not one.caught]
    assert not missed, missed


def test_no_benign_rewrite_is_refused(outcomes):
    benign = Cases(outcomes).benign
    assert sum(one.bits for one in benign) >= 4, "rewrites that change no bit prove nothing"
    for rule in (OURS, OURS_NATIVE):
        refused = [str(one) for one in benign if one.alarms[rule] is not False]
        assert not refused, refused


def test_the_first_wrong_node_of_clear_faults_is_named(outcomes):
    caught = [one for one in Cases(outcomes).to_locate if one.band == "clear"]
    elsewhere = [f"{one}; said: {one.said}" for one in caught if one.distance != 0]
    assert len(elsewhere) <= 0.1 * len(caught), elsewhere


def test_what_is_held_out_is_never_in_the_tuning_half():
    halves = {half: {(u.name, u.seed) for u in units(halves=[half])} for half in HALVES}
    assert not halves["tuning"] & halves["held out"]
    assert {unit.half for unit in units(halves=["held out"])} == {"held out"}


def test_a_rule_that_raises_has_neither_caught_nor_passed():
    def broken(_):
        raise ArithmeticError("no digits left")

    said = judged(Rule("broken", "", broken), None)
    assert said == "ArithmeticError: no digits left"
    answers = {OURS: said, OURS_NATIVE: False}
    one = Outcome(unit=SLICE[0], kind=BENIGN, change="x", node="y", alarms=answers)
    table = next(t for t in report([one]).tables if t.title.startswith("False alarms (1"))
    assert table.rows[0][-1] == said


def test_a_mutant_without_effect_is_no_case():
    one = Outcome(unit=SLICE[0], kind=MUTANT, change="x", node="y", band="none")
    cases = Cases([one])
    assert not cases.mutants
    assert cases.equivalent == [one]


# --- the rules of others --------------------------------------------------------------------------


def alarms(reference, candidate, arbiter=None, dtype="float32"):
    """Which of the others' rules alarm at one pair."""
    arbiter = reference.double() if arbiter is None else arbiter
    values = Values(None, None, dtype, [reference], [candidate], [arbiter])
    others = [rule for name, rule in rules().items() if name not in {OURS, OURS_NATIVE}]
    said = {rule.name: judged(rule, values) for rule in others}
    assert not [answer for answer in said.values() if isinstance(answer, str)], said
    return {name for name, alarm in said.items() if alarm}


def normal(seed=0):
    return torch.randn(32, 16, generator=torch.Generator().manual_seed(seed))


def test_all_rules_accept_equal_bits_and_refuse_noise():
    x = normal()
    assert alarms(x, x.clone()) == set()
    assert len(alarms(x, normal(seed=1))) == len(rules()) - 2


def test_a_scale_of_one_percent_is_seen_by_tolerances_and_not_by_angles():
    x = normal()
    seen = alarms(x, x * 1.01)
    assert {"assert_close", "allclose", "fixed_1e-3", "dynamo_same", "flash_attention"} <= seen
    assert not {"pcc_0.99", "cosine_0.999"} & seen


def test_nan_at_the_same_places_alarms_nobody():
    x = normal()
    x[3] = torch.nan
    assert alarms(x, x.clone()) == set()
    # Dynamo's own rule lets a NaN disappear where float64 has one too.
    assert len(alarms(x, x.nan_to_num(0.0)) | {"dynamo_same"}) == len(rules()) - 2


def test_another_dtype_is_seen_by_those_who_look():
    x = normal().bfloat16()
    seen = alarms(x, x.float(), dtype="bfloat16")
    assert {"assert_close", "allclose", "dynamo_same"} <= seen
    assert not {"pcc_0.99", "cosine_0.999", "fixed_1e-3", "flash_attention"} & seen


def test_twice_the_own_error_is_flash_attentions_limit():
    exact = normal().double()
    own = exact.bfloat16()
    rounded = own.float()
    apart = 2.0**-9 * rounded.abs().max()
    assert "flash_attention" not in alarms(own, own.clone(), exact, "bfloat16")
    assert "flash_attention" in alarms(own, (rounded + 16 * apart).bfloat16(), exact, "bfloat16")

"""What the check would have caught in a model: planted faults by size, and those it missed."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

import paritas
from paritas.core.errors import UsageError
from paritas.core.results.findings import Status
from paritas.mutants.planting import judge_mutant, plant, program_noise, sites
from paritas.mutants.programs import trace_program
from paritas.mutants.rewrites import rewritable, rewrite_call
from paritas.mutants.rows import FaultResult, Grade, PowerReport, Reordering, Share, power_lines
from paritas.mutants.scaling import SCALES, ScaledProgram, smallest_caught
from paritas.mutants.sites import Places, even_order, turns


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 4)

    def forward(self, x):
        return self.last(self.norm(torch.tanh(self.first(x))))


class Small(nn.Linear):
    def __init__(self):
        super().__init__(8, 4)

    def forward(self, x):
        return torch.tanh(super().forward(x))


def made(kind=Net, seed=0):
    torch.manual_seed(seed)
    return kind(), [torch.randn(6, 8)]


@pytest.fixture(scope="module")
def report():
    model, inputs = made()
    return paritas.power(inputs, model, faults=24, seconds=3600)


def fault(band="clear", status=Status.DIFFERENT, native=Status.DIFFERENT, **said):
    known = {"mutation": "dropped_addend", "text": "leaves it out", "node": "add", "operator": "a"}
    return FaultResult(
        relative=0.1, over_noise=9.0, band=band, status=status, native=native, **{**known, **said}
    )


# --- a model, from end to end ---------------------------------------------------------------------


def test_nearly_all_faults_above_the_noise_are_caught_forward_and_backward(report):
    clear = report.share("clear")
    assert clear.of >= 12
    assert clear.value >= 0.95
    assert {one.backward for one in report.judged} == {True, False}
    assert report.planned == len(report.faults) == 24
    assert report.stopped == ""


def test_kinds_of_faults_come_in_turn_and_modules_have_their_names(report):
    kinds = {one.mutation for one in report.faults}
    assert len(kinds) >= 10
    assert {one.near for one in report.faults} >= {"first", "norm", "last"}


def test_harmless_rewrites_raise_no_alarm(report):
    assert len(report.reorderings) >= 3
    assert report.false_alarms == ()


def test_the_lifted_run_sees_smaller_faults_than_the_native_one(report):
    lifted, native = report.smallest(), report.smallest(native=True)
    assert 0 < lifted < native < 1e-4


def test_the_same_seed_gives_the_same_report_and_another_seed_other_faults():
    model, inputs = made(Small)
    reports = [
        paritas.power(inputs, model, faults=2, seconds=3600, gradients=False, seed=seed)
        for seed in (3, 3, 4)
    ]
    first, again, other = (one.to_json().partition(b'"seconds"')[0] for one in reports)
    assert first == again
    assert first != other


def test_the_model_and_the_random_state_are_left_as_they_were():
    model, inputs = made(lambda: nn.Sequential(Small(), nn.BatchNorm1d(4), nn.Dropout(0.5)))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.get_rng_state()
    found = paritas.power(inputs, model, faults=2, seconds=3600)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert found.judged


def test_keyword_inputs_are_taken():
    model, (x,) = made(Small)
    given = paritas.Inputs(kwargs={"x": x})
    found = paritas.power(given, model, faults=3, seconds=3600, gradients=False)
    assert found.share("clear").of + len(found.silent) > 0
    assert "forward" not in vars(model)


def test_a_report_survives_json(report):
    assert PowerReport.from_json(report.to_json()) == report
    with pytest.raises(UsageError, match="cannot read a report of detection power"):
        PowerReport.from_json(b'{"nothing": 1}')


# --- ends -----------------------------------------------------------------------------------------


def test_when_the_time_is_over_what_was_found_is_reported_with_what_was_not_tried():
    model, inputs = made()
    found = paritas.power(inputs, model, faults=50, seconds=1e-6)
    assert found.stopped == "time"
    assert len(found.faults) < 50
    assert any("of 50 planned faults were not tried: the time ran out" in x for x in lines(found))
    assert found.exit_code() == 3


def test_an_interrupt_ends_the_search_with_a_report():
    model, inputs = made()
    told = []

    def tell(words):
        told.append(words)
        if words == "planting faults (2 of 50)":
            raise KeyboardInterrupt

    found = paritas.power(inputs, model, faults=50, seconds=3600, on_progress=tell)
    assert found.stopped == "interrupt"
    assert len(found.faults) == 2


def test_of_a_model_that_computes_nothing_nothing_is_said():
    found = paritas.power([torch.arange(3)], lambda x: x.view(3, 1))
    assert found.exit_code() == found.exit_code(0.0) == 3
    assert str(found).startswith("no result: ")


@pytest.mark.parametrize("wrong", [{"faults": 0}, {"seconds": 0}, {"seconds": math.nan}])
def test_a_count_or_time_of_nothing_is_refused(wrong):
    with pytest.raises(UsageError, match="must be above 0"):
        paritas.power([torch.ones(2)], torch.sin, **wrong)


# --- the parts ------------------------------------------------------------------------------------


def test_many_candidates_are_judged_as_verify_judges_each():
    model, inputs = made()
    program = trace_program(model, inputs, gradients=False)
    noise = program_noise(program)
    changed = [plant(program, site) for site in turns(sites(program), lambda s: s.mutation, 0)[:4]]
    changed += [ScaledProgram(program, name).scale_call(1e-6) for name in ("tanh", "addmm")]
    changed += [rewrite_call(program, "addmm_1")[1]]
    for lift in (True, False):
        config = paritas.VerifyConfig(
            raise_on_mismatch=False, verify_gradients=False, verify_second_call=False, lift=lift
        )
        for one in changed:
            whole = paritas.verify(program.fresh_inputs(), program.module, one, config)
            shared = judge_mutant(one, noise, lift=lift)
            assert [(f.path, f.status) for f in shared.findings] == [
                (f.path, f.status) for f in whole.findings
            ]


def test_every_harmless_rewrite_computes_the_same_function():
    def function(a, b, x, image, kernel):
        products = a @ b + torch.addmm(b, a, b) + torch.bmm(a[None], b[None])[0]
        ratio = products / (1 + b.square()) / 3 + torch.rsqrt(1 + a.square())
        return ratio.softmax(-1), x.sum((0, 2)), x.mean(1), torch.conv2d(image, kernel)

    torch.manual_seed(0)
    shapes = [(6, 6), (6, 6), (3, 4, 5), (2, 3, 7, 7), (4, 3, 3, 3)]
    given = [torch.randn(shape, dtype=torch.float64) for shape in shapes]
    program = trace_program(function, given)
    names = rewritable(program)
    assert len({str(program_node(program, name).target) for name in names}) == 9
    expected = program.module(*program.fresh_inputs())
    for name in names:
        found = rewrite_call(program, name)[1](*program.fresh_inputs())
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def test_a_transposed_convolution_is_summed_backwards_along_the_channels_that_it_sums():
    given = [torch.randn(2, 3, 5, 5).double(), torch.randn(3, 4, 3, 3).double()]
    program = trace_program(torch.conv_transpose2d, given)
    (name,) = rewritable(program)
    found = rewrite_call(program, name)[1](*program.fresh_inputs())
    expected = program.module(*program.fresh_inputs())
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def program_node(program, name):
    return next(node for node in program.calls if node.name == name)


def test_the_smallest_caught_delta_is_found_by_halving():
    assert smallest_caught(lambda delta: delta > 2e-6)[0] == pytest.approx(10**-5.5)
    assert smallest_caught(lambda delta: True)[0] == pytest.approx(1e-15)
    assert smallest_caught(lambda delta: delta == SCALES[0])[0] == SCALES[0]
    assert smallest_caught(lambda delta: True, 1e-6)[0] == pytest.approx(1e-6)
    assert smallest_caught(lambda delta: False) == (None, 1)


def test_the_first_few_of_an_even_order_are_spread_over_the_whole():
    order = even_order(100, 0.3)
    assert sorted(order) == list(range(100))
    assert {place // 25 for place in order[:6]} == {0, 1, 2, 3}
    assert even_order(0, 0.3) == []


def test_a_node_without_dependent_results_is_dead():
    def function(x):
        torch.cos(x)
        return torch.sin(x)

    program = trace_program(function, [torch.ones(3)])
    places = Places(program, function)
    assert places.is_dead("cos")
    assert not places.is_dead("sin")
    assert "cos" not in places.scalable()
    assert "sin" in places.scalable()


# --- figures and words ----------------------------------------------------------------------------


def test_a_share_is_shown_with_its_lower_bound():
    assert Share(caught=47, of=47).least == pytest.approx(0.9244, abs=1e-4)
    assert Share(caught=8, of=10).least == pytest.approx(0.4902, abs=1e-4)
    assert Share(caught=0, of=10).least == pytest.approx(0, abs=1e-12)
    assert math.isnan(Share(caught=0, of=0).value)
    assert Share(caught=0, of=0).least == 0


def test_the_smallest_fault_holds_at_nine_of_ten_places_or_is_not_named():
    grades = [Grade(node=f"n{i}", operator="", lifted=10.0**-i, native=None) for i in range(1, 11)]
    many = PowerReport(grades=tuple(grades))
    assert many.smallest() == pytest.approx(1e-2)
    assert many.smallest(native=True) is None
    assert PowerReport().smallest() is None
    assert "native run alone: at 10 of 10 places even 10 % is missed" in "\n".join(lines(many))


def test_too_few_caught_fails_only_if_requested_and_none_caught_never_passes():
    missed = PowerReport(faults=(fault(), fault(status=Status.EQUIVALENT)))
    assert missed.exit_code() == 0
    assert missed.exit_code(0.5) == 0
    assert missed.exit_code(0.6) == 1
    assert PowerReport().exit_code() == 3
    assert PowerReport(faults=(fault(band="faint"),)).exit_code(0.1) == 3
    assert PowerReport(faults=(fault(status=Status.UNVERIFIED),)).exit_code() == 3


def test_what_could_not_be_compared_is_neither_caught_nor_missed():
    found = PowerReport(faults=(fault(), fault(status=Status.UNVERIFIED)), planned=2)
    assert found.share("clear") == Share(caught=1, of=1)
    assert any("1 fault could not be compared" in line for line in lines(found))


def test_unseen_faults_are_grouped_by_kind_and_reason_with_the_largest_shown():
    unseen = {"status": Status.EQUIVALENT, "reason": "it is small", "near": "head"}
    found = PowerReport(
        faults=(
            fault(**unseen),
            msgspec_larger(fault(**unseen)),
            fault(mutation="zero_row"),
            fault(band="faint", **unseen),
        ),
        planned=4,
    )
    (spot,) = found.blind_spots()
    assert [one.over_noise for one in spot.faults] == [20.0, 9.0]
    assert spot.tried == 3
    told = "\n".join(lines(found))
    assert "dropped_addend (leaves it out): 2 of 3; it is small" in told
    assert "such as add (a, forward) near head, 20 times the noise" in told
    assert found.headline == (
        "1 of 3 faults above 8 times the rounding noise are caught (at least 6.1 % with 95 % "
        "confidence), 100 % by the native run alone"
    )


def msgspec_larger(one):
    return FaultResult(
        **{name: getattr(one, name) for name in one.__struct_fields__} | {"over_noise": 20.0}
    )


def test_a_false_alarm_is_reported_with_its_place():
    alarm = Reordering(rewrite="summed in reverse order", node="mm", status=Status.DEGRADED)
    told = "\n".join(lines(PowerReport(faults=(fault(),), planned=1, reorderings=(alarm,))))
    assert "false alarms: 1 of 1 harmless rewrite\n" in told
    assert "summed in reverse order at mm: degraded" in told


def lines(found):
    return power_lines(found)

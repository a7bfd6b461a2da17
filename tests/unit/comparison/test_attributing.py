"""What came in is told from what was added."""

from __future__ import annotations

import dataclasses

import msgspec
import pytest
import torch

from paritas.comparison.judgement import Measured, noise_of, score
from paritas.comparison.replay import Replayed
from paritas.comparison.rows import SideFacts
from paritas.comparison.table import Draft, resolve
from paritas.core.numerics.automatic import Judgement
from paritas.core.numerics.pair_figures import pair_figures
from paritas.core.results.findings import Status

GOLDEN = torch.linspace(-1, 1, 64)


def measured(error):
    """Two values that are `error` of their norm apart."""
    mine = GOLDEN * (1 + error)
    figures = pair_figures(GOLDEN, mine)
    if figures.identical:
        status, found = Status.IDENTICAL, None
    else:
        found = score(GOLDEN, mine, figures, noise_of(GOLDEN, mine)[0])
        status = Status.EQUIVALENT if found.passed else Status.DIFFERENT
    return Measured(
        step=0,
        name="value",
        status=status,
        settled=status is Status.IDENTICAL,
        my=SideFacts(),
        golden=SideFacts(),
        reason="" if status.passes() else "it is over its limit",
        figures=figures,
        score=found,
        distance=error,
    )


def call(name, error, *sources, **rest):
    return Draft(name, measured(error), is_result=True, sources=sources, **rest)


def given(name, error, *sources):
    return Draft(name, measured(error), is_result=False, sources=sources)


def replayed(status, own=0.0, inherited=0.0):
    return Replayed(
        own=own, inherited=inherited, judgement=Judgement(status=status), golden_ok=True, words=""
    )


def ends(drafts, replays=None):
    return [(one.status, one.made) for one in resolve(drafts, replays or {})]


def test_a_call_that_adds_an_error_to_right_inputs_made_it():
    drafts = [call("a", 0.0), call("b", 0.01, 0), call("c", 0.011, 1)]
    assert ends(drafts) == [
        (Status.IDENTICAL, ""),
        (Status.DIFFERENT, "here"),
        (Status.DIFFERENT, "before"),
    ]


def test_rounding_that_grows_slowly_is_no_fault_of_any_call():
    drafts = [call("a", 5e-7)]
    drafts += [call(f"b{n}", 5e-7 * 2**n, n - 1) for n in range(1, 8)]
    assert {status for status, _ in ends(drafts)} == {Status.EQUIVALENT}
    assert measured(5e-7 * 2**7).status is Status.DIFFERENT  # by itself it would be one


def test_rounding_that_has_grown_to_a_tenth_of_the_value_is_unstable():
    drafts = [call("a", 5e-7)]
    drafts += [call(f"b{n}", 5e-7 * 4**n, n - 1) for n in range(1, 11)]
    assert ends(drafts)[-1] == (Status.UNSTABLE, "")


def test_a_jump_among_drifting_values_is_seen():
    drafts = [call("a", 5e-7), call("b", 1e-6, 0), call("c", 4e-4, 1)]
    assert ends(drafts)[-1] == (Status.DIFFERENT, "here")


def test_an_operator_run_again_decides_over_the_estimate():
    drafts = [call("a", 5e-7), call("b", 4e-4, 0)]
    (_, end) = resolve(drafts, {1: replayed(Status.EQUIVALENT, 1e-7, 4e-4)})
    assert (end.status, end.made, end.attributed) == (Status.EQUIVALENT, "", "replayed")
    assert (end.own, end.inherited) == (1e-7, 4e-4)


def test_a_fault_below_the_noise_of_the_dtype_is_found_by_running_the_operator_again():
    drafts = [call("a", 0.0), call("b", 1e-6, 0)]
    assert ends(drafts)[1] == (Status.EQUIVALENT, "")
    assert ends(drafts, {1: replayed(Status.DIFFERENT)})[1] == (Status.DIFFERENT, "here")


def test_a_golden_value_that_is_itself_wrong_is_a_difference_that_was_made_here():
    wrong = dataclasses.replace(replayed(Status.EQUIVALENT, 1e-8, 1e-7), golden_ok=False)
    drafts = [call("a", 0.0), call("b", 0.01, 0)]
    found = resolve(drafts, {1: wrong})[1]
    assert (found.status, found.made) == (Status.DIFFERENT, "here")
    assert found.reason.startswith("rerunning the operator on the golden inputs does not reproduce")


def test_what_became_of_an_argument_that_nothing_was_compared_with_is_not_known():
    alone = msgspec.structs.replace(measured(0.5), status=Status.UNVERIFIED, settled=True)
    drafts = [Draft("a", alone, is_result=True), given("b/input", 0.01, 0)]
    assert ends(drafts)[1] == (Status.DIFFERENT, "")


def test_an_error_that_came_in_uncompared_is_not_excused():
    alone = msgspec.structs.replace(measured(0.5), status=Status.UNVERIFIED, settled=True)
    right = {1: replayed(Status.EQUIVALENT, 1e-8, 0.01)}
    drafts = [Draft("a", alone, is_result=True), call("b", 0.01, 0)]
    found = resolve(drafts, right)[1]
    assert (found.status, found.made) == (Status.DIFFERENT, "")
    assert found.reason.endswith("inputs that were not compared")
    assert ends([call("a", 0.0), call("b", 0.01)], right)[1] == (Status.DIFFERENT, "")
    assert ends(drafts)[1] == (Status.DIFFERENT, "")


def test_an_operator_that_is_right_on_wrong_inputs_passes_the_error_on():
    drafts = [call("a", 0.0), call("b", 0.01, 0), call("c", 0.5, 1)]
    found = resolve(drafts, {2: replayed(Status.EQUIVALENT, 1e-8, 0.5)})
    assert (found[2].status, found[2].made) == (Status.DIFFERENT, "before")
    assert found[2].reason.endswith("inherited from b")


def test_an_argument_ends_as_the_value_that_it_is():
    drafts = [call("a", 5e-7), call("b", 1e-4, 0), given("c/input", 1e-4, 1)]
    replays = {1: replayed(Status.EQUIVALENT, 1e-8, 1e-4)}
    assert ends(drafts, replays)[2] == (Status.EQUIVALENT, "")
    assert ends(drafts)[2] == (Status.DIFFERENT, "before")


def test_rows_are_seen_after_their_sources_whatever_the_order_of_the_table():
    drafts = [given("c/input", 1e-4, 2), call("a", 5e-7), call("b", 1e-4, 1)]
    replays = {2: replayed(Status.EQUIVALENT, 1e-8, 1e-4)}
    assert {status for status, _ in ends(drafts, replays)} == {Status.EQUIVALENT}


def test_rows_that_go_in_a_ring_are_resolved_all_the_same():
    drafts = [given("a", 0.01, 1), given("b", 0.01, 0)]
    assert [status for status, _ in ends(drafts)] == [Status.DIFFERENT] * 2


def test_an_argument_that_is_not_what_was_made_was_changed_on_the_way():
    drafts = [call("a", 0.0), given("b/input", 0.01, 0)]
    found = resolve(drafts, {})[1]
    assert (found.status, found.made) == (Status.DIFFERENT, "here")
    assert "changed since then" in found.reason


def test_without_inputs_the_call_before_it_is_what_may_have_come_in():
    drafts = [call("a", 5e-7), call("b", 1.5e-6, neighbour=0), call("c", 0.01, neighbour=1)]
    assert ends(drafts)[1:] == [(Status.EQUIVALENT, ""), (Status.DIFFERENT, "")]


def test_exact_values_that_drifting_inputs_decide_are_unstable_if_the_operator_is_right():
    ids = torch.arange(64)
    exact = msgspec.structs.replace(
        measured(1e-4), figures=pair_figures(ids, ids.flip(0)), score=None, distance=1.4
    )
    drafts = [call("a", 5e-7), Draft("argmax", exact, is_result=True, sources=(0,))]
    assert ends(drafts)[1] == (Status.DIFFERENT, "here")
    assert ends(drafts, {1: replayed(Status.IDENTICAL)})[1] == (Status.UNSTABLE, "")


@pytest.mark.parametrize("status", [Status.UNVERIFIED, Status.IDENTICAL])
def test_what_is_settled_stays(status):
    settled = msgspec.structs.replace(measured(0.5), status=status, settled=True)
    assert ends([Draft("a", settled, is_result=True)]) == [(status, "")]

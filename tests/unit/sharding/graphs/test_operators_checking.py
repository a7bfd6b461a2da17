"""The check of one call of a graph, with every outcome."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from paritas.core.results.findings import Status
from paritas.sharding.graphs.calls import CallValues, GraphCall, GraphSettings, TensorValue
from paritas.sharding.graphs.checking import check_call
from paritas.sharding.graphs.rows import CallOutcome

X = TensorValue("x", (4, 8), torch.float32)
W = TensorValue("w", (8, 8), torch.float32)
LINEAR = GraphCall(
    7, "linear_1", "torch.nn.functional.linear", args=(X, W), source="model.py:30", module="mlp.up"
)


def test_idle_calls_and_obstacles_keep_their_reasons():
    idle = check_call(dataclasses.replace(LINEAR, idle="unpacks a tuple"), GraphSettings())
    assert (idle.outcome, idle.reason) == (CallOutcome.NOTHING, "unpacks a tuple")
    blocked = check_call(dataclasses.replace(LINEAR, obstacle="a sparse tensor"), GraphSettings())
    assert (blocked.outcome, blocked.reason) == (CallOutcome.UNSUPPORTED, "a sparse tensor")


def test_a_right_call_is_verified_with_losses_and_gradients():
    result = check_call(LINEAR, GraphSettings(seed=0, ranks=(2, 4)))
    assert result.outcome is CallOutcome.VERIFIED
    assert result.reason == ""
    site = result.sites[0]
    assert (site.position, site.node, site.source, site.module) == (
        7,
        "linear_1",
        "model.py:30",
        "mlp.up",
    )
    assert [(one.split, one.ranks, one.idx, one.dim) for one in result.options] == [
        ("split by m0", 2, 0, 0),
        ("split by k", 2, 0, 1),
        ("split by n", 2, 1, 0),
        ("split by m0", 4, 0, 0),
        ("split by k", 4, 0, 1),
        ("split by n", 4, 1, 0),
    ]
    for one in result.options:
        assert one.origin == "library"
        assert one.loss_whole == pytest.approx(one.loss_split, rel=1e-5)
        assert one.gradients == "2 equal"


def test_a_wrong_claim_says_by_what_a_gradient_is_wrong():
    call = dataclasses.replace(LINEAR, annotation="a k^, n k^ : /a -> a n")
    result = check_call(call, GraphSettings(seed=0))
    assert result.outcome is CallOutcome.FAILED
    wrong = result.failures[0]
    assert wrong.split == "split by a"
    assert wrong.gradients.startswith("1 equal; gradient of args[1]: different")
    assert wrong.reason.startswith("gradient of args[1]: ")
    assert wrong.loss_whole == pytest.approx(wrong.loss_split)


def test_a_doubled_bias_shows_in_the_loss():
    bias = TensorValue("b", (8,), torch.float32)
    call = dataclasses.replace(LINEAR, args=(X, W, bias), annotation="a k+, n k+, n -> a n")
    wrong = check_call(call, GraphSettings(seed=0)).failures[0]
    assert wrong.loss_whole != pytest.approx(wrong.loss_split)
    assert "gradient of args[2]: different, 2x" in wrong.gradients


@pytest.mark.parametrize(
    ("annotation", "reason"),
    [
        ("a b k, n k -> a b n", "argument 0 has 2 dimensions"),
        ("a k, k -> a k", "argument 1 has 2 dimensions"),
        ("a k -> (", "annotation"),
    ],
)
def test_a_claim_that_does_not_fit_is_a_failure_of_the_graph(annotation, reason):
    result = check_call(dataclasses.replace(LINEAR, annotation=annotation), GraphSettings())
    assert result.outcome is CallOutcome.FAILED
    assert reason in result.reason
    assert result.options[0].status is Status.DIFFERENT
    assert result.options[0].rule == annotation


def test_sources_of_options():
    call = dataclasses.replace(LINEAR, annotation="a k^, n k^ -> a n")

    def origins(options):
        return [one.origin for one in check_call(call, GraphSettings(options=options)).options]

    assert origins(None) == ["declared", "declared"]
    assert origins("declared") == ["declared", "declared"]
    assert origins("library") == ["library"] * 3
    assert set(origins("discover")) == {"discovered"}
    # Splits that two sources have are checked once, and belong to the first.
    assert origins("all") == ["declared", "declared", "library"]


def test_without_a_rule_there_is_nothing_to_check_and_the_reason_says_what_to_do():
    call = GraphCall(0, "n", "my.op", args=(X,), function=lambda x: x * 2)
    result = check_call(call, GraphSettings())
    assert result.outcome is CallOutcome.NOTHING
    assert result.reason == (
        "the library has no rule for this call of my.op; try --options discover"
    )
    assert check_call(call, GraphSettings(options="discover")).outcome is CallOutcome.VERIFIED


def test_a_dimension_that_is_too_short_is_left_out_and_reported():
    result = check_call(LINEAR, GraphSettings(ranks=(8,)))
    assert result.outcome is CallOutcome.VERIFIED
    assert "left out: m0 has length 4, too short for 8 ranks" in result.notes
    short = TensorValue("x", (1, 1), torch.float32)
    none = check_call(GraphCall(0, "n", "torch.relu", args=(short,)), GraphSettings())
    assert none.outcome is CallOutcome.NOTHING


def test_a_mean_of_unequal_parts_is_nobody_s_claim():
    call = GraphCall(0, "n", "torch.mean", args=(X,), kwargs={"dim": 1})
    for annotation in (None, "a b+avg -> a"):
        asked = dataclasses.replace(call, annotation=annotation)
        result = check_call(asked, GraphSettings(ranks=(3,)))
        assert result.outcome is CallOutcome.VERIFIED, result.reason
        assert any("unequal parts" in note for note in result.notes)


def test_a_declared_split_is_a_claim_about_equal_parts():
    groups = TensorValue("w", (8, 1, 3), torch.float32)
    image = TensorValue("x", (2, 8, 9), torch.float32)
    call = GraphCall(
        0,
        "conv",
        "torch.nn.functional.conv1d",
        args=(image, groups),
        kwargs={"groups": 8, "stride": 1},
        annotation="n c _, c 1 _ -> n c _",
    )
    result = check_call(call, GraphSettings(ranks=(3,)))
    assert result.outcome is CallOutcome.NOTHING
    assert "the parts are not equal" in result.reason


def test_a_factor_passed_by_name_does_not_stop_the_check():
    call = dataclasses.replace(LINEAR, args=(X,), kwargs={"weight": W})
    result = check_call(call, GraphSettings())
    assert result.outcome is not CallOutcome.UNSUPPORTED, result.reason


def test_an_operator_that_fails_unsplit_is_unsupported():
    odd = TensorValue("w", (6, 5), torch.float32)
    result = check_call(
        GraphCall(0, "n", "torch.mm", args=(X, odd), annotation="a b, c d -> a d"), GraphSettings()
    )
    assert result.outcome is CallOutcome.UNSUPPORTED
    assert "the operator itself fails: RuntimeError: mat1 and mat2 shapes" in result.reason


def test_whatever_is_raised_becomes_the_result():
    def broken(x):
        raise SystemError("out of order")

    call = GraphCall(0, "n", "my.op", args=(X,), function=broken, annotation="a b -> a b")
    result = check_call(call, GraphSettings())
    assert result.outcome is CallOutcome.UNSUPPORTED
    assert "SystemError: out of order" in result.reason


def test_an_interrupt_passes():
    def interrupted(x):
        raise KeyboardInterrupt

    call = GraphCall(0, "n", "my.op", args=(X,), function=interrupted, annotation="a b -> a b")
    with pytest.raises(KeyboardInterrupt):
        check_call(call, GraphSettings())


def test_values_that_take_too_much_memory_are_refused_before_they_are_made():
    huge = TensorValue("x", (1 << 20, 1 << 12), torch.float32)
    result = check_call(GraphCall(0, "n", "torch.relu", args=(huge,)), GraphSettings())
    assert result.outcome is CallOutcome.UNSUPPORTED
    assert result.reason == (
        "its values take 32 GiB, and 64 GiB with those of 2 ranks; 4 GiB are allowed. "
        "Use --cap N to check it with shorter dimensions"
    )
    grown = GraphCall(0, "n", "torch.Tensor.repeat", args=(X, 1 << 20, 1 << 12))
    assert "--cap N" in check_call(grown, GraphSettings()).reason
    small = check_call(GraphCall(0, "n", "torch.relu", args=(huge,)), GraphSettings(cap=16))
    assert small.outcome is CallOutcome.VERIFIED


def test_recorded_values_are_used_as_they_are():
    seen = []

    def op(x):
        seen.extend([] if x.is_meta else [x.detach().clone()])
        return x * 2

    recorded = torch.arange(32.0).reshape(4, 8)
    call = GraphCall(0, "n", "my.op", args=(X,), function=op, annotation="a b -> a b")
    result = check_call(call, GraphSettings(), CallValues((recorded,)))
    assert result.outcome is CallOutcome.VERIFIED
    assert any(torch.equal(one, recorded) for one in seen)
    assert result.notes == ("values recorded in a run of the graph",)


def test_the_process_is_left_as_it_was():
    torch.manual_seed(5)
    before = torch.get_rng_state()
    call = GraphCall(0, "n", "torch.nn.functional.dropout", args=(X,), kwargs={"training": True})
    assert check_call(call, GraphSettings()).outcome is CallOutcome.VERIFIED
    assert torch.equal(before, torch.get_rng_state())
    assert torch.get_default_dtype() is torch.float32


def test_a_device_of_another_machine_is_read_as_this_one():
    call = GraphCall(
        0, "n", "torch.Tensor.to", args=(X,), kwargs={"device": torch.device("cuda:3")}
    )
    assert check_call(call, GraphSettings(options="discover")).outcome is CallOutcome.VERIFIED


def test_a_list_of_tensors_and_a_write_in_place():
    pair = [X, dataclasses.replace(X, name="y")]
    assert (
        check_call(GraphCall(0, "n", "aten.cat.default", args=(pair, 1)), GraphSettings()).outcome
        is CallOutcome.VERIFIED
    )
    added = check_call(GraphCall(0, "n", "aten.add_.Tensor", args=tuple(pair)), GraphSettings())
    assert added.outcome is CallOutcome.VERIFIED
    assert len(added.options) == 2


def test_what_is_not_split_is_run_once_for_all_splits():
    wholes = []

    def op(x):
        wholes.extend([x.dtype] if x.shape == (4, 8) else [])
        return x * 2

    call = GraphCall(0, "n", "my.op", args=(X,), function=op, annotation="a b -> a b")
    result = check_call(call, GraphSettings(ranks=(2, 4)))
    assert len(result.options) == 4
    assert wholes == [torch.float32, torch.float64]


def test_shapes_that_differ_from_the_graph_are_reported():
    out = TensorValue("y", (4, 9), torch.float32)
    result = check_call(dataclasses.replace(LINEAR, outputs=(out,)), GraphSettings())
    assert "it returns [(4, 8)] here, but [(4, 9)] in the graph" in result.notes

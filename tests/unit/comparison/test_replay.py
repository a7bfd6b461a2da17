from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from msgspec.structs import replace

from paritas.comparison.replay import Unreplayed, replay
from paritas.core.results.findings import Status
from unit.comparison.tapes import Tape


def outcome(my: Tape, golden: Tape, name: str, position: str = "0", **options: Any) -> Any:
    return replay(
        my.find(name, position=position),
        golden.find(name, position=position),
        my.calls,
        golden.calls,
        my.read,
        golden.read,
        **options,
    )


def perceptron(*, dtype=torch.float32, spoilt="", spoil=lambda made: made * 1.01, eps=1e-5) -> Tape:
    """Norm, matmul, gelu, softmax, of which one may be wrong."""
    torch.manual_seed(0)
    tape = Tape()

    def run(name: str, op: str, *args: Any, **kwargs: Any) -> Any:
        fault = {"spoil": spoil} if name == spoilt else {}
        return tape.node(name, op, *args, **kwargs, **fault)

    x = tape.given("x", torch.randn(8, 16).to(dtype))
    w = tape.given("w", torch.randn(16, 32).to(dtype))
    norm = run("norm", "aten.native_layer_norm.default", x, [16], None, None, eps)
    y = tape.node("getitem", "getitem", norm, 0)
    y = run("mm", "aten.mm.default", y, w)
    y = run("gelu", "aten.gelu.default", y, approximate="tanh")
    run("softmax", "aten._softmax.default", y, -1, False)
    return tape


def test_the_operator_that_is_wrong_has_made_its_error_and_those_after_it_have_inherited_it():
    golden, my = perceptron(), perceptron(spoilt="mm")
    wrong = outcome(my, golden, "mm")
    assert wrong.judgement.status is Status.DIFFERENT
    assert wrong.own == pytest.approx(0.01, rel=1e-3)
    assert wrong.inherited == 0.0
    assert wrong.golden_ok
    for later in ("gelu", "softmax"):
        found = outcome(my, golden, later)
        assert found.judgement.status.passes(), later
        assert found.own < 1e-6, later
        assert found.inherited > 1e-3, later


def test_rounding_that_came_in_is_told_from_rounding_that_was_added():
    torch.manual_seed(1)
    noise = 1 + 1e-7 * torch.randn(8, 32)
    golden, my = perceptron(), perceptron(spoilt="mm", spoil=lambda made: made * noise)
    found = outcome(my, golden, "mm")
    assert found.judgement.status is Status.EQUIVALENT
    assert 1e-8 < found.own < 1e-6
    found = outcome(my, golden, "gelu")
    assert found.judgement.status is Status.IDENTICAL
    assert 1e-8 < found.inherited < 1e-6


def test_a_narrower_program_is_judged_by_its_own_precision():
    golden, my = perceptron(), perceptron(dtype=torch.bfloat16)
    for name in ("mm", "gelu", "softmax"):
        found = outcome(my, golden, name)
        assert found.judgement.status.passes(), name
        assert found.own < 0.01, name
    spoilt = perceptron(dtype=torch.bfloat16, spoilt="gelu", spoil=lambda made: made * 1.1)
    assert outcome(spoilt, golden, "gelu").judgement.status is Status.DIFFERENT
    assert outcome(spoilt, golden, "softmax").judgement.status.passes()


def test_another_argument_is_a_fault_of_the_call_and_the_words_name_it():
    golden, my = perceptron(), perceptron(eps=1e-2)
    found = outcome(my, golden, "norm")
    assert found.judgement.status is Status.DIFFERENT
    assert found.words == (
        "aten.native_layer_norm.default, rerun on its recorded inputs; "
        "argument 4 is 0.01 on my side, 1e-05 on the golden side"
    )


def test_a_golden_value_that_is_wrong_is_told_from_one_of_mine():
    golden, my = perceptron(spoilt="gelu"), perceptron()
    found = outcome(my, golden, "gelu")
    assert found.judgement.status.passes()
    assert not found.golden_ok


def test_what_neither_side_gives_again_is_not_judged():
    golden = perceptron(spoilt="gelu", spoil=lambda made: made + 1)
    my = perceptron(spoilt="gelu", spoil=lambda made: made + 2)
    found = outcome(my, golden, "gelu")
    assert isinstance(found, Unreplayed)
    assert found.reason.startswith("rerunning it reproduces neither the golden nor my output")


def test_a_nan_that_was_made_is_an_infinite_error_of_its_own():
    def burst(made: torch.Tensor) -> torch.Tensor:
        made = made.clone()
        made[3, 5] = math.nan
        return made

    golden, my = perceptron(), perceptron(spoilt="gelu", spoil=burst)
    found = outcome(my, golden, "gelu")
    assert found.judgement.status is Status.DIFFERENT
    assert found.own == math.inf
    later = outcome(my, golden, "softmax")
    assert later.judgement.status.passes()
    assert later.inherited == math.inf


def test_an_operator_that_writes_to_its_argument_leaves_the_recorded_one_alone():
    def program(factor: float) -> Tape:
        tape = Tape()
        x = tape.given("x", torch.linspace(0.1, 1, 5) * factor)
        tape.node("add_", "aten.add_.Tensor", x.clone(), 1.0)
        return tape

    golden, my = program(1.0), program(1.5)
    given = my.find("add_", "input")
    before = my.read(given).clone()
    found = outcome(my, golden, "add_")
    assert found.judgement.status is Status.IDENTICAL
    assert torch.equal(my.read(given), before)


def test_discrete_results_are_judged_too():
    def program(place: int) -> Tape:
        tape = Tape()
        x = tape.given("x", torch.arange(12.0).reshape(3, 4))
        tape.node("argmax", "aten.argmax.default", x, 1, spoil=lambda made: made - place)
        return tape

    found = outcome(program(1), program(0), "argmax")
    assert found.judgement.status is Status.DIFFERENT
    assert found.own > 0


# --- fused code ---------------------------------------------------------------------------------


def nodes(scale: float = 1.0) -> Tape:
    torch.manual_seed(2)
    tape = Tape()
    x = tape.given("x", torch.randn(8, 16) * scale)
    pair = tape.node("var_mean", "aten.var_mean.correction", x, [1], correction=0, keepdim=True)
    variance = tape.node("getitem", "getitem", pair, 0)
    mean = tape.node("getitem_1", "getitem", pair, 1)
    shifted = tape.node("sub", "aten.sub.Tensor", x, mean)
    root = tape.node("rsqrt", "aten.rsqrt.default", variance)
    scaled = tape.node("mul", "aten.mul.Tensor", shifted, root)
    tape.node("exp", "aten.exp.default", scaled)
    return tape


GROUP = ("var_mean", "getitem", "getitem_1", "sub", "rsqrt", "mul", "exp")


def fused(golden: Tape, *, scale: float = 1.0, wrong: float = 1.0, nodes: tuple = GROUP) -> Tape:
    x = golden.read(golden.find("x")) * scale
    y = (x - x.mean(1, keepdim=True)) / x.var(1, correction=0, keepdim=True).sqrt()
    tape = Tape()
    tape.kernel("fused_norm_exp_0", {"x": x}, {nodes: (y * wrong).exp()})
    return tape


def test_a_kernel_is_held_against_the_nodes_that_it_stands_for():
    golden = nodes()
    found = outcome(fused(golden), golden, "exp")
    assert found.judgement.status.passes()
    assert (found.own < 1e-6, found.inherited) == (True, 0.0)
    assert found.words == (
        "7 nodes (var_mean, getitem, getitem_1, sub, rsqrt ... exp) rerun in order on what "
        "kernel fused_norm_exp_0 read"
    )
    wrong = outcome(fused(golden, wrong=1.001), golden, "exp")
    assert wrong.judgement.status is Status.DIFFERENT
    assert wrong.own > 1e-4


def test_a_kernel_that_was_given_something_else_has_made_nothing_of_it():
    golden = nodes()
    x = golden.read(golden.find("x")).clone()
    x[0, 0] += 1.0
    my = Tape()
    y = (x - x.mean(1, keepdim=True)) / x.var(1, correction=0, keepdim=True).sqrt()
    my.kernel("fused_norm_exp_0", {"x": x}, {GROUP: y.exp()})
    found = outcome(my, golden, "exp")
    assert found.judgement.status.passes()
    assert found.own < 1e-6
    assert found.inherited > 1e-3


def test_nodes_between_what_is_recorded_and_the_group_are_run_along():
    golden = nodes()
    found = outcome(fused(golden, nodes=("mul", "exp")), golden, "exp")
    assert found.judgement.status.passes()
    assert found.words.startswith("7 nodes")


def test_the_graph_may_be_on_my_side():
    my = nodes()
    found = outcome(my, fused(my), "exp")
    assert found.judgement.status.passes()
    assert found.golden_ok


def test_what_my_side_has_not_recorded_is_taken_from_the_golden_dump_and_said():
    golden = nodes()
    my = fused(golden)
    my.records = [record for record in my.records if record.site.side == "output"]
    found = outcome(my, golden, "exp")
    assert found.judgement.status.passes()
    assert found.words.endswith("; node x taken from the golden dump for both sides")


def test_an_error_that_may_have_come_in_unseen_is_nobodys():
    golden = nodes()
    my = fused(golden, wrong=1.01)
    my.records = [record for record in my.records if record.site.side == "output"]
    assert outcome(my, golden, "exp") == Unreplayed("one side did not record the value of x")


def test_a_graph_without_its_edges_is_not_run_for_a_kernel():
    golden = nodes()
    my = fused(golden)
    for place, record in enumerate(golden.records):
        golden.records[place] = replace(record, site=replace(record.site, nodes=()))
    assert outcome(my, golden, "exp") == Unreplayed(
        "the dump does not say which node computed forward/graph_0/exp#0/input.0"
    )


# --- what is not run ----------------------------------------------------------------------------


def refusal(op: str, *args: Any) -> str:
    """Why a recorded call is not rerun."""
    tapes = []
    for factor in (1, 2):
        tape = Tape()
        given = [value * factor if isinstance(value, torch.Tensor) else value for value in args]
        tape.told("call", op, given, torch.ones(2) * factor)
        tapes.append(tape)
    found = outcome(tapes[1], tapes[0], "call")
    assert isinstance(found, Unreplayed)
    return found.reason


def test_nothing_but_pure_operators_of_torchs_own_is_run(tmp_path):
    x = torch.ones(2)
    secret = tmp_path / "secret"
    secret.write_bytes(bytes(8))
    assert refusal("aten.from_file.default", str(secret), False, 2) == (
        "aten.from_file.default is not among the operators that paritas replays"
    )
    assert refusal("os.system", "true") == "'os.system' is not an operator of torch"
    assert refusal("mylib.relu.default", x) == "'mylib.relu.default' is not an operator of torch"
    assert refusal("aten.rand_like.default", x) == "aten.rand_like.default draws random numbers"
    assert refusal("aten.empty_like.default", x) == (
        "aten.empty_like.default returns uninitialized memory"
    )
    assert "has no operator" in refusal("aten.__class__.mro", x)


def test_attention_that_drops_is_not_run_again():
    x = torch.ones(1, 1, 2, 4)
    reason = refusal("aten._scaled_dot_product_flash_attention_for_cpu.default", x, x, x, 0.5)
    assert reason.endswith("draws random numbers")


def test_a_result_that_would_not_fit_is_not_made():
    reason = refusal("aten.repeat.default", torch.ones(2), [1 << 20, 1 << 20])
    assert reason == "aten.repeat.default is too large to rerun"
    golden, my = perceptron(), perceptron(spoilt="mm")
    assert outcome(my, golden, "mm", most_bytes=1000) == Unreplayed(
        "its inputs and results have more than 1000 bytes"
    )


def test_a_size_that_depends_on_values_cannot_be_foretold():
    assert "cannot determine the size" in refusal("aten.nonzero.default", torch.ones(3))


def test_indices_and_statistics_that_do_not_fit_are_not_given_to_a_kernel():
    grad, x = torch.ones(1, 1, 2, 2), torch.ones(1, 1, 4, 4)
    far = torch.full((1, 1, 2, 2), 10**6)
    shape = [2, 2], [2, 2], [0, 0], [1, 1], False
    reason = refusal("aten.max_pool2d_with_indices_backward.default", grad, x, *shape, far)
    assert reason.endswith("do not fit together")
    rows = torch.ones(64, 8)
    few, mask = torch.ones(1, 1), [True, False, False]
    reason = refusal(
        "aten.native_layer_norm_backward.default", rows, rows, [8], few, few, None, None, mask
    )
    assert reason.endswith("do not fit together")


@pytest.mark.parametrize("text", ["__import__('os')", "[1, 2", "lambda: 0", "-" * 10_000 + "1"])
def test_text_that_is_no_plain_value_is_not_read(text):
    class Spelled:
        def __repr__(self) -> str:
            return text

    reason = refusal("aten.add.Tensor", torch.ones(2), Spelled())
    assert reason.endswith("as a plain value")


def test_inputs_of_the_program_modules_and_bare_buffers_say_why_not():
    golden = nodes()
    assert outcome(nodes(2.0), golden, "x").reason == "it is an input of the graph"
    both = fused(golden), fused(golden)
    assert outcome(*both, "exp").reason == (
        "neither dump has the operators' arguments: record one with source='fx'"
    )
    unsure = Tape()
    unsure.kernel("k", {}, {("exp",): torch.ones(8, 16)}, exact=False)
    assert outcome(unsure, golden, "exp").reason == (
        "it is not known whether the buffer holds the value of a node"
    )

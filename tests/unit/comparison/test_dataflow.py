from __future__ import annotations

import torch
from msgspec.structs import replace

from paritas.formats.dumps.survey import RecordedCalls
from paritas.formats.files.records import Site
from unit.comparison.tapes import Tape


def graph() -> Tape:
    torch.manual_seed(0)
    tape = Tape()
    x = tape.given("x", torch.randn(4, 6))
    doubled = tape.node("mul", "aten.mul.Tensor", x, 2.0)
    pair = tape.node("var_mean", "aten.var_mean.correction", doubled, [1], keepdim=True)
    mean = tape.node("getitem_1", "getitem", pair, 1)
    tape.node("cat", "aten.cat.default", [doubled, mean, x], 1)
    return tape


def names(records: list) -> list[str]:
    return [f"{one.site.name}/{one.site.side}.{one.site.position}" for one in records]


def test_what_a_node_gives_comes_from_the_tensors_it_was_given():
    tape = graph()
    assert names(tape.calls.sources(tape.find("cat"))) == [
        "cat/input.0.0",
        "cat/input.0.1",
        "cat/input.0.2",
    ]


def test_what_a_node_was_given_comes_from_the_node_that_its_site_names():
    tape = graph()
    calls = tape.calls
    assert names(calls.sources(tape.find("mul", "input"))) == ["x/output.0"]
    assert names(calls.sources(tape.find("cat", "input", "0.1"))) == ["getitem_1/output.0"]


def test_one_of_several_values_comes_from_the_result_at_its_place():
    tape = graph()
    item = tape.find("getitem_1", "input", "0.1")
    assert names(tape.calls.sources(item)) == ["var_mean/output.1"]


def test_an_input_of_the_program_comes_from_nowhere():
    tape = graph()
    assert tape.calls.sources(tape.find("x")) == []


def test_calls_come_in_the_order_of_the_program():
    assert [call.site.name for call in graph().calls] == [
        "x",
        "mul",
        "var_mean",
        "getitem_1",
        "cat",
    ]


def test_all_that_one_kernel_wrote_comes_from_all_that_it_read():
    tape = Tape()
    x, w = torch.randn(4), torch.randn(4)
    tape.kernel("fused_0", {"x": x, "w": w}, {("mul",): x * w, ("mul", "exp"): (x * w).exp()})
    tape.kernel("fused_0", {"exp": (x * w).exp()}, {("add",): (x * w).exp() + 1})
    calls = tape.calls
    assert names(calls.sources(tape.find("mul"))) == ["exp/input.0", "exp/input.1"]
    assert names(calls.sources(tape.find("exp"))) == ["exp/input.0", "exp/input.1"]
    # The second call of the same kernel begins where it reads again.
    assert names(calls.sources(tape.find("add"))) == ["add/input.0"]
    assert names(calls.sources(tape.find("add", "input"))) == ["exp/output.0"]


def test_what_a_fused_graph_gives_comes_from_the_buffer_though_other_code_rounded_it():
    tape = Tape()
    x = torch.ones(4)
    tape.kernel("fused_0", {"x": x}, {("exp",): x.exp()})
    site = Site(source="fused", level="node", name="exp", graph="graph_0", nodes=("exp",))
    given = tape.put(site, x.exp() * (1 + 2**-20))
    (source,) = tape.calls.sources(given)
    assert (source.site.level, source.site.name) == ("buffer", "exp")


def test_an_operator_of_eager_code_is_given_what_an_earlier_one_gave_with_the_same_bits():
    tape = Tape()
    x = torch.randn(3)
    op = {"source": "eager", "level": "op"}
    first = Site(name="aten.relu.default", **op)
    tape.put(Site(name="aten.relu.default", side="input", **op), x)
    made = tape.put(first, x.relu())
    taken = tape.put(Site(name="aten.neg.default", side="input", **op), x.relu())
    other = tape.put(Site(name="aten.abs.default", side="input", **op), torch.ones(3))
    calls = tape.calls
    assert calls.sources(taken) == [made]
    assert calls.sources(other) == []


def test_a_modules_gradients_run_the_other_way():
    tape = Tape()
    module = {"source": "eager", "level": "module", "name": "layer", "phase": "backward"}
    incoming = tape.put(Site(side="output", **module), torch.ones(3))
    made = tape.put(Site(side="input", **module), torch.full((3,), 2.0))
    assert tape.calls.sources(made) == [incoming]


def test_what_the_backward_graph_is_given_comes_from_the_forward_graph():
    tape = Tape()
    x = tape.given("x", torch.randn(3))
    kept = tape.node("exp", "aten.exp.default", x)
    saved = tape.put(
        Site(
            source="fx",
            level="node",
            name="exp",
            op="placeholder",
            graph="graph_0",
            phase="backward",
            nodes=("exp",),
        ),
        kept,
    )
    assert names(tape.calls.sources(saved)) == ["exp/output.0"]
    assert tape.calls.sources(saved)[0].site.phase == "forward"


def test_values_of_which_only_the_memory_is_known_are_followed_by_that():
    tape = graph()
    made, taken = tape.find("mul"), tape.find("var_mean", "input")
    site = Site(source="eager", level="op", name="aten.var_mean.correction", side="input")
    made = replace(made, digest="")
    taken = replace(taken, digest="", alias_of=made.sequence, site=site)
    assert RecordedCalls([made, taken]).sources(taken) == [made]

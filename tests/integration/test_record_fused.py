"""record(source="fused"): the buffers of fused code in a dump, and the program undisturbed."""

from __future__ import annotations

import functools
import json

import pytest
import torch
from torch import nn

from integration.fused_graphs import perceptron
from paritas.core.errors import UnsupportedTorchError, UsageError
from paritas.formats.dumps.reading import Dump
from paritas.recording import fused_graphs
from paritas.recording.record import record

# What buffers hold is asked in `test_record_fused_buffers.py`, of kernels with vectors.
pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("scalar_kernels")]


def run(model, shape, backend, steps=2):
    """Train a little; gives all that was computed and drawn."""
    torch.compiler.reset()
    torch.manual_seed(1)
    compiled = torch.compile(model, backend=backend)
    seen = []
    for _ in range(steps):
        y = compiled(torch.randn(shape))
        y.square().mean().backward()
        seen.append(y.detach())
    seen += [p.grad for p in model.parameters()] + [b.clone() for b in model.buffers()]
    return [*seen, torch.rand(3)]


def fresh(build):
    torch.manual_seed(0)
    return build()


def recorded(path, build, shape, **options):
    with record(path, source="fused", **options) as backend:
        results = run(fresh(build), shape, backend)
    return results, Dump.open(path)


@functools.cache
def unrecorded():
    """What a perceptron computes without recording."""
    return run(fresh(perceptron), (3, 8), "inductor")


def same(left, right):
    return all(torch.equal(mine, theirs) for mine, theirs in zip(left, right, strict=True))


def test_a_program_computes_and_draws_the_same_with_and_without_recording(tmp_path):
    # Convolutions, whose layout Inductor changes, are in `test_record_fused_buffers.py`.
    results, dump = recorded(tmp_path / "dump", perceptron, (3, 8))
    assert same(results, unrecorded())
    assert {what.status for what in dump.header(0).observed} == {"unchanged"}
    assert {what.graph for what in dump.header(0).observed} == {
        "graph_0 forward",
        "graph_0 backward",
    }


def test_each_step_has_its_buffers_with_node_module_kernel_and_line_and_what_the_graph_was_given(
    tmp_path,
):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(4, 4)

        def forward(self, x):
            return torch.tanh(self.inner(x)).sum(-1)

    results, dump = recorded(tmp_path / "dump", Net, (2, 4))
    records = list(dump.records())
    assert {record.step for record in records} == {0, 1}
    buffers = [r for r in records if r.site.level == "buffer" and r.step == 1]
    addmm = next(r for r in buffers if r.id == "forward/graph_0/addmm#0/output.0")
    assert addmm.site.exact
    assert addmm.site.nodes[-1] == "addmm"
    assert addmm.site.module == "inner"
    assert addmm.site.kernel == "extern_kernels.addmm"
    assert addmm.site.code == "return torch.tanh(self.inner(x)).sum(-1)"
    assert "test_record_fused.py" in addmm.site.line
    assert any(r.site.phase == "backward" for r in buffers)
    assert any(r.site.side == "input" for r in buffers)
    assert len({(r.step, r.id) for r in records}) == len(records)

    nodes = {r.id: r for r in records if r.site.level == "node" and r.step == 0}
    given = [r for r in nodes.values() if r.site.op == "placeholder" and "forward" in r.id]
    assert len(given) == 3
    output = nodes["forward/graph_0/~sum_1#0/output.0"]
    assert torch.equal(dump.read(output), results[0])


def test_taps_bring_every_node_and_the_dump_says_so(tmp_path):
    results, dump = recorded(tmp_path / "dump", perceptron, (3, 8), taps=True)
    assert same(results, unrecorded())
    assert dump.header(0).taps
    labels = [what.graph for what in dump.header(0).observed]
    assert "graph_0 forward tapped" in labels
    names = {r.site.name for r in dump.records() if r.site.level == "node"}
    assert {"var_mean", "erf", "mul_4"} - names == {"var_mean"}  # that one is two values
    assert {"getitem", "getitem_1"} <= names


def test_steps_that_are_not_wanted_run_the_plain_code(tmp_path, monkeypatch):
    made = []
    original = fused_graphs.compile_listening
    monkeypatch.setattr(
        fused_graphs, "compile_listening", lambda *given: made.append(1) or original(*given)
    )
    with pytest.raises(ValueError, match="steps"):  # nothing was recorded, which is told at the end
        recorded(tmp_path / "dump", perceptron, (3, 8), steps=[7])
    assert made == []


def test_where_recording_changes_the_outputs_the_program_goes_on_with_its_own(
    tmp_path, monkeypatch
):
    original = fused_graphs.compile_listening

    def compile_wrongly(lowered, listener):
        code = original(lowered, listener)
        right = code.code

        def run_wrongly(args):
            return [v + 1 if isinstance(v, torch.Tensor) else v for v in right(args)]

        object.__setattr__(code, "code", run_wrongly)
        return code

    monkeypatch.setattr(fused_graphs, "compile_listening", compile_wrongly)
    results, dump = recorded(tmp_path / "dump", perceptron, (3, 8))
    assert same(results, unrecorded())
    observed = dump.header(0).observed
    assert {what.status for what in observed} == {"changed"}
    assert "values differ" in observed[0].detail
    assert {r.step for r in dump.records() if r.site.level == "buffer"} == {0, 1}


def test_code_that_cannot_be_made_to_tell_lets_the_program_go_on_and_is_an_error_at_the_end(
    tmp_path, monkeypatch
):
    def fail(*given):
        raise ArithmeticError("no luck")

    monkeypatch.setattr(fused_graphs, "compile_listening", fail)
    backend = record(tmp_path / "dump", source="fused")
    results = run(fresh(perceptron), (3, 8), backend)
    with pytest.raises(UsageError, match="graph_0 forward: its inside is not recorded"):
        backend.close()
    assert same(results, unrecorded())
    dump = Dump.open(tmp_path / "dump")
    assert dump.problems == []
    observed = dump.header(0).observed
    assert {what.status for what in observed} == {"unchecked"}
    assert observed[0].detail == ("compiling it for recording failed: ArithmeticError: no luck")
    assert (
        dump.header(0).notes[0].startswith("graph_0 forward: its inside is not recorded; compiling")
    )
    assert {r.site.level for r in dump.records()} == {"node"}


def test_a_torch_that_is_not_understood_is_an_error_and_not_an_empty_dump(tmp_path, monkeypatch):
    def refuse(*given):
        raise UnsupportedTorchError("torch 99 has no lines")

    monkeypatch.setattr(fused_graphs, "compile_listening", refuse)
    with pytest.raises(Exception, match="torch 99 has no lines"):
        recorded(tmp_path / "dump", perceptron, (3, 8))


def write(path, graph, kernel):
    path.write_text(json.dumps({"Switch": {"GraphFusion": graph, "UBFusion": kernel}}))
    return path


def kernels(dump):
    return {
        r.site.kernel: r.site.nodes
        for r in dump.records()
        if r.site.level == "buffer" and r.site.side == "output" and r.step == 0
    }


class Products(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4))

    def forward(self, x):
        return torch.mm(torch.mm(x, self.weight) + x, self.weight)


def test_a_pass_that_is_off_leaves_the_graph_as_it_was(tmp_path):
    results, dump = recorded(tmp_path / "on", Products, (4, 4))
    assert "extern_kernels.addmm" in kernels(dump)
    for name in ["pass_pattern_2", "pattern_matcher", "ALL"]:
        switch = write(tmp_path / f"{name}.json", {name: "off"}, {})
        others, dump = recorded(tmp_path / name, Products, (4, 4), fusion_switch=switch)
        assert "extern_kernels.mm" in kernels(dump), name
        assert "extern_kernels.addmm" not in kernels(dump), name
        assert dump.header(0).fusion == f"GraphFusion: {name} off"
        torch.testing.assert_close(results, others)


def drawing():
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Dropout(0.3))


def test_with_all_fusion_off_every_node_that_computes_has_a_buffer(tmp_path):
    switch = write(tmp_path / "switch.json", {"ALL": "off"}, {"ALL": "off"})
    expected, plain = recorded(tmp_path / "on", drawing, (3, 8))
    results, dump = recorded(tmp_path / "off", drawing, (3, 8), fusion_switch=switch)
    torch.testing.assert_close(results, expected)
    with record(tmp_path / "fx", source="fx") as backend:
        run(fresh(drawing), (3, 8), backend, steps=1)
    views = {"aten.permute.default", "aten.view.default"}
    # A single number is always computed where it is used.
    single = {"prims.inductor_lookup_seed.default"}
    computed = {
        (r.site.phase, r.site.name)
        for r in Dump.open(tmp_path / "fx").records()
        if r.site.side == "output" and r.site.op not in views | single | {"placeholder"}
    }
    found = {
        (r.site.phase, r.site.name)
        for r in dump.records()
        if r.site.level == "buffer" and r.site.side == "output" and r.site.exact
    }
    assert computed - found == set()
    assert len(found) > 2 * len(kernels(plain))
    assert {what.status for what in dump.header(0).observed} == {"unchanged"}

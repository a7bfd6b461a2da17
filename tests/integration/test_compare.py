"""Dumps of one program, recorded in several ways, compared: what torchair's tools are used for."""

from __future__ import annotations

import dataclasses
import json
import multiprocessing

import pytest
import torch
from torch import nn

import paritas
import processes
from integration.once import made_once
from paritas.core.results.findings import Status
from quality.guard_faults import without_caches, wrong_operation

FUSION_OFF = {"Switch": {"GraphFusion": {"ALL": "off"}, "UBFusion": {"ALL": "off"}}}


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 8)

    def forward(self, x):
        hidden = self.up(x)
        return self.down(self.norm(torch.erf(hidden) + hidden))


@dataclasses.dataclass
class Recorded:
    fused: str
    fx: str
    fusion_off: str
    again: str
    faulty: str
    trained_fused: str
    trained_fx: str


def record(path, train=False, **options):
    torch.compiler.reset()
    torch.manual_seed(0)
    # In half precision graphs hand statistics in float32 to one another.
    dtype = torch.bfloat16 if train else torch.float32
    model = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.Tanh()) if train else Block()
    model, x = model.to(dtype), torch.randn(4, 8).to(dtype)
    with paritas.record(path, **options) as backend, torch.set_grad_enabled(train):
        result = torch.compile(model, backend=backend)(x)
        if train:
            result.square().mean().backward()
    torch.compiler.reset()
    return str(path)


@pytest.fixture(scope="module")
def dumps(tmp_path_factory):
    folder = made_once(tmp_path_factory, "recorded programs", make)
    return Recorded(**json.loads((folder / "names.json").read_text()))


def make(folder):
    switch = folder / "fusion_switch.json"
    switch.write_text(json.dumps(FUSION_OFF))
    fused = record(folder / "fused", source="fused")
    fx = record(folder / "fx", source="fx")
    off = record(folder / "off", source="fused", fusion_switch=switch)
    again = record(folder / "again", source="fused")
    with without_caches(), wrong_operation("erf", "({}) * {number}(1.001)")():
        faulty = record(folder / "faulty", source="fused")
    trained = [record(folder / f"trained {s}", train=True, source=s) for s in ("fused", "fx")]
    names = dataclasses.asdict(Recorded(fused, fx, off, again, faulty, *trained))
    (folder / "names.json").write_text(json.dumps(names))


def test_fused_code_is_compared_with_the_graph_run_op_by_op(dumps):
    found = paritas.compare(dumps.fused, dumps.fx)
    assert found.status is Status.EQUIVALENT
    assert found.first is None
    fused = [row for row in found.rows if len(row.nodes) > 5 and row.side == "output"]
    assert fused
    assert {row.attributed for row in fused if row.status is Status.EQUIVALENT} == {"replayed"}
    assert any("inside fused kernels" in reason for reason in found.coverage.skipped)
    assert found.coverage.unmatched == ()


def test_fused_code_is_compared_with_the_same_code_unfused(dumps):
    found = paritas.compare(dumps.fused, dumps.fusion_off)
    assert found.passed
    assert found.coverage.compared > 10
    assert found.coverage.unmatched == ()


def test_the_same_program_twice_is_identical(dumps):
    found = paritas.compare(dumps.again, dumps.fused)
    assert found.status is Status.IDENTICAL
    assert {row.matched_by for row in found.rows} == {"id"}


def test_the_backward_pass_is_compared_likewise(dumps):
    found = paritas.compare(dumps.trained_fused, dumps.trained_fx)
    assert found.passed
    assert any(row.phase == "backward" and row.attributed == "replayed" for row in found.rows)


def test_a_fault_inside_a_fused_group_is_named(dumps):
    found = paritas.compare(dumps.faulty, dumps.fx)
    assert found.exit_code == 1
    first = found.rows[found.first.row]
    assert found.first.kind == "made"
    assert "erf" in first.nodes
    assert first.kernel.startswith("cpp_fused")
    assert "torch.erf" in first.code
    assert first.own > 100 * first.inherited
    assert first.detail.worst
    later = [row for row in found.rows if row.call.split("#")[0].endswith("addmm_1")]
    assert {row.made for row in later if row.status is Status.DIFFERENT} == {"before"}


def test_without_running_operators_again_the_fault_is_found_by_estimate(dumps):
    found = paritas.compare(dumps.faulty, dumps.fx, replay=False)
    first = found.rows[found.first.row]
    assert "erf" in first.nodes
    assert first.attributed == "estimated"


def test_a_rule_for_a_name_decides_over_the_noise(dumps):
    found = paritas.compare(dumps.faulty, dumps.fx, rules=[(".*", "rel_l2 < 0.01")])
    assert found.passed
    strict = paritas.compare(dumps.fused, dumps.fx, rules=[("add_2", "max_abs == 0")])
    failing = [row for row in strict.rows if not row.status.passes() and row.side == "output"]
    assert {row.module for row in failing} == {"norm"}


def test_it_comes_back_from_json_as_it_was(dumps):
    found = paritas.compare(dumps.faulty, dumps.fx)
    assert paritas.Comparison.from_json(found.to_json()) == found


# A process that is started anew is seen in unit/comparison.
@pytest.mark.parametrize(("executor", "jobs"), [("threads", 2), ("processes", 1)])
def test_whoever_does_the_work_the_rows_are_the_same(dumps, executor, jobs, monkeypatch):
    forking = processes.context()
    monkeypatch.setattr(multiprocessing, "get_context", lambda _: forking)
    found = paritas.compare(dumps.faulty, dumps.fx, executor=executor, jobs=jobs)
    expected = paritas.compare(dumps.faulty, dumps.fx, jobs=1)
    assert found.rows == expected.rows


def test_a_diagnosis_that_fails_is_reported_in_its_row(tmp_path, monkeypatch):
    def fail(*_, **__):
        raise ArithmeticError("no memory for it")

    monkeypatch.setattr("paritas.core.diagnosis.diagnose.diagnose", fail)
    model, x = nn.Linear(4, 4), torch.ones(2, 4)
    with paritas.capture(tmp_path / "golden"):
        model(x)
    with torch.no_grad():
        model.bias += 1
    with paritas.capture(tmp_path / "my"):
        model(x)
    table = paritas.compare(tmp_path / "my", tmp_path / "golden")
    (wrong,) = [row for row in table.rows if row.status is Status.DIFFERENT]
    assert wrong.detail.diagnosis.sentence == (
        "it was not diagnosed: ArithmeticError: no memory for it"
    )

"""`paritas demo`, as a user runs it."""

from __future__ import annotations

import pytest
import torch
from click.testing import CliRunner

from paritas.cli import demo_model, main


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@pytest.mark.slow
def test_the_right_compilation_passes_and_the_wrong_one_is_caught():
    result = CliRunner().invoke(main, ["demo"])
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    verdicts = [line for line in lines if line.endswith("items compared")]
    assert [line.partition(":")[0] for line in verdicts] == ["equivalent", "different"]
    lesson = lines[lines.index("What this shows") :]
    assert sum(line.endswith(": accepted") for line in lesson) == 2
    assert max(map(len, lines)) <= 80


def test_the_planted_fault_lets_a_token_see_the_next_one(monkeypatch):
    monkeypatch.setattr(demo_model, "inductor_backend", lambda: lambda graph, _: graph.forward)
    model, (ids,) = demo_model.build()
    changed = ids.clone()
    changed[:, 17] += 1
    faulty = torch.compile(model, backend=demo_model.faulty_inductor)
    for program, first in ((model, 17), (faulty, 15)):  # two layers, each looking one too far
        moved = (program(ids) != program(changed)).any(-1).any(0)
        assert int(moved.nonzero()[0]) == first

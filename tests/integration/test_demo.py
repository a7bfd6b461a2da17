"""`paritas demo`, as a user runs it."""

from __future__ import annotations

import functools
import re

import pytest
import torch
from click.testing import CliRunner

from paritas.app.cli import demo_model, main

pytestmark = pytest.mark.usefixtures("fresh_compiler")


@pytest.mark.slow
def test_the_point_is_told_on_one_screen():
    result = CliRunner().invoke(main, ["demo"])
    assert result.exit_code == 0, result.output
    lines = [line.rstrip() for line in result.stdout.splitlines()]
    assert len(lines) < 24
    assert max(map(len, lines)) <= 80
    rows = {line.split("  ")[0]: line for line in lines}
    assert rows["correlation"].count("accepted") == 2
    assert rows["paritas"].split() == ["paritas", "equivalent", "different"]
    place = lines.index("The fault starts in module blocks.0.attention:")
    assert "demo_model.py:" in lines[place + 1]
    assert lines[place + 2].strip().startswith("future = torch.ones(")
    assert lines[-1] == "details: paritas demo --verbose"
    assert result.stderr == ""


@pytest.mark.slow
def test_the_details_are_both_reports(monkeypatch):
    # What Inductor makes of the model is looked at above; float64 is reached in the same way.
    quick = functools.partial(torch.compile, backend="aot_eager_decomp_partition")
    monkeypatch.setattr(torch, "compile", quick)
    result = CliRunner().invoke(main, ["demo", "--verbose"])
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    verdicts = [line for line in lines if re.search(r"\d items? compared$", line)]
    assert [line.partition(":")[0] for line in verdicts] == ["equivalent", "different"]
    lesson = lines[lines.index("What this shows") :]
    assert sum(line.endswith(": accepted") for line in lesson) == 2
    assert max(map(len, lines)) <= 80


def test_the_planted_fault_lets_a_token_see_the_next_one():
    model, (ids,) = demo_model.build()
    changed = ids.clone()
    changed[:, 17] += 1
    faulty = torch.compile(model, backend=demo_model.faulty_compiler)
    for program, first in ((model, 17), (faulty, 15)):  # two layers, each looking one too far
        moved = (program(ids) != program(changed)).any(-1).any(0)
        assert int(moved.nonzero()[0]) == first

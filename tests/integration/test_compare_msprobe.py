"""Real msprobe (mindstudio-probe, from PyPI) compares two dumps of its own; our figures are its."""

from __future__ import annotations

import csv
import importlib.util
import json
import math
import subprocess
import sys
from pathlib import Path

import pytest

from paritas.comparison.compare import compare
from paritas.core.numerics.pair_figures import pair_figures
from paritas.formats.dumps.opening import open_dump

# Forward, in float32, seed 0; no value is zero. The first weight is scaled by the second argument.
PROGRAM = """
import sys
import torch
from torch import nn
from msprobe.pytorch import PrecisionDebugger

torch.manual_seed(0)
net = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))
x = torch.randn(4, 8)
with torch.no_grad():
    net[0].weight.mul_(float(sys.argv[2]))
debugger = PrecisionDebugger(config_path=sys.argv[1])
debugger.start(model=net)
net(x).square().mean()
debugger.stop()
debugger.step()
"""


def start(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    # It patches torch, so it gets a process of its own.
    return subprocess.run(  # noqa: PLW1510  (the caller asks)
        [sys.executable, *arguments], capture_output=True, text=True, cwd=folder, timeout=600
    )


def record(folder: Path, scale: float) -> Path:
    dump = folder / f"scaled-{scale}"
    task = {"scope": [], "list": [], "data_mode": ["all"]}
    told = {"task": "tensor", "dump_path": str(dump), "rank": [], "step": [], "level": "mix"}
    (folder / "config.json").write_text(json.dumps(told | {"tensor": task}))
    (folder / "program.py").write_text(PROGRAM)
    done = start(folder, "program.py", "config.json", str(scale))
    assert done.returncode == 0, done.stderr
    return dump / "step0"


@pytest.fixture(scope="module")
def compared(tmp_path_factory):
    """My dump, the golden one, and the table that msprobe made of them."""
    if importlib.util.find_spec("msprobe") is None:
        pytest.skip("mindstudio-probe is not installed")
    folder = tmp_path_factory.mktemp("msprobe")
    tried = start(folder, "-c", "import msprobe.pytorch, msprobe.msprobe")
    if tried.returncode:
        pytest.skip(f"mindstudio-probe cannot be imported: {tried.stderr.splitlines()[-1]}")
    golden, mine = (record(folder, scale) for scale in (1.0, 1.01))
    paths = ["-tp", str(mine), "-gp", str(golden), "-o", str(folder / "out")]
    done = start(folder, "-m", "msprobe.msprobe", "compare", *paths)
    assert done.returncode == 0, done.stderr
    (table,) = (folder / "out").glob("compare_result_*.csv")
    with table.open(newline="") as file:
        return mine, golden, list(csv.DictReader(file))


def by_name(path: Path) -> dict:
    """The values of a dump, by the names that msprobe gives their files."""
    dump = open_dump(path)
    return {Path(one.payload.file).stem: dump.view(one) for one in dump.records() if one.payload}


def figures_of(reference, candidate) -> dict[str, float]:
    """Ours, by the names of msprobe's columns."""
    metrics = pair_figures(reference, candidate).metrics
    if metrics is None:
        return {"Cosine": 1.0, "EucDist": 0.0, "MaxAbsErr": 0.0, "MaxRelativeErr": 0.0}
    return {
        "Cosine": metrics.cosine,
        "EucDist": metrics.rmse * math.sqrt(metrics.numel),
        "MaxAbsErr": metrics.max_abs,
        "MaxRelativeErr": metrics.max_rel,
    }


@pytest.mark.slow
def test_our_figures_are_those_of_msprobes_own_comparison(compared):
    mine, golden, table = compared
    candidates, references = by_name(mine), by_name(golden)
    assert {row["NPU Name"] for row in table} == set(candidates) == set(references)
    agreed = 0
    for row in table:
        name = row["NPU Name"]
        for column, ours in figures_of(references[name], candidates[name]).items():
            if row[column] == "unsupported":  # of what has no dimensions
                continue
            # It rounds the cosine to six digits, and works in float32.
            tolerance = {"abs": 1e-6} if column == "Cosine" else {"rel": 1e-5, "abs": 1e-12}
            assert float(row[column]) == pytest.approx(ours, **tolerance), (name, column)
            agreed += 1
    assert agreed > 80


@pytest.mark.slow
def test_we_compare_its_dumps_row_for_row_and_name_what_was_changed(compared):
    mine, golden, table = compared
    found = compare(mine, golden)
    rows = {Path(row.golden.path).stem: row for row in found.rows if row.golden and row.golden.path}
    assert set(rows) == {row["NPU Name"] for row in table}
    for row in table:
        differs = float(row["MaxAbsErr"]) > 0
        assert (rows[row["NPU Name"]].status != "identical") == differs, row["NPU Name"]
    assert found.exit_code == 1

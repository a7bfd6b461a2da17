"""A cluster that is elsewhere: a process with another folder and search path does the runs."""

from __future__ import annotations

import contextlib
import copyreg
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from click.testing import CliRunner

from paritas.app.cli import main
from paritas.core.errors import ClusterLostError
from paritas.core.execution.executors import executor_of, run_batches
from paritas.sweeping.rows import SweepReport
from paritas.sweeping.sweep import sweep

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="elsewhere each run is a new interpreter"),
]
CLUSTER = """
import dask
from distributed import LocalCluster

options = {"n_workers": 1, "threads_per_worker": 2, "processes": False, "protocol": "tcp"}
with dask.config.set({"distributed.worker.daemon": False}):
    made = LocalCluster(**options, host="127.0.0.1", dashboard_address=None)
print(made.scheduler_address, flush=True)
input()
"""
OWN = "import torch\n\n\ndef net():\n    return torch.nn.Linear(3, 3), [torch.ones(2, 3)]\n"
MINE = "import shapes\nimport torch\n\n\ndef net():\n    return torch.nn.Tanh(), [shapes.x()]\n"
SHAPES = "import torch\n\n\ndef x():\n    return torch.ones(2, 4)\n"


@pytest.fixture
def distributed():
    """Dask's package. To import it changes how every exception is pickled, for other tests too."""
    before = dict(copyreg.dispatch_table)
    yield pytest.importorskip("distributed", reason="distributed is not installed")
    copyreg.dispatch_table.clear()
    copyreg.dispatch_table.update(before)


@pytest.fixture
def cluster(tmp_path, distributed):
    """Scheduler and worker in one process, which has a module that nobody else has."""
    home = tmp_path / "worker"
    (home / "own").mkdir(parents=True)
    (home / "own" / "theirs.py").write_text(OWN)
    import paritas

    paths = [str(Path(paritas.__file__).parents[1]), str(home / "own")]
    process = subprocess.Popen(
        [sys.executable, "-c", CLUSTER],
        cwd=home,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with process:
        process.address = process.stdout.readline().strip().replace("tcp://", "dask://")
        yield process
        process.kill()


def children(process):
    with contextlib.suppress(OSError):
        found = Path(f"/proc/{process.pid}/task").glob("*/children")
        return [child for one in found for child in one.read_text().split()]
    return []


def test_code_travels_or_is_found_there_by_name_and_nothing_is_left(tmp_path, monkeypatch, cluster):
    project = tmp_path / "project"
    project.mkdir()
    (project / "mine.py").write_text(MINE)
    (project / "shapes.py").write_text(SHAPES)
    monkeypatch.chdir(project)
    hidden = []

    def hide(_):  # from the first report of progress on, as if it were on another machine
        if not hidden:
            hidden.append(project.rename(tmp_path / "hidden"))

    rows = [{"names": ["mine:net", "theirs:net"], "candidates": "eager", "modes": "eval-forward"}]
    report = sweep(rows, output=tmp_path / "out", executor=cluster.address, on_progress=hide)
    assert [(row.run.target, row.status.value) for row in report.rows] == [
        ("mine:net", "identical"),
        ("theirs:net", "identical"),
    ], [row.worst for row in report.rows]
    assert children(cluster) == []


def test_work_ends_with_an_error_if_the_scheduler_dies(cluster):
    with executor_of(cluster.address) as (pool, _):
        work = run_batches(pool, time.sleep, [0.01, 600], ahead=2, ordered=False)
        assert next(work) == (0.01, None)
        cluster.send_signal(signal.SIGKILL)
        with pytest.raises(ClusterLostError, match="connection to the scheduler is lost"):
            next(work)


def test_a_sweep_whose_cluster_is_lost_exits_with_3_and_goes_on_later(tmp_path, monkeypatch):
    from paritas.sweeping import processes
    from paritas.sweeping import sweep as module

    monkeypatch.chdir(tmp_path)
    Path("targets.toml").write_text('[[target]]\nnames = ["a:b", "a:c"]\n')

    def lost_after_one(_, __, orders, **___):
        order = next(orders)
        yield order, processes.row_without_run(order.task, "it was slow", "")
        raise ClusterLostError("the cluster is gone")

    monkeypatch.setattr(module, "run_batches", lost_after_one)
    first = CliRunner().invoke(main, ["sweep", "targets.toml", "--output", "out"])
    assert first.exit_code == 3, first.output
    assert "note: the cluster is gone" in first.output
    assert "unverified: stopped (cluster lost) after 1 of 2 runs" in first.output
    second = CliRunner().invoke(main, ["sweep", "targets.toml", "--output", "out"])
    assert second.exit_code == 3, second.output
    report = SweepReport.from_json(Path("out/sweep.json").read_bytes())
    assert [row.run.target for row in report.rows] == ["a:b", "a:c"]

"""A real cluster of dask, on this machine, does the work of a comparison."""

from __future__ import annotations

import copyreg

import pytest
import torch

import processes
from paritas.comparison.compare import compare, open_reusable
from paritas.core.errors import UsageError
from paritas.core.execution import executors
from paritas.core.execution.executors import Failed, executor_of, run_batches
from unit.comparison.dying import die_at_three
from unit.formats.files.entries import write_dump

pytestmark = pytest.mark.slow


def address_of(cluster):
    return cluster.scheduler_address.replace("tcp://", "dask://")


@pytest.fixture(scope="module")
def distributed():
    """Dask's package. To import it changes how every exception is pickled, for other tests too."""
    before = dict(copyreg.dispatch_table)
    yield pytest.importorskip("distributed", reason="distributed is not installed")
    copyreg.dispatch_table.clear()
    copyreg.dispatch_table.update(before)


@pytest.fixture(scope="module")
def cluster(distributed):
    """A scheduler in this process, and one worker, a process that is started anew if it dies."""
    options = {
        "distributed.scheduler.allowed-failures": 0,
        # One that has died is not called for half a minute.
        "distributed.comm.timeouts.connect": "4s",
        "distributed.nanny.environ.OMP_NUM_THREADS": 1,
        "distributed.nanny.pre-spawn-environ.OMP_NUM_THREADS": 1,
        "distributed.worker.multiprocessing-method": processes.context().get_start_method(),
    }
    dask = pytest.importorskip("dask")
    with (
        dask.config.set(options),
        distributed.LocalCluster(
            n_workers=1, threads_per_worker=2, processes=True, dashboard_address=":0"
        ) as made,
    ):
        yield made


def test_a_cluster_finds_what_threads_find(tmp_path, cluster):
    generator = torch.Generator().manual_seed(0)
    golden = [torch.randn(16, generator=generator) for _ in range(300)]
    mine = [*golden[:7], golden[7] + 1, *golden[8:]]
    write_dump(tmp_path / "my", mine)
    write_dump(tmp_path / "golden", golden)
    paths = (tmp_path / "my", tmp_path / "golden")
    here, there = (compare(*paths, executor=spec) for spec in ("threads", address_of(cluster)))
    assert there.rows == here.rows
    assert there.first == here.first
    assert there.first.row == 7
    assert there.exit_code == 1


def test_a_batch_that_kills_its_worker_fails_and_the_rest_goes_on(cluster):
    with executor_of(address_of(cluster)) as (pool, workers):
        assert workers == 2
        found = dict(run_batches(pool, die_at_three, range(6), ahead=4))
    failed = found.pop(3)
    assert isinstance(failed, Failed)
    assert failed.error.startswith("KilledWorker: ")
    assert found == {batch: (batch, "1") for batch in (0, 1, 2, 4, 5)}


def test_an_error_of_the_function_comes_back_from_the_cluster(cluster):
    with executor_of(address_of(cluster)) as (pool, _), pytest.raises(ZeroDivisionError):
        list(run_batches(pool, (1).__truediv__, [1, 0], ahead=1))


def test_a_cluster_that_does_not_see_the_dump_says_so(tmp_path, cluster):
    with (
        executor_of(address_of(cluster)) as (pool, _),
        pytest.raises(
            UsageError, match=r"a worker on .* cannot open the dump: .*gone does not exist"
        ),
    ):
        list(run_batches(pool, open_reusable, [str(tmp_path / "gone")], ahead=1))


def test_a_cluster_without_workers_is_refused(monkeypatch, distributed):
    monkeypatch.setattr(executors, "_DASK_PATIENCE", "1s")
    with (
        distributed.LocalCluster(
            n_workers=0, processes=False, protocol="tcp", dashboard_address=":0"
        ) as made,
        pytest.raises(UsageError, match="the cluster has no workers after 1s"),
        executor_of(address_of(made)),
    ):
        pass


@pytest.mark.parametrize("address", ["localhost:1", "not an address", ""])
def test_a_scheduler_that_does_not_answer_is_refused(monkeypatch, distributed, address):
    monkeypatch.setattr(executors, "_DASK_PATIENCE", "1s")
    with (
        pytest.raises(UsageError, match=r"no dask scheduler answers|add the scheduler's host"),
        executor_of(f"dask://{address}"),
    ):
        pass

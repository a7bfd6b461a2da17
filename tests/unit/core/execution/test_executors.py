"""Batches go to workers a few at a time, and one that dies costs its own batch alone."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
import weakref
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool

import pytest
import torch

from paritas.comparison import compare
from paritas.comparison.compare import open_reusable
from paritas.core.errors import UsageError
from paritas.core.execution import executors
from paritas.core.execution.executors import Failed, executor_of, run_batches, working
from unit.comparison.dying import die_at_three
from unit.formats.files.entries import write_dump


class AtOnce(Executor):
    """Does the work when it is submitted, and keeps count."""

    def __init__(self, deaths=()):
        self.deaths = list(deaths)
        self.futures = []
        self.is_shut_down = False

    def submit(self, fn, /, *args):
        future = Future()
        try:
            if self.deaths and self.deaths.pop(0):
                raise BrokenProcessPool("a worker died")
            future.set_result(fn(*args))
        except Exception as error:  # noqa: BLE001  (as executors do)
            future.set_exception(error)
        self.futures.append(future)
        return future

    def shutdown(self, wait=True, *, cancel_futures=False):
        self.is_shut_down = True


class Never(Executor):
    """Takes work, and does none of it."""

    def __init__(self):
        self.futures = []

    def submit(self, fn, /, *args):
        self.futures.append(Future())
        return self.futures[-1]


def double(batch):
    return 2 * batch


# --- which ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("spec", ["thread", "dask", "dask:/host", "", None])
def test_an_executor_that_is_not_known_is_refused(spec):
    with pytest.raises(UsageError, match=r"use threads, processes, dask://host:port, or an"):
        executor_of(spec).__enter__()


def test_no_workers_are_refused():
    with pytest.raises(UsageError, match="jobs=0: the number of jobs must be 1 or more"):
        executor_of("threads", 0).__enter__()


def test_threads_share_the_processors_with_those_of_torch():
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(4)
        with executor_of("threads", 2) as (pool, workers):
            assert workers == 2
            assert pool.submit(torch.get_num_threads).result() == 2
        assert torch.get_num_threads() == 4
    finally:
        torch.set_num_threads(before)


def test_there_are_as_many_threads_as_processors_unless_told():
    with executor_of("threads") as (_, workers):
        assert workers == len(os.sched_getaffinity(0))


def test_an_executor_of_the_users_stays_open():
    own = AtOnce()
    with executor_of(own, 3) as (pool, workers):
        assert pool is own
        assert workers == 3
        assert list(run_batches(pool, double, [1, 2], ahead=2)) == [(1, 2), (2, 4)]
    assert not own.is_shut_down


def test_without_dask_the_message_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "distributed", None)
    with pytest.raises(UsageError, match=r"pip install 'paritas\[dask\]'"):
        executor_of("dask://localhost:8786").__enter__()


# --- in order, a few at a time --------------------------------------------------------------------


def test_results_come_in_the_order_of_the_batches():
    first = threading.Event()

    def late_first(batch):
        if batch == 0:
            assert first.wait(600)
        elif batch == 3:
            first.set()
        return batch

    with ThreadPoolExecutor(4) as pool:
        found = list(run_batches(pool, late_first, range(8), ahead=4))
    assert found == [(batch, batch) for batch in range(8)]


def test_no_more_batches_are_taken_than_may_be_under_way():
    taken = []

    def batches():
        for number in range(10):
            taken.append(number)
            yield number

    results = run_batches(AtOnce(), double, batches(), ahead=3)
    assert taken == []
    assert next(results) == (0, 0)
    assert taken == [0, 1, 2]
    assert next(results) == (1, 2)
    assert taken == [0, 1, 2, 3]


def test_no_batches_give_no_results():
    assert list(run_batches(AtOnce(), double, [], ahead=4)) == []


def test_results_come_as_soon_as_they_are_there_where_order_does_not_matter():
    second_is_done = threading.Event()

    def slow_first(batch):
        assert batch or second_is_done.wait(600)
        return batch

    with ThreadPoolExecutor(2) as pool:
        results = run_batches(pool, slow_first, [0, 1], ahead=2, ordered=False)
        assert next(results) == (1, 1)
        second_is_done.set()
        assert list(results) == [(0, 0)]


# --- what goes wrong ------------------------------------------------------------------------------


def test_an_error_of_the_function_is_raised_and_what_waits_is_cancelled():
    never = Never()
    results = run_batches(never, double, range(10), ahead=3)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(next, results)
        while len(never.futures) < 3:
            pass
        never.futures[0].set_exception(ZeroDivisionError("of the function"))
        with pytest.raises(ZeroDivisionError, match="of the function"):
            waiting.result(10)
    assert [future.cancelled() for future in never.futures] == [False, True, True]


@pytest.mark.parametrize("end", [KeyboardInterrupt, GeneratorExit])
def test_an_interruption_cancels_what_waits(end):
    never = Never()
    results = run_batches(never, double, range(10), ahead=3)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(next, results)
        while len(never.futures) < 3:
            pass
        never.futures[0].set_result("first")
        assert waiting.result(10) == (0, "first")
    with pytest.raises(end):
        results.throw(end())
    assert [future.cancelled() for future in never.futures] == [False, True, True]


def test_a_batch_whose_worker_died_is_tried_once_more():
    own = AtOnce(deaths=[False, True])
    found = list(run_batches(own, double, range(4), ahead=2))
    assert found == [(0, 0), (1, 2), (2, 4), (3, 6)]


def test_a_batch_that_kills_every_worker_fails_and_the_rest_goes_on():
    own = AtOnce(deaths=[False, True, False, True])
    found = list(run_batches(own, double, range(4), ahead=2))
    failed = Failed(1, "BrokenProcessPool: a worker died")
    assert found == [(0, 0), (1, failed), (2, 4), (3, 6)]


def test_memory_that_does_not_suffice_costs_the_batch_alone():
    def large(batch):
        if batch == 1:
            raise MemoryError
        return batch

    found = list(run_batches(AtOnce(), large, range(3), ahead=2))
    assert found == [(0, 0), (1, Failed(1, "MemoryError")), (2, 2)]


def test_a_pool_that_takes_no_more_work_fails_batch_by_batch():
    class Broken(Executor):
        def submit(self, fn, /, *args):
            raise BrokenProcessPool("broken for good")

    found = list(run_batches(Broken(), double, range(2), ahead=2))
    assert [failed.error for _, failed in found] == ["BrokenProcessPool: broken for good"] * 2


def test_a_process_that_dies_costs_its_own_batch_alone():
    with executor_of("processes", 2) as (pool, workers):
        assert workers == 2
        found = dict(run_batches(pool, die_at_three, range(6), ahead=4))
    assert isinstance(found.pop(3), Failed)
    assert found == {batch: (batch, "1") for batch in (0, 1, 2, 4, 5)}


# --- dumps that are open --------------------------------------------------------------------------


@pytest.fixture
def dump_path(tmp_path):
    write_dump(tmp_path / "dump", [torch.arange(4.0)])
    return str(tmp_path / "dump")


@pytest.fixture(autouse=True)
def nothing_kept():
    yield
    compare._kept.clear()


def test_threads_share_the_dump_that_the_comparison_has_open(dump_path):
    dump = open_reusable(dump_path)
    with executor_of("threads", 2) as (pool, _):
        found = dict(run_batches(pool, open_reusable, [dump_path], ahead=1))
    assert found[dump_path] is dump
    with working(""):
        assert open_reusable(dump_path, "paritas") is dump


def test_a_new_comparison_opens_the_dump_anew(dump_path):
    first = open_reusable(dump_path)
    assert open_reusable(dump_path) is not first
    alive = weakref.ref(first)
    del first
    gc.collect()
    assert alive() is None


def test_a_worker_elsewhere_opens_a_dump_once_for_each_comparison(dump_path):
    with working("one"):
        first = open_reusable(dump_path)
        assert open_reusable(dump_path) is first
    with working("two"):
        assert open_reusable(dump_path) is not first


def test_a_worker_elsewhere_keeps_few_dumps(tmp_path):
    paths = []
    for number in range(6):
        write_dump(tmp_path / str(number), [torch.zeros(1)])
        paths.append(str(tmp_path / str(number)))
    with working("one"):
        for path in paths:
            open_reusable(path)
    assert [path for path, _ in compare._kept] == paths[-4:]


def test_a_worker_that_does_not_see_the_dump_says_where_it_is(tmp_path):
    with (
        working("one"),
        pytest.raises(UsageError, match=r"a worker on .* cannot open the dump: .*gone"),
    ):
        open_reusable(str(tmp_path / "gone"))


def test_each_comparison_is_told_from_the_next_by_whoever_lends_the_executor(dump_path):
    own = AtOnce()
    seen = []
    for _ in range(2):
        with executor_of(own) as (pool, _):
            for _ in range(2):
                seen += [
                    found for _, found in run_batches(pool, open_reusable, [dump_path], ahead=1)
                ]
    assert seen[0] is seen[1]
    assert seen[2] is seen[3]
    assert seen[0] is not seen[2]


def test_the_module_that_workers_import_first_leaves_torch_alone():
    program = f"import sys, {executors.__name__}; print('torch' in sys.modules)"
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"

"""The time limit of a judgement reaches into what takes long."""

from __future__ import annotations

import concurrent.futures
import itertools
import signal
import time
from types import SimpleNamespace

import pytest
import torch

from paritas.core import time_limit
from paritas.core.time_limit import OutOfTime, TimeLimit
from paritas.kernels.cases import KernelCase
from paritas.kernels.messages import SideName
from paritas.kernels.references import KernelTask
from paritas.kernels.rows import CaseFamily
from paritas.kernels.sides import Side


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [0.0]
    monkeypatch.setattr(time_limit, "time", SimpleNamespace(monotonic=lambda: now[0]))
    return now


def test_some_of_the_time_is_kept_for_what_comes_later(clock: list[float]) -> None:
    limit = TimeLimit(10)
    clock[0] = 7
    with pytest.raises(OutOfTime), limit.reserving(5):
        limit.require()
    limit.require()
    assert limit.left == 3
    with pytest.raises(OutOfTime):
        limit.require(4)
    limit.begin(spent=2)
    assert limit.left == 8


def long_reference(x: torch.Tensor) -> torch.Tensor:
    for _ in range(100):
        x = torch.sin(x)
    return x


def test_a_lifted_run_of_the_reference_ends_before_its_last_operator(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ticks = itertools.count()
    monkeypatch.setattr(time_limit, "time", SimpleNamespace(monotonic=lambda: next(ticks)))
    limit = TimeLimit(50)
    side = Side(SideName(module="m", name="long_reference"), long_reference, None)
    task = KernelTask(side, lambda: [torch.randn(5)], device="cpu", seed=0, limit=limit)
    run = task.run(KernelCase("other", CaseFamily.VALUES, task.given[0]), gradients=False)
    with pytest.raises(OutOfTime):
        run.evidence.arbiter()
    # The next candidate has time again, and is judged by all that there is.
    limit.seconds = 1e6
    limit.begin()
    assert run.renew().evidence.arbiter() is not None


def test_what_takes_long_is_interrupted_at_the_limit() -> None:
    before = signal.getsignal(signal.SIGALRM)
    with pytest.raises(OutOfTime), TimeLimit(0.05).interrupting():
        time.sleep(60)
    assert signal.getsignal(signal.SIGALRM) is before
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)


def test_a_timer_of_the_program_is_left_alone() -> None:
    # A test runner's own limit, for example.
    signal.setitimer(signal.ITIMER_REAL, 1000)
    try:
        with TimeLimit(0.001).interrupting():
            time.sleep(0.01)
        assert signal.getitimer(signal.ITIMER_REAL)[0] > 900
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def test_a_block_in_another_thread_ends_where_it_asks() -> None:
    def run() -> str:
        limit = TimeLimit(0.01)
        try:
            with limit.interrupting():
                while True:
                    limit.require()
        except OutOfTime:
            return "ended"

    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        assert pool.submit(run).result(60) == "ended"


def test_nothing_begins_after_the_limit() -> None:
    with pytest.raises(OutOfTime), TimeLimit(-1).interrupting():
        raise AssertionError

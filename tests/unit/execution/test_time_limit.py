"""The time limit of a judgement reaches into what takes long."""

from __future__ import annotations

import contextlib
import itertools
import socket
from types import SimpleNamespace

import pytest
import torch

from paritas.execution import time_limit
from paritas.execution.time_limit import OutOfTime, TimeLimit
from paritas.kernels.cases import KernelCase
from paritas.kernels.references import KernelTask
from paritas.kernels.sides import Side, SideName
from paritas.kernels.wire import receive, send
from paritas.results.model_reports import CaseFamily


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
    assert run.renewed().evidence.arbiter() is not None


def test_a_process_that_sends_byte_by_byte_is_out_of_time() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall((1 << 20).to_bytes(8, "little"))
        ours.settimeout(0.05)
        theirs.sendall(b"x")
        with pytest.raises(TimeoutError):
            receive(ours)


def test_a_process_that_reads_nothing_is_out_of_time() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.settimeout(0.05)
        with pytest.raises(TimeoutError), contextlib.closing(theirs):
            send(ours, {"content": b"x" * (1 << 24)})

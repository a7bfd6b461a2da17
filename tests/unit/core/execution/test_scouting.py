"""What might end a process is tried in a copy of it, and this one goes on."""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import os
import signal
import sys
import threading
import time
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from paritas.core.execution import scouting
from paritas.core.execution.scouting import (
    MOST_LOST,
    FatalAttemptError,
    attempt_apart,
    can_scout,
    is_scout,
    run_apart,
)

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="scouts are forked on Linux only")


def read_null() -> None:
    ctypes.string_at(0)


def survivors(*attempts: Callable[[], Any]) -> list[Any]:
    results = []
    for attempt in attempts:
        try:
            results.append(attempt_apart(attempt))
        except FatalAttemptError:
            results.append("fatal")
    return results


def children() -> set[str]:
    """The processes that this one has started and not waited for."""
    found = set()
    for status in Path("/proc").glob("[0-9]*/status"):
        with contextlib.suppress(OSError):  # it has just ended
            if f"\nPPid:\t{os.getpid()}\n" in status.read_text():
                found.add(status.parent.name)
    return found


def test_attempts_that_end_the_process_are_left_out_and_all_others_are_made() -> None:
    report = run_apart(
        lambda: survivors(lambda: 1, read_null, lambda: 3, os.abort, is_scout), seconds=600
    )
    assert report.result == [1, "fatal", 3, "fatal", True]
    assert report.lost == ("Segmentation fault", "Aborted")
    assert not is_scout()


def test_an_attempt_that_has_an_outcome_is_not_made_again_after_the_process_ended() -> None:
    read, write = os.pipe()

    def count() -> None:
        os.write(write, b"x")

    assert run_apart(lambda: survivors(count, os.abort, os.abort), seconds=600).result is not None
    os.close(write)
    assert os.read(read, 100) == b"x"
    os.close(read)


def test_an_attempt_that_raises_is_no_end() -> None:
    def caught() -> str:
        with pytest.raises(ZeroDivisionError):
            attempt_apart(lambda: 1 / 0)
        return "raised"

    assert run_apart(caught, seconds=600) == scouting.Report("raised")


def test_what_hangs_is_ended_and_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scouting, "MOST_SILENT", 2.0)  # the others answer on a busy machine, too
    report = run_apart(
        lambda: survivors(lambda: 1, lambda: threading.Event().wait(), lambda: 3), seconds=600
    )
    assert report == scouting.Report([1, "fatal", 3], ("it hung",))


def test_after_several_ends_no_other_process_is_started() -> None:
    report = run_apart(lambda: survivors(*[os.abort] * (MOST_LOST + 1)), seconds=600)
    assert report.result is None
    assert report.failure == f"the process that tries them ended {MOST_LOST} times (Aborted)"


def test_an_end_outside_of_an_attempt_is_not_tried_twice() -> None:
    report = run_apart(os.abort, seconds=600)
    assert (report.result, report.lost) == (None, ("Aborted",))


def test_an_exception_is_reported() -> None:
    def fail() -> None:
        raise LookupError("nothing here")

    assert run_apart(fail, seconds=600).failure == "LookupError: nothing here"


def test_no_process_is_left_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scouting, "_hangs", False)  # it is put back
    before = children()
    run_apart(lambda: survivors(lambda: 1, os.abort), seconds=600)
    run_apart(lambda: threading.Event().wait(), seconds=0.2)
    assert children() <= before


def test_torch_computes_in_a_thread_and_after_its_own_threads_were_started() -> None:
    big = torch.ones(400, 400)
    assert float((big @ big).sum()) == 400.0**3  # starts the threads of OpenMP
    found: list[Any] = []

    def work() -> None:
        product = run_apart(lambda: attempt_apart(lambda: float((big @ big).sum())), seconds=600)
        found.append(product.result)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found == [400.0**3]


def test_what_the_program_has_not_written_yet_is_written_once_and_the_copy_writes_nothing(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    handled: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _: handled.append(number))

    def end() -> None:
        os.write(1, b"out")
        os.write(2, b"error")
        print("printed", flush=True)  # noqa: T201
        os.kill(os.getpid(), signal.SIGKILL if faulthandler.is_enabled() else signal.SIGTERM)

    try:
        with (tmp_path / "log").open("w", encoding="ascii") as log:
            log.write("once")
            assert run_apart(end, seconds=600).lost == ("Terminated",)
            assert run_apart(lambda: 1, seconds=600).result == 1
    finally:
        signal.signal(signal.SIGTERM, before)
    assert (tmp_path / "log").read_text(encoding="ascii") == "once"
    assert capfd.readouterr() == ("", "")
    assert handled == []


def test_no_warning_of_the_fork_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    fork = os.fork

    def warn() -> int:
        warnings.warn("use of fork() may lead to deadlocks", DeprecationWarning, stacklevel=2)
        return fork()

    monkeypatch.setattr(os, "fork", warn)  # as Python 3.12 does in a process with threads
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert run_apart(lambda: 1, seconds=600).result == 1


def test_a_timer_of_the_program_does_not_end_the_copy() -> None:
    before = signal.signal(signal.SIGALRM, signal.SIG_IGN)
    signal.setitimer(signal.ITIMER_REAL, 0.05)
    try:
        assert run_apart(lambda: attempt_apart(lambda: time.sleep(0.1)), seconds=600).lost == ()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def test_where_no_process_can_be_forked_the_reason_is_reported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse() -> int:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(os, "fork", refuse)
    report = run_apart(lambda: 1, seconds=600)
    assert report.result is None
    assert report.failure.startswith("no process could be forked: BlockingIOError")


def test_accelerators_do_not_survive_a_fork(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scouting, "_hangs", False)  # as after a loaded machine kept one waiting
    assert can_scout([torch.ones(2)])
    assert not can_scout([torch.ones(2), torch.ones(2, device="meta")])
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    assert not can_scout([torch.ones(2)])


def test_after_a_copy_that_hung_at_once_no_other_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scouting, "_hangs", False)
    run_apart(lambda: threading.Event().wait(), seconds=0.2)
    assert not can_scout([torch.ones(2)])

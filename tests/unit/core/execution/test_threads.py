"""Whether another thread ran meanwhile is known from its clock, not guessed."""

from __future__ import annotations

import _thread
import sys
import threading

import pytest

from paritas.core.execution.threads import ThreadTimes
from sleeping import times_when_others_sleep

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads the clocks of threads")


class Worker:
    """A thread that works when it is told to, and sleeps otherwise."""

    def __init__(self):
        self.work, self.done = threading.Event(), threading.Event()
        self.is_over = False
        self.thread = threading.Thread(target=self.run, daemon=True)

    def run(self):
        while True:
            self.work.wait(600)
            self.work.clear()
            if self.is_over:
                return
            self.done.set()

    def step(self):
        self.done.clear()
        self.work.set()
        assert self.done.wait(600)

    def __enter__(self):
        self.thread.start()
        self.step()
        return self

    def __exit__(self, *_):
        self.is_over = True
        self.work.set()
        self.thread.join(600)


def test_a_thread_that_sleeps_has_not_run():
    with Worker():
        times = times_when_others_sleep()
        sum(range(1000))
        assert not times.others_ran()


def test_a_thread_that_woke_up_and_sleeps_again_has_run():
    with Worker() as worker:
        times = times_when_others_sleep()
        worker.step()
        times_when_others_sleep()
        assert times.others_ran()


def test_a_thread_that_has_ended_counts_as_one_that_ran():
    with Worker():
        times = times_when_others_sleep()
    assert times.others_ran()


def test_a_thread_that_python_does_not_list_has_a_clock_too():
    begin, end = threading.Lock(), threading.Lock()
    begin.acquire()
    end.acquire()

    def run():
        begin.release()
        end.acquire()

    _thread.start_new_thread(run, ())
    begin.acquire()
    try:
        assert not times_when_others_sleep().others_ran()
    finally:
        end.release()


def test_a_system_that_does_not_tell_counts_as_if_others_ran():
    assert ThreadTimes(None).others_ran()

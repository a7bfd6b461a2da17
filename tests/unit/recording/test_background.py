"""The queue between the program and the disk."""

from __future__ import annotations

import threading

import pytest

from paritas.recording.pipeline import Background


def test_jobs_are_done_in_order():
    done = []
    queue = Background(done.extend, most_bytes=100)
    for number in range(50):
        queue.submit(number, 1)
    queue.finish()
    assert done == list(range(50))


def test_without_room_the_work_is_done_at_once():
    done = []
    queue = Background(done.extend, most_bytes=0)
    queue.submit("now", 10)
    assert done == ["now"]


def test_what_waits_never_exceeds_the_bound():
    waiting, most = [0], [0]
    lock = threading.Lock()

    def work(sizes):
        with lock:
            waiting[0] -= sum(sizes)

    queue = Background(work, most_bytes=30)
    for size in [10] * 40 + [25] * 10:
        queue.submit(size, size)
        with lock:
            waiting[0] += size
            most[0] = max(most[0], waiting[0])  # less what was done since it was let in
    queue.finish()
    assert 0 < most[0] <= 30


def test_the_program_waits_while_there_is_no_room():
    gate, submitted = threading.Event(), threading.Event()
    queue = Background(lambda _: gate.wait(600), most_bytes=10)
    queue.submit("first", 10)

    def submit():
        queue.submit("second", 10)
        submitted.set()

    thread = threading.Thread(target=submit)
    thread.start()
    assert not submitted.wait(0.05)
    gate.set()
    assert submitted.wait(600)
    thread.join()
    queue.finish()


def test_a_job_larger_than_the_bound_is_done_alone():
    done = []
    queue = Background(done.extend, most_bytes=10)
    queue.submit("small", 5)
    queue.submit("huge", 10_000)
    queue.finish()
    assert done == ["small", "huge"]


@pytest.mark.parametrize("room", [0, 100])
def test_a_failure_reaches_the_program_and_nothing_is_done_after_it(room):
    done = []

    def work(jobs):
        for job in jobs:
            if job == "bad":
                raise OSError("disk full")
            done.append(job)

    queue = Background(work, most_bytes=room)

    def submit_all():
        queue.submit("good", 1)
        queue.submit("bad", 1)
        queue.submit("late", 1)
        queue.finish()

    with pytest.raises(OSError, match="disk full"):
        submit_all()
    assert done == ["good"]
    with pytest.raises(OSError, match="disk full"):
        queue.finish()


def test_a_program_that_waits_for_room_is_freed_by_a_failure():
    gate = threading.Event()

    def work(_):
        gate.wait(600)
        raise OSError("disk full")

    queue = Background(work, most_bytes=10)
    queue.submit("first", 10)
    raised = []

    def submit():
        try:
            queue.submit("second", 10)
        except OSError as error:
            raised.append(error)

    thread = threading.Thread(target=submit)
    thread.start()
    gate.set()
    thread.join(600)
    assert not thread.is_alive()
    assert len(raised) == 1

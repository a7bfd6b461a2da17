"""A server starts workers, and they end with it; a worker keeps to its limits."""

from __future__ import annotations

import os
import signal
import sys
import time
from functools import partial

import msgspec
import pytest

from paritas.core.workers.inside import FAILED, Program
from paritas.core.workers.server import LostServerError, WorkerServer
from paritas.core.workers.worker import Worker, fork_worker

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="forks")


class Word(msgspec.Struct):
    text: str


def prepare(settings, *, forks):
    def work(channel):
        while True:
            match channel.receive(Word).text:
                case "exit":
                    os._exit(3)
                case "allocate":
                    channel.send(Word(str(len(bytearray(1 << 32)))))
                case text:
                    channel.send(Word(text))

    return work


PROGRAM = Program(name=f"{__name__}:{prepare.__name__}")


@pytest.fixture
def server():
    one = WorkerServer(PROGRAM, dict(os.environ), forks=True)
    yield one
    one.stop()


@pytest.fixture
def worker(server):
    one = Worker(partial(server.start, memory=1 << 28))
    yield one
    one.close()


def is_gone(process):
    until = time.monotonic() + 10
    while time.monotonic() < until:
        try:
            os.kill(process, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.01)
    return False


def test_the_end_of_a_worker_is_known_to_who_started_it(worker):
    worker.channel.send(Word("hello"))
    assert worker.channel.receive(Word).text == "hello"
    assert worker.poll() is None
    worker.channel.send(Word("exit"))
    assert worker.wait(10) == 3
    assert worker.process.end.memory > 0


def test_a_worker_does_not_get_more_memory_than_its_limit(worker):
    worker.channel.send(Word("allocate"))
    assert worker.wait(10) == FAILED
    assert worker.read_log().strip().endswith("MemoryError")


def test_a_worker_that_goes_on_is_killed(worker):
    assert worker.wait(0.05) == -signal.SIGKILL


def test_workers_end_with_their_server(server, worker):
    server.stop()
    assert is_gone(worker.process.pid)


def test_workers_die_with_a_server_that_is_killed(server, worker):
    os.kill(server._process.pid, signal.SIGKILL)
    with pytest.raises(LostServerError, match="was killed by SIGKILL"):
        worker.wait(10)
    assert is_gone(worker.process.pid)


def test_forks_of_a_process_do_not_hold_the_channels_of_each_other():
    first, second = fork_worker(PROGRAM), fork_worker(PROGRAM)
    first.channel.forget()  # as if this process had ended; the second must not keep it open
    assert first.wait(10) == 0
    second.channel.close()
    assert second.wait(10) == 0
    first.close()
    second.close()

"""Rows of a long measurement: each is made in a forked process, and a file of them is resumed."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import signal
import sys
import time
import traceback

from paritas.core.errors import ParitasError
from paritas.kernels.servers import shared_server

TRIAL_SECONDS = 60


def half(name):
    """Whether rules may be tuned on an item, or it is only measured."""
    return "tuned" if hashlib.sha256(name.encode()).digest()[0] % 2 == 0 else "measured"


def add_row(path, row):
    """Append a row, with one write: other processes append, too."""
    with path.open("ab", buffering=0) as out:
        out.write(json.dumps(row).encode() + b"\n")


def forked(make, seconds):
    """The row that `make` returns, made in a forked process within a time limit."""
    began, (read, write) = time.monotonic(), os.pipe()
    child = os.fork()
    if not child:
        os.close(read)
        os.setsid()
        try:
            with contextlib.redirect_stdout(sys.stderr):
                row = make()
        except ParitasError as error:
            row = {"status": "skipped", "reason": str(error)[:300]}
        except BaseException:  # noqa: BLE001  (it becomes a row)
            row = {"status": "error", "reason": traceback.format_exc()[-1500:]}
        os.write(write, json.dumps(row).encode())
        os._exit(0)
    os.close(write)
    signal.signal(signal.SIGALRM, lambda *_: os.killpg(child, signal.SIGKILL))
    signal.alarm(seconds)
    content = b""
    while part := os.read(read, 1 << 16):
        content += part
    os.close(read)
    _, status = os.waitpid(child, 0)
    signal.alarm(0)
    row = json.loads(content) if content else {"status": "no result", "exit": status}
    return {**row, "seconds": round(time.monotonic() - began, 1)}


def share_out(left, jobs, work):
    """Let forked workers take the items one by one: `work` gets an iterator of them."""
    numbers, write = os.pipe()
    for number in range(len(left)):
        os.write(write, number.to_bytes(4, "big"))
    os.close(write)

    def taken():
        while number := os.read(numbers, 4):
            yield left[int.from_bytes(number, "big")]

    workers = []
    for _ in range(jobs):
        child = os.fork()
        if not child:
            try:
                work(taken())
            except BaseException:  # noqa: BLE001  (the others go on)
                traceback.print_exc()
            finally:
                os._exit(0)
        workers.append(child)
    for child in workers:
        os.waitpid(child, 0)


def usable_server(preload, *, forks=False, trial=None):
    """The server of a worker; if it has threads, `trial` tells whether it can be used."""
    server = shared_server(preload, forks=forks)
    if server.problem and trial is not None:
        server.insists = True
        tried = forked(trial, TRIAL_SECONDS)
        server.insists = tried["status"] in {"identical", "equivalent"}
        print(f"cannot fork: {server.problem}; a trial gives {tried}", file=sys.stderr)
    return server

"""`paritas sweep` in a forked process, whose server of runs is forked as well.

    python -m integration.forked_sweep targets.toml --output out
    python -m integration.forked_sweep script.py

To import torch with its compilers takes each of the two six seconds of a core.
"""

from __future__ import annotations

import json
import os
import runpy
import socket
import subprocess
import sys
import threading
import types

from paritas.app.cli import main
from paritas.core.workers import inside, starting


class ForkedServer:
    """As `subprocess.Popen`, as far as it is used; waits to be told what it is to be."""

    def __init__(self) -> None:
        self._lock, self.returncode = threading.Lock(), None
        self._orders, theirs = socket.socketpair()
        self.pid = os.fork()
        if self.pid == 0:
            os.setsid()
            self._orders.close()
            self._serve(theirs)
        theirs.close()

    def __call__(self, command, *, env, cwd, pass_fds, stdout, **_):
        told = json.dumps([command[-2], env, cwd]) + "\n"
        socket.send_fds(self._orders, [told.encode()], [*pass_fds, stdout])
        self._orders.close()
        return self

    def poll(self):
        """Several threads may ask."""
        with self._lock:
            if self.returncode is None:
                process, status = os.waitpid(self.pid, os.WNOHANG)
                self.returncode = os.waitstatus_to_exitcode(status) if process else None
        return self.returncode

    def _serve(self, orders):
        told, (channel, log), *_ = socket.recv_fds(orders, 1 << 20, 2)
        while not told.endswith(b"\n"):
            more = orders.recv(1 << 20)
            if not more:
                os._exit(0)
            told += more
        start, environment, folder = json.loads(told)
        orders.close()
        for target in (1, 2):
            os.dup2(log, target)
        os.environ.update(environment)
        os.chdir(folder)
        sys.path[:0] = environment["PYTHONPATH"].split(os.pathsep)
        sys.argv = ["-c", start, str(channel)]
        inside.begin()


if __name__ == "__main__":
    forked = types.SimpleNamespace(**{**vars(subprocess), "Popen": ForkedServer()})
    starting.subprocess = forked
    if sys.argv[1].endswith(".py"):
        runpy.run_path(sys.argv[1], run_name="__main__")
    else:
        main(["sweep", *sys.argv[1:]])

"""`paritas sweep` in a forked process, whose server of runs is forked as well.

    python -m integration.forked_sweep targets.toml --output out
    python -m integration.forked_sweep script.py

To import torch with its compilers takes each of the two six seconds of a core.
"""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
import threading
import types

from paritas.app.cli import main
from paritas.sweeping import processes


class ForkedServer:
    """As `subprocess.Popen`, as far as it is used; waits to be told what it is to be."""

    def __init__(self) -> None:
        self._lock, self.returncode = threading.Lock(), None
        (mine, self._write), (self._read, theirs) = os.pipe(), os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            os.setsid()
            os.dup2(mine, 0)
            os.dup2(theirs, 1)
            for end in (mine, theirs, self._write, self._read):
                os.close(end)
            self._serve()
        os.close(mine)
        os.close(theirs)
        self.stdin, self.stdout = os.fdopen(self._write, "wb"), os.fdopen(self._read, "rb")

    def __call__(self, command, *, env, cwd, **_):
        assert command[:2] == [sys.executable, "-c"]
        told = json.dumps([command[2:], env, cwd]) + "\n"
        self.stdin.write(told.encode())
        self.stdin.flush()
        return self

    def wait(self, timeout=None):
        """Several threads may wait; it is told to end before."""
        with self._lock:
            if self.returncode is None:
                self.returncode = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return self.returncode

    def kill(self):
        """It has ended: it was waited for."""

    def _serve(self):
        line = b""
        while not line.endswith(b"\n"):  # what follows is for the server
            byte = os.read(0, 1)
            if not byte:
                os._exit(0)
            line += byte
        (_, place), environment, folder = json.loads(line)
        os.environ.update(environment)
        os.chdir(folder)
        sys.path[:0] = environment["PYTHONPATH"].split(os.pathsep)
        sys.argv = ["-c", place]
        processes.serve()


if __name__ == "__main__":
    forked = types.SimpleNamespace(**{**vars(subprocess), "Popen": ForkedServer()})
    processes.subprocess = forked
    if sys.argv[1].endswith(".py"):
        runpy.run_path(sys.argv[1], run_name="__main__")
    else:
        main(["sweep", *sys.argv[1:]])

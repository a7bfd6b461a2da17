"""Commands run to their end, with what they took of the processors and of memory."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import msgspec
from benchmarks.lab.figures import Figure

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence


class Cost(NamedTuple):
    """What a command took: seconds, and bytes at most.

    Pages of mapped files are told apart: they are the system's cache, which takes them back.
    """

    wall: float
    processor: float
    own: int
    mapped: int


def run(command: Sequence[str], folder: Path, allowed: Collection[int] = (0,)) -> Cost:
    """Run a command to its end, looking at its memory now and then.

    Raises:
        RuntimeError: it ended with another exit code than the allowed ones.
    """
    log = folder / "log.txt"
    began = time.perf_counter()
    with log.open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out, cwd=folder)
        own = mapped = 0
        while True:
            status = _status(process.pid)
            own, mapped = max(own, status.get("RssAnon", 0)), max(mapped, status.get("RssFile", 0))
            done, code, used = os.wait4(process.pid, os.WNOHANG)
            if done:
                break
            time.sleep(0.01)
    wall = time.perf_counter() - began
    process.returncode = os.waitstatus_to_exitcode(code)
    if process.returncode not in allowed:
        raise RuntimeError(f"{command} ended with {process.returncode}\n{log.read_text()[-3000:]}")
    return Cost(wall, used.ru_utime + used.ru_stime, own, mapped)


def _status(pid: int) -> dict[str, int]:
    """Bytes by their names in the system's own account."""
    try:
        text = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return {}
    return {name: int(size) * 1024 for name, size in re.findall(r"(\w+):\s+(\d+) kB", text)}


def part(module: str, *words: str, **settings: str) -> list[Figure]:
    """The figures of a part of a script that needs a process of its own; it ends in `hand_over`."""
    command = [sys.executable, "-m", module, *words]
    environment = {**os.environ, **settings}
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return msgspec.json.decode(done.stdout.splitlines()[-1], type=list[Figure])


def hand_over(figures: list[Figure]) -> None:
    """Give figures to the process that asked for this part."""
    print(msgspec.json.encode(figures).decode())

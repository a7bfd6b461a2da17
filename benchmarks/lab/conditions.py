"""The machine, the versions and the weather of a measurement; no name of a host, no path.

The clock of a run starts when this module is imported, which a script does before it measures.
"""

from __future__ import annotations

import datetime as dt
import os
import platform
import re
import resource
import subprocess
import time
from importlib import metadata
from pathlib import Path

import msgspec

# Of all cores together, how much others may take of the machine while it is called quiet.
QUIET_CORES = 0.15


class Machine(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where it was measured."""

    processor: str
    cores: int
    memory_gib: float
    accelerator: str = ""


class Conditions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Machine, versions, date, and whether something else was going on.

    `others_cores` is how many cores other programs kept busy on average during the run; NaN or None
    where the system does not tell, and then nothing is called quiet.
    """

    machine: Machine
    versions: dict[str, str]
    date: str
    revision: str
    load_at_start: float | None
    others_cores: float | None
    seconds: float
    threads: int
    quiet: bool


def conditions() -> Conditions:
    """Those of the run so far."""
    seconds = time.monotonic() - _BEGAN
    others = _others_cores(seconds)
    return Conditions(
        machine=_machine(),
        versions=_versions(),
        date=dt.datetime.now(tz=dt.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        revision=_revision(),
        load_at_start=round(_LOAD, 2),
        others_cores=None if others is None else round(others, 2),
        seconds=round(seconds, 1),
        threads=_threads(),
        quiet=others is not None and others < QUIET_CORES,
    )


def _busy_seconds() -> float | None:
    """Seconds that all cores together were not idle, since the system started."""
    try:
        fields = Path("/proc/stat").read_text().splitlines()[0].split()[1:]
    except OSError:
        return None
    user, nice, system, _idle, _wait, irq, softirq, *_ = map(int, fields)
    return (user + nice + system + irq + softirq) / os.sysconf("SC_CLK_TCK")


def _own_seconds() -> float:
    """Processor seconds of this process and of the children it waited for."""
    spent = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in spent)


def _others_cores(seconds: float) -> float | None:
    now = _busy_seconds()
    if now is None or _BUSY is None or seconds <= 0:
        return None
    return max(0.0, (now - _BUSY - (_own_seconds() - _OWN)) / seconds)


def _machine() -> Machine:
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return Machine(
        processor=_processor(),
        cores=len(os.sched_getaffinity(0))
        if hasattr(os, "sched_getaffinity")
        else os.cpu_count() or 1,
        memory_gib=round(memory, 1),
        accelerator=_accelerator(),
    )


def _processor() -> str:
    try:
        found = re.search(r"model name\s*:\s*(.+)", Path("/proc/cpuinfo").read_text())
    except OSError:
        found = None
    return f"{found[1]}, {platform.machine()}" if found else platform.machine()


def _accelerator() -> str:
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else ""


def _threads() -> int:
    import torch

    return torch.get_num_threads()


def _versions() -> dict[str, str]:
    packages = ("torch", "paritas", "numpy")
    return {"python": platform.python_version()} | {
        name: metadata.version(name) for name in packages
    }


def _revision() -> str:
    """The commit, and whether the code differed from it."""
    try:
        found = _git("rev-parse", "--short=10", "HEAD")
        changed = _git("status", "--porcelain", "--", "src", "benchmarks", ":!benchmarks/results")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return f"{found} with changes" if changed else found


def _git(*words: str) -> str:
    done = subprocess.run(
        ["git", *words],  # noqa: S607  (git is where the user has it)
        cwd=Path(__file__).parent.parent.parent,
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.strip()


_BEGAN = time.monotonic()
_LOAD = os.getloadavg()[0]
_BUSY = _busy_seconds()
_OWN = _own_seconds()

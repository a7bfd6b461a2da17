"""Tries the faults of a half, each in a forked process with limits; one JSON line each."""

from __future__ import annotations

import collections
import contextlib
import faulthandler
import fcntl
import importlib
import json
import os
import resource
import signal
import sys
import time
import traceback
from typing import TYPE_CHECKING, Any

from benchmarks.places import plain
from benchmarks.places.claims import Claims
from benchmarks.places.models import models_of
from benchmarks.places.planting import Subject
from benchmarks.places.table import COUNTED
from benchmarks.places.trying import try_unit

if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Iterator
    from pathlib import Path

KEY = ("half", "what", "model", "source", "number")
# In turn, model by model; what a model has no source for is left out.
SCHEDULE = {
    "verify": ("pass captured place", "module", "pass lowered place", "code captured",
               "exported graph", "pass captured first", "code lowered", "module", "source",
               "pass lowered first", "kernel"),
    "guard": ("pass captured place", "pass lowered place", "code captured", "pass captured place",
              "pass lowered place", "pass captured first", "pass lowered place", "code lowered",
              "pass captured place", "pass lowered first", "kernel", "pass captured every"),
    "shrink": ("pass captured first", "pass lowered first", "pass captured every",
               "pass captured first"),
}  # fmt: skip
SCHEDULE["search"] = SCHEDULE["shrink"]
SCHEDULE["plant"] = tuple(dict.fromkeys(SCHEDULE["verify"] + SCHEDULE["guard"]))
ON_GPU = {"verify": ("kernel", "triton kernel"), "guard": ("kernel",)}
# Only plain models: their source is here, and Inductor compiles them in seconds.
FOR_PLAIN = {"source", "kernel"}
GIGABYTES = 24


def plan(asked: Namespace) -> tuple[list[str], list[str]]:
    """The models, and the sources in turn."""
    names = [name for name in models_of(asked.half) if asked.models in (None, [])
             or name in asked.models]  # fmt: skip
    if not _has_transformers():
        names = [name for name in names if name in plain.MODELS]
    planned = SCHEDULE[asked.what] if asked.device == "cpu" else ON_GPU[asked.what]
    schedule = [one for one in planned if not asked.sources or one in asked.sources]
    return names, schedule


def has_source(model: str, source: str) -> bool:
    """Whether a source has faults for a model."""
    return source not in FOR_PLAIN or model in plain.MODELS


def units(asked: Namespace) -> Iterator[dict[str, Any]]:
    """The faults to try, without end."""
    names, schedule = plan(asked)
    numbers: collections.Counter[tuple[str, str]] = collections.Counter()
    for turn in range(200):
        for place, model in enumerate(names):
            source = schedule[(turn + place) % len(schedule)]
            if not has_source(model, source):
                continue
            number = numbers[model, source]
            numbers[model, source] += 1
            yield {"half": asked.half, "what": asked.what, "model": model, "source": source,
                   "number": number}  # fmt: skip


def _has_transformers() -> bool:
    try:
        importlib.import_module("transformers.models.bert.modeling_bert")
    except ImportError:
        return False
    return True


def key(row: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(row[name] for name in KEY)


def run(asked: Namespace, rows: list[dict[str, Any]]) -> None:
    """Try faults until enough of them count."""
    known = {key(row) for row in rows}
    mine = [row for row in rows if (row["half"], row["what"]) == (asked.half, asked.what)]
    counted = sum(row["outcome"] in COUNTED for row in mine)
    left = (unit for unit in units(asked) if key(unit) not in known)
    # A model and a source without further faults are not asked again.
    ended = {(row["model"], row["source"]) for row in mine if row["outcome"] == "no fault fits"}
    importlib.import_module("torch._dynamo")
    deadline = time.monotonic() + 60 * asked.minutes
    claims = Claims(asked.half, (row["fault"] for row in mine if "fault" in row))
    running: dict[int, tuple[dict[str, Any], float]] = {}
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    try:
        _try_all(asked, left, counted, ended, running, deadline, claims)
    finally:  # also if this process is stopped: they are in sessions of their own
        for child in running:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child, signal.SIGKILL)


def _try_all(
    asked: Namespace,
    left: Iterator[dict[str, Any]],
    counted: int,
    ended: set[tuple[str, str]],
    running: dict[int, tuple[dict[str, Any], float]],
    deadline: float,
    claims: Claims,
) -> None:
    names, schedule = plan(asked)
    pairs = {(model, source) for model in names for source in schedule if has_source(model, source)}
    while True:
        while len(running) < asked.jobs and counted + len(running) < asked.number:
            unit = next(left, None)
            if unit is None or time.monotonic() > deadline:
                break
            if ended >= pairs:
                claims.begin_round()
                ended.clear()
            if (unit["model"], unit["source"]) in ended:
                continue
            running[_start(unit, asked, claims)] = unit, time.monotonic() + asked.seconds
        if not running:
            return
        for row in _ended(running, asked.out):
            counted += row["outcome"] in COUNTED
            if row["outcome"] == "no fault fits":
                ended.add((row["model"], row["source"]))
            told = [row.get(name) for name in (*KEY[2:], "fault", "outcome", "kind")]
            print(counted, *told, f"{row['wall']:.1f} s", file=sys.stderr, flush=True)


def _start(unit: dict[str, Any], asked: Namespace, claims: Claims) -> int:
    """Try a fault in a fork of this process."""
    child = os.fork()
    if child:
        return child
    os.setsid()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    code = 1
    try:
        if asked.device == "cpu":  # CUDA reserves more addresses than there is memory
            resource.setrlimit(resource.RLIMIT_AS, (GIGABYTES << 30, GIGABYTES << 30))
        log = os.open(os.devnull, os.O_WRONLY)
        os.dup2(log, 1)
        os.dup2(log, 2)
        began = time.monotonic()
        last_words = _last_words(asked.out, os.getpid())
        file = last_words.open("w")  # as long as this process
        faulthandler.enable(file)
        try:
            subject = Subject(unit["model"], unit["half"], claims)
            row = try_unit(subject, unit["what"], unit["source"], 0, asked.shrink_seconds,
                           lambda fault: print(fault, file=file, flush=True))  # fmt: skip
        except Exception as error:  # noqa: BLE001  (a fault that cannot be tried is a row)
            row = {"outcome": "error", "reason": f"{type(error).__name__}: {error!s:.300}",
                   "trace": traceback.format_exc()[-1500:]}  # fmt: skip
        write(asked.out, {**unit, **row, "wall": time.monotonic() - began})
        last_words.unlink()
        code = 0
    finally:
        os._exit(code)


def _ended(running: dict[int, tuple[dict[str, Any], float]], out: Path) -> list[dict[str, Any]]:
    """Wait for some to end; the rows that they wrote, or one that says why there is none."""
    done: list[int] = []
    died: dict[int, str] = {}
    while not done:
        for child, (_, deadline) in running.items():
            ended, status = os.waitpid(child, os.WNOHANG)
            if ended:
                done.append(child)
                if status:
                    died[child] = f"status {status}"
            elif time.monotonic() > deadline:
                os.killpg(child, signal.SIGKILL)
                os.waitpid(child, 0)
                done.append(child)
                died[child] = "out of time"
        if not done:
            time.sleep(0.05)
    found = []
    for child in done:
        unit, _ = running.pop(child)
        if child in died:
            outcome = "out of time" if died[child] == "out of time" else "died"
            row = {"outcome": outcome, "reason": died[child], "wall": 0.0}
            write(out, {**unit, **_read_last_words(_last_words(out, child)), **row})
        lines = out.read_text().splitlines()
        rows = (json.loads(line) for line in reversed(lines))
        found.append(next(row for row in rows if key(row) == key(unit)))
    return found


def _last_words(out: Path, child: int) -> Path:
    """The file in which a process says which fault it tries, and where it dies."""
    return out.with_name(f"{out.name}.{child}")


def _read_last_words(path: Path) -> dict[str, str]:
    """The fault that a process was trying, and the stack of one that died."""
    if not path.exists():
        return {}
    fault, _, trace = path.read_text().partition("\n")
    path.unlink()
    return {"trace": trace[-1500:]} | ({"fault": fault} if fault else {})


def write(out: Path, row: dict[str, Any]) -> None:
    """Add a line, as one of several processes."""
    with out.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.write(json.dumps(row, default=str) + "\n")

"""How much memory a call held at most: by torch's allocator, by Python's, or by the system."""

from __future__ import annotations

import ctypes
import gc
import json
import os
import re
import tempfile
import threading
import tracemalloc
from pathlib import Path
from typing import TYPE_CHECKING

from torch.profiler import ProfilerActivity, profile

if TYPE_CHECKING:
    from collections.abc import Callable

# The profiler talks to the terminal about itself, unless told before its first use.
os.environ.setdefault("KINETO_LOG_LEVEL", "99")
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")


def peak_bytes(function: Callable[[], object], *, warm: int = 2, times: int = 3) -> int:
    """The most that a call held at once on top of what was there before it, of several calls."""
    for _ in range(warm):
        function()
    return max(_peak_of_one(function) for _ in range(times))


def _peak_of_one(function: Callable[[], object]) -> int:
    """The largest running sum of the allocations that torch's profiler notes."""
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder, "trace.json")
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
            function()
        record.export_chrome_trace(str(trace))
        events = json.loads(trace.read_text())["traceEvents"]
    changes = [event for event in events if event.get("name") == "[memory]"]
    held = peak = 0
    for event in sorted(changes, key=lambda event: event["ts"]):
        held += event["args"]["Bytes"]
        peak = max(peak, held)
    return peak


def python_peak(function: Callable[[], object]) -> int:
    """The most that Python's own objects took on top of what was there before, second call."""
    function()
    gc.collect()
    tracemalloc.start()
    try:
        function()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def resident_peak(
    function: Callable[[], object], pause: float = 0.002, *, warm: bool = True
) -> int:
    """The most memory of the process's own, not of mapped files, on top of what was there before.

    For what allocates in several threads or outside torch; looked at every few milliseconds. With
    `warm`, it is the second call that is measured.
    """
    if warm:
        function()
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    before = peak = resident()
    ended = threading.Event()

    def watch() -> None:
        nonlocal peak
        while not ended.wait(pause):
            peak = max(peak, resident())

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        function()
    finally:
        ended.set()
        watcher.join()
    return peak - before


def resident() -> int:
    """Bytes of this process that no file stands behind, by Linux's account."""
    found = re.search(r"RssAnon:\s+(\d+) kB", Path("/proc/self/status").read_text())
    if found is None:
        raise RuntimeError("/proc/self/status has no RssAnon: memory is measured on Linux alone")
    return int(found[1]) * 1024

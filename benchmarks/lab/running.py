"""`make bench`: every script, one after another, whatever becomes of the one before.

    python -m benchmarks.lab.running [NAME ...]

Ends with what failed, what bars were missed and how long each took; the exit code is 1 if a script
failed. A missed bar is a result, not a failure: it stands in the file and on the page.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

from benchmarks.lab.figures import read
from benchmarks.lab.page import main as write_page

ROOT = Path(__file__).parents[2]
# The wholes take twenty minutes and an hour, and a share must not take its file's place.
SHARES = (
    {"detection_compiled": ["--seconds=3600"]}
    if os.environ.get("BENCH_WHOLE") == "1"
    else {
        "detection": ["--share=0.05", "--no-file"],
        "detection_compiled": ["--no-file", "--journal=.cache/detection/compiled_share.jsonl"],
    }
)


def scripts() -> dict[str, str]:
    """Modules by the names that people call them by."""
    found = {
        path.stem.removeprefix("bench_"): f"benchmarks.{path.stem}"
        for path in sorted((ROOT / "benchmarks").glob("bench_*.py"))
    }
    # A folder of scripts; last, since they take longest.
    if (ROOT / "benchmarks" / "detection" / "__main__.py").exists():
        found["detection"] = "benchmarks.detection"
        found["detection_compiled"] = "benchmarks.detection.compiled"
    return found


def main() -> int:
    """Run what was asked for, or everything."""
    known = scripts()
    asked = sys.argv[1:] or list(known)
    if unknown := [name for name in asked if name not in known]:
        print(f"no such benchmark: {', '.join(unknown)}; there are {', '.join(known)}")
        return 2
    codes, seconds = {}, {}
    for name in asked:
        print(f"== {name}", flush=True)
        began = time.monotonic()
        command = [sys.executable, "-m", known[name], *SHARES.get(name, [])]
        codes[name] = subprocess.run(command, cwd=ROOT, check=False).returncode
        seconds[name] = time.monotonic() - began
    write_page()
    for report in read():
        missed = [figure.name for figure in report.figures if figure.met is False]
        if report.script in asked and missed:
            print(f"{report.script}: below its bar: {'; '.join(missed)}")
    print(", ".join(f"{name} {took:.0f} s" for name, took in seconds.items()))
    failed = [f"{name} (exit code {code})" for name, code in codes.items() if code]
    if failed:
        told = f"{len(failed)} of {len(asked)} failed and left their files as they were"
        print(f"{told}: {', '.join(failed)}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

"""Plant faults, ask paritas where they start and what they are, and count the answers.

    python -m benchmarks.places OUT.jsonl --half building --what guard --number 400 --jobs 13
    python -m benchmarks.places OUT.jsonl --summary

Each fault is tried in a process of its own, forked from this one. What OUT has already is not tried
again, and counts. Without transformers, only the plain models are used.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

# Before torch is imported: a process with a GPU cannot be forked, and each has one processor.
os.environ["CUDA_VISIBLE_DEVICES"] = ""
os.environ.update(
    OMP_NUM_THREADS="1", TORCHINDUCTOR_COMPILE_THREADS="1", TORCHINDUCTOR_FORCE_DISABLE_CACHES="1"
)
ROOT = str(Path(__file__).parents[2])
# Scripts import the faulty backend by its name.
os.environ["PYTHONPATH"] = os.pathsep.join([ROOT, os.environ.get("PYTHONPATH", "")])


def main() -> int:
    parser = argparse.ArgumentParser(prog="benchmarks.places", description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--half", choices=["building", "measured"])
    parser.add_argument("--what", choices=["verify", "guard", "shrink"])
    parser.add_argument("--number", type=int, default=200, help="faults that count")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=120.0, help="limit of one fault")
    parser.add_argument("--shrink-seconds", type=float, default=25.0)
    parser.add_argument("--minutes", type=float, default=60.0, help="limit of all")
    parser.add_argument("--models", nargs="+", help="only these")
    parser.add_argument("--sources", nargs="+", help="only these")
    parser.add_argument("--summary", action="store_true")
    parser.add_argument("--show", action="store_true", help="with each wrong answer")
    asked = parser.parse_args()
    from benchmarks.places import table

    rows = table.read(asked.out)
    if not asked.summary:
        if not asked.half or not asked.what:
            parser.error("--half and --what, or --summary")
        from benchmarks.places.running import run

        run(asked, rows)
        rows = table.read(asked.out)
    wanted = [row for row in rows if asked.half in {None, row["half"]}]
    wanted = [row for row in wanted if asked.what in {None, row["what"]}]
    table.show(wanted, details=asked.show)
    return 0


if __name__ == "__main__":
    began = time.monotonic()
    code = main()
    print(f"{time.monotonic() - began:.0f} s")
    sys.exit(code)

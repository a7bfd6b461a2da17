"""Plant faults, ask paritas where they start and what they are, and count the answers.

    python -m benchmarks.places OUT.jsonl --half building --what guard --number 400 --jobs 13
    python -m benchmarks.places OUT.jsonl --summary
    python -m benchmarks.places GPU.jsonl --half building --what verify --number 16 --device cuda

Each fault is tried in a process of its own, forked from this one. What OUT has already is not tried
again, and counts. Without transformers, only the plain models are used.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path

# Before torch is imported: autograd of a process that sees a GPU cannot be used after a fork, and
# each process has one processor.
if "cuda" not in sys.argv:
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
os.environ.update(
    OMP_NUM_THREADS="1", TORCHINDUCTOR_COMPILE_THREADS="1", TORCHINDUCTOR_FORCE_DISABLE_CACHES="1"
)
WHAT = """Faults planted in small models by a compiler pass, in an uncompiled copy, in generated
code and in kernels: where `verify` and `guard` say that they start, which kind they state, and what
`shrink` makes of them. Models and kinds of faults are those that were not used for building."""
ROOT = str(Path(__file__).parents[2])
# Scripts import the faulty backend by its name.
os.environ["PYTHONPATH"] = os.pathsep.join([ROOT, os.environ.get("PYTHONPATH", "")])


def main() -> int:
    parser = argparse.ArgumentParser(prog="benchmarks.places", description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--half", choices=["building", "measured"])
    parser.add_argument(
        "--what",
        choices=["verify", "guard", "shrink", "search", "plant"],
        help="search: shrink without a place; plant: only look whether the faults change results",
    )
    parser.add_argument("--number", type=int, default=200, help="faults that count")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=120.0, help="limit of one fault")
    parser.add_argument("--shrink-seconds", type=float, default=25.0)
    parser.add_argument("--minutes", type=float, default=60.0, help="limit of all")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu",
                        help="cuda: kernels in Triton, by Inductor and by hand")  # fmt: skip
    parser.add_argument("--models", nargs="+", help="only these")
    parser.add_argument("--sources", nargs="+", help="only these")
    parser.add_argument("--summary", action="store_true")
    parser.add_argument("--show", action="store_true", help="with each wrong answer")
    parser.add_argument("--publish", action="store_true", help="write results/places.json")
    asked = parser.parse_args()
    from benchmarks.lab.figures import Report, write
    from benchmarks.places import table

    rows = table.read(asked.out)
    if asked.publish:
        own = [row for row in rows if row["half"] == "measured"]
        write(Report("places", table.figures(own), what=WHAT))
        return 0
    if not asked.summary:
        if not asked.half or not asked.what:
            parser.error("--half and --what, or --summary")
        if asked.device == "cuda" and not _has_gpu():
            print("no GPU: nothing was tried")
            return 0
        os.environ["PLACES_DEVICE"] = asked.device
        from benchmarks.places.running import run

        run(asked, rows)
        rows = table.read(asked.out)
    wanted = [row for row in rows if asked.half in {None, row["half"]}]
    wanted = [row for row in wanted if asked.what in {None, row["what"]}]
    table.show(wanted, details=asked.show)
    return 0


def _has_gpu() -> bool:
    """Asked of a process of its own: this one must not begin to use it before it forks."""
    code = "import sys, torch; sys.exit(not torch.cuda.is_available())"
    return subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


if __name__ == "__main__":
    began = time.monotonic()
    code = main()
    print(f"{time.monotonic() - began:.0f} s")
    sys.exit(code)

"""Faulty checkpoints: how many causes that `check_engine` names are right, false or misleading.

    python -m benchmarks.zoo.checkpoints known held-out
    python -m benchmarks.zoo.checkpoints "rope theta 2e5" --requests 500 --seconds 300

The faults are in `tests/quality/checkpoint_faults.py`; any part of a name selects some.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
import time
import warnings
from collections import Counter
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = os.environ["TRANSFORMERS_OFFLINE"] = "1"
sys.path.insert(0, str(Path(__file__).parent.parent.parent / "tests"))

import paritas
from quality.checkpoint_faults import HELD_OUT, KNOWN, grade, served

LISTS = {"known": KNOWN, "held-out": HELD_OUT}


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("names", nargs="*", default=list(LISTS), help="lists, or parts of names")
    parser.add_argument("--requests", type=int, help="so many requests, of 9 to 48 tokens")
    parser.add_argument("--seconds", type=float, default=3600.0)
    given = parser.parse_args()
    warnings.filterwarnings("ignore")
    for name in given.names:
        faults = LISTS.get(name) or [one for one in (*KNOWN, *HELD_OUT) if name in one.name]
        grades = Counter()
        for fault in faults:
            if given.requests:
                lengths = tuple(9 + 7 * place % 40 for place in range(given.requests))
                fault = dataclasses.replace(fault, lengths=lengths)  # noqa: PLW2901
            model, records, older = served(fault)
            began, busy = time.monotonic(), time.process_time()
            report = paritas.check_engine(model, records, older=older, seconds=given.seconds)
            took, busy = time.monotonic() - began, time.process_time() - busy
            found = grade(fault, report)
            grades[found] += 1
            causes = "; ".join(one.sentence for one in report.causes) or "no cause"
            status = report.verdict.status.value
            times = f"{took:6.1f} s, {busy:5.1f} s busy"
            print(f"{found:13}{times}  {fault.name}: {status}, {causes}", flush=True)
        print(f"{name}: {dict(grades)}", flush=True)


if __name__ == "__main__":
    main()

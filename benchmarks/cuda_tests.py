"""Run the tests that need a CUDA device, and keep what came of them with the benchmarks.

`python -m benchmarks.cuda_tests`, from the root of the repository; what pytest takes, it takes.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch
from benchmarks.lab.figures import RESULTS, Figure, Report, Table, write


class Outcomes:
    """A plugin that counts how tests end."""

    def __init__(self) -> None:
        """Start with none."""
        self.counts: Counter[str] = Counter()
        self.failed: list[str] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Count a test once: when it ran, or when it could not."""
        if report.when == "call" or report.outcome != "passed":
            self.counts[report.outcome] += 1
            if report.failed:
                self.failed.append(report.nodeid)


def main() -> int:
    """Run them; nothing is written where there is no device, as nothing would have run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=RESULTS)
    asked, others = parser.parse_known_args()
    if not torch.cuda.is_available():
        print("no CUDA device: no test is run, and earlier results are left alone")
        return 0
    found = Outcomes()
    arguments = ["-q", "--tb=short", "-m", "cuda", "-p", "no:cacheprovider", *(others or ["tests"])]
    code = int(pytest.main(arguments, plugins=[found]))
    figures = [
        Figure("passed", found.counts["passed"], "tests", 1, "higher"),
        Figure("failed", found.counts["failed"], "tests", 0),
        Figure("skipped", found.counts["skipped"], "tests"),
    ]
    tables = [Table("Failed", ["test"], [[name] for name in found.failed])] if found.failed else []
    what = f"Tests marked `cuda`, with CUDA {torch.version.cuda}."
    write(Report("cuda_tests", figures, tables, what=what), asked.folder)
    return code


if __name__ == "__main__":
    sys.exit(main())

"""Write what each test found: items with their status, and the kinds of what is wrong.

`PARITAS_VERDICT_LOG=FOLDER python -m pytest -p benchmarks.lab.verdicts` writes a file for each
process; `python -m benchmarks.lab.verdicts BEFORE AFTER` compares two of these folders. After work
that must not change a verdict, it shows which tests see another one.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

LOG = "PARITAS_VERDICT_LOG"
# A path, a number of a process and an address differ from run to run.
PASSING = re.compile(r"0x[0-9a-f]+|/[\w./-]*/(?=[\w.]+)|\b\d{5,}\b")


class VerdictLog:
    """Collects the findings and rows that are made while a test runs."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._current: Counter[str] = Counter()
        self._installed = False

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Any:
        """Write what was found while one test ran."""
        if not self._installed and "paritas.core.results.findings" in sys.modules:
            self._install()
        self._current.clear()
        outcome = yield
        if self._current:
            self._folder.mkdir(parents=True, exist_ok=True)
            line = json.dumps([item.nodeid, dict(sorted(self._current.items()))])
            with (self._folder / f"{os.getpid()}.jsonl").open("a") as log:
                log.write(f"{line}\n")
        return outcome

    def _install(self) -> None:
        """Listen to what is made; msgspec keeps the function it calls, so its code is replaced."""
        from paritas.core.results.findings import Finding

        self._installed = True
        note, original = self._note, Finding.__post_init__
        former = type(original)(original.__code__, original.__globals__)

        def listen(self: Finding) -> None:
            LISTENER(self)  # noqa: F821  (a global of the module whose function it becomes)

        original.__globals__["LISTENER"] = lambda finding: (former(finding), note(finding))
        original.__code__ = listen.__code__

    def _note(self, finding: Any) -> None:
        if finding.status.passes():  # which values are equal to the bit differs with the inputs
            return
        patterns = finding.diagnosis.patterns if finding.diagnosis else ()
        kinds = ",".join(str(pattern.kind) for pattern in patterns)
        text = f"{finding.path} | {finding.aspect} | {finding.status} | {kinds}"
        self._current[PASSING.sub("#", text)] += 1


def pytest_configure(config: pytest.Config) -> None:
    if LOG in os.environ:
        config.pluginmanager.register(VerdictLog(Path(os.environ[LOG])))


def read_log(folder: Path) -> dict[str, dict[str, int]]:
    """Each test with what it found."""
    lines = (line for path in sorted(folder.glob("*.jsonl")) for line in path.open())
    return dict(json.loads(line) for line in lines)


def main(before: str, after: str) -> int:
    """Print which tests that both runs have saw something else."""
    former, latter = read_log(Path(before)), read_log(Path(after))
    both = [test for test in former if test in latter]
    changed = [test for test in both if former[test].keys() != latter[test].keys()]
    for test in changed:
        print(test)
        for sign, ours, others in (("-", former, latter), ("+", latter, former)):
            for text in ours[test].keys() - others[test].keys():
                print(f"  {sign} {text}")
    only = f"{len(former) - len(both)} only before, {len(latter) - len(both)} only after"
    print(f"{len(both)} tests in both ({only}); {len(changed)} with other findings")
    return 1 if changed else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))

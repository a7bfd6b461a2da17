"""pytest inside of pytest, in this process: torch takes seconds to import anew."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Any

from paritas.app.pytest.session import outcomes_in

if TYPE_CHECKING:
    import pytest


class _NoSnapshot:
    def restore(self) -> None:
        """Forget nothing: a second import of the same part of torch would fail."""


def run_suite(pytester: pytest.Pytester, *options: str) -> Any:
    """Run the suite of a folder, of whose modules no trace is left."""
    pytester._sys_modules_snapshot = _NoSnapshot()
    pytester._Pytester__take_sys_modules_snapshot = _NoSnapshot
    always = ("-p", "no:cacheprovider", "--import-mode=importlib", "--show-capture=no", "-rN")
    try:
        return pytester.runpytest_inprocess(*always, *options)
    finally:
        for name, module in list(sys.modules.items()):
            if str(getattr(module, "__file__", "")).startswith(f"{pytester.path}{os.sep}"):
                del sys.modules[name]


def outcomes(result: Any) -> dict[str, list[Any]]:
    """What was attached to the reports of a run, by the name of the test."""
    found = [report for report in result.reprec.getreports() if report.when == "teardown"]
    return {
        report.nodeid.partition("::")[2]: list(outcomes_in(report.user_properties))
        for report in found
    }

"""What is said of a script that was run."""

from __future__ import annotations

from pathlib import Path

import pytest

from paritas.reports.scripts import SHOWN, WrittenScript


@pytest.mark.parametrize(
    ("exit_code", "output", "shows", "said"),
    [
        (1, f"off by 1\n{SHOWN}\n", True, SHOWN),
        (1, f"{SHOWN}\nrepro.py:9: UserWarning: slow\n  y = x @ x\n", True, SHOWN),
        (0, "no difference\n", False, "no difference"),
        (1, "Traceback\nValueError: no\n", False, "ValueError: no"),
        (1, "", False, "it prints nothing"),
        (None, "", False, ""),
    ],
)
def test_a_script_that_shows_the_failure_says_so_whatever_torch_warns_of(
    exit_code, output, shows, said
):
    written = WrittenScript(Path("repro.py"), exit_code=exit_code, output=output)
    assert (written.shows, written.said) == (shows, said)

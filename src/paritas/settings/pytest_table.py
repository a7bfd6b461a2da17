"""The table of the pytest plugin: in the form of a command, so that it is read as the others are.

Whether goldens are written anew is no setting: with it, no test that compares with them could fail.
"""

from __future__ import annotations

from pathlib import Path

import click

from paritas.settings.vocabulary import bind_variables

__all__ = ["PLUGINS"]

_PYTEST = click.Command(
    "pytest",
    params=[
        click.Option(["--guard"], is_flag=True, help="Check every torch.compile of the suite."),
        click.Option(
            ["--every"],
            type=click.FloatRange(min=0, min_open=True),
            metavar="N|SHARE",
            help="Of the guarded graphs, check each N-th call, or a share of the calls.",
        ),
        click.Option(["--strict"], is_flag=True, help="Count unstable findings as failures."),
        click.Option(
            ["--golden-dir"],
            type=click.Path(file_okay=False, path_type=Path),
            help="Where goldens lie, in place of a folder beside the test.",
        ),
        click.Option(
            ["--report"],
            type=click.Path(file_okay=False, path_type=Path),
            help="Where a page for each failure goes.",
        ),
    ],
)
bind_variables("pytest", _PYTEST)

PLUGINS = {"pytest": _PYTEST}

"""The pytest plugin's options; imports no torch. `_paritas_pytest` has the hooks."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable

    import pytest


# --- Whether there is anything to do: only the standard library -----------------------------------

# The name of the property that carries an outcome, in test reports and in JUnit XML.
PROPERTY = "paritas"
_VARIABLES = "PARITAS_PYTEST_"


def may_have_settings(root: Path) -> bool:
    """Whether there may be settings: a quick test that imports nothing."""
    if any(name.startswith(_VARIABLES) for name in os.environ) or "PARITAS_CONFIG" in os.environ:
        return True
    return any(map(_mentions_paritas, (root, *root.parents)))


def _mentions_paritas(folder: Path) -> bool:
    try:
        if (folder / "paritas.toml").is_file():
            return True
        return b"tool.paritas" in (folder / "pyproject.toml").read_bytes()
    except OSError:
        return False


def has_outcomes(reports: Iterable[Any]) -> bool:
    """Whether any test of a run checked parity."""
    return any(
        name == PROPERTY for report in reports for name, _ in getattr(report, "user_properties", ())
    )


# --- Options: the command line, then the table `[tool.paritas.pytest]` ----------------------------

_PATHS = ("golden_dir", "report")


@dataclasses.dataclass(frozen=True, kw_only=True)
class PluginOptions:
    """The options of one pytest run.

    Attributes:
        root: paths in the summary are relative to it.
        guard: check every `torch.compile` in the suite.
        every: check every n-th call of a graph, or a share of the calls.
        strict: count `unstable` as a failure unless a test overrides it.
        locate_seconds: how long `parity.verify` looks for where a failure starts; None for the
            default, and a test may override it.
        update: write goldens instead of failing.
        golden_dir: the folder of goldens; None for a folder beside each test.
        report: the folder for pages about failures; None for no pages.
    """

    root: Path
    guard: bool = False
    every: float = 1
    strict: bool = False
    locate_seconds: float | None = None
    update: bool = False
    golden_dir: Path | None = None
    report: Path | None = None

    @classmethod
    def of(cls, config: pytest.Config) -> PluginOptions:
        """Read the options; the command line overrides the settings.

        Raises:
            UsageError: a setting is unknown, or its value does not fit the option.
        """
        settings: dict[str, Any] = {}
        if may_have_settings(config.rootpath):
            from paritas.core.settings import load

            settings = load(config.rootpath).for_command("pytest")
        names = {field.name for field in dataclasses.fields(cls)} - {"root"}
        option_values = {name: value for name, value in settings.items() if name in names}
        for name in names:
            value = config.getoption(f"paritas_{name}", None)
            if value is not None:
                option_values[name] = Path(value).absolute() if name in _PATHS else value
        return cls(root=config.rootpath, **option_values)

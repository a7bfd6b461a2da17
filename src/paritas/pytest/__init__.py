"""What a test asks for through the pytest plugin, and its options; no torch is imported here.

`_paritas_pytest` holds the hooks themselves.
"""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable

    import pytest


# --- Whether there is anything to do: the standard library alone ----------------------------------

# The name of a check's property in a report, and in JUnit XML.
PROPERTY = "paritas"
_VARIABLES = "PARITAS_PYTEST_"


def may_have_settings(root: Path) -> bool:
    """Whether it is worth reading settings."""
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
    """The options of one run of pytest.

    Attributes:
        root: what paths in the summary are relative to.
        guard: check every `torch.compile` of the suite.
        every: of the graphs of the suite, check each n-th call, or a share of the calls.
        strict: count `unstable` as a failure, wherever a test does not say otherwise.
        update: write goldens instead of failing on them.
        golden_dir: where goldens lie; None for a folder beside each test.
        report: where a page for each failure goes; None for no pages.
    """

    root: Path
    guard: bool = False
    every: float = 1
    strict: bool = False
    update: bool = False
    golden_dir: Path | None = None
    report: Path | None = None

    @classmethod
    def of(cls, config: pytest.Config) -> PluginOptions:
        """Read them; the command line wins.

        Raises:
            UsageError: a setting is unknown, or its value is not what the option takes.
        """
        known = {field.name for field in dataclasses.fields(cls)} - {"root"}
        said = {name: value for name, value in _settings(config).items() if name in known}
        for name in known:
            value = config.getoption(f"paritas_{name}", None)
            if value is not None:
                said[name] = Path(value).absolute() if name in _PATHS else value
        return cls(root=config.rootpath, **said)


def _settings(config: pytest.Config) -> dict[str, Any]:
    if not may_have_settings(config.rootpath):
        return {}
    from paritas.settings import load

    return load(config.rootpath).for_command("pytest")

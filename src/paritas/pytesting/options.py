"""What was asked of the plugin: the command line, then the table `[tool.paritas.pytest]`."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paritas.pytesting.glancing import may_have_settings

if TYPE_CHECKING:
    import pytest

__all__ = ["Options"]

_PATHS = ("golden_dir", "report")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
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
    def of(cls, config: pytest.Config) -> Options:
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

"""Where goldens lie, and which of them no test asked for."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path
from typing import TYPE_CHECKING

from paritas.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

__all__ = ["GOLDEN", "golden_folder", "test_folder", "unused_goldens"]

GOLDEN = "golden"
# What a dump has at its top, by which a golden is known from a folder of them.
_RANK = "rank0"
_PLAIN = re.compile(r"[^A-Za-z0-9_.\[\]=-]+")
LONGEST_NAME = 80


def test_folder(root: Path, golden_dir: Path | None, test: str) -> Path:
    """The folder of a test's goldens.

    Args:
        root: what the name of the test is relative to.
        golden_dir: where goldens lie; None for a folder beside the test.
        test: its node id, `tests/test_model.py::TestFusion::test_norm[bfloat16]`.
    """
    file, _, name = test.partition("::")
    path = Path(file)
    inside = safe_name(name.replace("::", "."))
    if golden_dir is None:
        return root / path.parent / GOLDEN / path.stem / inside
    # What lies outside of the root is told apart by its hash alone.
    parts = path.with_suffix("").parts
    return golden_dir / safe_name("/".join(parts)) / inside


def golden_folder(tests: Path, name: str) -> Path:
    """The folder of one golden.

    Raises:
        UsageError: the name is none.
    """
    if not isinstance(name, str) or not name.strip():
        raise UsageError(f"a golden needs a name, not {name!r}; give one that the test has once")
    return tests / safe_name(name)


def safe_name(text: str) -> str:
    """A name for a folder on any system; what had to be changed is told apart by its hash."""
    plain = _PLAIN.sub("_", text).strip(".")[:LONGEST_NAME]
    if plain == text:
        return plain
    return f"{plain}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"


def unused_goldens(
    passed: Iterable[Path], whole: Iterable[tuple[Path, Collection[Path]]], used: Collection[Path]
) -> list[Path]:
    """Goldens that no test asked for, as far as this run can tell.

    Args:
        passed: the folders of tests that passed: what they did not ask for, they no longer need.
        whole: per test file of which every test was collected, the folder of its goldens, and the
            folders of its tests: any other is of a test that is no more.
        used: the goldens that were asked for.
    """
    unused = [path for folder in passed for path in _below(folder) if path not in used]
    for folder, tests in whole:
        gone = [path for path in _folders(folder) if path not in tests]
        unused += [path for test in gone for path in _below(test)]
    return sorted(set(unused))


def _below(test: Path) -> list[Path]:
    return [path for path in _folders(test) if (path / _RANK).is_dir()]


def _folders(path: Path) -> list[Path]:
    return [below for below in path.iterdir() if below.is_dir()] if path.is_dir() else []

"""What every run of the tests has."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pytest

# Where GCC looks for its linker first.
PROGRAMS = "COMPILER_PATH"


def pytest_configure(config: pytest.Config) -> None:
    """Let Inductor's kernels be linked by gold where it is installed.

    Hundreds of them are built, each against the whole of torch, for which gold takes a quarter of
    a second less than the linker that is usual.
    """
    gold = shutil.which("ld.gold")
    if gold is None or PROGRAMS in os.environ:
        return
    folder = tempfile.TemporaryDirectory(prefix="paritas-linker-")
    (Path(folder.name) / "ld").symlink_to(gold)
    os.environ[PROGRAMS] = folder.name

    def forget() -> None:
        del os.environ[PROGRAMS]
        folder.cleanup()

    config.add_cleanup(forget)

"""What every run of the tests has."""

from __future__ import annotations

import contextlib
import gc
import io
import os
import runpy
import shutil
import signal
import tempfile
import threading
from pathlib import Path
from typing import TYPE_CHECKING

import hypothesis
import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

# Where GCC looks for its linker first.
PROGRAMS = "COMPILER_PATH"


# A loaded machine is not a bug, and the same commit has the same result. The examples of a test may
# share its folder. The whole corpus draws others each time.
hypothesis.settings.register_profile(
    "paritas",
    deadline=None,
    derandomize=os.environ.get("PARITAS_WHOLE_CORPUS") != "1",
    database=None,
    suppress_health_check=[
        hypothesis.HealthCheck.too_slow,
        hypothesis.HealthCheck.function_scoped_fixture,
    ],
)
hypothesis.settings.load_profile("paritas")


def pytest_configure(config: pytest.Config) -> None:
    """Set up what holds for the whole run."""
    _link_with_gold(config)
    _outlive_commands(config)


def pytest_collection_finish() -> None:
    """Let Python's collector pass over what was imported and collected, which stays to the end."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def ctrl_c() -> Iterator[None]:
    """Let SIGINT interrupt this process and those it starts.

    In the background and on some CI runners it is ignored, which children inherit.
    """
    former = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, former)


@pytest.fixture
def undiagnosed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave out what kind of wrong it is, which takes as long as finding that it is."""
    from paritas.checking.explaining import Explainer

    monkeypatch.setattr(Explainer, "_explained", lambda _, finding, *others: finding)


@pytest.fixture
def scripts_in_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the script that shrinking ends with in this process: another imports torch for seconds.

    Tests of the scripts themselves run them as users do.
    """
    import torch

    from paritas.minimizing import comparisons, scripts

    def run(path: Path, _: float) -> tuple[bool, bool, str]:
        code, printed = 0, io.StringIO()
        torch.compiler.reset()
        with contextlib.chdir(path.parent), contextlib.redirect_stdout(printed):
            try:
                with torch.random.fork_rng(devices=[]):
                    runpy.run_path(path.name, run_name="__main__")
            except SystemExit as ended:
                code = ended.code  # type: ignore[assignment]
        torch.compiler.reset()
        torch.set_printoptions(profile="default")
        return True, code == 1 and scripts.SHOWN in printed.getvalue(), printed.getvalue()

    monkeypatch.setattr(scripts, "run_script", run)
    monkeypatch.setattr(comparisons, "run_script", run)


def _link_with_gold(config: pytest.Config) -> None:
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


def _outlive_commands(config: pytest.Config) -> None:
    """Let `paritas run` be called in this process, which does not end when the script does."""
    end_threads = threading._shutdown
    threading._shutdown = lambda: None

    def restore() -> None:
        threading._shutdown = end_threads

    config.add_cleanup(restore)

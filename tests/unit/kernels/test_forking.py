"""The process from which candidates are forked."""

from __future__ import annotations

import pytest

import paritas.kernels.observing  # noqa: F401  (forks inherit it)
from paritas.kernels.forking import Nursery


@pytest.fixture
def nursery_of(tmp_path, monkeypatch):
    """Makes a nursery that imports a module with this content."""
    made = []

    def make(content):
        (tmp_path / "preloaded.py").write_text(content, encoding="utf-8")
        monkeypatch.syspath_prepend(tmp_path)
        made.append(Nursery(("preloaded",), forks=True))
        return made[-1]

    yield make
    for one in made:
        one.stop()


def test_a_thread_that_a_module_starts_is_named(nursery_of):
    nursery = nursery_of(
        "import threading\n"
        "threading.Thread(target=threading.Event().wait, daemon=True, name='a pool').start()\n"
    )
    assert nursery.problem == "it has threads: a pool"
    assert not nursery.is_usable
    nursery.insists = True
    assert nursery.is_usable


def test_what_a_module_raises_is_shown(nursery_of):
    nursery = nursery_of("raise RuntimeError('no license')")
    assert nursery.problem.startswith("it has ended: ")
    assert nursery.problem.endswith("RuntimeError: no license")
    nursery.insists = True
    assert not nursery.is_usable

"""The server from which candidates are forked."""

from __future__ import annotations

import pytest

import paritas.kernels.candidate  # noqa: F401  (forks inherit it)
from paritas.core.workers.server import WorkerServer
from paritas.kernels.servers import candidate_environment, candidate_program


@pytest.fixture
def server_of(tmp_path, monkeypatch):
    """Makes a server that imports a module with this content."""
    made = []

    def make(content):
        (tmp_path / "preloaded.py").write_text(content, encoding="utf-8")
        monkeypatch.syspath_prepend(tmp_path)
        program = candidate_program(("preloaded",))
        made.append(WorkerServer(program, candidate_environment(), forks=True))
        return made[-1]

    yield make
    for one in made:
        one.stop()


def test_a_thread_that_a_module_starts_is_named(server_of):
    server = server_of(
        "import threading\n"
        "threading.Thread(target=threading.Event().wait, daemon=True, name='a pool').start()\n"
    )
    assert server.problem == "it has threads: a pool"
    assert not server.is_usable
    server.insists = True
    assert server.is_usable


def test_what_a_module_raises_is_shown(server_of):
    server = server_of("raise RuntimeError('no license')")
    assert server.problem.startswith("it has ended: ")
    assert server.problem.endswith("RuntimeError: no license")
    server.insists = True
    assert not server.is_usable

"""Where runs happen on a worker: its own folders and environment, and code that travels."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import msgspec
import pytest

from paritas.core.workers import starting
from paritas.sweeping import places, processes
from paritas.sweeping.places import RunPlace, WorkerPlace, new_place, pack_code
from paritas.sweeping.plan import RunTask
from paritas.sweeping.processes import RunOrder
from paritas.sweeping.rows import SweepRun


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A folder with a model that imports a module beside it, and one that nothing imports."""
    folder = tmp_path / "project"
    (folder / "parts").mkdir(parents=True)
    (folder / "models.py").write_text("import helper\nfrom parts import block\nimport torch\n")
    (folder / "helper.py").write_text("import json\n")
    (folder / "parts" / "__init__.py").write_text("")
    (folder / "parts" / "block.py").write_text("")
    (folder / "other.py").write_text("raise SystemExit('nobody asked')\n")
    monkeypatch.chdir(folder)
    return folder


def place_of(folder, **known):
    return RunPlace(
        sweep="1", folder=str(folder), paths=(str(folder),), cache=str(folder / "cache"), **known
    )


def test_the_code_that_runs_name_travels_with_what_it_imports(project):
    runs = [SweepRun(target="models:fine", candidate="eager"), SweepRun(target="hf:Llama")]
    packed = pack_code(runs, [str(project)])
    names = {str(Path(name).relative_to(project)) for name in packed}
    assert names == {"models.py", "helper.py", "parts/__init__.py", "parts/block.py"}


def test_a_module_that_cannot_be_compiled_travels_so_that_its_run_can_say_so(project):
    (project / "models.py").write_text("def (")
    packed = pack_code([SweepRun(target="models:fine")], [str(project)])
    assert packed == {str(project / "models.py"): b"def ("}


def test_a_file_that_is_too_large_stays_here(project, monkeypatch):
    (project / "program.pt2").write_bytes(b"x" * 100)
    runs = [SweepRun(target="program.pt2"), SweepRun(target="helper:make")]
    assert str(project / "program.pt2") in pack_code(runs, [str(project)])
    monkeypatch.setattr(places, "MOST_BYTES", 50)
    assert set(pack_code(runs, [str(project)])) == {str(project / "helper.py")}


def test_a_worker_that_sees_the_same_files_runs_in_their_folder(project):
    code = pack_code([SweepRun(target="models:fine")], [str(project)])
    (project / "cache").mkdir()
    found = WorkerPlace(place_of(project), code).place
    assert (found.folder, found.cache) == (str(project), str(project / "cache"))
    assert found.paths[0] == str(project)


@pytest.mark.parametrize("missing", ["folder", "file", "content"])
def test_a_worker_that_sees_other_files_runs_a_copy(project, tmp_path, missing):
    code = pack_code([SweepRun(target="models:fine")], [str(project)])
    if missing == "folder":
        project.rename(tmp_path / "moved")
    elif missing == "file":
        (project / "helper.py").unlink()
    else:
        (project / "helper.py").write_text("import old\n")
    os.chdir(tmp_path)
    worker = WorkerPlace(place_of(project), code)
    found = worker.place
    assert found.folder != str(project)
    assert (Path(found.folder) / "helper.py").read_text() == "import json\n"
    assert found.paths[0] == found.folder
    assert Path(found.cache).is_dir()
    worker.remove()
    assert not Path(found.folder).exists()


def test_a_worker_keeps_its_own_search_path(project, tmp_path, monkeypatch):
    (tmp_path / "own").mkdir()
    (project / "cache").mkdir()
    monkeypatch.setattr(sys, "path", [str(tmp_path / "own"), *sys.path])
    found = WorkerPlace(place_of(project), {}).place
    assert str(tmp_path / "own") in found.paths


def test_the_folders_of_an_environment_are_not_sent_elsewhere(project, monkeypatch):
    site = project / "lib" / "site-packages"
    site.mkdir(parents=True)
    monkeypatch.setattr(sys, "path", ["", str(site), *sys.path])
    there = new_place(project / "cache", jobs=1, local=False).paths
    here = new_place(project / "cache", jobs=1, local=True).paths
    assert str(project) in there
    assert str(site) not in there
    assert not any("site-packages" in path for path in there)
    assert str(site) in here


@pytest.mark.parametrize(("asked", "threads"), [("1", 1), ("3", 3), ("3,2", 3), ("", 4), ("x", 4)])
def test_the_number_of_threads_is_the_user_s_if_it_is_set(monkeypatch, asked, threads):
    monkeypatch.setenv("OMP_NUM_THREADS", asked)
    monkeypatch.setattr(places, "count_processors", lambda: 8)
    assert places.threads_for(2) == threads


def test_a_worker_that_cannot_start_processes_makes_a_row(project, monkeypatch):
    def refused(*_, **__):
        raise PermissionError(13, "Permission denied", "python")

    monkeypatch.setattr(starting.subprocess, "Popen", refused)
    order = RunOrder(
        task=RunTask(run=SweepRun(target="models:fine")), place=place_of(project), code={}
    )
    row = processes.run_order(order)
    processes.stop_servers("1")
    assert row.status.value == "unverified"
    assert "no process can be started for it on" in row.worst.reason
    assert "Permission denied" in row.worst.reason


def test_a_sweep_removes_what_one_that_was_killed_has_left_on_the_worker(project, monkeypatch):
    class Server:
        has_ended = False

        def stop(self):
            self.has_ended = True

    def run(sweep):
        order = RunOrder(
            task=RunTask(run=SweepRun(target="models:fine")),
            place=msgspec.structs.replace(place_of(project / "elsewhere"), sweep=sweep),
            code={},
        )
        return processes.run_order(order)

    monkeypatch.setattr(processes, "_start_server", lambda place: Server())
    monkeypatch.setattr(processes, "_watch_run", lambda task, server, place: place)
    killed, going_on = run("killed"), run("going on")
    processes._servers["killed"].stop()
    last = run("last")
    assert not Path(killed.folder).exists()
    assert Path(going_on.folder).exists()
    for sweep in ("going on", "last"):
        processes.stop_servers(sweep)
    assert not Path(going_on.folder).exists()
    assert not Path(last.folder).exists()


def test_inductor_is_warmed_up_only_if_a_run_names_it():
    def runs(*names):
        return [SweepRun(target="m:f", candidate=name) for name in names]

    assert not places.compiles_any(runs("eager", "aot_eager", "m:own", "invariants"))
    assert places.compiles_any(runs("eager", "max-autotune"))
    assert places.compiles_any(runs("aot_inductor"))

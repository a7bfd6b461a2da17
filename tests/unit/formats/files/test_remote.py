"""A dump behind a URL is brought here, and nothing that it calls its files leads elsewhere."""

from __future__ import annotations

import sys
from pathlib import Path

import fsspec
import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem

from paritas.core.errors import UsageError
from paritas.core.file_trees import is_url, local_copy, write_to
from paritas.formats.dumps.opening import open_dump
from unit.formats.files.entries import write_dump

BLOCKS = bytes(range(256)) * 40_000  # more than two blocks


@pytest.fixture
def store():
    made = fsspec.filesystem("memory")
    yield made
    made.store.clear()
    made.pseudo_dirs[:] = [""]


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("s3://bucket/run", True),
        ("memory://run", True),
        ("simplecache::s3://bucket/run", True),
        ("runs/eager", False),
        ("C:\\runs", False),
        ("runs/a::b", False),
        (Path("s3://bucket"), False),
    ],
)
def test_urls_are_told_from_paths(path, expected):
    assert is_url(path) == expected


@pytest.mark.parametrize("given", ["runs/eager", Path("runs/eager")])
def test_a_path_is_given_back_as_it_is_there_or_not(given):
    with local_copy(given) as path:
        assert path == Path("runs/eager")


def test_a_place_on_this_machine_is_not_copied(tmp_path):
    with local_copy(f"file://{tmp_path}") as path:
        assert path == tmp_path
    with (
        pytest.raises(UsageError, match="gone does not exist: give the URL of a dump"),
        local_copy(f"file://{tmp_path}/gone"),
    ):
        pass


def test_a_dump_is_copied_and_the_copy_removed(tmp_path, store):
    write_dump(tmp_path / "dump", [torch.arange(4.0), torch.arange(5.0)])
    write_to("memory://runs/step3", tmp_path / "dump")
    with local_copy("memory://runs/step3") as path:
        assert path.name == "step3"
        dump = open_dump(path)
        assert [dump.read(record).tolist() for record in dump.records()] == [
            [0, 1, 2, 3],
            [0, 1, 2, 3, 4],
        ]
        assert dump.problems == []
    assert not path.exists()
    assert not path.parent.exists()


def test_the_copy_is_removed_when_something_fails(store):
    store.pipe("/runs/a.bin", b"x")
    with pytest.raises(ZeroDivisionError), local_copy("memory://runs") as path:
        raise ZeroDivisionError
    assert not path.exists()


def test_one_file_keeps_its_name(store):
    store.pipe("/runs/a.npy", BLOCKS)
    with local_copy("memory://runs/a.npy") as path:
        assert path.name == "a.npy"
        assert path.read_bytes() == BLOCKS


def test_what_has_grown_since_is_copied_whole(store):
    store.pipe("/runs/a", b"1")
    with local_copy("memory://runs") as path:
        assert [file.name for file in path.iterdir()] == ["a"]
    store.pipe("/runs/b/c", b"2")
    with local_copy("memory://runs/") as path:
        assert sorted(file.name for file in path.rglob("*")) == ["a", "b", "c"]


def refused(url, message):
    with pytest.raises(UsageError, match=message), local_copy(url):
        pass


def test_what_is_missing_or_empty_is_refused(store):
    refused("memory://gone", "memory://gone does not exist: give the URL of a dump")
    store.makedirs("/empty")
    refused("memory://empty", "memory://empty is empty: give the URL of a dump")


def test_a_place_that_nobody_knows_is_refused_with_those_that_are_known():
    refused("nonsense://run", r"nonsense://run: fsspec does not know this protocol .* memory")


def test_a_place_whose_package_is_missing_is_refused_with_its_name(monkeypatch):
    monkeypatch.setitem(sys.modules, "s3fs", None)
    refused("s3://bucket/run", r"s3://bucket/run: Install s3fs to access S3")


def test_without_fsspec_the_message_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "fsspec", None)
    refused("memory://run", "needs fsspec, which is not installed: pip install fsspec")


@pytest.mark.parametrize(
    "name",
    [
        "/runs/../../outside",
        "/runs/a/../../../b",
        "/runs/./a",
        "/runs//a",
        "/elsewhere/a",
        "/runs/",
    ],
)
def test_a_name_that_leads_elsewhere_is_refused(store, monkeypatch, name):
    store.pipe("/runs/good", b"1")
    monkeypatch.setattr(MemoryFileSystem, "find", lambda *args, **more: [name])
    refused("memory://runs", "is not allowed|which is not below")


def test_an_error_of_the_store_says_the_url_without_its_password(store, monkeypatch):
    def broken(*args, **more):
        raise ConnectionResetError("the line is dead")

    store.pipe("/me:secret@runs/a", b"1")
    monkeypatch.setattr(MemoryFileSystem, "find", broken)
    with (
        pytest.raises(UsageError, match=r"^memory://runs cannot be reached: the line is dead$"),
        local_copy("memory://me:secret@runs"),
    ):
        pass


def test_results_go_to_a_folder_or_a_url(tmp_path, store):
    (tmp_path / "made" / "deep").mkdir(parents=True)
    (tmp_path / "made" / "table.csv").write_bytes(b"a,b")
    (tmp_path / "made" / "deep" / "report.html").write_bytes(BLOCKS)
    write_to(tmp_path / "out", tmp_path / "made")
    assert (tmp_path / "out" / "deep" / "report.html").read_bytes() == BLOCKS
    write_to("memory://results/one", tmp_path / "made")
    assert store.cat("/results/one/table.csv") == b"a,b"
    assert store.cat("/results/one/deep/report.html") == BLOCKS

"""Where a golden lies, and which are nobody's."""

from __future__ import annotations

from pathlib import Path

import pytest

from paritas.app.pytest.session import golden_folder, safe_name, test_folder, unused_goldens
from paritas.core.errors import UsageError

folder_of = test_folder
del test_folder  # or pytest takes it for a test

ROOT = Path("root")


def test_goldens_lie_beside_the_test():
    folder = folder_of(ROOT, None, "tests/test_model.py::TestFusion::test_norm[bf16]")
    assert folder == Path("root/tests/golden/test_model/TestFusion.test_norm[bf16]")
    assert golden_folder(folder, "logits") == folder / "logits"


def test_goldens_lie_where_they_were_asked_for():
    folder = folder_of(ROOT, Path("elsewhere"), "test_model.py::test_norm")
    assert folder == Path("elsewhere/test_model/test_norm")


def test_files_of_one_name_in_two_folders_are_kept_apart():
    first = folder_of(ROOT, Path("elsewhere"), "a/test_model.py::test_norm")
    second = folder_of(ROOT, Path("elsewhere"), "b/test_model.py::test_norm")
    assert first != second


@pytest.mark.parametrize("name", ["../../out", "/etc", "a/b", "a\\b", "..", "a:b", "x" * 300, "ä"])
def test_no_name_leaves_its_folder(name):
    path = golden_folder(ROOT, name)
    assert path.parent == ROOT
    assert path.name not in {"", ".", ".."}
    assert len(path.name) < 100


def test_names_that_look_alike_are_kept_apart():
    assert len({safe_name(name) for name in ("a b", "a_b", "a/b", "a//b")}) == 4


@pytest.mark.parametrize("name", ["", "  ", None, 3])
def test_a_golden_needs_a_name(name):
    with pytest.raises(UsageError, match="must be a non-empty string"):
        golden_folder(ROOT, name)


def test_what_no_test_asked_for_is_unused(tmp_path):
    here = tmp_path / "golden" / "test_model"
    for name in ("test_a/used", "test_a/old", "test_gone/out", "test_failed/out"):
        (here / name / "rank0").mkdir(parents=True)
    tests = [here / "test_a", here / "test_failed"]
    used = [here / "test_a" / "used"]
    passed = [here / "test_a"]
    expected = [here / "test_a" / "old", here / "test_gone" / "out"]
    assert unused_goldens(passed, [(here, tests)], used) == expected
    # Of a file whose tests were not all collected, nothing is known of the others.
    assert unused_goldens(passed, [], used) == expected[:1]

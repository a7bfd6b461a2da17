"""Which settings file is in force, and what is said of one that cannot be used."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from paritas.core.errors import UsageError
from paritas.core.settings import find_file, load, read_file


@pytest.fixture(autouse=True)
def project(tmp_path, monkeypatch):
    """The root of a repository, as the working directory; the environment says nothing."""
    for name in [name for name in os.environ if name.startswith("PARITAS_")]:
        monkeypatch.delenv(name)
    (tmp_path / ".git").mkdir()
    monkeypatch.chdir(tmp_path)
    return tmp_path


def refusal(path):
    with pytest.raises(UsageError) as caught:
        read_file(path)
    return str(caught.value)


def test_without_a_file_there_are_no_settings(project):
    assert load().file is None
    assert load().for_command("pytest") == {}


def test_the_nearest_file_counts_and_files_are_not_merged(project):
    inner = project / "package" / "tests"
    inner.mkdir(parents=True)
    (project / "pyproject.toml").write_text("[tool.paritas]\nstrict = true\n")
    (project / "package" / "paritas.toml").write_text("[pytest]\nguard = true\n")
    assert load(inner).file.path == project / "package" / "paritas.toml"
    assert load(inner).for_command("pytest") == {"guard": True}
    assert load(project).for_command("pytest") == {"strict": True}


def test_a_pyproject_that_says_nothing_to_paritas_is_passed_over(project):
    package = project / "package"
    package.mkdir()
    (package / "pyproject.toml").write_text("[tool.ruff]\n")
    (project / "paritas.toml").write_text("strict = true\n")
    assert find_file(package).path == project / "paritas.toml"


def test_what_is_above_the_repository_was_written_for_something_else(project):
    (project / "paritas.toml").write_text("strict = true\n")
    repository = project / "repository"
    (repository / "src").mkdir(parents=True)
    (repository / ".git").write_text("gitdir: elsewhere\n")  # as of a submodule
    assert find_file(repository / "src") is None


def test_two_files_in_one_folder_are_an_error_that_names_both(project):
    (project / "pyproject.toml").write_text("[tool.paritas]\n")
    (project / "paritas.toml").write_text("")
    message = f"{project / 'paritas.toml'} and [tool.paritas] in {project / 'pyproject.toml'}"
    with pytest.raises(UsageError, match=re.escape(message)):
        load()


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"strict = yes\n", r"is not valid TOML: Invalid value \(at line 1, column 10\)"),
        (b"strict = true\nstrict = false\n", r"is not valid TOML: .*line 2"),
        (b"strict = true # \xff\n", r"is not TOML: invalid UTF-8 at byte 16 \(0xff\)"),
        (b"a = " + b"[" * 100_000, r"is not valid TOML: "),
    ],
    ids=["a value", "twice", "bytes", "a bomb"],
)
def test_a_malformed_file_is_refused_with_the_place(content, said, project):
    path = project / "paritas.toml"
    path.write_bytes(content)
    message = refusal(path)
    assert message.startswith(str(path))
    assert re.search(said, message)
    assert message.endswith("to ignore settings files: PARITAS_NO_CONFIG=1")


def test_a_table_that_is_none_is_refused(project):
    (project / "pyproject.toml").write_text("[tool]\nparitas = 3\n")
    assert refusal(project / "pyproject.toml").endswith(
        "tool.paritas is 3; it must be a table, [tool.paritas]"
    )


def test_what_is_no_file_is_not_opened(project):
    os.mkfifo(project / "paritas.toml")  # to read it would wait for ever
    assert "is not a regular file; rename it" in refusal(project / "paritas.toml")


def test_a_file_and_a_folder_that_may_not_be_read_are_told_from_none(project, monkeypatch):
    def denied(self):
        raise PermissionError(13, "Permission denied", str(self))

    (project / "paritas.toml").write_text("")
    monkeypatch.setattr(Path, "read_bytes", denied)
    assert "paritas.toml cannot be read: Permission denied;" in refusal(project / "paritas.toml")
    monkeypatch.setattr(os, "stat", lambda path, **_: denied(path))
    assert (
        refusal(project / "paritas.toml")
        == f"{project} cannot be searched for settings: Permission denied; to ignore settings "
        "files: PARITAS_NO_CONFIG=1"
    )


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
def test_the_file_of_a_stranger_is_refused_in_a_folder_above_alone(project):
    inner = project / "inner"
    inner.mkdir()
    (project / "paritas.toml").write_text("strict = true\n")
    os.chown(project / "paritas.toml", 4321, -1)
    with pytest.raises(UsageError, match=r"paritas\.toml belongs to another user \(uid 4321\); to"):
        load(inner)
    assert load(project).file is not None
    assert load(inner, chosen=project / "paritas.toml").file is not None
    os.chown(inner, 4321, -1)  # a checkout that was mounted
    assert load(inner).file is not None


# --- chosen by hand -------------------------------------------------------------------------------


def test_a_chosen_file_counts_and_the_nearest_does_not(project, monkeypatch):
    (project / "paritas.toml").write_text("strict = true\n")
    (project / "other.toml").write_text("[pytest]\nguard = true\n")
    assert load(chosen=Path("other.toml")).for_command("pytest") == {"guard": True}
    monkeypatch.setenv("PARITAS_CONFIG", "other.toml")
    assert load().for_command("pytest") == {"guard": True}
    assert load(no_file=True).file is None
    monkeypatch.setenv("PARITAS_NO_CONFIG", "1")
    assert load().file is None


def test_a_chosen_file_that_has_no_settings_is_refused(project, monkeypatch):
    (project / "pyproject.toml").write_text("[tool.ruff]\n")
    with pytest.raises(UsageError, match=r"pyproject\.toml has no table \[tool\.paritas\]; give a"):
        load(chosen=Path("pyproject.toml"))
    monkeypatch.setenv("PARITAS_CONFIG", "absent.toml")
    with pytest.raises(UsageError, match=r"PARITAS_CONFIG='absent\.toml': /.* does not exist"):
        load()


def test_the_switch_takes_nothing_but_0_and_1(monkeypatch):
    monkeypatch.setenv("PARITAS_NO_CONFIG", "perhaps")
    with pytest.raises(UsageError, match="PARITAS_NO_CONFIG must be 0 or 1, not 'perhaps'"):
        load()


def test_a_working_directory_that_is_gone_is_told(project, monkeypatch):
    gone = project / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    with pytest.raises(UsageError, match="the working directory no longer exists"):
        load()

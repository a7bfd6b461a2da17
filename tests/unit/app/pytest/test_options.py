"""The command line wins over the table of a file; what neither knows is refused."""

from __future__ import annotations

import pytest

from paritas.app.pytest import PluginOptions, may_have_settings

pytest_plugins = ["pytester"]


def options_of(pytester, *args):
    return PluginOptions.of(pytester.parseconfig(*args))


def test_nothing_said_is_nothing_asked(pytester):
    assert options_of(pytester) == PluginOptions(root=pytester.path)


def test_the_command_line_is_read(pytester):
    options = options_of(
        pytester,
        "--paritas-guard",
        "--paritas-every=3",
        "--paritas-report=out",
        "--paritas-strict",
        "--paritas-locate-seconds=5",
    )
    assert (options.guard, options.every, options.strict) == (True, 3, True)
    assert options.locate_seconds == 5
    assert options.report == pytester.path / "out"


def test_a_table_is_read_and_the_command_line_wins(pytester):
    pytester.makefile(
        ".toml",
        paritas='[pytest]\nguard = true\nreport = "a"\ngolden-dir = "kept"\nevery = 2\n'
        "locate-seconds = 0\n",
    )
    options = options_of(pytester)
    assert options.locate_seconds == 0
    assert (options.guard, options.every, options.strict) == (True, 2, False)
    assert (options.report, options.golden_dir) == (pytester.path / "a", pytester.path / "kept")
    assert options_of(pytester, "--paritas-report=b").report == pytester.path / "b"


def test_a_key_that_is_none_ends_the_run_and_names_the_nearest(pytester):
    pytester.makefile(".toml", pyproject="[tool.paritas.pytest]\ngaurd = true\n")
    pytester.makepyfile("def test_it():\n    pass\n")
    result = pytester.runpytest_inprocess("-p", "no:cacheprovider")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["ERROR: *no setting 'gaurd'; did you mean 'guard'?*"])


def test_a_glance_tells_whether_settings_are_worth_reading(tmp_path, monkeypatch):
    monkeypatch.delenv("PARITAS_CONFIG", raising=False)
    inner = tmp_path / "a" / "b"
    inner.mkdir(parents=True)
    assert not may_have_settings(inner)
    (tmp_path / "pyproject.toml").write_text("[tool.other]\n", encoding="utf-8")
    assert not may_have_settings(inner)
    (tmp_path / "a" / "pyproject.toml").write_text("[tool.paritas]\n", encoding="utf-8")
    assert may_have_settings(inner)
    assert not may_have_settings(tmp_path)
    monkeypatch.setenv("PARITAS_PYTEST_GUARD", "1")
    assert may_have_settings(tmp_path)

"""Settings that reach a command, and `paritas config`: from the command line, without torch."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from paritas.app.cli import _Tables, main
from paritas.core.errors import UsageError
from paritas.core.settings import settable, variables
from paritas.verification import command as verify_command

DOCS = Path(__file__).parents[4] / "docs" / "configuration.md"


@pytest.fixture(autouse=True)
def project(tmp_path, monkeypatch):
    """A repository without settings, as the working directory; no variable says anything."""
    for name in [name for name in os.environ if name.startswith("PARITAS_")]:
        monkeypatch.delenv(name)
    (tmp_path / ".git").mkdir()
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def told(monkeypatch):
    """What `verify` is asked to do; it does not do it."""
    asked = {}

    def remember(factory, options):
        asked.update(vars(options))
        raise UsageError("remembered")

    monkeypatch.setattr(verify_command, "_run_verify", remember)
    return asked


def paritas(*arguments, code=0):
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == code, result.output
    return result


def tables():
    return _Tables(main, click.Context(main))


def lines(text):
    """The lines of a table, whatever the width of its columns."""
    return {" ".join(line.split()) for line in text.splitlines()}


# --- a command gets its settings ------------------------------------------------------------------


def test_file_then_environment_then_command_line_each_override(project, told, monkeypatch):
    Path("pyproject.toml").write_text(
        "[tool.paritas]\nstrict = true\ndtype = 'float16'\n"
        "[tool.paritas.verify]\nbackend = 'eager'\nmode = 'default'\nno-lift = true\n"
    )
    monkeypatch.setenv("PARITAS_VERIFY_BACKEND", "aot_eager")
    monkeypatch.setenv("PARITAS_DTYPE", "float64")
    paritas("verify", "nets:build", "--dtype", "bfloat16", code=2)
    assert told["strict"] is told["no_lift"] is True
    assert (told["mode"], told["backend"], told["dtype"]) == ("default", "aot_eager", "bfloat16")


def test_a_required_option_may_come_from_the_file():
    Path("paritas.toml").write_text("[verify-parallel]\nplan = 'fsdpp'\n")
    refused = paritas("verify-parallel", "nets:build", code=2)
    assert "--plan 'fsdpp' is unknown; give ddp, fsdp, hf, hf-ep or your own" in refused.stderr


def test_settings_do_not_count_as_given_on_the_command_line(told):
    Path("paritas.toml").write_text("[verify]\nbackend = 'eager'\n")
    paritas("verify", "nets:build", "--candidate", "nets:other", code=2)
    assert told["candidate"] == "nets:other"


def test_without_the_file_the_defaults_count(told):
    Path("paritas.toml").write_text("[verify]\nbackend = 'eager'\n")
    paritas("--no-config", "verify", "nets:build", code=2)
    assert told["backend"] == "inductor"


def test_a_chosen_file_counts(told):
    Path("other.toml").write_text("[verify]\nbackend = 'eager'\n")
    paritas("--config", "other.toml", "verify", "nets:build", code=2)
    assert told["backend"] == "eager"
    both = paritas("--config", "other.toml", "--no-config", "verify", "nets:build", code=2)
    assert (
        "--config 'other.toml' and --no-config exclude each other: give one of them" in both.stderr
    )


def test_a_mistake_for_any_command_stops_every_command_and_help_is_given_still(project):
    Path("paritas.toml").write_text("[compare]\nstrct = true\n")
    stopped = paritas("verify", "nets:build", code=2)
    place = f"{project / 'paritas.toml'} [compare]"
    assert stopped.stderr == f"Error: {place}: no setting 'strct'; did you mean 'strict'?\n"
    assert "Usage:" in paritas("verify", "--help").stdout
    assert "Usage:" in paritas("--help").stdout


def test_a_script_that_is_asked_for_its_help_does_not_hide_a_mistake():
    Path("paritas.toml").write_text("strct = true\n")
    assert "no setting 'strct'" in paritas("run", "script.py", "--help", code=2).stderr


def test_a_value_is_looked_at_by_the_command_that_takes_it(told):
    Path("paritas.toml").write_text("[compare]\nconfig = 'absent.toml'\n[verify]\ndtype = 'f8'\n")
    refused = paritas("verify", "nets:build", code=2)
    assert "[verify] dtype = 'f8': 'f8' is not one of 'float64'" in refused.stderr
    Path("paritas.toml").write_text("[compare]\nconfig = 'absent.toml'\n")
    paritas("verify", "nets:build", code=2)
    assert told["dtype"] is None
    assert "absent.toml' does not exist" in paritas("config", code=2).stderr


def test_malformed_toml_is_wrong_usage():
    Path("pyproject.toml").write_text("[tool.paritas\n")
    assert "at line 1, column 14" in paritas("demo", code=2).stderr


# --- names ----------------------------------------------------------------------------------------


def test_no_two_settings_share_a_variable():
    owners = {}
    for name, command in tables().items():
        for option in settable(command).values():
            variable = variables(name, option)[0]
            assert owners.setdefault(variable, (name, option.name)) == (name, option.name)
    shared = {
        name
        for table, command in tables().items()
        for option in settable(command).values()
        for name in variables(table, option)[1:]
    }
    assert len(owners) > 100
    assert not shared & set(owners)


def test_every_command_but_config_has_a_table():
    assert [*tables()] == [*(it for it in main.list_commands(None) if it != "config"), "pytest"]


# --- paritas config -------------------------------------------------------------------------------


def test_it_prints_every_setting_and_where_it_comes_from(project, monkeypatch):
    Path("pyproject.toml").write_text("[tool.paritas.verify]\ndtype = 'bfloat16'\n")
    monkeypatch.setenv("PARITAS_STRICT", "1")
    printed = paritas("config").stdout
    assert printed.splitlines()[0] == f"settings file: {project / 'pyproject.toml'}"
    assert {
        'dtype "bfloat16" pyproject.toml [tool.paritas.verify]',
        "strict true PARITAS_STRICT",
        'backend "inductor" default',
        "guard false default",
    } <= lines(printed)
    assert set(re.findall(r"^([\w-]+)$", printed, flags=re.MULTILINE)) == set(tables())


def test_it_says_that_there_is_no_file_and_prints_one_command():
    printed = paritas("config", "report").stdout
    assert printed.startswith(
        "settings file: none (looked for paritas.toml, and pyproject.toml with "
    )
    command, *settings = printed.partition("\n\n")[2].splitlines()
    assert command == "report"
    assert ["output", "not", "set", "default"] in [setting.split() for setting in settings]
    assert all(setting.endswith("  not set  default") for setting in settings)


def test_a_misspelt_command_is_told_its_nearest():
    assert (
        "no settings for 'verfy'; did you mean 'verify'?"
        in paritas("config", "verfy", code=2).stderr
    )


def test_it_is_written_as_json():
    Path("paritas.toml").write_text("[compare]\nranks = [0, '2-3']\n")
    paritas("config", "compare", "--json", "settings.json")
    written = json.loads(Path("settings.json").read_text())
    assert written == json.loads(paritas("config", "compare", "--json", "-").stdout)
    assert written["file"] == str(Path("paritas.toml").absolute())
    (ranks,) = [it for it in written["settings"] if it["key"] == "ranks"]
    assert ranks == {
        "command": "compare",
        "key": "ranks",
        "value": ["0", "2-3"],
        "source": "file",
        "origin": "paritas.toml [compare]",
    }


# --- the guide ------------------------------------------------------------------------------------


def blocks(kind):
    found = re.findall(r"^```(\w*)\n(.*?)^```", DOCS.read_text(), flags=re.DOTALL | re.MULTILINE)
    return [text for language, text in found if language == kind]


def test_the_files_of_the_guide_are_understood_and_shown_as_it_says(monkeypatch):
    shared, own = blocks("toml")
    Path("pyproject.toml").write_text(shared)
    paritas("config")
    monkeypatch.setenv("PARITAS_VERIFY_BACKEND", "eager")
    (shown,) = [it for it in blocks("") if it.startswith("$ PARITAS_VERIFY_BACKEND=eager ")]
    assert lines(shown.partition("\n\n")[2]) <= lines(paritas("config", "verify").stdout)
    Path("pyproject.toml").unlink()
    Path("paritas.toml").write_text(own)
    assert 'dtype "bfloat16" paritas.toml [verify]' in lines(paritas("config").stdout)


def test_the_code_of_the_guide_runs_as_written(capsys):
    Path("paritas.toml").write_text("[pytest]\nguard = true\n")
    exec("\n".join(blocks("python")), {})
    assert capsys.readouterr().out == "{'guard': True}\ndefault\n"

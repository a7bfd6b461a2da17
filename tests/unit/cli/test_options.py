"""Where the commands write: `--json -`, and texts that are not ours on a terminal."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

from paritas.cli import main
from paritas.errors import UsageError
from paritas.results.findings import Aspect, Coverage, Finding, Status, Verdict

HOSTILE = "\x1b]0;owned\x07\x1b[2Jgone"


def invoke(*args):
    return CliRunner().invoke(main, ["--no-config", *args])


@pytest.fixture
def verify(monkeypatch, tmp_path):
    """`paritas verify`, with a verdict in place of its work."""
    monkeypatch.chdir(tmp_path)
    finding = Finding(
        path="output", aspect=Aspect.HARNESS, status=Status.UNVERIFIED, reason=f"raised: {HOSTILE}"
    )
    found = Verdict(findings=(finding,), coverage=Coverage(compared=1))
    monkeypatch.setattr("paritas.cli.models._run_verify", lambda *_, **__: found)
    return lambda *options: invoke("verify", "nets:make", *options)


def test_json_to_stdout_leaves_the_text_to_stderr_and_makes_no_file(verify, tmp_path):
    done = verify("--json", "-")
    assert json.loads(done.stdout)["findings"][0]["item"]["name"] == "output"
    assert done.stderr.splitlines()[-1].startswith("unverified: ")
    assert list(tmp_path.iterdir()) == []


def test_json_and_lines_for_github_do_not_mix(verify):
    done = verify("--json", "-", "--format", "github")
    json.loads(done.stdout)
    assert "::error" in done.stderr


def test_two_documents_on_stdout_are_refused(verify):
    done = verify("--json", "-", "--format", "sarif")
    assert done.exit_code == 2
    assert "both write to stdout: add --format-file FILE" in done.output
    again = verify("--json", "-", "--format", "sarif", "--format-file", "out.sarif")
    assert again.exit_code == 3
    json.loads(again.stdout)


def test_a_script_s_stdout_is_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "script.py").write_text("print('mine')\n")
    done = invoke("run", "--json", "-", "script.py")
    assert done.exit_code == 2
    assert "--json - needs a file instead: the script uses stdout" in done.output


def test_every_command_with_json_takes_stdout():
    commands = {name: main.get_command(None, name) for name in main.list_commands(None)}
    takes = {
        name: option.help
        for name, command in commands.items()
        for option in command.params
        if option.name == "json_path"
    }
    assert len(takes) > 8
    assert [name for name, words in takes.items() if "- is stdout" not in words] == ["run"]


def test_what_a_model_wrote_does_not_control_the_terminal(verify):
    done = verify()
    assert "\\x1b]0;owned" in done.output
    assert not {"\x1b", "\x07"} & set(done.output)


def test_an_error_does_not_control_the_terminal(monkeypatch, tmp_path):
    def failing(*_, **__):
        raise UsageError(f"no file {HOSTILE}")

    monkeypatch.setattr("paritas.cli.models._run_verify", failing)
    done = invoke("verify", "nets:make")
    assert done.exit_code == 2
    assert "\\x1b[2Jgone" in done.output
    assert "\x1b" not in done.output


def test_colours_of_our_own_stay(monkeypatch):
    from rich.console import Console
    from rich.text import Text

    from paritas.reports.terminal import Printable

    console = Console(force_terminal=True, color_system="standard", width=80)
    with console.capture() as captured:
        console.print(Printable(Text(f"bad {HOSTILE}", style="red")))
    assert captured.get().startswith("\x1b[31mbad \\x1b]0;owned")

"""Where the commands write: `--json -`, and texts that are not ours on a terminal."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from paritas.app.cli import main
from paritas.core.commands.options import subject_source, with_shrink_command
from paritas.core.errors import UsageError
from paritas.core.results.findings import (
    Aspect,
    Coverage,
    Finding,
    Origin,
    OriginKind,
    Status,
    Verdict,
)
from paritas.core.results.items import Item, ItemKind

HOSTILE = "\x1b]0;owned\x07\x1b[2Jgone"


def invoke(*args):
    return CliRunner().invoke(main, ["--no-config", *args])


@pytest.fixture
def verify(monkeypatch, tmp_path):
    """`paritas verify`, with a verdict in place of its work."""
    monkeypatch.chdir(tmp_path)
    finding = Finding(
        item=Item(ItemKind.OUTPUT, "output"),
        aspect=Aspect.HARNESS,
        status=Status.UNVERIFIED,
        reason=f"raised: {HOSTILE}",
    )
    found = Verdict(findings=(finding,), coverage=Coverage(compared=1))
    monkeypatch.setattr("paritas.verification.command._run_verify", lambda *_, **__: found)
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

    monkeypatch.setattr("paritas.verification.command._run_verify", failing)
    done = invoke("verify", "nets:make")
    assert done.exit_code == 2
    assert "\\x1b[2Jgone" in done.output
    assert "\x1b" not in done.output


def test_colours_of_our_own_stay(monkeypatch):
    from rich.console import Console
    from rich.text import Text

    from paritas.core.reporting.terminal import Printable

    console = Console(force_terminal=True, color_system="standard", width=80)
    with console.capture() as captured:
        console.print(Printable(Text(f"bad {HOSTILE}", style="red")))
    assert captured.get().startswith("\x1b[31mbad \\x1b]0;owned")


# --- What a failure is put down to, and what to do next ------------------------------------------


@pytest.fixture
def wrong(monkeypatch, tmp_path):
    """`paritas verify` with a verdict that fails, in a repository with a module `own_nets`."""
    (tmp_path / ".git").mkdir()
    (tmp_path / "own_nets.py").write_text(
        "import torch\n\n\ndef make():\n    pass\n\n\nclass Net(torch.nn.Module):\n    pass\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delenv("GITHUB_WORKSPACE", raising=False)
    importlib.import_module("own_nets")
    finding = Finding(
        item=Item(ItemKind.OUTPUT, "output"), aspect=Aspect.VALUE, status=Status.DIFFERENT
    )
    found = Verdict(findings=(finding,), coverage=Coverage(compared=1))
    monkeypatch.setattr("paritas.verification.command._run_verify", lambda *_, **__: found)
    yield lambda *options: invoke("verify", "own_nets:make", *options)
    del sys.modules["own_nets"]


@pytest.mark.parametrize(
    ("spec", "line"), [("own_nets:make", 4), ("own_nets:Net", 8), ("own_nets.make", 4)]
)
def test_a_subject_is_found_where_it_is_defined(wrong, spec, line):
    assert subject_source(spec) == ("own_nets.py", line)


@pytest.mark.parametrize("spec", ["own_nets:gone", "own_nets"])
def test_a_subject_without_a_definition_is_its_file(wrong, spec):
    assert subject_source(spec) == ("own_nets.py", 1)


@pytest.mark.parametrize("spec", ["torch:nn.Linear", "hf:Llama", "nowhere.at:all"])
def test_a_subject_outside_of_the_repository_has_no_file(wrong, spec):
    assert subject_source(spec) == ("", 1)


def test_a_failure_without_a_line_is_at_the_candidate_or_else_at_the_factory(wrong):
    first = wrong("--format", "github").stdout.splitlines()[0]
    assert first.startswith("::error file=own_nets.py,line=4,title=")
    first = wrong("--format", "github", "--candidate", "own_nets:Net").stdout.splitlines()[0]
    assert first.startswith("::error file=own_nets.py,line=8,title=")


def test_the_report_of_a_failure_names_the_command_that_makes_a_script_of_it(wrong):
    done = wrong("--backend", "eager", "--train", "--dtype", "bfloat16", "--json", "v.json")
    command = "paritas shrink own_nets:make --backend eager --dtype bfloat16 --train"
    assert f"next: {command}" in done.stdout.splitlines()
    assert json.loads(Path("v.json").read_bytes())["shrink_command"] == command
    assert f"make the smallest script that shows it: {command}" in " ".join(
        invoke("explain", "v.json").stdout.split()
    )


@pytest.mark.parametrize(
    ("name", "command"),
    [
        ("relu_3", "paritas shrink nets:make --at relu_3 --train"),
        ("layers.0/aten.relu.default", "paritas shrink nets:make --train"),  # in no graph
    ],
)
def test_the_command_that_makes_a_script_names_the_node_where_it_starts(name, command):
    finding = Finding(
        item=Item(ItemKind.NODE, name),
        aspect=Aspect.VALUE,
        status=Status.DIFFERENT,
        origin=Origin(kind=OriginKind.NODE, name=name),
    )
    verdict = Verdict(findings=(finding,), coverage=Coverage(compared=1))
    assert with_shrink_command(verdict, ["nets:make", "--train"]).shrink_command == command


def test_what_shrink_cannot_build_has_no_command(wrong):
    assert "next:" not in wrong("--candidate", "own_nets:Net").stdout


def test_what_could_not_be_compared_has_no_command(verify):
    assert "next:" not in verify().stdout

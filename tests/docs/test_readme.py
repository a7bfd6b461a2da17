"""The README: its code runs as written, and its commands exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from paritas.cli.run import run
from paritas.cli.verify import verify
from paritas.numerics.findings import Status

README = Path(__file__).parents[2] / "README.md"


def python_blocks():
    text = README.read_text(encoding="utf-8")
    return re.findall(r"^```python\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE)


@pytest.mark.slow
def test_the_code_runs_as_written(capsys):
    torch.compiler.reset()
    torch.manual_seed(0)
    code = "\n".join(python_blocks())
    assert code.count("verify(") > 3
    exec(compile(code, str(README), "exec"), {})
    printed = capsys.readouterr().out.splitlines()
    passes = ("identical: ", "equivalent: ")
    assert printed[0].startswith(passes)
    data = next(index for index, line in enumerate(printed) if line.startswith("True "))
    assert printed[data + 1].startswith(passes)  # of the guard
    torch.compiler.reset()


@pytest.mark.parametrize(
    ("command", "start"),
    [(verify, "paritas verify package.module:factory "), (run, "paritas run ")],
    ids=["verify", "run"],
)
def test_every_option_it_names_exists_and_none_is_left_out(command, start):
    text = README.read_text(encoding="utf-8")
    usage = text.partition(f"\n{start}")[2].partition("```")[0].partition("\ntorchrun ")[0]
    known = {name for option in command.params for name in [*option.opts, *option.secondary_opts]}
    known = {name for name in known if name.startswith("--")} - {"--help"}
    assert set(re.findall(r"--[a-z-]+", usage)) == known


def test_every_status_has_its_row():
    text = README.read_text(encoding="utf-8")
    assert re.findall(r"^\| `(\w+)` \|", text, flags=re.MULTILINE) == list(Status)


def test_it_is_short():
    assert len(README.read_text(encoding="utf-8").splitlines()) < 200

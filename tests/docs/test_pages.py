"""The guides: the Python of every page is run, and every command in them can be given."""

from __future__ import annotations

import inspect
import re
import shutil
from pathlib import Path

import pytest
import torch

import paritas
from docs.pages import DOCS, ROOT, blocks, run_page, run_python, shell_commands
from paritas.app.cli import _HOMES, main
from paritas.formats.dumps.reading import Dump
from paritas.sharding.operators.library import unregister

PAGES = sorted(page for page in DOCS.rglob("*.md") if page.parent.name != "findings")
# Pages that tests of their own run.
ELSEWHERE = {
    "tutorial.md": "docs/test_tutorial.py",
    "pytest.md": "docs/test_pytest_page.py",
    "interoperation.md": "docs/test_interoperation.py",
    "comparing.md": "docs/test_pages.py",
    "recording.md": "docs/test_pages.py",
    "configuration.md": "unit/app/cli/test_config.py",
    "sweep.md": "integration/test_sweep.py",
}
# Those that call the C++ compiler, or start processes.
LONG = {"turn_a_compiler_on.md", "kernels.md", "shrinking.md", "torchair_msit.md"}
# What a page prints, in order, somewhere in its output; other pages show it themselves.
PRINTED = {
    "partition.md": ["a b+, c b+ -> a c"],
    "graphs.md": [
        "verified aten.gelu.default",
        "split by b different",
        "3 of 4 operators were verified before",
        "model.pt2 True 3",
    ],
    "dtensor_rules.md": ["R, R -> R proved", "S(0), S(0) -> P(avg) refuted"],
    "parallel.md": [": ", "step 1: output 2 "],
    "power.md": ["faults above 8 times the rounding noise are caught"],
    "diagnosis.md": ["output zeros "],
    "dumps.md": [
        "paritas (0,) (0,) ()",
        "forward/1#0/output.0 float32 (2, 3)",
        "torch.Size([2, 3])",
        "Add_2 2 [2.0, 2.0]",
    ],
    "turn_a_compiler_on.md": [": ", "2 of 3 calls, because of `every`", "identical"],
    "write_a_compiler.md": ["graph 0: node ", " | silu | 1 | ", "equivalent ["],
    "write_sharding_rules.md": ["equivalent: ", "is added 4 times", "a b^ -> a c^", "24 items"],
    "check_a_large_model.md": [
        "checked by blocks: 6 blocks (embed, layers.0, layers.1 and 3 more), what lies between them"
    ],
    "port_a_model.md": ["different forward/1#0/output.0"],
    "shrinking.md": ["3 operator calls -> 1 operator call True"],
    "torchair_msit.md": ["AutomaticBufferFusionOp mulmul_1erfaddmul_2\n", "NetOutput NetOutput\n"],
}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    # The one file that a page takes for granted: a checkpoint that nnScaler wrote.
    shutil.copy(ROOT / "tests" / "data" / "nnscaler" / "norms.ckp", "graph.ckp")
    torch.compiler.reset()
    torch.manual_seed(0)
    yield tmp_path
    torch.compiler.reset()


def has_python(page):
    return any(block.language == "python" for block in blocks(page))


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, marks=[pytest.mark.slow] if page.name in LONG else [], id=page.stem)
        for page in PAGES
        if has_python(page) and page.name not in ELSEWHERE
    ],
)
# Dynamo looks at the inputs of the graph after a break.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
def test_the_code_of_a_page_runs_as_written(page, folder, capsys):
    printed = []
    run_page(page, after=lambda block, text: printed.append(text))
    text = "".join(printed)
    assert page.name in PRINTED or any(block.language == "output" for block in blocks(page))
    for wanted in PRINTED.get(page.name, ()):
        assert wanted in text, text
        text = text.partition(wanted)[2]
    if page.name == "partition.md":
        unregister("torch.nn.functional.hardtanh")


@pytest.mark.parametrize("page", ELSEWHERE)
def test_a_page_that_is_not_run_here_is_run_elsewhere(page):
    assert page in (ROOT / "tests" / ELSEWHERE[page]).read_text(encoding="utf-8")


@pytest.mark.slow
def test_the_code_about_recording_runs_as_written(folder):
    run_python(DOCS / "recording.md")
    assert Dump.open("runs/eager").problems == []
    assert Dump.open("runs/fused").header(0).observed[0].status == "unchanged"
    assert list(Path("runs/dump/msit_fx_dump").rglob("addmm-aten.addmm.default.OUTPUT.0.*.npy"))


def test_the_code_about_comparing_runs_as_written(folder):
    model, x = torch.nn.Linear(4, 4), torch.randn(2, 4)
    for name in ("runs/eager", "runs/fused"):
        with torch.no_grad(), paritas.capture(name):
            model(x)
    assert run_python(DOCS / "comparing.md")["comparison"].passed


def test_every_argument_of_a_recording_is_explained():
    text = (DOCS / "recording.md").read_text(encoding="utf-8")
    asked = {*inspect.signature(paritas.capture).parameters}
    asked |= {*inspect.signature(paritas.record).parameters}
    assert not {name for name in asked if f"`{name}" not in text} - {"path"}


# --- commands -------------------------------------------------------------------------------------


def command(name):
    with main.make_context("paritas", [], resilient_parsing=True) as context:
        found = main.get_command(context, name)
    assert found is not None, f"there is no command {name!r}"
    return found


@pytest.mark.parametrize("name", _HOMES)
def test_every_option_is_listed_and_no_other(name):
    text = (DOCS / "commands.md").read_text(encoding="utf-8")
    usages = re.findall(
        rf"^paritas {name}(?= |$)(.*?)(?=^\S|```)", text, flags=re.DOTALL | re.MULTILINE
    )
    assert usages, f"docs/commands.md has no usage of {name}"
    options = command(name).params
    known = {word for option in options for word in [*option.opts, *option.secondary_opts]}
    known = {word for word in known if word.startswith("--")} - {"--help"}
    assert set(re.findall(r"--[a-z][a-z-]*", " ".join(usages))) == known


@pytest.mark.parametrize(
    "page", [ROOT / "README.md", *PAGES], ids=lambda page: page.relative_to(ROOT).as_posix()
)
def test_commands_can_be_given_as_they_stand(page):
    for _, *words in shell_commands(page):
        # The group's own options come first.
        while words[0].startswith("--"):
            assert words.pop(0) in {"--config", "--no-config", "--version", "--help"}
        found = command(words[0])
        with found.make_context(words[0], [], resilient_parsing=True) as context:
            found.make_parser(context).parse_args(words[1:])  # raises on what it does not know

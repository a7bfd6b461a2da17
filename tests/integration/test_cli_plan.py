"""`paritas verify --plan`: what a check costs, without the check."""

from __future__ import annotations

import re
import shutil
import sys
import textwrap
from pathlib import Path

import msgspec
import pytest
import torch
from click.testing import CliRunner

from paritas.app.cli import main
from paritas.core.errors import UsageError
from paritas.core.execution import fitting
from paritas.core.results.findings import Verdict
from paritas.core.torch_private.dynamo import count_compiled_frames
from paritas.verification import verify
from paritas.verification.plan import NOT_A_VERDICT, CheckPlan

NETS = Path(__file__).with_name("nets.py")
PLANNED = """
    import torch
    from torch import nn

    import paritas


    class Layer(nn.Module):
        def __init__(self, width):
            super().__init__()
            self.up = nn.Linear(width, width)
            self.act = nn.Tanh()

        def forward(self, x):
            return x + self.act(self.up(x))


    class Stack(nn.Module):
        def __init__(self, *widths):
            super().__init__()
            self.layers = nn.ModuleList(map(Layer, widths))

        def forward(self, x):
            for layer in self.layers:
                x = layer(x)
            return x


    class Counting(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, x):
            self.calls += 1
            return x * self.calls


    class Irreversible(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, grad):
            raise ValueError("no way back")


    def stack():
        return Stack(4, 4, 4), [torch.ones(2, 4)]


    def counting():
        return Counting(), [torch.ones(2)]


    def function():
        return torch.sin, [torch.ones(2)]


    def double():
        return torch.sin, [torch.ones(2, dtype=torch.float64)]


    def irreversible():
        return Irreversible.apply, [torch.ones(2, requires_grad=True)]


    def two_sets():
        return torch.sin, [paritas.Inputs((torch.ones(n),)) for n in (2, 3)]


    def wrong(model):
        raise AssertionError("a plan makes no candidate of this kind")
"""


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """A current directory with the modules `nets` and `planned`."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    shutil.copy(NETS, tmp_path)
    (tmp_path / "planned.py").write_text(textwrap.dedent(PLANNED), encoding="utf-8")
    yield tmp_path
    for name in ("nets", "planned"):
        sys.modules.pop(name, None)


def paritas(*arguments, **how):
    return CliRunner().invoke(main, ["verify", *arguments], **how)


def plan_of(*arguments):
    """The plan as data."""
    result = paritas(*arguments, "--plan", "--json", "-")
    assert result.exit_code == 0, result.output
    return msgspec.json.decode(result.stdout, type=CheckPlan)


def without_figures(text):
    """The text with other figures in place of those that differ from machine to machine."""
    text = re.sub(r"[\d.e-]+ s\b", "0.1 s", text)
    return re.sub(r"[\d.]+ [kMGT]?B free", "9 GB free", text)


# --- what is shown --------------------------------------------------------------------------------


def test_a_plan_of_a_whole_model():
    result = paritas("planned:stack", "--plan")
    assert result.exit_code == 0
    assert result.stderr == ""
    assert without_figures(result.stdout) == textwrap.dedent("""\
        plan for planned:stack
          candidate  torch.compile (inductor)
          model      60 parameters, 240 B, float32 on cpu
          way        as a whole, with gradients
          memory     at least 4.08 kB more; 9 GB free on cpu

        run                                               estimate
        reference                                         0.1 s (measured)
        candidate, twice                                  0.1 s + compilation
        reference in float64                              0.1 s
        candidate in float64                              0.1 s + compilation
        reference once more                               0.1 s
        perturbed runs, 0 to about 48                     0.1 s each
        together, without perturbed runs                  0.1 s + compilation

        Compilations, at least: 1 natively, 1 in float64, one for each graph. How long
        they take is up to the compiler.
        Perturbed runs have random rounding errors. They are made one by one, only
        while a value is undecided. A failure also takes a search for where it starts.
        Estimates follow from the native run by typical ratios; a check corrects them
        as its steps end.
        not verified: this is a plan; nothing was compared
        """)
    assert max(map(len, result.stdout.splitlines())) <= 80


def test_a_plan_by_blocks_names_them():
    result = paritas("planned:stack", "--plan", "--by", "blocks", "--no-gradients")
    assert result.exit_code == 0
    lines = without_figures(result.stdout).splitlines()
    assert lines[3:13] == [
        "  way        by blocks, without gradients: 3 blocks of 1 kind, and the rest",
        "             layers.0, layers.1, layers.2",
        "  memory     at least 320 B more for the largest block; 9 GB free on cpu",
        "",
        "run                                               estimate",
        "reference                                         0.1 s (measured)",
        "candidate, twice                                  0.1 s + compilation",
        "each block, both sides, natively and in float64   0.1 s + compilation",
        "reference once more                               0.1 s",
        "perturbed runs, 0 to about 48 for a block         0.1 s each",
    ]
    assert lines[-1] == NOT_A_VERDICT
    assert max(map(len, lines)) <= 80


def test_a_plan_says_why_it_is_by_blocks(monkeypatch):
    monkeypatch.setattr(fitting, "free_bytes", lambda _: 1000)
    plan = plan_of("planned:stack")
    assert plan.way == "blocks"
    assert plan.reason == "the whole model needs about 4.08 kB, 1 kB are free on cpu"
    assert plan.free_bytes == 1000
    assert "             because the whole" in paritas("planned:stack", "--plan").stdout


def test_a_model_without_blocks_is_planned_as_a_whole_however_large_it_is(monkeypatch):
    monkeypatch.setattr(fitting, "free_bytes", lambda _: 10)
    assert plan_of("nets:build").way == "whole"
    assert plan_of("planned:stack", "--by", "whole").way == "whole"


# --- what is in it --------------------------------------------------------------------------------


def test_a_plan_is_data():
    plan = plan_of("planned:stack", "--by", "blocks", "--blocks", "layers.[01]")
    assert plan.kind == "plan"
    assert plan.note == NOT_A_VERDICT
    assert plan.blocks == ("layers.0", "layers.1")
    assert (plan.parameters, plan.nbytes, plan.dtype, plan.device) == (60, 240, "float32", "cpu")
    assert (plan.compilations.native, plan.compilations.lifted) == (1 + 2, 2)
    assert plan.native_seconds > 0
    # 1 + 2 native, then 1 + 2 native and 2 lifted runs of the blocks, and the last one.
    lifted = plan.runs[2].seconds / plan.native_seconds - 3
    assert plan.seconds == pytest.approx(plan.native_seconds * (3 + 3 + lifted + 1))


def test_a_model_without_parameters_has_a_plan():
    plan = plan_of("planned:function")
    assert (plan.parameters, plan.needed_bytes, plan.gradients) == (0, 0, False)
    text = paritas("planned:function", "--plan").stdout
    assert "  model      no parameters, float32 on cpu\n" in text
    assert "  memory     no estimate; " in text


def test_a_program_in_float64_is_not_lifted():
    plan = plan_of("planned:double")
    assert [run.what for run in plan.runs] == ["reference", "candidate", "reference once more"]
    assert plan.compilations.lifted == 0


def test_a_reference_that_leaves_state_behind_is_called_twice():
    plan = plan_of("planned:counting")
    assert [run.calls for run in plan.runs] == [2, 2, 2, 2, 1]
    assert plan.runs[0].seconds == pytest.approx(2 * plan.native_seconds)


def test_several_sets_of_inputs_are_in_one_plan():
    assert plan_of("planned:two_sets").input_sets == 2
    text = paritas("planned:two_sets", "--plan").stdout
    assert "  inputs     2 sets; the estimates are for all of them\n" in text


def test_without_a_lifted_run_the_candidate_is_compiled_natively_only():
    plan = plan_of("planned:stack", "--no-lift")
    assert "candidate in float64" not in [run.what for run in plan.runs]
    assert plan.compilations.lifted == 0


def test_a_backward_pass_that_raises_is_noted():
    notes = plan_of("planned:irreversible").notes
    assert notes == ("the reference's backward pass raises ValueError: no way back",)


# --- nothing is compared --------------------------------------------------------------------------


def test_a_plan_compiles_nothing_and_runs_nothing_in_float64(monkeypatch):
    monkeypatch.setattr("paritas.core.execution.evidence.LiftMode", None)
    monkeypatch.setattr("paritas.core.execution.evidence.PerturbMode", None)
    monkeypatch.setattr(verify, "verify", None)
    torch.compiler.reset()
    before = count_compiled_frames()
    plan_of("planned:stack")
    plan_of("planned:stack", "--by", "blocks")
    assert count_compiled_frames() == before


def test_a_candidate_that_is_not_made_by_torch_compile_is_not_made():
    plan = plan_of("planned:stack", "--candidate", "planned:wrong")
    assert plan.candidate == "planned:wrong"
    assert plan.compilations is None
    assert [note for note in plan.notes if note.startswith("the candidate was not made")]


def test_a_plan_cannot_be_read_as_a_verdict(folder):
    result = paritas("planned:stack", "--plan", "--json", "plan.json")
    assert result.exit_code == 0
    with pytest.raises(UsageError, match="cannot read a verdict from JSON"):
        Verdict.from_json((folder / "plan.json").read_bytes())
    explained = CliRunner().invoke(main, ["explain", "plan.json"])
    assert explained.exit_code == 2


def test_a_plan_has_no_findings_to_format():
    result = paritas("planned:stack", "--plan", "--format", "junit")
    assert result.exit_code == 2
    assert "--format cannot be combined with --plan, which has no findings" in result.stderr


def test_a_forgotten_setting_turns_no_check_into_a_plan():
    # Another command has an option of this name, which is a setting there.
    result = paritas("nets:build", "--backend", "eager", env={"PARITAS_PLAN": "1"})
    assert result.stdout.splitlines()[-1].startswith("identical: ")
    result = paritas("nets:build", "--backend", "eager", env={"PARITAS_VERIFY_PLAN": "1"})
    assert result.exit_code == 2
    assert "PARITAS_VERIFY_PLAN" in result.stderr


def test_a_settings_file_cannot_ask_for_a_plan(folder):
    (folder / "paritas.toml").write_text("[verify]\nplan = true\n", encoding="utf-8")
    result = paritas("nets:build", "--backend", "eager")
    assert result.exit_code == 2
    assert "plan" in result.stderr


# --- other ends -----------------------------------------------------------------------------------


def test_a_reference_that_raises_has_no_plan():
    result = paritas("nets:failing", "--plan")
    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr == (
        "Error: there is nothing to plan: the reference raises ValueError: no such thing; fix the "
        "inputs, or check without --plan what the candidate raises\n"
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nets:nothing_like_it"], "module nets has no 'nothing_like_it'"),
        (["nets"], "is not of the form package.module:name"),
        (["nets:bare_tensor"], "for one tensor x, pass [x]"),
        (["nets:build", "--backend", "indutcor"], "did you mean 'inductor'?"),
        (["nets:build", "--by", "blocks"], "by='blocks' found no repeated modules"),
        (["planned:stack", "--blocks", "layer.*"], "no module of the model matches 'layer.*'"),
        (["planned:stack", "--by", "whole", "--blocks", "layers.*"], "cannot be combined"),
    ],
)
def test_a_wrong_target_is_refused_as_without_a_plan(arguments, message):
    planned, checked = paritas(*arguments, "--plan"), paritas(*arguments)
    assert planned.exit_code == checked.exit_code == 2
    assert planned.stderr == checked.stderr
    assert message in planned.stderr


@pytest.mark.usefixtures("ctrl_c")
def test_ctrl_c_ends_a_plan_with_130_and_one_line():
    result = paritas("nets:interrupted", "--plan")
    assert result.exit_code == 130
    assert result.stdout == ""
    assert result.stderr.splitlines()[-1] == "interrupted: there is no verdict"
    assert "Traceback" not in result.stderr

"""`paritas partition`, from the command line to the exit code."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from paritas.app.cli import main
from paritas.core.results.findings import Status, Verdict
from paritas.sharding.operator_check import read_argument

LINEAR = ("torch.nn.functional:linear", "--arg", "4x8", "--arg", "10x8", "--arg", "10")
MATMUL = ("torch:matmul", "--arg", "4x8", "--arg", "8x6")

OPERATORS = """
import torch

def scaled(x, w, heads=2):
    return (x @ w).view(x.shape[0], heads, -1).softmax(-1)

def centred(x):
    return x - x.mean()
"""


def partition(*arguments):
    return CliRunner().invoke(main, ["partition", *map(str, arguments)])


def words(result):
    """What was printed, without regard to where lines are broken."""
    return " ".join(result.stdout.split())


def rows(result):
    """The table's rows, each as its cells."""
    lines = result.stdout.splitlines()
    begin = next(at for at, line in enumerate(lines) if line.startswith("───")) + 1
    end = next(at for at, line in enumerate(lines) if line.startswith("option: "))
    return [line.split() for line in lines[begin:end]]


@pytest.fixture
def operators(tmp_path, monkeypatch):
    (tmp_path / "own_operators.py").write_text(OPERATORS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)


# --- declared splits ------------------------------------------------------------------------------


def test_splits_that_the_library_knows_are_checked_and_the_exit_code_is_0():
    result = partition(*LINEAR)
    assert result.exit_code == 0, result.output
    assert "torch.nn.functional.linear over 2 ranks, rule from the library:" in words(result)
    assert [row[0] for row in rows(result)] == ["0,0", "0,1", "1,0"]
    assert result.stdout.splitlines()[-1].startswith(
        "equivalent: the candidate differs by rounding"
    )


def test_a_rule_that_the_user_registered_is_called_so(operators):
    registered = "from paritas.sharding.operators.library import annotated\n\n\n"
    path = Path("registering.py")
    path.write_text(registered + '@annotated("m n -> m n")\ndef doubled(x):\n    return 2 * x\n')
    result = partition("registering:doubled", "--arg", "4x4")
    assert result.exit_code == 0, result.output
    assert "registering.doubled over 2 ranks, rule registered:" in words(result)


def test_a_wrong_annotation_is_different_and_the_exit_code_is_1():
    result = partition(*MATMUL, "--annotation", "m k, k n -> m n")
    assert result.exit_code == 1, result.output
    [row] = [row for row in rows(result) if row[0] == "0,1"]
    assert row[1:5] == ["k", "different", "different", "different"]
    assert float(row[5]) > 0.1
    assert "option 0,1, output: different (value)" in words(result)


def test_a_wrong_split_is_shown_by_a_script_on_the_smallest_shapes(tmp_path):
    arguments = ("--annotation", "m k, k n -> m n", "--shrink", tmp_path)
    result = partition(*MATMUL, *arguments)
    assert result.exit_code == 1, result.output
    script = tmp_path / "repro" / "00_matmul.py"
    assert f"script: {script}; run by itself it fails: the fault is there" in result.stdout
    assert "torch.randn([2, 2]" in script.read_text()
    assert result.stdout.splitlines()[-1].startswith("different: ")


def test_without_a_wrong_split_no_script_is_written(tmp_path):
    result = partition(*MATMUL, "--shrink", tmp_path / "bug")
    assert result.exit_code == 0, result.output
    assert f"no script in {tmp_path / 'bug'}: nothing failed" in result.stdout
    assert not (tmp_path / "bug").exists()


def test_a_refused_option_is_unverified_even_next_to_a_right_one():
    result = partition("torch:softmax", "--arg", "4x8", "--kwarg", "dim=1", "--option", "0,1")
    assert result.exit_code == 3, result.output
    assert "idx 0, dim 1 of softmax cannot be split" in words(result)
    both = partition(
        "torch:softmax", "--arg", "4x8", "--kwarg", "dim=1", "--option", "0,0", "--option", "0,1"
    )
    assert both.exit_code == 3, both.output
    assert [row[0] for row in rows(both)] == ["0,0", "0,1"]


def test_the_verdict_is_written_whole(tmp_path):
    result = partition(*MATMUL, "--json", tmp_path / "verdict.json")
    assert result.exit_code == 0, result.output
    content = (tmp_path / "verdict.json").read_text()
    verdict = Verdict.from_json(content)
    assert verdict.passed
    assert {finding.path.partition(", ")[0] for finding in verdict.findings} == {
        "option 0,0",
        "option 0,1",
        "option 1,1",
    }
    assert json.loads(content)["notes"][0].startswith("rule (from the library): ")


# --- splits that are found ------------------------------------------------------------------------


def test_splits_of_an_own_operator_are_found_and_checked(operators):
    result = partition(
        "own_operators:scaled", "--arg", "4x8", "--arg", "8x12", "--kwarg", "heads=4"
    )
    assert result.exit_code == 0, result.output
    assert "rule found by running: " in words(result)
    assert "; heads=" in words(result)
    assert [row[0] for row in rows(result)] == ["0,0", "1,1"]


def test_an_operator_that_cannot_be_split_is_unverified(operators):
    result = partition("own_operators:centred", "--arg", "4x8")
    assert result.exit_code == 3, result.output
    assert "nothing to check: no dimension was found along which it can be split" in words(result)


def test_an_option_that_was_not_found_is_unverified(operators):
    result = partition("own_operators:scaled", "--arg", "4x8", "--arg", "8x12", "--option", "0,1")
    assert result.exit_code == 3, result.output
    told = "running it found no valid split of this dimension over 2 ranks"
    assert told in words(result)


def test_what_the_library_knows_can_be_found_out_again():
    result = partition(*LINEAR, "--discover", "--dtype", "bfloat16", "--ranks", "4")
    assert result.exit_code == 0, result.output
    assert "over 4 ranks, rule found by running:" in words(result)
    assert [row[0] for row in rows(result)] == ["0,0", "0,1", "1,0"]


def test_the_report_fits_80_columns():
    for options in ((), ("--discover",), ("--annotation", "m k, n k, n -> m n")):
        lines = partition(*LINEAR, *options).stdout.splitlines()
        assert max(map(len, lines[:-1])) <= 80


# --- the spellings of nnScaler's document ---------------------------------------------------------


@pytest.mark.parametrize(
    "arguments",
    [
        ("torch.conv2d", "--arg", "8x32x32", "--arg", "16x4x3x3", "--arg", "16",
         "--kwarg", "stride=1", "--kwarg", "padding=0", "--kwarg", "dilation=1",
         "--kwarg", "groups=2", "--option", "0,0"),
        ("torch.nn.functional.dropout", "--arg", "1x9x768", "--kwarg", "p=0.1",
         "--kwarg", "training=False", "--kwarg", "inplace=False", "--option", "0,2"),
        ("torch.where", "--arg", "1x1x9x9", "--arg", "1x12x9x9", "--arg", "1", "--option", "1,1"),
        ("torch.Tensor.view", "--arg", "1x9x768", "--kwarg", "size=(-1, 768)", "--option", "0,2"),
        ("nnscaler.runtime.function.embedding", "--arg", "1x9", "--arg", "50x8",
         "--kwarg", "padding_idx=None", "--kwarg", "start=0", "--kwarg", "stop=50",
         "--option", "1,1"),
        ("nnscaler.graph.function.wrapnn.wrap_batchnorm2d_func", "--arg", "4x6x2x2",
         *["--arg", "6"] * 4, "--arg", "1", "--kwarg", "momentum=0.1", "--kwarg", "training=True",
         "--kwarg", "track_running_stats=True", "--kwarg", "eps=1e-05",
         "--option", "0,0", "--option", "0,1"),
        ("torch.addmm", "--arg", "2x3", "--arg", "2x3", "--arg", "3x3", "--option", "0,0"),
    ],
    ids=lambda arguments: arguments[0],
)  # fmt: skip
def test_the_documents_spellings_are_those_of_the_command(arguments):
    result = partition(*arguments)
    assert result.exit_code == 0, result.output
    assert f"{arguments[0]} over 2 ranks, rule from the library:" in words(result)
    assert len(rows(result)) == arguments.count("--option")


def test_a_passing_check_notes_what_each_rank_keeps():
    result = partition(
        "nnscaler.graph.function.wrapnn.wrap_instancenorm2d_func", "--arg", "4x6x2x2",
        *["--arg", "6"] * 4, "--kwarg", "training=True", "--option", "0,0",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    assert "note: args[3] (running_mean) drifts: after the call each of 2 ranks" in words(result)
    assert "args[4] after the call: the rule leaves it to each rank" in words(result)


def test_a_rule_that_splits_nothing_passes_with_a_note():
    result = partition(
        "nnscaler.runtime.function.fullslice", "--arg", "1x1x16x16", "--arg", "slice(None)",
        "--arg", "slice(None)", "--arg", "slice(0, 9)", "--arg", "value=slice(None, 9, None)",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    told = "nothing to split: the rule splits no dimension; each of 2 ranks ran the whole"
    assert told in words(result)
    assert [row[0] for row in rows(result)] == ["nothing"]


# --- slips ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("torch.matmul()",), "OPERATOR 'torch.matmul()' is not a dotted name such as"),
        (("ops/mine.py:scaled",), "'ops/mine.py:scaled' is not a dotted name such as"),
        (("matmul",), "OPERATOR 'matmul' has no module; write 'package.module.matmul'"),
        (("torch:matmull", "--arg", "4x8"), "did you mean 'matmul'"),
        (("torch:relu", "--arg", "4y8"), "--arg '4y8' cannot be parsed: write 8x32, "),
        (("torch:relu", "--arg", "slice(open(0))"), "--arg 'slice(open(0))' cannot be parsed"),
        (("torch:relu", "--arg", "4x8:int65"), "'4x8:int65': torch has no dtype 'int65'"),
        (("torch:relu", "--arg", "4:float32<9"), "'<9' needs an integer dtype"),
        (("torch:relu", "--arg", "0x8"), "a tensor of shape (0, 8) is empty"),
        (("torch:relu", "--arg", "4", "--kwarg", "dim"), "--kwarg 'dim' is not of the form name="),
        (("torch:relu", "--arg", "4", "--option", "0"), "--option '0' is not of the form idx,dim"),
        ((*MATMUL, "--annotation", "m k+"), "m k+"),
        (
            (*MATMUL, "--annotation", "m -> m", "--discover"),
            "--annotation and --discover exclude each other",
        ),
        (
            ("torch:matmul", "--arg", "4x8", "--arg", "9x6", "--discover"),
            "the operator itself fails on these arguments: RuntimeError: mat1 and mat2",
        ),
        ((*MATMUL, "--device", "abacus"), "--device 'abacus' cannot be used: Expected one"),
        ((*MATMUL, "--device", "meta"), "--device 'meta' holds no values"),
        ((*MATMUL, "--confirm", "mpi"), "'mpi' is not one of 'gloo', 'nccl'"),
        ((*MATMUL, "--confirm", "nccl"), "NCCL needs tensors on GPUs, but the device is 'cpu'"),
    ],
)
def test_wrong_usage_is_reported_and_the_exit_code_is_2(arguments, message):
    result = partition(*arguments)
    assert result.exit_code == 2, result.output
    assert message in " ".join(result.stderr.split())


def test_an_argument_is_a_tensor_a_number_or_a_literal():
    assert read_argument("8x32", "--arg").shape == (8, 32)
    assert read_argument("16", "--arg").shape == (16,)
    assert read_argument("16", "--kwarg k", keyword=True).value == 16
    assert read_argument("2.5", "--arg").value == 2.5
    assert read_argument("value=16", "--arg").value == 16
    assert read_argument("value=(8, None)", "--arg").value == (8, None)
    assert read_argument("slice(0, 9)", "--arg").value == slice(0, 9)
    assert read_argument("mean", "--kwarg reduction", keyword=True).value == "mean"
    assert read_argument("True", "--kwarg training", keyword=True).value is True
    assert read_argument("torch.float64", "--kwarg dtype", keyword=True).value is torch.float64
    indices = read_argument("4x6:int32<9", "--arg")
    drawn = indices.generator(indices.shape)
    assert (drawn.dtype, int(drawn.max()), int(drawn.min()) >= 0) == (torch.int32, 8, True)


def test_the_status_of_a_split_is_the_gravest_of_its_findings(tmp_path):
    path = tmp_path / "verdict.json"
    partition(*MATMUL, "--annotation", "m k, k n -> m n", "--json", path)
    verdict = Verdict.from_json(path.read_text())
    assert verdict.status is Status.DIFFERENT
    assert verdict.exit_code == 1

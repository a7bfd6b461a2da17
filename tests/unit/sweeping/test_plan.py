"""From TOML to runs; every mistake shows the value, the row and what to write."""

from __future__ import annotations

from pathlib import Path

import pytest

from paritas.core.errors import UsageError
from paritas.sweeping.plan import plan_tasks
from paritas.sweeping.rows import SweepRun

ZOO = Path(__file__).parents[3] / "zoo"
TOML = """
[defaults]
dtypes = ["float32", "bfloat16"]
seconds = 60

[[target]]
name = "hf:BertModel"
modes = ["eval", "train-forward"]

[[target]]
names = ["pkg.module:build", "timm:resnet18"]
dtypes = "float16"
devices = ["cuda"]
candidates = ["max-autotune-no-cudagraphs", "pkg:compile"]
seconds = 5.5
memory = "2 GB"
"""


def read(tmp_path, text, **given):
    path = tmp_path / "targets.toml"
    path.write_text(text, encoding="utf-8")
    return plan_tasks(path, **given)


def refusal(rows, **given):
    with pytest.raises(UsageError) as raised:
        plan_tasks(rows, **given)
    return str(raised.value)


def test_the_product_of_the_settings_makes_the_runs(tmp_path):
    tasks = read(tmp_path, TOML)
    assert [str(task.run) for task in tasks] == [
        "hf:BertModel (float32, cpu, eval, inductor)",
        "hf:BertModel (float32, cpu, train-forward, inductor)",
        "hf:BertModel (bfloat16, cpu, eval, inductor)",
        "hf:BertModel (bfloat16, cpu, train-forward, inductor)",
        "pkg.module:build (float16, cuda, eval, max-autotune-no-cudagraphs)",
        "pkg.module:build (float16, cuda, eval, pkg:compile)",
        "timm:resnet18 (float16, cuda, eval, max-autotune-no-cudagraphs)",
        "timm:resnet18 (float16, cuda, eval, pkg:compile)",
    ]
    assert {(task.seconds, task.memory) for task in tasks[:4]} == {(60.0, None)}
    assert {(task.seconds, task.memory) for task in tasks[4:]} == {(5.5, 2_000_000_000)}


def test_the_command_line_is_above_the_defaults_and_below_a_row(tmp_path):
    tasks = read(tmp_path, TOML, seconds=7, memory="1GiB")
    assert {(task.seconds, task.memory) for task in tasks[:4]} == {(7.0, 2**30)}
    assert {(task.seconds, task.memory) for task in tasks[4:]} == {(5.5, 2_000_000_000)}


def test_a_list_of_names_is_enough():
    (task,) = plan_tasks(["pkg:build"])
    assert task.run == SweepRun(target="pkg:build")
    assert task.run.settings == ("own dtype", "cpu", "eval", "inductor")


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (
            "resnet18",
            (
                "targets, target 1: name = 'resnet18' is not a target: write "
                "package.module:factory, hf:Name, timm:Name, torchvision:Name, or a .pt2 file"
            ),
        ),
        ("gone.pt2", "targets, target 1: name = 'gone.pt2': there is no such file"),
        (7, "targets, target 1 is 7: use a target's name, or a table with a name"),
        (
            {"dtypes": ["float32"]},
            (
                'targets, target 1 has no name: write name = "package.module:factory", or '
                "names = [...]"
            ),
        ),
        (
            {"name": "a:b", "names": ["c:d"]},
            (
                "targets, target 1 has both name and names: write name = "
                '"package.module:factory", or names = [...]'
            ),
        ),
        (
            {"name": "a:b", "dtype": "float32"},
            "targets, target 1: unknown key 'dtype'; did you mean 'dtypes'?",
        ),
        (
            {"name": "a:b", "dtypes": ["bf16"]},
            "targets, target 1: unknown dtype 'bf16'; did you mean 'bfloat16'?",
        ),
        (
            {"name": "a:b", "modes": "evaluate"},
            "targets, target 1: unknown mode 'evaluate'; did you mean 'eval'?",
        ),
        (
            {"name": "a:b", "dtypes": 32},
            'targets, target 1: dtypes = 32: write a list, ["..."]',
        ),
        (
            {"name": "a:b", "modes": []},
            "targets, target 1: modes = []: add at least one, or remove modes",
        ),
        (
            {"name": "a:b", "devices": ["GPU 0"]},
            'targets, target 1: unknown device \'GPU 0\'; write "cpu", "cuda" or "cuda:1"',
        ),
        (
            {"name": "a:b", "candidates": ["pkg:"]},
            (
                "targets, target 1: candidate 'pkg:' is not the name of a backend, a mode of "
                "Inductor, or package.module:function"
            ),
        ),
        (
            {"name": "a:b", "seconds": 0},
            "targets, target 1: seconds = 0: write the time limit of a run, as in 900",
        ),
        (
            {"name": "a:b", "memory": "8 apples"},
            (
                "targets, target 1: memory = '8 apples' is not a size: write \"8 GB\", or a number "
                "of bytes"
            ),
        ),
        (
            {"name": "a:b", "inputs": "draw"},
            "targets, target 1: inputs = 'draw' is not of the form package.module:function",
        ),
    ],
)
def test_a_mistake_in_a_row_is_refused(row, message):
    assert refusal([row]) == message


def test_a_misspelt_candidate_is_refused_before_anything_runs():
    message = refusal([{"name": "a:b", "candidates": ["inductr"]}])
    assert message == (
        "targets: unknown candidate 'inductr'; did you mean 'inductor'?; for your own function, "
        "write package.module:function"
    )


def test_the_same_run_twice_is_refused():
    rows = ["a:b", {"name": "a:b", "modes": ["train", "eval"]}]
    assert refusal(rows) == (
        "targets, target 2 repeats the run 'a:b (own dtype, cpu, eval, inductor)' of target 1: "
        "remove one of the two"
    )


def test_an_exported_program_has_a_dtype_and_a_mode_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "net.pt2").write_bytes(b"")
    assert len(plan_tasks(["net.pt2"])) == 1
    assert refusal([{"name": "net.pt2", "dtypes": ["float16"]}]) == (
        "targets, target 1: dtypes = ['float16'], but 'net.pt2' was exported in a fixed dtype: "
        'remove dtypes, or write ["own"]'
    )
    assert refusal([{"name": "net.pt2", "modes": ["train"]}]) == (
        "targets, target 1: modes = ['train'], but 'net.pt2' was exported in a fixed mode: "
        'write ["eval"], or ["eval-forward"] for no gradients'
    )


def test_nothing_to_sweep_is_refused():
    assert refusal([]) == (
        'targets names no target: add a row, [[target]] with name = "package.module:factory", or '
        '[[kernel]] with reference = "task.py"'
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[[targets]]\nname = 'a:b'\n", "unknown table [targets]; did you mean 'target'?"),
        ("[target]\nname = 'a:b'\n", "write [[target]] with two brackets"),
        ("[defaults]\nname = 'a:b'\n", "[defaults]: name belongs to a row, [[target]]"),
        ("[defaults]\nmodes = ['x']\n", "[defaults]: unknown mode 'x'; known are eval, train"),
        ("name = ", "is not TOML: Invalid value (at end of document)"),
    ],
)
def test_a_mistake_in_the_file_is_refused(tmp_path, text, message):
    with pytest.raises(UsageError, match=r"targets\.toml") as raised:
        read(tmp_path, text)
    assert message in str(raised.value)


@pytest.mark.parametrize("path", sorted(ZOO.glob("*.toml")), ids=lambda path: path.stem)
def test_the_files_of_the_zoo_can_be_read(path):
    assert len(plan_tasks(path)) >= 200


def test_a_file_that_is_not_there_is_refused(tmp_path):
    assert refusal(tmp_path / "none.toml").endswith("none.toml': No such file or directory")

"""Rows of kernels: which candidate is judged against which reference."""

from __future__ import annotations

import pytest

from paritas.core.errors import UsageError
from paritas.sweeping.plan import operator_of, plan_tasks


@pytest.fixture
def folder(tmp_path, monkeypatch):
    for path in (
        "tasks/softmax.py",
        "tasks/level1/norm.py",
        "kernels/softmax.py",
        "kernels/level1/norm/first.py",
        "kernels/level1/norm/second.py",
        "overrides/add__Tensor/add__Tensor_implementation_v1.py",
        "overrides/relu/relu_implementation_v1.py",
        "overrides/relu/relu_implementation_v2.py",
    ):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text("")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def runs(**row):
    return [task.run for task in plan_tasks([row])]


def pairs(**row):
    return [(run.target, run.candidate) for run in runs(**row)]


def refusal(**row):
    with pytest.raises(UsageError) as raised:
        plan_tasks([row])
    return str(raised.value)


@pytest.mark.usefixtures("folder")
def test_kernels_of_a_folder_belong_to_the_tasks_of_their_names():
    assert pairs(reference="tasks", candidates="kernels") == [
        ("tasks/level1/norm.py", "kernels/level1/norm/first.py"),
        ("tasks/level1/norm.py", "kernels/level1/norm/second.py"),
        ("tasks/softmax.py", "kernels/softmax.py"),
    ]


def test_a_kernel_without_a_task_is_refused_before_anything_runs(folder):
    (folder / "kernels" / "sofmax.py").write_text("")
    assert refusal(reference="tasks", candidates="kernels") == (
        "targets, kernel 1: 1 of 4 files in 'kernels' have no task of their name in 'tasks', such "
        "as sofmax.py: a kernel of softmax.py is softmax.py or softmax/NAME.py"
    )


@pytest.mark.usefixtures("folder")
def test_one_reference_has_many_kernels():
    found = pairs(reference="tasks/softmax.py", candidates=["kernels/softmax.py:fast", "kernels"])
    assert found == [
        ("tasks/softmax.py", "kernels/softmax.py:fast"),
        ("tasks/softmax.py", "kernels/softmax.py"),
    ]


@pytest.mark.usefixtures("folder")
def test_overrides_of_operators_are_found_by_their_folders():
    assert pairs(operators="overrides") == [
        (
            "aten.add.Tensor",
            "overrides/add__Tensor/add__Tensor_implementation_v1.py:add__Tensor_kernel_impl",
        ),
        ("aten.relu", "overrides/relu/relu_implementation_v1.py:relu_kernel_impl"),
        ("aten.relu", "overrides/relu/relu_implementation_v2.py:relu_kernel_impl"),
    ]


def test_an_operator_is_named_by_its_folder():
    assert operator_of("add___Tensor") == "aten.add_.Tensor"
    assert operator_of("_native_batch_norm_legit__no_stats") == (
        "aten._native_batch_norm_legit.no_stats"
    )
    assert operator_of("aten__relu__default") == "aten.relu.default"


@pytest.mark.usefixtures("folder")
def test_a_file_has_rows_of_models_and_of_kernels(tmp_path):
    path = tmp_path / "targets.toml"
    path.write_text(
        "[defaults]\nseconds = 60\nmodes = ['train']\n[[target]]\nname = 'a:b'\n"
        "[[kernel]]\nreference = 'aten.relu'\ncandidates = 'kernels/softmax.py:f'\n"
        "fixed = ['shapes', 'dtypes']\ncases = 8\nforbid = 'torch.relu'\n"
    )
    model, kernel = plan_tasks(path)
    assert str(model.run) == "a:b (own dtype, cpu, train, inductor)"
    assert str(kernel.run) == (
        "aten.relu (cpu, kernel 8 cases fixed dtypes fixed shapes no torch.relu, "
        "kernels/softmax.py:f)"
    )
    assert kernel.seconds == 60


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"reference": "x.py", "candidates": "y:z"}, "there is no file 'x.py'"),
        ({"reference": "a:b"}, 'write reference = "task.py" and candidates = ["kernel.py"]'),
        ({"reference": "a:b", "candidates": "c:d", "cases": 0}, "cases = 0 is not a number"),
        ({"reference": "a:b", "candidates": "c:d", "fixed": "shape"}, "did you mean 'shapes'?"),
        ({"reference": "a:b", "candidates": "c:d", "dtypes": "x"}, "unknown key 'dtypes'"),
        ({"reference": "a:b", "candidates": "c:d", "seconds": 0}, "seconds = 0"),
        ({"operators": "nowhere"}, "operators = 'nowhere' is not a folder"),
        ({"operators": "x", "candidates": "c:d"}, "operators is a folder of candidates"),
    ],
)
def test_a_mistake_in_a_row_is_refused(row, message):
    assert message in refusal(**row)


@pytest.mark.usefixtures("folder")
def test_a_row_may_ask_for_results_in_new_memory():
    row = {"reference": "tasks/softmax.py", "candidates": "kernels/softmax.py"}
    (run,) = runs(**row, fresh_outputs=True)
    assert run.kernel.fresh_outputs
    assert run.kernel.words == "kernel fresh outputs"
    assert "fresh_outputs = 1: write true or false" in refusal(**row, fresh_outputs=1)

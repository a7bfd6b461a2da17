"""References and candidates by name."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from paritas.core.errors import UsageError
from paritas.kernels.sides import load_side, parse_side
from paritas.kernels.weights import match_weights

if TYPE_CHECKING:
    from pathlib import Path

MODEL = """
import torch
from torch import nn

class Model(nn.Module):
    def __init__(self, n):
        super().__init__()
        self.fc = nn.Linear(n, n)
    def forward(self, x):
        return self.fc(x)

class ModelNew(Model):
    pass
"""


def test_a_file_has_the_usual_classes(tmp_path: Path) -> None:
    file = tmp_path / "task_of_sides.py"
    file.write_text(MODEL)
    reference = load_side(parse_side(file, "REFERENCE"), is_candidate=False)
    candidate = load_side(parse_side(str(file), "CANDIDATE"), is_candidate=True)
    assert (reference.target.__name__, candidate.target.__name__) == ("Model", "ModelNew")
    left, right = (side.construct((3,), {}, seed=5) for side in (reference, candidate))
    assert torch.equal(left.fc.weight, right.fc.weight)


def test_an_operator_is_found_by_its_name() -> None:
    side = load_side(parse_side("aten.relu", "REFERENCE"), is_candidate=False)
    assert torch.equal(side.target(torch.tensor([-1.0, 2.0])), torch.tensor([0.0, 2.0]))


def test_a_function_is_found_by_its_own_name() -> None:
    name = parse_side(match_weights, "CANDIDATE")
    assert (name.module, name.name) == ("paritas.kernels.weights", "match_weights")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("nowhere.py", "there is no file 'nowhere.py'"),
        ("just words", "is not a file.py, file.py:name, package.module:name or an operator"),
        (lambda x: x, "has no name in its module"),
    ],
)
def test_what_cannot_be_found_is_refused(given: object, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        parse_side(given, "CANDIDATE")  # type: ignore[arg-type]


def test_a_misspelled_function_is_refused_with_a_hint(tmp_path: Path) -> None:
    file = tmp_path / "kernels_of_sides.py"
    file.write_text("def softmax(x):\n    return x\n")
    with pytest.raises(UsageError, match="did you mean 'softmax'"):
        load_side(parse_side(f"{file}:softmix", "CANDIDATE"), is_candidate=True)


def test_parameters_are_matched_by_name_or_by_value() -> None:
    weight, bias = torch.arange(6.0).reshape(2, 3), torch.tensor([1.0, 2.0])
    reference = {"fc.weight": weight, "fc.bias": bias}
    assert match_weights(reference, {"fc.weight": weight + 1, "b": bias.clone()}) == {
        "fc.weight": "fc.weight",
        "b": "fc.bias",
    }
    assert match_weights(reference, {"w": weight + 1}) == {}


def test_an_override_may_have_an_underscore_in_front(tmp_path: Path) -> None:
    file = tmp_path / "_softmax_implementation_v1.py"
    file.write_text("def _softmax_kernel_impl(x):\n    return x\n\n\ndef _help():\n    pass\n")
    candidate = load_side(parse_side(file, "CANDIDATE"), is_candidate=True)
    assert candidate.target.__name__ == "_softmax_kernel_impl"

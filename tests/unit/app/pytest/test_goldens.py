"""What is kept of values, what counts as a change, and that a damaged golden never passes."""

from __future__ import annotations

import math
from typing import NamedTuple

import pytest
import torch

from paritas.app.pytest.parity import golden_of, judge_golden, read_golden, write_golden
from paritas.core.errors import UsageError
from paritas.core.numerics.checkers import AllCloseValueChecker
from paritas.core.results.findings import Aspect, Status


class Pair(NamedTuple):
    left: object
    right: object


def kept(tmp_path, tree):
    write_golden(tmp_path / "it", golden_of(tree), "test_x.py::test_y")
    return read_golden(tmp_path / "it")


def judged(tmp_path, before, now, **settings):
    return judge_golden(kept(tmp_path, before), golden_of(now), **settings)


TREES = [
    torch.arange(6.0).reshape(2, 3).t(),
    {"logits": torch.zeros(2, 0), "tokens": [1, True, None, "a'b", b"\x00"]},
    Pair(math.nan, -math.inf),
    (
        torch.tensor([1.5], dtype=torch.bfloat16),
        torch.tensor(1 + 2j),
        torch.ones(2, 3).expand(2, 3),
    ),
    torch.ones(1, 4).expand(3, 4),
]


@pytest.mark.parametrize("tree", TREES, ids=str)
def test_what_was_written_is_identical(tmp_path, tree):
    verdict = judged(tmp_path, tree, tree)
    assert verdict.status is Status.IDENTICAL, str(verdict)


@pytest.mark.parametrize(
    ("before", "now", "aspect"),
    [
        (torch.ones(3), torch.ones(3) * 1.001, Aspect.VALUE),
        (torch.ones(3), torch.ones(3, dtype=torch.float64), Aspect.DTYPE),
        (torch.ones(3), torch.ones(3, 1), Aspect.SHAPE),
        (torch.ones(3), torch.ones(1), Aspect.SHAPE),
        ({"a": torch.ones(3)}, {"b": torch.ones(3)}, Aspect.STRUCTURE),
        ([torch.ones(3)], (torch.ones(3),), Aspect.STRUCTURE),
        ([torch.ones(3)], [torch.ones(3), torch.ones(3)], Aspect.STRUCTURE),
        ([1, {}], [1, []], Aspect.STRUCTURE),
        ([1], [True], Aspect.VALUE),
        ([0.5], [math.nan], Aspect.VALUE),
        (["a"], ["b"], Aspect.VALUE),
    ],
    ids=str,
)
def test_a_change_is_different(tmp_path, before, now, aspect):
    verdict = judged(tmp_path, before, now)
    assert verdict.status is Status.DIFFERENT
    assert [finding.aspect for finding in verdict.failures] == [aspect]


def test_a_golden_of_a_sparse_tensor_keeps_its_layout(tmp_path):
    sparse = torch.eye(3).to_sparse()
    assert judged(tmp_path, sparse, sparse).status is Status.IDENTICAL
    assert judged(tmp_path, sparse, torch.eye(3)).status is Status.DIFFERENT
    assert judged(tmp_path, sparse, 2 * sparse).status is Status.DIFFERENT


def test_a_golden_that_does_not_say_what_a_number_was_still_serves(tmp_path):
    old = kept(tmp_path, [1.5])
    del old.containers["value[0]"]
    assert judge_golden(old, golden_of([1.5])).status is Status.IDENTICAL
    assert judged(tmp_path, [1.5], [torch.tensor(1.5).double()]).status is Status.DIFFERENT


def test_rounding_is_equivalent(tmp_path):
    values = torch.linspace(1, 2, 64)
    verdict = judged(tmp_path, values, values * (1 + 2**-23))
    assert verdict.status is Status.EQUIVALENT


def test_a_checker_of_the_callers_own_decides(tmp_path):
    before, now = torch.ones(3), torch.ones(3) * 1.001
    verdict = judged(tmp_path, before, now, checkers=[AllCloseValueChecker(rtol=0.01)])
    assert verdict.status is Status.EQUIVALENT


def test_names_that_changed_are_told(tmp_path):
    verdict = judged(tmp_path, {"a": 1, "b": 2}, {"a": 1, "c": 2})
    assert verdict.failures[0].reason == (
        "the values have other names: 1 missing (value['b']), 1 new (value['c'])"
    )
    assert verdict.coverage.unmatched == (
        "value['b'] (golden only)",
        "value['c'] (not in the golden)",
    )


@pytest.mark.parametrize(
    "tree", [[], {}, object(), [torch.float32]], ids=["list", "dict", "object", "dtype"]
)
def test_what_cannot_be_kept_is_refused(tree):
    with pytest.raises(UsageError, match="golden"):
        golden_of(tree)


def test_a_damaged_golden_is_refused(tmp_path):
    kept(tmp_path, torch.ones(64))
    data = next((tmp_path / "it").rglob("*.safetensors"))
    content = bytearray(data.read_bytes())
    content[-1] ^= 0xFF
    data.write_bytes(bytes(content))
    with pytest.raises(UsageError, match=r"digest|damaged|not those"):
        read_golden(tmp_path / "it")


def test_text_in_a_golden_is_never_run(tmp_path):
    kept(tmp_path, [1])
    index = next((tmp_path / "it").rglob("index.jsonl"))
    text = index.read_text(encoding="utf-8")
    index.write_text(text.replace('"value":"1"', '"value":"print(1)"'), encoding="utf-8")
    with pytest.raises(UsageError, match="is not a golden"):
        read_golden(tmp_path / "it")

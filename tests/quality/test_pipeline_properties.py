"""Random small programs through the whole pipeline: what must hold of every one of them.

A program is drawn as a list of steps on a matrix; each step has a second spelling that is no less
accurate. Values have seed 0. With PARITAS_WHOLE_CORPUS=1 far more programs are drawn, and others
each time.
"""

from __future__ import annotations

import dataclasses
import json
import os
import tempfile
from pathlib import Path

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from torch import nn

import paritas
from letters import LETTERS
from paritas.core.results.findings import Status, Verdict

WHOLE = os.environ.get("PARITAS_WHOLE_CORPUS") == "1"
QUIET = paritas.VerifyConfig(raise_on_mismatch=False)
# A fault of large effect: by this share of the largest result, in a program whose own rounding is
# below that one. What is nearer to its rounding is measured in benchmarks/.
LARGE, ROUNDING = 0.25, 0.01


def drawn(examples):
    """So many programs in the usual run, and always the same ones; many more in the whole."""
    return settings(
        max_examples=examples * 25 if WHOLE else examples,
        suppress_health_check=list(HealthCheck),
    )


def wide(x):
    """Narrow dtypes in float32: a rewrite may round less often than its original, not more."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def halves(x, join):
    middle = x.shape[0] // 2
    return join([x[:middle], x[middle:]])


# Each step, and its other spelling: for any dtype, then for floating point alone.
STEPS = {
    "add": (lambda x: x + 3, lambda x: 3 + x),
    "add_": (lambda x: x.clone().add_(2), lambda x: x + 2),
    "view_mul_": (
        lambda x: ((y := x.clone())[:1].mul_(3), y)[1],
        lambda x: torch.cat([x[:1] * 3, x[1:]]),
    ),
    "transpose": (lambda x: x.t(), lambda x: x.permute(1, 0)),
    "flip": (lambda x: x.flip(0), lambda x: x[torch.arange(x.shape[0] - 1, -1, -1)]),
    "reshape": (
        lambda x: x.reshape(-1).reshape(x.shape[1], x.shape[0]),
        lambda x: x.flatten().unflatten(0, (x.shape[1], x.shape[0])),
    ),
    "widen": (
        lambda x: x + x[:, :1].expand_as(x),
        lambda x: x + x[:, :1].repeat(1, x.shape[1]),
    ),
    "where": (
        lambda x: torch.where(x > 0, x, x * 2),
        lambda x: x * (2 - (x > 0).to(x.dtype)),
    ),
    "sum": (
        lambda x: x - x.sum(0, keepdim=True),
        lambda x: x - halves(x, lambda two: two[0].sum(0) + two[1].sum(0)),
    ),
}
FLOATING_STEPS = {
    "sin": (lambda x: x.sin(), lambda x: wide(x).sin().to(x.dtype)),
    "sigmoid": (lambda x: x.sigmoid(), lambda x: (1 / (1 + (-wide(x)).exp())).to(x.dtype)),
    "softmax": (
        lambda x: x.softmax(-1),
        lambda x: wide(x).log_softmax(-1).exp().to(x.dtype),
    ),
    "gram": (lambda x: x @ x.t(), lambda x: torch.einsum("ik,jk->ij", x, x)),
    "halve": (lambda x: x / 2, lambda x: x * 0.5),
}
ALL_STEPS = STEPS | FLOATING_STEPS


@dataclasses.dataclass(frozen=True)
class Program:
    """Steps by name, and what they start from."""

    steps: tuple[str, ...]
    shape: tuple[int, int]
    dtype: torch.dtype
    layout: str
    changes_input: bool
    differentiable: bool

    def inputs(self, dtype=None):
        generator = torch.Generator().manual_seed(0)
        rows, columns = self.shape
        dtype = dtype or self.dtype
        if self.dtype.is_floating_point:
            # Rounded first: in float64, too, the program starts from these very values.
            values = torch.randn(2 * rows, 2 * columns, generator=generator).to(self.dtype)
        else:
            values = torch.randint(-9, 9, (2 * rows, 2 * columns), generator=generator)
        values = values.to(dtype)
        first = values[:rows, :columns]
        layouts = {
            "contiguous": first.contiguous(),
            "transposed": first.t().contiguous().t(),
            "strided": values[::2, ::2],
        }
        x = layouts[self.layout]
        return [x.requires_grad_() if self.differentiable else x]

    def function(self, rewritten=frozenset(), fault=None, at=-1):
        """The program: with some steps in their other spelling, or with a fault after one."""

        def run(x):
            if self.changes_input:
                x.mul_(2)
            for number, name in enumerate(self.steps):
                x = ALL_STEPS[name][number in rewritten](x)
                if number == at:
                    x = fault(x)
            return x

        return run


@st.composite
def programs(draw):
    dtype = draw(
        st.sampled_from([torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64])
    )
    table = ALL_STEPS if dtype.is_floating_point else STEPS
    changes_input = draw(st.booleans())
    return Program(
        tuple(draw(st.lists(st.sampled_from(sorted(table)), min_size=2, max_size=6))),
        (draw(st.integers(1, 5)), draw(st.integers(1, 5))),
        dtype,
        draw(st.sampled_from(["contiguous", "transposed", "strided"])),
        changes_input,
        dtype.is_floating_point and not changes_input and draw(st.booleans()),
    )


def scaled_difference(one, other):
    """The largest difference, as a share of the largest value of the first."""
    one, other = one.detach().double(), other.detach().double()
    return float((one - other).abs().max() / one.abs().max().clamp(min=1e-30))


def again(verdict):
    """As read back from its file."""
    read = Verdict.from_json(verdict.to_json())
    assert json.loads(read.to_json()) == json.loads(verdict.to_json())
    assert (read.status, read.passed) == (verdict.status, verdict.passed)
    assert str(read) == str(verdict)
    return read


# --- verify ---------------------------------------------------------------------------------------


@drawn(12)
@given(programs())
def test_a_program_is_identical_to_itself(program):
    verdict = paritas.verify(program.inputs(), program.function(), program.function(), QUIET)
    assert again(verdict).status is Status.IDENTICAL, str(verdict)
    assert verdict.coverage.compared > 0


@drawn(30)
@given(programs(), st.data())
def test_a_benign_rewrite_passes(program, data):
    numbers = st.sets(st.sampled_from(range(len(program.steps))), min_size=1)
    rewritten = program.function(rewritten=data.draw(numbers))
    verdict = paritas.verify(program.inputs(), program.function(), rewritten, QUIET)
    assert again(verdict).passed, str(verdict)


FAULTS = {
    "added": lambda x: x + 1,
    "negated": lambda x: -x,
    "turned": lambda x: x.roll(1, 0),
    "one element": lambda x: x + 5 * (torch.arange(x.numel()).reshape(x.shape) == 0).to(x.dtype),
    "one row lost": lambda x: x * (torch.arange(x.shape[0])[:, None] > 0).to(x.dtype),
}


@drawn(12)
@given(programs(), st.sampled_from(sorted(FAULTS)), st.data())
def test_a_fault_of_large_effect_fails(program, fault, data):
    at = data.draw(st.sampled_from(range(len(program.steps))))
    right, wrong = program.function(), program.function(fault=FAULTS[fault], at=at)
    (exact_input,) = program.inputs(torch.float64)
    exact = right(exact_input.detach().clone())
    assume(scaled_difference(exact, right(program.inputs()[0].detach().clone())) < ROUNDING)
    assume(scaled_difference(exact, wrong(exact_input.detach().clone())) > LARGE)
    verdict = paritas.verify(program.inputs(), right, wrong, QUIET)
    assert not again(verdict).passed, str(verdict)
    assert verdict.exit_code != 0


# --- judge ----------------------------------------------------------------------------------------

DTYPES = [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64]


@st.composite
def tensors(draw):
    shape = draw(st.lists(st.integers(0, 3), max_size=3))
    values = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    if values.numel() and draw(st.booleans()):
        values.view(-1)[0] = draw(st.sampled_from([float("nan"), float("inf"), -0.0]))
    dtype = draw(st.sampled_from(DTYPES))
    return values.to(dtype) if dtype.is_floating_point else values.nan_to_num(0, 3, -3).to(dtype)


LEAVES = (
    tensors()
    | st.integers()
    | st.floats()
    | st.booleans()
    | st.text(LETTERS, max_size=3)
    | st.none()
)
TREES = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.tuples(inner, inner)
        | st.dictionaries(st.sampled_from("abc"), inner, max_size=3)
    ),
    max_leaves=6,
)


def copied(tree):
    if isinstance(tree, torch.Tensor):
        return tree.clone()
    if isinstance(tree, dict):
        return {key: copied(value) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return type(tree)(copied(value) for value in tree)
    return tree


@drawn(40)
@given(tensors(), TREES)
def test_a_tree_is_identical_to_its_copy(tensor, tree):
    verdict = paritas.judge([tensor, tree], [copied(tensor), copied(tree)])
    assert again(verdict).status is Status.IDENTICAL, str(verdict)


SPOILS = {
    "shape": lambda x: x[None],
    "dtype": lambda x: x.to(torch.complex128),
    "kind": lambda x: x.tolist(),
    "lost": lambda _: None,
    "value": lambda x: ~x if x.dtype is torch.bool else x + 1000,
}


@drawn(40)
@given(tensors(), TREES, st.sampled_from(sorted(SPOILS)))
def test_a_spoiled_tensor_fails_from_both_sides(tensor, tree, spoil):
    if spoil == "value":
        assume(tensor.numel() and bool(tensor.isfinite().all()))
    one, other = {"spoiled": tensor, "rest": tree}, {"spoiled": SPOILS[spoil](tensor), "rest": tree}
    there, back = again(paritas.judge(one, other)), again(paritas.judge(other, one))
    assert not there.passed, str(there)
    assert there.status is back.status, f"{there}\n{back}"


# --- capture, dump, compare -----------------------------------------------------------------------


class Step(nn.Module):
    def __init__(self, name):
        super().__init__()
        self.name = name

    def forward(self, x):
        return ALL_STEPS[self.name][0](x)


@pytest.mark.parametrize("level", ["module", "op"])
@drawn(3)
@given(program=programs())
def test_two_dumps_of_one_program_are_identical(level, program):
    model = nn.Sequential(*map(Step, program.steps))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for dump in ("my", "golden"):
            with paritas.capture(folder / dump, level=level):
                result = model(*program.inputs())
                if program.differentiable:
                    result.sum().backward()
        found = paritas.compare(folder / "my", folder / "golden", jobs=1)
        itself = paritas.compare(folder / "my", folder / "my", jobs=1)
    for comparison in (found, itself):
        assert len(comparison.rows) > len(program.steps)
        assert comparison.status is Status.IDENTICAL, str(comparison.verdict)
        assert type(comparison).from_json(comparison.to_json()).passed

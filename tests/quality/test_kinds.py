"""Results of every kind: what is wrong is found, and what is right is left alone."""

from __future__ import annotations

import os

import pytest
import torch

from paritas import Status, VerifyConfig, guard, judge, verify
from quality import kinds_of_structures, kinds_of_tensors
from quality.kinds_of_structures import STRUCTURES
from quality.kinds_of_tensors import KINDS

WHOLE = bool(os.environ.get("PARITAS_WHOLE_CORPUS"))
QUIET = VerifyConfig(raise_on_mismatch=False)
# torch announces that sparse compressed, masked and nested tensors are young.
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


def cases(table, what):
    return [
        pytest.param(kind.reference, other, id=f"{name}, {case}")
        for name, kind in table.items()
        for case, other in getattr(kind, what).items()
    ]


# With gradients all is compared that is compared without them.
@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    "gradients", [True, False] if WHOLE else [True], ids=lambda given: "with gradients" * given
)
@pytest.mark.parametrize(("reference", "twin"), cases(KINDS, "twins"))
def test_a_tensor_of_the_same_kind_and_content_passes(reference, twin, gradients):
    x = kinds_of_tensors.example().requires_grad_(gradients)
    verdict = verify([x], reference, twin, QUIET)
    assert verdict.passed, str(verdict)


@pytest.mark.one_in(4)
@pytest.mark.usefixtures("undiagnosed")
@pytest.mark.parametrize(("reference", "wrong"), cases(KINDS, "wrong"))
def test_a_tensor_of_another_kind_or_content_does_not_pass(reference, wrong):
    assert not verify([kinds_of_tensors.example()], reference, wrong, QUIET)


@pytest.mark.parametrize("name", KINDS)
def test_judge_sees_tensors_of_every_kind(name):
    x, kind = kinds_of_tensors.example(), KINDS[name]
    assert bool(judge(kind.reference(x), kind.reference(x))) == bool(kind.twins)


# Without a program, its noise is guessed by the dtype: a fifth is little in one of eight bits.
JUDGED = {name: kind for name, kind in KINDS.items() if name not in {"float8", "scales"}}


@pytest.mark.parametrize(("reference", "wrong"), cases(JUDGED, "wrong"))
def test_judge_does_not_pass_other_tensors_either(reference, wrong):
    x = kinds_of_tensors.example()
    assert not judge(reference(x), wrong(x))


@pytest.mark.one_in(3)
@pytest.mark.parametrize(("reference", "twin"), cases(STRUCTURES, "twins"))
def test_the_same_structure_and_content_passes(reference, twin):
    verdict = verify([kinds_of_structures.example()], reference, twin, QUIET)
    assert verdict.passed, str(verdict)


@pytest.mark.one_in(4)
@pytest.mark.usefixtures("undiagnosed")
@pytest.mark.parametrize(("reference", "wrong"), cases(STRUCTURES, "wrong"))
def test_another_structure_or_content_is_different(reference, wrong):
    verdict = verify([kinds_of_structures.example()], reference, wrong, QUIET)
    assert verdict.status is Status.DIFFERENT


@pytest.mark.parametrize(("reference", "other"), cases(STRUCTURES, "unverified"))
def test_what_nobody_can_compare_is_unverified(reference, other):
    verdict = verify([kinds_of_structures.example()], reference, other, QUIET)
    assert verdict.status is Status.UNVERIFIED


def test_gradients_that_cannot_be_asked_for_are_listed():
    def wrapped(x):
        return kinds_of_tensors.Wrapper(x.detach(), 1.0).requires_grad_()

    x = kinds_of_tensors.example().requires_grad_()
    verdict = verify([x], lambda x: (x * 2, wrapped(x)), lambda x: (x * 2, wrapped(x)), QUIET)
    assert verdict.passed, str(verdict)
    (skipped,) = verdict.coverage.skipped
    assert skipped == (
        "gradients through output[1], Wrapper of shape [4, 6]: none of its parts can be "
        "differentiated"
    )


INPUTS = [name for name in KINDS if name not in {"silent wrapper", "meta"}]


@pytest.mark.parametrize("name", INPUTS)
def test_tensors_of_every_kind_are_taken_as_inputs(name):
    given = KINDS[name].reference(kinds_of_tensors.example())
    verdict = verify([given], lambda x: x, lambda x: x, QUIET)
    assert verdict.status is Status.IDENTICAL, str(verdict)


@pytest.mark.parametrize("layout", ["coo", "csr"])
def test_writing_to_a_sparse_input_is_seen(layout):
    def doubled(x):
        x.values().mul_(2)
        return x.to_dense()

    given = KINDS[layout].reference(kinds_of_tensors.example())
    assert verify([given], doubled, doubled, QUIET)
    verdict = verify([given], doubled, lambda x: x.to_dense() * 2, QUIET)
    failed = [finding.path for finding in verdict.failures]
    assert failed == ["input[0].values() after the call"]


@pytest.mark.parametrize("layout", ["coo", "csr", "csc"])
def test_the_noise_of_a_program_with_sparse_tensors_is_measured(layout):
    torch.manual_seed(0)
    dense = torch.randn(64, 64) * (torch.rand(64, 64) < 0.3)
    sparse = {"coo": dense.to_sparse, "csr": dense.to_sparse_csr, "csc": dense.to_sparse_csc}
    weight = torch.randn(64, 8)

    def product(x, w):
        return x @ w

    def in_float64(x, w):
        return (x.to_dense().double() @ w.to(torch.float64)).to(w.dtype)

    verdict = verify([sparse[layout](), weight], product, in_float64, QUIET)
    assert verdict.passed, str(verdict)
    assert not verdict.notes
    wrong = verify([sparse[layout](), weight], product, lambda x, w: product(x, w) * 1.0001, QUIET)
    assert wrong.status is Status.DIFFERENT


@pytest.mark.parametrize("per", ["tensor", "channel"])
def test_codes_that_rounding_decides_are_no_fault(per):
    torch.manual_seed(0)
    x, weight = torch.randn(16, 512), torch.randn(512, 64)
    zeros, scales = torch.full((64,), 3), torch.full((64,), 5e-4, dtype=torch.float64)

    def quantised(y):
        if per == "tensor":
            return torch.quantize_per_tensor(y, 5e-4, 3, torch.qint32)
        return torch.quantize_per_channel(y, scales, zeros, 1, torch.qint32)

    def whole(x):
        return quantised(x @ weight)

    def in_parts(x):
        return quantised(x[:, :100] @ weight[:100] + x[:, 100:] @ weight[100:])

    assert not torch.equal(whole(x).int_repr(), in_parts(x).int_repr())
    assert verify([x], whole, in_parts).status is Status.UNSTABLE
    shifted = verify([x], whole, lambda x: quantised(x @ weight + 5e-4), QUIET)
    assert shifted.status is Status.DIFFERENT


def test_a_dense_gradient_in_place_of_a_sparse_one_is_different():
    torch.manual_seed(0)
    table = torch.nn.Embedding(10, 4, sparse=True)
    tokens = torch.tensor([1, 2, 2])
    assert verify([tokens], table, table, QUIET)

    def dense(at):
        return torch.nn.functional.embedding(at, table.weight)

    (failure,) = verify([tokens], table, dense, QUIET).failures
    assert failure.path == "gradient of weight"
    assert failure.reason == "layout strided instead of sparse_coo"


@pytest.mark.parametrize("kind", ["yes", "elementwise", "refusing", "yes to lists", "array", "set"])
def test_a_second_call_that_gives_another_value_is_seen(kind):
    reference = STRUCTURES[kind].reference
    other = next(iter(STRUCTURES[kind].wrong.values()))
    calls = []

    def candidate(x):
        calls.append(None)
        return (reference if len(calls) == 1 else other)(x)

    verdict = verify([kinds_of_structures.example()], reference, candidate, QUIET)
    assert {finding.path.endswith("(second call)") for finding in verdict.failures} == {True}


def spoiling(spoil):
    """A backend that hands on what the graph gives, spoiled."""

    def backend(graph, inputs):
        return lambda *args: tuple(map(spoil, graph(*args)))

    return backend


def other_zero_point(q):
    return torch.quantize_per_tensor(q.dequantize(), q.q_scale(), q.q_zero_point() + 1, q.dtype)


# The program, what it is given, and the fault. Dynamo leaves sparse tensors to eager mode.
GUARDED = {
    "quantised": (kinds_of_tensors.per_tensor, lambda x: x, other_zero_point),
    "jagged": (lambda x: x.clone(), KINDS["jagged"].reference, lambda nested: nested * 1.01),
}


@pytest.mark.parametrize("spoils", [False, True], ids=["right", "wrong"])
@pytest.mark.parametrize("name", GUARDED)
def test_guard_sees_what_is_inside_tensors_of_other_kinds(name, spoils):
    program, make, spoil = GUARDED[name]
    given = make(kinds_of_tensors.example())
    torch.compiler.reset()
    guarded = guard(spoiling(spoil if spoils else lambda result: result), on_mismatch="record")
    torch.compile(program, backend=guarded)(given)
    expected = Status.DIFFERENT if spoils else Status.IDENTICAL
    assert guarded.verdict().status is expected, str(guarded.verdict())

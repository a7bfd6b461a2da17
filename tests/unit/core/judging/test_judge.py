from __future__ import annotations

import collections
import math
import warnings

import pytest
import torch

import paritas
from paritas.core.errors import UsageError
from paritas.core.judging.judge import judge
from paritas.core.judging.pairs import Checks, Pair, judge_pair
from paritas.core.numerics.automatic import Judgement
from paritas.core.numerics.checkers import AllCloseValueChecker, AutomaticValueChecker
from paritas.core.results.findings import Aspect, Status
from paritas.core.results.items import output

NAN, INF = math.nan, math.inf


def floats(n=256, dtype=torch.float32, seed=0):
    return torch.randn(n, generator=torch.Generator().manual_seed(seed)).to(dtype)


def only(verdict):
    (finding,) = verdict if isinstance(verdict, tuple) else verdict.findings
    return finding


# --- trees ----------------------------------------------------------------------------------------


def test_equal_trees_are_identical_and_every_leaf_is_counted():
    x = floats()
    tree = {"logits": x, "extras": [x + 1, (x + 2, "text", None, 3)]}
    other = {"logits": x.clone(), "extras": [x + 1, (x + 2, "text", None, 3)]}
    verdict = judge(tree, other)
    assert verdict.status is Status.IDENTICAL
    assert verdict.coverage.compared == 6
    assert [finding.path for finding in verdict.findings] == [
        "value['logits']",
        "value['extras'][0]",
        "value['extras'][1][0]",
        "value['extras'][1][1]",
        "value['extras'][1][2]",
        "value['extras'][1][3]",
    ]


def test_judge_is_public():
    assert paritas.judge is judge
    assert paritas.judge(torch.ones(2), torch.ones(2))


def test_all_failures_are_collected_each_with_its_path():
    x = floats()
    verdict = judge({"a": x, "b": x, "c": x}, {"a": x + 1, "b": x, "c": -x})
    assert [finding.path for finding in verdict.failures] == ["value['a']", "value['c']"]


@pytest.mark.parametrize("side", ["reference", "candidate"])
def test_a_leaf_that_one_side_lacks_is_different(side):
    x = floats()
    whole, part = {"a": x, "b": x}, {"a": x.clone()}
    pair = (whole, part) if side == "reference" else (part, whole)
    verdict = judge(*pair)
    assert verdict.status is Status.DIFFERENT
    (failure,) = verdict.failures
    assert failure.aspect is Aspect.STRUCTURE
    counts = (2, 1) if side == "reference" else (1, 2)
    assert failure.reason == "the reference returns {} values, the candidate {}".format(*counts)
    assert verdict.coverage.unmatched == (f"value['b'] ({side} only)",)
    assert verdict.coverage.compared == 1


def test_a_missing_leaf_in_a_list_is_different():
    x = floats()
    assert judge([x, x], [x]).status is Status.DIFFERENT
    assert judge([], [x]).status is Status.DIFFERENT
    assert judge(x, []).status is Status.DIFFERENT


@pytest.mark.parametrize("empty", [[], {}, (), [[], {}]])
def test_two_trees_without_leaves_are_unverified(empty):
    verdict = judge(empty, empty)
    assert verdict.status is Status.UNVERIFIED
    assert verdict.exit_code == 3


def test_a_list_instead_of_a_tuple_is_noted_and_no_more():
    x = floats()
    verdict = judge((x, x), [x, x])
    assert verdict.status is Status.IDENTICAL
    assert verdict.notes == ("value is list instead of tuple",)


def test_leaves_under_other_names_are_different():
    x = floats()
    finding = only(judge({"a": x, "b": x + 1}, {"a": x, "c": x + 1}).failures)
    assert finding.reason == "the reference returns value['b'], the candidate value['c']"
    finding = only(judge({"a": x}, (x,)).failures)
    assert finding.reason == "value is tuple instead of dict"
    assert finding.advice == (
        "if the candidate's compiler always returns lists, set match_by_order=True in VerifyConfig"
    )


def test_the_order_of_keys_does_not_matter():
    x, y = floats(seed=0), floats(seed=1)
    verdict = judge({"a": x, "b": y}, collections.OrderedDict(b=y, a=x))
    assert verdict.passed


# --- structure of a leaf --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("reference", "candidate", "reason"),
    [
        ((1000,), (1, 1000), "shape [1, 1000] instead of [1000]"),
        ((4, 1), (4,), "shape [4] instead of [4, 1]"),
        ((), (1,), "shape [1] instead of []"),
        ((0,), (0, 3), "shape [0, 3] instead of [0]"),
    ],
)
def test_another_shape_is_different_although_it_would_broadcast(reference, candidate, reason):
    finding = only(judge(torch.ones(reference), torch.ones(candidate)))
    assert (finding.aspect, finding.status) == (Aspect.SHAPE, Status.DIFFERENT)
    assert finding.reason == reason


def test_allclose_does_not_see_two_shapes_either():
    verdict = judge(torch.ones(3, 1), torch.ones(3), value_checker=AllCloseValueChecker())
    assert only(verdict).aspect is Aspect.SHAPE


@pytest.mark.parametrize("wide", [torch.float64, torch.bfloat16, torch.int64, torch.complex64])
def test_another_dtype_is_different_although_the_values_agree(wide):
    verdict = judge(torch.ones(4), torch.ones(4, dtype=wide))
    assert verdict.status is Status.DIFFERENT
    failure = next(finding for finding in verdict.failures if finding.aspect is Aspect.DTYPE)
    assert failure.reason == f"dtype {str(wide)[6:]} instead of float32"


@pytest.mark.parametrize(
    ("left", "right"),
    [
        (torch.int32, torch.int64),
        (torch.bool, torch.uint8),
        (torch.float32, torch.float64),
        (torch.float32, torch.int64),
    ],
)
def test_equal_values_pass_where_dtypes_are_not_asked_about(left, right):
    x = torch.tensor([0, 1, 1, 0])
    findings, notes = judge_pair(Pair(output("out"), x.to(left), x.to(right)), Checks(dtype=False))
    assert [finding.status.passes() for finding in findings] == [True]
    assert notes == [f"out: dtype {str(right)[6:]} instead of {str(left)[6:]}"]


def test_a_shape_that_is_not_asked_about_is_compared_in_order_and_noted():
    x = floats(6)
    findings, notes = judge_pair(Pair(output("out"), x, x.reshape(2, 3)), Checks(shape=False))
    assert findings[0].status is Status.IDENTICAL
    assert notes == ["out: shape [2, 3] instead of [6]; compared in memory order, as requested"]
    findings, _ = judge_pair(Pair(output("out"), x, x[:5]), Checks(shape=False))
    assert findings[0].status is Status.DIFFERENT


# --- kinds of leaves ------------------------------------------------------------------------------


def test_integers_are_exact():
    x = torch.arange(1000)
    y = x.clone()
    y[999] += 1
    finding = only(judge(x, y))
    assert finding.status is Status.DIFFERENT
    assert finding.reason == "1 of 1000 values differ; these values are exact"
    assert finding.metrics.max_abs_index == (999,)


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint64, torch.uint16, torch.int8])
def test_neighbouring_integers_differ_however_large(dtype):
    largest = torch.iinfo(dtype).max
    assert judge(torch.tensor([largest], dtype=dtype), torch.tensor([largest], dtype=dtype))
    verdict = judge(torch.tensor([largest], dtype=dtype), torch.tensor([largest - 1], dtype=dtype))
    assert verdict.status is Status.DIFFERENT


def test_bools_are_exact():
    x = torch.tensor([True, False, True])
    assert judge(x, x.clone()).status is Status.IDENTICAL
    assert judge(x, ~x).status is Status.DIFFERENT


def test_empty_tensors_are_identical():
    assert judge(torch.empty(0, 3), torch.empty(0, 3)).status is Status.IDENTICAL


@pytest.mark.parametrize(
    "dtype",
    [
        torch.float64,
        torch.float32,
        torch.bfloat16,
        torch.float16,
        torch.float8_e4m3fn,
        torch.float8_e5m2,
        torch.complex64,
        torch.complex128,
    ],
)
@pytest.mark.parametrize("shape", [(), (64,)])
def test_every_floating_dtype_is_judged(dtype, shape):
    x = (1 + floats(64).abs())[: math.prod(shape)].reshape(shape)
    assert judge(x.to(dtype), x.to(dtype)).status is Status.IDENTICAL
    assert judge(x.to(dtype), (-x).to(dtype)).status is Status.DIFFERENT
    assert judge(x.to(dtype), torch.zeros_like(x).to(dtype)).status is Status.DIFFERENT


@pytest.mark.parametrize(
    ("dtype", "bad"),
    [
        (torch.float32, NAN),
        (torch.float32, INF),
        (torch.bfloat16, NAN),
        (torch.float16, -INF),
        (torch.float8_e5m2, NAN),
        (torch.float8_e5m2, INF),
        (torch.float8_e4m3fn, NAN),
        (torch.complex64, NAN),
        (torch.complex64, INF),
    ],
)
def test_a_nan_or_infinity_on_one_side_is_different(dtype, bad):
    x = torch.ones(8).to(dtype)
    y = torch.ones(8)
    y[3] = bad
    y = y.to(dtype)
    assert judge(x, y).status is Status.DIFFERENT
    assert judge(y, x).status is Status.DIFFERENT
    assert judge(y, y.clone()).status is Status.IDENTICAL


def test_infinities_of_other_signs_differ_and_so_do_nan_and_infinity():
    inf, nan = torch.tensor([INF, 1.0]), torch.tensor([NAN, 1.0])
    assert judge(inf, torch.tensor([-INF, 1.0])).status is Status.DIFFERENT
    assert judge(inf, nan).status is Status.DIFFERENT


def test_a_conjugated_view_is_its_values():
    x = torch.complex(floats(), floats(seed=1))
    assert judge(x.conj(), x.conj().resolve_conj()).status is Status.IDENTICAL
    assert judge(x, x.conj()).status is Status.DIFFERENT


def test_a_sparse_tensor_is_judged_by_its_values():
    dense = torch.diag(floats(8))
    assert judge(dense.to_sparse(), dense.to_sparse()).status is Status.IDENTICAL
    assert judge(dense.to_sparse(), (2 * dense).to_sparse()).status is Status.DIFFERENT


def test_a_quantized_tensor_is_judged_by_its_values():
    def quantized(x):
        return torch.quantize_per_tensor(x, scale=0.1, zero_point=10, dtype=torch.quint8)

    x = floats()
    with warnings.catch_warnings():
        # torch deprecates them; people's models have them all the same
        warnings.simplefilter("ignore")
        assert judge(quantized(x), quantized(x)).status is Status.IDENTICAL
        assert judge(quantized(x), quantized(x + 1)).status is Status.DIFFERENT


def test_strides_do_not_matter():
    x = floats(12).reshape(3, 4)
    assert judge(x.t(), x.t().contiguous()).status is Status.IDENTICAL


@pytest.mark.parametrize(
    ("reference", "candidate", "expected"),
    [
        (0.3, 0.3, Status.IDENTICAL),
        (0.3, 0.1 + 0.2, Status.EQUIVALENT),
        (0.3, 0.3001, Status.DIFFERENT),
        (0.0, 1e-12, Status.DIFFERENT),
        (NAN, NAN, Status.IDENTICAL),
        (1.0, NAN, Status.DIFFERENT),
        (INF, -INF, Status.DIFFERENT),
        (1j, 1j, Status.IDENTICAL),
        (1j, 1.1j, Status.DIFFERENT),
        (1, 1.0, Status.DIFFERENT),
        ("a", "a", Status.IDENTICAL),
        ("a", "b", Status.DIFFERENT),
        (None, None, Status.IDENTICAL),
        (None, 0, Status.DIFFERENT),
    ],
)
def test_numbers_and_plain_objects(reference, candidate, expected):
    assert judge(reference, candidate).status is expected


def test_an_unknown_object_is_unverified():
    verdict = judge({"x": floats(), "cache": object()}, {"x": floats(), "cache": object()})
    assert verdict.status is Status.UNVERIFIED
    assert [finding.path for finding in verdict.failures] == ["value['cache']"]


# --- floats without a program ---------------------------------------------------------------------

SCALES = [1e-30, 1e-4, 1.0, 1e3, 1e30]


@pytest.mark.parametrize(
    ("dtype", "scale"),
    [(torch.float32, s) for s in SCALES] + [(torch.float64, s) for s in [*SCALES, 1e-200, 1e200]],
)
def test_the_last_bit_passes_and_a_thousandth_fails_at_every_scale(dtype, scale):
    x = floats(dtype=torch.float64).mul(scale).to(dtype)
    ulp = torch.nextafter(x, torch.full_like(x, INF))
    assert judge(x, ulp).status is Status.EQUIVALENT
    assert judge(x, x * (1 + 1e-3)).status is Status.DIFFERENT
    one = x.clone()
    one[17] += 1e-3 * scale
    assert judge(x, one).status is Status.DIFFERENT


@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e30])
def test_the_noise_of_a_long_sum_passes(scale):
    x = torch.randn(64, 4096, generator=torch.Generator().manual_seed(0)) * scale
    assert judge(x.sum(1), x.flip(1).cumsum(1)[:, -1]).passed


def test_a_wrong_row_fails():
    x = floats(64 * 64).reshape(64, 64)
    y = x.clone()
    y[7] = 0
    assert judge(x, y).status is Status.DIFFERENT


def test_the_finding_says_that_only_the_dtype_is_known():
    finding = only(judge(floats(), floats() * 1.001))
    assert finding.native.noise == "float32 alone, without a program to measure: weak"


# --- checkers of the user's own -------------------------------------------------------------------


class OnlyStrings:
    """Claims strings, whatever their case, and declines everything else."""

    def check(self, reference, candidate, evidence=None):
        if not isinstance(reference, str):
            return None
        same = reference.lower() == candidate.lower()
        return Judgement(status=Status.EQUIVALENT if same else Status.DIFFERENT)


def test_a_pair_that_the_only_checker_declines_is_unverified():
    verdict = judge(["A", floats()], ["a", floats()], value_checker=OnlyStrings())
    assert [finding.status for finding in verdict.findings] == [
        Status.EQUIVALENT,
        Status.UNVERIFIED,
    ]
    assert verdict.findings[1].reason == "no value checker accepts a Tensor"
    assert "AutomaticValueChecker()" in verdict.findings[1].advice


def test_a_declined_pair_goes_to_the_next_checker():
    checks = Checks(checkers=(OnlyStrings(), AutomaticValueChecker()))
    (strings,), _ = judge_pair(Pair(output("out"), "A", "a"), checks)
    (numbers,), _ = judge_pair(Pair(output("out"), torch.ones(2), torch.ones(2)), checks)
    assert strings.status is Status.EQUIVALENT
    assert numbers.status is Status.IDENTICAL


# --- a given arbiter ------------------------------------------------------------------------------


def test_the_reference_in_float64_says_how_much_rounding_there_is():
    def cancels(x):
        return {"h": x + 1e3 - 1e3, "ids": torch.arange(3)}

    x = floats()
    reference, wide = cancels(x), cancels(x.double())
    exact = {**reference, "h": x}
    assert judge(reference, exact).status is Status.DIFFERENT
    verdict = judge(reference, exact, fp64_ref=wide)
    assert verdict.status is Status.EQUIVALENT
    assert verdict.findings[0].native.noise == "the reference's own error"
    assert not judge(reference, {**reference, "h": x * 1.01}, fp64_ref=wide).passed


def test_an_arbiter_that_is_not_of_the_reference_is_refused_or_not_used():
    x = floats()
    with pytest.raises(UsageError, match=r"fp64_ref has no tensor value\['a'\]"):
        judge({"a": x}, {"a": x}, fp64_ref={"b": x.double()})
    with pytest.raises(UsageError, match=r"fp64_ref: value has shape \[2\], in reference \[256\]"):
        judge(x, x, fp64_ref=x.double()[:2])
    verdict = judge(x, x * 1.5, fp64_ref=-x.double())
    assert verdict.status is Status.DIFFERENT
    assert verdict.notes == (
        "value: the reference is far from fp64_ref (relative L2 2), so it is not used",
    )
    assert judge(x, x, fp64_ref=x).notes == ("value: fp64_ref is float32 there, so it is not used",)


def test_an_arbiter_may_be_infinite_or_zero_where_the_reference_is():
    x = torch.tensor([INF, 1.0, 0.0])
    assert judge(x, x.clone(), fp64_ref=x.double()).status is Status.IDENTICAL
    zeros = torch.zeros(3)
    assert judge(zeros, zeros + 1e-3, fp64_ref=zeros.double()).status is Status.DIFFERENT

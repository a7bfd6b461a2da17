"""One pair of recorded values, judged by itself."""

from __future__ import annotations

import math

import msgspec
import pytest
import torch

from paritas.comparison.judgement import measure
from paritas.comparison.operands import Operand, Pair
from paritas.core.errors import UsageError
from paritas.core.numerics.requirements import Requirement
from paritas.core.numerics.sketch import sketch
from paritas.core.numerics.statistics import summarize
from paritas.core.results.findings import Aspect, Status
from paritas.formats.files.records import Payload, Record, Site, TensorFacts
from paritas.formats.files.tensor_bytes import digest

SITE = Site(source="eager", level="op", name="mm", op="aten.mm.default")


class Dump:
    """Values by sequence number; a stand-in for a dump on disk."""

    def __init__(self, *values, kind="paritas"):
        self.kind = kind
        self.values = values
        self.viewed = self.verified = 0
        self.damaged = False

    def view(self, record, *, check=False):
        self.viewed += 1
        value = self.values[record.sequence]
        if isinstance(value, Exception):
            raise value
        if check:
            self.verify(record)
        return value

    def verify(self, record):
        self.verified += 1
        if self.damaged:
            raise UsageError("the bytes are not those that were written")

    def read_sketch(self, record):
        return sketch(self.values[record.sequence])


def record(value, *, digests=False, data="tensor", sequence=0):
    if not isinstance(value, torch.Tensor):
        text = None if isinstance(value, Exception) else repr(value)
        payload = Payload(file="x", nbytes=0, shape=()) if text is None else None
        return Record(
            sequence=sequence, step=0, rank=0, id=SITE.id, site=SITE, value=text, payload=payload
        )
    shape = tuple(value.shape)
    where = Payload(file="data", nbytes=value.nbytes, shape=shape)
    return Record(
        sequence=sequence,
        step=0,
        rank=0,
        id=SITE.id,
        site=SITE,
        tensor=TensorFacts(
            dtype=str(value.dtype).removeprefix("torch."), shape=shape, stride=value.stride()
        ),
        digest=digest(value) if digests else "",
        payload=where if data == "tensor" else None,
        statistics=summarize(value) if data != "tensor" else None,
        sketch=where if data == "sketch" else None,
    )


def compared(mine, golden, requirement=None, kinds=("paritas", "paritas"), **options):
    sides = [Operand((record(value, **options),)) for value in (mine, golden)]
    dumps = [Dump(value, kind=kind) for value, kind in zip((mine, golden), kinds, strict=True)]
    rule = None if requirement is None else Requirement.parse(requirement)
    return measure(Pair(*sides, "id"), *dumps, rule)


def normal(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def test_the_same_bits_are_identical():
    found = compared(normal(8, 8), normal(8, 8))
    assert (found.status, found.judged_by, found.distance) == (Status.IDENTICAL, "bits", 0.0)
    assert found.my.maximum == found.golden.maximum == float(normal(8, 8).max())


def test_equal_digests_need_but_one_look():
    value = normal(8, 8)
    sides = [Operand((record(value, digests=True),)) for _ in range(2)]
    mine, golden = Dump(value), Dump(value)
    found = measure(Pair(*sides, "id"), mine, golden)
    assert (found.status, found.judged_by) == (Status.IDENTICAL, "bits")
    assert (mine.viewed, golden.viewed) == (0, 1)
    assert (mine.verified, golden.verified) == (1, 1)


def test_equal_digests_that_are_trusted_need_no_look():
    value = normal(8, 8)
    sides = [Operand((record(value, digests=True),)) for _ in range(2)]
    mine, golden = Dump(value), Dump(value)
    found = measure(Pair(*sides, "id"), mine, golden, trust_digests=True)
    assert (found.status, found.judged_by) == (Status.IDENTICAL, "digest, data not read")
    assert (found.nbytes, found.distance) == (0, 0.0)
    assert found.limits.startswith("digests only")
    assert mine.viewed == golden.viewed == mine.verified == golden.verified == 0


@pytest.mark.parametrize("damaged", [0, 1])
def test_equal_digests_of_damaged_data_are_unverified(damaged):
    value = normal(8, 8)
    sides = [Operand((record(value, digests=True),)) for _ in range(2)]
    dumps = [Dump(value), Dump(value)]
    dumps[damaged].damaged = True
    assert measure(Pair(*sides, "id"), *dumps).status is Status.UNVERIFIED


def test_rounding_in_a_damaged_file_is_unverified_however_quick():
    pair = Pair(Operand((record(normal(64)),)), Operand((record(normal(64)),)), "id")
    mine = Dump(normal(64) * (1 + 2**-22))
    mine.damaged = True
    assert measure(pair, mine, Dump(normal(64)), quick=True).status is Status.UNVERIFIED


def test_values_that_one_side_alone_has_are_held_against_their_digest():
    value = normal(8, 8)
    sides = [
        Operand((record(value, digests=True, data=data),)) for data in ("tensor", "statistics")
    ]
    mine, golden = Dump(value), Dump(value)
    found = measure(Pair(*sides, "id"), mine, golden)
    assert (found.status, found.judged_by) == (Status.IDENTICAL, "statistics")
    mine.damaged = True
    assert measure(Pair(*sides, "id"), mine, golden).status is Status.UNVERIFIED


def test_a_figure_that_one_side_lacks_makes_statistics_no_longer_identical():
    value = normal(8, 8)
    whole = record(value, data="statistics")
    lacking = msgspec.structs.replace(
        whole, statistics=msgspec.structs.replace(whole.statistics, l2=None)
    )
    pair = Pair(Operand((lacking,)), Operand((whole,)), "id")
    found = measure(pair, Dump(value, kind="msprobe"), Dump(value, kind="msprobe"))
    assert found.status is Status.EQUIVALENT
    assert "known on one side only: l2" in found.limits


def test_rounding_is_equivalent_and_says_what_it_was_held_to():
    found = compared(normal(64, 64) * (1 + 2**-22), normal(64, 64))
    assert (found.status, found.judged_by) == (Status.EQUIVALENT, "noise of float32")


@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e30])
def test_a_fault_is_different_whatever_the_scale_of_the_values(scale):
    golden = normal(64, 64) * scale
    mine = golden.clone()
    mine[3] *= 1.001
    found = compared(mine, golden)
    assert found.status is Status.DIFFERENT
    assert found.figures.metrics.max_abs_index[0] == 3


def test_a_golden_side_of_higher_precision_is_the_arbiter():
    golden = normal(64, 64)
    found = compared(golden.bfloat16(), golden)
    assert found.status is Status.EQUIVALENT
    assert found.judged_by == "noise of bfloat16, with the golden float32 as arbiter"
    assert compared((golden * 2).bfloat16(), golden).status is Status.DIFFERENT


def test_an_error_where_the_golden_side_is_zero_is_seen():
    golden = normal(64, 64).relu()
    mine = golden.clone()
    mine[golden == 0] = 0.5
    found = compared(mine, golden)
    assert found.status is Status.DIFFERENT
    assert found.figures.metrics.max_abs == 0.5


def test_a_nan_on_one_side_keeps_its_row_and_says_where():
    golden, mine = normal(4, 4), normal(4, 4)
    mine[1, 2] = math.nan
    found = compared(mine, golden)
    assert found.status is Status.DIFFERENT
    assert found.reason == "1 of 16 NaN/Inf positions differ, the first at [1, 2]"


def test_shapes_never_broadcast_and_are_never_flattened():
    found = compared(normal(4, 6), normal(6, 4))
    assert (found.status, found.aspect) == (Status.DIFFERENT, Aspect.SHAPE)
    assert found.reason == "shape [4, 6] instead of [6, 4]"
    assert compared(normal(1, 4), normal(4)).aspect is Aspect.SHAPE


def test_another_tool_may_drop_dimensions_of_length_1():
    found = compared(normal(1, 4, 1), normal(4), kinds=("ge", "fx"))
    assert found.status is Status.IDENTICAL
    assert "length 1" in found.limits


def test_integers_are_exact():
    found = compared(torch.tensor([1, 2, 3]), torch.tensor([1, 2, 4]))
    assert (found.status, found.settled) == (Status.DIFFERENT, False)
    assert found.reason == "1 of 3 values differ; they must be equal"


@pytest.mark.parametrize(("mine", "same"), [(0.5, True), ([1, 2], False), ("x", False)])
def test_plain_values_are_equal_or_not(mine, same):
    assert compared(mine, 0.5).status is (Status.IDENTICAL if same else Status.DIFFERENT)


@pytest.mark.parametrize(
    ("mine", "golden"),
    [
        ("'torch.float32'", "torch.float32"),
        ("[1, 0]", "(1, 0)"),
        ("1", "1.0"),
        ("float('nan')", "nan"),
    ],
)
def test_tools_spell_a_value_differently(mine, golden):
    sides = [Operand((msgspec.structs.replace(record(0), value=v),)) for v in (mine, golden)]
    assert measure(Pair(*sides, "id"), Dump(), Dump()).status is Status.IDENTICAL


def test_a_number_that_one_tool_wrote_as_a_tensor_is_a_number():
    assert compared(torch.tensor(2.0), 2).status is Status.IDENTICAL


def test_what_cannot_be_read_is_unverified_and_says_why():
    found = compared(UsageError("cut off at byte 12"), normal(4))
    assert (found.status, found.aspect) == (Status.UNVERIFIED, Aspect.HARNESS)
    assert found.reason == "cut off at byte 12"
    found = measure(
        Pair(Operand((record(normal(4)),)), Operand((record(normal(4)),)), "id"),
        Dump(UsageError("cut off at byte 12")),
        Dump(normal(4)),
    )
    assert (found.status, found.reason) == (Status.UNVERIFIED, "cut off at byte 12")


def test_a_damaged_file_is_no_fault_of_the_program():
    pair = Pair(Operand((record(normal(4)),)), Operand((record(normal(4)),)), "id")
    mine = Dump(normal(4) + 1)
    mine.damaged = True
    assert measure(pair, mine, Dump(normal(4))).status is Status.UNVERIFIED


def test_a_value_without_counterpart_is_unverified_and_names_the_nearest():
    pair = Pair(Operand((record(normal(4)),)), None, "", nearest=("mm_1",))
    found = measure(pair, Dump(), Dump())
    assert found.status is Status.UNVERIFIED
    assert found.reason == (
        "only my dump has it: no value in the golden dump matches; the most similar names are mm_1"
    )


def quickly(mine, golden):
    sides = [Operand((record(value),)) for value in (mine, golden)]
    return measure(Pair(*sides, "id"), Dump(mine), Dump(golden), quick=True)


def test_quickly_a_pair_that_surely_passes_has_but_few_figures():
    golden = normal(64, 64)
    found = quickly(golden * (1 + 2**-23), golden)
    assert found.status is Status.EQUIVALENT
    assert found.figures.metrics is None
    assert found.figures.max_abs == pytest.approx(2**-23 * float(golden.abs().max()), rel=0.1)
    assert found.score.passed
    assert quickly(golden, golden).status is Status.IDENTICAL


@pytest.mark.parametrize("fault", [1.001, math.nan])
def test_quickly_a_pair_that_does_not_surely_pass_is_looked_at_as_ever(fault):
    golden, mine = normal(64, 64), normal(64, 64)
    mine[3] *= fault
    found, expected = quickly(mine, golden), compared(mine, golden)
    assert found.status is Status.DIFFERENT
    assert found.reason == expected.reason
    assert found.figures.metrics.mismatched == expected.figures.metrics.mismatched


def test_a_rule_decides():
    golden = normal(64, 64)
    assert compared(golden * 1.01, golden, "rel_l2 < 0.1").status is Status.EQUIVALENT
    found = compared(golden * 1.01, golden, "rel_l2 < 1e-3")
    assert found.status is Status.DIFFERENT
    assert found.reason == "the rule 'rel_l2 < 1e-3' does not hold"


@pytest.mark.parametrize("data", ["stats", "sketch"])
def test_summaries_that_agree_are_identical_and_say_what_they_cannot_show(data):
    found = compared(normal(32, 32), normal(32, 32), data=data)
    assert found.status is Status.IDENTICAL
    assert found.limits.startswith("statistics")


def test_a_sketch_sees_values_that_changed_places_and_statistics_do_not():
    golden = normal(32, 32)
    assert compared(golden.T.contiguous(), golden, data="stats").status is Status.IDENTICAL
    assert compared(golden.T.contiguous(), golden, data="sketch").status is Status.DIFFERENT


@pytest.mark.parametrize("data", ["stats", "sketch"])
def test_summaries_tell_rounding_from_a_fault(data):
    golden = normal(32, 32)
    assert compared(golden * (1 + 2**-22), golden, data=data).status is Status.EQUIVALENT
    assert compared(golden * 1.001, golden, data=data).status is Status.DIFFERENT


def test_summaries_count_what_is_not_finite():
    golden, mine = normal(32), normal(32)
    mine[3] = math.inf
    found = compared(mine, golden, data="stats")
    assert found.status is Status.DIFFERENT
    assert found.reason == "+Inf: 1 instead of 0"

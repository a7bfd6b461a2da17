"""The benign rewrites of benchmarks/ are what they claim: the same function, no less accurate."""

import sys
from pathlib import Path

import pytest
import torch

import paritas

# The laboratory is no part of the package: it is found from the root of the repository.
sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.detection.benign import (
    REWRITES,
    BenignSite,
    benign_sites,
    changes_bits,
    rewrite,
)
from benchmarks.detection.families import FAMILIES
from benchmarks.detection.operators import OPERATORS
from benchmarks.detection.programs import DTYPES, impossible, make_program, names

QUIET = paritas.VerifyConfig(
    raise_on_mismatch=False, verify_gradients=False, verify_second_call=False
)


def one_of_each(program):
    """The first site of each rewrite."""
    first = {}
    for site in benign_sites(program):
        first.setdefault(site.rewrite, site)
    return first.values()


@pytest.mark.parametrize(("name", "dtype"), [("linear", "float32"), ("swiglu", "bfloat16")])
def test_every_kind_of_rewrite_passes(name, dtype):
    program = make_program(name, 0, dtype)
    for site in one_of_each(program):
        changed = rewrite(program, site)
        verdict = paritas.verify(program.fresh_inputs(), program.module, changed, QUIET)
        assert verdict.passed, (site, str(verdict))


def test_a_rewrite_is_exact_in_float64():
    # Whatever it does for the sake of narrow dtypes, in float64 it stays in float64.
    program = make_program("layer_norm", 0, "bfloat16")
    inputs = [value.double() for value in program.fresh_inputs()]
    expected = program.module(*inputs)
    (site,) = [one for one in benign_sites(program) if one.rewrite == "norm_by_definition"]
    changed = rewrite(program, site)
    for found, wanted in zip(changed(*inputs), expected, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-13, atol=1e-13)


def test_a_rewrite_leaves_the_program_itself_alone():
    program = make_program("softmax", 0, "float32")
    before = str(program.module.graph)
    rewrite(program, BenignSite("_softmax", "exp2_softmax"))
    assert str(program.module.graph) == before


def test_some_rewrites_change_bits_and_some_do_not():
    program = make_program("mm_long", 0, "float32")
    split = rewrite(program, BenignSite("mm", "split_k", "4"))
    assert changes_bits(program, split)
    assert not changes_bits(program, program.module)


def test_an_unknown_rewrite_is_refused():
    program = make_program("mm", 0, "float32")
    with pytest.raises(paritas.core.errors.UsageError, match="no benign rewrite 'magic'"):
        rewrite(program, BenignSite("mm", "magic"))


def test_what_is_no_case_has_a_reason_and_is_refused():
    assert "no floats" in impossible("integer_wrap", "float16")
    with pytest.raises(paritas.core.errors.UsageError, match="integer_wrap in float16 is no case"):
        make_program("integer_wrap", 0, "float16")


def test_the_corpus_is_as_large_as_promised():
    assert len(FAMILIES) >= 8
    assert len(OPERATORS) >= 60
    assert names() == [*FAMILIES, *OPERATORS]
    assert len(REWRITES) >= 40
    assert all(impossible(name, dtype) is None for name in FAMILIES for dtype in DTYPES)


def test_another_seed_is_another_program():
    first, second = (make_program("ill_conditioned", seed, "float32") for seed in (0, 1))
    assert [node.target for node in first.calls] != [node.target for node in second.calls]

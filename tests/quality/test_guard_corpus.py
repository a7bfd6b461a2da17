"""guard() stays silent on every correct program, and finds and names every fault of a compiler."""

from __future__ import annotations

import os
import re
from typing import Any

import pytest
import torch

from paritas import Status, Verdict, guard
from quality.guard_faults import FAULTS, Fault, healed, planted
from quality.guard_program_table import disagreements, leaves
from quality.guard_programs import PROGRAMS, run

pytestmark = [
    pytest.mark.slow,
    # Kernels with vectors are guarded in `test_guard_planted.py` and in integration/.
    *(
        []
        if os.environ.get("PARITAS_WHOLE_CORPUS")
        else [pytest.mark.usefixtures("scalar_kernels")]
    ),
    # Inductor hands complex numbers to eager's own operators, and says so.
    pytest.mark.filterwarnings("ignore:Torchinductor does not support code generation for complex"),
    # Dynamo looks at the inputs of a graph that follows on another.
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
]

# Its comparisons fall as rounding decides, so eager and compiled code need not agree on them.
DECIDED_BY_ROUNDING = {"threshold_that_rounding_decides"}
WHOLE = bool(os.environ.get("PARITAS_WHOLE_CORPUS"))
# A share of the correct programs, one of each kind; the rest is for those who ask for all of it.
# A data parallel model is in integration/test_guard_seeds.py.
USUAL = (
    list(PROGRAMS)
    if WHOLE
    else [
        "adam_training",
        "autocast_bfloat16",
        "branch_inside_the_graph",
        "complex_numbers",
        "convolution_batch_norm_relu_training",
        "custom_operator_that_writes",
        "several_that_write_and_index",
        "shapes_that_turn_dynamic",
        "threshold_that_rounding_decides",
    ]
)
# Those that draw random numbers, of Inductor and of eager.
UNGUARDED = [
    "checkpointed_dropout",
    "dropout_with_random_numbers_of_eager",
    *(["dropout_inside_a_model", "sgd_training", "random_numbers"] if WHOLE else []),
]
# One is compiled in parts for more than a minute before it is named; the others have their like:
# a wrong operator in `relu_codegen_behind_dropout` and `tiny_output_wrong`, a wrong pass in
# `joint_pass`. Passes of each stage, forward and backward, and a mask that is drawn again are in
# integration/test_guard_passes.py, without kernels.
LEFT_OUT = {
    "dropout_drawn_again_in_backward",
    "gradients_of_pooled_convolution",
    "log1p_codegen",
    "post_grad_pass_in_backward",
    "post_grad_pass_in_forward",
    "relu_codegen",
}
USUAL_FAULTS = [name for name in FAULTS if WHOLE or name not in LEFT_OUT]
# In a set of nodes that must be compiled together, more than these is no help to a person.
LARGEST_FUSION = 12


def watched(program: Any, *, check_passes: bool = WHOLE) -> tuple[Any, Verdict]:
    """What a program computes when guarded, and what the guard says about it.

    That passes over correct programs are passed over is seen in integration/ without kernels.
    """
    backend = guard("inductor", on_mismatch="record", check_passes=check_passes)
    result = run(program, backend)
    return result, backend.verdict()


def assert_silent(verdict: Verdict) -> None:
    assert verdict.passed, str(verdict)
    assert verdict.exit_code == 0
    assert verdict.coverage.compared > 0
    assert not [finding for finding in verdict.findings if finding.status is Status.UNVERIFIED]


def assert_correct(name: str) -> Any:
    """What a correct program computes when guarded: as eager does, and without a word."""
    expected = run(PROGRAMS[name], None)
    result, verdict = watched(PROGRAMS[name])
    assert_silent(verdict)
    if name not in DECIDED_BY_ROUNDING:
        assert not disagreements(expected, result)
    return result


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", [name for name in USUAL if name not in UNGUARDED])
def test_a_correct_program_is_silent_and_computes_what_eager_computes(name: str) -> None:
    assert_correct(name)


# Of a captured checkpoint, this backend draws the mask of a dropout again in backward.
WRONG_IN_EAGER = {"checkpointed_dropout", "checkpointed_dropout_with_random_numbers_of_eager"}


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    "name",
    [
        name
        for name in dict.fromkeys([*USUAL, "compiled_optimizer_step"])
        if name not in WRONG_IN_EAGER
    ],
)
def test_a_correct_program_is_silent_under_a_backend_whose_code_autograd_records(name: str) -> None:
    expected = run(PROGRAMS[name], None)
    backend = guard("eager", on_mismatch="record")
    result = run(PROGRAMS[name], backend)
    assert_silent(backend.verdict())
    assert not disagreements(expected, result)


@pytest.mark.one_in(2)
@pytest.mark.usefixtures("undiagnosed")
@pytest.mark.parametrize("name", USUAL_FAULTS)
def test_a_fault_is_found_and_named(name: str) -> None:
    fault = FAULTS[name]
    expected = run(fault.program, None)
    with planted(fault):
        result, verdict = watched(fault.program, check_passes=True)
    assert disagreements(expected, result), "the program does not show the fault"
    assert verdict.exit_code == 1, str(verdict)
    named = [finding for finding in verdict.failures if finding.origin is not None]
    assert named, f"found, but not named:\n{verdict}"
    origin = named[0].origin
    assert is_right(origin, fault), f"{origin} instead of {fault.kind} {set(fault.names)}"
    if fault.kind in {"node", "fusion"}:
        assert ("backward" in named[0].path) is fault.backward


@pytest.mark.parametrize("name", USUAL_FAULTS if WHOLE else USUAL_FAULTS[::4])
def test_the_same_program_without_the_fault_is_silent(name: str) -> None:
    fault = FAULTS[name]
    expected = run(fault.program, None)
    with healed(fault):
        result, verdict = watched(fault.program, check_passes=True)
    assert_silent(verdict)
    assert not disagreements(expected, result)


@pytest.mark.parametrize("name", UNGUARDED)
def test_a_correct_program_computes_to_the_bit_what_it_does_unguarded(name: str) -> None:
    """And draws the same random numbers: the state of the generators is part of the result."""
    plain = [run(PROGRAMS[name], "inductor"), torch.get_rng_state()]
    result = [assert_correct(name), torch.get_rng_state()]
    for left, right in zip(leaves(plain), leaves(result), strict=True):
        assert torch.equal(left, right) if isinstance(left, torch.Tensor) else left == right


def is_right(origin: Any, fault: Fault) -> bool:
    """Whether a report says where a fault really is."""
    if origin.kind != fault.kind:
        return False
    if fault.kind == "node":
        return origin.operator in fault.names
    if fault.kind == "pass":
        return any(name in origin.name for name in fault.names)
    if fault.kind == "fusion":
        stems = {re.sub(r"(_\d+)+$", "", node) for node in origin.nodes}
        return fault.names <= stems and len(origin.nodes) <= LARGEST_FUSION
    return True

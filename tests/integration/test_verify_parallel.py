"""A model under a plan, on simulated ranks: right plans are silent, faults are located."""

from __future__ import annotations

import os

import pytest
import torch
from torch import distributed

import paritas
from integration.parallel_plans import TENSOR_PLAN, Model, by_hand, make_model, over_samples
from paritas import verify_parallel
from paritas.core.results.findings import Status


@pytest.fixture
def model():
    torch.manual_seed(0)
    return Model()


@pytest.fixture
def batch():
    return torch.randn(8, 8, generator=torch.Generator().manual_seed(1))


def adam(parameters):
    return torch.optim.Adam(parameters, lr=0.01)


PLANS = {
    "tensor": (TENSOR_PLAN, None),
    "by hand": (by_hand(), None),
    "ddp": ("ddp", None),
    "fsdp": ("fsdp", None),
    "over samples": (over_samples(), "ranks"),
}


WHOLE = bool(os.environ.get("PARITAS_WHOLE_CORPUS"))
# Every plan in one dtype; in another the whole corpus has them all.
CASES = [
    (name, dtype)
    for name in PLANS
    for dtype in (torch.float32, torch.bfloat16, torch.float64)
    if WHOLE
    or (name == "by hand" and dtype is torch.float32)  # others: quality/
    or (name in {"tensor", "ddp", "over samples"} and dtype is torch.bfloat16)
    or (name == "by hand" and dtype is torch.float64)
]


@pytest.mark.parametrize(("name", "dtype"), CASES, ids=str)
def test_a_right_plan_passes_in_every_dtype(name, dtype, model, batch):
    plan, split = PLANS[name]
    for layer in model.layers:
        # A mean over the samples of a rank is not the mean over all of them.
        layer.updates = name in {"tensor", "by hand"}
    verdict = verify_parallel(
        model.to(dtype), plan, [batch.to(dtype)], optimizer=adam, split=split, steps=2
    )
    assert verdict.status in {Status.IDENTICAL, Status.EQUIVALENT}, str(verdict)
    # Outputs, losses, gradients, parameters and buffers of two steps, and what they begin with.
    assert verdict.coverage.compared == 16 + 2 * (2 + 14 + 14 + 2)


FAULTS = {
    "bias on every rank": ("layers.1.down", "repeated bias"),
    "dropped": ("layers.1.down", "missing reduction"),
    "doubled": ("layers.1.down", "scale"),
    "swapped up": ("layers.1.up", "wrong rank's shard"),
    "swapped down": ("layers.1.down", "wrong rank's shard"),
    "no reduction back": ("layers.1.up", "missing reduction"),
    "norm not reduced": ("layers.1.norm", "missing reduction"),
    "stale buffer": ("layers.1", "stale"),
    "stale buffer on rank 1": ("layers.1", "stale"),
    "frozen": ("head", "zeros"),
    "other seed": ("layers.1.norm", None),
    "raises": ("layers.1.up", None),
}


@pytest.mark.one_in(3)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_located_and_explained(fault, model, batch):
    module, pattern = FAULTS[fault]
    verdict = verify_parallel(model, by_hand(fault), [batch], steps=1)
    first = verdict.failures[0]
    assert (verdict.status, first.origin.name) == (Status.DIFFERENT, module), str(verdict)
    best = first.diagnosis.best if first.diagnosis else None
    assert (best.kind if best else None) == pattern
    assert sum(finding.origin is not None for finding in verdict.findings) == 1


@pytest.mark.parametrize(
    "fault", ["bias on every rank", *(["dropped", "norm not reduced"] * WHOLE)]
)
def test_a_fault_is_located_in_bfloat16_and_on_four_ranks_as_well(fault, model, batch):
    module, pattern = FAULTS[fault]
    if fault == "norm not reduced":
        pattern = None  # with four ranks these shares do not add up to one
    verdict = verify_parallel(model.bfloat16(), by_hand(fault), [batch.bfloat16()], mesh=4, steps=1)
    first = verdict.failures[0]
    assert first.origin.name == module
    assert (first.diagnosis.best.kind if first.diagnosis else None) == pattern


@pytest.mark.parametrize(
    ("fault", "module", "words"),
    [
        ("summed", "gradient reduction", "summed over ranks instead of averaged"),
        ("never", "gradient reduction", "an all-reduce (mean) over the 2 ranks is missing"),
        ("one left", "layers.0.down", "an all-reduce (mean) over the 2 ranks is missing"),
    ],
)
def test_gradients_of_split_samples_that_are_not_averaged_are_told(
    fault, module, words, model, batch
):
    for layer in model.layers:
        layer.updates = False
    verdict = verify_parallel(model, over_samples(fault), [batch], split="ranks", steps=1)
    first = verdict.failures[0]
    assert first.origin.name == module
    assert words in first.diagnosis.sentence


def test_a_loss_that_is_scaled_by_the_number_of_ranks_is_told(model, batch):
    def loss(output, x):
        scale = distributed.get_world_size() if distributed.is_initialized() else 1
        return output.square().mean() * scale

    for layer in model.layers:
        layer.updates = False
    first = verify_parallel(model, "ddp", [batch], mesh=4, loss=loss, steps=1).failures[0]
    assert (first.path, first.origin.name) == ("step 1: loss", "loss")
    assert first.diagnosis.best.evidence["equals"] == "the number of ranks"


def test_a_gradient_that_is_reduced_just_before_the_step_is_right(model, batch):
    def optimizer(parameters):
        held = list(parameters)
        made = torch.optim.SGD(held, lr=0.1)

        def reduce(*_):
            for parameter in held:
                distributed.all_reduce(parameter.grad)
                parameter.grad /= distributed.get_world_size()

        if distributed.is_initialized():
            made.register_step_pre_hook(reduce)
        return made

    for layer in model.layers:
        layer.updates = False
    verdict = verify_parallel(
        model, over_samples("never"), [batch], optimizer=optimizer, split="ranks"
    )
    assert verdict.passed, str(verdict)


def test_random_numbers_are_no_fault_and_no_pass(batch):
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.RReLU())
    verdict = verify_parallel(model, "ddp", [batch], steps=1)
    assert verdict.status is Status.UNVERIFIED
    assert "model.eval()" in verdict.failures[0].advice


def test_a_model_that_fails_on_one_device_is_unverified(batch):
    verdict = verify_parallel(torch.nn.Linear(3, 3), "ddp", [batch])
    assert verdict.status is Status.UNVERIFIED
    assert verdict.failures[0].reason.startswith("the model fails on one device")


def test_the_model_is_left_alone_and_progress_is_told(model, batch):
    before = {name: value.clone() for name, value in model.state_dict().items()}
    heard: list[str] = []
    verify_parallel(model, TENSOR_PLAN, [batch], steps=1, on_progress=heard.append)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert heard[:2] == ["training on one device", "training on 2 ranks"]


def test_ranks_that_are_processes_tell_the_same_story(batch):
    verdicts = [
        verify_parallel(make_model, by_hand("dropped"), [batch], ranks=ranks, steps=1)
        for ranks in ("simulated", "gloo")
    ]
    stories = [
        (v.status, v.failures[0].origin, v.failures[0].diagnosis.best.kind) for v in verdicts
    ]
    assert stories[0] == stories[1]


def test_it_is_public():
    assert paritas.verify_parallel is verify_parallel

"""Are faults of a simulated engine named, and are engines that only round otherwise let pass?"""

from __future__ import annotations

import copy
import os

import pytest
import torch

import paritas
from quality.checkpoint_faults import HELD_OUT, KNOWN, grade
from quality.checkpoint_faults import served as faulty_checkpoint
from quality.served_model import served, trained_further
from quality.small_engine import SmallEngine

WHOLE = bool(os.environ.get("PARITAS_WHOLE_CORPUS"))
WARM = {"temperature": 0.8}
UNHURRIED = 3600.0  # no test depends on how fast the machine is
MIXED = {"temperature": 0.7, "top_k": 8}

# The fault, the kind of cause that must be named, sampling parameters, and the model's settings.
FAULTS = [
    ("temperature applied", "temperature", WARM, {}),
    ("a default temperature applied", "temperature", {}, {}),
    ("normalised over the nucleus", "truncation", {"top_p": 0.9}, {}),
    ("normalised over another nucleus", "truncation", {"top_p": 0.9}, {}),
    ("processed", "normalisation", MIXED, {}),
    ("unused entries counted", "normalisation", WARM, {}),
    ("logits returned", "normalisation", WARM, {}),
    ("shifted by one", "shift", WARM, {}),
    ("BOS added twice", "prompt", WARM, {}),
    ("BOS left out", "prompt", WARM, {}),
    ("another BOS", "prompt", WARM, {}),
    ("prompt truncated", "prompt", WARM, {}),
    ("rope scaling ignored", "positions", WARM, {}),
    ("rope base of another model", "positions", WARM, {}),
    ("positions of chunks start again", "positions", WARM, {}),
    ("positions of decoding one too far", "positions", WARM, {}),
    ("sliding window ignored", "settings", WARM, {}),
    ("cap of logits ignored", "settings", WARM, {"final_logit_softcapping": 3.0}),
    ("cache lost", "cache", WARM, {}),
    ("page of another request", "cache", WARM, {}),
    ("cache of the first request", "cache", WARM, {}),
    ("first page not seen", "cache", WARM, {}),
    ("cache in float8", "quantised cache", WARM, {}),
    ("cache in float8, read at once", "quantised cache", WARM, {}),
    ("weights in float8", "quantised weights", WARM, {}),
    ("weights in int4", "quantised weights", WARM, {}),
    ("second layer skipped", "layers", WARM, {}),
    ("attention too strong", "settings", WARM, {}),
    ("weights of experts not normalised", "settings", WARM, {"num_experts": 6}),
    # In bfloat16 rounding itself may choose other experts, which is a warning.
    (
        "an expert chosen otherwise",
        "routing",
        WARM,
        {"num_experts": 6, "dtype": torch.float32},
    ),
    ("stale weights", "stale weights", WARM, {}),
    ("one stale layer", "stale weights", WARM, {}),
    ("stale cache of the prompt", "stale weights", WARM, {}),
    ("stale weights in decoding", "stale weights", WARM, {}),
]
# A temperature is named in unit/engines.
SAMPLE = {
    "BOS added twice",
    "positions of decoding one too far",
    "one stale layer",
}
KERNELS = ["", "fused", "online", "fused online head", "ranks", "parts fused online", "float32"]


def prompts(count=3, seed=0, shortest=11):
    """Prompts that begin with BOS, of different lengths."""
    random = torch.Generator().manual_seed(seed)
    sizes = [shortest + 2 * number for number in range(count)]
    return [[1, *torch.randint(3, 61, (size,), generator=random).tolist()] for size in sizes]


def returned(engine, sampling=WARM, mode="raw", count=3, tokens=8, top=3, seed=0):
    """What an engine returns for some requests."""
    return [engine.serve(prompt, tokens, sampling, mode, top) for prompt in prompts(count, seed)]


def faulty(fault, settings, seed=0):
    """The model, an engine with a fault, and earlier weights if the fault is about them."""
    model = served(seed, **settings)
    if "stale" not in fault:
        chunk = {"positions of chunks start again": 8, "cache in float8": 64}.get(fault, 5)
        return model, SmallEngine(model, fault, kernels="fused online", chunk=chunk), {}
    older, model = model, trained_further(model)
    wholly = fault in ("stale weights", "stale weights in decoding")
    mixed = copy.deepcopy(older if wholly else model)
    if fault == "one stale layer":
        mixed.layers[1].load_state_dict(older.layers[1].state_dict())
    engine = SmallEngine(mixed, fault, kernels="fused online")
    if fault == "stale cache of the prompt":
        engine.prefill_with = SmallEngine(older, kernels="fused online")
    if fault == "stale weights in decoding":
        engine.prefill_with = SmallEngine(model, kernels="fused online")
    return model, engine, {"step 100": older}


@pytest.mark.parametrize(
    ("fault", "kind", "sampling", "settings"), FAULTS, ids=lambda one: str(one)[:40]
)
def test_the_fault_of_an_engine_is_named(fault, kind, sampling, settings):
    if fault not in SAMPLE and not WHOLE:
        pytest.skip("a sample is enough; PARITAS_WHOLE_CORPUS=1 runs all")
    model, engine, older = faulty(fault, settings)
    top = 0 if fault == "shifted by one" else 3
    count, tokens = (3, 8) if WHOLE else (1, 6)
    records = returned(engine, sampling, count=count, tokens=tokens, top=top)
    report = paritas.check_engine(model, records, older=older, seconds=UNHURRIED)
    assert report.exit_code == 1
    assert {cause.kind for cause in report.causes if cause.to_rounding} == {kind}, str(report)


def test_a_fault_that_is_none_of_the_known_ones_is_not_named():
    if not WHOLE:
        pytest.skip("all hypotheses are tried: PARITAS_WHOLE_CORPUS=1 runs it")
    model = served(0)
    engine = SmallEngine(trained_further(model), kernels="fused online")  # which is not passed
    report = paritas.check_engine(model, returned(engine, count=2), seconds=UNHURRIED)
    assert report.exit_code == 1
    assert not any(cause.to_rounding for cause in report.causes), str(report)


@pytest.mark.parametrize("kernels", KERNELS)
def test_an_engine_that_rounds_elsewhere_passes(kernels):
    if kernels != "ranks" and not WHOLE:
        pytest.skip("a sample is enough; PARITAS_WHOLE_CORPUS=1 runs all")
    model = served(1)
    records = returned(SmallEngine(model, kernels=kernels), {"temperature": 0.8, "top_p": 0.9})
    assert paritas.check_engine(model, records, seconds=UNHURRIED)


def test_processed_log_probabilities_of_a_right_engine_pass():
    model = served(2)
    sampling = {"temperature": 0.7, "top_k": 8, "top_p": 0.9, "repetition_penalty": 1.2}
    records = returned(SmallEngine(model, kernels="fused"), sampling, "processed", count=2)
    assert paritas.check_engine(model, records, seconds=UNHURRIED)


@pytest.mark.parametrize(
    ("fault", "sampling"),
    [("greedy requests are drawn", {"temperature": 0}), ("truncation not applied", {"top_k": 3})],
)
def test_tokens_that_may_not_be_drawn_are_a_fault(fault, sampling):
    model = served(0)
    records = returned(SmallEngine(model, fault), sampling, count=1, tokens=6)
    report = paritas.check_engine(model, records, seconds=UNHURRIED)
    assert [one.item.name for one in report.verdict.failures] == ["tokens"]
    assert [one.kind for one in report.causes] == ["sampling"]


ONE_LAYER = {"num_hidden_layers": 1, "layer_types": ["full_attention"]}


def test_a_coarser_dtype_that_gives_the_numbers_one_by_one_is_degraded_and_named():
    model = served(0, torch.float32, **ONE_LAYER)
    coarse = copy.deepcopy(model).bfloat16()
    ids = torch.tensor([prompts(1)[0]])
    rows = coarse(ids)["logits"][0].float().log_softmax(-1)
    numbers = rows[:-1].gather(1, ids[0, 1:, None])[:, 0].tolist()
    record = {
        "prompt": ids[0, :-4].tolist(), "output": ids[0, -4:].tolist(), "logprobs": numbers[-4:],
        "prompt_logprobs": [None, *numbers[:-4]],
    }  # fmt: skip
    report = paritas.check_engine(model, [record], seconds=UNHURRIED)
    assert report.verdict.status == "degraded"
    assert report.causes[0].text == "the engine computes in bfloat16"


def test_an_error_of_the_size_of_a_coarser_dtype_is_no_proof_of_it():
    model = served(0, torch.float32, **ONE_LAYER)
    records = returned(SmallEngine(copy.deepcopy(model).bfloat16()), count=1, tokens=8)
    report = paritas.check_engine(model, records, seconds=UNHURRIED)
    assert report.verdict.status == "different"
    assert not report.causes
    assert "consistent with this: the engine computes in bfloat16" in " ".join(report.observed)
    assert paritas.check_engine(copy.deepcopy(model).bfloat16(), records)


def _scaled(model):
    model.layers[0].self_attn.o_proj.weight.mul_(1.02)


def _swapped(model):
    weight = model.layers[0].self_attn.q_proj
    for part in (weight.weight, weight.bias):
        part.copy_(part.unflatten(0, (4, -1))[[0, 3, 2, 1]].reshape(part.shape))


def _other_epsilon(model):
    for one in model.modules():
        if hasattr(one, "eps"):
            one.eps = 1e-3
    model.config.rms_norm_eps = 1e-3


def _other_base(model):
    model.config.rope_parameters = {**model.config.rope_parameters, "rope_theta": 2e5}


# What is wrong in the engine's copy, and the cause that must be named, alone.
CHECKPOINTS = {
    "epsilon": (_other_epsilon, "rms_norm_eps is 0.001 in place of 1e-06"),
    "projection": (
        _scaled,
        "the weight of layers.0.self_attn.o_proj is 1.02 times as large",
    ),
    "heads": (_swapped, "layers.0.self_attn.q_proj has its heads 1 and 3 exchanged"),
    "rope base": (_other_base, "rope_theta is 2e+05 in place of 5e+05"),
}


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_a_faulty_checkpoint_is_named_and_nothing_else_is(name):
    if name in {"heads", "rope base"} and not WHOLE:
        pytest.skip("a sample is enough; PARITAS_WHOLE_CORPUS=1 runs all")
    change, text = CHECKPOINTS[name]
    model = served(0, torch.float32, **ONE_LAYER)
    wrong = copy.deepcopy(model)
    with torch.no_grad():
        change(wrong)
    records = returned(SmallEngine(wrong, kernels="fused"), count=1, tokens=6)
    report = paritas.check_engine(model, records, seconds=UNHURRIED)
    assert report.verdict.status == "different"
    assert [one.text for one in report.causes if one.to_rounding] == [text], str(report)


@pytest.mark.parametrize("fault", [*KNOWN, *HELD_OUT], ids=lambda one: one.name)
def test_no_cause_of_a_faulty_checkpoint_is_false(fault):
    if not WHOLE:
        pytest.skip("PARITAS_WHOLE_CORPUS=1 runs them")
    pytest.importorskip("transformers")
    model, records, older = faulty_checkpoint(fault)
    found = grade(fault, paritas.check_engine(model, records, older=older, seconds=UNHURRIED))
    assert found in ({"right", "missing"} if fault in HELD_OUT else {"right"}) | (
        set() if fault.right else {"missing"}
    )

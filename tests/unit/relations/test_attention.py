"""Attention implementations, packed sequences and continuous batching."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn.attention.flex_attention import flex_attention

import paritas
from paritas.relations.generation import _Counter, _serve_calls
from paritas.relations.relation import chosen
from quality.relation_models import HEADS, SIZE, VOCABULARY, WIDTH, rotated, tokens

pytestmark = pytest.mark.usefixtures("undiagnosed")


def create_causal_mask(*, attention_mask, position_ids, fault):
    """What is added to the scores; a mask of four axes is returned as it is."""
    is_whole = attention_mask is not None and attention_mask.dim() == 4
    if is_whole and fault != "given mask not used":
        return attention_mask
    total = position_ids.shape[1]
    seen = torch.ones(total, total).tril().bool()[None]
    starts = torch.diff(position_ids, prepend=position_ids[:, :1] - 1) != 1
    sequence = starts.cumsum(1)
    if fault != "positions do not separate" and not is_whole:
        seen = seen & (sequence[:, :, None] == sequence[:, None])
    if attention_mask is not None and not is_whole:
        seen = seen & attention_mask[:, None].bool()
    return torch.where(seen[:, None], 0.0, torch.finfo(torch.float32).min)


def by_eager(q, k, v, mask, fault):
    scores = q @ k.transpose(-1, -2) * (SIZE**-0.5 * (1.001 if fault == "other scale" else 1))
    return torch.softmax(scores + mask, dim=-1) @ v


def by_sdpa(q, k, v, mask, fault):
    return nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask.to(q.dtype))


def by_flex(q, k, v, mask, fault):
    def added(score, row, head, i, j):
        return score if fault == "mask not added" else score + mask[row, 0, i, j]

    return torch.compile(flex_attention)(q, k, v, score_mod=added)


KINDS = {"eager": by_eager, "sdpa": by_sdpa, "flex_attention": by_flex}


class Switched(nn.Module):
    """One layer of attention that can be switched as models of transformers can."""

    _supports_sdpa = _supports_flex_attn = True
    _from_config = None

    def __init__(self, fault="", *, stays=False):
        super().__init__()
        torch.manual_seed(0)
        self.fault, self.stays = fault, stays
        self.config = SimpleNamespace(_attn_implementation="sdpa")
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.project = nn.Linear(WIDTH, 3 * WIDTH)

    def set_attn_implementation(self, name):
        if not self.stays:
            self.config._attn_implementation = name

    def forward(self, input_ids, attention_mask=None, position_ids=None):
        if position_ids is None:
            position_ids = torch.arange(input_ids.shape[1])[None]
        mask = create_causal_mask(
            attention_mask=attention_mask, position_ids=position_ids, fault=self.fault
        )
        mask = mask.expand(len(input_ids), -1, -1, -1)
        x = self.project(self.embed(input_ids)).unflatten(-1, (3, HEADS, SIZE))
        q, k, v = (part.transpose(1, 2) for part in x.unbind(2))
        attend = KINDS[self.config._attn_implementation]
        y = attend(rotated(q, position_ids), rotated(k, position_ids), v, mask, self.fault)
        return {"last_hidden_state": y.transpose(1, 2).flatten(2)}


def failing(report):
    """The labels of the cases that fail."""
    return {one.item.option for row in report.rows for one in row.verdict.failures}


def test_implementations_and_packed_rows_of_a_right_model_agree():
    report = paritas.invariants(Switched(), tokens(), only=["attention", "packing"])
    assert report.passed, str(report)
    assert report.row("attention").verdict.coverage.compared == 4  # eager and flex, also padded
    assert not report.verdict.notes  # also in float64: flex attention has a rule for its mode
    assert report.row("packing").verdict.coverage.compared == 2
    assert not report.row("packing").reason


@pytest.mark.parametrize(
    ("fault", "labels"),
    [
        ("other scale", {"eager", "eager, right padded"}),
        ("mask not added", {"flex_attention", "flex_attention, right padded"}),
        ("positions do not separate", {"positions"}),
        ("given mask not used", {"block mask"}),
    ],
)
def test_a_fault_of_one_implementation_or_mask_is_found(fault, labels):
    report = paritas.invariants(Switched(fault), tokens(), only=["attention", "packing"])
    assert failing(report) == labels, str(report)


def test_an_implementation_that_cannot_be_chosen_is_not_compared_with_itself():
    report = paritas.invariants(Switched(stays=True), tokens(), only="attention")
    row = report.row("attention")
    assert row.promise == "not promised"
    assert "eager cannot be chosen for it: it stays at sdpa" in row.reason


def test_flex_kernels_are_only_compiled_if_named():
    assert "flex-kernels" not in {relation.name for relation in chosen(None)}
    assert "flex-kernels" not in {relation.name for relation in chosen(["serving"])}


# --- Continuous batching ---


def test_calls_of_another_thread_are_made_in_the_one_that_serves():
    model = nn.Linear(2, 3)
    seen = []

    def forward(**kwargs):
        seen.append(threading.current_thread())
        return kwargs["x"] + 1

    counter, found = _Counter(), []
    with _serve_calls(model, counter):
        asking = threading.Thread(target=lambda: found.append(model(x=1)))
        asking.start()
        while asking.is_alive():
            counter.serve(forward)
        asking.join()
    assert (found, seen) == ([2], [threading.main_thread()])
    assert "forward" not in vars(model)
    with pytest.raises(RuntimeError, match="the check has ended"):
        counter.ask(x=1)


@pytest.mark.parametrize("fault", [0.0, 1e-3])
def test_a_fault_of_continuous_batching_is_found(fault):
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "vocab_size": 23}
    config = transformers.LlamaConfig(**sizes, num_attention_heads=2, num_key_value_heads=1)
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config).eval()
    for one in model.parameters():
        nn.init.normal_(one, std=0.3)

    def scaled(_, args, kwargs, output):
        first, *rest = output
        return (first * (1 + fault) if "cache" in kwargs else first, *rest)

    model.model.layers[1].self_attn.register_forward_hook(scaled, with_kwargs=True)
    report = paritas.invariants(model, tokens(), only="continuous-batching")
    assert report.row("continuous-batching").status.passes() == (not fault), str(report)
    assert not report.verdict.notes  # also in float64, although its pages are bytes

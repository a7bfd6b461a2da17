"""verify(by="blocks"): arguments of blocks that the two sides pass in different forms."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional

import paritas
from paritas import Status, VerifyConfig

QUIET = VerifyConfig(raise_on_mismatch=False, locate_seconds=0)
TOKENS = torch.arange(12).reshape(2, 6)


class Layer(nn.Module):
    """Attention that is causal by itself, or by the mask that it gets."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(8, 24)
        self.out = nn.Linear(8, 8)

    def forward(self, x, mask=None, scale=1.0, **extra):
        q, k, v = self.qkv(x).chunk(3, -1)
        seen = functional.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None
        )
        return x + self.out(seen) * scale


class Model(nn.Module):
    """Leaves the mask out in eager mode, as transformers does."""

    diagonal = 0

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(12, 8)
        self.layers = nn.ModuleList(Layer() for _ in range(3))
        self.head = nn.Linear(8, 12)

    def mask(self, length: int):
        return torch.ones(length, length, dtype=torch.bool).tril(self.diagonal)

    def call_layer(self, layer, x):
        compiling = torch.compiler.is_compiling()
        return layer(x, mask=self.mask(x.shape[1]) if compiling else None)

    def forward(self, tokens):
        x = self.embed(tokens)
        for layer in self.layers:
            x = self.call_layer(layer, x) * 1.5
        return self.head(x)


@pytest.fixture
def model():
    torch.manual_seed(0)
    return Model()


def other(model, **overridden):
    candidate = copy.deepcopy(model)
    candidate.__class__ = type("Candidate", (Model,), overridden)
    return candidate


def by_blocks(model, candidate):
    return paritas.verify([TOKENS], model, candidate, QUIET, by="blocks")


def failing_blocks(verdict):
    return {finding.item.graph for finding in verdict.failures}


def test_a_mask_that_only_the_compiled_model_makes_is_no_difference(model):
    verdict = by_blocks(model, torch.compile(model, backend="aot_eager"))
    assert verdict.passed, str(verdict)
    arguments = [f for f in verdict.findings if "'mask'" in f.path]
    assert [f.status for f in arguments] == [Status.EQUIVALENT] * 3
    assert arguments[1].reason == (
        "the reference passes None, the candidate a tensor bool[6, 6]; layers.1 computes the same "
        "from them"
    )
    note = "argument mask: the reference passes None, the candidate a tensor bool[6, 6]"
    assert f"layers.0 and 2 other pieces: {note}; its results are the same" in verdict.notes


@pytest.mark.parametrize("diagonal", [1, -1])
def test_a_mask_with_another_meaning_is_a_difference_in_each_block_that_gets_it(model, diagonal):
    verdict = by_blocks(model, torch.compile(other(model, diagonal=diagonal), backend="aot_eager"))
    assert verdict.status is Status.DIFFERENT
    assert {"layers.0", "layers.1", "layers.2"} <= failing_blocks(verdict)
    reasons = [f.reason for f in verdict.failures if "'mask'" in f.path]
    assert reasons[0].endswith("and layers.0 does not compute the same from them")


SAME = {
    "by position": lambda self, layer, x: layer(x, None, 1.0),
    "a number as a tensor": lambda self, layer, x: layer(x, scale=torch.tensor(1.0)),
    "a keyword that only it has": lambda self, layer, x: layer(x, mask=None, unused=7),
    "no mask at all": lambda self, layer, x: layer(x),
    "a full mask": lambda self, layer, x: layer(x, mask=self.mask(x.shape[1])),
    "a mask of numbers": lambda self, layer, x: layer(
        x, mask=torch.zeros(6, 6).masked_fill(~self.mask(6), -torch.inf)
    ),
    "by its name": lambda self, layer, x: layer(x=x, mask=None),
}


@pytest.mark.parametrize("call", SAME.values(), ids=SAME)
def test_the_same_arguments_in_another_form_are_no_difference(model, call):
    assert (verdict := by_blocks(model, other(model, call_layer=call))).passed, str(verdict)


WRONG = {
    "another number": lambda self, layer, x: layer(x, scale=1.01),
    "another number as a tensor": lambda self, layer, x: layer(x, scale=torch.tensor(1.01)),
    "a mask that hides nothing": lambda self, layer, x: layer(x, mask=torch.ones(6, 6).bool()),
}


@pytest.mark.parametrize("call", WRONG.values(), ids=WRONG)
def test_other_arguments_that_matter_are_found_at_their_block(model, call):
    def call_layer(self, layer, x):
        wrong = layer is self.layers[1]
        return call(self, layer, x) if wrong else Model.call_layer(self, layer, x)

    verdict = by_blocks(model, other(model, call_layer=call_layer))
    assert verdict.status is Status.DIFFERENT, str(verdict)
    assert "layers.1" in failing_blocks(verdict)
    assert not {"layers.0", "layers.2"} & failing_blocks(verdict)


def test_a_keyword_that_the_candidate_leaves_out_is_left_out_for_its_block(model):
    reference = other(model, call_layer=lambda self, layer, x: layer(x, scale=1.0))
    verdict = by_blocks(reference, model)
    assert verdict.passed, str(verdict)
    wrong = other(model, call_layer=lambda self, layer, x: layer(x, scale=1.01))
    assert by_blocks(wrong, model).status is Status.DIFFERENT

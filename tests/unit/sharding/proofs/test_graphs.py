"""Proofs of graphs, and the checker of their certificates."""

from __future__ import annotations

import copy
import json

import pytest
import torch
from torch.nn import functional as F

from paritas.core.errors import UsageError
from paritas.sharding.proofs.certificates import GRAPH_VERSION
from paritas.sharding.proofs.graph_checker import GraphChecker
from paritas.sharding.proofs.graphs import (
    all_gather,
    all_reduce,
    keep_slice,
    prove_graph,
    reduce_scatter,
)
from paritas.sharding.proofs.kernel import Refused

COLUMNS, ROWS = "shard(0)", "shard(1)"
MLP = {"up": COLUMNS, "down": ROWS}
HEADS = {"q": COLUMNS, "k": COLUMNS, "v": COLUMNS, "o": ROWS}


def draw(**shapes):
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


X, UP, DOWN, SQUARE = (2, 6, 8), (12, 8), (8, 12), (8, 8)


def mlp(x, up, down):
    return all_reduce(F.linear(F.gelu(F.linear(x, up)), down))


def split_tokens(x, up, down):
    return reduce_scatter(F.linear(F.gelu(F.linear(all_gather(x, 1), up)), down), 1)


def heads(x, weight):
    return F.linear(x, weight).view(2, 6, 4, 2).transpose(1, 2)


def attend(x, q, k, v, o):
    mixed = F.scaled_dot_product_attention(heads(x, q), heads(x, k), heads(x, v), is_causal=True)
    return F.linear(mixed.transpose(1, 2).reshape(2, 6, 8), o)


def attention(x, q, k, v, o):
    return all_reduce(attend(x, q, k, v, o))


def block(x, q, k, v, o, first, second, up, down):  # noqa: PLR0917
    x = x + all_reduce(attend(F.rms_norm(x, (8,), first), q, k, v, o))
    return x + mlp(F.rms_norm(x, (8,), second), up, down)


def vocabulary_loss(x, embedding, target):
    """The cross entropy of one-hot targets, with the vocabulary split."""
    logits = F.linear(x, embedding)
    highest = torch.amax(all_gather(logits, 2), 2, keepdim=True)
    shifted = logits - highest
    total = all_reduce(torch.sum(torch.exp(shifted), 2))
    own = all_reduce(torch.sum(shifted * target, 2))
    return torch.mean(torch.log(total) - own)


BLOCK = draw(x=X, q=SQUARE, k=SQUARE, v=SQUARE, o=SQUARE, first=(8,), second=(8,), up=UP, down=DOWN)
RIGHT = {
    "mlp": (mlp, draw(x=X, up=UP, down=DOWN), MLP, "replicate"),
    "tokens": (split_tokens, draw(x=X, up=UP, down=DOWN), {**MLP, "x": "shard(1)"}, "shard(1)"),
    "attention": (
        attention,
        draw(x=X, q=SQUARE, k=SQUARE, v=SQUARE, o=SQUARE),
        HEADS,
        "replicate",
    ),
    "block": (block, BLOCK, {**HEADS, **MLP}, "replicate"),
    "loss": (
        vocabulary_loss,
        draw(x=X, embedding=(16, 8), target=(2, 6, 16)),
        {"embedding": COLUMNS, "target": "shard(2)"},
        "replicate",
    ),
}


@pytest.mark.parametrize("name", RIGHT)
def test_a_right_graph_is_proved_and_its_certificate_accepted(name):
    function, inputs, placements, outputs = RIGHT[name]
    proof = prove_graph(function, inputs, placements, outputs)
    assert proof.status == "proved", proof.words
    GraphChecker(json.loads(json.dumps(proof.certificate))).check()


def missing(x, up, down):
    return F.linear(F.gelu(F.linear(x, up)), down)


def late(x, up, down):
    return all_reduce(F.gelu(F.linear(F.linear(x, up), down)))


def doubled(x, up, down):
    return all_reduce(mlp(x, up, down))


def sliced(x, up, down):
    return all_reduce(F.linear(F.gelu(keep_slice(F.linear(x, up), 2)), down))


@pytest.mark.parametrize(
    ("function", "node", "reason"),
    [
        (missing, "output", "result 0 is partial(sum), not replicate: an all_reduce is missing"),
        (
            late,
            "gelu",
            (
                "no rule of gelu fits: linear_1 is partial(sum); an all_reduce of linear_1 is "
                "missing before it"
            ),
        ),
        (
            doubled,
            "all_reduce_1",
            ("all_reduce of all_reduce, which is replicate: it is reduced once too often"),
        ),
        (sliced, "keep_slice", "keep_slice of linear, which is shard(2)"),
    ],
)
def test_a_wrong_graph_is_refuted_by_numbers(function, node, reason):
    proof = prove_graph(function, draw(x=X, up=UP, down=DOWN), MLP)
    assert (proof.status, proof.node, proof.reason) == ("refuted", node, reason)
    assert proof.off_by is not None
    assert proof.off_by > 1e-3
    assert proof.certificate is None


def late_but_right(x, up, down):
    terms = F.linear(F.gelu(F.linear(x, up)), down)
    return all_reduce((0.5 * terms).transpose(1, 2) + terms.transpose(1, 2))


def test_terms_may_be_scaled_moved_and_added_before_they_are_reduced():
    inputs = draw(x=X, up=UP, down=DOWN)
    proof = prove_graph(late_but_right, inputs, MLP)
    assert proof.status == "proved", proof.words
    GraphChecker(json.loads(json.dumps(proof.certificate))).check()
    shifted = prove_graph(
        lambda x, up, down: all_reduce(1 + F.linear(F.gelu(F.linear(x, up)), down)), inputs, MLP
    )
    assert (shifted.status, shifted.node) == ("refuted", "add")


def test_a_bias_that_every_rank_adds_is_refuted_and_one_that_the_first_adds_is_proved():
    def biased(x, up, down, bias):
        return all_reduce(F.linear(F.gelu(F.linear(x, up)), down, bias))

    inputs = draw(x=X, up=UP, down=DOWN, bias=(8,))
    assert prove_graph(biased, inputs, MLP).status == "refuted"
    assert prove_graph(biased, inputs, {**MLP, "bias": "once"}).status == "proved"


def test_random_numbers_and_writes_are_not_proved():
    inputs = draw(x=X)
    proof = prove_graph(lambda x: F.dropout(x, 0.5), inputs, {})
    assert (proof.status, proof.reason) == ("not decided", "dropout draws random numbers")
    proof = prove_graph(lambda x: x.add_(1), inputs, {})
    assert (proof.status, proof.reason) == ("not decided", "add_ writes to its argument")
    with pytest.raises(UsageError, match="unknown placement 'split'"):
        prove_graph(lambda x: x, inputs, {"x": "split"})


def test_an_item_of_a_tensor_is_a_call_and_not_a_part_of_a_result():
    """The rows of a value whose rows are split are not split; the checker must not believe it."""
    proof = prove_graph(lambda x: x[0], draw(x=(4, 6)), {"x": "shard(0)"}, "shard(0)")
    assert proof.status != "proved"
    proof = prove_graph(lambda x: x[:, 1:3], draw(x=(4, 6)), {"x": "shard(0)"}, "shard(0)")
    assert proof.status == "proved", proof.words
    certificate = {
        "paritas graph certificate": GRAPH_VERSION,
        "inputs": {"x": {"placement": "shard(0)", "tensor": [4, 6], "dtype": "float64"}},
        "calls": [{"value": "y", "item": ["x", 0], "placements": ["shard(0)"]}],
        "outputs": [{"value": "y", "placement": "shard(0)"}],
    }
    with pytest.raises(Refused, match="x is one tensor"):
        GraphChecker(certificate).check()


def test_a_call_of_a_list_of_tensors_is_proved():
    inputs = draw(x=(4, 6), y=(4, 2))
    placements = {"x": "shard(0)", "y": "shard(0)"}
    proof = prove_graph(lambda x, y: torch.cat([x, y], 1), inputs, placements, "shard(0)")
    assert proof.status == "proved", proof.words
    checked = GraphChecker(json.loads(json.dumps(proof.certificate))).check()
    assert "cat = torch.cat((x, y), 1): shard(0)" in checked


def test_what_a_call_assumes_is_said_about_the_graph():
    inputs = {**draw(x=(6, 4), weight=(5, 4)), "target": torch.tensor([0, 4, 1, 2, 2, 0])}
    placements = {"x": "shard(0)", "target": "shard(0)"}

    def loss(x, weight, target):
        return all_reduce(F.cross_entropy(F.linear(x, weight), target), "avg")

    proof = prove_graph(loss, inputs, placements)
    assert proof.assumes == ("no target is ignore_index (-100)",)
    said = "parts of equal size, if no target is ignore_index (-100)"
    assert said in proof.words
    assert said in GraphChecker(json.loads(json.dumps(proof.certificate))).check()
    inputs["target"][:2] = -100
    assert prove_graph(loss, inputs, placements).status == "refuted"


def packed(x, qkv, out):
    pieces = F.linear(x, qkv).chunk(3, -1)
    q, k, v = (heads_of(pieces[at]) for at in range(3))
    mixed = F.scaled_dot_product_attention(q, k, v)
    return all_reduce(F.linear(mixed.transpose(1, 2).reshape(2, 6, 8), out))


def heads_of(x):
    return x.view(2, 6, 4, 2).transpose(1, 2)


def test_a_packed_weight_is_proved_and_its_rule_is_not_taken_for_another():
    inputs = draw(x=X, qkv=(24, 8), out=SQUARE)
    placements = {"qkv": "_S(0, 3)", "out": ROWS}
    proof = prove_graph(packed, inputs, placements)
    assert proof.status == "proved", proof.words
    assert prove_graph(packed, inputs, {**placements, "qkv": COLUMNS}).status == "refuted"
    assert prove_graph(packed, inputs, {**placements, "qkv": "_S(0, 2)"}).status == "refuted"
    certificate = json.loads(json.dumps(proof.certificate))
    linear = next(one for one in certificate["calls"] if one["value"] == "linear")
    linear["certificate"]["parts"] = "equal"
    with pytest.raises(Refused):
        GraphChecker(certificate).check()


def without(certificate, collective):
    """The certificate of the graph without a collective: its readers get its argument."""
    call = next(one for one in certificate["calls"] if one["value"] == collective)
    text = json.dumps([one for one in certificate["calls"] if one is not call])
    certificate["calls"] = json.loads(text.replace(f'"{collective}"', f'"{call["of"]}"'))
    for output in certificate["outputs"]:
        output["value"] = call["of"] if output["value"] == collective else output["value"]


@pytest.mark.parametrize("collective", ["all_reduce", "all_reduce_1"])
def test_the_checker_refuses_a_graph_without_one_of_its_reductions(collective):
    function, inputs, placements, outputs = RIGHT["block"]
    certificate = copy.deepcopy(prove_graph(function, inputs, placements, outputs).certificate)
    without(certificate, collective)
    with pytest.raises(Refused):
        GraphChecker(certificate).check()


def test_the_checker_refuses_other_claims():
    certificate = prove_graph(*RIGHT["mlp"]).certificate
    for change in (
        lambda data: data["outputs"][0].update(placement="shard(0)"),
        lambda data: data["inputs"]["x"].update(placement="shard(0)"),
        lambda data: data["calls"][0].update(placements=["replicate"]),
        lambda data: data["calls"][2].update({"same on all ranks": True}),
        lambda data: data["calls"].append(data["calls"][0]),
    ):
        wrong = copy.deepcopy(certificate)
        change(wrong)
        with pytest.raises(Refused):
            GraphChecker(wrong).check()

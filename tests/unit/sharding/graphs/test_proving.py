"""Proofs of graphs that were read: each split, and the graph under stated placements."""

from __future__ import annotations

import copy
import json

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from paritas.core.errors import UsageError
from paritas.core.results.findings import Status
from paritas.sharding.graphs.calls import GraphSettings
from paritas.sharding.graphs.opening import open_graph
from paritas.sharding.graphs.proving import prove_placed
from paritas.sharding.graphs.rows import CallOutcome, GraphReport
from paritas.sharding.graphs.verify import verify_graph
from paritas.sharding.operators.library import unregister
from paritas.sharding.operators.library.registry import register
from paritas.sharding.proofs.checker import Checker
from paritas.sharding.proofs.graph_checker import GraphChecker
from paritas.sharding.proofs.kernel import Refused
from quality.transformer import Sizes, Transformer, token_ids

SIZES = Sizes(width=8, heads=2, layers=2, context=4, vocabulary=16)
# Columns, then rows, of attention, of the perceptron and of the gate; the head by vocabulary.
MEGATRON = {
    "inputs": {
        "*.qkv.*": "_S(0, 3)",
        "*.out.weight": "shard(1)",
        "*.up.*": "shard(0)",
        "*.down.weight": "shard(1)",
        "*.left.*": "shard(0)",
        "*.right.*": "shard(0)",
        "*.widen.weight": "shard(1)",
        "*.out.bias": "once",
        "*.down.bias": "once",
        "*.widen.bias": "once",
        "head.*": "shard(0)",
    },
    "collectives": {"*.out": "all_reduce", "*.down": "all_reduce", "*.widen": "all_reduce"},
    "outputs": "shard(2)",
}


@pytest.fixture(scope="module")
def transformer():
    return open_graph((Transformer(SIZES), (token_ids(SIZES),)))


def changed(**changes):
    placements = copy.deepcopy(MEGATRON)
    for table, entries in changes.items():
        for key, value in entries.items():
            placements[table].pop(key)
            if value is not None:
                placements[table][key] = value
    return placements


def test_a_transformer_with_heads_split_is_proved_and_its_certificate_accepted(transformer):
    proof = prove_placed(transformer, MEGATRON, GraphSettings())
    assert proof.status == "proved", proof.words
    assert proof.placements["linear"] == "_S(2, 3)"  # queries, keys and values, each split
    certificate = json.loads(json.dumps(proof.certificate))
    GraphChecker(certificate).check()
    cut = next(one for one in certificate["calls"] if "pieces" in one)
    cut["pieces"] = 2
    with pytest.raises(Refused, match="does not have 2 pieces"):
        GraphChecker(certificate).check()


@pytest.mark.parametrize(
    ("placements", "node", "reason"),
    [
        (
            changed(collectives={"*.down": None}),
            "add_2",
            "an all_reduce of linear_3 is missing before it",
        ),
        (
            changed(collectives={"*.widen": ["all_reduce", "all_reduce"]}),
            "linear_6.all_reduce.all_reduce",
            "it is reduced once too often",
        ),
        (
            changed(inputs={"*.qkv.*": "shard(0)"}),
            "chunk",
            "if each piece is to be split, it must be packed",
        ),
        (changed(inputs={"*.out.bias": "replicate"}), "linear_1", "out_bias is replicate"),
    ],
)
def test_wrong_placements_are_refuted_by_numbers_and_name_the_call(
    transformer, placements, node, reason
):
    proof = prove_placed(transformer, placements, GraphSettings())
    assert (proof.status, proof.node) == ("refuted", node)
    assert reason in proof.reason
    assert "blocks.0" in proof.place
    assert "transformer.py:" in proof.place
    assert proof.off_by is not None
    assert proof.off_by > 1e-4


def test_a_rank_that_gets_fewer_pieces_than_one_device_is_refuted(transformer):
    placements = changed(inputs={"*.qkv.*": "_S(0, 3)"})
    placements["collectives"]["linear"] = "keep_slice(2)"
    placements["collectives"]["linear_7"] = "keep_slice(2)"
    proof = prove_placed(transformer, placements, GraphSettings(ranks=(2,)))
    assert (proof.status, proof.node) == ("refuted", "linear.keep_slice")


class Loss(nn.Module):
    """A cross entropy whose vocabulary can be split."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(8, 16, bias=False)

    def forward(self, x, target):
        logits = self.head(x)
        highest = torch.amax(logits, -1, keepdim=True)
        shifted = logits - highest
        total = torch.exp(shifted).sum(-1)
        return (torch.log(total) - (shifted * target).sum(-1)).mean()


VOCABULARY = {
    "inputs": {"head.weight": "shard(0)", "target": "shard(2)"},
    "collectives": {"amax": "all_reduce(max)", "sum_1": "all_reduce", "sum_2": "all_reduce"},
}


def test_a_loss_over_a_split_vocabulary_is_proved_and_without_the_maximum_it_is_refuted():
    graph = open_graph((Loss(), (torch.randn(2, 3, 8), torch.rand(2, 3, 16))))
    assert prove_placed(graph, VOCABULARY, GraphSettings()).status == "proved"
    sums = dict.fromkeys(("sum_1", "sum_2"), "all_reduce")
    wrong = prove_placed(graph, {**VOCABULARY, "collectives": sums}, GraphSettings())
    assert (wrong.status, wrong.node) == ("refuted", "sub")
    assert "amax is partial(max)" in wrong.reason


class Masked(nn.Module):
    def forward(self, x):
        return x * torch.ones(6, 4).cumsum(0)


def test_what_a_program_makes_itself_is_no_counterexample():
    """A mask of the length of one device does not fit a rank's part; a rank would make its own."""
    graph = open_graph((Masked(), (torch.randn(6, 4),)))
    placements = {"inputs": {"x": "shard(0)"}, "outputs": "shard(0)"}
    proof = prove_placed(graph, placements, GraphSettings())
    assert proof.status == "not decided"


@pytest.mark.parametrize(
    ("placements", "message"),
    [
        ({"inputs": {"nothing.*": "shard(0)"}}, "no input or parameter matches 'nothing.*'"),
        ({"inputs": {"head.weight": "cut(0)"}}, "unknown placement 'cut"),
        ({"collectives": {"head": "all_gather"}}, "collective 'all_gather' of 'head' is unknown"),
        ({"collectives": {"tail": "all_reduce"}}, "no module or node matches 'tail'"),
        ({"columns": {}}, "unknown field `columns`"),
        ({"outputs": ["replicate", "replicate"]}, "returns 1 tensors, but 2"),
    ],
)
def test_placements_that_do_not_fit_are_refused(placements, message):
    graph = open_graph((Loss(), (torch.randn(2, 3, 8), torch.rand(2, 3, 16))))
    with pytest.raises(UsageError) as refused:
        prove_placed(graph, placements, GraphSettings())
    assert message in str(refused.value)


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x):
        return self.down(F.gelu(self.up(x)))


ROWS = {
    "inputs": {"up.*": "shard(0)", "down.weight": "shard(1)", "down.bias": "once"},
    "collectives": {"down": "all_reduce"},
}


@pytest.mark.usefixtures("undiagnosed")
def test_a_report_says_what_is_proved_and_what_was_compared(tmp_path):
    torch.export.save(torch.export.export(Mlp(), (torch.randn(2, 4),)), tmp_path / "mlp.pt2")
    report = verify_graph(
        tmp_path / "mlp.pt2", tmp_path / "checked", prove=True, placements=ROWS, html=False
    )
    assert report.exit_code == 0
    assert report.proof.status == "proved"
    options = [option for one in report.operators for option in one.options]
    assert {option.proof.status for option in options} == {"proved"}
    for name, certificate in report.certificates().items():
        (GraphChecker if name == "graph" else Checker)(certificate).check()
    again = GraphReport.from_json((tmp_path / "checked" / "results.json").read_bytes())
    assert again.proof == report.proof
    resumed = verify_graph(
        tmp_path / "mlp.pt2", tmp_path / "checked", prove=True, placements=ROWS, html=False
    )
    assert (resumed.resumed, resumed.certificates()) == (
        len(report.operators),
        report.certificates(),
    )

    wrong = verify_graph(tmp_path / "mlp.pt2", placements={**ROWS, "collectives": {}})
    assert wrong.exit_code == 1
    assert {one.outcome for one in wrong.operators} == {CallOutcome.VERIFIED}
    assert wrong.verdict.status is Status.DIFFERENT
    with pytest.raises(UsageError, match="other settings"):
        verify_graph(tmp_path / "mlp.pt2", tmp_path / "checked", prove=True)


class Halves(nn.Module):
    def forward(self, x):
        return x.flip(0)


@pytest.mark.usefixtures("undiagnosed")
def test_a_split_that_is_right_here_and_wrong_for_other_shapes_is_refuted():
    """Two equal rows are the same upside down; a rule that splits them is wrong for others."""
    register("aten.flip.default", "a b -> a b", overwrite=True)
    try:
        inputs = (torch.ones(2, 3),)
        report = verify_graph((Halves(), inputs), inputs=inputs, prove=True)
    finally:
        unregister("aten.flip.default")
    [flip] = [one for one in report.operators if one.operator == "aten.flip.default"]
    by_rows = next(option for option in flip.options if option.identifier == "a")
    by_columns = next(option for option in flip.options if option.identifier == "b")
    assert by_columns.proof.status == "proved"
    assert by_rows.proof.status == "refuted"
    assert report.exit_code == 1

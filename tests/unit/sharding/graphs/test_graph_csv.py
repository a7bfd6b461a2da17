"""The table of a graph's operators: every split, every operator, nothing that computes."""

from __future__ import annotations

import csv
import io
import math

import msgspec
import pytest

from paritas.core.results.findings import Status
from paritas.sharding.graphs.report import GRAPH_COLUMNS, graph_csv, loss_gap
from paritas.sharding.graphs.rows import Confirmation
from unit.sharding.graphs.graph_samples import HOSTILE, empty, hostile, option, transformer


def lines_of(report):
    return list(csv.DictReader(io.StringIO(graph_csv(report))))


def test_every_split_has_a_line_and_so_has_every_operator_without_one():
    report = transformer()
    lines = lines_of(report)
    assert len(lines) == sum(max(1, len(one.options)) for one in report.operators)
    assert {line["operator"] for line in lines} == {one.operator for one in report.operators}
    calls = {line["node"]: int(line["calls"]) for line in lines}
    assert sum(calls.values()) == report.calls


def test_every_graph_of_the_folder_has_its_lines_that_of_the_run_first():
    other = msgspec.structs.replace(empty(), graph="b.ckp", operators=transformer().operators[:1])
    again = msgspec.structs.replace(other, number=3)
    report = msgspec.structs.replace(transformer(), others=(other, again))
    named = list(dict.fromkeys(line["graph"] for line in lines_of(report)))
    assert named == ["runs/graphs/transformer_block.ckp", "b.ckp (1)", "b.ckp (3)"]


def test_what_real_ranks_said_of_a_split_is_in_its_line():
    told = Confirmation(backend="gloo", status=Status.DIFFERENT, simulated=Status.IDENTICAL)
    first = transformer().operators[0]
    options = (msgspec.structs.replace(first.options[0], confirmation=told),)
    report = msgspec.structs.replace(
        transformer(), operators=(msgspec.structs.replace(first, options=options),)
    )
    [line] = lines_of(report)
    assert line["confirmation"] == "simulated identical, gloo different"


def test_a_wrong_split_is_told_with_its_place_its_losses_and_its_script():
    [wrong] = [line for line in lines_of(transformer()) if line["status"] == "different"]
    assert list(wrong) == [column.name for column in GRAPH_COLUMNS]
    assert wrong == {
        "graph": "runs/graphs/transformer_block.ckp",
        "node": "linear_down_0",
        "operator": "torch.nn.functional.linear",
        "signature": "linear(f32[2, 8, 32], f32[16, 32])",
        "calls": "2",
        "source": "models/block.py:31",
        "code": "return self.down(gelu(h)) * self.scale",
        "module": "layers.0.mlp",
        "outcome": "failed",
        "option": "idx 0, dim 2: split by k",
        "rule": "* k, n k -> * n",
        "origin": "declared",
        "ranks": "2",
        "status": "different",
        "confirmation": "",
        "proof": "",
        "loss_one_device": "12.25",
        "loss_several_devices": "25.75",
        "loss_relative_difference": "1.1020408163265305",
        "gradients": "1 of 2 gradients different",
        "reason": "output: in float64, where rounding is negligible, it is off by 1.3 times the"
        " typical value",
        "seconds": "0.004",
        "script": "repro/01_linear.py",
        "other_nodes": "linear_down_1",
    }


def test_the_reason_of_a_failure_is_not_put_beside_a_split_that_is_right():
    right = next(line for line in lines_of(transformer()) if line["node"] == "linear_down_0")
    assert (right["status"], right["reason"]) == ("equivalent", "")


def test_an_operator_that_was_not_checked_says_why():
    [line] = [line for line in lines_of(transformer()) if line["outcome"] == "unsupported"]
    assert line["reason"].startswith("my_ops.rotate is not an operator of torch")
    assert line["status"] == line["option"] == line["loss_one_device"] == ""


def test_figures_that_are_no_numbers_are_spelled_and_never_look_equal():
    [line] = lines_of(hostile())
    assert line["loss_one_device"] == "nan"
    assert line["loss_several_devices"] == "inf"
    assert line["loss_relative_difference"] == "nan"


@pytest.mark.parametrize(
    ("losses", "gap"),
    [
        ((2.0, 3.0), 0.5),
        ((-2.0, -3.0), 0.5),
        ((0.0, 0.0), 0.0),
        ((0.0, 1e-9), math.inf),
        ((1.0, math.inf), math.inf),
        ((math.nan, math.nan), math.nan),
        ((math.inf, -math.inf), math.nan),
        ((0.0, math.nan), math.nan),
        ((1.0, None), None),
        ((None, 1.0), None),
    ],
)
def test_losses_differ_relative_to_that_on_one_device(losses, gap):
    assert loss_gap(option((0, 0), "k", "k -> k", losses=losses)) == pytest.approx(gap, nan_ok=True)


@pytest.mark.parametrize("start", "=+-@")
def test_a_name_that_a_spreadsheet_would_compute_is_text(start):
    report = hostile()
    [one] = report.operators
    site = msgspec.structs.replace(one.sites[0], node=f"{start}1+cmd()")
    one = msgspec.structs.replace(one, sites=(site,))
    [line] = lines_of(msgspec.structs.replace(report, operators=(one,)))
    assert line["node"] == f"'{start}1+cmd()"
    assert line["operator"] == HOSTILE


def test_a_graph_without_calls_has_only_the_header():
    assert graph_csv(empty()) == ",".join(column.name for column in GRAPH_COLUMNS)

"""A graph's operators in a terminal of 80 columns."""

from __future__ import annotations

import io

import msgspec
import pytest
from rich.console import Console

from paritas.core.results.findings import Status
from paritas.sharding.graphs.report import graph_report, graph_verdict_line
from paritas.sharding.graphs.rows import CallOutcome, Confirmation
from unit.sharding.graphs.graph_samples import (
    empty,
    hostile,
    interrupted,
    passing,
    report,
    transformer,
    unsupported,
    wide,
)


def shown(graph, width=80, **more):
    told = io.StringIO()
    console = Console(file=told, width=width, color_system=None, highlight=False)
    console.print(graph_report(graph, width, **more), crop=False)
    return [line.rstrip() for line in told.getvalue().splitlines()]


def test_the_whole_of_a_graph_with_a_wrong_rule():
    assert shown(transformer(), files=["out/report.html", "out/results.csv"]) == [
        "transformer_block.ckp: 16 calls, 5 verified, 7 with nothing to check, 2",
        "unsupported, 2 failed",
        "7 distinct operators, 12 splits over 2 ranks, 1.23 s",
        "",
        "status     call and split                     source line",
        "─" * 80,
        "different  linear_down_0 (2 calls)            models/block.py:31",
        "           idx 0, dim 2: split by k, 2 ranks  return self.down(gelu(h)) *",
        "                                              self.scale",
        "",
        "linear_down_0: torch.nn.functional.linear",
        "  linear(f32[2, 8, 32], f32[16, 32])",
        "  idx 0, dim 2: split by k, 2 ranks: different",
        "    output: in float64, where rounding is negligible, it is off by 1.3 times the",
        "    typical value",
        "    rule, declared: * k, n k -> * n",
        "    loss 12.25 on one device, 25.75 on several",
        "    1 of 2 gradients different",
        "  in module layers.0.mlp, layers.1.mlp",
        "  reproduce it: python out/repro/01_linear.py",
        "",
        "could not be checked: 2 calls",
        "  2: my_ops.rotate is not an operator of torch: name its module with --import",
        "",
        "nothing to check: 7 calls",
        "  6: unpacks a tuple (operator.getitem)",
        "  1: no dimension can be divided by 2 (torch.sum)",
        "",
        "wrote out/report.html",
        "wrote out/results.csv",
        "",
        "failed: 2 calls of 1 operator wrong in 1 split; 5 of 16 calls verified",
    ]


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (
            passing,
            "verified: 5 of 12 calls verified, nothing to check in the other 7; 9 splits compared",
        ),
        (unsupported, "unverified: 2 calls could not be checked; 5 of 14 calls verified"),
        (interrupted, "unverified: interrupted, 14 calls not checked yet; 3 of 17 calls verified"),
        (empty, "unverified: nothing was checked"),
    ],
)
def test_the_last_line_is_the_verdict(make, words):
    assert shown(make())[-1] == words
    assert shown(make(), width=40)[-1] == words, "a script finds it whole"


def test_the_other_graphs_of_the_folder_are_listed_with_how_each_ended():
    others = tuple(
        msgspec.structs.replace(one, graph=name, number=number)
        for number, (name, one) in enumerate(
            [("a.ckp", unsupported()), ("b.ckp", passing()), ("b.ckp", interrupted())], start=2
        )
    )
    lines = shown(msgspec.structs.replace(passing(), others=others, shared=2), width=120)
    begin = lines.index("also in this folder: 3 graphs")
    assert [line.split(",")[0] for line in lines[begin + 1 : begin + 4]] == [
        "  a.ckp: unverified",
        "  b.ckp (3): verified",
        "  b.ckp (4): unverified",
    ]
    assert "2 operators already verified for another graph here" in " ".join(lines)
    assert lines[-1].startswith("verified: ")  # of this graph alone


def test_a_split_that_real_ranks_refuse_is_told_with_what_simulated_ones_said():
    told = Confirmation(backend="gloo", status=Status.DIFFERENT, simulated=Status.IDENTICAL)
    whole = transformer()
    operators = tuple(
        msgspec.structs.replace(
            one,
            options=tuple(msgspec.structs.replace(o, confirmation=told) for o in one.options),
        )
        for one in whole.operators
    )
    lines = shown(msgspec.structs.replace(whole, operators=operators))
    assert "    ranks: simulated identical, gloo different" in lines
    assert "0 of 12 confirmed on gloo ranks" in " ".join(lines)


def test_calls_that_are_not_accounted_for_are_no_pass():
    short = msgspec.structs.replace(passing(), calls=13)
    assert graph_verdict_line(short).plain == (
        "unverified: 1 call not accounted for; 5 of 13 calls verified"
    )


def test_where_nothing_has_a_split_nothing_was_checked():
    idle = [one for one in transformer().operators if one.outcome is CallOutcome.NOTHING]
    assert shown(report(tuple(idle)))[-1] == "unverified: nothing was checked"


def test_an_unstable_split_is_told_where_it_counts_as_a_failure():
    linear = transformer().operators[1]
    options = (msgspec.structs.replace(linear.options[0], status=Status.UNSTABLE),)
    one = msgspec.structs.replace(linear, options=options, outcome=CallOutcome.FAILED)
    lines = shown(report((one,), strict=True))
    assert any(line.startswith("unstable  linear_up_0 (2 calls)") for line in lines)


@pytest.mark.parametrize("make", [transformer, interrupted, hostile, wide])
@pytest.mark.parametrize("width", [60, 80, 120])
def test_no_line_but_the_last_is_wider_than_the_terminal(make, width):
    assert max(map(len, shown(make(), width)[:-1])) <= width


def test_many_failures_are_counted_and_the_first_are_told():
    lines = shown(wide(14, every=1))
    assert "and 4 more operators are wrong" in lines
    assert sum(line.startswith("different ") for line in lines) == 14


def test_reasons_that_differ_in_the_node_they_speak_of_are_one():
    idle = transformer().operators[6]
    backward = [
        msgspec.structs.replace(
            idle, key=node, operator="torch.autograd.grad", reason=f"the backward pass of {node}"
        )
        for node in ("embedding", "linear_up_1", "softmax_0")
    ]
    lines = shown(report((*transformer().operators[:3], *backward, idle)))
    assert "  3: the backward pass of ... (torch.autograd.grad)" in lines
    assert "  1: no dimension can be divided by 2 (torch.sum)" in lines


def test_what_a_terminal_would_obey_is_shown_and_not_sent():
    one = transformer().operators[4]
    evil = msgspec.structs.replace(one, reason="\x1b]0;owned\x07 \x1b[2J\x9b2J no such operator")
    text = "\n".join(shown(report((evil,), graph="\x1b[31mred.ckp")))
    assert not {"\x1b", "\x07", "\x9b"} & set(text)
    assert "no such operator" in text


def test_names_are_never_read_as_markup():
    one = transformer().operators[0]
    site = msgspec.structs.replace(one.sites[0], node="[red]x[/red]")
    failed = msgspec.structs.replace(
        one, sites=(site,), outcome=CallOutcome.FAILED, options=(), reason="[bold]no[/bold]"
    )
    text = "\n".join(shown(report((failed,))))
    assert "[red]x[/red]" in text
    assert "[bold]no[/bold]" in text

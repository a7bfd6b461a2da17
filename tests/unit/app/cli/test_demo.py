"""The words of `paritas demo`, and the fault it plants; the whole of it is an integration test."""

from __future__ import annotations

import io

import pytest
import torch
from rich.console import Console, Group

from paritas.app.cli import demo_model
from paritas.app.cli.getting_started import is_as_expected, lessons, summary
from paritas.core.numerics.metrics import pair_metrics
from paritas.core.results.findings import (
    Aspect,
    Coverage,
    Diagnosis,
    Finding,
    Origin,
    OriginKind,
    Pattern,
    Score,
    Status,
    Verdict,
)
from paritas.core.results.items import Item, ItemKind


def verdict_of(status, **options):
    found = Finding(
        item=Item(ItemKind.OUTPUT, "output"), aspect=Aspect.VALUE, status=status, **options
    )
    return Verdict(findings=(found,), coverage=Coverage(compared=1))


def differing(status, noise, factor):
    reference = torch.linspace(-1, 1, 9, dtype=torch.float64)
    candidate = reference + factor * torch.tensor([1.0, -1.0, 0.0]).repeat(3)
    score = Score(max_z=noise, max_limit=12.0, rms_z=1.0, rms_limit=2.5)
    return verdict_of(status, metrics=pair_metrics(reference, candidate), lifted=score)


RIGHT = differing(Status.EQUIVALENT, 0.8, 1e-9)
WRONG = differing(Status.DIFFERENT, 7.3e6, 0.05)


def test_the_lesson_is_told_in_figures_of_the_findings():
    assert list(lessons(RIGHT, WRONG)) == [
        "Correlation (PCC), where 0.99 is the usual threshold:",
        "  the correct one has 1.000000: accepted",
        "  the faulty one has 0.998016: accepted",
        "paritas, worst error in multiples of the model's own rounding noise:",
        "  the correct one is off by 0.8 (12 allowed): equivalent",
        "  the faulty one is off by 7.3e+06 (12 allowed): different",
    ]


def test_a_right_one_without_a_single_difference_is_a_lesson_too():
    lines = list(lessons(verdict_of(Status.IDENTICAL), WRONG))
    assert "  the correct one has 1: equal bit for bit" in lines
    assert "  the correct one is off by nothing: identical" in lines


def test_correlation_is_not_said_to_accept_what_it_refuses():
    coarse = differing(Status.DIFFERENT, 7.3e6, 0.5)
    assert any(line.endswith(": rejected") for line in lessons(RIGHT, coarse))


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        (RIGHT, RIGHT),
        (WRONG, WRONG),
        (RIGHT, verdict_of(Status.UNVERIFIED)),
        (RIGHT, verdict_of(Status.DIFFERENT)),  # caught, but not by its values
        (RIGHT, differing(Status.UNSTABLE, 0.0, 0.05)),
    ],
)
def test_what_did_not_go_as_planned_teaches_nothing(right, wrong):
    assert not is_as_expected(right, wrong)
    (line,) = lessons(right, wrong)
    assert line.startswith("Nothing: ")


def test_the_model_and_its_inputs_are_the_same_every_time_and_leave_the_generator_alone():
    before = torch.get_rng_state()
    (model, (ids,)), (again, (others,)) = demo_model.build(), demo_model.build()
    assert torch.equal(ids, others)
    assert torch.equal(model(ids), again(others))
    assert torch.equal(torch.get_rng_state(), before)
    assert not any(parameter.requires_grad for parameter in model.parameters())


def shown(*verdicts):
    console = Console(width=80, file=io.StringIO(), highlight=False)
    console.print(Group(*summary(*verdicts)))
    return [line.rstrip() for line in console.file.getvalue().splitlines()]


def test_the_point_is_on_one_screen():
    start = Finding(
        item=Item(ItemKind.NODE, "future", graph="graph 0"),
        aspect=Aspect.VALUE,
        status=Status.DIFFERENT,
        origin=Origin(
            kind=OriginKind.NODE,
            name="future",
            module="blocks.0.attention",
            source="/a/long/path/of/some/environment/paritas/cli/demo_model.py:33, in forward",
            code="future = torch.ones(tokens, tokens, dtype=torch.bool, device=x.device).triu(1)",
        ),
        diagnosis=Diagnosis(
            patterns=(Pattern(kind="shift", confidence=1.0, sentence="off by one along axis 0"),)
        ),
    )
    wrong = Verdict(findings=(start, *WRONG.findings), coverage=Coverage(compared=1))
    lines = shown(RIGHT, wrong)
    assert lines == [
        "A small transformer in float32, compared with the output of two compilers:",
        "",
        "                torch.compile        a compiler with a planted fault",
        "─" * 68,
        "correlation     1.000000: accepted   0.998016: accepted",
        "paritas         equivalent           different",
        "error / noise   0.8 (12 allowed)     7.3e+06 (12 allowed)",
        "",
        "Correlation accepts anything above 0.99, the usual threshold, and misses the",
        "fault. paritas measures errors in multiples of the model's own rounding noise.",
        "",
        "The fault starts in module blocks.0.attention:",
        "  /a/long/path/of/some/environment/paritas/cli/demo_model.py:33, in forward",
        "    future = torch.ones(tokens, tokens, dtype=torch.bool, device=x.device).triu…",
        "  off by one along axis 0",
        "",
        "details: paritas demo --verbose",
    ]
    assert len(lines) < 24


def test_a_fault_whose_place_is_not_known_is_shown_without():
    assert not any("starts in" in line for line in shown(RIGHT, WRONG))

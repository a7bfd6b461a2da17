"""State that both sides reach is compared; what only one of them has is its own bookkeeping."""

from __future__ import annotations

import sys
import types
from typing import Any

import pytest
import torch
from torch import nn

from paritas import Status, UsageError, VerifyConfig, verify
from paritas.core.execution.observation import find_aliases
from paritas.core.results.items import output

QUIET = VerifyConfig(raise_on_mismatch=False)

MODEL = nn.Linear(4, 4)
SCALE = 2.0
COUNT = 0
CACHE: dict[Any, torch.Tensor] = {}
HANDLES: list[int] = []
BOX = types.SimpleNamespace(last=0)


def by_scale(x: torch.Tensor) -> torch.Tensor:
    return MODEL(x) * SCALE


def counts(x: torch.Tensor) -> torch.Tensor:
    global COUNT  # noqa: PLW0603
    COUNT += 1
    return MODEL(x)


def counts_and_scales(x: torch.Tensor) -> torch.Tensor:
    return counts(x) * SCALE


def makes_a_global(x: torch.Tensor) -> torch.Tensor:
    global NEW  # noqa: PLW0603
    NEW = x.shape
    return MODEL(x)


def fills_a_cache(x: torch.Tensor) -> torch.Tensor:
    CACHE[tuple(x.shape)] = x.detach()
    return MODEL(x)


def keeps_handles(x: torch.Tensor) -> torch.Tensor:
    HANDLES.append(len(HANDLES))
    return MODEL(x)


def writes_to_a_box(x: torch.Tensor) -> torch.Tensor:
    BOX.last, BOX.new = 1, 1
    return MODEL(x)


def reads_a_box(x: torch.Tensor) -> torch.Tensor:
    return MODEL(x) + BOX.last * 0


def counts_on_itself(x: torch.Tensor) -> torch.Tensor:
    counts_on_itself.calls = getattr(counts_on_itself, "calls", 0) + 1  # type: ignore[attr-defined]
    return MODEL(x)


def count_in_closure() -> Any:
    calls = 0

    def call(x: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        calls += 1
        return MODEL(x)

    return call


class Counter:
    made = 0

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        Counter.made += 1
        return MODEL(x)


class Wrapper(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = MODEL

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)


class CountingWrapper(Wrapper):
    calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.shapes = {"last": [x.shape]}
        return self.inner(x)


OWN = {
    "a global counter": (MODEL, counts, "global COUNT"),
    "a global counter beside a global of the reference": (
        by_scale,
        counts_and_scales,
        "global COUNT",
    ),
    "a global that is made by the call": (MODEL, makes_a_global, "global NEW"),
    "a global cache": (MODEL, fills_a_cache, "global CACHE[(2, 4)]"),
    "a global list of handles": (MODEL, keeps_handles, "global HANDLES[0]"),
    "an object in a global": (MODEL, writes_to_a_box, "global BOX.last"),
    "an attribute of the function": (MODEL, counts_on_itself, "function counts_on_itself['calls']"),
    "a variable of a closure": (MODEL, count_in_closure(), "variable calls"),
    "an attribute of an object": (MODEL, Counter(), ".calls"),
    "an attribute of a class": (MODEL, Counter(), "class Counter.made"),
    "an attribute of a module": (Wrapper(), CountingWrapper(), "calls"),
}


@pytest.mark.parametrize("kind", OWN)
def test_state_that_only_the_candidate_has_is_skipped_and_put_back(kind: str) -> None:
    reference, candidate, name = OWN[kind]
    verdict = verify([torch.randn(2, 4)], reference, candidate, QUIET)
    assert verdict.status is Status.IDENTICAL, str(verdict)
    assert f"state {name} after the call: only the candidate has it" in verdict.coverage.skipped
    assert (COUNT, CACHE, HANDLES, BOX.last, Counter.made) == (0, {}, [], 0, 0)
    assert "NEW" not in globals()
    assert not hasattr(counts_on_itself, "calls")


def test_state_that_only_the_reference_has_is_skipped_too() -> None:
    verdict = verify([torch.randn(2, 4)], counts, MODEL, QUIET)
    assert verdict.passed
    assert "state global COUNT after the call: only the reference has it" in (
        verdict.coverage.skipped
    )


def reads_the_count(x: torch.Tensor) -> torch.Tensor:
    return MODEL(x) + COUNT * 0


def counts_on_the_reference(x: torch.Tensor) -> torch.Tensor:
    by_scale.calls = 1  # type: ignore[attr-defined]
    return by_scale(x)


def nests_in_the_box(x: torch.Tensor) -> torch.Tensor:
    BOX.new = {"a": [{"b": 1}]}
    return MODEL(x)


SHARED = {
    "a global that the reference names": (reads_the_count, counts, "global COUNT"),
    "an attribute of an object that the reference reads": (
        reads_a_box,
        writes_to_a_box,
        "global BOX.last",
    ),
    "what is added to an object that the reference reads": (
        reads_a_box,
        writes_to_a_box,
        "global BOX.new",
    ),
    "what is added further inside": (reads_a_box, nests_in_the_box, "global BOX.new['a'][0]['b']"),
    "an attribute of a function that the reference calls": (
        by_scale,
        counts_on_the_reference,
        "function by_scale['calls']",
    ),
}


@pytest.mark.parametrize("kind", SHARED)
def test_state_that_the_reference_reaches_too_is_compared(kind: str) -> None:
    reference, candidate, name = SHARED[kind]
    verdict = verify([torch.randn(2, 4)], reference, candidate, QUIET)
    failed = {finding.path: finding.status for finding in verdict.failures}
    assert failed[f"state {name} after the call"] is Status.DIFFERENT
    assert vars(BOX) == {"last": 0}
    assert not hasattr(by_scale, "calls")


# --- Circles --------------------------------------------------------------------------------------


def raises_in_a_circle(x: torch.Tensor) -> torch.Tensor:
    first, second = ValueError("first"), KeyError("second")
    first.__cause__, second.__cause__ = second, first
    raise first


@pytest.mark.parametrize("reference", [torch.sin, lambda x: x.view(7)])
def test_errors_that_cause_each_other_are_a_finding(reference: Any) -> None:
    verdict = verify([torch.ones(3)], reference, raises_in_a_circle, QUIET)
    assert verdict.status is Status.DIFFERENT
    assert verdict.failures[0].reason.endswith("the candidate raises ValueError: first")


def test_an_input_that_contains_itself_is_refused() -> None:
    circle: list[Any] = [torch.ones(3)]
    circle.append(circle)
    with pytest.raises(UsageError, match="a list cannot be read: it contains itself"):
        verify([circle], lambda x: x[0], lambda x: x[0], QUIET)


class Link:
    behind: Any = None


def test_a_long_chain_of_objects_is_refused() -> None:
    first = last = Link()
    for _ in range(sys.getrecursionlimit()):  # whatever ran before may have raised it
        last.behind = Link()
        last = last.behind
    with pytest.raises(UsageError, match="an input of class Link cannot be copied"):
        verify([first], lambda _: torch.ones(1), lambda _: torch.ones(1), QUIET)


def test_objects_that_refer_to_each_other_are_copied() -> None:
    one, other = Link(), Link()
    one.behind, other.behind = other, one
    assert verify([torch.ones(3), one], lambda x, _: x * 2, lambda x, _: x + x, QUIET).passed


def test_outputs_in_one_memory_are_paired_with_a_few_others_each() -> None:
    rows = {output(f"output[{number}]"): row for number, row in enumerate(torch.ones(2000, 1))}
    pairs = find_aliases(rows, {})
    assert {item for _, item in pairs} == set(list(rows)[1:])
    assert len(pairs) < 100 * len(rows)

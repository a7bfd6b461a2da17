"""The arguments of guard(): how often it checks, whether at all, and what it refuses."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from integration.odd_backends import backend_that, on_results
from paritas import UsageError, guard

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

pytestmark = pytest.mark.usefixtures("fresh_compiler")


@pytest.mark.parametrize(("wrong_call", "caught"), [(1, False), (2, True), (3, False), (4, True)])
def test_every_second_call_is_checked_from_the_first_on(wrong_call: int, caught: bool) -> None:
    def wrong_once(graph: Callable[..., Any], args: Sequence[Any], call: int) -> Any:
        return tuple(y + (call == wrong_call) for y in graph(*args))

    backend = guard(backend_that(wrong_once), every=2, on_mismatch="record")
    compiled = torch.compile(lambda x: x.sin(), backend=backend)
    for _ in range(6):
        compiled(torch.randn(8))
    assert backend.verdict().passed is not caught
    assert [entry.checked for entry in backend.journal.graphs] == [3]


def test_a_share_of_the_calls_is_checked() -> None:
    backend = guard("eager", every=0.25)
    compiled = torch.compile(lambda x: x.sin(), backend=backend)
    for _ in range(80):
        compiled(torch.randn(8))
    (entry,) = backend.journal.graphs
    assert entry.calls == 80
    assert 10 <= entry.checked <= 30
    assert "80 calls" in backend.verdict().coverage.skipped[0]


def test_a_guard_that_is_off_hands_on_what_the_backend_made() -> None:
    backend = guard(on_results(lambda y: y + 1), enabled=False)
    x = torch.randn(8)
    torch.testing.assert_close(torch.compile(lambda x: x.sin(), backend=backend)(x), x.sin() + 1)
    verdict = backend.verdict()
    assert not verdict.passed
    assert verdict.exit_code == 3


@pytest.mark.parametrize("enabled", [None, True])
def test_the_environment_switches_guards_off(enabled: Any, monkeypatch: Any) -> None:
    monkeypatch.setenv("PARITAS_GUARD", "0")
    backend = guard(on_results(lambda y: y + 1), enabled=enabled)
    x = torch.randn(8)
    torch.testing.assert_close(torch.compile(lambda x: x.sin(), backend=backend)(x), x.sin() + 1)


def test_options_reach_the_compiler() -> None:
    """With Inductor's own generator the draws would differ from eager's."""
    backend = guard("inductor", options={"fallback_random": True})
    torch.manual_seed(1)
    y = torch.compile(lambda x: x + torch.rand(8), backend=backend)(torch.zeros(8))
    torch.manual_seed(1)
    torch.testing.assert_close(y, torch.rand(8))
    assert backend.verdict().passed


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        ({"backend": "indcutor"}, "'indcutor'"),
        ({"backend": 3}, "3"),
        ({"on_mismatch": "explode"}, "'explode'"),
        ({"on_mismatch": None}, "None"),
        ({"every": 0}, "0"),
        ({"every": -2}, "-2"),
        ({"every": 1.5}, "1.5"),
        ({"every": float("nan")}, "nan"),
        ({"every": float("inf")}, "inf"),
        ({"every": "2"}, "'2'"),
        ({"every": True}, "True"),
        ({"enabled": "yes"}, "'yes'"),
        ({"locate": 1}, "1"),
        ({"check_passes": "all"}, "'all'"),
        ({"options": ["freezing"]}, r"\['freezing'\]"),
        ({"options": {"freezin": True}}, "freezin"),
    ],
    ids=str,
)
def test_an_argument_that_makes_no_sense_is_shown(arguments: dict[str, Any], shown: str) -> None:
    with pytest.raises(UsageError, match=shown):
        guard(**arguments)


def test_an_unknown_word_in_the_environment_is_shown(monkeypatch: Any) -> None:
    monkeypatch.setenv("PARITAS_GUARD", "perhaps")
    with pytest.raises(UsageError, match="'perhaps'"):
        guard()

"""How often a guarded program, or one that is recorded, waits for a CUDA device."""

from __future__ import annotations

import contextlib
import warnings
from typing import TYPE_CHECKING

import pytest
import torch
from torch import Tensor, nn

import paritas
from paritas import guard

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@contextlib.contextmanager
def counted_waits() -> Iterator[list[str]]:
    """The places at which torch waited for the device."""
    found: list[str] = []
    torch.cuda.synchronize()
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield found
        finally:
            torch.cuda.set_sync_debug_mode("default")
    found += [f"{one.filename}:{one.lineno}" for one in seen if "synchroniz" in str(one.message)]


def waits_of_a_guarded_call(outputs: int) -> list[str]:
    torch.compiler.reset()
    torch.manual_seed(0)

    def program(x: Tensor) -> tuple[Tensor, ...]:
        return tuple((x * (number + 1)).sin().softmax(-1) for number in range(outputs))

    backend = guard("inductor", on_mismatch="record", every=1, locate=False)
    compiled = torch.compile(program, backend=backend)
    x = torch.randn(64, 128, device="cuda")
    for _ in range(3):  # to learn how large the noise is
        compiled(x)
    with counted_waits() as found:
        compiled(x)
    verdict = backend.verdict()
    assert verdict.passed, str(verdict)
    return found


def test_a_guarded_call_waits_no_more_often_for_many_results_than_for_one() -> None:
    one, many = waits_of_a_guarded_call(1), waits_of_a_guarded_call(24)
    assert len(many) <= len(one), many


@pytest.mark.parametrize("data", ["tensor", "stats"])
def test_recording_does_not_wait_for_the_device(tmp_path, data: str) -> None:
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(12))).cuda()
    x = torch.randn(8, 64, device="cuda")
    with paritas.capture(tmp_path / "first", data=data), torch.no_grad():
        model(x)
    with paritas.capture(tmp_path / "second", data=data), torch.no_grad(), counted_waits() as found:
        model(x)
    assert found == []

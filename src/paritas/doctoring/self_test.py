"""A small question of each kind, whose answer is known: does paritas still find it?"""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from paritas._torch.quiet import quietly
from paritas.doctoring.checks import OK, Check, looked_at
from paritas.doctoring.expecting import expect
from paritas.numerics.findings import Status

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from paritas.numerics.findings import Verdict

__all__ = ["STEPS", "examine"]

GROUP = "self-test"
ADVICE = "do not trust a verdict of this installation; report this with paritas doctor --json"


def examine(backend: str) -> Iterator[Check]:
    """Ask every question; one that fails does not keep the others from being asked."""
    for name, ask in STEPS.items():
        yield looked_at(GROUP, name, functools.partial(_asked, name, ask, backend), ADVICE)


def _asked(name: str, ask: Callable[[str], str], backend: str) -> Check:
    torch.manual_seed(0)
    try:
        with quietly():  # of what torch says of itself
            return Check(GROUP, name, OK, ask(backend))
    finally:
        torch.compiler.reset()


def _model() -> tuple[nn.Module, torch.Tensor]:
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh()).requires_grad_(requires_grad=False).eval()
    return model, torch.randn(4, 8)


def _told(verdict: Verdict) -> str:
    return f"{verdict.status}, {verdict.coverage.compared} compared"


def right_candidate(backend: str) -> str:
    """A compiled model passes."""
    from paritas.checking import verifying

    model, x = _model()
    verdict = verifying.verify([x], model, torch.compile(model, backend=backend), _asked_for())
    expect(f"whether a right candidate passes ({verdict})", verdict.passed)
    return f"{_told(verdict)} (backend {backend})"


def wrong_candidate(_backend: str) -> str:
    """One that is off by a thousandth fails."""
    from paritas.checking import verifying

    model, x = _model()
    verdict = verifying.verify([x], model, lambda x: model(x) * 1.001, _asked_for())
    expect("the status of a wrong candidate", verdict.status, Status.DIFFERENT)
    return f"{_told(verdict)}, as it should be"


def _asked_for() -> Any:
    from paritas.checking.config import VerifyConfig

    return VerifyConfig(raise_on_mismatch=False)


def guarded_graph(_backend: str) -> str:
    """A graph passes its guard, and a wrong one of the same program does not."""
    from paritas.checking.guarding.backend import guard

    model, x = _model()
    right = guard("aot_eager", on_mismatch="record")
    torch.compile(model, backend=right)(x)
    expect(f"whether a right graph passes ({right.verdict()})", right.verdict().passed)

    def spoiling(graph: Any, _inputs: Any) -> Any:
        return lambda *args: tuple(value * 1.001 for value in graph(*args))

    torch.compiler.reset()
    wrong = guard(spoiling, on_mismatch="record")
    torch.compile(model, backend=wrong)(x)
    expect("the status of a wrong graph", wrong.verdict().status, Status.DIFFERENT)
    return f"{_told(right.verdict())}; a wrong one is {wrong.verdict().status}"


def dumps(_backend: str) -> str:
    """What was recorded is read back and compared."""
    from paritas.comparison.comparing import compare
    from paritas.recording.eager import capture

    model, x = _model()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        places = [Path(folder) / name for name in ("golden", "same", "other")]
        for place in places:
            if place.name == "other":
                model[0].weight.mul_(1.001)  # type: ignore[index]
            with capture(place):
                model(x)
        golden, same, other = places
        right, wrong = compare(same, golden), compare(other, golden)
    expect("the status of two equal dumps", right.status, Status.IDENTICAL)
    expect("the status of a dump that differs", wrong.status, Status.DIFFERENT)
    return f"{right.status}, {len(right.rows)} rows; a wrong one is {wrong.status}"


def partition(_backend: str) -> str:
    """A split that is right passes, and one that is not fails."""
    from paritas.partition import TensorInfo, VerifyConfig, check_partition

    def split(operator: str, **kwargs: int) -> Status:
        shapes, option = [TensorInfo("shape", (4, 8))], {"idx": 0, "dim": 1}
        config = VerifyConfig(operator, shapes, kwargs, 1, [option])
        return check_partition(config, annotation="a b -> a b").status

    right, wrong = split("torch.relu"), split("torch.softmax", dim=1)
    expect("whether a right split passes", right.passes())
    expect("the status of a wrong split", wrong, Status.DIFFERENT)
    return f"{right}; a wrong one is {wrong}"


STEPS = {
    "right candidate": right_candidate,
    "wrong candidate": wrong_candidate,
    "guarded graph": guarded_graph,
    "dumps": dumps,
    "partition": partition,
}

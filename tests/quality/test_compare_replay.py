"""Fused code against its graph: drift is nobody's fault, and a planted fault is its operator's."""

# ruff: noqa: TID251  (a fault in a compiler is planted in its private parts)

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch._inductor.config
from torch import Tensor, fx, nn
from torch.nn import functional as F

import paritas
from paritas.comparison.replay import Replayed, Unreplayed, replay
from paritas.formats.dumps.opening import open_dump
from paritas.formats.dumps.survey import RecordedCalls, is_result

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("scalar_kernels")]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(16, 32)
        self.norm = nn.LayerNorm(32)
        self.outer = nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.norm(F.gelu(self.inner(x)))
        return (x + self.outer(hidden).softmax(-1)).square().mean()


class Tanh:
    """A pass that computes another function in the place of `erf`."""

    def __call__(self, graph: fx.Graph) -> None:
        for node in graph.find_nodes(op="call_function", target=torch.ops.aten.erf.default):
            node.target = torch.ops.aten.tanh.default

    def uuid(self) -> str:
        return "tanh for erf"


def recorded(path: Path, source: Any) -> Path:
    torch.compiler.reset()
    torch.manual_seed(0)
    net, x = Net(), torch.randn(8, 16)
    backend = paritas.record(path, source=source)
    with torch.no_grad():
        torch.compile(net, backend=backend)(x)
    backend.close()
    return path


def replays(my_path: Path, golden_path: Path) -> dict[str, Any]:
    """All results that differ, run again."""
    my, golden = open_dump(my_path), open_dump(golden_path)
    mine, theirs = list(my.records()), list(golden.records())
    counterparts = {record.id: record for record in theirs if is_result(record.site)}
    calls, others = RecordedCalls(mine), RecordedCalls(theirs)
    found = {}
    for record in mine:
        golden_one = counterparts.get(record.id.replace("~", ""))
        if golden_one is None or not is_result(record.site) or record.digest == golden_one.digest:
            continue
        found[record.id] = replay(record, golden_one, calls, others, my.read, golden.read)
    return found


def test_drift_of_fused_code_is_no_operators_fault_and_a_wrong_one_is_its_own(tmp_path):
    golden = recorded(tmp_path / "fx", "fx")
    found = replays(recorded(tmp_path / "fused", "fused"), golden)
    again = {key: one for key, one in found.items() if isinstance(one, Replayed)}
    reasons = {one.reason for one in found.values() if isinstance(one, Unreplayed)}
    # Of the variance, the kernel keeps the sum of squares alone.
    assert reasons <= {"it is not known whether the buffer holds the value of a node"}
    assert len(again) >= 5
    assert [key for key, one in again.items() if _failed(one)] == []
    assert all(one.golden_ok for one in again.values())

    with torch._inductor.config.patch(post_grad_custom_post_pass=Tanh()):
        wrong = replays(recorded(tmp_path / "wrong", "fused"), golden)
    records = {record.id: record.site for record in open_dump(tmp_path / "wrong").records()}
    made = [key for key, one in wrong.items() if _failed(one)]
    assert made
    assert all("erf" in records[key].nodes for key in made)
    later = [one for one in wrong.values() if isinstance(one, Replayed) and not _failed(one)]
    assert max(one.inherited for one in later) > 1e-3


def _failed(one: Any) -> bool:
    return isinstance(one, Replayed) and not one.judgement.status.passes()

"""One node of an exported graph changed: every visible fault is found, no benign change alarms.

The nodes are drawn by a seed, so the cases are not chosen. A fault counts as visible if it moves
the output by 1e-6 or more when everything is computed in float64; a constant added before a
normalisation, say, is none.
"""

from __future__ import annotations

import copy
import functools
import os
import random
from typing import TYPE_CHECKING, Any

import pytest
import torch

from paritas import Verdict, VerifyConfig, verify
from quality.families import FAMILIES

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor
    from torch.fx import GraphModule

# torch.export itself, on copying a graph.
pytestmark = pytest.mark.filterwarnings("ignore:.*LeafSpec.*:FutureWarning")
VISIBLE = 1e-6
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
WHOLE = bool(os.environ.get("PARITAS_WHOLE_CORPUS"))
# In the usual run one family stands for the others in half precision.
CASES = [
    (family, dtype)
    for family in FAMILIES
    for dtype in DTYPES
    if WHOLE or dtype is torch.float32 or family == "perceptron"
]


def zero_last_column(x: Tensor) -> Tensor:
    return torch.cat([x[..., :-1], 0 * x[..., -1:]], dim=-1)


def stale_row(x: Tensor) -> Tensor:
    return torch.cat([x[-1:], x[1:]])


FAULTS: dict[str, Callable[[Tensor], Tensor]] = {
    "scaled by 1.01": lambda x: x * 1.01,
    "scaled by 1.001": lambda x: x * 1.001,
    "shifted by 0.001": lambda x: x + 1e-3 * x.detach().square().mean().sqrt(),
    "last column zero": zero_last_column,
    "first row stale": stale_row,
    "rolled by one": lambda x: x.roll(1, -1),
    "first row negated": lambda x: torch.cat([-x[:1], x[1:]]),
    "rounded to float8": lambda x: x + (x.to(torch.float8_e4m3fn).to(x.dtype) - x).detach(),
}
BENIGN: dict[str, Callable[[Tensor], Tensor]] = {
    "doubled and halved": lambda x: (x + x) * 0.5,
    "times and over three": lambda x: x * 3 / 3,
    "through float64": lambda x: (x.double() / 7 * 7).to(x.dtype),
    "by a reciprocal": lambda x: x * (1 / 7) * 7,
    "copied": lambda x: x.clone(memory_format=torch.contiguous_format),
}


def share(changes: dict[str, Any], family: str, dtype: torch.dtype) -> dict[str, Any]:
    """All; in the usual run every third, and the others in other dtypes and families."""
    if WHOLE:
        return changes
    first = (list(FAMILIES).index(family) + DTYPES.index(dtype)) % 3
    return dict(list(changes.items())[first::3])


@functools.cache
def exported(family: str, dtype: torch.dtype) -> tuple[GraphModule, Tensor]:
    torch.manual_seed(1)
    build, sample = FAMILIES[family]
    x = sample()
    x = x.to(dtype) if x.is_floating_point() else x
    return torch.export.export(build().to(dtype).eval(), (x,)).module(), x


def changed(graph: GraphModule, change: Callable[[Tensor], Tensor], seed: str) -> GraphModule:
    """A copy of the graph with `change` behind one node, drawn by `seed`."""
    mutant = copy.deepcopy(graph)
    floats = [node for node in mutant.graph.nodes if _is_float(node)]
    node = random.Random(seed).choice(floats)
    with mutant.graph.inserting_after(node):
        behind = mutant.graph.call_function(change, (node,))
    node.replace_all_uses_with(behind, delete_user_cb=lambda user: user is not behind)
    mutant.recompile()
    return mutant


def _is_float(node: Any) -> bool:
    value = node.meta.get("val")
    is_tensor = node.op == "call_function" and isinstance(value, torch.Tensor)
    return is_tensor and value.is_floating_point() and value.dim() > 1


def effect(graph: GraphModule, mutant: GraphModule, x: Tensor) -> float:
    """The relative L2 of the change when everything is computed in float64."""
    wide = x.double() if x.is_floating_point() else x
    with torch.no_grad():
        left, right = (copy.deepcopy(side).double()(wide) for side in (graph, mutant))
    return float((left - right).norm() / left.norm())


def verdict_on(graph: GraphModule, mutant: GraphModule, x: Tensor, *, gradients: bool) -> Verdict:
    config = VerifyConfig(raise_on_mismatch=False, verify_gradients=gradients)
    return verify([x], graph, mutant, config)


@pytest.mark.usefixtures("undiagnosed")
@pytest.mark.parametrize(("family", "dtype"), CASES, ids=str)
def test_every_visible_fault_is_found(family: str, dtype: torch.dtype) -> None:
    graph, x = exported(family, dtype)
    faults = share(FAULTS, family, dtype)
    mutants = {name: changed(graph, change, f"{family} {name}") for name, change in faults.items()}
    visible = {name: m for name, m in mutants.items() if effect(graph, m, x) > VISIBLE}
    assert len(visible) > len(faults) / 2, "the draw left too little to find"
    missed = {n for n, m in visible.items() if verdict_on(graph, m, x, gradients=False).passed}
    assert not missed


@pytest.mark.parametrize(("family", "dtype"), CASES, ids=str)
def test_no_benign_change_alarms(family: str, dtype: torch.dtype) -> None:
    graph, x = exported(family, dtype)
    for name, change in share(BENIGN, family, dtype).items():
        verdict = verdict_on(graph, changed(graph, change, f"{family} {name}"), x, gradients=True)
        assert verdict.passed, f"{name}\n{verdict}"

"""Plans as torchtitan writes them: right ones are silent, mistakes are found with their place.

With PARITAS_WHOLE_CORPUS=1 all of `titan_plans.py` and `titan_mistakes.py` runs, as in
`benchmarks/plans/titan.py`; by default, what no other test has: steps of the user's own, clipping,
a model made on the meta device, a parallel loss, hybrid sharding, mixed precision.
"""

from __future__ import annotations

import os

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from paritas.core.results.findings import Status
from paritas.sharding.plans.verify import verify_parallel
from quality import titan_mistakes, titan_plans
from quality.titan_further import NOT_ON_A_CPU, RIGHT_FURTHER

WHOLE = bool(os.environ.get("PARITAS_WHOLE_CORPUS"))
USUAL = {
    "tp, sp, loss parallel",
    "accumulation, clipping, checkpointing, adamw",
    "meta device, fsdp2",
    "experts, all-to-all",
    "context parallel in a ring",
    "float8, one scale for all ranks",
}
# Sums in place of means, and reductions that are missing, are in integration/.
USUAL_MISTAKES = {"norm of the own shards"}
ALL_RIGHT = [*titan_plans.RIGHT, *RIGHT_FURTHER]
RIGHT = [run for run in ALL_RIGHT if WHOLE or run.name in USUAL]
MISTAKES = [one for one in titan_mistakes.MISTAKES if WHOLE or str(one) in USUAL_MISTAKES]
# Where the place that is named is a neighbour of the mistake.
BESIDE = {"heads of the other rank", "a recomputed layer without gradient"}


def test_the_corpus_has_what_is_promised():
    assert {run.name for run in ALL_RIGHT} >= USUAL
    names = [str(one) for one in titan_mistakes.MISTAKES]
    assert len(set(names)) == len(names) >= 40
    assert set(names) >= USUAL_MISTAKES | BESIDE


@pytest.mark.one_in(2)
@pytest.mark.slow
@pytest.mark.parametrize("run", RIGHT, ids=str)
def test_a_right_plan_is_silent(run):
    verdict = run.verdict()
    assert verdict.passed, str(verdict)
    assert verdict.coverage.compared > 0


@pytest.mark.slow
@pytest.mark.parametrize("mistake", MISTAKES, ids=str)
def test_a_mistake_is_found_with_its_place(mistake):
    verdict = mistake.run.verdict()
    assert verdict.status in {Status.DIFFERENT, Status.DEGRADED}, str(verdict)
    if str(mistake) not in BESIDE:
        assert titan_mistakes.is_named(mistake, verdict), str(verdict)


@pytest.mark.parametrize(("run", "operator"), NOT_ON_A_CPU, ids=str)
def test_what_torch_does_not_have_on_a_cpu_is_no_fault_of_the_plan(run, operator):
    verdict = run.verdict()
    assert verdict.status is Status.UNVERIFIED
    assert operator in verdict.failures[0].reason
    assert "check the plan on GPUs" in verdict.failures[0].reason


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8), nn.GELU()) for _ in range(2)
        )

    def forward(self, x):
        for layer in self.layers:
            x = x + layer(x)
        return x


def mixed_precision(model, mesh, *, spoil=False):
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    if spoil:
        model.layers[1].register_forward_hook(lambda _module, _args, value: 1.05 * value)


@pytest.mark.usefixtures("undiagnosed")
@pytest.mark.parametrize(
    ("dtype", "spoil", "status"),
    [
        (None, False, Status.DIFFERENT),  # outputs are in another dtype
        (torch.bfloat16, False, Status.EQUIVALENT),
        (torch.bfloat16, True, Status.DIFFERENT),
    ],
)
def test_mixed_precision_passes_if_it_is_meant(dtype, spoil, status):
    torch.manual_seed(0)
    verdict = verify_parallel(
        Small(),
        lambda model, mesh: mixed_precision(model, mesh, spoil=spoil),
        [torch.randn(8, 8)],
        split="ranks",
        steps=1,
        compute_dtype=dtype,
    )
    assert verdict.status is status, str(verdict)
    if spoil:
        assert verdict.failures[0].origin.name == "layers.1"

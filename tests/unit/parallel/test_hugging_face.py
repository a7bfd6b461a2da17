"""The plans that models of transformers ship."""

from __future__ import annotations

import sys
import types

import pytest
import torch
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from paritas.errors import UsageError
from paritas.parallel.plan import make_program
from paritas.parallel.verify import verify_parallel
from paritas.results.findings import Status

BATCH = torch.randn(4, 8, generator=torch.Generator().manual_seed(1))


class Shipping(nn.Module):
    """A model with the methods of transformers' models that a plan needs."""

    rules = (("up", "colwise"), ("down", "rowwise"))

    def __init__(self) -> None:
        super().__init__()
        self.tp_plan, self.ep_plan = dict(self.rules), {}
        self.up, self.down = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        return self.down(self.up(x).relu())

    def tie_weights(self) -> None:
        pass

    @classmethod
    def maybe_distribute_model(cls, model, config, meshes):
        assert config.ep_size is None
        styles = {"colwise": ColwiseParallel, "rowwise": RowwiseParallel}
        chosen = {name: styles[style]() for name, style in cls.rules}
        return parallelize_module(model, meshes.dense["tp"], chosen)


class NothingMatches(Shipping):
    rules = (("nowhere", "colwise"),)

    @classmethod
    def maybe_distribute_model(cls, model, _config, _meshes):
        return model


class Without(Shipping):
    rules = ()


class Refusing(Shipping):
    @classmethod
    def maybe_distribute_model(cls, _model, _config, _meshes):
        raise ValueError("3 experts do not divide evenly")


@pytest.fixture
def transformers(monkeypatch):
    """Stands for the library, which these tests do not need."""
    name = "transformers.distributed.configuration_utils"
    module = types.ModuleType(name)
    module.DistributedConfig = types.SimpleNamespace
    monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(
        "paritas.parallel.plan._meshes",
        lambda mesh, _config: types.SimpleNamespace(dense={"tp": mesh}),
    )


@pytest.mark.usefixtures("transformers")
def test_the_plan_of_a_model_is_applied_and_checked():
    verdict = verify_parallel(Shipping(), "hf", [BATCH], {"tp": 2}, steps=1)
    assert verdict.passed, str(verdict)
    assert verdict.coverage.compared == 4 + 1 + 1 + 4 + 4


@pytest.mark.usefixtures("transformers")
@pytest.mark.parametrize(
    ("model", "plan", "mesh", "reason"),
    [
        (Without, "hf", {"tp": 2}, "Without ships no plan (base_model_tp_plan)"),
        (Shipping, "hf-ep", {"tp": 2}, "Shipping ships no plan (base_model_ep_plan)"),
        (
            Refusing,
            "hf",
            2,
            "transformers does not apply the plan of Refusing: 3 experts do not divide evenly",
        ),
        (
            NothingMatches,
            "hf",
            2,
            "no rule of the plan of NothingMatches matches a parameter, so nothing is parallel",
        ),
        (
            Shipping,
            "hf",
            {"dp": 1, "tp": 2},
            "a plan of transformers has the axes tp and fsdp, not dp",
        ),
    ],
)
def test_what_has_no_plan_is_unverified(model, plan, mesh, reason):
    verdict = verify_parallel(model(), plan, [BATCH], mesh, steps=1)
    assert verdict.status is Status.UNVERIFIED
    assert [finding.reason for finding in verdict.findings] == [reason]


def test_samples_are_split_along_fsdp_alone():
    program = make_program(Shipping(), "hf", [BATCH], {"fsdp": 2, "tp": 2})
    assert program.split == ("fsdp",)


def test_other_names_of_plans_are_refused():
    with pytest.raises(UsageError, match="'ddp', 'fsdp', 'hf', 'hf-ep', a dict"):
        make_program(Shipping(), "megatron", [BATCH])


@pytest.mark.slow
def test_the_plan_of_llama_is_right():
    pytest.importorskip("transformers.distributed")
    from paritas.targets import build_target

    torch.manual_seed(0)
    model, inputs = build_target("hf:LlamaForCausalLM")
    verdict = verify_parallel(model, "hf", inputs, {"tp": 2}, steps=1)
    assert verdict.passed, str(verdict)

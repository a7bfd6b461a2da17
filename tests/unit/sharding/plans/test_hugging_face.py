"""The plans that models of transformers ship."""

from __future__ import annotations

import sys
import types

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from paritas.core.errors import UsageError
from paritas.core.results.findings import Status
from paritas.sharding.plans.plan import make_program
from paritas.sharding.plans.verify import verify_parallel

BATCH = torch.randn(4, 8, generator=torch.Generator().manual_seed(1))


class Shipping(nn.Module):
    """A model with the methods of transformers' models that a plan needs."""

    rules = (("up", "colwise"), ("down", "rowwise"))
    ties = ()

    def __init__(self) -> None:
        super().__init__()
        self.tp_plan, self.ep_plan = dict(self.rules), {}
        self.up, self.down = nn.Linear(8, 8), nn.Linear(8, 8)
        self.all_tied_weights_keys = dict(self.ties)
        self.tie_weights(recompute_mapping=False)

    def forward(self, x):
        return self.down(self.up(x).relu())

    def get_parameter_or_buffer(self, name):
        return self.get_parameter(name)

    def tie_weights(self, *, recompute_mapping) -> None:
        assert not recompute_mapping
        for target, source in self.all_tied_weights_keys.items():
            module, _, name = target.rpartition(".")
            setattr(self.get_submodule(module), name, self.get_parameter(source))

    @classmethod
    def maybe_distribute_model(cls, model, config, meshes):
        assert not config.experts
        styles = {
            "colwise": ColwiseParallel(),
            "rowwise": RowwiseParallel(),
            "gathered": ColwiseParallel(output_layouts=Replicate()),
        }
        held = dict(model.named_parameters())
        for name, style in cls.rules:
            assert held[f"{name}.weight"].dim() == 2  # transformers shards each by its own name
            if config.tp_size > 1:
                parallelize_module(model.get_submodule(name), meshes.get_mesh("tp"), styles[style])
        if config.fsdp_size > 1:
            fully_shard(model, mesh=meshes.get_mesh("fsdp"))
        return model


class Tied(Shipping):
    """The second layer has the weight of the first, which lies in one way for both."""

    rules = (("up", "gathered"), ("down", "gathered"))
    ties = (("down.weight", "up.weight"),)


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


class Config:
    """Sizes as transformers has them: the ranks of experts are those of the dense layers."""

    def __init__(self, tp_size: int, fsdp_size: int, ep_size: int | None) -> None:
        self.pp_size, self.tp_size, self.fsdp_size = 1, tp_size, fsdp_size
        self.experts = ep_size is not None
        self.ep_size = ep_size or 1
        self.efsdp_size = fsdp_size * tp_size // self.ep_size


class Meshes:
    def __init__(self, dense, _experts) -> None:
        self.dense = dense

    def get_mesh(self, axis):
        return self.dense[axis]


@pytest.fixture
def transformers(monkeypatch):
    """Stands for the library, which these tests do not need."""
    package = "transformers.distributed"
    for name, held in (
        ("configuration_utils", {"DistributedConfig": Config}),
        ("utils", {"TransformersDeviceMesh": Meshes}),
    ):
        module = types.ModuleType(f"{package}.{name}")
        vars(module).update(held)
        monkeypatch.setitem(sys.modules, f"{package}.{name}", module)


@pytest.mark.usefixtures("transformers")
def test_the_plan_of_a_model_is_applied_and_checked():
    verdict = verify_parallel(Shipping(), "hf", [BATCH], {"tp": 2}, steps=1)
    assert verdict.passed, str(verdict)
    assert verdict.coverage.compared == 4 + 1 + 1 + 4 + 4


@pytest.mark.usefixtures("transformers")
def test_tied_weights_are_distributed_by_each_of_their_names():
    verdict = verify_parallel(Tied(), "hf", [BATCH], {"tp": 2}, steps=1)
    assert verdict.passed, str(verdict)


@pytest.mark.usefixtures("transformers")
@pytest.mark.parametrize("axes", [("tp", "fsdp"), ("fsdp", "tp")])
def test_the_order_of_the_axes_is_the_users(axes):
    verdict = verify_parallel(Shipping(), "hf", [BATCH], dict.fromkeys(axes, 2), steps=1)
    assert verdict.passed, str(verdict)


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
@pytest.mark.parametrize(
    ("name", "mesh"),
    [
        ("LlamaForCausalLM", {"tp": 2}),
        ("LlamaForCausalLM", {"tp": 2, "fsdp": 2}),
        ("Gemma2ForCausalLM", {"tp": 2}),  # its head is tied to the embedding
    ],
)
def test_plans_of_transformers_are_right(name, mesh):
    pytest.importorskip("transformers.distributed")
    from paritas.core.targets import build_target

    torch.manual_seed(0)
    model, inputs = build_target(f"hf:{name}")
    verdict = verify_parallel(model, "hf", inputs, mesh, steps=1)
    assert verdict.passed, str(verdict)

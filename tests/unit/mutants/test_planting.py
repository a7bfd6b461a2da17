"""Every kind of fault can be planted, runs, and changes what the program computes."""

from __future__ import annotations

import dataclasses
import functools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from paritas.core.errors import UsageError
from paritas.mutants.operator_faults import INDEXING_FAULTS, NORMS
from paritas.mutants.planting import (
    MUTATIONS,
    FaultSite,
    measure_effect,
    plant,
    program_noise,
    sites,
)
from paritas.mutants.programs import FlatProgram, RunningCall, trace_program


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(7, 4)
        self.norm = nn.LayerNorm(4, eps=1e-3)
        self.out = nn.Linear(4, 4)

    def forward(self, tokens):
        x = self.words(tokens)
        y = self.norm(x)
        turned = torch.cat([-y[..., 2:], y[..., :2]], -1)
        scores = (turned - 0.5 * y) @ y.transpose(-1, -2) / 2.0
        size = tokens.shape[-1]
        mask = torch.ones(size, size).triu(1).bool()
        weights = scores.masked_fill(mask, -1e4).softmax(-1)
        x = x + F.gelu(self.out(weights @ y))
        scale = torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-4)
        # The words' weights are used twice, as where input and output embeddings are tied.
        return (x * scale) @ self.words.weight.T


class Picture(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fold = nn.Conv2d(2, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(4)
        self.drop = nn.Dropout(0.5)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.norm(self.fold(x))), 2)
        x = self.drop(x.var((2, 3)))
        return x.mean()


def write_and_wrap(x, counts):
    x.mul_(2)
    return torch.sqrt(x), counts * 100, torch.maximum(x, x.flip(0))


def draw(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@functools.cache
def programs() -> dict[str, FlatProgram]:
    torch.manual_seed(0)
    tokens = torch.randint(0, 7, (2, 4))
    counts = torch.tensor([1, 2, 100], dtype=torch.int8)
    special = torch.tensor([float("nan"), 1.0, 4.0])
    return {
        "attention": trace_program(Attention(), [tokens]),
        "picture": trace_program(Picture(), [draw(1, 2, 2, 6, 6)]),
        "written": trace_program(write_and_wrap, [special, counts]),
    }


@functools.cache
def noises() -> dict[str, object]:
    return {name: program_noise(program) for name, program in programs().items()}


@functools.cache
def all_sites() -> dict[str, list[tuple[str, FaultSite]]]:
    found: dict[str, list[tuple[str, FaultSite]]] = {name: [] for name in MUTATIONS}
    for name, program in programs().items():
        for site in sites(program):
            found[site.mutation].append((name, site))
    return found


def test_the_kinds_are_numbered_from_one_to_forty_two():
    assert [kind.number for kind in MUTATIONS.values()] == list(range(1, 43))
    assert all(name == kind.name for name, kind in MUTATIONS.items())


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_every_kind_of_fault_changes_a_program(mutation):
    bands = []
    for name, site in all_sites()[mutation]:
        mutant = plant(programs()[name], site)
        assert mutant is not None
        effect = measure_effect(programs()[name], mutant, noises()[name])
        bands.append(effect.band)
        if effect.band != "none":
            return
    pytest.fail(f"{mutation} changes nothing at any of its {len(bands)} sites")


def test_every_mutant_returns_results_of_the_right_shapes():
    for name, program in programs().items():
        right = program.module(*program.fresh_inputs())
        for site in sites(program)[::16]:
            mutant = plant(program, site)
            wrong = mutant(*program.fresh_inputs())
            assert [r.shape for r in wrong] == [r.shape for r in right], (name, site)


def test_a_mutant_is_the_program_except_for_one_node_of_the_same_name():
    program = programs()["attention"]
    site = next(site for site in sites(program) if site.mutation == "short_contraction")
    mutant = plant(program, site)
    pairs = list(zip(program.module.graph.nodes, mutant.graph.nodes, strict=True))
    assert [a.name for a, _ in pairs] == [b.name for _, b in pairs]
    assert [a.name for a, b in pairs if a.target != b.target] == [site.node]


def test_planting_leaves_the_program_as_it_is():
    program = programs()["picture"]
    before = program.module.code
    for site in sites(program)[::20]:
        plant(program, site)
    assert program.module.code == before


def test_faults_are_planted_forward_and_backward():
    program = programs()["attention"]
    behind = {site.mutation for site in sites(program) if site.node in program.backward}
    ahead = {site.mutation for site in sites(program) if site.node not in program.backward}
    assert {"dropped_addend", "unreduced_gradient", "other_gelu", "shifted_slice"} <= behind
    assert {"dropped_addend", "shifted_mask", "other_gelu", "shifted_slice"} <= ahead


def test_sites_come_in_the_order_of_the_graph():
    program = programs()["attention"]
    order = [node.name for node in program.calls]
    places = [order.index(site.node) for site in sites(program)]
    assert places == sorted(places)


def test_a_site_that_does_not_fit_plants_nothing():
    program = programs()["attention"]
    site = sites(program)[0]
    assert plant(program, dataclasses.replace(site, node="nowhere")) is None
    assert plant(program, dataclasses.replace(site, detail="argument 77")) is None


def test_an_unknown_fault_is_refused_by_name():
    with pytest.raises(UsageError, match="unknown fault 'misspelt'; use one of mul_to_add"):
        plant(programs()["attention"], FaultSite("add", "misspelt"))


@pytest.mark.parametrize("kind", ["flash", "efficient", "cudnn"])
def test_a_devices_attention_kernel_can_be_made_to_see_the_next_token(kind):
    """The kernels accept no custom mask: the fault computes the output, also without a GPU."""

    def kernel(query, key, value, *_rest):
        return F.scaled_dot_product_attention(query, key, value, is_causal=True), "state"

    kernel.__name__ = f"_scaled_dot_product_{kind}_attention.default"
    torch.manual_seed(0)
    tensors = [torch.randn(1, 2, 6, 8, dtype=torch.float64) for _ in range(3)]
    call = RunningCall(kernel, tuple(tensors), {})
    output, state = INDEXING_FAULTS["shifted_mask"].act(call, "causal")
    seen = torch.ones(6, 6, dtype=torch.bool).tril(1)
    expected = F.scaled_dot_product_attention(*tensors, attn_mask=seen)
    torch.testing.assert_close(output, expected)
    assert state == "state"


def test_a_deviation_beside_its_mean_has_the_fault_of_a_variance():
    program = trace_program(lambda x: torch.std_mean(x, 1)[0], [draw(1, 3, 5)], gradients=False)
    (site,) = (site for site in sites(program) if site.mutation == "wrong_correction")
    (wrong,) = plant(program, site)(*program.fresh_inputs())
    (x,) = program.fresh_inputs()
    torch.testing.assert_close(wrong, x.std(1, correction=0))


@pytest.mark.parametrize("name", sorted(NORMS))
def test_the_norms_take_and_return_what_the_faults_of_norms_change(name):
    schema = getattr(torch.ops.aten, name).default._schema
    names = [argument.name for argument in schema.arguments]
    epsilon = "epsilon" if "miopen" in name else "eps"
    assert {"weight", "bias", epsilon} <= set(names)
    assert len(schema.returns) == 3
    if "batch" in name:
        assert (names[1], names[5], names[7]) == ("weight", "training", epsilon)

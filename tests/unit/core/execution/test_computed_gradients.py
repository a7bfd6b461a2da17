"""Sketches of gradients that are made while a backward pass runs."""

from __future__ import annotations

import torch
from torch import nn

from paritas.core.execution.computed_gradients import sketching_gradients, stand_in_for
from paritas.core.execution.observation import MOST_KEPT, keep_gradient
from paritas.core.results.items import gradient
from paritas.core.torch_private.tensors import gradient_hooks

WIDTH = 160  # more numbers in a square than are kept as they are
assert WIDTH * WIDTH > MOST_KEPT


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))


def differentiate(program: nn.Module) -> dict[str, torch.Tensor]:
    names = [name for name, _ in program.named_parameters()]
    loss = program(torch.linspace(-1, 1, WIDTH)).square().sum()
    return dict(zip(names, torch.autograd.grad(loss, list(program.parameters())), strict=True))


def test_large_gradients_are_not_held_and_small_ones_are_as_before():
    program = model()
    expected = differentiate(program)
    targets = {gradient(name): leaf for name, leaf in program.named_parameters()}
    with sketching_gradients(targets) as sketches:
        computed = differentiate(program)
    assert {item.name for item in sketches} == {"0.weight", "2.weight"}
    for name, value in expected.items():
        assert computed[name].shape == value.shape
        if gradient(name) in sketches:
            assert torch.equal(sketches[gradient(name)], keep_gradient(value))
            assert computed[name].untyped_storage().nbytes() == value.itemsize
        else:
            assert torch.equal(computed[name], value)


def test_the_hooks_of_the_program_run_first_and_ours_are_gone_afterwards():
    program = model()
    program[0].weight.register_hook(lambda value: 3 * value)
    expected = differentiate(program)["0.weight"]
    item = gradient("0.weight")
    with sketching_gradients({item: program[0].weight}) as sketches:
        differentiate(program)
    assert torch.equal(sketches[item], keep_gradient(expected))
    assert len(gradient_hooks(program[0].weight)) == 1
    assert torch.equal(differentiate(program)["0.weight"], expected)


def test_one_leaf_of_two_names_has_one_sketch():
    weight = torch.ones(MOST_KEPT + 1, requires_grad=True)
    items = gradient("first"), gradient("second")
    with sketching_gradients(dict.fromkeys(items, weight)) as sketches:
        torch.autograd.grad((weight * weight).sum(), [weight, weight])
    assert torch.equal(sketches[items[0]], keep_gradient(torch.full_like(weight, 2.0)))
    assert sketches[items[1]] is sketches[items[0]]


def test_sparse_gradients_are_left_to_be_sketched_at_the_end():
    table = nn.Embedding(WIDTH, WIDTH, sparse=True)
    item = gradient("weight")
    with sketching_gradients({item: table.weight}) as sketches:
        (value,) = torch.autograd.grad(table(torch.tensor([1, 3])).sum(), [table.weight])
    assert not sketches
    assert value.is_sparse


def test_a_stand_in_has_one_number():
    value = torch.zeros(3, 5, dtype=torch.float16)
    form = stand_in_for(value)
    assert (form.shape, form.dtype, form.nbytes) == (value.shape, value.dtype, value.nbytes)
    assert form.untyped_storage().nbytes() == value.itemsize

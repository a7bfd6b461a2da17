"""The gradient that a reference gets at an output which compiled code also uses itself."""

from __future__ import annotations

import torch

from paritas.core.execution.graph_runs import Cotangent


def gradient_below(cotangent, inside, dtype=torch.float32):
    """What goes on at an output of a reference whose own inside contributes `inside`."""
    x = torch.zeros(4, dtype=dtype, requires_grad=True)
    output = x * 1
    begin = cotangent.enter(output)
    (found,) = torch.autograd.grad(
        [output, output * inside], x, [begin, torch.ones(4, dtype=dtype)]
    )
    return found


def test_an_output_that_is_not_used_inside_gets_all_of_it():
    total = torch.tensor([1.0, 2.0, 3.0, 4.0])
    assert torch.equal(gradient_below(Cotangent(total), torch.zeros(4)), total)


def test_the_same_inside_gives_the_same_sum_to_the_bit():
    torch.manual_seed(0)
    inside, outside = torch.randn(4), 1e-3 * torch.randn(4)
    total = inside + outside
    assert torch.equal(gradient_below(Cotangent(total, (inside,)), inside), total)


def test_another_inside_is_not_replaced_by_that_of_the_candidate():
    total, wrong = torch.full((4,), 5.0), torch.full((4,), 3.0)
    right = torch.full((4,), 1.5)
    assert gradient_below(Cotangent(total, (wrong,)), right).tolist() == [3.5] * 4


def test_what_comes_from_outside_has_the_digits_of_the_run():
    inside = torch.full((4,), 1.0)
    total = inside + 2**-20
    found = gradient_below(Cotangent(total, (inside,)), inside.double() / 3, torch.float64)
    assert torch.equal(found, inside.double() / 3 + 2**-20)


def test_expanded_parts_are_summed_as_autograd_does_it():
    part = torch.ones(3, 4)
    found = gradient_below(Cotangent(torch.full((4,), 5.0), (part,)), torch.full((4,), 7.0))
    assert found.tolist() == [9.0] * 4


def test_an_infinite_inside_does_not_become_nan():
    inside = torch.tensor([torch.inf, 1.0, 1.0, 1.0])
    found = gradient_below(Cotangent(inside + 1, (inside,)), inside.double(), torch.float64)
    assert found.tolist() == [torch.inf, 2.0, 2.0, 2.0]

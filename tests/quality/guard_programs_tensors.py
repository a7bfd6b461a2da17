"""Correct programs: kinds of tensors, and what a graph may do with their memory."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from quality.guard_program_table import gradients, inductor_settings, outside, program, under

# --- kinds of tensors -----------------------------------------------------------------------------


@program
def dynamic_shapes(backend: Any) -> Any:
    model = nn.Linear(8, 8)
    compiled = under(backend, lambda x: model(x).relu().softmax(0), dynamic=True)
    outputs = []
    for rows in (4, 8, 16):
        x = torch.randn(rows, 8, requires_grad=True)
        y = compiled(x)
        y.square().sum().backward()
        outputs += [y, x.grad]
    return [*outputs, *gradients(model)]


@program
def shapes_that_turn_dynamic(backend: Any) -> Any:
    compiled = under(backend, lambda x: (x @ x.t()).logsumexp(-1))
    return [compiled(torch.randn(rows, 8)) for rows in (3, 5, 7)]


@program
def topk_argsort_nonzero(backend: Any) -> Any:
    def select(x: Tensor) -> Any:
        return *x.exp().topk(3), x.argsort(-1), x.nonzero(), x.argmax(-1), x[x > 0]

    return under(backend, select)(torch.randn(8, 16))


@program
def integers_and_bools(backend: Any) -> Any:
    i, x = torch.randint(-9, 9, (8, 8), dtype=torch.int8), torch.randn(8, 8)
    return under(backend, lambda i, x: (i * 31, i.sum(), i // 3, x > 0, (x * 3).long(), i & 5))(
        i, x
    )


@program
def complex_numbers(backend: Any) -> Any:
    z = torch.randn(4, 8, dtype=torch.complex64)
    return under(backend, lambda z: (z * z.conj(), z.abs(), torch.fft.fft(z).real, z.exp()))(z)


@program
def channels_last_and_strided_inputs(backend: Any) -> Any:
    conv = nn.Conv2d(4, 8, 3)
    x = torch.randn(2, 4, 8, 8).to(memory_format=torch.channels_last)
    strided = torch.randn(16, 12)[::2, 1::3].t()
    return under(backend, lambda x, s: (conv(x).relu(), s * 2, s.sum(0), s + s.mean()))(x, strided)


@program
def empty_tensors(backend: Any) -> Any:
    x = torch.randn(0, 8, requires_grad=True)
    linear = nn.Linear(8, 4)
    y, total = under(backend, lambda x: (linear(x).relu(), x.sum(0)))(x)
    (y.sum() + total.sum()).backward()
    return [y, total, x.grad, *gradients(linear)]


def of_scalars(x: Tensor, y: Tensor, f: float) -> Any:
    return x.sin() * y + f, y + 1, y * f


@program
def scalars(backend: Any) -> Any:
    x, y = torch.tensor(0.3, requires_grad=True), torch.tensor(2)
    z = under(backend, of_scalars)(x, y, 1.5)
    z[0].backward()
    return [*z, x.grad]


@program
def some_outputs_are_none(backend: Any) -> Any:
    function = under(backend, lambda x: {"y": x.tanh(), "none": None, "pair": (x + 1, None, 3)})
    return function(torch.randn(4))


# --- views, writing, constants --------------------------------------------------------------------


@program
def graph_break_in_the_middle(backend: Any) -> Any:
    first, second = nn.Linear(8, 8), nn.Linear(8, 8)
    y = under(backend, lambda x: second(outside(first(x).tanh())).relu())(torch.randn(4, 8))
    y.sum().backward()
    return [y, *gradients(first), *gradients(second)]


def write_through_a_view(x: Tensor) -> None:
    x.view(3, 2).mul_(2)
    x[0].add_(1)


@program
def writing_through_a_view_of_an_input(backend: Any) -> Any:
    x = torch.randn(2, 3)
    under(backend, write_through_a_view)(x)
    return x


@program
def writing_to_the_base_of_a_view(backend: Any) -> Any:
    def double(x: Tensor) -> Tensor:
        y = x.view(3, 2)
        x.mul_(2)
        return y

    x = torch.randn(2, 3)
    return [under(backend, double)(x), x]


@program
def writing_to_a_buffer(backend: Any) -> Any:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("seen", torch.zeros(8))

        def forward(self, x: Tensor) -> Tensor:
            self.seen.lerp_(x.mean(0), 0.1)
            return x - self.seen

    model = Counting()
    compiled = under(backend, model)
    return [*(compiled(torch.randn(4, 8)) for _ in range(3)), model.seen]


def write_to_one_and_read_the_other(a: Tensor, b: Tensor) -> Tensor:
    a.add_(1)
    return b * 2


@program
def inputs_that_share_memory(backend: Any) -> Any:
    base = torch.randn(8)
    return [under(backend, write_to_one_and_read_the_other)(base[:6], base[2:]), base]


@program
def output_is_a_view_of_an_input(backend: Any) -> Any:
    x = torch.randn(4, 6)
    y, part, same = under(backend, lambda x: (x.t(), x[1:3] + 1, x))(x)
    y.add_(1)
    return [y, part, same, x]


@program
def one_tensor_returned_twice(backend: Any) -> Any:
    def twice(x: Tensor) -> Any:
        y = x.exp()
        return y, y, y.view(-1), y * 2

    return under(backend, twice)(torch.randn(4, 6))


def scatter(x: Tensor, index: Tensor) -> Any:
    zeros = torch.zeros(5, 8)
    put = zeros.index_put((index,), x, accumulate=True)
    rows = index[:, None].expand_as(x)
    return put, zeros.scatter_add(0, rows, x), zeros.scatter_reduce(0, rows, x, "amax")


@program
def scatter_and_index_put(backend: Any) -> Any:
    return under(backend, scatter)(torch.randn(16, 8), torch.randint(5, (16,)))


@program
def captured_constants(backend: Any) -> Any:
    table, scale = torch.randn(4, 8), torch.tensor([1.0, -2.0, 3.0, 0.5])
    function = lambda x: (x + table) * scale[:, None] + torch.tensor([1.0, 2.0]).repeat(4)  # noqa: E731
    return under(backend, function)(torch.randn(4, 8))


@program
def freezing(backend: Any) -> Any:
    model, x = (
        nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU()).eval(),
        torch.randn(2, 3, 8, 8),
    )
    with torch.no_grad(), inductor_settings(freezing=True):
        compiled = under(backend, model)
        return [compiled(x), compiled(x + 1)]


@program
def branch_inside_the_graph(backend: Any) -> Any:
    def branch(x: Tensor) -> Tensor:
        return torch.cond(x.sum() > 0, lambda x: x.sin() * 2, lambda x: x.cos() - 1, (x,))

    compiled = under(backend, branch)
    return [compiled(torch.ones(4, 4)), compiled(-torch.ones(4, 4))]

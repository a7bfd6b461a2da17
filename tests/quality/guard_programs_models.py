"""Correct programs: models run and trained, in every precision."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quality.guard_program_table import gradients, mlp, program, under

# --- models, run and trained ----------------------------------------------------------------------


@program
def inference(backend: Any) -> Any:
    model, x = mlp().eval(), torch.randn(4, 16)
    with torch.no_grad():
        return under(backend, model)(x)


@program
def inference_mode(backend: Any) -> Any:
    model, x = mlp().eval(), torch.randn(4, 16)
    with torch.inference_mode():
        return under(backend, model)(x).clone()


def trained(backend: Any, model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """The parameters after three steps on fresh data."""
    compiled = under(backend, model)
    for _ in range(3):
        x, target = torch.randn(8, 16), torch.randn(8, 8)
        optimizer.zero_grad()
        F.mse_loss(compiled(x), target).backward()
        optimizer.step()
    return list(model.parameters())


@program
def sgd_training(backend: Any) -> Any:
    model = mlp()
    return trained(backend, model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))


@program
def adam_training(backend: Any) -> Any:
    model = nn.Sequential(nn.Linear(16, 8), nn.Tanh())
    return trained(backend, model, torch.optim.Adam(model.parameters(), lr=1e-2))


@program
def compiled_optimizer_step(backend: Any) -> Any:
    model = nn.Sequential(nn.Linear(16, 8), nn.Tanh(), nn.Linear(8, 8))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=True)
    step = under(backend, optimizer.step)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randn(8, 16)).square().mean().backward()
        step()
    return list(model.parameters())


@program
def embedding_and_cross_entropy(backend: Any) -> Any:
    model = nn.Sequential(nn.Embedding(32, 16), nn.Linear(16, 32))
    ids, target = torch.randint(32, (4, 6)), torch.randint(32, (4, 6))
    target[0, 0] = -100
    loss = under(backend, lambda i, t: F.cross_entropy(model(i).flatten(0, 1), t.flatten()))
    value = loss(ids, target)
    value.backward()
    return [value, *gradients(model)]


@program
def convolution_batch_norm_relu_training(backend: Any) -> Any:
    model = nn.Sequential(nn.Conv2d(3, 8, 3, stride=2, bias=False), nn.BatchNorm2d(8), nn.ReLU())
    compiled = under(backend, model)
    outputs = []
    for _ in range(2):
        outputs.append(compiled(torch.randn(2, 3, 12, 12)))
        outputs[-1].square().mean().backward()
    return [*outputs, *gradients(model), *model.buffers()]


@program
def causal_attention(backend: Any) -> Any:
    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(query, key, value, is_causal=True).relu()

    inputs = [torch.randn(2, 2, 16, 8, requires_grad=True) for _ in range(3)]
    y = under(backend, attend)(*inputs)
    y.square().sum().backward()
    return [y, *(x.grad for x in inputs)]


@program
def recurrent_cell(backend: Any) -> Any:
    gates, x = nn.Linear(8 + 16, 4 * 16), torch.randn(3, 3, 8, requires_grad=True)

    def unrolled(x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = cell = x.new_zeros(x.shape[0], 16)
        for step in x.unbind(1):
            i, f, g, o = gates(torch.cat([step, hidden], -1)).chunk(4, -1)
            cell = f.sigmoid() * cell + i.sigmoid() * g.tanh()
            hidden = o.sigmoid() * cell.tanh()
        return hidden, cell

    hidden, cell = under(backend, unrolled)(x)
    (hidden.sum() + cell.square().sum()).backward()
    return [hidden, cell, x.grad, *gradients(gates)]


@program
def batch_norm_training(backend: Any) -> Any:
    model = nn.Sequential(nn.Linear(16, 8, bias=False), nn.BatchNorm1d(8))
    compiled = under(backend, model)
    outputs = [compiled(torch.randn(12, 16)) for _ in range(3)]
    sum(y.sin().sum() for y in outputs).backward()
    return [*outputs, *gradients(model), *model.buffers()]


@program
def one_graph_used_twice_in_a_step(backend: Any) -> Any:
    model = mlp(8)
    compiled = under(backend, model)
    y = compiled(compiled(torch.randn(4, 8)))
    y.square().mean().backward()
    return [y, *gradients(model)]


@program
def half_of_the_outputs_differentiated(backend: Any) -> Any:
    x = torch.randn(4, 8, requires_grad=True)
    first, _, _ = under(backend, lambda x: (x.sin().exp(), x.cos().cumsum(0), x.detach() * 2))(x)
    first.sum().backward()
    return [first, x.grad]


# --- precision ------------------------------------------------------------------------------------


@program
def autocast_bfloat16(backend: Any) -> Any:
    model, x = nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 8)), torch.randn(8, 16)
    with torch.autocast("cpu", torch.bfloat16):
        y = under(backend, model)(x)
    y.float().square().mean().backward()
    return [y, *gradients(model)]


def in_dtype(backend: Any, dtype: torch.dtype, model: nn.Module) -> Any:
    model = model.to(dtype)
    x = torch.randn(8, 16, dtype=dtype, requires_grad=True)
    y = under(backend, lambda x: model(x).softmax(-1))(x)
    y.square().sum().backward()
    return [y, x.grad, *gradients(model)]


@program
def bfloat16(backend: Any) -> Any:
    return in_dtype(backend, torch.bfloat16, mlp())


@program
def float16(backend: Any) -> Any:
    return in_dtype(backend, torch.float16, mlp())


@program
def float64(backend: Any) -> Any:
    return in_dtype(backend, torch.float64, nn.Sequential(nn.Linear(16, 8), nn.GELU()))


@program
def bfloat16_scan_and_softmax(backend: Any) -> Any:
    x = torch.randn(4, 64, dtype=torch.bfloat16)
    return under(backend, lambda x: (x.cumsum(-1), x.softmax(-1).cumsum(-1), x.cumsum(0).tanh()))(x)


@program
def gelu_of_many_values(backend: Any) -> Any:
    """On some processors Inductor's erf is an approximation, good to some units of the last."""
    return under(backend, lambda x: F.gelu(x))(torch.randn(64, 64))  # noqa: PLW0108


@program
def outputs_of_tiny_scale(backend: Any) -> Any:
    model, x = mlp(), torch.randn(8, 16, requires_grad=True)
    y = under(backend, lambda x: model(x) * 1e-5)(x)
    y.sum().backward()
    return [y, x.grad]


@program
def nan_from_the_inputs_and_the_formula(backend: Any) -> Any:
    x = torch.randn(8, 8)
    x[2, 3] = torch.nan
    return under(backend, lambda x: (x.sqrt(), x.log() * 2, x.sum(-1), torch.nan_to_num(x)))(x)


@program
def infinities(backend: Any) -> Any:
    x = torch.randn(8, 8)
    x[0, 0], x[1, 1] = torch.inf, 0.0
    return under(backend, lambda x: (1 / x, (x * 100).exp(), -x.abs() / 0.0, x.amax(-1)))(x)


@program
def threshold_that_rounding_decides(backend: Any) -> Any:
    """Half of the rows lie exactly on the threshold, as eager computes it."""
    x = torch.randn(64, 257)
    at = x.softmax(-1).var(-1)
    return under(backend, lambda x, at: (x.softmax(-1).var(-1) > at, x.softmax(-1).var(-1)))(x, at)

"""Correct programs with random numbers, custom operators and a process group.

Inductor draws its own random numbers unless told to fall back to eager's. Programs that draw in
Inductor's way give back what holds for any draw.
"""

from __future__ import annotations

import contextlib
import pathlib
import sys
import tempfile
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from quality import guard_programs_tensors as tensors
from quality.guard_program_table import gradients, inductor_settings, program, under

if TYPE_CHECKING:
    from collections.abc import Iterator

# --- random numbers -------------------------------------------------------------------------------


def masks_of_both_directions(x: Tensor, y: Tensor) -> list[Any]:
    """Whether the gradient of a dropout of x is zero where its output is, and how many are kept."""
    kept = y != 0
    return [
        torch.equal(kept, x.grad != 0),
        torch.equal(y[kept], x.detach()[kept] * 2),
        bool(0.3 < kept.float().mean() < 0.7),
    ]


def halved(x: Tensor) -> Tensor:
    return F.dropout(x, 0.5, training=True)


@program
def dropout(backend: Any) -> Any:
    x = torch.randn(32, 32, requires_grad=True)
    compiled = under(backend, halved)
    for _ in range(3):
        x.grad = None
        y = compiled(x)
        y.sum().backward()
    return masks_of_both_directions(x, y)


@program
def dropout_inside_a_model(backend: Any) -> Any:
    """Values depend on the draw; the program is judged by its graphs alone."""
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Dropout(0.5), nn.Linear(32, 8))
    model.append(nn.Dropout(0.1))
    compiled = under(backend, model)
    for _ in range(3):
        compiled(torch.randn(16, 8)).square().mean().backward()
    return [gradient.isfinite().all() for gradient in gradients(model)]


@program
def dropout_with_random_numbers_of_eager(backend: Any) -> Any:
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Dropout(0.5), nn.Linear(32, 8))
    with inductor_settings(fallback_random=True):
        compiled = under(backend, model)
        outputs = [compiled(torch.randn(16, 8)) for _ in range(2)]
        sum(y.square().mean() for y in outputs).backward()
    return [*outputs, *gradients(model), torch.rand(1)]


def draw(x: Tensor) -> Any:
    return (
        x + torch.rand(16, 16),
        torch.randn(16, 16) * 0.1 + x.new_ones(()),
        torch.randint(3, 9, (32,)),
        torch.rand_like(x) < 0.5,
        torch.bernoulli(torch.full((8,), 0.5)),
    )


@program
def random_numbers(backend: Any) -> Any:
    x = torch.zeros(16, 16)
    results = [under(backend, draw)(x) for _ in range(2)]
    (uniform, normal, integers, coins, flips), (again, *_) = results
    return [
        bool((uniform >= 0).all() and (uniform < 1).all()),
        bool(0.9 < normal.mean() < 1.1),
        bool((integers >= 3).all() and (integers < 9).all()),
        coins.dtype,
        bool(((flips == 0) | (flips == 1)).all()),
        torch.equal(uniform, again),
    ]


@program
def random_numbers_of_eager(backend: Any) -> Any:
    with inductor_settings(fallback_random=True):
        results = [under(backend, draw)(torch.zeros(16, 16)) for _ in range(2)]
    return [results, torch.rand(1)]


@program
def checkpointed_dropout(backend: Any) -> Any:
    x = torch.randn(32, 32, requires_grad=True)
    y = under(backend, lambda x: checkpoint(halved, x, use_reentrant=False))(x)
    y.sum().backward()
    return masks_of_both_directions(x, y)


@program
def checkpointed_dropout_with_random_numbers_of_eager(backend: Any) -> Any:
    x, linear = torch.randn(8, 8, requires_grad=True), nn.Linear(8, 8)

    def block(x: Tensor) -> Tensor:
        return halved(linear(x).sin())

    with inductor_settings(fallback_random=True):
        y = under(backend, lambda x: checkpoint(block, x, use_reentrant=False).tanh())(x)
        y.sum().backward()
    return [y, x.grad, *gradients(linear)]


# --- custom operators -----------------------------------------------------------------------------


@torch.library.custom_op("paritas_corpus::shifted_sine", mutates_args=())
def shifted_sine(x: Tensor, shift: float) -> Tensor:
    return torch.sin(x + shift)


@shifted_sine.register_fake
def _(x: Tensor, shift: float) -> Tensor:
    return torch.empty_like(x)


@torch.library.custom_op("paritas_corpus::add_to", mutates_args=("target",))
def add_to(target: Tensor, x: Tensor) -> None:
    target.add_(x)


@program
def custom_operator(backend: Any) -> Any:
    return under(backend, lambda x: shifted_sine(x * 2, 0.5).relu() + 1)(torch.randn(4, 8))


def accumulate(total: Tensor, x: Tensor) -> Tensor:
    add_to(total, x.exp())
    inner = torch.zeros_like(x)
    add_to(inner, x)
    return total * 2 + inner


@program
def custom_operator_that_writes(backend: Any) -> Any:
    total = torch.zeros(4, 8)
    return [under(backend, accumulate)(total, torch.randn(4, 8)), total]


# --- several in one graph -------------------------------------------------------------------------


@program
def several_that_write_and_index(backend: Any) -> Any:
    """What four of the programs do, compiled once."""

    def several(x: Tensor, index: Tensor, written: Tensor, a: Tensor, b: Tensor, y: Tensor) -> Any:
        tensors.write_through_a_view(written)
        shared = tensors.write_to_one_and_read_the_other(a, b)
        return *tensors.scatter(x, index), shared, *tensors.of_scalars(y, index[0], 1.5)

    x, index, base = torch.randn(16, 8), torch.randint(5, (16,)), torch.randn(8)
    written, number = torch.randn(2, 3), torch.tensor(0.3)
    results = under(backend, several)(x, index, written, base[:6], base[2:], number)
    return [*results, written, base]


# --- one process of a group -----------------------------------------------------------------------


@contextlib.contextmanager
def group_of_one() -> Iterator[None]:
    """A process group with nobody else in it."""
    with tempfile.TemporaryDirectory() as folder:
        store = torch.distributed.FileStore(str(pathlib.Path(folder) / "store"), 1)
        hook = sys.excepthook
        torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
        try:
            yield
        finally:
            torch.distributed.destroy_process_group()
            sys.excepthook = hook  # the group had put its own there


@contextlib.contextmanager
def splitting(mode: bool | str) -> Iterator[None]:
    """How `torch.compile` deals with a data-parallel model."""
    import torch._dynamo.config  # noqa: TID251  (a setting of the compiler under test)

    with torch._dynamo.config.patch(optimize_ddp=mode):  # noqa: TID251
        yield


class Layers(nn.Module):
    """A class of its own: below a graph break, torch does not compile `nn.Sequential` itself."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).relu()
        return x


# A layer of this width fills the smallest bucket, of one megabyte.
A_BUCKET_EACH = 512


def data_parallel(
    backend: Any, mode: bool | str, width: int = A_BUCKET_EACH, layers: int = 2
) -> Any:
    """Two steps of a model whose gradients are reduced in buckets."""
    with group_of_one(), splitting(mode):
        model = Layers(width, layers)
        wrapped = nn.parallel.DistributedDataParallel(model, bucket_cap_mb=1)
        compiled = under(backend, wrapped)
        outputs = []
        for _ in range(2):
            outputs.append(compiled(torch.randn(4, width)))
            outputs[-1].square().mean().backward()
        return [*outputs, *gradients(model)]


@program
def data_parallel_split_at_buckets(backend: Any) -> Any:
    return data_parallel(backend, True)


@program
def data_parallel_not_split(backend: Any) -> Any:
    return data_parallel(backend, False)


@program
def data_parallel_without_optimization(backend: Any) -> Any:
    return data_parallel(backend, "no_optimization", width=16, layers=1)


@program
def data_parallel_python_reducer(backend: Any) -> Any:
    return data_parallel(backend, "python_reducer")

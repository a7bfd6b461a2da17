"""Graphs compiled by Inductor, with the buffers of their code beside the values of their nodes."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import nn
from torch.fx import Interpreter

from paritas.core.execution.saved_state import Copier, RandomState
from paritas.core.torch_private.buffers import ListeningCode, SeenBuffer, compile_listening
from paritas.core.torch_private.eager_graphs import use_twins
from paritas.core.torch_private.graphs import as_traced, copy_graph
from paritas.core.torch_private.inductor import LoweredGraph, compile_watched

# What the fused code may be off by, in the norm of a whole tensor. It keeps more digits inside of a
# kernel than the node by node run, so that a float32 sum of bfloat16 numbers differs more.
ALLOWED = {torch.float64: 1e-9, torch.float32: 1e-5, torch.bfloat16: 0.05, torch.float16: 0.01}


@dataclasses.dataclass
class Told:
    """What the listening code of one graph told."""

    lowered: LoweredGraph
    code: ListeningCode
    heard: list[tuple[SeenBuffer, torch.Tensor]]
    nodes: dict[str, torch.Tensor]
    plain: list[Any]
    listening: list[Any]

    @property
    def outputs(self) -> list[tuple[SeenBuffer, torch.Tensor]]:
        return [(seen, value) for seen, value in self.heard if seen.side == "output"]

    def wrong(self, allowed: float | None = None) -> list[str]:
        """The buffers that do not hold the value of the node they are said to."""
        found = []
        for seen, value in self.heard:
            name = seen.buffer.exact
            if name is None or (seen.side == "input" and not seen.buffer.kernel):
                continue
            error = distance(value, self.nodes[name])
            if not error <= (ALLOWED.get(value.dtype, 0.0) if allowed is None else allowed):
                found.append(f"{seen.side} {seen.buffer.name} is not {name}: off by {error:.2g}")
        return found


def distance(left: torch.Tensor, right: torch.Tensor) -> float:
    if left.shape != right.shape or left.dtype != right.dtype:
        return float("inf")
    if not left.is_floating_point():
        return float((left != right).sum())
    difference, norm = (left.double() - right.double()).norm(), right.double().norm()
    return float(difference / norm if norm > 0 else difference)


class _Keeping(Interpreter):
    def __init__(self, module):
        super().__init__(module)
        self.kept = {}

    def run_node(self, n):
        result = super().run_node(n)
        if isinstance(result, torch.Tensor):
            self.kept[n.name] = result.detach().clone()
        return result


class Listening:
    """A backend that keeps what each graph told when it was first called."""

    def __init__(self, options=None):
        self.options = options
        self.told: list[Told] = []

    def __call__(self, graph, inputs, **given):
        return compile_watched(graph, inputs, self.watch, self.options)

    def watch(self, lowered, compiled):
        pending = [True]

        def call(args):
            if pending:
                pending.clear()
                self.told.append(listen(lowered, compiled, args))
            return compiled(args)

        call._boxed_call = True
        return call


def listen(lowered, compiled, args) -> Told:
    def copies():
        copier = Copier()
        return [copier.copy_tensor(v) if isinstance(v, torch.Tensor) else v for v in args]

    heard: list[tuple[SeenBuffer, torch.Tensor]] = []
    before = RandomState.of_torch()
    code = compile_listening(lowered, lambda seen: heard.append((seen, seen.tensor.clone())))
    results = []
    for run in (code, compiled):
        before.restore()
        results.append(list(run(copies())))
    before.restore()
    module = copy_graph(lowered.module)
    use_twins(module)
    keeping = _Keeping(module)
    with as_traced():
        keeping.run(*copies())
    before.restore()
    return Told(lowered, code, heard, keeping.kept, results[1], results[0])


class Block(nn.Module):
    """The attention of a transformer; normalisation and the rest of it are in the perceptron."""

    def __init__(self, width=16):
        super().__init__()
        self.qkv = nn.Linear(width, 3 * width)

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, -1)
        scores = torch.einsum("bqd,bkd->bqk", q, k) / x.shape[-1] ** 0.5
        return x + torch.einsum("bqk,bkd->bqd", scores.softmax(-1), v)


def convolutional():
    # A bias before a normalisation has a gradient of nothing but rounding.
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten()
    )


def perceptron():
    return nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.GELU(), nn.Dropout(0.3))

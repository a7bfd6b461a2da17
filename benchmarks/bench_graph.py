"""What checking every operator of a graph costs, in processor seconds after import.

Six operators with eight splits, for which nnScaler's own script takes 141.6 s; and a transformer of
one layer against one of many, where only distinct calls should cost time. From reading the file to
writing all results, on one thread.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import torch
from benchmarks.lab.figures import Figure, Report, write
from benchmarks.lab.timing import measured
from torch import nn
from torch.nn import functional

import paritas
from paritas.sharding.graphs.calls import Graph, GraphCall, TensorValue

WIDTH, HEADS, TOKENS, BATCH = 128, 4, 32, 2


class Block(nn.Module):
    """A block of a transformer, before the norm."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        """Attention, then the two layers behind it."""
        parts = self.qkv(self.first(x)).chunk(3, dim=-1)
        q, k, v = (p.unflatten(-1, (HEADS, -1)).transpose(1, 2) for p in parts)
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.down(functional.gelu(self.up(self.second(x))))


def save_transformer(path, layers):
    torch.manual_seed(0)
    model = nn.Sequential(*(Block() for _ in range(layers)))
    program = torch.export.export(model, (torch.randn(BATCH, TOKENS, WIDTH),))
    torch.export.save(program, path)


def toy():
    """Six operators with eight splits."""

    def t(name, *shape, dtype=torch.float32):
        return TensorValue(name, shape, dtype)

    x, w, b = t("x", 4, 8), t("w", 8, 8), t("b", 8)
    index = t("i", 4, 8, dtype=torch.int64)
    calls = [
        ("torch.nn.functional.linear", (x, w, b), {}, "a k^, n k^, n -> a n"),
        ("torch.relu", (t("h", 4, 8),), {}, "a^ b -> a^ b"),
        ("torch.gather", (t("r", 4, 8), 1, index), {}, "a b^, ?, a b^ -> a b^"),
        ("torch.sum", (t("g", 4, 8),), {"dim": 0}, "a+ b -> b"),
        ("torch.sum", (t("s", 8),), {}, "a+ -> 1"),
        ("torch.sum", (t("u", 4, 8),), {}, "a+ b^ -> 1"),
    ]
    return Graph(
        "toy",
        "fx",
        tuple(
            GraphCall(at, f"node_{at}", operator, args, kwargs, annotation=annotation)
            for at, (operator, args, kwargs, annotation) in enumerate(calls)
        ),
    )


def costs(graph, rounds):
    """Processor seconds of the first round and of the quickest, and what was found."""
    reports, spent = [], []
    for _ in range(rounds):
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / "out"
            once = measured(lambda out=out: reports.append(paritas.verify_graph(graph, out)))
            spent.append(once.processor)
    assert reports[0].exit_code == 0, reports[0]
    return spent[0], min(spent), reports[0]


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=3)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    first, least, report = costs(toy(), asked.rounds)
    splits = sum(len(one.options) for one in report.operators)
    told = f"{report.calls} operators, {splits} splits"
    figures = [Figure("six operators, the first time", first, "s", 3.0, note=told)]
    figures.append(Figure("six operators, warm", least, "s"))
    spent = {}
    with tempfile.TemporaryDirectory() as folder:
        for layers in (1, asked.layers):
            path = Path(folder) / f"{layers}.pt2"
            save_transformer(path, layers)
            first, spent[layers], report = costs(path, asked.rounds)
            told = f"{report.calls} calls, {len(report.operators)} distinct"
            name = f"a transformer, layers: {layers}, warm"
            figures.append(Figure(name, spent[layers], "s", note=f"{told}; first {first:.2f} s"))
    ratio = spent[asked.layers] / spent[1]
    figures.append(Figure(f"{asked.layers} layers over 1", ratio, "x", 1.5))
    write(Report("graph", figures, what=__doc__))


if __name__ == "__main__":
    main()

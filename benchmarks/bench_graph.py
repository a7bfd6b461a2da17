"""What checking a graph costs, in CPU seconds after import: by layers, and of six operators."""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional

import paritas
from paritas.graphs.calls import Graph, GraphCall, TensorValue

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


def cost(graph, rounds):
    """Least CPU seconds of several rounds, from the file to all results written."""
    spent = []
    for _ in range(rounds):
        with tempfile.TemporaryDirectory() as folder:
            begin = time.process_time()
            report = paritas.verify_graph(graph, Path(folder) / "out")
            spent.append(time.process_time() - begin)
    return min(spent), spent[0], report


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=3)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    least, first, report = cost(toy(), asked.rounds)
    splits = sum(len(one.options) for one in report.operators)
    told = f"{report.calls} operators, {splits} splits, exit code {report.exit_code}"
    print(f"toy: {told}: {first:.2f} CPU s the first time, {least:.3f} CPU s warm")
    spent = {}
    with tempfile.TemporaryDirectory() as folder:
        for layers in (1, asked.layers):
            path = Path(folder) / f"{layers}.pt2"
            save_transformer(path, layers)
            least, first, report = cost(path, asked.rounds)
            spent[layers] = least
            told = f"{report.calls} calls, {len(report.operators)} distinct"
            print(
                f"{layers:3} layers: {told}, exit code {report.exit_code}: "
                f"{first:.2f} CPU s the first time, {least:.2f} CPU s warm"
            )
    print(f"{asked.layers} layers to 1: {spent[asked.layers] / spent[1]:.2f}x")


if __name__ == "__main__":
    main()

"""Scripts to run under guard."""

from __future__ import annotations

import textwrap
from pathlib import Path

from paritas.core.results.findings import Verdict

# A net of 8 inputs and 4 outputs in float32, seed 0; a fault takes relu for abs.
NET = """
import sys
import torch
from torch import nn


def faulty(graph, example_inputs):
    for node in graph.graph.nodes:
        if node.target is torch.relu:
            node.target = torch.abs
    graph.recompile()
    return graph.forward


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(8, 16)
        self.outer = nn.Linear(16, 4)

    def forward(self, x):
        return self.outer(torch.relu(self.inner(x)))


torch.manual_seed(0)
model = Net()
"""
TRAIN = f"""{NET}
compiled = torch.compile(model, backend=faulty if "--faulty" in sys.argv else "aot_eager")
for step in range(4):
    loss = compiled(torch.randn(32, 8)).square().mean()
    loss.backward()
    print(step, round(loss.item(), 6))
if "--fail" in sys.argv:
    raise ValueError("no more data")
"""


def write(name, text):
    Path(name).write_text(textwrap.dedent(text), encoding="utf-8")


def verdict_in(name):
    return Verdict.from_json(Path(name).read_bytes())

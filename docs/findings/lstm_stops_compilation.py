"""Once a compiled nn.LSTM has run, other modules compile to nothing (torch 2.13.0)."""

import sys

import torch
from torch import nn


def graphs_of(model, inputs):
    graphs = []

    def backend(module, _):
        graphs.append(module)
        return module.forward

    torch.compile(model, backend=backend)(inputs)
    return len(graphs)


x = torch.randn(2, 3, 4)
before = graphs_of(nn.Sequential(nn.Linear(4, 4), nn.ReLU()), x)
lstm = graphs_of(nn.LSTM(4, 4), x)
after = graphs_of(nn.Sequential(nn.Linear(4, 4), nn.ReLU()), x)
linear = graphs_of(nn.Linear(4, 4), x)
print(
    f"graphs compiled: Sequential {before}, LSTM {lstm}, then Sequential {after}, Linear {linear}"
)
sys.exit(before > 0 and after == 0)

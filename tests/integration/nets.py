"""Models and functions that `test_cli.py` names on the command line, in a folder of its own."""

from __future__ import annotations

import signal

import torch
from torch import nn

from paritas import Inputs


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a_layer_with_a_long_name = nn.Linear(8, 8)
        self.dropout = nn.Dropout(0.5)

    def forward(self, x):
        y = nn.functional.gelu(self.dropout(self.a_layer_with_a_long_name(x)))
        return {"y": y, "mode": self.training, "dtype": str(y.dtype)}


class Failing(nn.Module):
    def forward(self, x):
        raise ValueError("no such thing")


class Interrupted(nn.Module):
    def forward(self, x):
        signal.raise_signal(signal.SIGINT)
        return x


class Tied(nn.Module):
    def forward(self, x):
        return (x * 0).argmax(-1)


def build():
    return Net(), [torch.randn(4, 8)]


def model():
    return Net()


def sets():
    return [Inputs((torch.randn(3, 8),)), Inputs(kwargs={"x": torch.randn(5, 8)})]


def failing():
    return Failing(), [torch.ones(2)]


def interrupted():
    return Interrupted(), [torch.ones(2)]


def tied():
    return Tied(), [torch.ones(2, 3)]


def bare_tensor():
    return Net(), torch.ones(2, 8)


def raising():
    raise OSError("no weights")


def unchanged(model):
    return model


def scaled_in_place(model):
    with torch.no_grad():
        model.a_layer_with_a_long_name.weight.mul_(1.001)
    return model


def last_index(model):
    return lambda x: model(x) + 2


def nothing(model):
    return None

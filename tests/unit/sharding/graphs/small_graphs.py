"""Graphs of a few calls, written by hand."""

from __future__ import annotations

import torch

from paritas.sharding.graphs.calls import Graph, GraphCall, TensorValue

RIGHT = "m k+, n k+, n : !k -> m n"
# The bias is added on each rank that has a term.
WRONG = "m k+, n k+, n -> m n"


def value(name, *shape, dtype=torch.float32):
    return TensorValue(name, shape, dtype)


def linear(position, annotation=RIGHT, width=8):
    return GraphCall(
        position,
        f"linear_{position}",
        "torch.nn.functional.linear",
        (
            value(f"x{position}", 4, width),
            value(f"w{position}", 6, width),
            value(f"b{position}", 6),
        ),
        {},
        (value(f"y{position}", 4, 6),),
        annotation=annotation,
        source=f"model.py:{10 + position}",
        code="return self.proj(x)",
        module="layers.0.proj",
    )


def relu(position, operator="torch.relu", function=None):
    return GraphCall(
        position,
        f"relu_{position}",
        operator,
        (value(f"y{position}", 4, 6),),
        {},
        (value(f"z{position}", 4, 6),),
        annotation="a b -> a b",
        source=f"model.py:{10 + position}",
        function=function,
    )


def idle(position):
    return GraphCall(position, f"item_{position}", "operator.getitem", idle="unpacks a tuple")


def graph(*calls, name="toy"):
    return Graph(name, "fx", calls)

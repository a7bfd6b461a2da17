"""A program as one flat graph of operator calls, as torch's own tracer writes it down."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.graph import CodeGen

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch.fx import GraphModule


def trace_calls(function: Callable[..., Any], inputs: Sequence[Any]) -> GraphModule:
    """Run `function` on flat `inputs` and keep every aten call it makes, gradients included.

    The graph has one placeholder for each input and gives what the function gave, as a flat tuple.
    Tensors that the function holds by itself become attributes of the module.
    """
    # The tracer runs the function for real: what it does depends on values as it always does.
    module: GraphModule = make_fx(
        function, tracing_mode="real", _error_on_data_dependent_ops=False
    )(*inputs)
    module.graph.set_codegen(CodeGen())
    for node in module.graph.find_nodes(op="output"):
        (results,) = node.args
        node.args = (tuple(torch.utils._pytree.tree_leaves(results)),)
    module.recompile()
    return module

"""Faults of Inductor inside whole models: what shrinking has to bring down to a few calls.

Each is planted in the compiler (or is there in torch 2.13 of itself), shows in a model of 50 to 400
operator calls, and is of one role: an output, a gradient, or an input that is written to.
"""

# ruff: noqa: TID251  (a fault in a compiler is planted in its private parts)

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import fx

from quality import shrink_models as models
from quality.guard_faults import FAULTS as KNOWN
from quality.guard_faults import replace, setting, wrong_pass

aten = torch.ops.aten
Plant = Callable[[], AbstractContextManager[Any]]


@dataclasses.dataclass(frozen=True, slots=True)
class ShrinkFault:
    """A fault, and the model in which it shows.

    Attributes:
        plant: the name in `PLANTS` of how the compiler is made wrong.
        make: the model and its inputs; called after a seed was set.
        role: output, gradient or mutation.
        training: whether gradients are asked for; the model is in training mode then.
        fusion: whether it takes several operators in one kernel.
        nonfinite: whether NaN or infinity is what differs.
        dynamic: of `torch.compile`.
    """

    plant: str
    make: Callable[[], models.Made]
    role: str = "output"
    training: bool = False
    fusion: bool = False
    nonfinite: bool = False
    dynamic: bool | None = None

    @property
    def most_calls(self) -> int:
        """So many operator calls may be left."""
        return 5 if self.fusion else 3

    def model(self, seed: int = 0) -> models.Made:
        """The model in the mode in which it fails, and what to call it with."""
        torch.manual_seed(seed)
        model, inputs = self.make()
        return model.train(self.training), inputs


# --- ways to plant --------------------------------------------------------------------------------


def one_percent_off(name: str, *, beside: str | None = None) -> Plant:
    """Let the C++ of an operation give 1.01 of what it should.

    Args:
        beside: only in kernels that have this operation before it.
    """

    @contextlib.contextmanager
    def plant() -> Iterator[None]:
        from torch._inductor.codegen.cpp import CppOverrides, CppVecOverrides
        from torch._inductor.virtualized import V

        kernels: list[Any] = []

        def noted(right: Callable[[Any], str]) -> Callable[[Any], str]:
            def write(x: Any) -> str:
                kernels.append(V.kernel)
                return right(x)

            return write

        def spoiled(right: Callable[[Any], str]) -> Callable[[Any], str]:
            def write(x: Any) -> str:
                if beside is not None and not any(kernel is V.kernel for kernel in kernels):
                    return right(x)
                # Of the operand's own type: a bare number would turn a vector into a scalar.
                return f"({right(x)}) * decltype({x})(1.01)"

            return write

        ways = {name: spoiled, **({} if beside is None else {beside: noted})}
        with contextlib.ExitStack() as stack:
            for generator in (CppOverrides, CppVecOverrides):
                for operation, way in ways.items():
                    changed = way(getattr(generator, operation))
                    # Inductor finds the scalar form of an operation by the name of the other.
                    changed.__name__ = operation
                    patch = mock.patch.object(generator, operation, staticmethod(changed))
                    stack.enter_context(patch)
            yield

    return plant


def in_backward(change: Callable[[fx.Graph], None]) -> Callable[[fx.Graph], None]:
    """A change of backward graphs, which alone have tangents among their inputs."""

    def changed(graph: fx.Graph) -> None:
        names = [node.name for node in graph.find_nodes(op="placeholder")]
        if any(name.startswith("tangents") for name in names):
            change(graph)

    return changed


PLANTS: dict[str, Plant] = {name: fault.plant for name, fault in KNOWN.items()} | {
    "erf_off": one_percent_off("erf"),
    "tanh_off": one_percent_off("tanh"),
    "rsqrt_off": one_percent_off("rsqrt"),
    "sigmoid_off": one_percent_off("sigmoid"),
    "maximum_becomes_minimum": wrong_pass(
        "joint_custom_post_pass", replace(aten.maximum.default, aten.minimum.default)
    ),
    "mask_of_relu_lets_zeros_pass": wrong_pass(
        "post_grad_custom_post_pass", in_backward(replace(aten.le.Scalar, aten.lt.Scalar))
    ),
    "tanh_off_beside_log1p": one_percent_off("tanh", beside="log1p"),
    "sqrt_off_beside_abs": one_percent_off("sqrt", beside="abs"),
    "sin_off_beside_cos": one_percent_off("sin", beside="cos"),
    "log1p_off": setting("cpp.inject_log1p_bug_TESTING_ONLY", "accuracy"),
}


# --- the table ------------------------------------------------------------------------------------

FAULTS: dict[str, ShrinkFault] = {
    # Forward: one operator is lowered or rewritten wrongly.
    "relu_in_residual_net": ShrinkFault("relu_codegen", models.residual_net),
    "gelu_in_transformer": ShrinkFault("erf_off", models.transformer),
    "layer_norm_in_transformer": ShrinkFault("rsqrt_off", models.transformer),
    "tanh_in_lstm": ShrinkFault("tanh_off", models.lstm),
    "sigmoid_in_lstm_of_dynamic_sizes": ShrinkFault("sigmoid_off", models.lstm, dynamic=True),
    "softplus_in_experts": ShrinkFault("log1p_off", models.experts),
    "pass_before_autograd_in_rotary": ShrinkFault("pre_grad_pass", models.rotary),
    "joint_pass_in_training_experts": ShrinkFault(
        "maximum_becomes_minimum", models.experts, training=True
    ),
    "nan_folded_away_in_experts": ShrinkFault(
        "nan_times_zero", partial(models.experts, entropy=0), nonfinite=True
    ),
    # Backward: outputs are right, gradients are not.
    "gelu_in_training_transformer": ShrinkFault(
        "exp_slightly_wrong_in_backward", models.transformer, role="gradient", training=True
    ),
    "sine_in_training_waves": ShrinkFault(
        "post_grad_pass_in_backward", models.waves, role="gradient", training=True
    ),
    "relu_in_training_residual_net": ShrinkFault(
        "mask_of_relu_lets_zeros_pass", models.residual_net, role="gradient", training=True
    ),
    # Mutation: what is written to an input is not there.
    "cache_of_decoder": ShrinkFault("mutation_left_out", models.cached_decoder, role="mutation"),
    "statistics_of_batch_norm": ShrinkFault(
        "mutation_left_out", models.residual_net, role="mutation", training=True
    ),
    # Fusion: each operator by itself is right.
    "exp_beside_tanh_in_lstm": ShrinkFault(
        "exp_wrong_when_fused_with_tanh", partial(models.lstm, exponential=True), fusion=True
    ),
    "mish_in_residual_net": ShrinkFault(
        "tanh_off_beside_log1p", partial(models.residual_net, models.mish), fusion=True
    ),
    "root_pool_of_residual_net": ShrinkFault(
        "sqrt_off_beside_abs",
        partial(models.residual_net, pool=models.root_pool),
        fusion=True,
    ),
    "sin_beside_cos_in_rotary": ShrinkFault("sin_off_beside_cos", models.rotary, fusion=True),
}

# A fault of torch 2.13 itself that takes more operators together than a fusion is allowed above.
STUBBORN: dict[str, ShrinkFault] = {
    "pooled_convolution_in_training": ShrinkFault(
        "gradients_of_pooled_convolution",
        models.upsampling_net,
        role="gradient",
        training=True,
        fusion=True,
    ),
}

"""Operators that check nothing: a wrong argument ends a process, but not the user's."""

from __future__ import annotations

import os
import sys
import threading
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor

import paritas
from drawing import normal
from paritas.core.diagnosis import diagnose as diagnosing
from paritas.core.diagnosis.calls import Step
from paritas.core.diagnosis.diagnose import diagnose
from paritas.core.diagnosis.patterns.variations import argument_variations
from paritas.core.execution import scouting
from paritas.core.judging.failures import call_context
from paritas.core.results.findings import Status
from paritas.core.torch_private.operators import bind_arguments

if TYPE_CHECKING:
    from collections.abc import Callable

    from paritas.core.results.findings import Diagnosis

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="scouts are forked on Linux only")
aten = torch.ops.aten


X, WEIGHT = normal(6, 8), normal(8, 8, seed=1)
# What the operator below does with arguments that it was not written for.
_ends: list[Callable[[], Any]] = [os.abort]


def _is_near(value: Tensor, right: Tensor) -> bool:
    """Whether it is the program's own value, which is also perturbed to measure noise."""
    return value.shape == right.shape and bool(((value - right).abs() < 0.1).all())


@torch.library.custom_op("paritas_fragile::scaled", mutates_args=())
def fragile(x: Tensor, weight: Tensor, factor: float, transposed: bool) -> Tensor:
    is_own = factor == 0.5 and not transposed and _is_near(weight, WEIGHT)
    if not is_own:
        _ends[-1]()
    return factor * (x @ weight)


@fragile.register_fake
def _(x: Tensor, weight: Tensor, factor: float, transposed: bool) -> Tensor:
    return x @ weight


def program(x: Tensor) -> Tensor:
    return torch.relu(fragile(x.sin(), WEIGHT, 0.5, transposed=False))


def wrong(x: Tensor, weight: Tensor, factor: float, transposed: bool) -> Tensor:
    return factor * (x @ weight) * (1 + 0.3 * normal(6, 8, seed=9))


def spoiling(module: torch.fx.GraphModule, _: Any) -> Callable[..., Any]:
    for node in module.graph.nodes:
        if "fragile" in str(node.target):
            node.target = wrong
    module.recompile()
    return module.forward


def diagnosed(candidate: Tensor, target: Any, *args: Any, output: int = 0) -> Diagnosis:
    right = target(*args)
    right = right if isinstance(right, Tensor) else right[output]
    return diagnose(candidate, right, context=call_context(target, args, {}))


def noisy(right: Tensor) -> Tensor:
    return right + 0.01 * normal(*right.shape, seed=9)


def test_verify_returns_its_verdict_if_every_other_argument_ends_the_process() -> None:
    config = paritas.VerifyConfig(
        raise_on_mismatch=False, verify_gradients=False, locate_seconds=600
    )
    verdict = paritas.verify([X], program, torch.compile(program, backend=spoiling), config)
    assert verdict.status is Status.DIFFERENT
    failure = verdict.failures[0]
    assert failure.path == "graph 0: node scaled_default"
    assert failure.diagnosis is not None
    assert failure.diagnosis.sentence == (
        "everywhere (100 % of the elements); not all mistakes could be tried: the process that "
        "tries them ended 8 times (Aborted)"
    )


@torch.library.custom_op("paritas_fragile::flagged", mutates_args=())
def flagged(x: Tensor, causal: bool, weight: Tensor) -> Tensor:
    if causal or x.shape != X.shape:
        os.abort()
    return x @ weight


def test_mistakes_that_do_not_end_the_process_are_still_stated() -> None:
    found = diagnosed(X @ WEIGHT.mT, flagged._opoverload, X, False, WEIGHT)
    assert found.best is not None
    assert found.best.sentence == "weight is transposed"
    assert found.note == ""


def test_a_kernel_that_hangs_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scouting, "MOST_SILENT", 0.05)
    monkeypatch.setattr(scouting, "MOST_LOST", 2)
    _ends.append(lambda: threading.Event().wait())
    try:
        right = fragile(X, WEIGHT, 0.5, transposed=False)
        found = diagnosed(noisy(right), fragile._opoverload, X, WEIGHT, 0.5, False)
    finally:
        _ends.pop()
    assert found.best is None
    assert found.note.endswith("ended 2 times (it hung)")


# --- Kernels of attention ------------------------------------------------------------------------

flash = aten._scaled_dot_product_flash_attention_for_cpu.default
flash_backward = aten._scaled_dot_product_flash_attention_for_cpu_backward.default
QUERY, KEY, VALUE, GRADIENT = (normal(1, 4, 6, 8, seed=seed) for seed in range(4))


def test_fewer_heads_of_keys_than_of_queries_end_no_process_of_the_user() -> None:
    # With queries and keys swapped, this kernel ends the process.
    found = diagnosed(
        noisy(flash(QUERY, KEY[:, :2], VALUE[:, :2])[0]), flash, QUERY, KEY[:, :2], VALUE[:, :2]
    )
    assert found.best is None


def test_a_mistake_in_the_backward_kernel_of_attention_is_named() -> None:
    saved = flash(QUERY, KEY, VALUE)[:2]
    given = (GRADIENT, QUERY, KEY, VALUE, *saved, 0.0, False)
    wrong = flash_backward(*given, scale=0.5)[0]
    found = diagnosed(wrong, flash_backward, *given)
    assert found.best is not None
    assert found.best.sentence == "scale is 0.5 instead of 0.3535534"


# --- Where no process can be forked ---------------------------------------------------------------


def test_without_a_process_of_its_own_a_kernel_gets_arguments_of_the_same_kind_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(diagnosing, "run_apart", None)  # nobody calls it
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    short = KEY[:, :2], VALUE[:, :2]
    assert diagnosed(noisy(flash(QUERY, *short)[0]), flash, QUERY, *short).best is None
    given = (GRADIENT, QUERY, KEY, VALUE, *flash(QUERY, KEY, VALUE)[:2], 0.0, False)
    assert diagnosed(noisy(GRADIENT), flash_backward, *given).best is None


def test_indices_beside_a_mask_stay_within_the_bounds_of_their_own_axis() -> None:
    mask, index = torch.ones(2, 9, dtype=torch.bool), torch.full((18,), 3)
    step = Step(aten.index.Tensor, {"self": normal(2, 9, 4), "indices": [mask, index]})
    for variation in argument_variations(step):
        assert variation.change(step).shape == (18,)


def test_a_flag_of_a_kernel_that_checks_nothing_is_changed_in_another_process_only() -> None:
    """On some machines, the gradient of a transposed convolution reads beyond its memory."""
    kernel = torch.ops.aten.convolution_backward.default
    image, weight = torch.randn(2, 3, 8, 8), torch.randn(4, 3, 3, 3)
    gradient = torch.randn(2, 4, 6, 6)
    pairs = [[1, 1], [0, 0], [1, 1]]
    args = (gradient, image, weight, [4], *pairs, False, [0, 0], 1, [True, True, True])
    step = Step(kernel, bind_arguments(kernel, args, {}))
    with pytest.raises(ValueError, match="does not check its transposed"):
        step.run(transposed=True)
    assert len(step.run(transposed=False)) == 3


def test_a_step_of_nothing_is_not_tried() -> None:
    """Torch divides by it before it looks at it, which ends the process on x86."""
    operator = torch.ops.aten.arange.start_step
    step = Step(operator, bind_arguments(operator, (0, 6, 2), {}))
    assert step.run(step=3).tolist() == [0, 3]
    with pytest.raises(ValueError, match="divides by a step"):
        step.run(step=0)

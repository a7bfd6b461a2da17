"""The table of programs on which guard is judged, and what they are written with.

A program takes a backend of `torch.compile`, runs from beginning to end under it and gives back
what it computed; without a backend it runs eagerly.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

Program = Callable[[Any], Any]
PROGRAMS: dict[str, Program] = {}


def program(function: Program) -> Program:
    """Enter a program into the table under its own name."""
    PROGRAMS[function.__name__] = function
    return function


def run(program: Program, backend: Any) -> Any:
    """What a program computes under a backend, from a state that no earlier program left behind."""
    torch.compiler.reset()
    torch.manual_seed(0)
    return program(backend)


def under(backend: Any, function: Any, **options: Any) -> Any:
    """The function compiled by a backend; without one, the function itself."""
    return function if backend is None else torch.compile(function, backend=backend, **options)


@contextlib.contextmanager
def inductor_settings(**settings: Any) -> Iterator[None]:
    """Settings of Inductor while a program is compiled and run."""
    import torch._inductor.config  # noqa: TID251  (a setting of the compiler under test)

    with torch._inductor.config.patch(settings):  # noqa: TID251
        yield


@torch.compiler.disable
def outside(x: Tensor) -> Tensor:
    """Nothing, but not in a graph: whatever calls this is compiled in two parts."""
    return x + 0


def mlp(width: int = 16) -> nn.Sequential:
    return nn.Sequential(nn.Linear(width, 32), nn.GELU(), nn.LayerNorm(32), nn.Linear(32, 8))


def gradients(model: nn.Module) -> list[Tensor]:
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


# --- comparing what programs computed -------------------------------------------------------------

# What a correct compiler may be off by, in the norm of a whole tensor, where this dtype is used.
ALLOWED = {torch.bfloat16: 0.1, torch.float16: 0.02, torch.float64: 1e-12}
ALLOWED_ELSE = 1e-5


def leaves(value: Any) -> list[Any]:
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list | tuple):
        return [leaf for item in value for leaf in leaves(item)]
    return [value]


def disagreements(expected: Any, actual: Any) -> list[str]:
    """In words, where two results differ by more than rounding can explain, judged coarsely."""
    pairs = list(zip(leaves(expected), leaves(actual), strict=True))
    dtypes = {value.dtype for value, _ in pairs if isinstance(value, Tensor)}
    allowed = max((ALLOWED.get(dtype, ALLOWED_ELSE) for dtype in dtypes), default=0.0)
    found = []
    for number, (left, right) in enumerate(pairs):
        if not isinstance(left, Tensor):
            if left != right:
                found.append(f"{number}: {right!r} instead of {left!r}")
        elif (error := relative_error(left, right)) > allowed:
            found.append(f"{number}: off by {error:.3g} of its norm; {allowed:.3g} allowed")
    return found


def relative_error(expected: Tensor, actual: Tensor) -> float:
    """The error's norm over the expected norm; infinite where kind, NaN or infinities differ."""
    if expected.dtype != actual.dtype or expected.shape != actual.shape:
        return torch.inf
    wide = torch.complex128 if expected.is_complex() else torch.float64
    left, right = (value.detach().to(wide) for value in (expected, actual))
    finite = left.isfinite()
    if not torch.equal(finite, right.isfinite()):
        return torch.inf
    if not torch.equal(left[~finite].nan_to_num(), right[~finite].nan_to_num()):
        return torch.inf
    left, right = left[finite], right[finite]
    return float((left - right).norm() / left.norm().clamp_min(1e-30))

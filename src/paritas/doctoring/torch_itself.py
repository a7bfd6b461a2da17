"""What torch says of itself: version, devices, and whether it can compile."""

from __future__ import annotations

import importlib.util
import re
import time
from typing import TYPE_CHECKING, Any

import torch

from paritas.doctoring.checks import FAILED, MISSING, OK, Check, looked_at
from paritas.doctoring.expecting import expect

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["NEWEST", "OLDEST", "compiling", "devices", "versions"]

GROUP = "torch"
# What the tests run with.
OLDEST, NEWEST = (2, 11), (2, 13)
_GIB = 1024**3


def versions() -> Iterator[Check]:
    """Torch's, and triton's, which it compiles with on a GPU."""
    yield looked_at(GROUP, "torch", _torch, f"install torch {_span()}")
    yield looked_at(GROUP, "triton", _triton, "reinstall triton, or remove it")


def _span() -> str:
    return f"{'.'.join(map(str, OLDEST))} to {'.'.join(map(str, NEWEST))}"


def _torch() -> Check:
    found = str(torch.__version__)
    numbers = re.match(r"(\d+)\.(\d+)", found)
    if numbers is None:
        advice = f"paritas is tested with torch {_span()}: look at the hooks below"
        return Check(GROUP, "torch", OK, f"{found}, a version of its own", advice)
    version = int(numbers[1]), int(numbers[2])
    if version < OLDEST:
        advice = f"paritas needs torch {_span()}"
        return Check(GROUP, "torch", FAILED, f"{found} is too old", advice)
    if version > NEWEST:
        advice = f"paritas is tested with torch {_span()}: look at the hooks below"
        return Check(GROUP, "torch", OK, f"{found}, newer than any tested", advice)
    return Check(GROUP, "torch", OK, found)


def _triton() -> Check:
    if importlib.util.find_spec("triton") is None:
        advice = "only compiling for a GPU needs it" if _accelerator() else ""
        return Check(GROUP, "triton", MISSING, "not installed", advice)
    triton: Any = importlib.import_module("triton")
    return Check(GROUP, "triton", OK, str(triton.__version__))


def devices() -> Iterator[Check]:
    """What there is besides the CPU."""
    yield looked_at(
        GROUP, "accelerator", _devices, "the driver does not answer: see torch.cuda.init()"
    )


def _accelerator() -> bool:
    return bool(torch.accelerator.is_available())


def _devices() -> Check:
    if not _accelerator():
        return Check(GROUP, "accelerator", MISSING, "none: everything runs on the CPU")
    kind = torch.accelerator.current_accelerator()
    count = torch.accelerator.device_count()
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else ""
    # A device that is listed need not answer.
    expect("a sum on it", float(torch.ones(4, device=kind).sum()), 4.0)
    found = f"{count} of {kind.type}" if kind is not None else str(count)
    return Check(GROUP, "accelerator", OK, f"{found}: {name}" if name else found)


def compiling(*, has_compiler: bool) -> Iterator[Check]:
    """Whether inductor makes code for the CPU that runs: of a function nobody has compiled yet."""
    if not has_compiler:
        found = "there is no C++ compiler"
        advice = "the self-test below uses aot_eager, which compiles nothing"
        yield Check(GROUP, "torch.compile", MISSING, found, advice)
        return
    yield looked_at(
        GROUP, "torch.compile", _compile, "see the last lines of what it says with TORCH_LOGS"
    )


def _compile() -> Check:
    # A constant of its own, so that no cache has the code.
    constant = 1 + (time.time_ns() % 10**9) / 10**10
    began = time.monotonic()

    def function(x: torch.Tensor) -> torch.Tensor:
        return torch.sin(x) * constant

    x = torch.linspace(-1, 1, 64)
    torch.compiler.reset()
    result = torch.compile(function, backend="inductor")(x)
    torch.compiler.reset()
    expect("what compiled code gives", bool(torch.allclose(result, function(x))))
    took = time.monotonic() - began
    return Check(GROUP, "torch.compile", OK, f"compiled and ran a function in {took:.1f} s")

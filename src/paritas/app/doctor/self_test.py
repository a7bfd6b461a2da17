"""Does torch behave as expected, and does paritas find known faults?"""

from __future__ import annotations

import functools
import importlib.util
import re
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from paritas.app.doctor.examination import FAILED, MISSING, OK, Check, run_check
from paritas.core.results.findings import Status
from paritas.core.torch_private.global_state import quietly

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from paritas.app.doctor.examination import Found
    from paritas.core.results.findings import Verdict


# --- Expectations ---------------------------------------------------------------------------------


class UnexpectedAnswerError(AssertionError):
    """Torch behaves differently than paritas expects."""


def expect(what: str, actual: Any, wanted: Any = True) -> None:  # noqa: FBT002  (a value)
    """Raise `UnexpectedAnswerError` unless the value is the expected one."""
    if actual != wanted:
        raise UnexpectedAnswerError(f"{what}: {actual!r:.120}, expected {wanted!r:.120}")


# --- Torch itself: version, devices, whether it can compile ---------------------------------------

TORCH_GROUP = "torch"
# The versions that the tests run with.
OLDEST, NEWEST = (2, 11), (2, 13)


def torch_versions() -> Iterator[Check]:
    """The versions of torch and of triton, its compiler for GPUs."""
    yield run_check(TORCH_GROUP, "torch", _torch_version, f"install torch {_tested_versions()}")
    yield run_check(TORCH_GROUP, "triton", _triton_version, "reinstall triton, or remove it")


def _tested_versions() -> str:
    return f"{'.'.join(map(str, OLDEST))} to {'.'.join(map(str, NEWEST))}"


def _torch_version() -> Found:
    torch_version = str(torch.__version__)
    advice = f"paritas is tested with torch {_tested_versions()}: see the hooks below"
    numbers = re.match(r"(\d+)\.(\d+)", torch_version)
    if numbers is None:
        return OK, f"{torch_version}, an unknown version", advice
    version = int(numbers[1]), int(numbers[2])
    if version < OLDEST:
        return FAILED, f"{torch_version} is too old", f"paritas needs torch {_tested_versions()}"
    if version > NEWEST:
        return OK, f"{torch_version}, newer than any tested version", advice
    return torch_version


def _triton_version() -> Found:
    if importlib.util.find_spec("triton") is None:
        advice = "only compiling for a GPU needs it" if _accelerator() else ""
        return MISSING, "not installed", advice
    triton: Any = importlib.import_module("triton")
    return str(triton.__version__)


def devices() -> Iterator[Check]:
    """Devices other than the CPU."""
    advice = "the driver does not respond: see torch.cuda.init()"
    yield run_check(TORCH_GROUP, "accelerator", _count_devices, advice)


def _accelerator() -> bool:
    return bool(torch.accelerator.is_available())


def _count_devices() -> Found:
    if not _accelerator():
        return MISSING, "none: everything runs on the CPU", ""
    kind = torch.accelerator.current_accelerator()
    count = torch.accelerator.device_count()
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else ""
    # A device that is listed may still not work.
    expect("a sum on it", float(torch.ones(4, device=kind).sum()), 4.0)
    count_text = f"{count} of {kind.type}" if kind is not None else str(count)
    return f"{count_text}: {name}" if name else count_text


def compiling(*, has_compiler: bool) -> Iterator[Check]:
    """Whether inductor can compile a function for the CPU."""
    if not has_compiler:
        advice = "the self-test below uses aot_eager, which compiles nothing"
        yield Check(TORCH_GROUP, "torch.compile", MISSING, "there is no C++ compiler", advice)
        return
    advice = "set TORCH_LOGS and see the last lines of its output"
    yield run_check(TORCH_GROUP, "torch.compile", _try_compiling, advice)


def _try_compiling() -> Found:
    # A unique constant, so the code is in no cache.
    constant = 1 + (time.time_ns() % 10**9) / 10**10
    began = time.monotonic()

    def function(x: torch.Tensor) -> torch.Tensor:
        return torch.sin(x) * constant

    x = torch.linspace(-1, 1, 64)
    torch.compiler.reset()
    result = torch.compile(function, backend="inductor")(x)
    torch.compiler.reset()
    expect("whether compiled code is right", bool(torch.allclose(result, function(x))))
    return f"compiled and ran a function in {time.monotonic() - began:.1f} s"


# --- The self-test: small cases with known results ------------------------------------------------

SELF_TEST_GROUP = "self-test"
ADVICE = "do not trust verdicts of this installation; report this with paritas doctor --json"


def run_self_test(backend: str) -> Iterator[Check]:
    """Run every step; one that fails does not stop the others."""
    for name, step in STEPS.items():
        look = functools.partial(_run_step, step, backend)
        yield run_check(SELF_TEST_GROUP, name, look, ADVICE)


def _run_step(step: Callable[[str], str], backend: str) -> str:
    torch.manual_seed(0)
    try:
        with quietly():
            return step(backend)
    finally:
        torch.compiler.reset()


def _model() -> tuple[nn.Module, torch.Tensor]:
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh()).requires_grad_(requires_grad=False).eval()
    return model, torch.randn(4, 8)


def _describe_verdict(verdict: Verdict) -> str:
    return f"{verdict.status}, {verdict.coverage.compared} compared"


def right_candidate(backend: str) -> str:
    """A compiled model passes."""
    from paritas.verification import verify

    model, x = _model()
    verdict = verify.verify([x], model, torch.compile(model, backend=backend), _quiet_config())
    expect(f"whether a right candidate passes ({verdict})", verdict.passed)
    return f"{_describe_verdict(verdict)} (backend {backend})"


def wrong_candidate(_backend: str) -> str:
    """A candidate that is off by a thousandth fails."""
    from paritas.verification import verify

    model, x = _model()
    verdict = verify.verify([x], model, lambda x: model(x) * 1.001, _quiet_config())
    expect("the status of a wrong candidate", verdict.status, Status.DIFFERENT)
    return f"{_describe_verdict(verdict)}, as expected"


def _quiet_config() -> Any:
    from paritas.core.execution.subjects import VerifyConfig

    return VerifyConfig(raise_on_mismatch=False, locate_seconds=0)


def guarded_graph(_backend: str) -> str:
    """A correct graph passes its guard, and a wrong one fails."""
    from paritas.core.compiled.guard import guard

    model, x = _model()
    right = guard("aot_eager", on_mismatch="record")
    torch.compile(model, backend=right)(x)
    expect(f"whether a right graph passes ({right.verdict()})", right.verdict().passed)

    def spoiling(graph: Any, _inputs: Any) -> Any:
        return lambda *args: tuple(value * 1.001 for value in graph(*args))

    torch.compiler.reset()
    wrong = guard(spoiling, on_mismatch="record")
    torch.compile(model, backend=wrong)(x)
    expect("the status of a wrong graph", wrong.verdict().status, Status.DIFFERENT)
    return f"{_describe_verdict(right.verdict())}; a wrong one is {wrong.verdict().status}"


def dumps(_backend: str) -> str:
    """Recorded dumps can be read and compared."""
    from paritas.comparison.compare import compare
    from paritas.recording.capture import capture

    model, x = _model()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        places = [Path(folder) / name for name in ("golden", "same", "other")]
        for position in places:
            if position.name == "other":
                model[0].weight.mul_(1.001)  # type: ignore[index]
            with capture(position):
                model(x)
        golden, same, other = places
        right, wrong = compare(same, golden), compare(other, golden)
    expect("the status of two equal dumps", right.status, Status.IDENTICAL)
    expect("the status of a dump that differs", wrong.status, Status.DIFFERENT)
    return f"{right.status}, {len(right.rows)} rows; a wrong one is {wrong.status}"


def partition(_backend: str) -> str:
    """A right split passes, and a wrong one fails."""
    from paritas.partition import PartitionConfig, TensorInfo, check_partition

    def split(operator: str, **kwargs: int) -> Status:
        shapes, option = [TensorInfo("shape", (4, 8))], {"idx": 0, "dim": 1}
        config = PartitionConfig(operator, shapes, kwargs, 1, [option])
        return check_partition(config, annotation="a b -> a b").status

    right, wrong = split("torch.relu"), split("torch.softmax", dim=1)
    expect("whether a right split passes", right.passes())
    expect("the status of a wrong split", wrong, Status.DIFFERENT)
    return f"{right}; a wrong one is {wrong}"


STEPS = {
    "right candidate": right_candidate,
    "wrong candidate": wrong_candidate,
    "guarded graph": guarded_graph,
    "dumps": dumps,
    "partition": partition,
}

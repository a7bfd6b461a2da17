"""Callers that a kernel meets in programs: it must compute the same for all of them.

A judge calls kernels one by one, in the main thread, without modes. Programs call them in inference
mode, below autocast, in threads of a server, on a stream of their own, from compiled code, and for
the thousandth time.
"""

from __future__ import annotations

import contextlib
import threading
import time
from typing import TYPE_CHECKING, Any

import torch

from paritas.checks.comparer import CollectedFindings
from paritas.results.findings import Aspect, Status

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from paritas.execution.observation import Observation

INFERENCE, AUTOCAST, THREAD = "in inference mode", "below autocast", "in another thread"
STREAM, REPEATED, COMPILED = "on another stream", "after many calls", "from compiled code"
_MOST_REPEATS, _MOST_SECONDS = 300, 0.25
# Bound before a candidate can replace them.
_wait_for_device = torch.accelerator.synchronize
_stream_of, _set_stream = torch.accelerator.current_stream, torch.accelerator.set_stream


def callers_on(device: str, *, is_compiled: bool, keeps_state: bool) -> list[str]:
    """The callers to try; a kernel that keeps values from call to call is not called many times."""
    found = [INFERENCE, AUTOCAST, THREAD]
    found += [] if device.startswith("cpu") else [STREAM]
    found += [] if keeps_state else [REPEATED]
    return [*found, COMPILED] if is_compiled else found


# --- In the candidate's process -------------------------------------------------------------------


@contextlib.contextmanager
def stream_of(caller: str, device: str) -> Iterator[None]:
    """Make everything in this block on the caller's stream."""
    if caller != STREAM:
        yield
        return
    _wait_for_device(device)
    before = _stream_of(torch.device(device))
    _set_stream(torch.Stream(device=device))
    try:
        yield
    finally:
        _wait_for_device(device)
        _set_stream(before)


@contextlib.contextmanager
def modes_of(caller: str, device: str) -> Iterator[None]:
    """The modes of torch that a caller has set."""
    with contextlib.ExitStack() as stack:
        if caller == INFERENCE:
            stack.enter_context(torch.inference_mode())
        elif caller == AUTOCAST:
            stack.enter_context(torch.autocast(torch.device(device).type, torch.bfloat16))
        yield


def called_by(caller: str, call: Callable[..., Any]) -> Callable[..., Any]:
    """The same call, as the caller makes it."""
    if caller == THREAD:
        return lambda *args, **kwargs: _in_thread(call, args, kwargs)
    if caller == COMPILED:

        def program(*args: Any, **kwargs: Any) -> Any:
            return call(*args, **kwargs)

        return torch.compile(program, backend="eager")  # type: ignore[no-any-return]
    return call


def _in_thread(call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    is_recording = torch.is_grad_enabled()  # each thread has its own
    found: dict[str, Any] = {}

    def run() -> None:
        try:
            with torch.set_grad_enabled(is_recording):
                found["result"] = call(*args, **kwargs)
        except (Exception, SystemExit) as error:  # noqa: BLE001  (raised again below)
            found["error"] = error

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if "error" in found:
        raise found["error"]
    return found["result"]


def call_often(call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Call it again and again, for a while; what it raises, it raises in the next call, too."""
    until = time.perf_counter() + _MOST_SECONDS
    with contextlib.suppress(Exception), torch.no_grad():
        for _ in range(_MOST_REPEATS):
            call(*args, **kwargs)
            if time.perf_counter() > until:
                break


# --- In the judge ---------------------------------------------------------------------------------


def is_of_compiler(record: dict[str, Any]) -> bool:
    """Whether torch's compiler could not call a candidate at all: that is not the candidate's."""
    error = record.get("error") or [""]
    return str(error[0]) in {"Unsupported", "InternalTorchDynamoError", "BackendCompilerFailed"}


# Below autocast, a kernel may round to bfloat16 as the reference does, or not at all. These many
# roundings, or this many times the error of the reference there, are not a matter of precision.
_FAR_OFF, _TIMES = 2.0**-6, 8.0


def compare_below_autocast(
    native: Observation, cast: Observation, mine: Observation
) -> CollectedFindings:
    """Compare a call below autocast with the reference's, there and without."""
    collected = CollectedFindings()
    if mine.error is not None:
        collected.compared += 1
        item, value = next(iter(native.outputs.items()))
        reason = f"the reference returns, the candidate raises {type(mine.error).__name__}"
        collected.add(item, Aspect.EXCEPTION, Status.DIFFERENT, f"{reason}: {mine.error}"[:300])
        return collected
    for item, value in native.outputs.items():
        own, other = mine.outputs.get(item), cast.outputs.get(item)
        if not isinstance(value, torch.Tensor) or not value.is_floating_point():
            continue
        collected.compared += 1
        if not isinstance(own, torch.Tensor) or own.shape != value.shape:
            shape = list(own.shape) if isinstance(own, torch.Tensor) else type(own).__name__
            reason = f"{shape} below autocast instead of {list(value.shape)}"
            collected.add(item, Aspect.STRUCTURE, Status.DIFFERENT, reason)
            continue
        found = _distance(value, own)
        allowed = max(_FAR_OFF, _TIMES * _distance(value, other))
        is_same = found <= allowed
        reason = f"off by {found:.3g} of its size below autocast, {allowed:.3g} allowed"
        status = Status.EQUIVALENT if is_same else Status.DIFFERENT
        collected.add(item, Aspect.VALUE, status, reason)
    return collected


def _distance(value: torch.Tensor, other: Any) -> float:
    """The relative L2 distance, of what is finite in both; infinity if one is and one is not."""
    if not isinstance(other, torch.Tensor) or other.shape != value.shape:
        return 0.0
    left, right = value.double().cpu(), other.double().cpu()
    if not torch.equal(left.isfinite(), right.isfinite()):
        return float("inf")
    left, right = left[left.isfinite()], right[right.isfinite()]
    size = left.norm().item()
    return (left - right).norm().item() / size if size else float((left - right).norm().item())

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

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

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


def has_streams(device: str) -> bool:
    """Whether a program can choose the stream of a device."""
    try:
        torch.Stream(device=device)
    except (RuntimeError, NotImplementedError):
        return False
    return True


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

        return torch.compile(program, backend="eager")
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

"""The conditions of a call: who calls a kernel, and in what memory; and how long the call takes.

A judge calls kernels one by one, in the main thread, without modes. Programs call them in inference
mode, below autocast, in threads of a server, on a stream of their own, from compiled code, and for
the thousandth time: they must compute the same for all of them. And memory that shows what a kernel
does with it is poisoned, and watched beside the inputs.
"""

from __future__ import annotations

import contextlib
import secrets
import statistics
import threading
import time
from typing import TYPE_CHECKING, Any

import torch

from paritas.core.execution.observation import OUTPUT, input_tensors
from paritas.core.execution.subjects import Inputs
from paritas.core.numerics.bits import INTEGERS
from paritas.core.numerics.contents import contents
from paritas.core.time_limit import TimeLimit
from paritas.core.torch_private.operators import DispatchMode
from paritas.kernels.messages import Measure, Measured
from paritas.kernels.rows import KernelTiming
from paritas.kernels.wire import bytes_of, decode, encode

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor

    from paritas.kernels.messages import Encoded
    from paritas.kernels.observing import Observer
    from paritas.kernels.processes import CandidateProcess


# --- Callers --------------------------------------------------------------------------------------

INFERENCE, AUTOCAST, THREAD = "in inference mode", "below autocast", "in another thread"
STREAM, REPEATED, COMPILED = "on another stream", "after many calls", "from compiled code"
_MOST_REPEATS, _MOST_SECONDS = 300, 0.25
# Bound before a candidate can replace them.
_wait_for_device = torch.accelerator.synchronize
_stream_of, _set_stream = torch.accelerator.current_stream, torch.accelerator.set_stream


def callers_on(device: str, *, is_compiled: bool, keeps_state: bool) -> list[str]:
    """The callers to try; a kernel that keeps values from call to call is not called many times."""
    callers = [INFERENCE, AUTOCAST, THREAD]
    callers += [] if device.startswith("cpu") else [STREAM]
    callers += [] if keeps_state else [REPEATED]
    return [*callers, COMPILED] if is_compiled else callers


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
    outcome: dict[str, Any] = {}

    def run() -> None:
        try:
            with torch.set_grad_enabled(is_recording):
                outcome["result"] = call(*args, **kwargs)
        except (Exception, SystemExit) as error:  # noqa: BLE001  (raised again below)
            outcome["error"] = error

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if "error" in outcome:
        raise outcome["error"]
    return outcome["result"]


def call_often(call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Call it again and again, for a while; what it raises, it raises in the next call, too."""
    limit = TimeLimit(_MOST_SECONDS)
    with contextlib.suppress(Exception), torch.no_grad():
        for _ in range(_MOST_REPEATS):
            call(*args, **kwargs)
            if limit.is_over:
                break


# --- Memory ---------------------------------------------------------------------------------------

# Two patterns, so that a value that happens to be right under one is wrong under the other.
PATTERNS = (float("nan"), -1.2345e30)
MOST_NAMES = 200


def poisoned(tensor: Tensor, pattern: int) -> Tensor:
    """Fill a tensor with a value that no kernel would compute."""
    if tensor.numel() == 0:
        return tensor
    if tensor.is_floating_point() or tensor.is_complex():
        with contextlib.suppress(RuntimeError, NotImplementedError):
            info = torch.finfo(tensor.dtype)
            value = PATTERNS[pattern]
            return tensor.fill_(value if value != value else max(value, -info.max / 4))  # noqa: PLR0124
    with contextlib.suppress(RuntimeError, NotImplementedError):
        tensor.view(torch.uint8).fill_(0xA5 if pattern else 0x5A)
    return tensor


def poison_free_memory(sizes: set[int], device: str, pattern: int) -> None:
    """Leave poison in blocks of these sizes, which an allocator is likely to hand out again."""
    poisoned_blocks = []
    for size in sorted(sizes)[-16:]:
        for _ in range(4):
            block = torch.empty((size + 7) // 8, dtype=torch.float64, device=device)
            poisoned_blocks.append(poisoned(block, pattern))
    del poisoned_blocks


class CallWatch(DispatchMode):
    """Poisons what `torch.empty` and its like return, and records which operators are called."""

    def __init__(self, pattern: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.pattern = pattern
        self.names: dict[str, None] = {}

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run the operator."""
        name = str(func)
        if len(self.names) < MOST_NAMES:
            self.names[name] = None
        result = func(*args, **(kwargs or {}))
        if "empty" in name and isinstance(result, torch.Tensor) and name.startswith("aten."):
            poisoned(result, self.pattern)
        return result


# --- Beside the inputs ----------------------------------------------------------------------------


class MemoryBeside:
    """The memory around inputs that are parts of larger ones: kernels must not write there."""

    def __init__(self, inputs: Inputs) -> None:
        storages: dict[int, list[tuple[str, Tensor]]] = {}
        for path, tensor in input_tensors(inputs):
            if tensor.layout is torch.strided and tensor.numel():
                storages.setdefault(tensor.untyped_storage().data_ptr(), []).append((path, tensor))
        self._parts = [
            (views, bytes_of(views[0][1]).clone())
            for views in storages.values()
            if views[0][1].untyped_storage().nbytes() > sum(view.nbytes for _, view in views)
        ]

    def changed_inputs(self) -> list[str]:
        """The inputs beside which something was written."""
        changed_paths = []
        for views, expected in self._parts:
            for _, view in views:  # what was written to the inputs themselves is another matter
                expected_view = torch.empty(0, dtype=view.dtype, device=view.device)
                expected_view.set_(
                    expected.untyped_storage(), view.storage_offset(), view.shape, view.stride()
                )
                _drop_repeats(expected_view).copy_(_drop_repeats(view.detach()))
            if not torch.equal(expected, bytes_of(views[0][1])):
                changed_paths.append(views[0][0])
        return changed_paths


def _drop_repeats(tensor: Tensor) -> Tensor:
    """One of the elements of an expanded dimension, which share memory."""
    for dim, (size, step) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
        if size > 1 and not step:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor


# --- How long a call takes, measured in the process of a side -------------------------------------

# Inputs differ from call to call, the device is synchronized before and after, and every result is
# read: a result that is computed later, or never, has no time.

# Larger than the last-level caches of the machines that kernels are timed on.
_FLUSHED_BYTES = 1 << 26
_WARM_UP = 3
# Bound before a candidate can replace it.
_clock = time.perf_counter


def measure(observer: Observer, order: Measure) -> Measured:
    """Make some calls, and return their times in seconds."""
    args, kwargs = decode(order.inputs, observer.device)
    inputs = Inputs(tuple(args), kwargs)
    generator = torch.Generator().manual_seed(order.seed)
    on_device = not observer.device.startswith("cpu")
    flushed = None
    if order.cold:
        flushed = torch.empty(_FLUSHED_BYTES // 4, device=observer.device)
    times = []
    encoded: Encoded | None = None
    try:
        with torch.no_grad():
            for number in range(order.calls):
                _change(inputs, generator)
                if flushed is not None:
                    flushed.fill_(1.0)
                if on_device:
                    _wait_for_device(observer.device)
                began = _clock()
                result = observer.call(*inputs.args, **inputs.kwargs)
                if on_device:
                    _wait_for_device(observer.device)
                times.append(_clock() - began)
                if number == order.checked:
                    encoded = encode([leaf for _, leaf in contents(result, OUTPUT)])
                del result
    except Exception as error:  # noqa: BLE001  (there is no timing then)
        return Measured(error=f"{type(error).__name__}: {error}"[:200])
    return Measured(times=times, result=encoded)


def _change(inputs: Inputs, generator: torch.Generator) -> None:
    """Move floating inputs to other values of the same kind, in place."""
    for _, tensor in input_tensors(inputs):
        if tensor.is_floating_point() and tensor.numel() > 1 and not tensor.requires_grad:
            shift = int(torch.randint(1, tensor.numel(), (1,), generator=generator))
            integer_view = tensor.view(
                INTEGERS[tensor.element_size()]
            )  # float8 may lack the operator
            integer_view.copy_(integer_view.reshape(-1).roll(shift).reshape(integer_view.shape))


def time_calls(
    reference: CandidateProcess,
    candidate: CandidateProcess,
    inputs: Encoded,
    *,
    calls: int = 30,
    is_cold: bool = False,
    seconds: float = 60.0,
) -> KernelTiming | str:
    """Time the two in turn; a text says why that is not possible."""
    from paritas.kernels.comparing import is_far_off

    times_by_role: dict[str, list[float]] = {"reference": [], "candidate": []}
    rounds = max(1, calls // 5)
    for number in range(rounds + 1):
        calls_now = 5 if number else _WARM_UP
        checked, results = secrets.randbelow(calls_now), []
        for role, process in (("reference", reference), ("candidate", candidate)):
            order = Measure(
                inputs=inputs, calls=calls_now, cold=is_cold, seed=number, checked=checked
            )
            answer = process.ask(order, Measured, seconds)
            if answer.error or answer.result is None:
                return f"the {role} raised {answer.error}"
            results.append(decode(answer.result, "cpu"))
            if number:
                times_by_role[role] += answer.times
        reference_result, ours = results
        # How exactly it computes was judged before; a candidate that is timed must compute at all.
        if len(reference_result) != len(ours) or any(map(is_far_off, reference_result, ours)):
            return "a timed call of the candidate does not return what the reference returns"
    return KernelTiming(
        reference=statistics.median(times_by_role["reference"]),
        candidate=statistics.median(times_by_role["candidate"]),
        reference_spread=_spread(times_by_role["reference"]),
        candidate_spread=_spread(times_by_role["candidate"]),
        calls=len(times_by_role["candidate"]),
        is_cold=is_cold,
    )


def _spread(times: list[float]) -> float:
    """Half the distance of the quartiles."""
    low, _, high = statistics.quantiles(times, n=4)
    return (high - low) / 2

"""How long a call takes, measured in the process of a side.

Inputs differ from call to call, the device is synchronized before and after, and every result is
read: a result that is computed later, or never, has no time.
"""

from __future__ import annotations

import secrets
import statistics
import time
from typing import TYPE_CHECKING, Any

import torch

from paritas.execution.observation import OUTPUT, input_tensors
from paritas.execution.subjects import Inputs
from paritas.kernels.wire import decode, encode
from paritas.numerics.contents import contents
from paritas.results.model_reports import KernelTiming

if TYPE_CHECKING:
    from paritas.kernels.observing import Observer
    from paritas.kernels.processes import CandidateProcess

# Larger than the last-level caches of the machines that kernels are timed on.
_FLUSHED_BYTES = 1 << 26
_WARM_UP = 3
# Bound before a candidate can replace them.
_clock, _synchronize = time.perf_counter, torch.accelerator.synchronize


def measure(observer: Observer, order: dict[str, Any]) -> dict[str, Any]:
    """Make some calls, and return their times in seconds."""
    args, kwargs = decode(order["inputs"], observer.device)
    inputs = Inputs(tuple(args), kwargs)
    generator = torch.Generator().manual_seed(order["seed"])
    on_device = not observer.device.startswith("cpu")
    flushed = None
    if order["cold"]:
        flushed = torch.empty(_FLUSHED_BYTES // 4, device=observer.device)
    times = []
    kept: Any = None
    try:
        with torch.no_grad():
            for number in range(order["calls"]):
                _change(inputs, generator)
                if flushed is not None:
                    flushed.fill_(1.0)
                if on_device:
                    _synchronize(observer.device)
                began = _clock()
                result = observer.call(*inputs.args, **inputs.kwargs)
                if on_device:
                    _synchronize(observer.device)
                times.append(_clock() - began)
                if number == order["checked"]:
                    kept = encode([one for _, one in contents(result, OUTPUT)])
                del result
    except Exception as error:  # noqa: BLE001  (there is no timing then)
        return {"error": f"{type(error).__name__}: {error}"[:200], "times": []}
    return {"error": None, "times": times, "result": kept}


def _change(inputs: Inputs, generator: torch.Generator) -> None:
    """Move floating inputs to other values of the same kind, in place."""
    for _, tensor in input_tensors(inputs):
        if tensor.is_floating_point() and tensor.numel() > 1 and not tensor.requires_grad:
            shift = int(torch.randint(1, tensor.numel(), (1,), generator=generator))
            flat = tensor.reshape(-1).roll(shift)
            tensor.copy_(flat.reshape(tensor.shape))


def timed(
    reference: CandidateProcess,
    candidate: CandidateProcess,
    inputs: dict[str, Any],
    *,
    calls: int = 30,
    is_cold: bool = False,
    seconds: float = 60.0,
) -> KernelTiming | str:
    """Time the two in turn; a text says why that is not possible."""
    from paritas.kernels.comparing import is_far_off

    found: dict[str, list[float]] = {"reference": [], "candidate": []}
    rounds = max(1, calls // 5)
    for number in range(rounds + 1):
        calls_now = 5 if number else _WARM_UP
        checked, results = secrets.randbelow(calls_now), []
        for role, process in (("reference", reference), ("candidate", candidate)):
            order = {
                "do": "time",
                "inputs": inputs,
                "calls": calls_now,
                "cold": is_cold,
                "seed": number,
                "checked": checked,
            }
            answer = process.ask(order, seconds)
            if answer["error"]:
                return f"the {role} raised {answer['error']}"
            results.append(decode(answer["result"], "cpu"))
            if number:
                found[role] += answer["times"]
        theirs, ours = results
        # How exactly it computes was judged before; a candidate that is timed must compute at all.
        if len(theirs) != len(ours) or any(map(is_far_off, theirs, ours)):
            return "a timed call of the candidate does not return what the reference returns"
    return KernelTiming(
        reference=statistics.median(found["reference"]),
        candidate=statistics.median(found["candidate"]),
        reference_spread=_spread(found["reference"]),
        candidate_spread=_spread(found["candidate"]),
        calls=len(found["candidate"]),
        is_cold=is_cold,
    )


def _spread(times: list[float]) -> float:
    """Half the distance of the quartiles."""
    low, _, high = statistics.quantiles(times, n=4)
    return (high - low) / 2

"""What guard() costs in runs of the model, what it holds in memory, and how soon it names a fault.

Times are processor time of one thread: what is compared takes turns, and of each the lower quartile
counts, since what disturbs only ever adds. All ratios are taken within this one run. Compiling is
left out, except where the time to name a fault is told: there it is part of the work.

The model is the small transformer of `paritas demo`, on which the fixed cost of a call weighs most,
and the same blocks at a size where arithmetic does.
"""

from __future__ import annotations

import copy
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

import paritas
from paritas._torch.inductor import compile_watched
from paritas.cli import demo_model

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

ROUNDS = 25
CALLS_PER_BLOCK, BLOCKS = 100, 9
TESTS = pathlib.Path(__file__).parents[1] / "tests"
FAULTS = {
    "relu_codegen": "a wrong relu in generated code",
    "gradients_of_pooled_convolution": "pytorch#185509, a layout chosen wrongly",
}


# --- time -----------------------------------------------------------------------------------------


def in_turns(functions: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Seconds of each function: the lower quartile over rounds in which all take turns."""
    timings: dict[str, list[float]] = {name: [] for name in functions}
    for function in functions.values():
        function()
    for _ in range(rounds):
        for name, function in functions.items():
            start = time.process_time()
            function()
            timings[name].append(time.process_time() - start)
    return {name: statistics.quantiles(values, n=4)[0] for name, values in timings.items()}


def inference(model: nn.Module, inputs: list[Tensor], backend: Any) -> Callable[[], object]:
    """One call without gradients; the model itself if there is no backend."""
    run = model if backend is None else apart(model, backend)

    def step() -> object:
        with torch.no_grad():
            return run(*inputs)

    return step


def training(model: nn.Module, inputs: list[Tensor], backend: Any) -> Callable[[], object]:
    """One call and the gradients of every parameter."""
    model = copy.deepcopy(model).requires_grad_()
    run = model if backend is None else apart(model, backend)
    parameters = list(model.parameters())
    return lambda: torch.autograd.grad(run(*inputs).square().mean(), parameters)


def apart(model: nn.Module, backend: Any) -> Callable[..., Any]:
    """The model compiled, with a cache entry of its own: others would be tried before it."""

    def call(*inputs: Tensor) -> Any:
        return model(*inputs)

    call.__code__ = call.__code__.replace()
    return torch.compile(call, backend=backend)


def doubled(inputs: list[Tensor]) -> list[Tensor]:
    return [value.double() if value.is_floating_point() else value for value in inputs]


def every_call(name: str, step: Any, model: nn.Module, inputs: list[Tensor]) -> None:
    """A call under guard against what it cannot do without: three runs of the model."""
    guarded = paritas.guard("inductor")
    wide = copy.deepcopy(model).double()
    times = in_turns(
        {
            "compiled": step(model, inputs, "inductor"),
            "eager": step(model, inputs, None),
            "float64": step(wide, doubled(inputs), None),
            "guarded": step(model, inputs, guarded),
        },
        ROUNDS,
    )
    assert guarded.verdict().passed, str(guarded.verdict())
    needed = times["compiled"] + times["eager"] + times["float64"]
    shares = ", ".join(f"{key} {times[key] * 1e3:.2f} ms" for key in times)
    print(f"{name}: {shares}")
    print(
        f"  guarded {times['guarded'] / needed:.2f} x (compiled + eager + float64), bar 1.3; "
        f"{times['guarded'] / times['compiled']:.2f} x compiled"
    )


def now_and_then(name: str, step: Any, model: nn.Module, inputs: list[Tensor]) -> None:
    """Blocks of calls, of which one in a hundred is checked, or none since the guard is off."""
    sampled = paritas.guard("inductor", every=CALLS_PER_BLOCK)
    off = paritas.guard("inductor", enabled=False)

    def block(backend: Any) -> Callable[[], None]:
        once = step(model, inputs, backend)

        def run() -> None:
            for _ in range(CALLS_PER_BLOCK):
                once()

        return run

    blocks = {"plain": block("inductor"), "sampled": block(sampled), "off": block(off)}
    times = in_turns(blocks, BLOCKS)
    assert sampled.verdict().passed, str(sampled.verdict())
    one_in, none = (times[key] / times["plain"] for key in ("sampled", "off"))
    calls = CALLS_PER_BLOCK * (BLOCKS + 1)
    print(f"{name}, {calls} calls each, in plain compiled calls:")
    print(f"  every={CALLS_PER_BLOCK} {one_in:.3f}, bar 1.10; enabled=False {none:.3f}")


# --- memory ---------------------------------------------------------------------------------------


def bytes_of(values: Iterable[Any]) -> int:
    """What tensors take, each storage counted once."""
    storages = [value.untyped_storage() for value in values if isinstance(value, Tensor)]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def live_bytes(step: Any, model: nn.Module, inputs: list[Tensor]) -> int:
    """Inputs and outputs of the program's largest graph, what is saved for later included."""
    seen = [0]

    def watch(_: Any, compiled: Callable[[list[Any]], Any]) -> Callable[[list[Any]], Any]:
        def run(arguments: list[Any]) -> Any:
            given = list(arguments)
            results = compiled(arguments)
            seen.append(bytes_of([*given, *results]))
            return results

        run._boxed_call = True  # noqa: SLF001  (how torch is told)
        return run

    step(model, inputs, lambda graph, examples: compile_watched(graph, examples, watch))()
    return max(seen)


def peak_bytes(function: Callable[[], object]) -> int:
    """The most memory that a call held at once on top of what was there before it, of several."""
    for _ in range(2):
        function()
    return max(_peak_of_one(function) for _ in range(3))


def _peak_of_one(function: Callable[[], object]) -> int:
    with tempfile.TemporaryDirectory() as folder:
        trace = pathlib.Path(folder, "trace.json")
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
            function()
        record.export_chrome_trace(str(trace))
        events = json.loads(trace.read_text())["traceEvents"]
    changes = [event for event in events if event.get("name") == "[memory]"]
    held = peak = 0
    for event in sorted(changes, key=lambda event: event["ts"]):
        held += event["args"]["Bytes"]
        peak = max(peak, held)
    return peak


def memory(name: str, step: Any, model: nn.Module, inputs: list[Tensor]) -> None:
    """Peaks of a plain and of a guarded call over what the graph has to hold anyway."""
    live = live_bytes(step, model, inputs)
    plain = peak_bytes(step(model, inputs, "inductor"))
    guarded = peak_bytes(step(model, inputs, paritas.guard("inductor")))
    print(f"{name}: {live / 2**20:.1f} MiB live; on top of what was there before,")
    print(f"  a guarded call holds {guarded / live:.2f} times that, a plain one {plain / live:.2f}")


def memories() -> None:
    """Of every program and step."""
    print("memory: inputs and outputs of the largest graph, saved values included, against the")
    print("  largest running sum of the allocations that torch's profiler notes during one call")
    for size, (model, inputs) in programs().items():
        for name, step in STEPS.items():
            memory(f"{size}, {name}", step, model, inputs)


# --- naming ---------------------------------------------------------------------------------------


def time_to_name(fault: str) -> None:
    """Seconds from the first call of a wrong program to the name of what is wrong.

    Once without locating before, so that the code of the program itself is built; what locating
    compiles is not.
    """
    torch.set_num_threads(2)  # in code for one thread, pytorch#185509 does not show
    sys.path.insert(0, str(TESTS))
    from quality.guard_faults import FAULTS as WRONG
    from quality.guard_faults import planted

    seconds, origins = [], []
    for locate in (False, True):
        torch.manual_seed(0)
        guarded = paritas.guard("inductor", on_mismatch="record", locate=locate)
        start = time.perf_counter()
        with planted(WRONG[fault]):
            WRONG[fault].program(guarded)
        seconds.append(time.perf_counter() - start)
        origins = [f.origin for f in guarded.verdict().failures if f.origin is not None]
    names = ", ".join(f"{origin.kind} {origin.name}" for origin in origins)
    names = names or f"nothing: the verdict is {guarded.verdict().status}"
    print(f"{FAULTS[fault]}: {seconds[1]:.1f} s to name {names}")


# --- all of it ------------------------------------------------------------------------------------


def larger() -> tuple[nn.Module, list[Tensor]]:
    """Two blocks of the demo's transformer on longer, more numerous sequences."""
    torch.manual_seed(0)
    model = nn.Sequential(*[demo_model.Block() for _ in range(2)]).requires_grad_(False)
    return model, [torch.randn(16, 128, demo_model.WIDTH)]


def programs() -> dict[str, tuple[nn.Module, list[Tensor]]]:
    """Models with their inputs."""
    return {"demo transformer": demo_model.build(), "larger": larger()}


STEPS = {"inference": inference, "training step": training}


def in_own_process(part: str, **settings: str) -> None:
    """Run a part of this file with other settings in the environment."""
    command = [sys.executable, __file__, part]
    subprocess.run(command, env={**os.environ, **settings}, check=True)


def main() -> None:
    """Print every figure."""
    for size, (model, inputs) in programs().items():
        for name, step in STEPS.items():
            every_call(f"{size}, {name}", step, model, inputs)
    for name, step in STEPS.items():
        now_and_then(f"demo transformer, {name}", step, *programs()["demo transformer"])
    sys.stdout.flush()
    # The profiler talks to the terminal about itself.
    in_own_process("memory", KINETO_LOG_LEVEL="99", TORCH_CPP_LOG_LEVEL="ERROR")
    if not (TESTS / "quality" / "guard_faults.py").exists():
        print("time to name a fault: not measured, the faults are part of the tests")
        return
    for fault in FAULTS:
        with tempfile.TemporaryDirectory() as folder:
            in_own_process(fault, TORCHINDUCTOR_CACHE_DIR=folder)


if __name__ == "__main__":
    torch.set_num_threads(1)
    part = sys.argv[1] if len(sys.argv) > 1 else ""
    if part in FAULTS:
        time_to_name(part)
    elif part == "memory":
        memories()
    else:
        main()

"""What guard() costs in runs of the model, how much memory it needs, how soon it names a fault.

Times are processor time of one thread. Alternatives take turns, and the lower quartile of each
counts, because disturbances only add time. All ratios come from this one run. Compilation is not
included, except in the time to name a fault, where it is part of the work.

The models are the small transformer of `paritas demo`, where the fixed cost of a call matters most,
and the same blocks at a size where arithmetic does.
"""

from __future__ import annotations

import copy
import pathlib
import sys
import tempfile
import time
from typing import TYPE_CHECKING, Any

import torch
from benchmarks.lab.figures import Figure, Report, write
from benchmarks.lab.memory import peak_bytes
from benchmarks.lab.processes import hand_over, part
from benchmarks.lab.timing import in_turns
from torch import Tensor, nn

import paritas
from paritas.app.cli import demo_model
from paritas.core.torch_private.inductor import compile_watched

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

ROUNDS = 25
CALLS_PER_BLOCK, BLOCKS = 100, 9
TESTS = pathlib.Path(__file__).parents[1] / "tests"
FAULTS = {
    "relu_codegen": ("a wrong relu in generated code", 5.0),
    "gradients_of_pooled_convolution": ("pytorch#185509, a layout chosen wrongly", 60.0),
}


# --- time -----------------------------------------------------------------------------------------


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


def every_call(name: str, step: Any, model: nn.Module, inputs: list[Tensor]) -> Figure:
    """A call under guard against what it cannot do without: three runs of the model."""
    guarded = paritas.guard("inductor")
    wide = copy.deepcopy(model).double()
    spent = in_turns(
        {
            "compiled": step(model, inputs, "inductor"),
            "eager": step(model, inputs, None),
            "float64": step(wide, doubled(inputs), None),
            "guarded": step(model, inputs, guarded),
        },
        ROUNDS,
    )
    assert guarded.verdict().passed, str(guarded.verdict())
    times = {key: one.processor for key, one in spent.items()}
    needed = times["compiled"] + times["eager"] + times["float64"]
    shares = ", ".join(f"{key} {times[key] * 1e3:.2f} ms" for key in times)
    what = f"guarded / (compiled + eager + float64), {name}"
    # The bar was set for the small model, where the fixed cost of a call weighs most.
    bar = 1.3 if name.startswith("demo") else None
    return Figure(what, times["guarded"] / needed, "x", bar, note=shares)


def now_and_then(name: str, step: Any, model: nn.Module, inputs: list[Tensor]) -> list[Figure]:
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
    spent = in_turns(blocks, BLOCKS)
    assert sampled.verdict().passed, str(sampled.verdict())
    plain = spent["plain"].processor
    one_in, none = (spent[key].processor / plain for key in ("sampled", "off"))
    note = f"{CALLS_PER_BLOCK * (BLOCKS + 1)} calls each, in plain compiled calls"
    return [
        Figure(f"every={CALLS_PER_BLOCK}, {name}", one_in, "x", 1.10, note=note),
        Figure(f"enabled=False, {name}", none, "x", 1.03, note="within noise"),
    ]


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


def memory(name: str, step: Any, model: nn.Module, inputs: list[Tensor]) -> Figure:
    """What a guarded call holds beyond a plain one, over what the graph has to hold anyway.

    That is inputs and outputs of the largest graph, values saved for later included, against the
    largest running sum of the allocations that torch's profiler notes during one call.
    """
    live = live_bytes(step, model, inputs)
    plain = peak_bytes(step(model, inputs, "inductor"))
    guarded = peak_bytes(step(model, inputs, paritas.guard("inductor")))
    note = f"{live / 2**20:.1f} MiB live; guarded {guarded / live:.2f}, plain {plain / live:.2f}"
    return Figure(
        f"extra copies of live values, {name}", (guarded - plain) / live, "x", 1.0, note=note
    )


def memories() -> list[Figure]:
    """Of every program and step."""
    return [
        memory(f"{size}, {name}", step, model, inputs)
        for size, (model, inputs) in programs().items()
        for name, step in STEPS.items()
    ]


# --- naming ---------------------------------------------------------------------------------------


def time_to_name(fault: str) -> Figure:
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
    what, bar = FAULTS[fault]
    return Figure(f"naming {what}", seconds[1] if origins else None, "s", bar, note=names)


# --- all of it ------------------------------------------------------------------------------------


def larger() -> tuple[nn.Module, list[Tensor]]:
    """Two blocks of the demo's transformer on longer, more numerous sequences."""
    torch.manual_seed(0)
    model = nn.Sequential(*[demo_model.Block() for _ in range(2)]).requires_grad_(False)
    return model, [torch.randn(16, 128, demo_model.WIDTH)]


def programs() -> dict[str, tuple[nn.Module, list[Tensor]]]:
    """Models with their inputs."""
    return {"demo": demo_model.build(), "larger": larger()}


STEPS = {"inference": inference, "training step": training}


def main() -> None:
    """Measure every figure."""
    figures = [
        every_call(f"{size}, {name}", step, model, inputs)
        for size, (model, inputs) in programs().items()
        for name, step in STEPS.items()
    ]
    for name, step in STEPS.items():
        figures += now_and_then(f"demo, {name}", step, *programs()["demo"])
    # The profiler talks to the terminal about itself.
    module = "benchmarks.bench_guard"
    figures += part(module, "memory", KINETO_LOG_LEVEL="99", TORCH_CPP_LOG_LEVEL="ERROR")
    for fault in FAULTS:
        with tempfile.TemporaryDirectory() as folder:
            figures += part(module, fault, TORCHINDUCTOR_CACHE_DIR=folder)
    write(Report("guard", figures, what=__doc__))


if __name__ == "__main__":
    torch.set_num_threads(1)
    asked = sys.argv[1] if len(sys.argv) > 1 else ""
    if asked in FAULTS:
        hand_over([time_to_name(asked)])
    elif asked == "memory":
        hand_over(memories())
    else:
        main()

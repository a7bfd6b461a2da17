"""Probes of Dynamo and Inductor: does each private API behave as expected?"""

from __future__ import annotations

import contextlib
import importlib.util
import logging
from typing import Any

import torch

from paritas.app.doctor.self_test import expect
from paritas.core.torch_private.global_state import quietly

# Nothing here needs a C++ compiler: generated code calls only torch's own kernels.


def _wave(x: torch.Tensor) -> torch.Tensor:
    return torch.sin(x) * 2 + x


class _Listener:
    """Accepts every call and does nothing."""

    def __getattr__(self, name: str) -> Any:
        return lambda *_args, **_kwargs: None


def _product(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return x @ y


def _observe_buffers() -> list[Any]:
    """The buffers of Inductor's code for one matrix product."""
    from paritas.core.torch_private import buffers, inductor

    observed: list[Any] = []

    def watch(lowered: Any, compiled: Any) -> Any:
        code: list[Any] = []

        def call(args: list[Any]) -> Any:
            if not code:
                code.append(buffers.compile_listening(lowered, observed.append))
                code[0](list(args))
            return compiled(args)

        call._boxed_call = True  # type: ignore[attr-defined]  # noqa: SLF001
        return call

    def backend(graph: Any, inputs: Any) -> Any:
        return inductor.compile_watched(graph, inputs, watch)

    torch.compiler.reset()
    with torch.no_grad():
        torch.compile(_product, backend=backend)(torch.eye(3), torch.eye(3))
    torch.compiler.reset()
    return observed


def ahead_of_time() -> None:
    """Inductor has the functions that compile an exported program into a package."""
    inductor = importlib.import_module("torch._inductor")
    for name in ("aoti_compile_and_package", "aoti_load_package"):
        expect(f"torch._inductor.{name}", callable(getattr(inductor, name, None)))


def arrival() -> None:
    """Torch calls a hook before it compiles."""
    from paritas.core.torch_private.arrival import MODULE, compile_hook

    expect("the hook", callable(compile_hook(importlib.import_module(MODULE))))


def backends() -> None:
    """Backends are found by their names."""
    from paritas.core.torch_private.dynamo import inductor_backend, is_registered

    expect("the backend inductor", is_registered("inductor", inductor_backend()))


def buffer_nodes() -> None:
    """A buffer of generated code is traced back to its node."""
    nodes = [
        observe_buffer.buffer.nodes
        for observe_buffer in _observe_buffers()
        if observe_buffer.side == "output"
    ]
    expect("nodes of the buffers", nodes, [("mm",)])


def buffers() -> None:
    """Generated code reports every buffer that its kernels read and write."""
    sides = [observe_buffer.side for observe_buffer in _observe_buffers()]
    expect("observed buffers", sides, ["input", "input", "output"])


def compiled() -> None:
    """The backend and the original function of a compiled callable are found."""
    from paritas.core.torch_private.dynamo import backend_name, backends_of, original_of

    run = torch.compile(_wave, backend="eager")
    names = [backend_name(backend) for backend in backends_of(run)]
    expect("backends of a compiled function", names, ["eager"])
    expect("the function that was compiled", original_of(run) is _wave)


def compiled_alike() -> None:
    """A part of a compiled module is compiled like the module, and equal parts only once."""
    from paritas.core.torch_private.dynamo import CountingBackend, compile_like, undo_compile

    counting = CountingBackend()
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    run = torch.compile(model, backend=counting)
    for part in model:
        compile_like(run, part)(torch.ones(1, 2))
    expect("compilations of two equal modules", counting.graphs, 1)
    model.compile(backend=counting)
    undo_compile(model)(torch.ones(1, 2))
    expect("compilations of a module without its compiler", counting.graphs, 1)


def fusion_options() -> None:
    """Inductor's passes have names, and its options for fusion exist."""
    from paritas.core.torch_private.inductor import (
        current_settings,
        graph_passes,
        kernel_names,
        kernel_options,
    )

    expect("the pass remove_noop_ops", "remove_noop_ops" in graph_passes())
    unknown = kernel_options({*kernel_names()}).keys() - current_settings().keys()
    expect("options that inductor does not have", sorted(unknown), [])


def inductor() -> None:
    """Inductor's settings can be changed temporarily."""
    from paritas.core.torch_private.inductor import current_settings, using_settings

    before = current_settings()
    with using_settings(before, {"max_fusion_size": 1}):
        expect("a setting inside", current_settings()["max_fusion_size"], 1)
    expect("the same outside", current_settings()["max_fusion_size"], before["max_fusion_size"])


def compile_time() -> None:
    """Inductor's dtype rules can be collected once."""
    from paritas.core.torch_private.compile_time import has_dtype_rules

    expect("where Inductor keeps its dtype rules", has_dtype_rules())


def compile_seconds() -> None:
    """The time that a compilation took is known."""
    from paritas.core.torch_private.dynamo import compile_seconds, seconds_to_compile

    torch.compiler.reset()
    before = compile_seconds()
    torch.compile(_wave, backend="eager")(torch.ones(2))
    is_longer, seconds = compile_seconds() > before, seconds_to_compile(_wave)
    torch.compiler.reset()
    expect("whether compiling takes time", is_longer)
    expect("whether it is known for a function", seconds is not None)


def kernel_units() -> None:
    """Inductor's C++ kernels can be built in one unit."""
    from paritas.core.torch_private.kernel_units import can_share_units

    expect("whether kernels can share a unit", can_share_units())


def passes() -> None:
    """Every stage of the compiler at which passes run can be observed."""
    from paritas.core.torch_private.passes import listening_to_passes

    with listening_to_passes(_Listener()):
        pass


def replaced_functions() -> None:
    """A function of torch can be replaced for a while."""
    from paritas.core.torch_private.patching import patch

    relu = torch.nn.functional.relu
    with contextlib.ExitStack() as stack:
        patch(stack, torch.nn.functional, "relu", lambda _: lambda x: x + 0.5, "is an activation")
        replaced = torch.nn.functional.relu(torch.zeros(1)).item()
    expect("the result of the other function", replaced, wanted=0.5)
    expect("whether the function is back", torch.nn.functional.relu is relu)


def stance() -> None:
    """Every torch.compile of the process can be given another backend."""
    from paritas.core.torch_private.dynamo import CountingBackend, replacing_backends

    counting = CountingBackend()
    torch.compiler.reset()
    with replacing_backends(lambda _: counting):
        torch.compile(_wave, backend="eager")(torch.ones(2))
    torch.compiler.reset()
    expect("graphs that the other backend got", counting.graphs, 1)


def quiet() -> None:
    """Torch's log handlers can drop messages about runs of paritas."""
    log = logging.getLogger("torch._subclasses.fake_tensor")
    record = log.makeRecord(log.name, logging.ERROR, __file__, 0, "of ours", (), None)
    with quietly():
        expect("handlers that log it", [h for h in log.handlers if h.filter(record)], [])


def stances() -> None:
    """Nothing is compiled under the stance force_eager, and code is compiled again after it."""
    from paritas.core.torch_private.dynamo import CountingBackend
    from paritas.core.torch_private.global_state import running_eagerly, taking_stance

    counting = CountingBackend()
    torch.compiler.reset()
    wave = torch.compile(_wave, backend=counting)
    for staying_eager in (taking_stance("force_eager"), running_eagerly()):
        with staying_eager:
            wave(torch.ones(2))
    expect("graphs compiled under the stance", counting.graphs, 0)
    wave(torch.ones(2))
    torch.compiler.reset()
    expect("graphs compiled after it", counting.graphs, 1)


def variables() -> None:
    """Lines of generated code have known kinds."""
    from paritas.core.torch_private.generated_code import line_kinds

    expect("the kind of a kernel's line", isinstance(line_kinds().call, type))


def wrapper_lines() -> None:
    """Inductor's methods that write lines of code can be observed."""
    from paritas.core.torch_private.generated_code import WrapperLines, instrumenting

    with instrumenting(WrapperLines("none")):
        pass

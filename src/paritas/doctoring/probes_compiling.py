"""Probes of what reaches into Dynamo and Inductor; see `probes_values`.

Nothing here needs a C++ compiler: where code is generated, it calls torch's own kernels alone.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch

from paritas.doctoring.expecting import expect

__all__ = ["PROBES"]


def _wave(x: torch.Tensor) -> torch.Tensor:
    return torch.sin(x) * 2 + x


class _Listener:
    """Hears of nothing; is there to be installed."""

    def __getattr__(self, name: str) -> Any:
        return lambda *_args, **_kwargs: None


def _product(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return x @ y


def _heard() -> list[Any]:
    """What Inductor's code for one matrix product tells of its buffers."""
    from paritas._torch import buffers, inductor

    heard: list[Any] = []

    def watch(lowered: Any, compiled: Any) -> Any:
        code: list[Any] = []

        def call(args: list[Any]) -> Any:
            if not code:
                code.append(buffers.compile_listening(lowered, heard.append))
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
    return heard


def ahead_of_time() -> None:
    """Inductor offers to compile an exported program into a package; that takes a compiler."""
    inductor = importlib.import_module("torch._inductor")
    for name in ("aoti_compile_and_package", "aoti_load_package"):
        expect(f"torch._inductor.{name}", callable(getattr(inductor, name, None)))


def arrival() -> None:
    """Torch asks for a callback before it compiles."""
    from paritas._torch.arrival import MODULE, compile_hook

    expect("the hook", callable(compile_hook(importlib.import_module(MODULE))))


def backends() -> None:
    """Backends are found by their names."""
    from paritas._torch.backends import inductor_backend, is_registered

    expect("the backend inductor", is_registered("inductor", inductor_backend()))


def buffer_nodes() -> None:
    """A buffer of generated code is traced back to the node it stands for."""
    nodes = [seen.buffer.nodes for seen in _heard() if seen.side == "output"]
    expect("nodes of the buffers", nodes, [("mm",)])


def buffers() -> None:
    """Generated code tells of every buffer that its kernels read and write."""
    sides = [seen.side for seen in _heard()]
    expect("buffers that were heard of", sides, ["input", "input", "output"])


def compiled() -> None:
    """The backend behind a compiled callable is found, and what it was made of."""
    from paritas._torch.compiled import backend_name, backends_of, original_of

    run = torch.compile(_wave, backend="eager")
    names = [backend_name(backend) for backend in backends_of(run)]
    expect("backends of a compiled function", names, ["eager"])
    expect("the function that was compiled", original_of(run) is _wave)


def fusion_options() -> None:
    """Inductor's passes announce themselves by name, and its options for fusion exist."""
    from paritas._torch.fusion_options import graph_passes, kernel_names, kernel_options
    from paritas._torch.inductor import current_settings

    expect("the pass remove_noop_ops", "remove_noop_ops" in graph_passes())
    unknown = kernel_options({*kernel_names()}).keys() - current_settings().keys()
    expect("options that inductor does not have", sorted(unknown), [])


def inductor() -> None:
    """Inductor's settings can be changed for a while, and it has those that are changed."""
    from paritas._torch.inductor import current_settings, settings

    before = current_settings()
    with settings(before, {"max_fusion_size": 1}):
        expect("a setting inside", current_settings()["max_fusion_size"], 1)
    expect("the same outside", current_settings()["max_fusion_size"], before["max_fusion_size"])


def passes() -> None:
    """Every stage of the compiler at which passes run can be listened to."""
    from paritas._torch.passes import telling

    with telling(_Listener()):
        pass


def stance() -> None:
    """Every torch.compile of the process can be given another backend."""
    from paritas._torch.compiled import CountingBackend
    from paritas._torch.stance import replacing_backends

    counting = CountingBackend()
    torch.compiler.reset()
    with replacing_backends(lambda _: counting):
        torch.compile(_wave, backend="eager")(torch.ones(2))
    torch.compiler.reset()
    expect("graphs that the other backend was given", counting.graphs, 1)


def quiet() -> None:
    """Torch logs through handlers of its own, which leave out what it logs of runs of ours."""
    import logging

    from paritas._torch.quiet import quietly

    log = logging.getLogger("torch._subclasses.fake_tensor")
    record = log.makeRecord(log.name, logging.ERROR, __file__, 0, "of ours", (), None)
    with quietly():
        heard = [bool(handler.filter(record)) for handler in log.handlers]
    expect("whether each handler of torch's hears it", heard, [False] * max(1, len(heard)))


def stances() -> None:
    """While a stance is taken nothing is compiled, and afterwards it is again."""
    from paritas._torch.compiled import CountingBackend
    from paritas._torch.stances import taking_stance

    counting = CountingBackend()
    torch.compiler.reset()
    wave = torch.compile(_wave, backend=counting)
    with taking_stance("force_eager"):
        wave(torch.ones(2))
    expect("graphs compiled within the stance", counting.graphs, 0)
    wave(torch.ones(2))
    torch.compiler.reset()
    expect("graphs compiled after it", counting.graphs, 1)


def variables() -> None:
    """Lines of generated code are of the kinds that are known."""
    from paritas._torch.variables import line_kinds

    expect("the kind of a kernel's line", isinstance(line_kinds().call, type))


def wrapper_lines() -> None:
    """The methods of Inductor's that write lines of code can be listened to."""
    from paritas._torch.wrapper_lines import Lines, written_into

    with written_into(Lines("none")):
        pass


PROBES = {
    "ahead_of_time": ahead_of_time,
    "arrival": arrival,
    "backends": backends,
    "buffer_nodes": buffer_nodes,
    "buffers": buffers,
    "compiled": compiled,
    "fusion_options": fusion_options,
    "inductor": inductor,
    "passes": passes,
    "quiet": quiet,
    "stance": stance,
    "stances": stances,
    "variables": variables,
    "wrapper_lines": wrapper_lines,
}

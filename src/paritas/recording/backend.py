"""record(): a backend for `torch.compile` whose graphs leave their values in a dump."""

from __future__ import annotations

import atexit
from typing import TYPE_CHECKING, Any, Literal, get_args

from paritas._torch.backends import find_backend
from paritas._torch.inductor import (
    capture_lowered,
    compile_watched,
    compiled_frame,
    settings,
)
from paritas._torch.naming import captured_input_names
from paritas.errors import UsageError
from paritas.recording.fused import FusedGraph
from paritas.recording.fusion import load_switch
from paritas.recording.graphs import RecordedGraph
from paritas.recording.options import QUEUE_BYTES, SessionOptions
from paritas.recording.selection import Selection
from paritas.recording.session import Session

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Iterable
    from types import TracebackType
    from typing import Self

    from torch.fx import GraphModule

    from paritas._torch.inductor import LoweredGraph
    from paritas.dumps.records import Layout
    from paritas.recording.fusion import FusionSwitch
    from paritas.recording.options import Stepping

__all__ = ["RecordingBackend", "record"]

GraphSource = Literal["fx", "fused"]


def record(  # noqa: PLR0913  (each is a choice of its own)
    path: str | os.PathLike[str],
    *,
    source: GraphSource = "fused",
    taps: bool = False,
    fusion_switch: str | os.PathLike[str] | None = None,
    options: dict[str, Any] | None = None,
    mode: str = "all",
    steps: Any = None,
    layers: Iterable[str] | None = None,
    ops: Iterable[str] | None = None,
    ranks: Iterable[int] | None = None,
    phases: Iterable[str] | None = None,
    every: int = 1,
    data: Literal["tensor", "stats"] = "tensor",
    layout: Layout = "packed",
    last: int = 0,
    overwrite: bool = False,
    stepping: Stepping = "auto",
    queue_bytes: int = QUEUE_BYTES,
) -> RecordingBackend:
    """Make a backend for `torch.compile` that records the values inside of its graphs.

    The dump is complete once it is closed: by `close()`, by leaving it as a context manager, or
    when the process ends.

    Args:
        path: a folder that is empty or not there.
        source: `fused` compiles by Inductor and records every buffer that the fused code
            materialises; `fx` runs the same graphs node by node in eager and records every node.
        taps: have fused code materialise every node too, which may change how it is fused.
        fusion_switch: a JSON file that turns rewriting of graphs and fusion of kernels off.
        options: of Inductor, as in `torch.compile(options=...)`.
        mode: `input`, `output` or `all`.
        steps: numbers, or ranges such as `"2-5"`; a step ends when the function that began it is
            called again.
        layers: names or globs of nodes and modules; a module brings all that is inside of it.
        ops: operators, `aten.mm` for one.
        ranks: numbers of processes.
        phases: `forward`, `backward` or both.
        every: each n-th step.
        data: whole tensors, or statistics of them.
        layout: packed files; `msit`, one `.npy` file a tensor in torchair's tree; `ge`, a file for
            each call in the tree of Ascend's graph engine, or `ge-7.1.0`, that of old releases.
        last: keep a ring of so many last steps.
        overwrite: replace an earlier dump in the same place.
        stepping: `manual` lets `step()` end the steps.
        queue_bytes: how much may wait to be written; 0 writes before the program goes on.
    """
    if source not in get_args(GraphSource):
        raise UsageError(f"source={source!r}: give one of {', '.join(get_args(GraphSource))}")
    if taps and source != "fused":
        raise UsageError("taps=True: every node is recorded already; taps are for source='fused'")
    switch = load_switch(fusion_switch) if fusion_switch is not None else None
    selection = Selection.of(
        mode=mode,
        steps=steps,
        layers=layers,
        ops=ops,
        ranks=ranks,
        phases=phases,
        every=every,
    )
    kept = SessionOptions(
        data=data,
        layout=layout,
        last=last,
        overwrite=overwrite,
        stepping=stepping,
        queue_bytes=queue_bytes,
    )
    return RecordingBackend(Session(path, selection, kept), source, options, switch, taps=taps)


class RecordingBackend:
    """Pass it to `torch.compile(backend=...)`; as a context manager, it closes the dump.

    Attributes:
        session: the recording.
        path: the folder of the dump.
    """

    def __init__(
        self,
        session: Session,
        source: GraphSource,
        options: dict[str, Any] | None = None,
        switch: FusionSwitch | None = None,
        *,
        taps: bool = False,
    ) -> None:
        """Closed with the process, if not before."""
        self.session = session
        self.path = session.path
        self.__name__ = f"recording_{source}"
        self._source: GraphSource = source
        self._backend = find_backend("inductor", options)
        self._switch = switch
        self._taps = taps
        self._graphs = 0
        session.source(source, taps=taps, fusion="on" if switch is None else switch.describe())
        for note in switch.notes if switch is not None else ():
            session.note(note)
        atexit.register(self.close)

    def pause(self) -> None:
        """Record nothing until `resume`; no step passes meanwhile."""
        self.session.pause()

    def resume(self) -> None:
        """Go on recording."""
        self.session.resume()

    def step(self) -> None:
        """End the present step; for `stepping="manual"`."""
        self.session.advance()

    def keep(self) -> None:
        """Keep for good the steps that the ring of `last` holds now."""
        self.session.keep()

    def close(self) -> None:
        """Write what is queued and close the dump; raises if not all that was asked for came."""
        atexit.unregister(self.close)
        self.session.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is None:
            self.close()
        else:  # the program's own failure is the one to be seen
            self.session.close(raising=False)

    def __call__(self, graph: GraphModule, example_inputs: list[Any], **given: Any) -> Any:
        """Compile and record one captured graph; `given` is the mode and options of the compile."""
        name = f"graph_{self._graphs}"
        self._graphs += 1
        names = captured_input_names(graph)
        frame = compiled_frame()
        options = dict(self._backend.inductor_options(given) or {})
        if self._switch is not None:
            with settings({}, options):  # a pass of the user's own is kept beside ours
                options |= self._switch.inductor_options()
        came: list[LoweredGraph] = []

        def run(lowered: LoweredGraph) -> RecordedGraph:
            came.append(lowered)
            return RecordedGraph(lowered, self.session, name, names, frame)

        def watch(lowered: LoweredGraph, compiled: Callable[..., Any]) -> FusedGraph:
            came.append(lowered)
            return FusedGraph(lowered, compiled, self.session, name, names, frame, taps=self._taps)

        if self._source == "fx":
            compiled = capture_lowered(graph, example_inputs, run, options)
        else:
            compiled = compile_watched(graph, example_inputs, watch, options)
        if not came:
            self.session.lose(f"{name}: torch gave back code for it that could not be looked into")
        return compiled

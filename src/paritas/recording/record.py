"""record(): a backend for `torch.compile` that records the values of its graphs.

By default, Inductor compiles a graph with its real fusion, and every buffer of the fused code is
recorded.
"""

from __future__ import annotations

import atexit
import dataclasses
import os
import sys
from typing import TYPE_CHECKING, Any, Literal, get_args

from paritas.core.call_options import takes_options
from paritas.core.errors import UsageError
from paritas.core.torch_private.dynamo import find_backend
from paritas.core.torch_private.graphs import captured_input_names
from paritas.core.torch_private.inductor import (
    capture_lowered,
    compile_watched,
    compiled_frame,
    using_settings,
)
from paritas.formats.dumps.selection import check_one_of
from paritas.formats.foreign.fusion_switch import load_switch
from paritas.recording.fused_graphs import FusedGraph
from paritas.recording.graphs import RecordedGraph
from paritas.recording.pipeline import RecordingOptions
from paritas.recording.session import RecordingSession

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType
    from typing import Self

    from torch.fx import GraphModule

    from paritas.core.torch_private.inductor import LoweredGraph
    from paritas.formats.foreign.fusion_switch import FusionSwitch

GraphSource = Literal["fx", "fused"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class RecordOptions(RecordingOptions):
    """What `record` records, and how it is stored.

    Attributes:
        source: `fused` compiles with Inductor and records every buffer that the fused code
            materialises; `fx` runs the same graphs node by node in eager and records every node.
        taps: also materialise every node of the fused code, which may change its fusion.
        fusion_switch: a JSON file that disables graph rewrites and kernel fusion.
        options: Inductor options, as in `torch.compile(options=...)`.
    """

    source: GraphSource = "fused"
    taps: bool = False
    fusion_switch: str | os.PathLike[str] | None = None
    options: dict[str, Any] | None = None


@takes_options(RecordOptions)
def record(path: str | os.PathLike[str], options: RecordOptions) -> RecordingBackend:
    """Make a backend for `torch.compile` that records the values inside its graphs.

    The dump is complete once it is closed: by `close()`, at the end of a `with` block, or when the
    process ends. A step ends when the function that started it is called again, unless `stepping`
    is "manual".

    Args:
        path: the folder of the dump, which must be empty or absent.
        options: given as keyword arguments; see `RecordOptions`.
    """
    source = options.source
    check_one_of("source", source, get_args(GraphSource))
    if options.taps and source != "fused":
        raise UsageError(f"taps=True needs source='fused': {source!r} records every node anyway")
    switch = None if options.fusion_switch is None else load_switch(options.fusion_switch)
    session = RecordingSession(path, options.selection(), options)
    return RecordingBackend(session, source, options.options, switch, taps=options.taps)


class RecordingBackend:
    """A backend for `torch.compile(backend=...)`; as a context manager, it closes the dump.

    Attributes:
        path: the folder of the dump.
    """

    def __init__(
        self,
        session: RecordingSession,
        source: GraphSource,
        options: dict[str, Any] | None = None,
        switch: FusionSwitch | None = None,
        *,
        taps: bool = False,
    ) -> None:
        """The dump is closed at exit, if not before."""
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
        atexit.register(self._close_at_exit)

    def pause(self) -> None:
        """Record nothing until `resume`; steps in between are not counted."""
        self.session.pause()

    def resume(self) -> None:
        """Continue recording."""
        self.session.resume()

    def step(self) -> None:
        """End the current step; for `stepping="manual"`."""
        self.session.advance()

    def keep(self) -> None:
        """Keep the steps that are now in the ring of `last` permanently."""
        self.session.keep()

    def close(self) -> None:
        """Write what is queued and close the dump; raise if part of the selection is missing."""
        atexit.unregister(self._close_at_exit)
        self.session.close()

    def _close_at_exit(self) -> None:
        try:
            self.session.close()
        except Exception as error:  # noqa: BLE001  (Python would print it and exit with 0)
            sys.stderr.write(f"paritas: {error}\n")
            if not hasattr(sys, "last_value"):  # the program's own error has an exit code
                _failed_exits.append(_FailedExit(2 if isinstance(error, UsageError) else 3))

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
        else:  # do not hide the program's own error
            self.session.close(raising=False)

    def __call__(
        self, graph: GraphModule, example_inputs: list[Any], **compile_options: Any
    ) -> Any:
        """Compile and record one captured graph; `compile_options` are those of `torch.compile`."""
        name = f"graph_{self._graphs}"
        self._graphs += 1
        names = captured_input_names(graph)
        frame = compiled_frame()
        options = dict(self._backend.inductor_options(compile_options) or {})
        if self._switch is not None:
            with using_settings({}, options):  # keeps the user's own passes
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
            self.session.lose(f"{name}: torch returned code that cannot be recorded")
        return compiled


class _FailedExit:
    """Ends the process with this exit code when Python clears its modules.

    An `atexit` callback cannot change the exit code, and if it left itself, the callbacks of others
    would not run.
    """

    def __init__(self, code: int) -> None:
        self._code = code
        self._leave = os._exit

    def __del__(self) -> None:
        self._leave(self._code)


_failed_exits: list[_FailedExit] = []

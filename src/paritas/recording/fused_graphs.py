"""A graph that runs with its real fusion, while the buffers of its code are recorded."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import msgspec
import torch
from torch.fx import Node

from paritas.core.errors import UnsupportedTorchError
from paritas.core.execution.saved_state import Copier, RandomState
from paritas.core.torch_private.buffers import compile_listening
from paritas.core.torch_private.graphs import (
    is_undefined,
    placeholders,
    returned_values,
    tap_values,
    written_placeholders,
)
from paritas.core.torch_private.inductor import compile_again
from paritas.formats.files.records import NPY_LAYOUTS, Observed, Site
from paritas.formats.foreign.npy_tree import model_name
from paritas.recording.graphs import NodeSites, compare_results, operators_of, write_graph_texts

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from paritas.core.torch_private.buffers import Buffer, Kernel, ListeningCode, SeenBuffer
    from paritas.core.torch_private.inductor import LoweredGraph
    from paritas.formats.dumps.selection import Within
    from paritas.recording.session import RecordingSession


# --- A graph with its real fusion -----------------------------------------------------------------

_MOST_NAMED = 5
# Code that is compiled for recording must not use the user's cache.
_UNCACHED = {"fx_graph_cache": False, "fx_graph_remote_cache": False}


class FusedGraph:
    """Compiled code that takes its arguments in a list and empties it.

    While nothing is recorded, it runs the plain code. When recording starts, the graph is compiled
    again to report its buffers. That code replaces the plain code if its results are equal bit for
    bit; otherwise both run, and the program gets the results of the plain code.
    """

    def __init__(
        self,
        lowered: LoweredGraph,
        compiled: Callable[[list[Any]], Sequence[Any]],
        session: RecordingSession,
        graph: str,
        captured: list[str],
        entry: Any,
        *,
        taps: bool = False,
    ) -> None:
        """Wrap the code of one graph.

        Args:
            captured: the input names of the captured graph that it comes from.
            entry: the compiled function of the user, which starts a step.
            taps: whether to also compile and run it with every node materialised.
        """
        # torch's wrappers look for it on the instance.
        self._boxed_call = True
        self.lowered = lowered
        self.compiled = compiled
        self.session = session
        self.nodes = NodeSites(
            lowered.module, graph, "fused", captured, is_backward=lowered.is_backward
        )
        self.label = f"{graph} {self.nodes.phase}"
        self.outputs = returned_values(lowered.module)
        self._entry = entry
        self._written = written_placeholders(lowered.module)
        self._given = [node.name for node in placeholders(lowered.module)]
        self._code: ListeningCode | None = None
        self._sites: BufferSites | None = None
        self._asked = False
        self._judged = False
        self._trusted = False
        self._failure: BaseException | None = None
        self._taps = _Taps(self) if taps else None

    def __call__(self, args: list[Any]) -> Sequence[Any]:
        """Run it, and record it if wanted."""
        if self.nodes.phase == "forward":
            self.session.enter(self._entry)
        if not self.session.active:
            return self.compiled(args)
        arguments = list(args)
        args.clear()
        before = RandomState.of_torch()
        if not self._asked:
            self._asked = True
            self._listen()
            before.restore()
        self._put_given(arguments)
        taps = None
        if self._taps is not None:
            taps = self._taps.run(self.copy_written(arguments))
            before.restore()
        if self._code is None:
            results = self.compiled(list(arguments))
        elif self._trusted:
            results = self._code(list(arguments))
        else:
            results = self._run_both(self._code, arguments, before)
        if self._taps is not None and taps is not None:
            self._taps.judge(FusedRun(results, arguments, RandomState.of_torch()), taps)
        self._put_results(results)
        return results

    def put(self, site: Site, value: Any, within: tuple[Within, ...] = ()) -> None:
        """Record a value if it is wanted."""
        if self.session.wants(site, within):
            key = f"{self.label} {site.level} {site.name} {site.side}.{site.position}"
            call = self.session.next_call(key)
            self.session.put(msgspec.structs.replace(site, call=call), value)

    def copy_written(self, arguments: list[Any]) -> list[Any]:
        """The arguments, with copies of those that may be written to and of their aliases."""
        written = {_memory_of(arguments[position]) for position in self._written}
        copier = Copier()
        return [
            copier.copy_tensor(value)
            if isinstance(value, torch.Tensor) and _memory_of(value) in written
            else value
            for value in arguments
        ]

    def compare(self, label: str, plain: FusedRun, other: FusedRun) -> Observed:
        """Compare two runs bit for bit, except for uninitialised memory."""
        pairs = zip(plain.results, other.results, strict=True)
        triples = [
            (f"output {position}", plain_value, other_value)
            for position, (plain_value, other_value) in enumerate(pairs)
            if not is_undefined(self.outputs[position])
        ]
        triples += [
            (
                f"input {self._given[position]} after it",
                plain.given[position],
                other.given[position],
            )
            for position in sorted(self._written)
        ]
        observed = compare_results(label, triples)
        if observed.status == "unchanged" and not plain.after.same_torch(other.after):
            detail = "the final random state differs"
            return Observed(graph=label, status="changed", detail=detail)
        return observed

    def give_up(self, label: str, what: str, error: Exception) -> None:
        """Note that something could not be recorded; the program continues, and closing raises."""
        detail = f"{what}: {type(error).__name__}: {error}"
        self.session.note_observed(Observed(graph=label, status="unchecked", detail=detail))
        self.session.lose(f"{label}: its inside is not recorded; {detail}")

    def _listen(self) -> None:
        """Compile the graph so that it reports its buffers."""
        try:
            self._code = compile_listening(self.lowered, self._hear)
        except UnsupportedTorchError:
            raise
        except Exception as error:  # noqa: BLE001  (noted in the dump; the program continues)
            self.give_up(self.label, "compiling it for recording failed", error)
            return
        order = [node.name for node in self.lowered.module.graph.nodes]
        self._sites = BufferSites(self._code.kernels, self.nodes, order)
        if self.session.options.layout != "packed":
            self._describe(self._code, self._sites)
        lost = [name for kernel in self._code.kernels for name in kernel.unseen]
        self._note(lost, "were overwritten by the kernel that wrote them")
        self._note(list(self._code.missed), "were used by code that cannot be recorded")

    def _describe(self, code: ListeningCode, sites: BufferSites) -> None:
        """Write the graph as text, and set the operator names that other tools use."""
        operators = None
        if self.session.options.layout not in NPY_LAYOUTS:
            operators = operators_of(self.lowered.module, code.kernels, sites.of)
            self.session.name_operators(operators)
        write_graph_texts(
            self.session.path,
            self.session.rank,
            model_name(self.nodes.graph, self.nodes.phase),
            self.lowered.module,
            code.kernels,
            sites.of,
            operators,
        )

    def _note(self, names: list[str], what: str) -> None:
        if names:
            more = ", ..." if len(names) > _MOST_NAMED else ""
            listed = ", ".join(names[:_MOST_NAMED]) + more
            self.session.note(f"{self.label}: {len(names)} buffers {what}: {listed}")

    def _hear(self, seen_buffer: SeenBuffer) -> None:
        if self._sites is None:
            return
        try:
            self.put(
                self._sites.of(seen_buffer), seen_buffer.tensor, self._sites.within(seen_buffer)
            )
        except BaseException as error:
            self._failure = error
            raise

    def _run_both(
        self, code: ListeningCode, arguments: list[Any], before: RandomState
    ) -> Sequence[Any]:
        """Run with and without recording; the program gets the results without recording."""
        copies = self.copy_written(arguments)
        try:
            fused_run = FusedRun(code(list(copies)), copies, RandomState.of_torch())
        except Exception as error:
            if error is self._failure:
                raise
            self._code = None
            self.give_up(self.label, "running it for recording failed", error)
            before.restore()
            return self.compiled(arguments)
        before.restore()
        plain = FusedRun(self.compiled(list(arguments)), arguments, RandomState.of_torch())
        if not self._judged:
            self._judged = True
            observed = self.compare(self.label, plain, fused_run)
            self._trusted = observed.status == "unchanged"
            self.session.note_observed(observed)
        return plain.results

    def _put_given(self, arguments: list[Any]) -> None:
        for name, value in zip(self._given, arguments, strict=True):
            self.put(self.nodes.of(name), value)

    def _put_results(self, results: Sequence[Any]) -> None:
        recorded_names = set(self._given)
        for node, value in zip(self.outputs, results, strict=True):
            if isinstance(node, Node) and node.name not in recorded_names:
                recorded_names.add(node.name)
                self.put(self.nodes.of(node.name), value)


@dataclasses.dataclass(frozen=True)
class FusedRun:
    """The outcome of running a graph: results, arguments after it, random state after it."""

    results: Sequence[Any]
    given: list[Any]
    after: RandomState


class _Taps:
    """The same graph with every node materialised, run in addition."""

    def __init__(self, owner: FusedGraph) -> None:
        self._owner = owner
        self._label = f"{owner.label} tapped"
        self._code: Callable[[list[Any]], Sequence[Any]] | None = None
        self._names: list[str] = []
        self._asked = False

    def run(self, arguments: list[Any]) -> FusedRun | None:
        """Record the nodes; the first time, also return the outcome of the graph."""
        owner = self._owner
        first, self._asked = not self._asked, True
        try:
            if first:
                module, self._names = tap_values(owner.lowered.module)
                before = RandomState.of_torch()
                self._code = compile_again(owner.lowered.with_module(module), _UNCACHED)
                before.restore()
            if self._code is None:
                return None
            results = self._code(list(arguments))
        except Exception as error:  # noqa: BLE001  (noted in the dump; the program continues)
            self._code = None
            owner.give_up(self._label, "materialising every node failed", error)
            return None
        after = RandomState.of_torch()
        count = len(owner.outputs)
        # The graph's outputs are recorded from the program itself.
        names = {node.name for node in owner.outputs if isinstance(node, Node)}
        for name, value in zip(self._names, results[count:], strict=True):
            if name not in names:
                owner.put(owner.nodes.of(name), value)
        return FusedRun(results[:count], arguments, after) if first else None

    def judge(self, plain: FusedRun, fused_run: FusedRun) -> None:
        """Note whether materialising every node changes the results."""
        self._owner.session.note_observed(self._owner.compare(self._label, plain, fused_run))


def _memory_of(value: Any) -> Any:
    """An identifier of a tensor's memory."""
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
        return id(value)
    return value.untyped_storage().data_ptr() or id(value)


# --- Sites of the buffers of fused code -----------------------------------------------------------


class BufferSites:
    """Names each buffer after the node whose value it holds.

    If several buffers end with the same node, the one that holds exactly its value gets the name;
    the names of the others also contain the buffer's name. A kernel's inputs are recorded under the
    last node that it writes; `nodes` then says what was read.
    """

    def __init__(self, kernels: tuple[Kernel, ...], nodes: NodeSites, order: list[str]) -> None:
        """`nodes` has the sites of the graph's nodes, `order` their names in graph order."""
        self._nodes = nodes
        self._order = {name: index for index, name in enumerate(order)}
        self._taken: set[str] = set()
        self._names: dict[tuple[str, str], str] = {}
        for kernel in kernels:
            for buffer in kernel.writes:
                if buffer.exact is not None:
                    self._name(buffer)
        self._readers: dict[int, tuple[str, str]] = {}
        for index, kernel in enumerate(kernels):
            for buffer in kernel.writes:
                self._name(buffer)
            self._readers[id(kernel)] = self._reader(kernel, index)
        self._sites: dict[tuple[int, str, int], Site] = {}
        self._within: dict[tuple[int, str, int], tuple[Within, ...]] = {}

    def of(self, seen_buffer: SeenBuffer) -> Site:
        """The site of a buffer's tensor."""
        key = (id(seen_buffer.kernel), seen_buffer.side, seen_buffer.position)
        site = self._sites.get(key)
        if site is None:
            site = self._sites[key] = self._make(seen_buffer)
        return site

    def within(self, seen_buffer: SeenBuffer) -> tuple[Within, ...]:
        """The nodes that are computed there, with modules and operators."""
        key = (id(seen_buffer.kernel), seen_buffer.side, seen_buffer.position)
        nodes_within = self._within.get(key)
        if nodes_within is None:
            # Selecting one node of a kernel also selects the kernel's inputs.
            reader = seen_buffer.kernel.nodes if seen_buffer.side == "input" else ()
            names = dict.fromkeys((*reader, *seen_buffer.buffer.nodes))
            sites = [self._nodes.of(name) for name in names if name in self._order]
            nodes_within = tuple((site.name, site.module, site.op) for site in sites)
            self._within[key] = nodes_within
        return nodes_within

    def _make(self, seen_buffer: SeenBuffer) -> Site:
        buffer, kernel = seen_buffer.buffer, seen_buffer.kernel
        if seen_buffer.side == "input":
            name, last = self._readers[id(kernel)]
        else:
            name, last = self._names[buffer.name, buffer.kernel], _nearest_node(buffer)
        return msgspec.structs.replace(
            self._about(last),
            level="buffer",
            name=name,
            side=seen_buffer.side,
            position=str(seen_buffer.position) if seen_buffer.side == "input" else "0",
            kernel=kernel.name,
            nodes=buffer.nodes,
            exact=buffer.exact is not None,
        )

    def _about(self, node: str) -> Site:
        if node:
            return self._nodes.of(node)
        return Site(
            source="fused",
            level="buffer",
            name="",
            phase=self._nodes.phase,
            graph=self._nodes.graph,
        )

    def _name(self, buffer: Buffer) -> None:
        key = (buffer.name, buffer.kernel)
        if key not in self._names:
            self._names[key] = self._free(_nearest_node(buffer), buffer.name)

    def _reader(self, kernel: Kernel, index: int) -> tuple[str, str]:
        """The name under which a kernel's inputs are recorded, and the node that it means."""
        if kernel.writes:
            main = max(kernel.writes, key=lambda buffer: self._order.get(_nearest_node(buffer), -1))
            return self._names[main.name, main.kernel], _nearest_node(main)
        last = kernel.nodes[-1] if kernel.nodes else ""
        return self._free(last, f"kernel{index}"), last

    def _free(self, preferred_name: str, otherwise: str) -> str:
        name = preferred_name or otherwise
        if name in self._taken:
            name = f"{preferred_name}.{otherwise}" if preferred_name else otherwise
        self._taken.add(name)
        return name


def _nearest_node(buffer: Buffer) -> str:
    """The node whose value a buffer holds, or the last node that it was computed by."""
    return buffer.exact or (buffer.nodes[-1] if buffer.nodes else "")

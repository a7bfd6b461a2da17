"""A graph compiled by Inductor with its real fusion, every buffer of the fused code recorded."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import msgspec
import torch
from torch.fx import Node

from paritas._torch.buffers import compile_listening
from paritas._torch.graphs import is_undefined, placeholders, returned, written_placeholders
from paritas._torch.inductor import compile_again
from paritas._torch.tapping import tapped
from paritas.dumps.msit_layout import model_name
from paritas.dumps.records import Observed
from paritas.errors import UnsupportedTorchError
from paritas.recording.fused_sites import BufferSites
from paritas.recording.graph_texts import operators_of, write_graph_texts
from paritas.recording.graphs import NodeSites
from paritas.recording.isolation import Copier, RandomState
from paritas.recording.observation import compare_results

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from paritas._torch.buffers import ListeningCode, Seen
    from paritas._torch.inductor import LoweredGraph
    from paritas.dumps.records import Site
    from paritas.recording.selection import Within
    from paritas.recording.session import Session

__all__ = ["FusedGraph"]

_MOST_NAMED = 5
# What is compiled to look at must neither come out of the user's cache nor go into it.
_UNCACHED = {"fx_graph_cache": False, "fx_graph_remote_cache": False}


@dataclasses.dataclass(frozen=True)
class Run:
    """What a run of a graph left behind.

    Attributes:
        results: its outputs.
        given: the arguments as it left them.
        after: the random state.
    """

    results: Sequence[Any]
    given: list[Any]
    after: RandomState


class FusedGraph:
    """Compiled code that takes its arguments in a list and empties it.

    While nothing is recorded it is the plain code. When something first is, the graph is compiled
    once more so that it tells of its buffers, and that code takes over if it computes the same, bit
    for bit; else both run, and the program goes on with what the plain code gave.
    """

    def __init__(
        self,
        lowered: LoweredGraph,
        compiled: Callable[[list[Any]], Sequence[Any]],
        session: Session,
        graph: str,
        captured: list[str],
        entry: Any,
        *,
        taps: bool = False,
    ) -> None:
        """Wrap the code of one graph.

        Args:
            captured: the names of the inputs of the captured graph it comes from.
            entry: what a step begins with: the user's function that was compiled.
            taps: whether to compile and run it once more with every node materialised.
        """
        # On the instance, where torch's own wrappers around it look for it.
        self._boxed_call = True
        self.lowered = lowered
        self.compiled = compiled
        self.session = session
        self.nodes = NodeSites(
            lowered.module, graph, "fused", captured, is_backward=lowered.is_backward
        )
        self.label = f"{graph} {self.nodes.phase}"
        self.outputs = returned(lowered.module)
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
        """Run it, and record it where that is wanted."""
        if self.nodes.phase == "forward":
            self.session.enter(self._entry)
        if not self.session.active:
            return self.compiled(args)
        given = list(args)
        args.clear()
        before = RandomState.of_torch()
        if not self._asked:
            self._asked = True
            self._listen()
            before.restore()
        self._put_given(given)
        taps = None
        if self._taps is not None:
            taps = self._taps.run(self.copied(given))
            before.restore()
        if self._code is None:
            results = self.compiled(list(given))
        elif self._trusted:
            results = self._code(list(given))
        else:
            results = self._run_both(self._code, given, before)
        if self._taps is not None and taps is not None:
            self._taps.judge(Run(results, given, RandomState.of_torch()), taps)
        self._put_results(results)
        return results

    def put(self, site: Site, value: Any, within: tuple[Within, ...] = ()) -> None:
        """Record a value if it is wanted."""
        if self.session.wants(site, within):
            key = f"{self.label} {site.level} {site.name} {site.side}.{site.position}"
            call = self.session.next_call(key)
            self.session.put(msgspec.structs.replace(site, call=call), value)

    def copied(self, given: list[Any]) -> list[Any]:
        """The arguments, with copies of what may be written to and what shares its memory."""
        written = {_place(given[position]) for position in self._written}
        copier = Copier()
        return [
            copier.copy_tensor(value)
            if isinstance(value, torch.Tensor) and _place(value) in written
            else value
            for value in given
        ]

    def compare(self, label: str, plain: Run, other: Run) -> Observed:
        """What two runs of the graph gave, bit for bit, but for memory that neither has set."""
        pairs = zip(plain.results, other.results, strict=True)
        triples = [
            (f"output {position}", mine, theirs)
            for position, (mine, theirs) in enumerate(pairs)
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
            detail = "the random state after it differs"
            return Observed(graph=label, status="changed", detail=detail)
        return observed

    def give_up(self, label: str, what: str, error: Exception) -> None:
        """Say that something could not be looked at; the program goes on, and closing raises."""
        detail = f"{what}: {type(error).__name__}: {error}"
        self.session.observed(Observed(graph=label, status="unchecked", detail=detail))
        self.session.lose(f"{label}: nothing of its inside is recorded; {detail}")

    def _listen(self) -> None:
        """Compile the graph so that it tells of its buffers."""
        try:
            self._code = compile_listening(self.lowered, self._hear)
        except UnsupportedTorchError:
            raise
        except Exception as error:  # noqa: BLE001  (said in the dump; the program goes on)
            self.give_up(self.label, "compiling it to tell of its buffers failed", error)
            return
        order = [node.name for node in self.lowered.module.graph.nodes]
        self._sites = BufferSites(self._code.kernels, self.nodes, order)
        if self.session.options.layout != "packed":
            self._describe(self._code, self._sites)
        lost = [name for kernel in self._code.kernels for name in kernel.unseen]
        self._note(lost, "were overwritten by the kernel that wrote them")
        self._note(list(self._code.missed), "were used by code that could not be looked into")

    def _describe(self, code: ListeningCode, sites: BufferSites) -> None:
        """Write the graph in words, and give its code the names that other tools know it by."""
        operators = None
        if self.session.options.layout != "msit":
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

    def _hear(self, seen: Seen) -> None:
        if self._sites is None:
            return
        try:
            self.put(self._sites.of(seen), seen.tensor, self._sites.within(seen))
        except BaseException as error:
            self._failure = error
            raise

    def _run_both(
        self, code: ListeningCode, given: list[Any], before: RandomState
    ) -> Sequence[Any]:
        """Run with and without recording; what the program gets is of the run without."""
        copies = self.copied(given)
        try:
            seen = Run(code(list(copies)), copies, RandomState.of_torch())
        except Exception as error:
            if error is self._failure:
                raise
            self._code = None
            self.give_up(self.label, "running it to tell of its buffers failed", error)
            before.restore()
            return self.compiled(given)
        before.restore()
        plain = Run(self.compiled(list(given)), given, RandomState.of_torch())
        if not self._judged:
            self._judged = True
            observed = self.compare(self.label, plain, seen)
            self._trusted = observed.status == "unchanged"
            self.session.observed(observed)
        return plain.results

    def _put_given(self, given: list[Any]) -> None:
        for name, value in zip(self._given, given, strict=True):
            self.put(self.nodes.of(name), value)

    def _put_results(self, results: Sequence[Any]) -> None:
        known = set(self._given)
        for node, value in zip(self.outputs, results, strict=True):
            if isinstance(node, Node) and node.name not in known:
                known.add(node.name)
                self.put(self.nodes.of(node.name), value)


class _Taps:
    """The same graph with every node materialised, run beside it."""

    def __init__(self, owner: FusedGraph) -> None:
        self._owner = owner
        self._label = f"{owner.label} tapped"
        self._code: Callable[[list[Any]], Sequence[Any]] | None = None
        self._names: list[str] = []
        self._asked = False

    def run(self, given: list[Any]) -> Run | None:
        """Record the nodes; gives what the graph itself would have, for the first time."""
        owner = self._owner
        first, self._asked = not self._asked, True
        try:
            if first:
                module, self._names = tapped(owner.lowered.module)
                before = RandomState.of_torch()
                self._code = compile_again(owner.lowered.with_module(module), _UNCACHED)
                before.restore()
            if self._code is None:
                return None
            results = self._code(list(given))
        except Exception as error:  # noqa: BLE001  (said in the dump; the program goes on)
            self._code = None
            owner.give_up(self._label, "it could not be tapped", error)
            return None
        after = RandomState.of_torch()
        count = len(owner.outputs)
        # The values of the graph's outputs are taken from the program itself.
        own = {node.name for node in owner.outputs if isinstance(node, Node)}
        for name, value in zip(self._names, results[count:], strict=True):
            if name not in own:
                owner.put(owner.nodes.of(name), value)
        return Run(results[:count], given, after) if first else None

    def judge(self, plain: Run, mine: Run) -> None:
        """Say whether materialising every node changes what the graph computes."""
        self._owner.session.observed(self._owner.compare(self._label, plain, mine))


def _place(value: Any) -> Any:
    """Where a tensor's memory is."""
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
        return id(value)
    return value.untyped_storage().data_ptr() or id(value)

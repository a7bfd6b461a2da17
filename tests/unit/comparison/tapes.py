"""Records made by hand: a program is run operator by operator and written down as a dump has it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from paritas.formats.dumps.survey import RecordedCalls
from paritas.formats.files.records import Payload, Record, Site, TensorFacts
from paritas.formats.files.tensor_bytes import as_stored, digest
from paritas.recording.graphs import operator_arguments

if TYPE_CHECKING:
    from collections.abc import Callable


class Tape:
    """One rank and step of a dump, in memory."""

    def __init__(self) -> None:
        self.records: list[Record] = []
        self.values: dict[int, Tensor] = {}
        self._names: dict[int, str] = {}
        self._kept: list[Any] = []

    @property
    def calls(self) -> RecordedCalls:
        return RecordedCalls(self.records)

    def read(self, record: Record) -> Tensor:
        return self.values[record.sequence]

    def find(self, name: str, side: str = "output", position: str = "0") -> Record:
        return next(
            record
            for record in self.records
            if (record.site.name, record.site.side, record.site.position) == (name, side, position)
        )

    def put(self, site: Site, value: Any) -> Record:
        """Write down a value; one that is no tensor as text."""
        facts = payload = None
        mark = ""
        if isinstance(value, Tensor):
            kept = value.detach().clone()
            self.values[len(self.records)] = kept
            mark = digest(as_stored(kept))
            facts = TensorFacts(
                dtype=str(value.dtype).removeprefix("torch."),
                shape=tuple(value.shape),
                stride=value.stride(),
            )
            payload = Payload(file="values", nbytes=value.nbytes, shape=tuple(value.shape))
        record = Record(
            sequence=len(self.records),
            step=0,
            rank=0,
            id=site.id,
            site=site,
            tensor=facts,
            value=None if facts else repr(value),
            digest=mark,
            payload=payload,
        )
        self.records.append(record)
        return record

    def given(self, name: str, value: Tensor) -> Tensor:
        """An input of the graph."""
        self.put(_node(name, "placeholder"), value)
        return self._named(name, value)

    def node(
        self,
        name: str,
        op: str,
        *args: Any,
        spoil: Callable[[Any], Any] = lambda made: made,
        **kwargs: Any,
    ) -> Any:
        """Run an operator as a node of a graph; `spoil` is the fault it has."""
        site = _node(name, op)
        for place, value in operator_arguments(args, kwargs):
            made_by = self._names.get(id(value), name)
            self.put(_at(site, place, (made_by,)), value)
        made = spoil(_resolved(op)(*args, **kwargs))
        if isinstance(made, list | tuple):
            for place, value in enumerate(made):
                self.put(_at(site, str(place), (name,), side="output"), value)
                self._named(name, value)
        else:
            self.put(site, made)
        return self._named(name, made)

    def told(self, name: str, op: str, args: list[Any], made: Tensor) -> None:
        """A node that is said to have been run: nothing is."""
        site = _node(name, op)
        for place, value in operator_arguments(args, {}):
            self.put(_at(site, place, (name,)), value)
        self.put(site, made)

    def kernel(
        self,
        kernel: str,
        read: dict[str, Tensor],
        written: dict[tuple[str, ...], Tensor],
        *,
        exact: bool = True,
    ) -> None:
        """A kernel of fused code: what it read, by node; what it wrote, by the nodes inside."""
        main = list(written)[-1][-1]
        for place, (name, value) in enumerate(read.items()):
            site = _buffer(main, kernel, (name,), side="input", position=str(place))
            self.put(site, value)
        for nodes, value in written.items():
            self.put(_buffer(nodes[-1], kernel, nodes, exact=exact), value)

    def _named(self, name: str, value: Any) -> Any:
        self._names[id(value)] = name
        self._kept.append(value)  # so that no other takes its identity
        return value


def _node(name: str, op: str) -> Site:
    return Site(source="fx", level="node", name=name, op=op, graph="graph_0", nodes=(name,))


def _at(site: Site, position: str, nodes: tuple[str, ...], side: str = "input") -> Site:
    return Site(
        source="fx",
        level="node",
        name=site.name,
        op=site.op,
        graph=site.graph,
        nodes=nodes,
        side=side,  # type: ignore[arg-type]
        position=position,
    )


def _buffer(name: str, kernel: str, nodes: tuple[str, ...], **more: Any) -> Site:
    return Site(
        source="fused",
        level="buffer",
        name=name,
        kernel=kernel,
        graph="graph_0",
        nodes=nodes,
        **more,
    )


def _resolved(op: str) -> Callable[..., Any]:
    if op == "getitem":
        return lambda values, place: values[place].detach()  # an object of its own
    namespace, name, overload = op.split(".")
    found: Any = getattr(getattr(getattr(torch.ops, namespace), name), overload)
    return found

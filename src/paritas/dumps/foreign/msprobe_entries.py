"""The entries of one `dump.json` of msprobe, as records in the order of the program."""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, Any

import torch
from msgspec.structs import replace

from paritas.dumps.foreign.msprobe_names import (
    forward_name,
    in_order,
    number_gradients,
    parse_name,
    plain_paths,
)
from paritas.dumps.foreign.msprobe_shards import sharding_of
from paritas.dumps.foreign.msprobe_values import (
    checksum_of,
    facts_of,
    is_tensor,
    leaves,
    statistics_of,
    text_of,
)
from paritas.dumps.records import Payload, Record, Site
from paritas.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from paritas.dumps.foreign.finding import Problems
    from paritas.dumps.foreign.msprobe_names import Call, Lines
    from paritas.dumps.foreign.msprobe_shards import Sharding
    from paritas.dumps.records import Level, Phase, Side, TensorFacts

__all__ = ["VALUES", "Entries"]

VALUES = "dump_tensor_data"
_LONGEST_NAME = 400
_LONGEST_POSITION = 200
_SUFFIXES = (".pt", ".npy")
_PARTS = {"input_args", "input_kwargs", "input", "output", "parameters", "is_recompute"}
_OF_MODULES = ("module", "gradient")
_LEVELS: dict[str, Level] = {"module": "module", "function": "op", "gradient": "parameter"}


@dataclasses.dataclass(frozen=True)
class _Value:
    """A leaf of an entry, and where in the call it was."""

    leaf: Any
    side: Side
    position: str
    parameter: str = ""


class Entries:
    """What one process recorded in one step.

    Args:
        data: entries by name.
        parents: under which call each name stands.
        folder: of the process, inside the dump, with a `/` behind it, or empty.
        present: names of the files with values.
        most: how many values there can be.

    Attributes:
        shardings: of distributed tensors, by the number of the record.
    """

    def __init__(
        self,
        data: dict[str, Any],
        parents: dict[str, str],
        lines: Lines,
        folder: str,
        present: set[str],
        most: int,
        problems: Problems,
    ) -> None:
        self.shardings: dict[int, Sharding] = {}
        self._most = most
        self._parents = parents
        self._lines = lines
        self._folder = folder
        self._present = present
        self._problems = problems
        self._data = {name: entry for name, entry in data.items() if self._is_sound(name)}
        self._calls = {name: parse_name(name) for name in self._data}
        self._gradients = number_gradients(self._data)
        self._paths = plain_paths(
            {call.name: call.op for call in self._calls.values() if call.kind in _OF_MODULES}
        )

    def records(self, step: int, rank: int, first: int) -> list[Record]:
        """All that is there; `first` is the number of the first one."""
        found: list[Record] = []
        ids: dict[str, int] = {}
        for name, begins in in_order(self._data, self._parents):
            if name not in self._data:
                continue
            for site, leaf in self._sites(name, begins=begins):
                if len(found) >= self._most:
                    self._problems.add(
                        f"{self._folder}{name}: there are more than {self._most} values, more than"
                        f" a file of its size can describe; the rest is left out"
                    )
                    return found
                record = self._record(_unique(site, ids), leaf, name)
                if record is not None:
                    number = first + len(found)
                    self._note_sharding(leaf, number, name)
                    found.append(replace(record, sequence=number, step=step, rank=rank))
        return found

    def _is_sound(self, name: str) -> bool:
        if len(name) > _LONGEST_NAME or not _is_text(name):
            self._problems.add(f"{self._folder}: the entry {name[:80]!a} has no usable name")
            return False
        return True

    def _sites(self, name: str, *, begins: bool) -> Iterator[tuple[Site, Any]]:
        entry, call = self._data[name], self._calls[name]
        values = self._begin(name, entry, call) if begins else self._end(name, entry, call)
        try:
            for value in values:
                called = f"{value.parameter}.{value.position}"
                if len(called) > _LONGEST_POSITION:
                    raise UsageError(f"the position {called[:80]!a} is longer than any")
                yield self._site(name, call, value), value.leaf
        except UsageError as error:
            self._problems.add(f"{self._folder}{name}: {error}")

    def _begin(self, name: str, entry: Any, call: Call) -> Iterator[_Value]:
        """What a call takes. A backward call takes the gradients of what the forward call gave."""
        if not isinstance(entry, dict) or call.kind not in ("module", "function"):
            return
        if call.phase == "backward":
            gradients = entry.get("input")
            positions = self._graded(name, gradients, "output")
            yield from _placed(gradients, "output", positions)
            return
        for part in ("input_args", "input_kwargs"):
            yield from (_Value(leaf, "input", at) for at, leaf in leaves(entry.get(part, [])))
        parameters = entry.get("parameters")
        for key, leaf in parameters.items() if isinstance(parameters, dict) else ():
            yield _Value(leaf, "input", "value", parameter=key)

    def _end(self, name: str, entry: Any, call: Call) -> Iterator[_Value]:
        """What a call gives; of a backward call, the gradients of what the forward call took."""
        if call.kind in ("saved", "other") or not isinstance(entry, dict):
            # A gradient that never came is noted as nothing.
            found = leaves(entry) if entry is not None else ()
            yield from (_Value(leaf, "output", at) for at, leaf in found)
        elif call.kind == "gradient":
            for key, tree in entry.items():
                for at, leaf in leaves(tree):
                    position = "grad" if at == "0" else f"grad.{at}"
                    yield _Value(leaf, "output", position, parameter=key)
        elif call.phase == "backward":
            gradients = entry.get("output")
            positions = self._graded(name, gradients, "input_args")
            if call.kind == "function":
                # They are those of autograd's node, whose arguments are others than the
                # function's: a linear layer's node takes the bias first.
                positions = [f"grad_fn.{place}" for place in range(_length(gradients))]
            yield from _placed(gradients, "input", positions)
        else:
            output = _unpacked(entry.get("output", []))
            yield from (_Value(leaf, "output", at) for at, leaf in leaves(output))
        unknown = set(entry) - _PARTS if isinstance(entry, dict) else set()
        if unknown and call.kind in ("module", "function"):
            self._problems.add(f"{self._folder}{name}: {min(unknown)[:80]!a} is not known")

    def _graded(self, name: str, gradients: Any, part: str) -> list[str]:
        """The positions in the forward call of what has gradients.

        msprobe numbers the tensors that require one, wherever in the arguments they are.
        """
        plain = [str(place) for place in range(_length(gradients))]
        forward = self._data.get(forward_name(name))
        if not isinstance(forward, dict) or not isinstance(gradients, list):
            return plain
        tree = forward.get(part, [])
        wanted = [
            (position, leaf["shape"])
            for position, leaf in leaves(_unpacked(tree) if part == "output" else tree)
            if is_tensor(leaf) and leaf.get("requires_grad") is True
        ]
        fits = len(wanted) == len(gradients) and all(
            gradient is None or (is_tensor(gradient) and gradient["shape"] == shape)
            for gradient, (_, shape) in zip(gradients, wanted, strict=True)
        )
        return [position for position, _ in wanted] if fits else plain

    def _site(self, name: str, call: Call, value: _Value) -> Site:
        path = self._paths.get(call.name, call.name)
        own, module, number = call.name, "", call.number
        if call.kind in _OF_MODULES:
            own = module = path
        elif call.kind == "function":
            above = parse_name(self._parents.get(name, ""))
            module = self._paths.get(above.name, above.name) if above.kind == "module" else ""
        level: Level = _LEVELS.get(call.kind, "tensor")
        if call.kind == "gradient":
            number = self._gradients[name]
        if value.parameter:
            level = "parameter"
            # The parameters of the model itself have no path before them.
            own = value.parameter if path == call.op else f"{path}.{value.parameter}"
        phase: Phase = call.phase
        if call.kind == "saved" and self._is_gradient(name, call):
            own, phase = own.removesuffix("_grad"), "backward"
        line, code = self._lines.of(name, call)
        return Site(
            source="eager",
            level=level,
            name=_clean(own),
            phase=phase,
            side=value.side,
            position=_clean(value.position),
            op=call.op,
            module=module,
            line=_clean(line),
            code=_clean(code),
            call=number,
        )

    def _is_gradient(self, name: str, call: Call) -> bool:
        whole = f"{call.name.removesuffix('_grad')}.{call.number}.debug"
        return call.name.endswith("_grad") and whole != name and whole in self._data

    def _record(self, site: Site, leaf: Any, name: str) -> Record | None:
        nothing = Record(sequence=0, step=0, rank=0, id=site.id, site=site)
        if not is_tensor(leaf):
            return replace(nothing, value=text_of(leaf))
        try:
            facts = facts_of(leaf)
            statistics = statistics_of(leaf, facts.shape)
        except UsageError as error:
            self._problems.add(f"{self._folder}{name}, {site.position}: {error}")
            return None
        return replace(
            nothing,
            tensor=facts,
            digest=checksum_of(leaf),
            payload=self._payload(leaf, facts, name),
            statistics=statistics,
        )

    def _note_sharding(self, leaf: Any, number: int, name: str) -> None:
        try:
            sharding = sharding_of(leaf) if is_tensor(leaf) else None
        except UsageError as error:
            self._problems.add(f"{self._folder}{name}: {error}")
            return
        if sharding is not None:
            self.shardings[number] = sharding

    def _payload(self, leaf: dict[str, Any], facts: TensorFacts, name: str) -> Payload | None:
        file = leaf.get("data_name")
        if not isinstance(file, str) or not file.endswith(_SUFFIXES):
            return None  # statistics alone
        if len(file) > _LONGEST_NAME or not _is_text(file) or "/" in file or "\\" in file:
            self._problems.add(f"{self._folder}{name}: {file[:80]!a} is no name of a file")
            return None
        if file not in self._present:
            self._problems.add(f"{self._folder}{VALUES}/{file} is missing")
        dtype = getattr(torch, facts.dtype, None)
        width = dtype.itemsize if isinstance(dtype, torch.dtype) else 0
        return Payload(
            file=f"{self._folder}{VALUES}/{file}",
            nbytes=math.prod(facts.shape) * width,
            shape=facts.shape,
        )


def _unique(site: Site, ids: dict[str, int]) -> Site:
    """A site of its own: keys with dots in them may make two places look like one."""
    count = ids[site.id] = ids.get(site.id, 0) + 1
    if count == 1:
        return site
    return _unique(replace(site, position=f"{site.position}~{count}"), ids)


def _placed(gradients: Any, side: Side, positions: list[str]) -> Iterator[_Value]:
    """Gradients with their positions; what has none is no value."""
    trees = gradients if isinstance(gradients, list) else [gradients]
    for position, tree in zip(positions, trees, strict=True):
        for at, leaf in leaves(tree, position):
            if leaf is not None:
                yield _Value(leaf, side, at)


def _length(gradients: Any) -> int:
    return len(gradients) if isinstance(gradients, list) else 1


def _unpacked(output: Any) -> Any:
    """What a call gave: msprobe packs whatever is no tuple into one."""
    if isinstance(output, list) and len(output) == 1:
        only = output[0]
        if isinstance(only, list) or (isinstance(only, dict) and "type" not in only):
            return only
    return output


def _is_text(name: str) -> bool:
    return _clean(name) == name


def _clean(text: str) -> str:
    """Without the halves of characters that JSON can hold and no file can."""
    return text.encode(errors="replace").decode()

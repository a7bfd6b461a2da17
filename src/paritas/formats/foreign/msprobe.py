"""Dumps of msprobe (MindStudio's probe for PyTorch and MindSpore), tensors or statistics."""

from __future__ import annotations

import dataclasses
import math
import re
from collections import defaultdict
from typing import TYPE_CHECKING, Any

import torch
from msgspec.structs import replace

from paritas.core.errors import UsageError
from paritas.core.file_trees import Folder, Problems, natural_key
from paritas.formats.files.npy_files import array_place, read_npy_header
from paritas.formats.files.records import Payload, Record, Site
from paritas.formats.files.tensor_bytes import OpenFiles, known_dtype, values_at, verify_at, view_at
from paritas.formats.files.torch_files import only_tensor
from paritas.formats.foreign.foreign_dump import ForeignDump, rank_of
from paritas.formats.foreign.msprobe_values import (
    StackLines,
    checksum_of,
    facts_of,
    forward_name,
    in_order,
    is_tensor,
    leaves,
    load_json,
    number_gradients,
    parents_of,
    parse_name,
    place_shards,
    plain_paths,
    sharding_of,
    statistics_of,
    text_of,
)

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from torch import Tensor

    from paritas.formats.files.records import Level, Phase, RankDump, Side, TensorFacts
    from paritas.formats.files.tensor_bytes import FilePlace
    from paritas.formats.foreign.msprobe_values import MsprobeCall, Sharding


# --- Entries of one `dump.json` -------------------------------------------------------------------

VALUES = "dump_tensor_data"
_LONGEST_NAME = 400
_LONGEST_POSITION = 200
_SUFFIXES = (".pt", ".npy")
_PARTS = {"input_args", "input_kwargs", "input", "output", "parameters", "is_recompute"}
_OF_MODULES = ("module", "gradient")
_LEVELS: dict[str, Level] = {"module": "module", "function": "op", "gradient": "parameter"}


@dataclasses.dataclass(frozen=True)
class _EntryValue:
    """A leaf of an entry, and its place in the call."""

    leaf: Any
    side: Side
    position: str
    parameter: str = ""


class Entries:
    """What one process recorded in one step.

    Args:
        data: entries by name.
        parents: the enclosing call of each name.
        folder: of the process, inside the dump, with a trailing `/`, or empty.
        present: names of the files with values.
        most: the limit on values.

    Attributes:
        shardings: of distributed tensors, by sequence number.
    """

    def __init__(
        self,
        data: dict[str, Any],
        parents: dict[str, str],
        lines: StackLines,
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
        """All records; `first` is the number of the first one."""
        records: list[Record] = []
        ids: dict[str, int] = {}
        for name, begins in in_order(self._data, self._parents):
            if name not in self._data:
                continue
            for site, leaf in self._sites(name, begins=begins):
                if len(records) >= self._most:
                    self._problems.add(
                        f"{self._folder}{name}: there are more than {self._most} values, too many"
                        f" for a file of its size; the rest is ignored"
                    )
                    return records
                record = self._record(_make_unique(site, ids), leaf, name)
                if record is not None:
                    number = first + len(records)
                    self._note_sharding(leaf, number, name)
                    records.append(replace(record, sequence=number, step=step, rank=rank))
        return records

    def _is_sound(self, name: str) -> bool:
        if len(name) > _LONGEST_NAME or not _is_text(name):
            self._problems.add(f"{self._folder}: the entry {name[:80]!a} has no valid name")
            return False
        return True

    def _sites(self, name: str, *, begins: bool) -> Iterator[tuple[Site, Any]]:
        entry, call = self._data[name], self._calls[name]
        list_values = self._list_inputs if begins else self._list_outputs
        try:
            for value in list_values(name, entry, call):
                called = f"{value.parameter}.{value.position}"
                if len(called) > _LONGEST_POSITION:
                    raise UsageError(f"the position {called[:80]!a} is too long")
                yield self._site(name, call, value), value.leaf
        except UsageError as error:
            self._problems.add(f"{self._folder}{name}: {error}")

    def _list_inputs(self, name: str, entry: Any, call: MsprobeCall) -> Iterator[_EntryValue]:
        """The inputs of a call; of a backward call, the gradients of the forward call's outputs."""
        if not isinstance(entry, dict) or call.kind not in ("module", "function"):
            return
        if call.phase == "backward":
            gradients = entry.get("input")
            positions = self._gradient_positions(name, gradients, "output")
            yield from _pair_with_positions(gradients, "output", positions)
            return
        for part in ("input_args", "input_kwargs"):
            yield from (_EntryValue(leaf, "input", at) for at, leaf in leaves(entry.get(part, [])))
        parameters = entry.get("parameters")
        for key, leaf in parameters.items() if isinstance(parameters, dict) else ():
            yield _EntryValue(leaf, "input", "value", parameter=key)

    def _list_outputs(self, name: str, entry: Any, call: MsprobeCall) -> Iterator[_EntryValue]:
        """The outputs of a call; of a backward call, the gradients of the forward call's inputs."""
        if call.kind in ("saved", "other") or not isinstance(entry, dict):
            # A gradient that was never computed is None.
            output_leaves = leaves(entry) if entry is not None else ()
            yield from (_EntryValue(leaf, "output", at) for at, leaf in output_leaves)
        elif call.kind == "gradient":
            for key, tree in entry.items():
                for at, leaf in leaves(tree):
                    position = "grad" if at == "0" else f"grad.{at}"
                    yield _EntryValue(leaf, "output", position, parameter=key)
        elif call.phase == "backward":
            gradients = entry.get("output")
            positions = self._gradient_positions(name, gradients, "input_args")
            if call.kind == "function":
                # They belong to autograd's node, whose arguments differ from the function's: the
                # node of a linear layer takes the bias first.
                positions = [f"grad_fn.{index}" for index in range(_count_gradients(gradients))]
            yield from _pair_with_positions(gradients, "input", positions)
        else:
            output = _unpack_output(entry.get("output", []))
            yield from (_EntryValue(leaf, "output", at) for at, leaf in leaves(output))
        unknown = set(entry) - _PARTS if isinstance(entry, dict) else set()
        if unknown and call.kind in ("module", "function"):
            text = f"{self._folder}{name}: unknown key {min(unknown)[:80]!a}"
            self._problems.add(text, is_loss=False)

    def _gradient_positions(self, name: str, gradients: Any, part: str) -> list[str]:
        """The positions in the forward call of the tensors with gradients.

        msprobe numbers the tensors that require one, wherever in the arguments they are.
        """
        plain = [str(position) for position in range(_count_gradients(gradients))]
        forward = self._data.get(forward_name(name))
        if not isinstance(forward, dict) or not isinstance(gradients, list):
            return plain
        tree = forward.get(part, [])
        expected = [
            (position, leaf["shape"])
            for position, leaf in leaves(_unpack_output(tree) if part == "output" else tree)
            if is_tensor(leaf) and leaf.get("requires_grad") is True
        ]
        fits = len(expected) == len(gradients) and all(
            gradient is None or (is_tensor(gradient) and gradient["shape"] == shape)
            for gradient, (_, shape) in zip(gradients, expected, strict=True)
        )
        return [position for position, _ in expected] if fits else plain

    def _site(self, name: str, call: MsprobeCall, value: _EntryValue) -> Site:
        path = self._paths.get(call.name, call.name)
        own_name, module, number = call.name, "", call.number
        if call.kind in _OF_MODULES:
            own_name = module = path
        elif call.kind == "function":
            above = parse_name(self._parents.get(name, ""))
            module = self._paths.get(above.name, above.name) if above.kind == "module" else ""
        level: Level = _LEVELS.get(call.kind, "tensor")
        if call.kind == "gradient":
            number = self._gradients[name]
        if value.parameter:
            level = "parameter"
            # The parameters of the model itself have no path in front.
            own_name = value.parameter if path == call.op else f"{path}.{value.parameter}"
        phase: Phase = call.phase
        if call.kind == "saved" and self._is_gradient(name, call):
            own_name, phase = own_name.removesuffix("_grad"), "backward"
        line, code = self._lines.of(name, call)
        return Site(
            source="eager",
            level=level,
            name=_drop_surrogates(own_name),
            phase=phase,
            side=value.side,
            position=_drop_surrogates(value.position),
            op=call.op,
            module=module,
            line=_drop_surrogates(line),
            code=_drop_surrogates(code),
            call=number,
        )

    def _is_gradient(self, name: str, call: MsprobeCall) -> bool:
        debug_name = f"{call.name.removesuffix('_grad')}.{call.number}.debug"
        return call.name.endswith("_grad") and debug_name != name and debug_name in self._data

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
            self._problems.add(f"{self._folder}{name}: {error}", is_loss=False)
            return
        if sharding is not None:
            self.shardings[number] = sharding

    def _payload(self, leaf: dict[str, Any], facts: TensorFacts, name: str) -> Payload | None:
        file = leaf.get("data_name")
        if not isinstance(file, str) or not file.endswith(_SUFFIXES):
            return None  # only statistics
        if len(file) > _LONGEST_NAME or not _is_text(file) or "/" in file or "\\" in file:
            self._problems.add(f"{self._folder}{name}: {file[:80]!a} is not a file name")
            return None
        if file not in self._present:
            self._problems.add(f"{self._folder}{VALUES}/{file} is missing", is_loss=False)
        dtype = getattr(torch, facts.dtype, None)
        width = dtype.itemsize if isinstance(dtype, torch.dtype) else 0
        return Payload(
            file=f"{self._folder}{VALUES}/{file}",
            nbytes=math.prod(facts.shape) * width,
            shape=facts.shape,
        )


def _make_unique(site: Site, ids: dict[str, int]) -> Site:
    """Make a site unique: keys with dots may make two places look the same."""
    count = ids[site.id] = ids.get(site.id, 0) + 1
    if count == 1:
        return site
    return _make_unique(replace(site, position=f"{site.position}~{count}"), ids)


def _pair_with_positions(gradients: Any, side: Side, positions: list[str]) -> Iterator[_EntryValue]:
    """Gradients with their positions, without missing ones."""
    trees = gradients if isinstance(gradients, list) else [gradients]
    for position, tree in zip(positions, trees, strict=True):
        for at, leaf in leaves(tree, position):
            if leaf is not None:
                yield _EntryValue(leaf, side, at)


def _count_gradients(gradients: Any) -> int:
    return len(gradients) if isinstance(gradients, list) else 1


def _unpack_output(output: Any) -> Any:
    """The output of a call: msprobe packs anything but a tuple into one."""
    if isinstance(output, list) and len(output) == 1:
        only = output[0]
        if isinstance(only, list) or (isinstance(only, dict) and "type" not in only):
            return only
    return output


def _is_text(name: str) -> bool:
    return _drop_surrogates(name) == name


def _drop_surrogates(text: str) -> str:
    """Replace lone surrogates, which JSON can contain but files cannot."""
    return text.encode(errors="replace").decode()


# --- The dump -------------------------------------------------------------------------------------

# ::
#
#     step{n}/rank{r}/dump.json            the records; proc{pid} if the rank was unknown
#     step{n}/rank{r}/stack.json           their source lines
#     step{n}/rank{r}/construct.json       their modules
#     step{n}/rank{r}/dump_tensor_data/    the values, a file for each tensor

_KIND = "msprobe"
_STEP = re.compile(r"step(\d{1,9})")
_PROCESS = re.compile(r"(rank|proc)(\d{0,9})")
_MAIN = ("dump.json", "debug.json")
_HEAD = 4096
_MOST_FOLDERS = 100_000
# The fewest bytes of JSON for a value: msprobe writes about 250 for a tensor, 50 for a number.
_LEAST_BYTES = 16
_NOTES = (
    "msprobe rounds mean and norm to the dtype of the tensor",
    "msprobe does not count zeros and exponents: a count of none means unknown",
    "msprobe does not count NaN and infinities: 1 means at least one",
)


@dataclasses.dataclass(frozen=True)
class _ProcessPart:
    """The part of one process in one step.

    Attributes:
        folder: inside the dump, "" for the dump itself.
        process: `rank3` or `proc4711`, or "".
    """

    folder: Path
    step: int
    process: str


def looks_like(path: Path) -> bool:
    """Whether this is a dump of msprobe, by its names and the beginning of one file."""
    try:
        parts = _find_parts(path)
        return bool(parts) and any(_is_main(parts[0].folder / name) for name in _MAIN)
    except (OSError, UsageError):
        return False


def open_dump(path: Path) -> ForeignDump:
    """Read the records; values are read on demand.

    `path` is the whole dump, one of its steps, or the folder of one process.
    """
    root = path.parent if path.is_file() else path
    parts = _find_parts(root)
    if not parts:
        raise UsageError(
            f"{path} is not a dump of msprobe: it has no step0/rank0/dump.json or the like"
        )
    files, problems = Folder(root), Problems()
    ranks = _number_processes(parts, problems)
    records: dict[int, list[Record]] = {}
    shardings: dict[int, dict[int, Sharding]] = defaultdict(dict)
    for part in sorted(parts, key=lambda part: (ranks[part.process], part.step)):
        rank = ranks[part.process]
        records_of_rank = records.setdefault(rank, [])
        try:
            entries = _read_part(files, part, problems)
            records_of_rank += entries.records(part.step, rank, len(records_of_rank))
            shardings[rank] |= entries.shardings
        except (UsageError, OSError) as error:
            problems.add(f"{part.folder.relative_to(root).as_posix()}: {error}")
    if not any(records.values()):
        raise UsageError(f"{path} cannot be read: {'; '.join(problems.all())}")
    place_shards(records, shardings, problems)
    rank_dumps = {
        rank: _make_rank(root, rank, rank_records, len(records))
        for rank, rank_records in records.items()
    }
    opened = OpenFiles()

    def read(record: Record) -> Tensor:
        file, position, dtype = _locate_values(files, record)
        return values_at(file, position, opened).to(dtype)

    def view(record: Record, check: bool) -> Tensor:  # noqa: FBT001  (see `ForeignDump`)
        file, position, dtype = _locate_values(files, record)
        return view_at(file, position, opened, check=check).to(dtype)

    def verify(record: Record) -> bool:
        file, position, _ = _locate_values(files, record)
        return verify_at(file, position, opened)

    listed = (problems.all(), problems.losses())
    return ForeignDump(root, _KIND, rank_dumps, *listed, read, view, verify)


def _is_main(file: Path) -> bool:
    if not file.is_file():
        return False
    with file.open("rb") as opened:
        head = opened.read(_HEAD)
    return head.lstrip()[:1] == b"{" and (b'"dump_data_dir"' in head or b'"task"' in head)


def _find_parts(root: Path) -> list[_ProcessPart]:
    """The folders with records, whichever level `root` is."""
    if not root.is_dir():
        return _find_parts(root.parent) if root.name in _MAIN and root.is_file() else []
    if any((root / name).is_file() for name in _MAIN):
        resolved = root.resolve()
        process = resolved.name if _PROCESS.fullmatch(resolved.name) else ""
        return [_ProcessPart(root, _parse_step(resolved.parent.name) or 0, process)]
    steps = [
        (step, folder)
        for folder in _list_folders(root)
        if (step := _parse_step(folder.name)) is not None
    ]
    if not steps:  # it may be a step itself, under another name
        steps = [(_parse_step(root.resolve().name) or 0, root)]
    return [
        _ProcessPart(folder, number, folder.name)
        for number, above in steps
        for folder in _list_folders(above)
        if _PROCESS.fullmatch(folder.name) and any((folder / name).is_file() for name in _MAIN)
    ]


def _list_folders(above: Path) -> list[Path]:
    folders = [folder for folder in above.iterdir() if folder.is_dir() and not folder.is_symlink()]
    if len(folders) > _MOST_FOLDERS:
        raise UsageError(f"{above} has {len(folders)} folders: give one of them")
    return sorted(folders, key=lambda folder: natural_key(folder.name))


def _parse_step(name: str) -> int | None:
    match = _STEP.fullmatch(name)
    return int(match[1]) if match else None


def _number_processes(parts: list[_ProcessPart], problems: Problems) -> dict[str, int]:
    """The rank of each process; processes that did not know theirs are numbered."""
    names = {part.process for part in parts}
    ranks = {name: int(name[4:] or 0) for name in names if name.startswith("rank")}
    others = sorted(names - set(ranks), key=natural_key)
    together = {part.step for part in parts if part.process in others}
    if not ranks and len(together) == sum(part.process in others for part in parts):
        # Never two in one step: the same program, restarted between steps.
        return dict.fromkeys(others, 0)
    following = max(ranks.values(), default=-1) + 1
    for position, name in enumerate(others):
        ranks[name] = following + position
        text = f"{name} counts as rank {ranks[name]}: msprobe did not know its rank"
        problems.add(text, is_loss=False)
    return ranks


def _read_part(files: Folder, part: _ProcessPart, problems: Problems) -> Entries:
    folder = part.folder.relative_to(files.path).as_posix()
    folder = "" if folder == "." else f"{folder}/"
    entries: dict[str, Any] = {}
    most = 0
    for name in _MAIN:
        if (part.folder / name).is_file():
            file = files.locate(folder + name)
            content = load_json(file)
            most += file.stat().st_size // _LEAST_BYTES
            data = content.get("data") if isinstance(content, dict) else None
            if not isinstance(data, dict):
                raise UsageError(f"{name} has no data")
            entries |= data
    if not entries:
        raise UsageError("it has no entries: msprobe writes them when its debugger is stopped")
    parents = parents_of(_read_optional(files, folder, "construct.json", problems))
    lines = StackLines(_read_optional(files, folder, "stack.json", problems))
    values = part.folder / VALUES
    present = {entry.name for entry in values.iterdir()} if values.is_dir() else set()
    return Entries(entries, parents, lines, folder, present, most, problems)


def _read_optional(files: Folder, folder: str, name: str, problems: Problems) -> Any:
    """A file that may be missing: without it, less is known about the origin of values."""
    if not (files.path / folder / name).is_file():
        return None
    try:
        return load_json(files.locate(folder + name))
    except (UsageError, OSError) as error:
        problems.add(f"{folder}{name}: {error}", is_loss=False)
        return None


def _make_rank(root: Path, rank: int, records: list[Record], world_size: int) -> RankDump:
    data = "tensor" if any(record.payload for record in records) else "stats"
    rank_dump = rank_of(root, _KIND, rank, records, world_size=world_size, data=data)
    header = replace(rank_dump.header, sources=("eager",), notes=_NOTES)
    return dataclasses.replace(rank_dump, header=header)


def _locate_values(files: Folder, record: Record) -> tuple[Path, FilePlace, torch.dtype]:
    """Where the values of a record are, and their dtype."""
    payload, facts = record.payload, record.tensor
    if facts is None:
        raise UsageError(f"it is not a tensor: its value is {record.value}")
    if payload is None:
        raise UsageError("it has no values: only statistics were recorded")
    file = files.locate(payload.file)
    if payload.file.endswith(".npy"):
        with file.open("rb") as opened:
            position = array_place(payload.file, read_npy_header(opened), file.stat().st_size)
    else:
        position = only_tensor(file, payload.file)
    wide = facts.dtype == "bfloat16" and position.dtype == "float32"  # numpy has no bfloat16
    if position.shape != facts.shape or (position.dtype != facts.dtype and not wide):
        raise UsageError(
            f"{payload.file} holds {position.dtype} of {position.shape}, but dump.json says "
            f"{facts.dtype} of {facts.shape}"
        )
    return file, position, known_dtype(facts.dtype)

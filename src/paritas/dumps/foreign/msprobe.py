"""Dumps of msprobe (MindStudio's probe for PyTorch and MindSpore), of tensors and of statistics.

::

    step{n}/rank{r}/dump.json            or proc{pid}, where no ranks were known; what was recorded
    step{n}/rank{r}/stack.json           from which lines
    step{n}/rank{r}/construct.json       under which modules
    step{n}/rank{r}/dump_tensor_data/    the values, a file for each tensor
"""

from __future__ import annotations

import dataclasses
import re
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from paritas.dumps.dtypes import known_dtype
from paritas.dumps.foreign.dump import ForeignDump, rank_of
from paritas.dumps.foreign.finding import Folder, Problems, natural_key
from paritas.dumps.foreign.msprobe_entries import VALUES, Entries
from paritas.dumps.foreign.msprobe_names import Lines, parents_of
from paritas.dumps.foreign.msprobe_shards import place_shards
from paritas.dumps.foreign.msprobe_values import load_json
from paritas.dumps.foreign.npy_headers import array_place, read_header
from paritas.dumps.foreign.raw_values import values_at, verify_at, view_at
from paritas.dumps.foreign.torch_files import only_tensor
from paritas.dumps.mapped_files import OpenFiles
from paritas.errors import UsageError

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from paritas.dumps.foreign.msprobe_shards import Sharding
    from paritas.dumps.foreign.raw_values import Place
    from paritas.dumps.index import RankDump
    from paritas.dumps.records import Record

__all__ = ["looks_like", "open_dump"]

_KIND = "msprobe"
_STEP = re.compile(r"step(\d{1,9})")
_PROCESS = re.compile(r"(rank|proc)(\d{0,9})")
_MAIN = ("dump.json", "debug.json")
_HEAD = 4096
_MOST_FOLDERS = 100_000
# Bytes of JSON for a value, at least: msprobe writes some 250 for a tensor, 50 for a number.
_LEAST_TOLD = 16
_NOTES = (
    "msprobe's mean and norm are rounded to the tensor's own dtype",
    "msprobe does not count zeros and exponents: where there are none, that is not known",
    "msprobe does not count NaN and infinities: 1 stands for at least one",
)


@dataclasses.dataclass(frozen=True)
class _Part:
    """What one process left of one step.

    Attributes:
        folder: inside the dump, "" for the dump's own.
        process: `rank3` or `proc4711`, or "".
    """

    folder: Path
    step: int
    process: str


def looks_like(path: Path) -> bool:
    """Whether msprobe left this: by its names, and the beginning of one file."""
    try:
        parts = _parts(path)
        return bool(parts) and any(_is_main(parts[0].folder / name) for name in _MAIN)
    except (OSError, UsageError):
        return False


def open_dump(path: Path) -> ForeignDump:
    """Read what was recorded; values are read when they are asked for.

    `path` is the whole dump, one step of it, or the folder of one process.

    Raises:
        UsageError: there is nothing of msprobe's, or nothing that can be read.
    """
    root = path.parent if path.is_file() else path
    parts = _parts(root)
    if not parts:
        raise UsageError(
            f"{path} is no dump of msprobe: looked for step0/rank0/dump.json and the like"
        )
    files, problems = Folder(root), Problems()
    ranks = _numbered(parts, problems)
    records: dict[int, list[Record]] = {}
    shardings: dict[int, dict[int, Sharding]] = defaultdict(dict)
    for part in sorted(parts, key=lambda part: (ranks[part.process], part.step)):
        rank = ranks[part.process]
        known = records.setdefault(rank, [])
        try:
            entries = _read_part(files, part, problems)
            known += entries.records(part.step, rank, len(known))
            shardings[rank] |= entries.shardings
        except (UsageError, OSError) as error:
            problems.add(f"{part.folder.relative_to(root).as_posix()}: {error}")
    if not any(records.values()):
        raise UsageError(f"{path} cannot be read: {'; '.join(problems.all())}")
    place_shards(records, shardings, problems)
    found = {rank: _rank(root, rank, own, len(records)) for rank, own in records.items()}
    opened = OpenFiles()

    def read(record: Record) -> Tensor:
        file, place, dtype = _located(files, record)
        return values_at(file, place, opened).to(dtype)

    def view(record: Record, check: bool) -> Tensor:  # noqa: FBT001  (see `ForeignDump`)
        file, place, dtype = _located(files, record)
        return view_at(file, place, opened, check=check).to(dtype)

    def verify(record: Record) -> bool:
        file, place, _ = _located(files, record)
        return verify_at(file, place, opened)

    return ForeignDump(root, _KIND, found, problems.all(), read, view, verify)


def _is_main(file: Path) -> bool:
    if not file.is_file():
        return False
    with file.open("rb") as opened:
        head = opened.read(_HEAD)
    return head.lstrip()[:1] == b"{" and (b'"dump_data_dir"' in head or b'"task"' in head)


def _parts(root: Path) -> list[_Part]:
    """The folders with something in them, whichever of the levels `root` is."""
    if not root.is_dir():
        return _parts(root.parent) if root.name in _MAIN and root.is_file() else []
    if any((root / name).is_file() for name in _MAIN):
        whole = root.resolve()
        process = whole.name if _PROCESS.fullmatch(whole.name) else ""
        return [_Part(root, _step(whole.parent.name) or 0, process)]
    steps = [(own, one) for one in _folders(root) if (own := _step(one.name)) is not None]
    if not steps:  # it is one itself, perhaps under another name
        steps = [(_step(root.resolve().name) or 0, root)]
    return [
        _Part(folder, number, folder.name)
        for number, above in steps
        for folder in _folders(above)
        if _PROCESS.fullmatch(folder.name) and any((folder / name).is_file() for name in _MAIN)
    ]


def _folders(above: Path) -> list[Path]:
    found = [one for one in above.iterdir() if one.is_dir() and not one.is_symlink()]
    if len(found) > _MOST_FOLDERS:
        raise UsageError(f"{above} holds {len(found)} folders: give a part of it")
    return sorted(found, key=lambda one: natural_key(one.name))


def _step(name: str) -> int | None:
    found = _STEP.fullmatch(name)
    return int(found[1]) if found else None


def _numbered(parts: list[_Part], problems: Problems) -> dict[str, int]:
    """The rank of each process; those that did not know theirs are counted."""
    names = {part.process for part in parts}
    ranks = {name: int(name[4:] or 0) for name in names if name.startswith("rank")}
    others = sorted(names - set(ranks), key=natural_key)
    together = {part.step for part in parts if part.process in others}
    if not ranks and len(together) == sum(part.process in others for part in parts):
        # Never two in one step: the same program, which was started again between steps.
        return dict.fromkeys(others, 0)
    following = max(ranks.values(), default=-1) + 1
    for place, name in enumerate(others):
        ranks[name] = following + place
        problems.add(f"{name} is taken for rank {ranks[name]}: msprobe did not know its rank")
    return ranks


def _read_part(files: Folder, part: _Part, problems: Problems) -> Entries:
    folder = part.folder.relative_to(files.path).as_posix()
    folder = "" if folder == "." else f"{folder}/"
    entries: dict[str, Any] = {}
    most = 0
    for name in _MAIN:
        if (part.folder / name).is_file():
            file = files.locate(folder + name)
            told = load_json(file)
            most += file.stat().st_size // _LEAST_TOLD
            data = told.get("data") if isinstance(told, dict) else None
            if not isinstance(data, dict):
                raise UsageError(f"{name} has no data")
            entries |= data
    if not entries:
        raise UsageError("it holds no entries: msprobe writes them when its debugger is stopped")
    parents = parents_of(_extra(files, folder, "construct.json", problems))
    lines = Lines(_extra(files, folder, "stack.json", problems))
    values = part.folder / VALUES
    present = {one.name for one in values.iterdir()} if values.is_dir() else set()
    return Entries(entries, parents, lines, folder, present, most, problems)


def _extra(files: Folder, folder: str, name: str, problems: Problems) -> Any:
    """A file that may be missing: without it, less is known of where values come from."""
    if not (files.path / folder / name).is_file():
        return None
    try:
        return load_json(files.locate(folder + name))
    except (UsageError, OSError) as error:
        problems.add(f"{folder}{name}: {error}")
        return None


def _rank(root: Path, rank: int, records: list[Record], world_size: int) -> RankDump:
    data = "tensor" if any(record.payload for record in records) else "stats"
    made = rank_of(root, _KIND, rank, records, world_size=world_size, data=data)
    header = replace(made.header, sources=("eager",), notes=_NOTES)
    return dataclasses.replace(made, header=header)


def _located(files: Folder, record: Record) -> tuple[Path, Place, torch.dtype]:
    """Where the values of a record are, and the dtype that they had."""
    payload, facts = record.payload, record.tensor
    if facts is None:
        raise UsageError(f"it is no tensor: its value is {record.value}")
    if payload is None:
        raise UsageError("it has no values: statistics are all that was recorded")
    file = files.locate(payload.file)
    if payload.file.endswith(".npy"):
        with file.open("rb") as opened:
            place = array_place(payload.file, read_header(opened), file.stat().st_size)
    else:
        place = only_tensor(file, payload.file)
    wide = facts.dtype == "bfloat16" and place.dtype == "float32"  # numpy has no narrower one
    if place.shape != facts.shape or (place.dtype != facts.dtype and not wide):
        raise UsageError(
            f"{payload.file} holds {place.dtype} of {place.shape}, where dump.json says "
            f"{facts.dtype} of {facts.shape}"
        )
    return file, place, known_dtype(facts.dtype)

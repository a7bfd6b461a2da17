"""Dumps of SGLang's `dumper`: one `.pt` file per tensor, with its tags in the file name.

::

    {run}/step=3___rank=0___dump_index=12___name=attn_out___layer_id=5.pt

Earlier releases call the step `curr_step` or `forward_pass_id`, and put the rank at the end of the
folder name. A file holds the value, or `{"value": …, "meta": …}`; the metadata say over which ranks
a tensor is split (`dims`, for example `b s[cp:zigzag] h[tp] d`) and the position of this rank.
"""

from __future__ import annotations

import re
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any

from paritas.core.errors import UsageError
from paritas.core.file_trees import glimpse
from paritas.formats.files.records import Site
from paritas.formats.files.torch_files import read_saved
from paritas.formats.foreign.foreign_dump import ForeignDump, Gathered

if TYPE_CHECKING:
    from pathlib import Path

    from paritas.core.file_trees import FoundFile
    from paritas.formats.files.records import Level, Phase, Record, Side

_STEPS = ("step", "curr_step", "forward_pass_id")
# Tags that say where and when a tensor was recorded, not what it is.
_NOT_NAMES = {
    *_STEPS, "rank", "dump_index", "name", "recompute_status",
    "pp_rank", "tp_rank", "cp_rank", "ep_rank", "etp_rank",
}  # fmt: skip
_RANK_FOLDER = re.compile(r"(sglang_dump_.+)_(\d{1,6})")
_NUMBER = re.compile(r"\d{1,9}")
_HOOKED = re.compile(
    r"(?:(?P<module>.+)\.)?(?:(?P<input>inputs)\.(?P<position>\w+)|output)(?:\.(?P<key>\w+))?"
)
_LONGEST_DIMS = 1000
_MOST_TAGS = 64


class SglangDump(ForeignDump):
    """A dump of SGLang.

    Attributes:
        dims: how the dimensions of a tensor are named and split, by rank and sequence number.
        tags: all tags in the file name, by rank and sequence number.
        parallel: by rank, its position among the ranks: `tp_rank`, `tp_size` and so on.
    """

    dims: dict[tuple[int, int], str]
    tags: dict[tuple[int, int], dict[str, str]]
    parallel: dict[int, dict[str, int]]

    def dims_of(self, record: Record) -> str:
        """How a record's dimensions are split; empty if the dump does not say."""
        return self.dims.get((record.rank, record.sequence), "")


def looks_like(path: Path) -> bool:
    """Whether file names consist of tags."""
    return any(_parse_tags(PurePosixPath(name).name) for name in glimpse(path))


def open_dump(path: Path) -> SglangDump:
    """Open a run."""
    gathered = Gathered(path, "sglang")
    files = gathered.folder.find(lambda name: name.endswith(".pt"), gathered.problems)
    _refuse_several(path, files)
    tagged: list[tuple[FoundFile, dict[str, str]]] = []
    for file in files:
        tags = _parse_tags(file.parts[-1])
        if tags:
            tagged.append((file, tags))
        else:
            gathered.problems.add(f"skipped {file.name}: its name has no tags")
    reading = _SglangReading(gathered)
    for file, tags in sorted(tagged, key=lambda item: _sort_key(*item)):
        reading.add(file, tags)
    dump = gathered.make(SglangDump)
    dump.dims, dump.tags, dump.parallel = reading.dims, reading.tags, reading.parallel
    return dump


def _parse_tags(name: str) -> dict[str, str]:
    """The tags in a file name; empty if it is not such a name."""
    tags: dict[str, str] = {}
    last = ""
    if not name.endswith(".pt"):
        return tags
    for part in name.removesuffix(".pt").split("___")[:_MOST_TAGS]:
        key, is_tag, value = part.partition("=")
        if is_tag and key.isidentifier():
            tags[key] = value
            last = key
        elif last:  # a value may contain the separator
            tags[last] += f"___{part}"
        else:
            return {}
    return tags if "name" in tags and any(step in tags for step in _STEPS) else {}


def _parse_number(text: str | None) -> int:
    return int(text) if text is not None and _NUMBER.fullmatch(text) else 0


def _find_step(tags: dict[str, str]) -> int:
    return _parse_number(next((tags[key] for key in _STEPS if key in tags), None))


def _find_rank(file: FoundFile, tags: dict[str, str]) -> int:
    if "rank" in tags:
        return _parse_number(tags["rank"])
    folder = _RANK_FOLDER.fullmatch(file.parts[-2]) if len(file.parts) > 1 else None
    return int(folder[2]) if folder else 0


def _sort_key(file: FoundFile, tags: dict[str, str]) -> tuple[int, int, int]:
    return _find_rank(file, tags), _parse_number(tags.get("dump_index")), _find_step(tags)


def _refuse_several(path: Path, files: list[FoundFile]) -> None:
    """Refuse two runs in one folder: they would look like one, with every tensor twice."""
    runs = set()
    for file in files:
        folder = file.name.rpartition("/")[0]
        match = _RANK_FOLDER.fullmatch(PurePosixPath(folder).name)
        runs.add(str(PurePosixPath(folder).with_name(match[1])) if match else folder)
    if len(runs) > 1:
        named = ", ".join(sorted(runs)[:3])
        raise UsageError(f"{path} has {len(runs)} runs of sglang: give one of them, as {named}")


class _SglangReading:
    """Reads the files one after the other."""

    def __init__(self, gathered: Gathered) -> None:
        self.dims: dict[tuple[int, int], str] = {}
        self.tags: dict[tuple[int, int], dict[str, str]] = {}
        self.parallel: dict[int, dict[str, int]] = {}
        self._gathered = gathered

    def add(self, file: FoundFile, tags: dict[str, str]) -> None:
        """Add the values of a file."""
        step, rank = _find_step(tags), _find_rank(file, tags)
        try:
            saved = read_saved(self._gathered.folder.locate(file.name), file.name)
            value: Any = saved.tree
            meta: dict[Any, Any] = {}
            match value:
                case {"value": value, "meta": dict() as meta}:
                    pass
            leaves = saved.leaves(value)
        except (UsageError, OSError) as error:
            site = _make_site(tags, ())
            record = self._gathered.add_unreadable(step, rank, site, file, str(error))
            self.tags[rank, record.sequence] = tags
            return
        self._note_ranks(rank, meta)
        dims = meta.get("dims")
        for leaf in leaves:
            site = _make_site(tags, leaf.way)
            record = self._gathered.add_saved(step, rank, site, file, leaf.value)
            self.tags[rank, record.sequence] = tags
            if isinstance(dims, str) and record.tensor is not None:
                self.dims[rank, record.sequence] = dims[:_LONGEST_DIMS]

    def _note_ranks(self, rank: int, meta: dict[Any, Any]) -> None:
        size = meta.get("world_size")
        if isinstance(size, int) and rank < size:
            self._gathered.world_size = max(self._gathered.world_size, size)
        if rank in self.parallel:
            return
        ranks: dict[str, int] = {}
        for name, info in meta.items():
            if isinstance(name, str) and name.endswith("_parallel_info") and isinstance(info, dict):
                numbers = ((key, number) for key, number in info.items() if type(number) is int)
                ranks.update({key: number for key, number in numbers if isinstance(key, str)})
        if ranks:
            self.parallel[rank] = ranks


def _make_site(tags: dict[str, str], way: tuple[str, ...]) -> Site:
    """The site of a tensor: its name, and the tags that distinguish it from others of that name."""
    name = tags["name"]
    phase: Phase = "forward"
    level: Level = "tensor"
    side: Side = "output"
    position: tuple[str, ...] = ()
    if name.startswith("grad__"):
        name, phase = name.removeprefix("grad__"), "backward"
    if name.startswith("param__"):
        name, level = name.removeprefix("param__"), "parameter"
    elif name.startswith("non_intrusive__"):
        name = name.removeprefix("non_intrusive__")
        if match := _HOOKED.fullmatch(name):
            name, level = match["module"] or "", "module"
            side = "input" if match["input"] else "output"
            position = tuple(part for part in (match["position"], match["key"]) if part)
    others = {key: value for key, value in tags.items() if key not in _NOT_NAMES}
    layer = others.get("layer_id")
    if level in ("module", "parameter"):
        others.pop("layer_id", None)  # the path says it
    suffix = ",".join(f"{key}={others[key]}" for key in sorted(others))
    return Site(
        source="eager",
        level=level,
        name=f"{name}[{suffix}]" if suffix else name,
        phase=phase,
        side=side,
        position=".".join((*position, *way)) or "0",
        module=f"layers.{layer}" if layer is not None else "",
    )

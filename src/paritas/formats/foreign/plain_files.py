"""Plain tensor files, of no particular tool: safetensors, numpy and torch.

A tensor is named after its file and its key: `folder/file/key`, or the key alone if there is only
one file, or if files are numbered parts of one checkpoint. Suffixes of file names are dropped, so
the same tensors saved by two libraries have the same names. A folder `step3` or `rank1` gives the
step or rank, if there is only one such folder on the way to a file.
"""

from __future__ import annotations

import re
from pathlib import PurePosixPath
from typing import TYPE_CHECKING

from paritas.core.errors import UsageError
from paritas.core.file_trees import glimpse
from paritas.formats.files.npy_files import array_place, read_arrays, read_npy_header
from paritas.formats.files.records import Site
from paritas.formats.files.safetensors_files import read_entries
from paritas.formats.files.torch_files import read_saved
from paritas.formats.foreign.foreign_dump import Gathered

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from paritas.core.file_trees import FoundFile
    from paritas.formats.files.tensor_bytes import FilePlace
    from paritas.formats.files.torch_files import PlainValue, Unreadable
    from paritas.formats.foreign.foreign_dump import ForeignDump

    Tensors = Iterator[tuple[str, FilePlace | Unreadable | PlainValue]]


_SUFFIXES = (".safetensors", ".npy", ".npz", ".pt", ".pth", ".bin")
_STEP = re.compile(r"(?:step|token|iter|iteration)[-_=]?(\d{1,9})", re.IGNORECASE)
_RANK = re.compile(r"rank[-_=]?(\d{1,6})", re.IGNORECASE)
_PART = re.compile(r"(.*?)[-_.]?\d{5}-of-\d{5}")


def looks_like(path: Path) -> bool:
    """Whether there are tensor files."""
    return any(_is_wanted(PurePosixPath(name).name) for name in glimpse(path))


def open_dump(path: Path) -> ForeignDump:
    """Open a file, or all files of a folder."""
    gathered = Gathered(path, "files")
    files = gathered.folder.find(_is_wanted, gathered.problems)
    for file in files:
        step, rank, name = _place_in_run(file, is_only=len(files) == 1)
        try:
            # All of a file or none: the order in a damaged one cannot be trusted.
            items = list(_find_tensors(gathered.folder.locate(file.name), file))
        except (UsageError, OSError) as error:
            file_site = _make_site(name or PurePosixPath(file.name).stem)
            gathered.add_unreadable(step, rank, file_site, file, str(error))
            continue
        if not items:
            gathered.problems.add(f"{file.name} has no tensors", is_loss=False)
        for key, value in items:
            full = "/".join(part for part in (name, key) if part)
            site = _make_site(full or PurePosixPath(file.name).stem)
            gathered.add_saved(step, rank, site, file, value, key)
    return gathered.dump()


def _is_wanted(name: str) -> bool:
    return name.lower().endswith(_SUFFIXES) and not name.startswith(".")


def _make_site(name: str) -> Site:
    return Site(source="file", level="tensor", name=name)


def _place_in_run(file: FoundFile, *, is_only: bool) -> tuple[int, int, str]:
    """Step, rank and the prefix of the names of a file's tensors."""
    *folders, file_name = file.parts
    numbers = []
    for pattern in (_STEP, _RANK):
        matches = [
            (position, match)
            for position, name in enumerate(folders)
            if (match := pattern.fullmatch(name))
        ]
        numbers.append(int(matches[0][1][1]) if len(matches) == 1 else 0)
        if len(matches) == 1:
            del folders[matches[0][0]]
    if is_only:
        return numbers[0], numbers[1], ""
    stem = PurePosixPath(file_name).stem
    part = _PART.fullmatch(stem)
    names = [*folders, *([stem] if part is None else [])]
    return numbers[0], numbers[1], "/".join(names)


def _find_tensors(path: Path, file: FoundFile) -> Tensors:
    suffix = PurePosixPath(file.name).suffix.lower()
    if suffix == ".npy":
        with path.open("rb") as opened:
            yield "", array_place(file.name, read_npy_header(opened), file.size)
    elif suffix == ".npz":
        yield from read_arrays(path, file.name)
    elif suffix == ".safetensors":
        yield from read_entries(path, file.name)
    else:
        saved = read_saved(path, file.name)
        yield from ((".".join(leaf.way), leaf.value) for leaf in saved.leaves(saved.tree))

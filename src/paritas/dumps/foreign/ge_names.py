"""What the names of files and folders say in a dump of Ascend's graph engine.

::

    [msit_ge_dump/][worldsize{W}_global_rank{r}/]{time}/{device}/{model}/{model id}/{step}/
        {operator's type}.{operator}.{task}.{stream}.{time}[.{thread} ...]

An operator's name may have dots. A name that is too long for a file is replaced by a number, which
`mapping.csv` beside it explains.
"""

from __future__ import annotations

import csv
import dataclasses
import re
from typing import TYPE_CHECKING

import xxhash

from paritas.errors import UsageError

if TYPE_CHECKING:
    from pathlib import Path

__all__ = [
    "MAPPING",
    "FileName",
    "Levels",
    "fitting_name",
    "parse_levels",
    "parse_name",
    "read_mapping",
    "spelled",
]

MAPPING = "mapping.csv"
_RANK = re.compile(r"worldsize(\d{1,9})_global_rank(\d{1,9})")
_TIME = re.compile(r"\d{14}")
_LARGEST_MAPPING = 64 << 20
_LONGEST_NAME = 4096
_LONGEST_OF_FILE = 255
# Microseconds since 1970 have 16 digits; a thread or a task has few.
_SHORTEST_TIME, _LONGEST_NUMBER = 10, 20
_MOST_AFTER_TIME = 4
_TYPE_AND_NAME = 2
_TASK_AND_STREAM = 2


@dataclasses.dataclass(frozen=True, slots=True)
class FileName:
    """What the name of a file says.

    Attributes:
        time: of the dump, in microseconds.
        numbers: task and stream, and those behind the time, which tell threads apart.
    """

    op_type: str
    op_name: str
    time: int
    numbers: tuple[int, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Levels:
    """What the folders above a file say; zero and empty where they do not.

    Attributes:
        step: which run of the graph.
    """

    rank: int = 0
    world_size: int = 1
    time: str = ""
    model: str = ""
    model_id: str = ""
    step: int = 0


def parse_name(name: str) -> FileName | None:
    """Take the name of a tensor file apart; None where it is not of this kind."""
    parts = name.split(".")
    last = len(parts) - 1
    if len(name) > _LONGEST_NAME:
        return None
    for at in range(last, max(last - _MOST_AFTER_TIME, _TYPE_AND_NAME) - 1, -1):
        if not _is_number(parts[at]):
            return None
        if len(parts[at]) >= _SHORTEST_TIME:
            found = _parsed(parts, at)
            if found is not None:
                return found
    return None


def _parsed(parts: list[str], at: int) -> FileName | None:
    """The name, if the time is at that place; older engines write a task and no stream."""
    before = 0
    for number in reversed(parts[_TYPE_AND_NAME:at][-_TASK_AND_STREAM:]):
        if not _is_number(number):
            break
        before += 1
    op_name = ".".join(parts[1 : at - before])
    if not before or not parts[0] or not op_name.strip("."):
        return None
    numbers = (*parts[at - before : at], *parts[at + 1 :])
    return FileName(parts[0], op_name, int(parts[at]), tuple(map(int, numbers)))


def spelled(name: str) -> str:
    """The name of an operator as the engine spells it in the names of files."""
    return re.sub(r"[./\\ ]", "_", name)


def fitting_name(folder: Path, name: str, ending: str = "") -> str:
    """The name of a file, or the number that stands for it where no file system would take it.

    Args:
        folder: where the file is to be; its `mapping.csv` explains the number.
        ending: what the number is followed by.
    """
    if len(name.encode()) <= _LONGEST_OF_FILE:
        return name
    short = f"{xxhash.xxh3_64_intdigest(name.encode())}{ending}"
    with (folder / MAPPING).open("a", encoding="utf-8") as mapping:
        mapping.write(f"{short},{name}\n")
    return short


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdecimal() and len(text) <= _LONGEST_NUMBER


def parse_levels(root: Path, inside: tuple[str, ...]) -> Levels:
    """What the folders say, from those inside of the dump and from those that lead to it.

    Args:
        root: the folder of the dump, which may be any of the levels.
        inside: the folders below it that lead to a file.
    """
    parts = (*root.absolute().parts, *inside)
    ranks = (_RANK.fullmatch(part) for part in parts)
    rank = next((found for found in ranks if found), None)
    for at in range(len(parts) - 2, -1, -1):
        if _TIME.fullmatch(parts[at]) and _is_number(parts[at + 1]):
            device, model, model_id, step = (*parts[at + 1 : at + 5], "", "", "")[:4]
            break
    else:
        # No tree, but a folder of files: at most a step.
        step = parts[-1] if inside else root.name
        at, device, model, model_id = -1, "0", "", ""
    return Levels(
        rank=int(rank[2]) if rank else int(device),
        world_size=int(rank[1]) if rank else 1,
        time=parts[at] if at >= 0 else "",
        model=model,
        model_id=model_id,
        step=int(step) if _is_number(step) and len(step) < _SHORTEST_TIME else 0,
    )


def read_mapping(path: Path) -> dict[str, str]:
    """The names behind the numbers, from a `mapping.csv`.

    Raises:
        UsageError: it is damaged.
    """
    if path.stat().st_size > _LARGEST_MAPPING:
        raise UsageError(f"{path.name} is larger than {_LARGEST_MAPPING} bytes")
    found: dict[str, str] = {}
    try:
        with path.open(encoding="utf-8", errors="replace", newline="") as file:
            for row in csv.reader(file):
                if len(row) > 1:
                    # A name may have a comma, and nobody put it in quotes.
                    found[row[0].strip()] = ",".join(row[1:]).strip()
    except csv.Error as error:
        raise UsageError(f"{path.name} is damaged: {error}") from error
    return found

"""The folders of a dump: their names, their headers, and the lock of a rank that is writing."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import uuid
from typing import TYPE_CHECKING, BinaryIO

import msgspec
import xxhash

from paritas.errors import ParitasError, UsageError
from paritas.files.records import Header

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path
    from typing import IO

    from paritas.files.records import Layout


# --- Names and headers ----------------------------------------------------------------------------

HEADER = "header.json"
INDEX = "index.jsonl"
RANK = re.compile(r"rank(0|[1-9]\d{0,8})")
STEP = re.compile(r"step-(\d{8,})")
DATA = re.compile(r"data-\d{4,}\.safetensors")
# torchair's layout: a folder for each rank, and printed graphs.
TORCHAIR = re.compile(
    r"worldsize\d+_global_rank(\d{1,9})|dynamo_(?:original|optimized)_.+_rank_(\d{1,9})_.+\.txt"
)
# The first folder level of Ascend's old tree, which names devices and not ranks.
TIME = re.compile(r"\d{14}")
_LARGEST_HEADER = 64 << 20


def index_home(root: Path, layout: Layout | None = None) -> Path:
    """The folder that holds the rank folders: the dump, or one beside it; None detects it."""
    beside = root.with_name(f"{root.name}.index")
    if layout is None:
        is_beside = not rank_folders(root) and beside.is_dir() if root.is_dir() else False
    else:
        is_beside = layout == "ge-7.1.0"
    return beside if is_beside else root


def rank_name(rank: int) -> str:
    """The name of a rank's folder."""
    return f"rank{rank}"


def step_name(step: int) -> str:
    """The name of a step's folder, used when only the last few steps are kept."""
    return f"step-{step:08d}"


def data_name(number: int) -> str:
    """The name of the n-th data file of a folder."""
    return f"data-{number:04d}.safetensors"


def is_data(path: Path) -> bool:
    """Whether the path is a data file."""
    return bool(DATA.fullmatch(path.name)) and path.is_file() and not path.is_symlink()


def volumes_of(folder: Path) -> list[Path]:
    """The folders of a rank that have an index: its own, or one per kept step."""
    steps = ((STEP.fullmatch(path.name), path) for path in folder.iterdir() if path.is_dir())
    ring = sorted((int(match[1]), path) for match, path in steps if match)
    own = [folder] if (folder / INDEX).exists() or not ring else []
    return own + [path for _, path in ring]


def run_identity(rank: int, world_size: int, environment: Mapping[str, str] | None = None) -> str:
    """A name for this run, the same on all its ranks.

    A single process makes up a name. Several processes cannot ask each other yet, so they derive
    it from what the launcher gives to each of them. Two runs launched in the same way (fixed port,
    no run id) get the same name; they then collide on the rank folder, which only one can claim.
    """
    if world_size == 1:
        return uuid.uuid4().hex
    if not 0 <= rank < world_size:
        raise UsageError(f"rank {rank} of {world_size}: ranks go from 0 to {world_size - 1}")
    given = os.environ if environment is None else environment
    names = ("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "MASTER_ADDR", "MASTER_PORT")
    facts = [f"{name}={given.get(name, '')}" for name in names]
    return xxhash.xxh3_128_hexdigest("\n".join([*facts, f"ranks={world_size}"]).encode())


def read_header(folder: Path) -> Header:
    """Read the header of a rank's folder."""
    path = folder / HEADER
    try:
        if path.stat().st_size > _LARGEST_HEADER:
            raise UsageError(f"{path} is larger than {_LARGEST_HEADER} bytes: not a dump header")
        return msgspec.json.decode(path.read_bytes(), type=Header)
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise UsageError(f"{path} is not a dump header: {error}") from error


def write_header(folder: Path, header: Header, *, durable: bool = False) -> None:
    """Write the header atomically: a reader sees the old one or the new one, never a part."""
    text = msgspec.json.format(msgspec.json.encode(header), indent=2) + b"\n"
    part = folder / f".{HEADER}.part"
    try:
        with part.open("wb") as file:
            file.write(text)
            file.flush()
            if durable:
                os.fsync(file.fileno())
        part.replace(folder / HEADER)
    except OSError as error:
        with contextlib.suppress(OSError):
            part.unlink()
        raise ParitasError(
            f"cannot write {folder / HEADER} ({len(text)} bytes): {error.strerror or error}"
        ) from error


@contextlib.contextmanager
def whole_file(path: Path) -> Iterator[IO[bytes]]:
    """Write a file that appears under its name only when it is complete.

    Until then its name ends in `.swp`, which the scripts that read these trees ignore.
    """
    part = path.with_name(f".{os.getpid()}.swp")
    try:
        with part.open("wb") as file:
            yield file
        part.replace(path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise


def rank_folders(root: Path) -> dict[int, Path]:
    """The folders of the ranks, by rank."""
    found = ((RANK.fullmatch(path.name), path) for path in root.iterdir() if path.is_dir())
    return {int(match[1]): path for match, path in sorted(found, key=str) if match}


def discard(folder: Path) -> None:
    """Remove a folder; a concurrent reader sees all of it or nothing."""
    aside = folder.with_name(f".removing-{folder.name}-{uuid.uuid4().hex[:8]}")
    try:
        folder.rename(aside)
    except FileNotFoundError:
        return  # another rank was faster
    shutil.rmtree(aside, ignore_errors=True)


# --- Locks ----------------------------------------------------------------------------------------

try:
    import fcntl
except ImportError:  # Windows: a lock cannot be tested, so nothing is refused
    fcntl = None  # type: ignore[assignment]


LOCK = ".lock"


class Lock:
    """A file lock, held until it is released or the process ends.

    Attributes:
        is_held: False if another process holds the lock.
    """

    def __init__(self, path: Path) -> None:
        """Try to take the lock; on a file system without locks this succeeds."""
        self._file: BinaryIO | None = path.open("wb")
        self.is_held = _try_lock(self._file)

    def release(self) -> None:
        """Release the lock, also for processes forked meanwhile."""
        if self._file is None:
            return
        if fcntl is not None:
            with contextlib.suppress(OSError):  # the file system has no locks
                fcntl.flock(self._file, fcntl.LOCK_UN)
        self._file.close()
        self._file = None


@contextlib.contextmanager
def exclusive(folder: Path) -> Iterator[None]:
    """Exclude other processes from a folder; without file locks, this excludes nobody."""
    if fcntl is None:
        yield
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)  # releases the lock


def is_locked(path: Path) -> bool:
    """Whether a running process holds the lock."""
    try:
        with path.open("rb") as file:
            return not _try_lock(file)
    except OSError:
        return False


def _try_lock(file: BinaryIO) -> bool:
    if fcntl is None:
        return True
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # the file system has no locks
        pass
    return True

"""A dump on disk: the records of its index, and its folders, their headers and locks."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import shutil
import uuid
from typing import TYPE_CHECKING, BinaryIO, Literal

import msgspec
import xxhash
from torch import Tensor

from paritas.core.errors import ParitasError, UsageError
from paritas.core.file_trees import open_plain
from paritas.core.numerics.statistics import Statistics
from paritas.core.results.items import LocalPlacement

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path
    from typing import IO


# --- Records: the run, each rank, each recorded value ---------------------------------------------

FORMAT = 1

# The structs with `gc=False` hold no cycles, and an index has tens of thousands of them: Python's
# garbage collector would walk them all again and again.

# "file" and "tensor": values from another tool's file that does not say more.
Source = Literal["eager", "fx", "fused", "file"]
Level = Literal["module", "op", "node", "buffer", "parameter", "tensor"]
Phase = Literal["forward", "backward"]
Side = Literal["input", "output"]
State = Literal["closed", "being written", "ended early"]
Layout = Literal["packed", "msit", "msit-7.1.0", "ge", "ge-7.1.0"]
# One `.npy` file per value.
NPY_LAYOUTS = frozenset({"msit", "msit-7.1.0"})


class Site(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, gc=False):
    """The place in a program where a value was recorded.

    In the backward pass of eager code, a site holds the gradient of what the same name holds in the
    forward pass; backward graphs have nodes of their own.

    Attributes:
        source: the program: eager code, a graph run op by op, fused code.
        level: what `name` names: the call of a module or operator, a graph node, a buffer of fused
            code, a parameter (its gradient).
        name: module path; module path and operator; node; parameter.
        position: which argument or result, dotted inside a container: "0", "1.0", "mask".
        op: the operator, for example `aten.mm.default`, or the class of the module.
        module: path of the module it belongs to.
        line: the user's line, `file.py:18, in forward`.
        code: the text of that line.
        graph: the graph of a node or buffer.
        kernel: the kernel or operator of the compiled code that wrote a buffer.
        nodes: the graph nodes that the value stands for, in order; it is the value of the last. For
            an input of a node or kernel, the node that made it.
        exact: whether the buffer is known to hold exactly the value of that last node.
        call: which call of that name in this step, from 0.
    """

    source: Source
    level: Level
    name: str
    phase: Phase = "forward"
    side: Side = "output"
    position: str = "0"
    op: str = ""
    module: str = ""
    line: str = ""
    code: str = ""
    graph: str = ""
    kernel: str = ""
    nodes: tuple[str, ...] = ()
    exact: bool = True
    call: int = 0

    @property
    def id(self) -> str:
        """The canonical name, unique within one step of a rank."""
        scope = f"{self.graph}/" if self.graph else ""
        tapped = "~" if self.level == "node" and self.source == "fused" else ""
        position = f"{self.side}.{self.position}"
        return f"{self.phase}/{scope}{tapped}{self.name}#{self.call}/{position}"


class TensorFacts(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, gc=False):
    """The properties of a tensor other than its values.

    Attributes:
        dtype: torch's name without `torch.`.
        offset: elements into the storage.
    """

    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int = 0
    device: str = "cpu"
    requires_grad: bool = False


class Payload(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, gc=False):
    """Where values are stored.

    Attributes:
        file: path relative to the dump's folder.
        key: the name of the tensor in that file.
        begin: first byte in the file (packed); 0 if the file holds one tensor.
        shape: as stored: dimensions of stride 0 are stored once.
    """

    file: str
    nbytes: int
    shape: tuple[int, ...]
    key: str = ""
    begin: int = 0


class Record(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, gc=False):
    """One recorded value.

    Attributes:
        sequence: counts the records of a rank, from 0.
        id: the site's canonical name.
        tensor: None for numbers, strings and other values.
        value: a value that is not a tensor, as a Python literal.
        digest: hash of the stored bytes, 32 hexadecimal digits.
        payload: None if only statistics were recorded.
        dtype: of a tensor known only by its statistics; otherwise see `tensor`.
        sketch: where the linear sketch of the values is.
        alias_of: sequence number of the first record in this step that shares its memory.
    """

    sequence: int
    step: int
    rank: int
    id: str
    site: Site
    tensor: TensorFacts | None = None
    value: str | None = None
    digest: str = ""
    payload: Payload | None = None
    statistics: Statistics | None = None
    sketch: Payload | None = None
    alias_of: int | None = None
    placement: LocalPlacement | None = None
    dtype: str | msgspec.UnsetType = msgspec.UNSET

    @property
    def is_summary(self) -> bool:
        """Whether only the statistics of a tensor are known, not even its shape."""
        return self.tensor is None and self.value is None and self.statistics is not None

    @property
    def is_tensor(self) -> bool:
        """Whether it was a tensor."""
        return self.tensor is not None or self.is_summary

    @property
    def kind(self) -> str:
        """For example `float32[2,3]`; a question mark stands for an unknown shape."""
        if self.tensor is not None:
            return f"{self.tensor.dtype}[{','.join(map(str, self.tensor.shape))}]"
        return f"{self.dtype or 'tensor'}[?]" if self.is_summary else "value"


class Observed(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Whether recording a graph changed what it computes.

    Attributes:
        graph: its name, with the phase.
        status: from comparing its outputs with and without recording.
    """

    graph: str
    status: Literal["unchanged", "changed", "unchecked"]
    detail: str = ""


class Header(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The header of one rank's part of a dump; written first, and again when it is closed.

    Attributes:
        format: version of this format.
        run: the same for all ranks of a run.
        data: whole tensors, or statistics of them.
        taps: whether every node of fused code was materialised, which may change the fusion.
        selection: what to record, in words.
        observed: per graph, whether recording changed its outputs.
        notes: remarks for the reader.
        closed: whether the run finished; otherwise the dump ends where the run stopped.
        records: number of records, once closed.
    """

    run: str
    format: int = FORMAT
    rank: int = 0
    world_size: int = 1
    created: str = ""
    torch: str = ""
    paritas: str = ""
    program: str = ""
    data: Literal["tensor", "stats"] = "tensor"
    layout: Layout = "packed"
    sources: tuple[Source, ...] = ()
    taps: bool = False
    fusion: str = "on"
    selection: dict[str, str] = {}
    observed: tuple[Observed, ...] = ()
    notes: tuple[str, ...] = ()
    closed: bool = False
    records: int = 0


class Entry(msgspec.Struct, kw_only=True, gc=False):
    """A value to be written; see `Record`. A struct is four times faster to make than a dataclass.

    Attributes:
        stored: contiguous and on the CPU, from `as_stored`. None for statistics alone, for values
            other than tensors, and for bytes that were written before under the same digest.
        digest: of those bytes; if empty, it is computed, which suits large new tensors.
        sketch: float32 or float64, one-dimensional.
    """

    sequence: int
    step: int
    site: Site
    tensor: TensorFacts | None = None
    value: str | None = None
    stored: Tensor | None = None
    digest: str = ""
    statistics: Statistics | None = None
    sketch: Tensor | None = None
    alias_of: int | None = None
    placement: LocalPlacement | None = None
    dtype: str | msgspec.UnsetType = msgspec.UNSET


@dataclasses.dataclass(frozen=True)
class RankDump:
    """What one rank recorded.

    Attributes:
        state: closed by the run; still being written; or cut off with the run.
        records: in the order of recording.
        problems: descriptions of damaged or missing data.
        losses: those of them that no record stands for.
    """

    rank: int
    folder: Path
    header: Header
    state: State
    records: list[Record]
    problems: list[str]
    losses: list[str]


# --- Folders: names and headers -------------------------------------------------------------------

HEADER = "header.json"
INDEX = "index.jsonl"
RANK = re.compile(r"rank(0|[1-9]\d{0,8})")
STEP = re.compile(r"step-(\d{8,})")
DATA = re.compile(r"data-\d{4,}\.safetensors")
# torchair's layout: a folder for each rank, and printed graphs.
TORCHAIR = re.compile(
    r"worldsize\d+_global_rank(\d{1,9})|dynamo_(?:original|optimized)_.+_rank_(\d{1,9})_.+\.txt"
)
# The top of torchair's tree of a captured graph up to 7.1.0, which has no ranks.
OLD_FX_TOP = "data_dump"
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
    own_folder = [folder] if (folder / INDEX).exists() or not ring else []
    return own_folder + [path for _, path in ring]


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
    variables = os.environ if environment is None else environment
    names = ("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "MASTER_ADDR", "MASTER_PORT")
    facts = [f"{name}={variables.get(name, '')}" for name in names]
    return xxhash.xxh3_128_hexdigest("\n".join([*facts, f"ranks={world_size}"]).encode())


def read_header(folder: Path) -> Header:
    """Read the header of a rank's folder."""
    path = folder / HEADER
    try:
        if path.stat().st_size > _LARGEST_HEADER:
            raise UsageError(f"{path} is larger than {_LARGEST_HEADER} bytes: not a dump header")
        with open_plain(path) as file:
            return msgspec.json.decode(file.read(), type=Header)
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
    matches = ((RANK.fullmatch(path.name), path) for path in root.iterdir() if path.is_dir())
    return {int(match[1]): path for match, path in sorted(matches, key=str) if match}


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
        with open_plain(path) as file:
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

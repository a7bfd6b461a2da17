"""What is finished of a sweep, written down at once: one that was cut short goes on from there.

One line of JSON says what the sweep is about, then each row has one. A kill costs the runs that are
under way; a last line without an end is not read.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Self

import msgspec

from paritas.errors import UsageError
from paritas.files.folders import Lock
from paritas.results.report import json_of
from paritas.results.sweeps import SweepReport, SweepRow, SweepRun
from paritas.settings.versions import own_version

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path
    from types import TracebackType

JOURNAL, REPORT_JSON = "journal.jsonl", "sweep.json"
_LOCK = ".journal.lock"
_FORMAT = 1
_AGAIN = "name another --output, or start again with --restart, which deletes its rows"


class SweepSubject(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a sweep is about: the first line of its journal."""

    format: int = _FORMAT
    paritas: str = ""
    versions: dict[str, str] = {}
    runs: tuple[SweepRun, ...] = ()


class SweepJournal:
    """The file, open for writing, and the rows that it holds from earlier.

    Attributes:
        rows: what is finished, by run.
        resumed: how many of them were there when it was opened.
    """

    def __init__(
        self, folder: Path, runs: Sequence[SweepRun], versions: dict[str, str], *, restart: bool
    ) -> None:
        """Open it; the folder is created.

        Raises:
            UsageError: it holds a sweep of other targets or with another torch, is damaged, cannot
                be written, or another process writes to it.
        """
        self._path = folder / JOURNAL
        subject = SweepSubject(paritas=own_version(), versions=versions, runs=tuple(runs))
        self.rows: dict[SweepRun, SweepRow] = {}
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._lock = Lock(folder / _LOCK)
            try:
                self._open(subject, restart=restart)
            except BaseException:
                self._lock.release()
                raise
        except OSError as error:
            shown = f"cannot write {str(self._path)!r}: {error.strerror or error}"
            raise UsageError(shown) from error
        self.resumed = len(self.rows)

    def _open(self, subject: SweepSubject, *, restart: bool) -> None:
        if not self._lock.is_held:
            raise UsageError(
                f"{str(self._path.parent)!r}: another sweep writes there; wait for it, or name "
                "another --output"
            )
        length = 0 if restart else self._read(subject)
        self._file = self._path.open("r+b" if length else "wb")
        self._file.truncate(length)
        self._file.seek(length)
        if not length:
            self._write(subject)

    def add(self, row: SweepRow) -> None:
        """Write a row down; it survives whatever happens to this process."""
        self._write(row)
        self.rows[row.run] = row

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close it."""
        self._file.close()
        self._lock.release()

    def _write(self, line: msgspec.Struct) -> None:
        self._file.write(json_of(line) + b"\n")
        self._file.flush()

    def _read(self, subject: SweepSubject) -> int:
        """Take over the rows that are there; gives where to go on writing."""
        if not self._path.exists():
            return 0
        found, rows, length = read_journal(self._path)
        if found is None:
            return 0
        self._refuse_other(found, subject)
        self.rows = {row.run: row for row in rows}
        return length

    def _refuse_other(self, found: SweepSubject, subject: SweepSubject) -> None:
        was, now = found.versions.get("torch", "none"), subject.versions.get("torch", "none")
        if was != now:
            raise UsageError(
                f"{str(self._path.parent)!r} holds a sweep with torch {was}, and this is torch "
                f"{now}: {_AGAIN}; to compare the two, name another --output and add "
                f"--against {self._path.parent}"
            )
        if set(found.runs) != set(subject.runs):
            more, fewer = set(subject.runs) - set(found.runs), set(found.runs) - set(subject.runs)
            example = min(map(str, more or fewer))
            raise UsageError(
                f"{str(self._path.parent)!r} holds a sweep of other targets ({len(more)} runs are "
                f"new and {len(fewer)} are gone, such as {example}): {_AGAIN}"
            )


def read_journal(path: Path) -> tuple[SweepSubject | None, list[SweepRow], int]:
    """What a journal is about, its rows, and how many of its bytes are whole lines.

    Raises:
        UsageError: a line that has an end cannot be read.
    """
    content = path.read_bytes()
    length = content.rfind(b"\n") + 1
    lines = content[:length].splitlines()
    if not lines:
        return None, [], 0
    subject: SweepSubject = _decoded(path, 1, lines[0], SweepSubject)
    if subject.format != _FORMAT:
        raise _damaged(path, 1, f"format {subject.format} in place of {_FORMAT}")
    rows = [_decoded(path, at, line, SweepRow) for at, line in enumerate(lines[1:], start=2)]
    return subject, rows, length


def read_rows(place: Path) -> tuple[SweepRow, ...]:
    """The rows of an earlier sweep, given its folder or its file of JSON.

    Raises:
        UsageError: there is none, or it is damaged.
    """
    file = place / REPORT_JSON if place.is_dir() else place
    try:
        if place.is_dir() and not file.exists():  # it was killed
            file = place / JOURNAL
            return tuple(read_journal(file)[1])
        return SweepReport.from_json(file.read_bytes()).rows
    except FileNotFoundError:
        raise UsageError(
            f"--against {str(place)!r}: there is no earlier sweep; give the --output of one"
        ) from None
    except OSError as error:
        raise UsageError(f"cannot read {str(file)!r}: {error.strerror or error}") from error


def _decoded(path: Path, number: int, text: bytes, kind: Any) -> Any:
    try:
        # Lax: numbers that are none are spelled out.
        return msgspec.convert(msgspec.json.decode(text), kind, strict=False)
    except (msgspec.ValidationError, msgspec.DecodeError, UnicodeDecodeError) as error:
        raise _damaged(path, number, str(error)) from None


def _damaged(path: Path, number: int, what: str) -> UsageError:
    return UsageError(
        f"{str(path)!r}, line {number} is damaged or of another version: {what}; {_AGAIN}"
    )

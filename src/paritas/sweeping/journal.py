"""The journal of a sweep: each finished row is written at once, and an aborted sweep resumes there.

The first line of JSON describes the sweep, then each row has a line. A kill loses only the runs in
progress; an incomplete last line is ignored.
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
_AGAIN = "use another --output, or start again with --restart, which deletes its rows"


class SweepSubject(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The description of a sweep: the first line of its journal."""

    format: int = _FORMAT
    paritas: str = ""
    versions: dict[str, str] = {}
    runs: tuple[SweepRun, ...] = ()


class SweepJournal:
    """The file, open for writing, and its rows.

    Attributes:
        rows: the finished rows, by run.
        resumed: number of rows when it was opened.
    """

    def __init__(
        self, folder: Path, runs: Sequence[SweepRun], versions: dict[str, str], *, restart: bool
    ) -> None:
        """Open it, and create the folder.

        Raises:
            UsageError: it holds a sweep of other targets or with another torch, is damaged, cannot
                be written, or is in use by another process.
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
            raise UsageError(
                f"cannot write {str(self._path)!r}: {error.strerror or error}"
            ) from error
        self.resumed = len(self.rows)

    def _open(self, subject: SweepSubject, *, restart: bool) -> None:
        if not self._lock.is_held:
            raise UsageError(
                f"{str(self._path.parent)!r}: another sweep is writing there; wait for it, or use "
                "another --output"
            )
        length = 0 if restart else self._read(subject)
        self._file = self._path.open("r+b" if length else "wb")
        self._file.truncate(length)
        self._file.seek(length)
        if not length:
            self._write(subject)

    def add(self, row: SweepRow) -> None:
        """Write a row at once; it survives a kill of this process."""
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
        """Read the existing rows; return the position to continue writing at."""
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
                f"{str(self._path.parent)!r} holds a sweep with torch {was}, but this is torch "
                f"{now}: {_AGAIN}; to compare the two, use another --output and add "
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
    """Return the description in a journal, its rows, and the length of its complete lines.

    Raises:
        UsageError: a complete line cannot be read.
    """
    content = path.read_bytes()
    length = content.rfind(b"\n") + 1
    lines = content[:length].splitlines()
    if not lines:
        return None, [], 0
    subject: SweepSubject = _decoded(path, 1, lines[0], SweepSubject)
    if subject.format != _FORMAT:
        raise _damaged(path, 1, f"format {subject.format} instead of {_FORMAT}")
    rows = [_decoded(path, at, line, SweepRow) for at, line in enumerate(lines[1:], start=2)]
    return subject, rows, length


def read_rows(place: Path) -> tuple[SweepRow, ...]:
    """Read the rows of an earlier sweep from its folder or its JSON file.

    Raises:
        UsageError: there is no sweep, or it is damaged.
    """
    file = place / REPORT_JSON if place.is_dir() else place
    try:
        if place.is_dir() and not file.exists():  # it was killed
            file = place / JOURNAL
            return tuple(read_journal(file)[1])
        return SweepReport.from_json(file.read_bytes()).rows
    except FileNotFoundError:
        raise UsageError(
            f"--against {str(place)!r}: there is no earlier sweep; use the --output of one"
        ) from None
    except OSError as error:
        raise UsageError(f"cannot read {str(file)!r}: {error.strerror or error}") from error


def _decoded(path: Path, number: int, text: bytes, kind: Any) -> Any:
    try:
        # Lax: NaN and infinity are written as strings.
        return msgspec.convert(msgspec.json.decode(text), kind, strict=False)
    except (msgspec.ValidationError, msgspec.DecodeError, UnicodeDecodeError) as error:
        raise _damaged(path, number, str(error)) from None


def _damaged(path: Path, number: int, what: str) -> UsageError:
    return UsageError(
        f"{str(path)!r}, line {number} is damaged or of another version: {what}; {_AGAIN}"
    )

"""What is finished of a graph, written down at once: a run that was cut short goes on from there.

One line of JSON each: what the run is about, an operator that is begun in this process, an operator
that is finished, an interruption. A kill costs the operators in progress. One that was begun and
neither finished nor interrupted may have been what ended the process.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Self

import msgspec

from paritas.dumps.locks import Lock, is_locked
from paritas.errors import UsageError
from paritas.numerics.findings import spell_nonfinite
from paritas.numerics.graph_reports import OperatorResult

if TYPE_CHECKING:
    from pathlib import Path
    from types import TracebackType

__all__ = ["LOCK", "NAME", "About", "Journal"]

NAME = "journal.jsonl"
LOCK = ".journal.lock"
_FORMAT = 1
_LONGEST_VALUE = 60


class About(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a run is about: another one has nothing to take over from it.

    Attributes:
        graph: what it was read from, for people.
        calls: the digest of its calls.
        settings: as they were asked, each in words.
        versions: of what took part.
        inputs: the digest of sample inputs and of the weights they meet; empty if there are none.
        modules: digest by module that brings operators or annotations.
    """

    graph: str
    calls: str
    settings: dict[str, str]
    versions: dict[str, str]
    inputs: str = ""
    modules: dict[str, str] = {}

    def difference(self, earlier: About) -> str:
        """In what an earlier run was about something else, in words; empty if in nothing."""
        if earlier.calls != self.calls:
            return f"another graph ({earlier.graph})"
        for words, old, new in (
            ("settings", earlier.settings, self.settings),
            ("versions", earlier.versions, self.versions),
        ):
            for name in sorted(old.keys() | new.keys()):
                if old.get(name) != new.get(name):
                    was, now = (str(one.get(name, "none"))[:_LONGEST_VALUE] for one in (old, new))
                    return f"other {words} ({name} was {was}, and is {now} now)"
        if earlier.inputs != self.inputs:
            return "other sample inputs or weights"
        if earlier.modules != self.modules:
            changed = sorted(dict(earlier.modules.items() ^ self.modules.items()))
            return f"another text of the module {', '.join(changed)}"
        return ""


class _Line(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """One line: one of these."""

    format: int | None = None
    about: About | None = None
    begun: str | None = None
    finished: OperatorResult | None = None
    interrupted: bool | None = None


class Journal:
    """The file, open for writing, and what it holds from earlier runs.

    Attributes:
        finished: result by key, of earlier runs.
        suspects: keys during which an earlier run ended without a word.
        notes: what became of a line that was cut short.
    """

    def __init__(self, folder: Path, about: About, *, resume: bool = True) -> None:
        """Open it, and take over what is finished.

        Raises:
            UsageError: it is about something else, is damaged, or another process writes to it.
        """
        self.finished: dict[str, OperatorResult] = {}
        self.suspects: set[str] = set()
        self.notes: list[str] = []
        self._begun = ""
        path = folder / NAME
        if is_locked(folder / LOCK):
            raise UsageError(
                f"{str(folder)!r}: another process writes its results there; wait for it, or name "
                "another folder"
            )
        self._lock = Lock(folder / LOCK)
        try:
            length = self._read(path, about) if resume and path.exists() else 0
            self._file = path.open("r+b" if length else "wb")
            self._file.truncate(length)
            self._file.seek(length)
            if not length:
                self._write(_Line(format=_FORMAT, about=about))
        except OSError as error:
            self._lock.release()
            raise UsageError(f"cannot write {str(path)!r}: {error.strerror or error}") from error
        except BaseException:
            self._lock.release()
            raise

    def begin(self, key: str) -> None:
        """An operator is checked in this process from now on."""
        self._write(_Line(begun=key))

    def finish(self, result: OperatorResult) -> None:
        """An operator is done."""
        self._write(_Line(finished=result))

    def interrupt(self) -> None:
        """Somebody asked to stop: what was begun is no suspect."""
        self._write(_Line(interrupted=True))

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

    def _write(self, line: _Line) -> None:
        plain = spell_nonfinite(msgspec.to_builtins(line))
        self._file.write(msgspec.json.encode(plain) + b"\n")
        # As far as the system: that survives a kill of this process.
        self._file.flush()

    # --- what is there already -------------------------------------------------------------------

    def _read(self, path: Path, about: About) -> int:
        """Take over what is there; gives where to go on writing."""
        content = path.read_bytes()
        length = content.rfind(b"\n") + 1
        if length < len(content):
            lost = len(content) - length
            self.notes.append(
                f"the last line of an earlier run's journal was cut short ({lost} bytes): what it "
                "was about is checked again"
            )
        lines = content[:length].splitlines()
        if not lines:  # not even the first line was finished
            return 0
        self._compare(path, about, lines[0])
        for number, text in enumerate(lines[1:], start=2):
            self._take(_decoded(path, number, text))
        return length

    def _compare(self, path: Path, about: About, text: bytes) -> None:
        first = _decoded(path, 1, text)
        if first.format != _FORMAT or first.about is None:
            raise _damage(path, 1, f"format {first.format!r} instead of {_FORMAT}")
        difference = about.difference(first.about)
        if difference:
            raise UsageError(
                f"{str(path.parent)!r} holds results of {difference}: name another folder, or "
                "start anew with --overwrite (resume=False)"
            )

    def _take(self, line: _Line) -> None:
        if line.begun is not None:
            self._begun = line.begun
            self.suspects.add(line.begun)
        elif line.finished is not None:
            self.finished[line.finished.key] = line.finished
            self.suspects.discard(line.finished.key)
        elif line.interrupted:
            self.suspects.discard(self._begun)


def _decoded(path: Path, number: int, text: bytes) -> _Line:
    try:
        plain: Any = msgspec.json.decode(text)
        # Lax: numbers that are none are spelled out.
        return msgspec.convert(plain, _Line, strict=False)
    except (msgspec.ValidationError, msgspec.DecodeError, UnicodeDecodeError) as error:
        raise _damage(path, number, str(error)) from None


def _damage(path: Path, number: int, what: str) -> UsageError:
    return UsageError(
        f"{str(path)!r}, line {number} is damaged or of another version: {what}; start anew with "
        "--overwrite (resume=False)"
    )

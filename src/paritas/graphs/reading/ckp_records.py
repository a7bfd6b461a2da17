"""The objects of a checkpoint as inert records: a class by name, and its attributes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from paritas.dumps.foreign.pickles import Call, Name
from paritas.errors import UsageError
from paritas.graphs.reading.ckp_names import CLASSES

__all__ = ["LONGEST_TEXT", "Record", "record_of", "records_of", "text_of"]

LONGEST_TEXT = 10_000


class Record:
    """One object: the name of its class, and what the file says of its attributes."""

    def __init__(self, kind: str, identity: int, fields: Mapping[Any, Any]) -> None:
        self.kind = kind
        self.identity = identity
        self._fields = fields

    @property
    def words(self) -> str:
        """What to call it in a message."""
        told = (self._fields.get("name"), self._fields.get("_id"))
        parts = [self.kind, *(str(part)[:60] for part in told if isinstance(part, (str, int)))]
        return " ".join(parts)

    def get(self, name: str) -> Any:
        """An attribute; None if it is not there."""
        return self._fields.get(name)

    def __getitem__(self, name: str) -> Any:
        if name not in self._fields:
            known = "a checkpoint of another version: nnScaler 0.9 is known"
            raise UsageError(f"{self.words} has no `{name}`: {known}")
        return self._fields[name]

    def items(self, name: str) -> tuple[Any, ...]:
        """An attribute that is a list or a tuple."""
        value = self[name]
        if not isinstance(value, (list, tuple)):
            raise self.wrong(name, value, "a list is due")
        return tuple(value)

    def mapping(self, name: str) -> dict[str, Any]:
        """An attribute that is a dict with text for keys."""
        value = self[name]
        if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
            raise self.wrong(name, value, "a dict with names is due")
        return dict(value)

    def text(self, name: str) -> str:
        """An attribute that is text."""
        value = text_of(self[name])
        if value is None:
            raise self.wrong(name, self[name], "text is due")
        return value

    def number(self, name: str) -> int:
        """An attribute that is a whole number."""
        value = self[name]
        if type(value) is not int:
            raise self.wrong(name, value, "a whole number is due")
        return value

    def flag(self, name: str) -> bool:
        """An attribute that is True or False; False if it is not there."""
        value = self.get(name)
        if value is not None and not isinstance(value, bool):
            raise self.wrong(name, value, "True or False is due")
        return bool(value)

    def record(self, name: str, *kinds: str) -> Record:
        """An attribute that is an object of one of these classes."""
        found = record_of(self[name])
        if found is None or found.kind not in kinds:
            raise self.wrong(name, self[name], f"{' or '.join(kinds)} is due")
        return found

    def wrong(self, name: str, value: Any, due: str) -> UsageError:
        """What to raise of an attribute that cannot be meant."""
        found = record_of(value)
        have = type(value).__name__ if found is None else found.kind
        return UsageError(f"`{name}` of {self.words} is {have}: {due}, the file is damaged")


def record_of(value: Any) -> Record | None:
    """The record that a description of an object is; None if it is of no class of nnScaler."""
    match value:
        case Call(what=Name(path=path), state=state) if path in CLASSES:
            fields = state if isinstance(state, dict) else {}
            return Record(path.rpartition(".")[2], id(value), fields)
    return None


def records_of(owner: Record, name: str, *kinds: str) -> Iterator[Record]:
    """The objects in a list of an object."""
    for value in owner.items(name):
        found = record_of(value)
        if found is None or (kinds and found.kind not in kinds):
            raise owner.wrong(name, value, f"{' or '.join(kinds) or 'a node'} is due in it")
        yield found


def text_of(value: Any) -> str | None:
    """Text of a length that can be meant; None if it is no text.

    Raises:
        UsageError: it is longer.
    """
    if not isinstance(value, str):
        return None
    if len(value) > LONGEST_TEXT:
        raise UsageError(f"it has a text of {len(value)} letters, more than {LONGEST_TEXT}")
    return value

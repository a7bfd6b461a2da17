"""The members of a `.pt2` archive, read without trusting them.

Torch's own loader unpickles what lies in such a file, and evaluates expressions that stand in it as
text. A graph that is only to be looked at needs neither: it is JSON, and weights are plain bytes.
"""

from __future__ import annotations

import contextlib
import zipfile
from collections.abc import Iterator
from pathlib import Path

from paritas.errors import UsageError

__all__ = ["Archive", "is_zip"]

_HOW = "Save it with torch.export.save(torch.export.export(model, inputs), 'model.pt2')"
_LONGEST_TEXT = 1 << 28
_NEWEST_ARCHIVE = 0


def is_zip(path: Path) -> bool:
    """Whether a file begins as a zip archive does."""
    try:
        with path.open("rb") as file:
            return file.read(4) == b"PK\x03\x04"
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror or error}") from None


class Archive:
    """A `.pt2` archive: what torch.export.save writes.

    Attributes:
        path: the file.
        model: the name of the program in it.
    """

    def __init__(self, path: Path) -> None:
        """Look at the list of members.

        Raises:
            UsageError: it is no such archive, or holds something else than one program.
        """
        self.path = path
        self._opened: zipfile.ZipFile | None = None
        try:
            with zipfile.ZipFile(path) as opened:
                members = opened.infolist()
        except zipfile.BadZipFile as error:
            raise UsageError(
                f"{path} is no whole zip archive ({error}): it is cut off or something else. {_HOW}"
            ) from None
        except OSError as error:
            raise UsageError(f"{path} cannot be read: {error.strerror or error}") from None
        # A whole archive begins where the file does; of one that is cut off, zipfile may find an
        # archive that lies inside.
        if members and min(member.header_offset for member in members) > 0:
            raise UsageError(f"{path} is no whole zip archive: it is cut off. {_HOW}")
        self._root = members[0].filename.split("/")[0] if members else ""
        self._members = {
            member.filename.removeprefix(f"{self._root}/"): member for member in members
        }
        if len(self._members) != len(members):
            raise UsageError(f"{path} has two members of the same name. {_HOW}")
        self._check_format()
        self.model = self._program_name()

    @contextlib.contextmanager
    def kept_open(self) -> Iterator[None]:
        """Inside, the list of members is not read again for each of them."""
        with zipfile.ZipFile(self.path) as opened:
            self._opened = opened
            try:
                yield
            finally:
                self._opened = None

    def __contains__(self, name: str) -> bool:
        return name in self._members

    def size(self, name: str) -> int:
        """How many bytes a member has."""
        return self._member(name).file_size

    def text(self, name: str) -> bytes:
        """A member that is JSON or a short text.

        Raises:
            UsageError: it is missing, or far longer than any program.
        """
        if self.size(name) > _LONGEST_TEXT:
            raise UsageError(
                f"{self.path}: its member {name} has {self.size(name):,} bytes; "
                f"a program has {_LONGEST_TEXT:,} at most"
            )
        return self.read(name)

    def read(self, name: str) -> bytes:
        """The bytes of a member.

        Raises:
            UsageError: it is missing, damaged or compressed.
        """
        member = self._member(name)
        # Torch compresses nothing, so no member is longer than the file: a small file cannot
        # be made to fill the memory.
        if member.compress_type != zipfile.ZIP_STORED or member.flag_bits & 1:
            raise UsageError(
                f"{self.path}: its member {name} is compressed or encrypted, which torch never "
                f"does. {_HOW}"
            )
        if member.file_size > self.path.stat().st_size:
            raise UsageError(
                f"{self.path}: its member {name} claims {member.file_size:,} bytes, more than "
                f"the whole file. {_HOW}"
            )
        try:
            if self._opened is not None:
                return self._opened.read(member)
            with zipfile.ZipFile(self.path) as opened:
                return opened.read(member)
        except (zipfile.BadZipFile, EOFError, OSError, NotImplementedError) as error:
            raise UsageError(
                f"{self.path}: its member {name} is damaged ({error}). {_HOW}"
            ) from None

    def _member(self, name: str) -> zipfile.ZipInfo:
        member = self._members.get(name)
        if member is None:
            raise UsageError(f"{self.path} lacks its member {name}. {_HOW}")
        return member

    def _check_format(self) -> None:
        if "archive_format" in self._members:
            found = self.text("archive_format")
            version = self.text("archive_version") if "archive_version" in self else b"0"
            if found != b"pt2" or version.strip() != b"%d" % _NEWEST_ARCHIVE:
                raise UsageError(
                    f"{self.path} is an archive of format {found.decode('ascii', 'replace'):.20} "
                    f"{version.decode('ascii', 'replace'):.20}; known is pt2 {_NEWEST_ARCHIVE}, "
                    f"which torch 2.11 to 2.13 write. {_HOW}"
                )
            return
        if "serialized_exported_program.json" in {name.split("/")[-1] for name in self._members}:
            raise UsageError(
                f"{self.path} was saved by an older torch, in another layout than that of torch "
                f"2.11 to 2.13, which is known. {_HOW} there"
            )
        if "data.pkl" in self._members:
            kind = "TorchScript program" if "constants.pkl" in self else "pickle (torch.save)"
            raise UsageError(
                f"{self.path} is a {kind}, and loading it would run code that it holds. Give "
                f"module:factory, a function of yours that loads and returns it. Or: {_HOW}"
            )
        raise UsageError(f"{self.path} is a zip archive, but none of a program. {_HOW}")

    def _program_name(self) -> str:
        names = [
            name[len("models/") : -len(".json")]
            for name in self._members
            if name.startswith("models/") and name.endswith(".json")
        ]
        if not names:
            compiled = any(name.startswith("data/aotinductor/") for name in self._members)
            what = "compiled code (AOTInductor)" if compiled else "other things"
            raise UsageError(f"{self.path} holds {what}, but no program. {_HOW}")
        if len(names) > 1:
            shown = ", ".join(sorted(names))
            raise UsageError(
                f"{self.path} holds {len(names)} programs ({shown:.200}): save each on its own"
            )
        return names[0]

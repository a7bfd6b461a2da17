"""Archives of numpy arrays, `.npz`: sizes are held against the file before anything is unpacked."""

from __future__ import annotations

import dataclasses
import zipfile
import zlib
from typing import TYPE_CHECKING

from paritas.dumps.foreign.npy_headers import array_place, read_header
from paritas.dumps.foreign.raw_values import Member
from paritas.dumps.foreign.torch_files import Unreadable, open_archive, stored_at
from paritas.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from paritas.dumps.foreign.raw_values import Place

__all__ = ["read_arrays"]

# More than this no byte of the compressed kind can stand for.
_MOST_OF_DEFLATE = 1040
# A member may unpack to this many times the whole file, or to so many bytes in any case.
_MOST_TIMES = 64
_ALWAYS_TAKEN = 64 << 20


def read_arrays(path: Path, name: str) -> Iterator[tuple[str, Place | Unreadable]]:
    """The arrays of an archive, by their keys; those that cannot be read with the reason.

    Args:
        name: of the file, inside the dump.

    Raises:
        UsageError: the archive is damaged.
    """
    size = path.stat().st_size
    with open_archive(path) as archive, path.open("rb") as file:
        for member in archive.infolist():
            if member.is_dir():
                continue
            key = member.filename.removesuffix(".npy")
            try:
                if member.compress_type == zipfile.ZIP_STORED:
                    begin = stored_at(file, member, size)
                    file.seek(begin)
                    inner = array_place(name, read_header(file), member.file_size)
                    around = Member(member.filename, begin, member.file_size, member.CRC)
                    place = dataclasses.replace(
                        inner, begin=begin + inner.begin, key=key, member=around
                    )
                else:
                    place = _packed(archive, member, name, size)
            except (UsageError, OSError) as error:
                yield key, Unreadable(str(error))
            else:
                yield key, place


def _packed(archive: zipfile.ZipFile, member: zipfile.ZipInfo, name: str, size: int) -> Place:
    if member.compress_type != zipfile.ZIP_DEFLATED or member.flag_bits & 1:
        raise UsageError("it is compressed in a way numpy does not write, or encrypted")
    claimed = member.file_size
    if claimed > member.compress_size * _MOST_OF_DEFLATE + 4096:
        raise UsageError(
            f"{member.compress_size} compressed bytes claim to be {claimed}: more than they can be"
        )
    if claimed > max(_MOST_TIMES * size, _ALWAYS_TAKEN):
        raise UsageError(
            f"it unpacks to {claimed} bytes, more than {_MOST_TIMES} times the file: if that is "
            f"right, save it uncompressed"
        )
    try:
        with archive.open(member) as unpacked:
            header = read_header(unpacked)
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError) as error:
        raise UsageError(f"it is damaged: {error}") from error
    place = array_place(name, header, claimed)
    around = Member(member.filename, member.header_offset, member.compress_size, member.CRC)
    return dataclasses.replace(place, key=member.filename, member=around, is_packed=True)

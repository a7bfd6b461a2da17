"""Bytes are held against their checksum once, for as long as nobody writes to their file."""

from __future__ import annotations

import os
import zlib

import pytest

from paritas.formats.files import tensor_bytes
from paritas.formats.files.tensor_bytes import CheckedBytes

NBYTES = tensor_bytes._FEW


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "data"
    path.write_bytes(bytes(NBYTES))
    return path


class Reading:
    """Computes a checksum, and counts how often it was asked to."""

    def __init__(self, path):
        self.path = path
        self.times = 0

    def __call__(self):
        self.times += 1
        return zlib.crc32(self.path.read_bytes())


def mismatch(checked, file, compute, nbytes=NBYTES):
    return checked.mismatch(file, 0, nbytes, zlib.crc32(bytes(NBYTES)), compute)


def test_what_fits_is_read_once(file):
    checked, compute = CheckedBytes(), Reading(file)
    assert mismatch(checked, file, compute) is None
    assert mismatch(checked, file, compute) is None
    assert compute.times == 1


def test_what_does_not_fit_is_found_each_time(file):
    checked, compute = CheckedBytes(), Reading(file)
    file.write_bytes(b"x" * NBYTES)
    for _ in range(2):
        assert mismatch(checked, file, compute) == zlib.crc32(b"x" * NBYTES)
    assert compute.times == 2


def test_a_file_that_was_written_to_is_read_again(file):
    checked, compute = CheckedBytes(), Reading(file)
    assert mismatch(checked, file, compute) is None
    file.write_bytes(b"x" * NBYTES)
    os.utime(file, ns=(1, 1))  # the clock of a file system may stand still for a while
    assert mismatch(checked, file, compute) is not None


def test_few_bytes_are_not_remembered(file):
    checked, compute = CheckedBytes(), Reading(file)
    for _ in range(2):
        assert mismatch(checked, file, compute, nbytes=NBYTES - 1) is None
    assert compute.times == 2


def test_what_is_remembered_does_not_grow_without_end(file, monkeypatch):
    monkeypatch.setattr(tensor_bytes, "_MOST_KEPT", 4)
    checked = CheckedBytes()
    for begin in range(10):
        assert checked.mismatch(file, begin, NBYTES, 7, lambda: 7) is None
    assert len(checked._known) <= 4


def test_an_open_file_is_closed_at_interpreter_exit_when_modules_are_gone(file, monkeypatch):
    opened = tensor_bytes._Descriptor(str(file))
    number = opened.number
    monkeypatch.setattr(tensor_bytes, "os", None)
    del opened  # an exception in __del__ would be reported as a warning, which is an error
    monkeypatch.undo()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(number)

"""Values that are mapped from their file: what `read` gives, without memory of their own."""

from __future__ import annotations

import os
import random
import resource
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from paritas.core.errors import UsageError
from paritas.formats.dumps.reading import Dump
from paritas.formats.files import tensor_bytes
from paritas.formats.files.records import Header
from paritas.formats.files.tensor_bytes import OpenFiles
from unit.formats.files.entries import PLAIN, bits, entry_of, filled, write_dump

LAYOUTS = ("packed", "msit")


@pytest.fixture
def maps_all(monkeypatch):
    """However few the bytes, they are mapped."""
    monkeypatch.setattr(tensor_bytes, "LEAST_MAPPED", 1)


def mapped() -> int:
    return len(tensor_bytes._mapped)


def descriptors() -> list[int]:
    return [int(path.name) for path in Path("/proc/self/fd").iterdir()]


def dump_of(path, tensors, layout="packed"):
    write_dump(path, tensors, header=Header(run="a" * 32, layout=layout))
    return Dump.open(path)


# --- the same values ------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("least", [1, 1 << 30])
def test_every_dtype_is_what_read_gives(tmp_path, monkeypatch, layout, least):
    monkeypatch.setattr(tensor_bytes, "LEAST_MAPPED", least)
    # An odd number of bytes before each, and an empty one among them.
    tensors = [filled(dtype, (3, 4), seed=1) for dtype in PLAIN]
    tensors += [torch.zeros(3, dtype=torch.uint8), torch.zeros(0, 3), torch.tensor(2.0)]
    tensors += [torch.arange(4.0).expand(3, 4), torch.arange(6.0).reshape(2, 3).T]
    dump = dump_of(tmp_path / "dump", tensors, layout)
    for record in dump.records():
        read, view = dump.read(record), dump.view(record)
        assert (view.dtype, view.shape) == (read.dtype, read.shape)
        assert bits(view) == bits(read), record
        assert dump.verify(record)


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
def test_a_quantised_tensor_is_the_numbers_that_it_stands_for(tmp_path, maps_all):
    values = torch.quantize_per_tensor(torch.arange(4.0), 0.5, 1, torch.quint8)
    dump = dump_of(tmp_path / "dump", [values])
    (record,) = dump.records()
    assert torch.equal(dump.view(record), values.dequantize())


@pytest.mark.parametrize("layout", LAYOUTS)
def test_many_bytes_are_mapped_and_few_are_read(tmp_path, layout):
    few, many = torch.arange(8.0), torch.arange(tensor_bytes.LEAST_MAPPED / 4)
    dump = dump_of(tmp_path / "dump", [few, many], layout)
    before = mapped()
    views = [dump.view(record) for record in dump.records()]
    assert mapped() == before + 1
    assert torch.equal(views[0], few)
    assert torch.equal(views[1], many)
    del views
    assert mapped() == before


@pytest.mark.parametrize("layout", LAYOUTS)
def test_writing_into_a_view_does_not_change_the_file(tmp_path, maps_all, layout):
    dump = dump_of(tmp_path / "dump", [torch.ones(5000)], layout)
    (record,) = dump.records()
    dump.view(record).zero_()
    assert torch.equal(dump.view(record), torch.ones(5000))
    assert dump.verify(record)


# --- files that change ----------------------------------------------------------------------------


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_file_that_is_cut_off_after_it_was_opened_is_refused(tmp_path, maps_all, layout):
    dump = dump_of(tmp_path / "dump", [torch.ones(5000)], layout)
    (record,) = dump.records()
    file = tmp_path / "dump" / record.payload.file
    for size in (file.stat().st_size - 1, file.stat().st_size // 2, 0):
        os.truncate(file, size)
        with pytest.raises(UsageError, match=r"ends at byte|damaged|cut off|no \.npy file"):
            dump.view(record)
        with pytest.raises(UsageError, match=r"ends at byte|damaged|cut off|no \.npy file"):
            dump.verify(record)


def test_a_file_that_shrinks_while_it_is_mapped_is_refused(tmp_path, maps_all, monkeypatch):
    path = tmp_path / "file"
    path.write_bytes(bytes(100_000))
    files = OpenFiles()
    opened = files._open

    def shrinking(*arguments):
        found = opened(*arguments)
        os.truncate(path, 10)
        return found

    monkeypatch.setattr(files, "_open", shrinking)
    with pytest.raises(UsageError, match="file ends at byte 10, before byte 100000"):
        files.view(path, 0, 100_000, "file", itemsize=4)


def test_a_file_in_the_place_of_another_is_the_one_that_is_read(tmp_path):
    path, files = tmp_path / "file", OpenFiles()
    path.write_bytes(b"old")
    assert files.read(path, 0, 3, "file").tolist() == [*b"old"]
    (tmp_path / "new").write_bytes(b"new and longer")
    (tmp_path / "new").replace(path)
    assert files.read(path, 0, 3, "file").tolist() == [*b"new"]


def test_what_is_no_file_is_refused(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UsageError, match="pipe is not a regular file"):
        OpenFiles().read(tmp_path / "pipe", 0, 0, "pipe")


# --- descriptors and mappings ---------------------------------------------------------------------


@pytest.fixture
def few_descriptors():
    """The process may open 40 files beyond those that it has open."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    now = max(descriptors())
    resource.setrlimit(resource.RLIMIT_NOFILE, (now + 40, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_thousands_of_views_one_after_the_other_keep_nothing(tmp_path, maps_all, few_descriptors):
    dump = dump_of(tmp_path / "dump", [torch.full((16,), float(n)) for n in range(2000)])
    for record in dump.records():
        assert dump.view(record)[0] == record.sequence
    assert mapped() == 0


def test_views_that_are_held_do_not_use_up_the_descriptors(tmp_path, maps_all, few_descriptors):
    dump = dump_of(tmp_path / "dump", [torch.full((16,), float(n)) for n in range(300)])
    held = [dump.view(record) for record in dump.records()]
    assert [int(view[0]) for view in held] == list(range(300))


def test_a_packed_file_is_opened_once(tmp_path, monkeypatch):
    dump = dump_of(tmp_path / "dump", [torch.full((16,), float(n)) for n in range(100)])
    opened = []
    really = os.open
    monkeypatch.setattr(os, "open", lambda *args: opened.append(args) or really(*args))
    for record in dump.records():
        dump.view(record)
        dump.read(record)
    assert len(opened) == 1


def test_few_files_are_kept_open_and_all_are_closed_in_the_end(tmp_path):
    before = len(descriptors())
    files = OpenFiles()
    for number in range(40):
        (tmp_path / str(number)).write_bytes(b"%03d" % number)
        assert bytes(files.read(tmp_path / str(number), 0, 3, "").tolist()) == b"%03d" % number
    assert len(descriptors()) - before == 16
    del files
    assert len(descriptors()) == before


@pytest.mark.parametrize("has_preadv", [True, False])
def test_threads_may_share_the_files(tmp_path, monkeypatch, has_preadv):
    """40 files of which 16 stay open, 8 threads, seed 0."""
    if not has_preadv:
        monkeypatch.setattr(tensor_bytes, "_preadv", None)
    for number in range(40):
        (tmp_path / str(number)).write_bytes(bytes([number]) * 3000)
    files = OpenFiles()

    def look(seed):
        chance = random.Random(seed)
        for _ in range(200):
            number, begin = chance.randrange(40), chance.randrange(2000)
            found = files.read(tmp_path / str(number), begin, 1000, "")
            assert found.unique().tolist() == [number]

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(look, range(8)))


# --- digests --------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("values", [torch.ones(700_000), torch.ones(3, 1).bfloat16().expand(3, 4)])
def test_bytes_that_changed_are_noticed_by_verify_alone(tmp_path, layout, values):
    dump = dump_of(tmp_path / "dump", [values], layout)
    (record,) = dump.records()
    assert dump.verify(record)
    path = tmp_path / "dump" / record.payload.file
    with path.open("r+b") as file:
        file.seek(-4, os.SEEK_END)  # in the second block, if there are two
        file.write(b"\0\0\0\0")
    assert dump.view(record).shape == values.shape
    with pytest.raises(
        UsageError,
        match=r"x0#0/output\.0 of step 0: .*(have digest|they differ)",
    ):
        dump.verify(record)


def test_what_has_no_digest_was_not_verified(tmp_path):
    header = Header(run="a" * 32)
    writer = write_dump(tmp_path / "dump", [], close=False, header=header)
    writer.add(entry_of(torch.ones(3), stored=None, digest=""))
    writer.close(header)
    dump = Dump.open(tmp_path / "dump")
    (record,) = dump.records()
    assert not dump.verify(record)

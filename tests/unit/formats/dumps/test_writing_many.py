"""Many values written at once: the same dump as one by one."""

from __future__ import annotations

import errno
import os

import pytest
import torch
from safetensors import safe_open

from paritas.core.errors import ParitasError
from paritas.formats.dumps import writing
from paritas.formats.dumps.reading import Dump
from paritas.formats.dumps.volumes import Volume
from paritas.formats.dumps.writing import DumpWriter
from paritas.formats.files import safetensors_files
from paritas.formats.files.records import Entry, Header, Site, TensorFacts
from paritas.formats.files.tensor_bytes import digest

HEADER = Header(run="r")


def entries(count, steps=1):
    found = []
    for number in range(count):
        tensor = torch.full((4,), float(number))
        site = Site(source="eager", level="module", name=f"m{number}")
        facts = TensorFacts(dtype="float32", shape=(4,), stride=(1,))
        found.append(
            Entry(
                sequence=number,
                step=number * steps // count,
                site=site,
                tensor=facts,
                stored=tensor,
                digest=digest(tensor),
            )
        )
    return found


def test_many_at_once_are_as_one_by_one(tmp_path):
    one, many = DumpWriter(tmp_path / "one", HEADER), DumpWriter(tmp_path / "many", HEADER)
    records = [one.add(entry) for entry in entries(20)]
    assert many.add_many(entries(20)) == records
    for writer in (one, many):
        writer.close(HEADER)
    index = "rank0/index.jsonl"
    assert (tmp_path / "one" / index).read_bytes() == (tmp_path / "many" / index).read_bytes()
    assert Dump.open(tmp_path / "many").header(0).records == 20


def test_each_goes_into_the_folder_of_its_step(tmp_path):
    writer = DumpWriter(tmp_path, HEADER, last=2)
    writer.add_many(entries(9, steps=3))
    writer.close(HEADER)
    dump = Dump.open(tmp_path)
    assert dump.problems == []
    assert [(record.step, record.sequence) for record in dump.records()] == [
        (1, 3), (1, 4), (1, 5), (2, 6), (2, 7), (2, 8)
    ]  # fmt: skip


def test_those_before_the_one_that_failed_are_in_the_index(tmp_path, monkeypatch):
    writer = DumpWriter(tmp_path, HEADER)
    put = Volume.put

    def full(self, key, *rest):
        if "m3" in key:
            raise OSError(errno.ENOSPC, "No space left on device")
        return put(self, key, *rest)

    monkeypatch.setattr(Volume, "put", full)
    with pytest.raises(ParitasError, match=r"16 more bytes\): No space left"):
        writer.add_many(entries(6))
    writer.close(HEADER)
    dump = Dump.open(tmp_path)
    assert [dump.read(record)[0] for record in dump.records()] == [0, 1, 2]
    assert not dump.header(0).closed


def test_an_index_that_is_full_takes_the_lines_that_fit(tmp_path, monkeypatch):
    writer = DumpWriter(tmp_path, HEADER)
    write = Volume._write_lines

    def full(self, text, count):
        if b'"m3"' in text:
            raise OSError(errno.ENOSPC, "No space left on device")
        write(self, text, count)

    monkeypatch.setattr(Volume, "_write_lines", full)
    with pytest.raises(ParitasError, match="No space left"):
        writer.add_many(entries(6))
    writer.close(HEADER)
    assert [record.sequence for record in Dump.open(tmp_path).records()] == [0, 1, 2]


@pytest.mark.parametrize("taken", [0, 8, 16, 40, 95])
def test_a_disk_that_fills_up_keeps_what_it_took_whole(tmp_path, monkeypatch, taken):
    writer = DumpWriter(tmp_path, HEADER)
    write = safetensors_files._write_all

    def full(file, buffers):
        room = b"".join(bytes(memoryview(data).cast("B")) for data in buffers)[:taken]
        write(file, [room])
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(safetensors_files, "_write_all", full)
    with pytest.raises(ParitasError, match=r"16 more bytes\): No space left"):
        writer.add_many(entries(6))
    monkeypatch.undo()
    writer.close(HEADER)
    dump = Dump.open(tmp_path)
    whole = taken // 16
    assert [dump.read(record)[0] for record in dump.records()] == list(range(whole))
    assert not dump.header(0).closed
    with safe_open(tmp_path / "rank0" / "data-0000.safetensors", framework="pt") as opened:
        assert len(opened.keys()) == whole


def test_a_system_that_takes_less_than_it_is_given_is_given_the_rest(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "writev", lambda file, buffers: os.write(file, bytes(buffers[0])[:7]))
    writer = DumpWriter(tmp_path, HEADER)
    writer.add_many(entries(6))
    writer.close(HEADER)
    dump = Dump.open(tmp_path)
    assert dump.problems == []
    assert [dump.read(record).tolist() for record in dump.records()] == [
        [float(number)] * 4 for number in range(6)
    ]


def test_sketches_are_remembered_up_to_a_bound_and_stay_readable(tmp_path, monkeypatch):
    monkeypatch.setattr(writing, "_MOST_SKETCHES", 4)
    header = Header(run="r", data="stats")
    writer = DumpWriter(tmp_path, header)
    for turn in range(2):
        for entry in entries(10):
            entry.sketch, entry.stored = entry.stored, None
            entry.sequence += turn * 10
            writer.add(entry)
    assert len(writer._volume._places) <= 4
    writer.close(header)
    dump = Dump.open(tmp_path)
    assert [float(dump.read_sketch(record)[0]) for record in dump.records()] == [*range(10)] * 2

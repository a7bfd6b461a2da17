"""Many values written at once: the same dump as one by one."""

from __future__ import annotations

import errno

import pytest
import torch

from paritas.dumps.dtypes import digest
from paritas.dumps.reading import Dump
from paritas.dumps.records import Header, Site, TensorFacts
from paritas.dumps.volumes import Volume
from paritas.dumps.writing import DumpWriter, Entry
from paritas.errors import ParitasError

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
    with pytest.raises(ParitasError, match=r"16 bytes more\): No space left"):
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

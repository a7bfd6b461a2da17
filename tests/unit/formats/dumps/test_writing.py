"""The writer: dedupe, the ring of the last steps, failures, and the header."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import pytest
import torch
from safetensors import safe_open

from paritas.core.errors import ParitasError, UsageError
from paritas.formats.dumps import volumes
from paritas.formats.dumps.reading import Dump
from paritas.formats.dumps.writing import DumpWriter
from paritas.formats.files.records import Entry, Header, run_identity
from unit.formats.files.entries import abandon, entry_of, site, write_dump

if TYPE_CHECKING:
    import io

HEADER = Header(run="a" * 32)


# --- dedupe ---------------------------------------------------------------------------------------


def test_equal_bytes_are_written_once(tmp_path):
    value = torch.arange(1000.0)
    other = value.view(torch.int32).reshape(10, 100)
    writer = write_dump(tmp_path, [value, value.clone(), other])
    assert (writer.written_bytes, writer.saved_bytes) == (4000, 8000)
    dump = Dump.open(tmp_path)
    records = list(dump.records())
    assert len({record.payload.begin for record in records}) == 1
    assert {record.payload.key for record in records} == {"0/forward/x0#0/output.0"}
    assert torch.equal(dump.read(records[2]), other)


def test_bytes_that_were_written_need_not_be_given_again(tmp_path):
    value = torch.arange(6.0).reshape(2, 3, 1).expand(2, 3, 4)
    first = entry_of(value)
    writer = DumpWriter(tmp_path, HEADER)
    writer.add(first)
    writer.add(msgspec.structs.replace(first, sequence=1, site=site("y"), stored=None))
    writer.close(HEADER)
    dump = Dump.open(tmp_path)
    for record in dump.records():
        assert torch.equal(dump.read(record), value)


def test_an_entry_without_bytes_that_nobody_wrote_is_an_error(tmp_path):
    writer = DumpWriter(tmp_path, HEADER)
    missing = msgspec.structs.replace(entry_of(torch.ones(3)), stored=None)
    with pytest.raises(ParitasError, match=r"0/forward/x#0/output\.0 has no values"):
        writer.add(missing)
    writer.add(entry_of(torch.ones(3)))
    larger = msgspec.structs.replace(missing, tensor=entry_of(torch.ones(4)).tensor)
    with pytest.raises(ParitasError, match=r"has 16 bytes, .* written with 12 bytes"):
        writer.add(larger)
    writer.close(HEADER)
    assert Dump.open(tmp_path).problems == []


@pytest.mark.parametrize("numel", [3, 1 << 19], ids=["small", "large"])
def test_a_digest_that_is_not_given_is_found_and_serves_to_write_once(tmp_path, numel):
    first = torch.arange(float(numel))
    second = first.clone()
    second[numel // 3] = -1  # where no glimpse at them falls
    given = [first, second, first.clone(), second.clone()]
    writer = DumpWriter(tmp_path, HEADER)
    for number, tensor in enumerate(given):
        full = entry_of(tensor, number, name=f"x{number}")
        # The third comes with its digest: what either way wrote, the other finds.
        entry = full if number == 2 else msgspec.structs.replace(full, digest="")
        assert writer.add(entry).digest == full.digest
    writer.close(HEADER)
    assert writer.written_bytes == writer.saved_bytes == 2 * first.nbytes
    dump = Dump.open(tmp_path)
    assert dump.problems == []
    for record in dump.records():
        assert torch.equal(dump.read(record), given[record.sequence])


def test_statistics_alone_write_no_values(tmp_path):
    header = Header(run="r", data="stats")
    writer = DumpWriter(tmp_path, header)
    entry = msgspec.structs.replace(entry_of(torch.ones(3)), stored=None, sketch=torch.ones(4))
    assert writer.add(entry).payload is None
    assert writer.add(msgspec.structs.replace(entry, sequence=1)).sketch is not None
    writer.close(header)
    assert (writer.written_bytes, writer.saved_bytes) == (16, 16)
    dump = Dump.open(tmp_path)
    record, _ = dump.records()
    with pytest.raises(UsageError, match="only statistics were recorded"):
        dump.read(record)
    assert torch.equal(dump.read_sketch(record), torch.ones(4))


# --- the ring of the last steps -------------------------------------------------------------------


def steps_of(path):
    return [record.step for record in Dump.open(path).records()]


def test_a_ring_keeps_the_last_steps(tmp_path):
    writer = DumpWriter(tmp_path, HEADER, last=2)
    for step in range(5):
        writer.begin_step(step)
        writer.add(entry_of(torch.full((4,), float(step)), sequence=step, step=step))
        assert steps_of(tmp_path) == list(range(max(0, step - 1), step + 1))
    writer.close(HEADER)
    dump = Dump.open(tmp_path)
    assert dump.problems == []
    assert [dump.read(record)[0] for record in dump.records()] == [3, 4]
    assert sorted(path.name for path in (tmp_path / "rank0").iterdir() if path.is_dir()) == [
        "step-00000003",
        "step-00000004",
    ]
    for record in dump.records():
        with safe_open(tmp_path / record.payload.file, framework="pt") as opened:
            assert opened.get_tensor(record.payload.key)[0] == record.step


def test_steps_that_are_kept_stay_for_good(tmp_path):
    writer = DumpWriter(tmp_path, HEADER, last=2)
    for step in range(7):
        writer.add(entry_of(torch.ones(4), sequence=2 * step, step=step))
        if step == 2:
            writer.keep()
        writer.add(entry_of(torch.ones(4), sequence=2 * step + 1, step=step, name="y"))
    writer.close(HEADER)
    assert steps_of(tmp_path) == [1, 1, 2, 2, 5, 5, 6, 6]
    assert Dump.open(tmp_path).header(0).records == 8


def test_bytes_of_a_step_that_may_go_are_written_again(tmp_path):
    writer = DumpWriter(tmp_path, HEADER, last=2)
    for step in range(4):
        writer.add(entry_of(torch.ones(4), sequence=step, step=step))
    writer.close(HEADER)
    dump = Dump.open(tmp_path)
    assert all(torch.equal(dump.read(record), torch.ones(4)) for record in dump.records())


# --- failures -------------------------------------------------------------------------------------


def test_after_a_failure_what_was_written_is_read_and_the_dump_is_not_called_closed(
    tmp_path, monkeypatch
):
    writer = DumpWriter(tmp_path, HEADER)
    writer.add(entry_of(torch.ones(4)))

    def full(file, data, whole):
        file.write(bytes(data)[: whole // 2])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("paritas.formats.files.safetensors_files.write_whole", full)
    expected = rf"cannot write to {tmp_path}/rank0 \(16 more bytes\): No space left on device"
    with pytest.raises(ParitasError, match=expected):
        writer.add(entry_of(torch.zeros(4), sequence=1, name="y"))
    monkeypatch.undo()
    with pytest.raises(ParitasError, match=expected):
        writer.add(entry_of(torch.zeros(4), sequence=1, name="y"))
    writer.close(HEADER)
    dump = Dump.open(tmp_path)
    assert not dump.header(0).closed
    assert "No space left" in dump.header(0).notes[0]
    assert dump.problems == [
        "rank 0: it was not closed, so the run ended early; 1 records can be read"
    ]
    (record,) = dump.records()
    assert torch.equal(dump.read(record), torch.ones(4))
    with safe_open(tmp_path / record.payload.file, framework="pt") as opened:
        assert list(opened.keys()) == ["0/forward/x#0/output.0"]


def test_half_an_index_line_is_taken_back(tmp_path, monkeypatch):
    writer = DumpWriter(tmp_path, HEADER)
    writer.add(entry_of(torch.ones(4)))

    def full(file: io.FileIO, data, whole):
        file.write(bytes(data)[: whole // 2])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(volumes, "write_whole", full)
    with pytest.raises(ParitasError, match="No space left"):
        writer.add(entry_of(torch.zeros(4), sequence=1))
    monkeypatch.undo()
    writer.close(HEADER)
    assert (tmp_path / "rank0" / "index.jsonl").read_bytes().count(b"\n") == 1
    assert len(list(Dump.open(tmp_path).records())) == 1


def test_a_recording_that_failed_elsewhere_is_not_called_closed(tmp_path):
    writer = DumpWriter(tmp_path, HEADER)
    writer.close(HEADER, complete=False)
    assert Dump.open(tmp_path).ranks[0].state == "ended early"


def test_nothing_is_added_to_what_is_closed(tmp_path):
    writer = write_dump(tmp_path, [torch.ones(1)])
    writer.close(HEADER)
    with pytest.raises(ParitasError, match="was closed: nothing can be added"):
        writer.add(entry_of(torch.ones(1)))


# --- the header -----------------------------------------------------------------------------------


def test_the_header_is_there_from_the_beginning_and_can_be_changed(tmp_path):
    writer = DumpWriter(tmp_path, Header(run="r", closed=True, records=5))
    assert Dump.open(tmp_path).header(0) == Header(run="r")
    writer.describe(Header(run="r", taps=True, closed=True))
    assert Dump.open(tmp_path).header(0) == Header(run="r", taps=True)
    abandon(writer)


def test_a_key_longer_than_any_header_is_cut(tmp_path):
    writer = DumpWriter(tmp_path, HEADER)
    for number in range(3):
        entry = entry_of(torch.full((2,), float(number)), sequence=number, name="n" * 500_000)
        writer.add(entry)
    writer.close(HEADER)
    dump = Dump.open(tmp_path)
    assert [dump.read(record)[0] for record in dump.records()] == [0, 1, 2]


def test_an_entry_is_a_value_without_a_tensor(tmp_path):
    writer = DumpWriter(tmp_path, HEADER)
    record = writer.add(Entry(sequence=0, step=0, site=site(), value="3"))
    writer.close(HEADER)
    with pytest.raises(UsageError, match="it has no values"):
        Dump.open(tmp_path).read(record)


# --- the run --------------------------------------------------------------------------------------


def test_a_single_process_has_a_run_of_its_own():
    assert run_identity(0, 1) != run_identity(0, 1)


def test_ranks_agree_on_their_run_and_differ_from_the_next_one():
    launched = {"TORCHELASTIC_RUN_ID": "job", "MASTER_ADDR": "host", "MASTER_PORT": "29500"}
    first = {run_identity(rank, 4, launched) for rank in range(4)}
    assert len(first) == 1
    restarted = {**launched, "TORCHELASTIC_RESTART_COUNT": "1"}
    assert run_identity(0, 4, restarted) not in first
    assert run_identity(0, 8, launched) not in first
    with pytest.raises(UsageError, match="rank 4 of 4"):
        run_identity(4, 4, launched)

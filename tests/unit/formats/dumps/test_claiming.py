"""Which folders a recording takes, and what it never removes."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from paritas.core.errors import ParitasError, UsageError
from paritas.formats.dumps.reading import Dump
from paritas.formats.dumps.writing import DumpWriter
from paritas.formats.files.records import Header
from unit.formats.files.entries import abandon, write_dump

VALUES = [torch.arange(4.0)]
FIRST = Header(run="a" * 32, world_size=1, created="2026-01-01")


def header_of(rank, *, run="b" * 32, world_size=2):
    return Header(run=run, rank=rank, world_size=world_size)


def names_in(path):
    return sorted(item.name for item in path.iterdir())


def test_a_second_run_into_the_same_folder_is_refused(tmp_path):
    write_dump(tmp_path, VALUES, header=FIRST)
    with pytest.raises(
        UsageError,
        match=r"is not empty: rank0 exists already, recorded 2026-01-01: give a new folder, or "
        r"overwrite=True to replace the dump$",
    ):
        write_dump(tmp_path, VALUES, header=Header(run="b" * 32))
    assert Dump.open(tmp_path).header(0).run == FIRST.run
    assert names_in(tmp_path) == ["rank0"]


def test_ranks_of_one_run_come_in_any_order(tmp_path):
    writers = [DumpWriter(tmp_path, header_of(rank)) for rank in (1, 0)]
    for writer, rank in zip(writers, (1, 0), strict=True):
        writer.close(header_of(rank))
    dump = Dump.open(tmp_path)
    assert list(dump.ranks) == [0, 1]
    assert dump.problems == []


@pytest.mark.parametrize(
    "other", [header_of(1, run="c" * 32), header_of(1, world_size=4)], ids=["run", "world size"]
)
def test_a_rank_of_another_run_is_refused(tmp_path, other):
    write_dump(tmp_path, VALUES, header=header_of(0))
    with pytest.raises(
        UsageError, match=r"rank0 belongs to another run, bbbbbbbb with 2 rank\(s\)"
    ):
        DumpWriter(tmp_path, other)


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("name", ["notes.txt", ".hidden", "rank0x", "worldsize1_global_rank0"])
def test_a_folder_with_other_things_in_it_is_refused_and_left_alone(tmp_path, name, overwrite):
    (tmp_path / name).mkdir()
    with pytest.raises(UsageError, match="which is not part of a paritas dump"):
        DumpWriter(tmp_path, FIRST, overwrite=overwrite)
    assert names_in(tmp_path) == [name]


def test_a_rank_folder_that_is_not_ours_is_left_alone(tmp_path):
    (tmp_path / "rank0").mkdir()
    (tmp_path / "rank0" / "thesis.tex").write_text("years of work")
    with pytest.raises(UsageError, match="it contains rank0, which is not part of a paritas dump"):
        DumpWriter(tmp_path, FIRST, overwrite=True)
    assert (tmp_path / "rank0" / "thesis.tex").exists()


def test_overwriting_replaces_the_whole_dump_of_another_run(tmp_path):
    for rank in range(2):
        write_dump(tmp_path, VALUES, header=header_of(rank))
    write_dump(tmp_path, VALUES, header=FIRST, overwrite=True)
    assert names_in(tmp_path) == ["rank0"]
    assert Dump.open(tmp_path).header(0).run == FIRST.run


def test_overwriting_leaves_the_other_ranks_of_the_same_run(tmp_path):
    for rank in range(2):
        write_dump(tmp_path, VALUES, header=header_of(rank, run="c" * 32), last=rank)
    for rank in range(2):
        write_dump(tmp_path, VALUES, header=header_of(rank), overwrite=True)
    dump = Dump.open(tmp_path)
    assert {dump.header(rank).run for rank in dump.ranks} == {"b" * 32}
    assert list(dump.ranks) == [0, 1]


def test_ranks_that_overwrite_at_the_same_time_leave_each_other_alone(tmp_path):
    count = 6
    for attempt in range(10):
        old, new = (f"{attempt}{which}" for which in "ab")
        for rank in range(count):
            header = header_of(rank, run=old, world_size=count)
            DumpWriter(tmp_path / str(attempt), header).close(header)
        together = threading.Barrier(count)

        def begin(rank, attempt=attempt, run=new, together=together):
            header = header_of(rank, run=run, world_size=count)
            together.wait()
            writer = DumpWriter(tmp_path / str(attempt), header, overwrite=True)
            writer.close(header)

        with ThreadPoolExecutor(count) as pool:
            list(pool.map(begin, range(count)))
        dump = Dump.open(tmp_path / str(attempt))
        assert {dump.header(rank).run for rank in range(count)} == {new}


def test_a_file_of_the_users_own_keeps_a_dump_from_being_overwritten(tmp_path):
    write_dump(tmp_path, VALUES, header=FIRST)
    (tmp_path / "rank0" / "remarks.md").write_text("look at layer 7")
    with pytest.raises(
        UsageError, match=r"rank0 contains remarks\.md, which paritas did not write"
    ):
        DumpWriter(tmp_path, FIRST, overwrite=True)
    assert (tmp_path / "rank0" / "index.jsonl").exists()


def test_a_dump_that_is_being_written_is_not_overwritten(tmp_path):
    writer = write_dump(tmp_path, VALUES, header=FIRST, close=False)
    with pytest.raises(UsageError, match="is being written by a running process"):
        DumpWriter(tmp_path, FIRST, overwrite=True)
    abandon(writer)
    DumpWriter(tmp_path, FIRST, overwrite=True).close(FIRST)


def test_what_a_dead_process_left_half_removed_or_half_begun_is_no_hindrance(tmp_path):
    (tmp_path / ".removing-rank0-12345678").mkdir()
    (tmp_path / ".starting-0-abc").mkdir()
    write_dump(tmp_path, VALUES, header=FIRST)
    assert names_in(tmp_path) == [".starting-0-abc", "rank0"]


def test_torchairs_tree_of_our_own_is_overwritten_with_its_dump(tmp_path):
    header = Header(run="a" * 32, layout="msit")
    write_dump(tmp_path, VALUES, header=header)
    (tmp_path / "dynamo_original_graph_0_rank_0_pid_1_ts_2.txt").write_text("op {}")
    assert "worldsize1_global_rank0" in names_in(tmp_path)
    with pytest.raises(UsageError, match="rank0 exists already"):
        DumpWriter(tmp_path, header)
    write_dump(tmp_path, VALUES, header=FIRST, overwrite=True)
    assert names_in(tmp_path) == ["rank0"]


def test_torchairs_layout_is_read_back_through_the_same_index(tmp_path):
    header = Header(run="a" * 32, layout="msit")
    write_dump(tmp_path, [torch.arange(4.0, dtype=torch.bfloat16)], header=header, last=1)
    dump = Dump.open(tmp_path)
    assert dump.problems == []
    (record,) = dump.records()
    assert record.payload.file.startswith("worldsize1_global_rank0/")
    assert torch.equal(dump.read(record), torch.arange(4.0, dtype=torch.bfloat16))


def test_a_path_that_cannot_be_a_folder_is_an_error_that_says_so(tmp_path):
    (tmp_path / "file").write_text("x")
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(ParitasError, match=r"cannot record into .*; give a folder that can be"):
            DumpWriter(path, FIRST)

"""`paritas convert` of a dump that is being written, and of one that it was interrupted at."""

from __future__ import annotations

import contextlib
import signal
import threading
import time

import pytest
import torch
from click.testing import CliRunner

import processes
from integration.dump_making import Making, assert_same_records, site, values, write_run
from paritas.app.cli import main
from paritas.core.errors import ParitasError
from paritas.core.numerics.sketch import sketch, sketch_distance
from paritas.core.numerics.statistics import summarize
from paritas.formats.dumps.reading import Dump
from paritas.recording import conversion
from paritas.recording.conversion import Converter


def convert(*arguments):
    return CliRunner().invoke(main, ["convert", *map(str, arguments)])


@pytest.fixture
def dump(tmp_path):
    return write_run(tmp_path / "dump")


# --- while it is written --------------------------------------------------------------------------


def test_what_is_there_of_an_unclosed_dump_is_converted_and_goes_on_later(tmp_path):
    making = Making(tmp_path / "dump")
    making.add(site("a"), values(5))
    first = convert(tmp_path / "dump", "--to", "stats")
    assert first.exit_code == 3
    assert "is not closed: it was cut off, or is still being written (use --watch)" in first.stdout
    assert not Dump.open(tmp_path / "dump_stats").header(0).closed
    making.add(site("b"), values(5, seed=1))
    making.close()
    second = convert(tmp_path / "dump", "--to", "stats")
    assert second.exit_code == 0, second.output
    assert "2 records of 1 rank" in second.stdout
    assert "1 of them from an earlier run" in second.stdout
    made = Dump.open(tmp_path / "dump_stats")
    assert made.problems == []
    assert_same_records(made, Dump.open(tmp_path / "dump"))


def test_half_a_line_is_left_for_later(tmp_path):
    making = Making(tmp_path / "dump")
    making.add(site("a"), values(5))
    index = tmp_path / "dump" / "rank0" / "index.jsonl"
    with index.open("ab") as file:
        file.write(b'{"sequence":1,"st')
    converter = Converter(tmp_path / "dump", tmp_path / "stats", "stats")
    converter.run()
    converter.close()
    making.close()
    assert converter.result().records == 1
    assert converter.result().problems == ()


@contextlib.contextmanager
def watching(dump, output, **options):
    """Convert in another thread, from before the dump is there until it is closed."""
    converter = Converter(dump, output, "stats", **options)
    # A daemon: a test that fails must not keep the others from their end.
    thread = threading.Thread(target=converter.run, kwargs={"interval": 0.01}, daemon=True)
    thread.start()
    yield converter
    thread.join(600)
    assert not thread.is_alive()
    converter.close()


def wait_for(condition):
    deadline = time.monotonic() + 600
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_watching_follows_a_dump_from_before_its_beginning_to_its_end(tmp_path):
    with watching(tmp_path / "dump", tmp_path / "stats") as converter:
        parts = [Making(tmp_path / "dump", rank=rank, world_size=2) for rank in (0, 1)]
        for number in range(40):
            for part in parts:
                part.add(site(f"a{number}"), values(9, seed=number), step=number // 4)
        wait_for(lambda: converter.result().records == 80)
        for part in parts:
            part.close()
    assert converter.result().closed
    made = Dump.open(tmp_path / "stats")
    assert made.problems == []
    assert_same_records(made, Dump.open(tmp_path / "dump"))


def test_files_are_deleted_while_others_are_written_and_what_points_back_is_not_lost(tmp_path):
    tensors = [values(400, seed=number) for number in range(20)] + [torch.zeros(400)]
    with watching(tmp_path / "dump", tmp_path / "stats", delete=True) as converter:
        making = Making(tmp_path / "dump", largest_file=1)
        for number, tensor in enumerate(tensors):
            making.add(site(f"first{number}"), tensor)
        wait_for(lambda: converter.result().freed_files >= 4)
        newest = max((tmp_path / "dump" / "rank0").glob("data-*"))
        assert newest.exists(), "it is still being written"
        # All of these are in files that are gone: dedupe lets the index point there.
        again = [tensor.reshape(20, 20) for tensor in tensors[:3]]
        again += [torch.zeros(400, dtype=torch.int32), torch.zeros(200, dtype=torch.float64)]
        for number, tensor in enumerate(again):
            making.add(site(f"again{number}"), tensor)
        making.close()
    done = converter.result()
    assert done.problems == ()
    assert done.closed
    assert list((tmp_path / "dump").rglob("*.safetensors")) == []
    made = Dump.open(tmp_path / "stats")
    assert made.problems == []
    for record, tensor in zip(made.records(), [*tensors, *again], strict=True):
        assert record.statistics == summarize(tensor)
        assert sketch_distance(sketch(tensor), made.read_sketch(record)) == 0


def test_watching_a_ring_keeps_the_statistics_of_steps_that_it_let_go(tmp_path):
    with watching(tmp_path / "dump", tmp_path / "stats") as converter:
        making = Making(tmp_path / "dump", last=2)
        for step in range(5):
            making.add(site("a"), values(9, seed=step), step=step)
            wait_for(lambda step=step: converter.result().records == step + 1)
        making.close()
    assert [record.step for record in Dump.open(tmp_path / "dump").records()] == [3, 4]
    assert [record.step for record in Dump.open(tmp_path / "stats").records()] == [0, 1, 2, 3, 4]


@pytest.mark.slow
def test_a_writer_that_was_killed_is_not_watched_for_ever(tmp_path, monkeypatch):
    monkeypatch.setattr(conversion, "PATIENCE", 3)
    code = (
        "import os, pathlib, sys; from integration.dump_making import Making, site, values;"
        "making = Making(pathlib.Path(sys.argv[1])); making.add(site('a'), values(5));"
        "os.kill(os.getpid(), 9)"
    )
    killed = processes.run("-c", code, tmp_path / "dump")
    assert killed.returncode == -signal.SIGKILL
    result = convert(tmp_path / "dump", "--to", "stats", "--watch", "--interval", "0.01")
    assert result.exit_code == 3
    assert "1 record of 1 rank" in result.stdout


def test_two_conversions_into_one_folder_do_not_meet(tmp_path):
    making = Making(tmp_path / "dump")
    making.add(site("a"), values(5))
    first = Converter(tmp_path / "dump", tmp_path / "stats", "stats")
    first.run()
    second = convert(tmp_path / "dump", "--to", "stats", "--output", tmp_path / "stats")
    assert second.exit_code == 2
    assert "another process is writing" in second.stderr
    first.close()
    making.close()
    assert len(list(Dump.open(tmp_path / "stats").records())) == 1


# --- interruptions --------------------------------------------------------------------------------


def test_an_interrupted_conversion_can_be_read_and_goes_on(dump, tmp_path, monkeypatch):
    read, count = Dump.read, 0

    def interrupted(self, record, **options):
        nonlocal count
        count += 1
        if count == 5:
            raise KeyboardInterrupt
        return read(self, record, **options)

    monkeypatch.setattr(Dump, "read", interrupted)
    result = convert(dump, "--to", "stats", "--delete")
    assert result.exit_code == 130
    assert "interrupted: run the same command to resume" in result.stderr
    partial = Dump.open(tmp_path / "dump_stats")
    assert not partial.header(0).closed
    had = len(list(partial.records()))
    assert 0 < had < 18
    assert (dump / "rank0" / "data-0000.safetensors").exists()
    monkeypatch.undo()
    result = convert(dump, "--to", "stats")
    assert result.exit_code == 0, result.output
    assert f"{had} of them from an earlier run" in result.stdout
    made = Dump.open(tmp_path / "dump_stats")
    assert made.problems == []
    assert_same_records(made, Dump.open(dump))


def test_ctrl_c_ends_the_watching_of_a_program_that_runs_on(tmp_path, monkeypatch):
    making = Making(tmp_path / "dump")
    making.add(site("a"), values(5))

    def pressed(seconds):
        raise KeyboardInterrupt

    monkeypatch.setattr(conversion.time, "sleep", pressed)
    result = convert(tmp_path / "dump", "--to", "stats", "--watch")
    making.close()
    assert result.exit_code == 130
    assert "1 record of 1 rank" in result.stdout
    assert len(list(Dump.open(tmp_path / "dump_stats").records())) == 1


def test_a_conversion_killed_while_it_takes_over_an_earlier_one_loses_nothing(
    tmp_path, monkeypatch
):
    making = Making(tmp_path / "dump", largest_file=1)
    for number in range(20):
        making.add(site(f"a{number}"), values(400, seed=number))
    # What was freed is in the first conversion alone.
    converter = Converter(tmp_path / "dump", tmp_path / "stats", "stats", delete=True)
    converter.run()
    converter.close()
    assert converter.result().freed_files > 0
    making.close()

    def full(folder):
        raise ParitasError("the disk is full")

    monkeypatch.setattr(conversion, "sync_to_disk", full)
    assert (
        convert(tmp_path / "dump", "--to", "stats", "--output", tmp_path / "stats").exit_code == 2
    )
    monkeypatch.undo()
    result = convert(tmp_path / "dump", "--to", "stats", "--output", tmp_path / "stats")
    assert result.exit_code == 0, result.output
    made = Dump.open(tmp_path / "stats")
    assert made.problems == []
    assert_same_records(made, Dump.open(tmp_path / "dump"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["dump", "stats"]

"""Dumps whose writers are killed, run out of disk, or are several."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

import processes
from integration import dump_scripts
from paritas.formats.dumps.reading import Dump

SEED = 20260801
# Of four writers one keeps a ring of steps.
TIMES = 24 if os.environ.get("PARITAS_WHOLE_CORPUS") else 8


def start(command, path, *numbers, **environment):
    arguments = (dump_scripts.__file__, command, path, *map(str, numbers))
    return processes.start(*arguments, environment=environment)


def finish(process):
    out, err = process.communicate()
    assert process.returncode == 0, err
    return json.loads(out) if out else None


def check_every_record(path):
    """Every record is right, and so is every data file once it is repaired; gives the records."""
    dump = Dump.open(path)
    records = list(dump.records())
    for record in records:
        assert torch.equal(dump.read(record), dump_scripts.content(record.sequence))
    dump.repair()
    keys = {(r.payload.file, r.payload.key): r.sequence for r in reversed(records)}
    for file in Path(path).glob("rank*/**/data-*.safetensors"):
        with safe_open(file, framework="pt") as opened:
            for key in opened.keys():  # noqa: SIM118  (it is no mapping)
                number = keys.pop((file.relative_to(path).as_posix(), key), None)
                if number is not None:
                    assert torch.equal(opened.get_tensor(key), dump_scripts.content(number))
    assert not keys, "a record whose file or key is not there"
    return records


def test_a_writer_killed_at_any_moment_leaves_a_readable_dump(tmp_path):
    reported = finish(start("be_killed", tmp_path, TIMES, SEED))
    assert len(reported) == TIMES
    assert len(set(reported)) > 3, "the moments were not random"
    for run, told in enumerate(reported):
        path = tmp_path / f"run{run}"
        state = Dump.open(path).ranks[0].state
        assert state == "ended early"
        records = check_every_record(path)
        is_ring = run % 4 == 3
        first = max(0, (told - 1) // 10 - 1) * 10 if is_ring else 0
        numbers = [record.sequence for record in records]
        # What the writer had said it wrote is there, and at most the one in flight besides.
        assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))
        assert numbers[-1] + 1 in (told, told + 1)
        assert numbers[0] in ((first, first + 10) if is_ring else (0,))
        problems = Dump.open(path).problems
        assert len(problems) <= 2, problems


def test_two_processes_write_one_dump(tmp_path):
    path = tmp_path / "dump"
    launched = {"WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "29512"}
    processes = [start("write_rank", path, 200, RANK=str(rank), **launched) for rank in range(2)]
    for process in processes:
        finish(process)
    dump = Dump.open(path)
    assert dump.problems == []
    assert dump.header(0).run == dump.header(1).run
    records = check_every_record(path)
    assert sorted(record.sequence for record in records) == list(range(400))
    assert all(record.sequence % 2 == record.rank for record in records)


def check_full(path, told, reason):
    count, message = told
    assert reason in message
    assert "more bytes" in message
    assert str(path) in message
    assert len(check_every_record(path)) == count > 0
    header = Dump.open(path).header(0)
    assert not header.closed
    assert message in header.notes


def test_a_file_that_may_not_grow_ends_the_dump_and_not_what_is_in_it(tmp_path):
    told = finish(start("fill", tmp_path / "dump", 1 << 20))
    check_full(tmp_path / "dump", told, "File too large")


def test_a_full_disk_ends_the_dump_and_not_what_is_in_it(tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(disk)]
    try:
        done = subprocess.run(mount, capture_output=True, check=False)
    except FileNotFoundError:
        pytest.skip("there is no mount here")
    if done.returncode:
        pytest.skip(f"a small disk cannot be made here: {done.stderr.decode().strip()}")
    try:
        told = finish(start("fill", disk / "dump", 0))
        check_full(disk / "dump", told, "No space left on device")
    finally:
        subprocess.run(["umount", str(disk)], check=True)

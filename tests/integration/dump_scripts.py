"""Programs that write dumps and come to a bad end; run by `test_dump_crash.py`."""

from __future__ import annotations

import json
import os
import random
import resource
import signal
import sys
from pathlib import Path

import torch

from paritas.core.errors import ParitasError
from paritas.formats.dumps.writing import DumpWriter
from paritas.formats.files.records import Entry, Header, Site, TensorFacts, run_identity
from paritas.formats.files.tensor_bytes import as_stored, digest

DTYPES = [torch.uint8, torch.float32, torch.float16, torch.float64]


def content(number: int) -> torch.Tensor:
    """What a record holds, from its number alone; sizes from nothing to 256 KiB."""
    size = random.Random(number).choice([0, 1, 7, 1000, 32_000])
    values = torch.arange(size) * 31 + number
    return (values % 251).to(DTYPES[number % len(DTYPES)])


def entry(number: int, step: int = 0) -> Entry:
    tensor = content(number)
    stored = as_stored(tensor)
    name = str(tensor.dtype).removeprefix("torch.")
    return Entry(
        sequence=number,
        step=step,
        site=Site(source="eager", level="op", name=f"x{number}"),
        tensor=TensorFacts(dtype=name, shape=tuple(tensor.shape), stride=tuple(tensor.stride())),
        stored=stored,
        digest=digest(stored),
    )


def write_for_ever(path: Path, progress: int, *, last: int) -> None:
    """Write records, and say after each that it was written."""
    writer = DumpWriter(path, Header(run=run_identity(0, 1)), last=last, largest_file=1 << 20)
    number = 0
    while True:
        writer.add(entry(number, step=number // 10))
        os.write(progress, b".")
        number += 1


def be_killed(folder: Path, times: int, seed: int) -> None:
    """Kill a writer after a random number of records, many times; print what each had written.

    A number of records is the same on a loaded machine; where in the next one it is, is chance.

    The writers are forked from here: to import torch for each would take longer than all the rest.
    """
    moments_of = random.Random(seed).choices(range(1, 200), k=times)
    reported = []
    for run in range(times):
        reader, progress = os.pipe()
        writer = os.fork()
        if writer == 0:
            write_for_ever(folder / f"run{run}", progress, last=2 if run % 4 == 3 else 0)
        os.close(progress)
        count = 0
        while count < moments_of[run]:
            count += len(os.read(reader, 1))
        os.kill(writer, signal.SIGKILL)
        os.waitpid(writer, 0)
        while told := os.read(reader, 1 << 16):
            count += len(told)
        os.close(reader)
        reported.append(count)
    sys.stdout.write(json.dumps(reported))


def write_rank(path: Path, count: int) -> None:
    """Be one rank of several; torchrun's variables say which."""
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    header = Header(run=run_identity(rank, world_size), rank=rank, world_size=world_size)
    writer = DumpWriter(path, header)
    for number in range(count):
        writer.add(entry(number * world_size + rank))
    writer.close(header)


def fill(path: Path, limit: int) -> None:
    """Write until no more can be written; `limit` bytes to a file where the disk does not say."""
    if limit:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    header = Header(run=run_identity(0, 1))
    writer = DumpWriter(path, header)
    number = 0
    try:
        while True:
            writer.add(entry(number))
            number += 1
    except ParitasError as error:
        sys.stdout.write(json.dumps([number, str(error)]))
    writer.close(header)


if __name__ == "__main__":
    torch.set_num_threads(1)
    command, where, *numbers = sys.argv[1:]
    known = {"be_killed": be_killed, "write_rank": write_rank, "fill": fill}
    known[command](Path(where), *map(int, numbers))

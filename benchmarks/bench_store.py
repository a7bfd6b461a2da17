"""What the store costs, as ratios within one run: to raw writes, and to a file for each tensor."""

from __future__ import annotations

import shutil
import tempfile
import time
from pathlib import Path

import numpy as np
import torch

from paritas.dumps.dtypes import as_stored, digest
from paritas.dumps.reading import Dump
from paritas.dumps.records import Header, Site, TensorFacts
from paritas.dumps.writing import DumpWriter, Entry, run_identity
from paritas.recording.background import Background

LARGE, LARGE_NUMEL = 32, 8 << 20
SMALL, SMALL_NUMEL = 20_000, 4 << 10
ROUNDS = 5


def measured(work):
    """Wall-clock and CPU seconds."""
    wall, processor = time.perf_counter(), time.process_time()
    work()
    return time.perf_counter() - wall, time.process_time() - processor


def rounds(*functions):
    """Least seconds of each, taken in turn so that all meet the same weather."""
    times = [[] for _ in functions]
    for _ in range(ROUNDS):
        for function, taken in zip(functions, times, strict=True):
            folder = Path(tempfile.mkdtemp(dir=Path.cwd(), prefix=".bench_store-"))
            try:
                taken.append(function(folder))
            finally:
                shutil.rmtree(folder)
    return [tuple(map(min, zip(*taken, strict=True))) for taken in times]


def entries(tensors, sites):
    """What a recording makes of tensors; the digest is a part of what is measured."""
    facts = TensorFacts(dtype="float32", shape=tuple(tensors[0].shape), stride=(1,))
    for number, (tensor, site) in enumerate(zip(tensors, sites, strict=True)):
        stored = as_stored(tensor)
        yield Entry(
            sequence=number, step=0, site=site, tensor=facts, stored=stored, digest=digest(stored)
        )


def through_writer(tensors, *, queue_bytes):
    """Hash here and write there, as a recording does; without a queue, one after the other."""
    names = [f"layers.{number}.attn/aten.mm.default" for number in range(len(tensors))]
    sites = [Site(source="eager", level="op", name=name) for name in names]

    def run(folder):
        header = Header(run=run_identity(0, 1))
        writer = DumpWriter(folder / "dump", header)
        background = Background(writer.add, queue_bytes)

        def work():
            for entry in entries(tensors, sites):
                background.submit(entry, entry.stored.nbytes)
            background.finish()

        taken = measured(work)
        writer.close(header)
        assert writer.saved_bytes == 0
        assert Dump.open(folder / "dump").problems == []
        return taken

    return run


def raw(tensors):
    def run(folder):
        with (folder / "raw").open("wb", buffering=0) as file:
            return measured(lambda: [file.write(tensor.numpy()) for tensor in tensors])

    return run


def file_each(tensors):
    def run(folder):
        return measured(
            lambda: [
                np.save(folder / f"{number}.npy", tensor.numpy())
                for number, tensor in enumerate(tensors)
            ]
        )

    return run


def main():
    torch.manual_seed(0)
    large = list(torch.randn(LARGE, LARGE_NUMEL))
    size = LARGE * LARGE_NUMEL * 4
    plain, beside, alone = rounds(
        raw(large),
        through_writer(large, queue_bytes=256 << 20),
        through_writer(large, queue_bytes=0),
    )
    print(f"{LARGE} tensors of {LARGE_NUMEL >> 18} MiB, hashed and written; speed of")
    print(
        f"  hashing beside the writer's thread  {plain[0] / beside[0]:5.2f} x one raw file", end=""
    )
    print(f" ({size / beside[0] / 1e9:.2f} of {size / plain[0] / 1e9:.2f} GB/s); bar 0.85")
    print(f"  both by one thread                  {plain[0] / alone[0]:5.2f} x one raw file")
    print(f"  the same, by CPU seconds            {plain[1] / alone[1]:5.2f} x one raw file")

    small = list(torch.randn(SMALL, SMALL_NUMEL))
    saved, stored = rounds(file_each(small), through_writer(small, queue_bytes=0))
    print(f"{SMALL} tensors of {SMALL_NUMEL >> 8} KiB, hashed and written; speed of")
    print(
        f"  both by one thread                  {saved[0] / stored[0]:5.2f} x np.save, a file each",
        end="",
    )
    print(f" ({SMALL / stored[0]:.0f} of {SMALL / saved[0]:.0f} a second); bar 5")
    print(
        f"  the same, by CPU seconds            {saved[1] / stored[1]:5.2f} x np.save, a file each"
    )


if __name__ == "__main__":
    main()

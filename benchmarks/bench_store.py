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

LARGE, LARGE_NUMEL = 32, 8 << 20
SMALL, SMALL_NUMEL = 20_000, 4 << 10
ROUNDS = 5


def measured(work):
    """Wall-clock and CPU seconds."""
    wall, processor = time.perf_counter(), time.process_time()
    work()
    return time.perf_counter() - wall, time.process_time() - processor


def _disk():
    """A folder on the disk that the project is on: one for temporary files may be memory."""
    folder = Path(__file__).parents[1] / ".cache"
    folder.mkdir(exist_ok=True)
    return folder


def rounds(*functions):
    """Least seconds of each, taken in turn so that all meet the same weather."""
    times = [[] for _ in functions]
    for _ in range(ROUNDS):
        for function, taken in zip(functions, times, strict=True):
            folder = Path(tempfile.mkdtemp(dir=_disk(), prefix="bench_store-"))
            try:
                taken.append(function(folder))
            finally:
                shutil.rmtree(folder)
    return [tuple(map(min, zip(*taken, strict=True))) for taken in times]


def entries(tensors, sites, *, hashes):
    """What a recording makes of tensors."""
    facts = TensorFacts(dtype="float32", shape=tuple(tensors[0].shape), stride=(1,))
    for number, (tensor, site) in enumerate(zip(tensors, sites, strict=True)):
        stored = as_stored(tensor)
        hashed = digest(stored) if hashes else ""
        yield Entry(sequence=number, step=0, site=site, tensor=facts, stored=stored, digest=hashed)


def through_writer(tensors, *, hashes):
    """Hash and write; `hashes` says whether the one comes before the other, or beside it."""
    names = [f"layers.{number}.attn/aten.mm.default" for number in range(len(tensors))]
    sites = [Site(source="eager", level="op", name=name) for name in names]

    def run(folder):
        header = Header(run=run_identity(0, 1))
        writer = DumpWriter(folder / "dump", header)
        taken = measured(
            lambda: [writer.add(entry) for entry in entries(tensors, sites, hashes=hashes)]
        )
        writer.close(header)
        dump = Dump.open(folder / "dump")
        assert dump.problems == []
        assert all(record.digest for record in dump.records())
        assert writer.saved_bytes == 0
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


def told(what, theirs, ours):
    """Both ratios: of seconds, and of CPU seconds, which a loaded machine disturbs less."""
    wall, processor = theirs[0] / ours[0], theirs[1] / ours[1]
    print(f"  {what:42s} {wall:5.2f} x, by CPU seconds {processor:5.2f} x")


def main():
    torch.manual_seed(0)
    large = list(torch.randn(LARGE, LARGE_NUMEL))
    plain, beside, before = rounds(
        raw(large), through_writer(large, hashes=False), through_writer(large, hashes=True)
    )
    print(f"{LARGE} tensors of {LARGE_NUMEL >> 18} MiB: speed of DumpWriter.add, of one raw file")
    told("hashed while written (bar 0.85)", plain, beside)
    told("hashed before", plain, before)

    small = list(torch.randn(SMALL, SMALL_NUMEL))
    saved, stored = rounds(file_each(small), through_writer(small, hashes=False))
    print(f"{SMALL} tensors of {SMALL_NUMEL >> 8} KiB: speed of DumpWriter.add, of a file each")
    told("against np.save (bar 5)", saved, stored)
    print(f"  {SMALL / stored[0]:.0f} tensors a second, np.save {SMALL / saved[0]:.0f}")


if __name__ == "__main__":
    main()

"""What storing tensors costs, against raw writes and against one `np.save` file per tensor.

Wall-clock speeds on the project's disk, alternating, the best of five rounds. Entries reach the
writer in the batches that the thread of a recording produces.
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import numpy as np
import torch
from benchmarks.lab.figures import Figure, Report, write
from benchmarks.lab.timing import measured, taken

from paritas.formats.dumps.reading import Dump
from paritas.formats.dumps.writing import DumpWriter
from paritas.formats.files.records import Entry, Header, Site, TensorFacts, run_identity
from paritas.formats.files.tensor_bytes import as_stored, digest

LARGE, LARGE_NUMEL = 32, 8 << 20
SMALL, SMALL_NUMEL = 20_000, 4 << 10
ROUNDS = 5
# What waits before the thread of a recording writes it.
BATCH, BATCH_BYTES = 1024, 16 << 20


def _disk():
    """A folder on the disk that the project is on: one for temporary files may be memory."""
    folder = Path(__file__).parents[1] / ".cache"
    folder.mkdir(exist_ok=True)
    return folder


def rounds(*functions):
    """Least seconds of each, taken in turn so that all meet the same weather."""
    timings = [[] for _ in functions]
    for _ in range(ROUNDS):
        for function, found in zip(functions, timings, strict=True):
            folder = Path(tempfile.mkdtemp(dir=_disk(), prefix="bench_store-"))
            try:
                found.append(function(folder))
            finally:
                shutil.rmtree(folder)
    return [taken(found, "least") for found in timings]


def entries(tensors, sites, *, hashes):
    """What a recording makes of tensors."""
    facts = TensorFacts(dtype="float32", shape=tuple(tensors[0].shape), stride=(1,))
    for number, (tensor, site) in enumerate(zip(tensors, sites, strict=True)):
        stored = as_stored(tensor)
        hashed = digest(stored) if hashes else ""
        yield Entry(sequence=number, step=0, site=site, tensor=facts, stored=stored, digest=hashed)


def batches(tensors, sites, *, hashes):
    """Entries as a recording hands them over: so many at once, or so many bytes."""
    batch, nbytes = [], 0
    for entry in entries(tensors, sites, hashes=hashes):
        batch.append(entry)
        nbytes += entry.stored.nbytes
        if len(batch) >= BATCH or nbytes >= BATCH_BYTES:
            yield batch
            batch, nbytes = [], 0
    if batch:
        yield batch


def through_writer(tensors, *, hashes):
    """Hash and write; `hashes` says whether the one comes before the other, or beside it."""
    names = [f"layers.{number}.attn/aten.mm.default" for number in range(len(tensors))]
    sites = [Site(source="eager", level="op", name=name) for name in names]

    def run(folder):
        header = Header(run=run_identity(0, 1))
        writer = DumpWriter(folder / "dump", header)

        def write_all():
            for batch in batches(tensors, sites, hashes=hashes):
                writer.add_many(batch)

        spent = measured(write_all)
        writer.close(header)
        dump = Dump.open(folder / "dump")
        assert dump.problems == []
        assert all(record.digest for record in dump.records())
        assert writer.saved_bytes == 0
        return spent

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


def speed(name, theirs, ours, bar=None):
    """Ours over theirs; by processor seconds, which a loaded machine disturbs less, in the note."""
    note = f"by processor seconds {theirs.processor / ours.processor:.2f}"
    return Figure(name, theirs.wall / ours.wall, "x", bar, "higher", note)


def main():
    torch.manual_seed(0)
    large = list(torch.randn(LARGE, LARGE_NUMEL))
    plain, beside, before = rounds(
        raw(large), through_writer(large, hashes=False), through_writer(large, hashes=True)
    )
    name = f"{LARGE} tensors of {LARGE_NUMEL >> 18} MiB, over a raw file write"
    figures = [speed(name, plain, beside, 0.85), speed(f"{name}, hashed before", plain, before)]
    del large
    small = list(torch.randn(SMALL, SMALL_NUMEL))
    saved, stored = rounds(file_each(small), through_writer(small, hashes=False))
    name = f"{SMALL} tensors of {SMALL_NUMEL >> 8} KiB, over np.save"
    figures += [
        speed(name, saved, stored, 5.0),
        Figure("the same", SMALL / stored.wall, "tensors a second", better="higher"),
    ]
    write(Report("store", figures, what=__doc__))


if __name__ == "__main__":
    main()

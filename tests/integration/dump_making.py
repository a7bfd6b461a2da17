"""Small dumps for tests of the command line, written without a program."""

from __future__ import annotations

import torch

from paritas.core.numerics.statistics import summarize
from paritas.formats.dumps.writing import DumpWriter
from paritas.formats.files.records import Entry, Header, Site, TensorFacts
from paritas.formats.files.tensor_bytes import as_stored, digest

RUN = "0123456789abcdef"


def site(name, side="output", **facts):
    defaults = {
        "source": "eager",
        "level": "op",
        "op": "aten.log.default",
        "module": name.rpartition("/")[0],
        "line": "model.py:18, in forward",
        "code": "y = torch.log(y)",
    }
    return Site(name=name, side=side, **{**defaults, **facts})


class Making:
    """One rank's part of a dump, in the making."""

    def __init__(self, path, *, rank=0, world_size=1, last=0, largest_file=1 << 30, **facts):
        self.header = Header(run=RUN, rank=rank, world_size=world_size, sources=("eager",), **facts)
        self.writer = DumpWriter(path, self.header, last=last, largest_file=largest_file)
        self.sequence = 0

    def add(self, where, value, *, step=0, statistics=True, **facts):
        """Record a value at a site."""
        if isinstance(value, torch.Tensor):
            stored = as_stored(value)
            tensor = TensorFacts(
                dtype=str(value.dtype).removeprefix("torch."),
                shape=tuple(value.shape),
                stride=value.stride(),
            )
            facts |= {"tensor": tensor, "stored": stored, "digest": digest(stored)}
            facts["statistics"] = summarize(value) if statistics else None
        else:
            facts["value"] = repr(value)
        self.writer.add(Entry(sequence=self.sequence, step=step, site=where, **facts))
        self.sequence += 1

    def call(self, name, given, made, *, step=0, statistics=True, **facts):
        """Record what a call was given and what it made."""
        for place, value in enumerate(given):
            where = site(name, "input", position=str(place), **facts)
            self.add(where, value, step=step, statistics=statistics)
        self.add(site(name, **facts), made, step=step, statistics=statistics)

    def close(self):
        self.writer.close(self.header)


def values(*shape, seed=0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(dtype)


def write_run(path, steps=2, **facts):
    """Three layers; the last makes a NaN in the second step."""
    making = Making(path, **facts)
    for step in range(steps):
        x = values(4, 8, seed=step)
        for layer in range(3):
            y = (x - 9).log() if layer == 2 and step == 1 else x.cos() + layer
            making.call(f"layers.{layer}/aten.log.default", [x, 0.5], y, step=step)
            x = y
    making.close()
    return path


def assert_same_records(made, dump):
    """A conversion keeps all but the values."""

    def facts(record):
        kept = (record.sequence, record.step, record.rank, record.site, record.tensor)
        return (*kept, record.value, record.alias_of, record.placement, record.digest)

    assert [facts(record) for record in made.records()] == [
        facts(record) for record in dump.records()
    ]

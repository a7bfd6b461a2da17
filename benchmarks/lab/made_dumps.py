"""Dumps of any size, as a recording of so many operators would leave them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from paritas.formats.dumps.writing import DumpWriter
from paritas.formats.files.records import Entry, Header, Site, TensorFacts, run_identity
from paritas.formats.files.tensor_bytes import as_stored

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


def tensors(count: int, numel: int, *, is_mine: bool, every: int = 1) -> Iterator[torch.Tensor]:
    """Normal values, seed 0, each time others; in mine, every so often, with noise of 1e-3."""
    generator = torch.Generator().manual_seed(0)
    base = torch.randn(numel, generator=generator)
    noise = torch.randn(numel, generator=generator).mul_(1e-3)
    for number in range(count):
        values = base * (1 + number / count)
        yield values.add_(noise) if is_mine and number % every == 0 else values


def write_dump(folder: Path, count: int, numel: int, *, is_mine: bool, every: int = 1) -> Path:
    """One of the two sides of a comparison, in `folder`."""
    path = folder / ("my" if is_mine else "golden")
    header = Header(run=run_identity(0, 1))
    writer = DumpWriter(path, header)
    facts = TensorFacts(dtype="float32", shape=(numel,), stride=(1,))
    for number, values in enumerate(tensors(count, numel, is_mine=is_mine, every=every)):
        name = f"layers.{number}.mlp/aten.gelu.default"
        site = Site(source="eager", level="op", name=name, op="aten.gelu.default")
        stored = as_stored(values)
        writer.add(Entry(sequence=number, step=0, site=site, tensor=facts, stored=stored))
    writer.close(header)
    return path


def write_pair(folder: Path, count: int, numel: int, *, every: int = 1) -> tuple[Path, Path]:
    """Mine and the golden one; every so many values differ."""
    mine, golden = (
        write_dump(folder, count, numel, is_mine=is_mine, every=every) for is_mine in (True, False)
    )
    return mine, golden

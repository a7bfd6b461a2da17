"""What recording costs the program, and what storing each content once saves.

Whole loops are timed, including closing the dump, so nothing hides in a queue: wall time, because
writing happens in the background. How long the program itself waits is listed separately: the
duration of its calls while it is recorded. Alternatives take turns; the median of each counts. All
ratios come from this one run, with one thread for operators; no call repeats the inputs of another.

The models are the small transformer of `paritas demo`, where the fixed cost of a value matters
most, and the same blocks at a size where arithmetic does.
"""

from __future__ import annotations

import pathlib
import shutil
import statistics
import tempfile
import time

import torch
from benchmarks.lab.figures import Figure, Report, Table, write
from benchmarks.lab.timing import in_turns

import paritas
from paritas.app.cli import demo_model
from paritas.formats.dumps.reading import Dump

ROUNDS, CALLS = 7, 60


def others_like(inputs: list[torch.Tensor], calls: int) -> list[list[torch.Tensor]]:
    """Inputs for so many calls, all different: bytes that were met before cost next to nothing."""
    generator = torch.Generator().manual_seed(0)

    def other(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.is_floating_point():
            return torch.randn(tensor.shape, generator=generator)
        return torch.randint(int(tensor.max()) + 1, tensor.shape, generator=generator)

    return [[other(tensor) for tensor in inputs] for _ in range(calls)]


def loop(model: torch.nn.Module, inputs: list[list[torch.Tensor]], folder, **options):
    """One call of the model on each of the inputs, recorded if there are options."""

    def plain() -> None:
        with torch.no_grad():
            for each in inputs:
                model(*each)

    def recorded() -> None:
        shutil.rmtree(folder, ignore_errors=True)
        with paritas.capture(folder, **options):
            plain()

    return recorded if options else plain


KINDS = {
    "plain": {},
    "statistics, modules": {"data": "stats"},
    "statistics, operators": {"data": "stats", "level": "op"},
    "tensors, modules": {"data": "tensor"},
    "tensors, operators": {"data": "tensor", "level": "op"},
    "nothing wanted": {"data": "stats", "steps": [0]},
}


def slowdowns(name: str, model, inputs, calls: int, rounds: int, folder: pathlib.Path) -> Table:
    """Each kind of recording over none: of the whole loop, and of the median call."""
    each = others_like(inputs, calls)
    runs = {kind: loop(model, each, folder / "dump", **o) for kind, o in KINDS.items()}
    seconds = {kind: spent.wall for kind, spent in in_turns(runs, rounds, take="median").items()}
    usual = latency(model, each, folder / "dump", None)
    rows = [
        [
            kind,
            seconds[kind] / seconds["plain"],
            latency(model, each, folder / "dump", options or None) / usual,
        ]
        for kind, options in KINDS.items()
    ]
    title = f"{name}: one forward takes {seconds['plain'] / calls * 1e3:.2f} ms"
    for row in rows:
        print(f"{name}, {row[0]}: {row[1]:.2f} x in all, {row[2]:.2f} x the median call")
    return Table(title, ["recorded", "the whole loop, x", "the median call, x"], rows)


def latency(model, inputs: list[list[torch.Tensor]], folder, options) -> float:
    """Seconds of the median call."""

    def calls() -> list[float]:
        timings = []
        with torch.no_grad():
            for each in inputs:
                start = time.perf_counter()
                model(*each)
                timings.append(time.perf_counter() - start)
        return timings

    if options is None:
        return statistics.median(calls())
    with paritas.capture(folder, overwrite=True, **options):
        return statistics.median(calls())


def after_it(model, inputs, folder: pathlib.Path) -> Figure:
    """Whether a recording that is over leaves something behind."""

    def plain() -> None:
        with torch.no_grad():
            for _ in range(CALLS):
                model(*inputs)

    def block() -> float:
        start = time.perf_counter()
        plain()
        return time.perf_counter() - start

    plain()
    before, later = [], []
    for _ in range(ROUNDS * 3):
        before.append(block())
        shutil.rmtree(folder / "dump", ignore_errors=True)
        with paritas.capture(folder / "dump", data="stats"), torch.no_grad():
            model(*inputs)
        plain()  # what the recording left in the caches is not what is asked about
        later.append(block())
    ratio = statistics.median(later) / statistics.median(before)
    return Figure("calls after a recording over calls before it", ratio, "x", 1.05)


def dedupe(model, inputs, folder: pathlib.Path) -> Figure:
    """A dump of modules and operators, forward and backward, of one training step."""
    model.requires_grad_()
    with paritas.capture(folder / "dump", level="both", overwrite=True):
        model(*inputs).square().mean().backward()
    model.requires_grad_(requires_grad=False)
    dump = Dump.open(folder / "dump")
    records = [record for record in dump.records() if record.payload is not None]
    whole = sum(record.payload.nbytes for record in records)
    stored = {record.digest: record.payload.nbytes for record in records}
    kept = sum(stored.values())
    note = f"{len(records)} tensors, {len(stored)} contents, {kept / 2**20:.1f} MiB kept"
    name = "each content once: modules and operators of a training step"
    return Figure(name, whole / kept, "x smaller", 2.0, "higher", note)


class Feed(torch.nn.Module):
    """Layers at a size where arithmetic weighs most."""

    def __init__(self) -> None:
        super().__init__()
        layer = torch.nn.TransformerEncoderLayer(512, 8, 2048, batch_first=True, norm_first=True)
        self.layers = torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Two layers."""
        return self.layers(x)


def main() -> None:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        model, inputs = demo_model.build()
        small = slowdowns("demo transformer", model, inputs, CALLS, ROUNDS, folder)
        figures = [after_it(model, inputs, folder), dedupe(model, inputs, folder)]
        torch.manual_seed(0)
        wide = Feed().train().requires_grad_(requires_grad=False)
        given = [torch.randn(4, 128, 512)]
        large = slowdowns("layers of width 512", wide, given, 4, 5, folder)
    # The bar was set for the small model, where it is hardest to meet.
    for where, table, bar in (("demo", small, 1.6), ("width 512", large, None)):
        found = {kind: (whole, call) for kind, whole, call in table.rows}
        for kind, limit in (("statistics, modules", bar), ("tensors, modules", None)):
            whole, call = found[kind]
            note = f"{call:.2f} x the median call"
            figures.append(Figure(f"{kind}, {where}", whole, "x", limit, note=note))
    write(Report("record", figures, [small, large], what=__doc__))


if __name__ == "__main__":
    main()

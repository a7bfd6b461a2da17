"""How time grows with models, tensors, calls and ranks: slopes on two logarithmic scales.

A slope of 1 is linear. Processor seconds of one thread, the minimum of several rounds in which all
sizes alternate. Nothing is subtracted, and the sizes are large enough that fixed costs do not hide
the slope: the range and the times at both ends are next to it. With one or more names as arguments,
the script measures only those and writes no file.
"""

from __future__ import annotations

import contextlib
import copy
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import torch
from benchmarks.lab.figures import Report, Table, line, write
from benchmarks.lab.made_dumps import write_dump, write_pair
from benchmarks.lab.slopes import growth
from benchmarks.lab.timing import in_turns
from torch import nn

import paritas
from paritas.core.operators.calls import OperatorCall
from paritas.core.placement.placement import Recipe
from paritas.core.results.items import Shard
from paritas.formats.dumps.reading import Dump
from paritas.sharding.operators.recipe_checks import check_recipe

ROUNDS = 3
QUIET = paritas.VerifyConfig(raise_on_mismatch=False)

Work = Callable[[], object]
Points = dict[int, float]


class Layer(nn.Module):
    """A linear layer and a nonlinearity, with a residual, rounded in one of two ways."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.apart = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Right either way."""
        mixed = nn.functional.gelu(self.linear(x))
        return x + mixed / 10 if self.apart else x + 0.1 * mixed


def stack(depth: int, *, gradients: bool = False) -> tuple[nn.Module, nn.Module]:
    """A model and its rewritten twin."""
    torch.manual_seed(0)
    model = nn.Sequential(*[Layer(32) for _ in range(depth)]).requires_grad_(gradients)
    twin = copy.deepcopy(model)
    for layer in twin:
        layer.apart = True
    return model, twin


def timed(make: Callable[[int], Work], sizes: Iterable[int], rounds: int = ROUNDS) -> Points:
    """Seconds by size; each size is made before all take turns."""
    works = {str(size): make(size) for size in sizes}
    return {
        int(size): spent.processor for size, spent in in_turns(works, rounds, take="least").items()
    }


# --- what grows -----------------------------------------------------------------------------------


def verify_by_depth(_folder: Path) -> Points:
    """Forward only."""

    def make(depth: int) -> Work:
        model, twin = stack(depth)
        x = torch.randn(64, 32)
        assert paritas.verify([x], model, twin, QUIET).status is paritas.Status.EQUIVALENT
        return lambda: paritas.verify([x], model, twin, QUIET)

    return timed(make, (32, 128, 512))


def verify_gradients_by_depth(_folder: Path) -> Points:
    """Forward, and gradients of every parameter."""

    def make(depth: int) -> Work:
        model, twin = stack(depth, gradients=True)
        x = torch.randn(64, 32)
        return lambda: paritas.verify([x], model, twin, QUIET)

    return timed(make, (8, 32, 128))


def verify_by_size(_folder: Path) -> Points:
    """One tensor in, one out."""

    def make(numel: int) -> Work:
        x = torch.randn(numel)
        return lambda: paritas.verify(
            [x], lambda x: x.sin() * 5, lambda x: x.sin() * (5 / 3) * 3, QUIET
        )

    return timed(make, (1 << 18, 1 << 20, 1 << 22))


def guard_by_depth(_folder: Path) -> Points:
    """A call under guard, compiled before."""

    def make(depth: int) -> Work:
        model, _ = stack(depth)
        compiled = torch.compile(model, backend=paritas.guard("aot_eager"))
        x = torch.randn(64, 32)

        def call() -> None:
            with torch.no_grad():
                for _ in range(10):
                    compiled(x)

        call()
        return call

    return timed(make, (16, 64, 256))


def compare_by_count(folder: Path) -> Points:
    """Dumps of small tensors, every tenth different."""

    def make(count: int) -> Work:
        my, golden = write_pair(folder / str(count), count, 256, every=10)
        return lambda: paritas.compare(my, golden, jobs=1)

    return timed(make, (1 << 10, 1 << 12, 1 << 14), rounds=2)


def compare_by_size(folder: Path) -> Points:
    """Four pairs, all different."""

    def make(numel: int) -> Work:
        my, golden = write_pair(folder / str(numel), 4, numel)
        return lambda: paritas.compare(my, golden, jobs=1)

    return timed(make, (1 << 18, 1 << 20, 1 << 22), rounds=2)


def partition_by_size(_folder: Path) -> Points:
    """A linear layer split by rows over two ranks."""

    def make(rows: int) -> Work:
        torch.manual_seed(0)
        call = OperatorCall(
            nn.functional.linear, (torch.randn(rows, 64), torch.randn(64, 64), torch.randn(64))
        )
        recipe = Recipe(((0, Shard(0)),), (Shard(0),))
        return lambda: check_recipe(call, recipe, 2)

    return timed(make, (1 << 11, 1 << 13, 1 << 15))


def partition_by_ranks(_folder: Path) -> Points:
    """The same tensor over more and more ranks."""
    torch.manual_seed(0)
    call = OperatorCall(
        nn.functional.linear, (torch.randn(256, 16), torch.randn(16, 16), torch.randn(16))
    )
    recipe = Recipe(((0, Shard(0)),), (Shard(0),))

    def make(ranks: int) -> Work:
        assert check_recipe(call, recipe, ranks).passed
        return lambda: check_recipe(call, recipe, ranks)

    return timed(make, (8, 32, 128))


def record_by_calls(folder: Path) -> Points:
    """Statistics of every module, closing included."""
    model, _ = stack(4)

    def make(calls: int) -> Work:
        def run() -> None:
            with paritas.capture(folder / str(calls), data="stats", overwrite=True):
                for number in range(calls):
                    model(torch.full((8, 32), float(number)))

        return run

    return timed(make, (64, 256, 1024))


def index_by_records(folder: Path) -> Points:
    """Opening a dump, which reads its index."""

    def make(count: int) -> Work:
        path = write_dump(folder / str(count), count, 16, is_mine=False)
        return lambda: Dump.open(path)

    return timed(make, (1 << 11, 1 << 13, 1 << 15))


GROWS = {
    "verify": ("verify, by layers", verify_by_depth),
    "gradients": ("verify with gradients, by layers", verify_gradients_by_depth),
    "verify-size": ("verify, by elements", verify_by_size),
    "guard": ("a guarded call, by layers", guard_by_depth),
    "compare": ("compare, by tensors", compare_by_count),
    "compare-size": ("compare, by elements of each tensor", compare_by_size),
    "partition": ("a split, by elements", partition_by_size),
    "ranks": ("a split, by ranks", partition_by_ranks),
    "record": ("recording statistics, by calls", record_by_calls),
    "index": ("reading an index, by records", index_by_records),
}


@contextlib.contextmanager
def on_disk() -> Iterator[Path]:
    """A folder on the disk that the project is on, removed afterwards."""
    above = Path(__file__).parents[1] / ".cache"
    above.mkdir(exist_ok=True)
    folder = Path(tempfile.mkdtemp(dir=above, prefix="bench_growth-"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder)


def main() -> None:
    """Measure what was asked for, or everything."""
    torch.set_num_threads(1)
    asked = sys.argv[1:]
    figures, rows = [], []
    for key in asked or GROWS:
        name, measure = GROWS[key]
        with on_disk() as folder:
            points = measure(folder)
        figures.append(growth(name, points, "s"))
        rows += [[name, size, seconds] for size, seconds in points.items()]
        print(line(figures[-1]), points, flush=True)
    if not asked:
        table = Table("Each point", ["what", "size", "seconds"], rows)
        write(Report("growth", figures, [table], what=__doc__))


if __name__ == "__main__":
    main()

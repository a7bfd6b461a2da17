"""`paritas compare` end to end, as users call it: against msprobe's own command, and by itself.

All times include start-up:

- 16 pairs of 32 MiB, all different, in msprobe's format, which both tools read: wall-clock and
  processor seconds of the whole command, alternating; ratios of the minimum.
- 50,000 small pairs in two dumps of ours, every tenth different: seconds of the whole command.
- 8 pairs of 128 MiB, every second different: the peak private memory of the command. Pages of
  mapped files are listed separately: they are the system's cache, which can reclaim them.

Without mindstudio-probe the first is not measured. `python -m benchmarks.bench_compare_tools small`
measures one of `pairs`, `small` and `memory`, and writes no file. It needs about 3 GB of disk.
"""

from __future__ import annotations

import importlib.util
import json
import shutil
import sys
import tempfile
from pathlib import Path

import torch
from benchmarks.lab.figures import Figure, Report, line, write
from benchmarks.lab.made_dumps import tensors, write_pair
from benchmarks.lab.processes import run

PAIRS, PAIR_NUMEL = 16, 8 << 20
SMALL, SMALL_NUMEL = 50_000, 256
LARGE, LARGE_NUMEL = 8, 32 << 20
ROUNDS = 3
_MIB = 1 << 20


def ours(my, golden, folder, *options):
    """The command that users give."""
    shutil.rmtree(folder / "ours", ignore_errors=True)
    command = [sys.executable, "-m", "paritas", "compare", "--my-path", str(my)]
    command += ["--golden-path", str(golden), "--output", str(folder / "ours"), "--quiet", *options]
    cost = run(command, folder, allowed={0, 1})
    assert (folder / "ours" / "comparison.csv").stat().st_size
    return cost


def theirs(my, golden, folder):
    """The command that users of msprobe give."""
    shutil.rmtree(folder / "theirs", ignore_errors=True)
    command = [sys.executable, "-m", "msprobe.msprobe", "compare", "-tp", str(my)]
    command += ["-gp", str(golden), "-o", str(folder / "theirs")]
    cost = run(command, folder, allowed={0})
    (table,) = (folder / "theirs").glob("compare_result_*.csv")
    assert len(table.read_text().splitlines()) == PAIRS + 1
    return cost


# --- dumps ----------------------------------------------------------------------------------------


def write_msprobe(folder, *, is_mine):
    """What msprobe leaves of 16 calls."""
    process = folder / ("my" if is_mine else "golden") / "step0" / "proc1"
    (process / "dump_tensor_data").mkdir(parents=True)
    data = {}
    for number, values in enumerate(tensors(PAIRS, PAIR_NUMEL, is_mine=is_mine)):
        name = f"Functional.gelu.{number}.forward"
        file = f"{name}.output.0.pt"
        torch.save(values, process / "dump_tensor_data" / file)
        leaf = {"type": "torch.Tensor", "dtype": "torch.float32", "shape": list(values.shape)}
        leaf |= {"Max": values.max().item(), "Min": values.min().item()}
        leaf |= {"Mean": values.mean().item(), "Norm": values.norm().item()}
        leaf |= {"requires_grad": False, "data_name": file}
        data[name] = {"input_args": [], "input_kwargs": {}, "output": [leaf]}
    told = {"task": "tensor", "level": "L1", "framework": "pytorch"}
    told |= {"dump_data_dir": str(process / "dump_tensor_data"), "data": data}
    (process / "dump.json").write_text(json.dumps(told, indent=1))
    (process / "construct.json").write_text(json.dumps(dict.fromkeys(data), indent=1))
    (process / "stack.json").write_text(json.dumps({"0": [list(data), ["File a.py, line 1"]]}))
    return process.parent


# --- what is measured -----------------------------------------------------------------------------


def bench_pairs(folder):
    name = "16 pairs of 32 MiB, speed over msprobe"
    if importlib.util.find_spec("msprobe") is None:
        note = "mindstudio-probe is not installed: `pip install -e '.[oracle]'`"
        return [Figure(name, None, "x", 10.0, "higher", note)]
    golden, my = (write_msprobe(folder, is_mine=is_mine) for is_mine in (False, True))
    taken = {ours: [], theirs: []}
    for _ in range(ROUNDS):
        for tool, costs in taken.items():
            costs.append(tool(my, golden, folder))
    least = {
        tool: (min(cost.wall for cost in costs), min(cost.processor for cost in costs))
        for tool, costs in taken.items()
    }
    wall, processor = (b / a for a, b in zip(least[ours], least[theirs], strict=True))
    note = f"{least[ours][0]:.1f} s against {least[theirs][0]:.1f} s; {processor:.1f} by processors"
    return [Figure(name, wall, "x", 10.0, "higher", note)]


def bench_small(folder):
    my, golden = write_pair(folder, SMALL, SMALL_NUMEL, every=10)
    cost = ours(my, golden, folder)
    note = f"{cost.wall:.1f} s by the wall clock, {cost.own / _MIB:.0f} MiB of memory"
    return [Figure(f"{SMALL} small pairs", cost.processor, "s", 60.0, note=note)]


def bench_memory(folder):
    my, golden = write_pair(folder, LARGE, LARGE_NUMEL, every=2)
    few = ours(my, golden, folder, "--ignore", r"layers\.[1-9]", "--no-html")
    cost = ours(my, golden, folder)
    total = 2 * LARGE * LARGE_NUMEL * 4
    speed = f"{total / cost.wall / 1e9:.2f} GB/s"
    mapped = f"{cost.mapped / _MIB:.0f} MiB of mapped files at most"
    note = f"of {total / _MIB:.0f} MiB compared; {mapped}; {speed}"
    one = f"{few.own / _MIB:.0f} MiB for one pair"
    return [
        Figure(
            f"own memory, {LARGE} pairs of {4 * LARGE_NUMEL // _MIB} MiB",
            cost.own / _MIB,
            "MiB",
            note=note,
        ),
        Figure(f"own memory, {LARGE} pairs over 1", cost.own / few.own, "x", 1.5, note=one),
    ]


def main():
    known = {"pairs": bench_pairs, "small": bench_small, "memory": bench_memory}
    asked = sys.argv[1:]
    above = Path(__file__).parents[1] / ".cache"
    above.mkdir(exist_ok=True)
    figures = []
    for name in asked or known:
        folder = Path(tempfile.mkdtemp(dir=above, prefix="bench_compare-"))
        try:
            figures += known[name](folder)
        finally:
            shutil.rmtree(folder)
    if asked:
        print("\n".join(map(line, figures)))
    else:
        write(Report("compare_tools", figures, what=__doc__))


if __name__ == "__main__":
    main()

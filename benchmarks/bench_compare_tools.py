"""`paritas compare` end to end, as people call it: against msprobe's own command, and by itself.

- 16 pairs of 32 MiB, all different, in a dump of msprobe's form that both tools read: wall-clock
  and processor seconds of the whole command, start-up and all, in turns; the ratios of the least.
- 50,000 small pairs in two dumps of ours, every tenth different: seconds of the whole command.
- 8 pairs of 512 MiB: the most memory that the command has of its own at any time. Pages of mapped
  files are told apart: they are the system's cache, and it takes them back when it needs them.

Without mindstudio-probe the first is skipped, and says so. Name some of `pairs`, `small` and
`memory` to have those alone. About 10 GB of disk are needed.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import torch

from paritas.dumps.dtypes import as_stored
from paritas.dumps.records import Header, Site, TensorFacts
from paritas.dumps.writing import DumpWriter, Entry, run_identity

PAIRS, PAIR_NUMEL = 16, 8 << 20
SMALL, SMALL_NUMEL = 50_000, 256
LARGE, LARGE_NUMEL = 8, 128 << 20
ROUNDS = 3
_MIB = 1 << 20


class Cost(NamedTuple):
    """What a command took: seconds, and bytes at most."""

    wall: float
    processor: float
    own: int
    mapped: int


def run(command, folder, allowed):
    """Run a command to its end, looking at its memory now and then."""
    log = folder / "log.txt"
    began = time.perf_counter()
    with log.open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out, cwd=folder)
        own = mapped = 0
        while True:
            status = _status(process.pid)
            own, mapped = max(own, status.get("RssAnon", 0)), max(mapped, status.get("RssFile", 0))
            done, code, used = os.wait4(process.pid, os.WNOHANG)
            if done:
                break
            time.sleep(0.01)
    wall = time.perf_counter() - began
    process.returncode = os.waitstatus_to_exitcode(code)
    assert process.returncode in allowed, f"{command}\n{log.read_text()[-3000:]}"
    return Cost(wall, used.ru_utime + used.ru_stime, own, mapped)


def _status(pid):
    """Bytes by their names in the system's own account."""
    try:
        text = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return {}
    return {name: int(size) * 1024 for name, size in re.findall(r"(\w+):\s+(\d+) kB", text)}


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


def tensors(count, numel, *, is_mine, every=1):
    """Normal values, seed 0, each time others; in mine, every so often, with noise of 1e-3."""
    generator = torch.Generator().manual_seed(0)
    base = torch.randn(numel, generator=generator)
    noise = torch.randn(numel, generator=generator).mul_(1e-3)
    for number in range(count):
        values = base * (1 + number / count)
        yield values.add_(noise) if is_mine and number % every == 0 else values


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


def write_ours(folder, count, numel, *, is_mine, every=1):
    """What paritas leaves of so many operators."""
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


# --- what is measured -----------------------------------------------------------------------------


def bench_pairs(folder):
    if importlib.util.find_spec("msprobe") is None:
        print("16 pairs of 32 MiB: skipped, mindstudio-probe is not installed")
        return
    golden, my = (write_msprobe(folder, is_mine=is_mine) for is_mine in (False, True))
    taken = {ours: [], theirs: []}
    for _ in range(ROUNDS):
        for tool, costs in taken.items():
            costs.append(tool(my, golden, folder))
    least = {
        tool: (min(cost.wall for cost in costs), min(cost.processor for cost in costs))
        for tool, costs in taken.items()
    }
    for name, tool in (("paritas", ours), ("msprobe", theirs)):
        wall, processor = least[tool]
        print(f"16 pairs of 32 MiB, {name}: {wall:.2f} s, {processor:.2f} s of processors")
    ratios = [b / a for a, b in zip(least[ours], least[theirs], strict=True)]
    print(f"16 pairs of 32 MiB: {ratios[0]:.1f}x in wall, {ratios[1]:.1f}x in processor (bar 10x)")


def bench_small(folder):
    golden, my = (
        write_ours(folder, SMALL, SMALL_NUMEL, is_mine=is_mine, every=10)
        for is_mine in (False, True)
    )
    cost = ours(my, golden, folder)
    print(
        f"{SMALL} small pairs: {cost.wall:.1f} s, {cost.processor:.1f} s of processors, "
        f"{cost.own / _MIB:.0f} MiB of memory (bar 60 s)"
    )


def bench_memory(folder):
    golden, my = (
        write_ours(folder, LARGE, LARGE_NUMEL, is_mine=is_mine, every=2)
        for is_mine in (False, True)
    )
    few = ours(my, golden, folder, "--ignore", r"layers\.[1-9]", "--no-html")
    cost = ours(my, golden, folder)
    total = 2 * LARGE * LARGE_NUMEL * 4
    print(
        f"{LARGE} pairs of 512 MiB: {cost.own / _MIB:.0f} MiB of memory of its own at most, "
        f"{few.own / _MIB:.0f} MiB for one pair, of {total / _MIB:.0f} MiB compared; "
        f"{cost.mapped / _MIB:.0f} MiB of mapped files at most; "
        f"{total / cost.wall / 1e9:.2f} GB/s"
    )


def main():
    known = {"pairs": bench_pairs, "small": bench_small, "memory": bench_memory}
    asked = sys.argv[1:] or list(known)
    above = Path(__file__).parents[1] / ".cache"
    above.mkdir(exist_ok=True)
    for name in asked:
        folder = Path(tempfile.mkdtemp(dir=above, prefix="bench_compare-"))
        try:
            known[name](folder)
        finally:
            shutil.rmtree(folder)


if __name__ == "__main__":
    main()

"""Run the zoo: one process a run, with a limit of time and memory, one JSON row each, resumable.

    python -m benchmarks.zoo.run OUT.jsonl --lists transformers timm --dtypes float32 bfloat16
    python -m benchmarks.zoo.run OUT.jsonl --summary

Rows that OUT has already are not run again. `half` says whether a target belongs to the half that
limits and rules were tuned on, or to the one that is only measured.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import hashlib
import importlib
import itertools
import json
import os
import random
import resource
import signal
import sys
import tempfile
import time
import traceback
from pathlib import Path

os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # asking must not start CUDA: we fork
os.environ["HF_HUB_OFFLINE"] = os.environ["TRANSFORMERS_OFFLINE"] = "1"

import torch

_HERE = Path(__file__).parent
_LISTS = ("transformers", "timm", "torchvision", "others")
_ALARMS = {"different", "degraded"}


def half(target):
    name = target.partition(":")[2]
    return "tuned" if hashlib.sha256(name.encode()).digest()[0] % 2 == 0 else "measured"


def targets(name):
    if name != "others":
        lines = (_HERE / f"{name}.txt").read_text().split("\n")
        return [line for line in lines if line and not line.startswith("#")]
    source = (_HERE / "others.py").read_text().split("\n")
    names = (line[4:].partition("(")[0] for line in source if line.startswith("def "))
    return [f"zoo:{one}" for one in names if not one.startswith("_")]


def jobs(asked):
    names = [target for name in asked.lists for target in targets(name)]
    names = [name for name in names if asked.half in {None, half(name)}][asked.skip :]
    draw = random.Random(asked.draw)
    if asked.draw is not None:
        draw.shuffle(names)
    settings = [
        (dtype, train, gradients, device, mode, tf32, seed)
        for dtype, train, gradients, device, mode, tf32, seed in itertools.product(
            asked.dtypes, asked.train, asked.gradients, asked.devices, asked.modes,
            asked.tf32, asked.seeds,
        )
        # In float16 eager itself overflows on the CPU. TF32 is for float32 on a GPU alone.
        if not (dtype == "float16" and device == "cpu" and gradients == "yes")
        and not (tf32 == "on" and (device == "cpu" or dtype != "float32"))
    ]  # fmt: skip
    for target in names[: asked.limit]:
        chosen = settings if asked.draw is None else [draw.choice(settings)]
        for dtype, train, gradients, device, mode, tf32, seed in chosen:
            yield {
                "target": target, "half": half(target), "dtype": dtype, "train": train == "train",
                "gradients": gradients == "yes", "device": device, "mode": mode,
                "tf32": tf32 == "on", "seed": seed,
            }  # fmt: skip


def key(row):
    named = ("target", "dtype", "train", "gradients", "device", "mode", "tf32", "seed")
    return tuple(row[name] for name in named)


def start(job, folder, gigabytes, run):
    """Fork a process for one job; its row is written into `folder` under its process id."""
    child = os.fork()
    if child:
        return child
    own = str(os.getpid())
    sys.stdout = sys.stderr = (folder / f"{own}.log").open("w")
    if torch.version.cuda is None:  # CUDA reserves far more addresses than it uses
        resource.setrlimit(resource.RLIMIT_AS, (gigabytes << 30, gigabytes << 30))
    try:
        row = run(job)
    except BaseException:  # noqa: BLE001 - a crash is a row
        row = {**job, "stage": "crashed", "reason": traceback.format_exc()[-1500:]}
    (folder / f"{own}.json").write_text(json.dumps(row, default=str))
    sys.stdout.flush()
    os._exit(0)


def child_run(job):
    from benchmarks.zoo import child

    torch.set_num_threads(1)
    return child.run(job)


def finish(child, job, folder, late, seconds):
    """The row of a process that has ended, or that was killed because it took too long."""
    written = folder / f"{child}.json"
    if written.exists():
        return json.loads(written.read_text())
    if late:
        return {**job, "stage": "too slow", "reason": f"more than {seconds} s"}
    return {**job, "stage": "died", "reason": (folder / f"{child}.log").read_text()[-800:]}


def run_all(todo, asked, write, run=child_run):
    """Up to `--workers` processes at a time, each forked from this one with everything imported."""
    running = {}
    waiting = collections.deque(todo)
    end = time.monotonic() + asked.minutes * 60
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        while running or (waiting and time.monotonic() < end):
            while waiting and len(running) < asked.workers and time.monotonic() < end:
                job = waiting.popleft()
                child = start(job, folder, asked.gigabytes, run)
                running[child] = (job, time.monotonic() + asked.seconds)
            for child, (job, limit) in list(running.items()):
                late = time.monotonic() > min(limit, end + asked.grace)
                if late:
                    os.kill(child, signal.SIGKILL)
                if os.waitpid(child, 0 if late else os.WNOHANG)[0]:
                    del running[child]
                    write(finish(child, job, folder, late, asked.seconds))
            time.sleep(0.1)


def summarise(rows):
    for name in ("tuned", "measured"):
        own = [row for row in rows if row["half"] == name]
        print(f"{name}: {len(own)} runs")
        for stage, count in collections.Counter(row["stage"] for row in own).most_common():
            print(f"  {stage}: {count}")
        verified = [row for row in own if row["stage"] == "verified"]
        pairs = collections.Counter((row["status"], row.get("truth")) for row in verified)
        for (status, true), count in sorted(pairs.items(), key=str):
            print(f"    {status}, truth {true}: {count}")
        for row in verified:
            if row["status"] in _ALARMS and row.get("truth") != "fault":
                ratio = (row.get("worst") or [{}])[0].get("ratio")
                print(f"    alarm, truth {row.get('truth')}: {key(row)}, ratio {ratio}")
            if row["status"] not in _ALARMS and row.get("truth") == "fault":
                print(f"    passed, truth fault: {key(row)}: {row['worst'][0]}")


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--lists", nargs="+", default=list(_LISTS), choices=_LISTS)
    parser.add_argument("--dtypes", nargs="+", default=["float32"])
    parser.add_argument("--train", nargs="+", default=["eval"], choices=["eval", "train"])
    parser.add_argument("--gradients", nargs="+", default=["yes"], choices=["yes", "no"])
    parser.add_argument("--devices", nargs="+", default=["cpu"])
    parser.add_argument("--modes", nargs="+", default=["default"])
    parser.add_argument("--tf32", nargs="+", default=["off"], choices=["off", "on"])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--draw", type=int, help="targets in random order, one random setting each")
    parser.add_argument("--half", choices=["tuned", "measured"])
    parser.add_argument("--limit", type=int)
    parser.add_argument("--skip", type=int, default=0)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--minutes", type=float, default=600)
    parser.add_argument(
        "--grace", type=int, default=60, help="seconds for runs under way at the end"
    )
    parser.add_argument("--seconds", type=int, default=300)
    parser.add_argument("--gigabytes", type=int, default=12)
    parser.add_argument("--summary", action="store_true")
    asked = parser.parse_args()
    rows = []
    if asked.out.exists():
        rows = [json.loads(line) for line in asked.out.read_text().split("\n") if line]
    if asked.summary:
        summarise(rows)
        return
    import_once()
    known = {key(row) for row in rows}
    with asked.out.open("a") as out:

        def write(row):
            out.write(json.dumps(row) + "\n")
            out.flush()
            print(row["target"], row["dtype"], row["stage"], row.get("status"), row.get("truth"))

        run_all((job for job in jobs(asked) if key(job) not in known), asked, write)


def import_once():
    """Import what every run needs, so that the forked processes share it."""
    import torch._inductor.compile_fx  # noqa: F401, TID251 - for its time alone
    from torch._inductor.cpu_vec_isa import valid_vec_isa_list  # noqa: TID251 - this one too

    import paritas  # noqa: F401

    for name in ("transformers", "timm", "torchvision"):
        with contextlib.suppress(ImportError, RuntimeError):  # the latter: for another torch
            importlib.import_module(name)
    # The first compilation in a process asks the compiler for its vectors; on x86 that takes half
    # a minute. A compilation would do for the rest too, but starts CUDA where there is a device.
    valid_vec_isa_list()


if __name__ == "__main__":
    main()

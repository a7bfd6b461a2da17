"""Run the zoo: one process a run, with a limit of time and memory, one JSON row each, resumable.

    python -m benchmarks.zoo.run OUT.jsonl --lists transformers timm --dtypes float32 bfloat16
    python -m benchmarks.zoo.run OUT.jsonl --summary

Rows that OUT has already are not run again. `half` says whether a target belongs to the half that
limits and rules were tuned on, or to the one that is only measured.
"""

from __future__ import annotations

import argparse
import collections
import hashlib
import itertools
import json
import os
import resource
import subprocess
import sys
from pathlib import Path

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
    settings = itertools.product(
        names[: asked.limit], asked.dtypes, asked.train, asked.gradients, asked.devices, asked.modes
    )
    for target, dtype, train, gradients, device, mode in settings:
        if dtype == "float16" and device == "cpu" and gradients == "yes":
            continue  # eager itself overflows there
        yield {
            "target": target, "half": half(target), "dtype": dtype, "train": train == "train",
            "gradients": gradients == "yes", "device": device, "mode": mode,
        }  # fmt: skip


def key(row):
    return tuple(row[name] for name in ("target", "dtype", "train", "gradients", "device", "mode"))


def run_one(job, seconds, gigabytes):
    def limit():
        resource.setrlimit(resource.RLIMIT_AS, (gigabytes << 30, gigabytes << 30))

    command = [sys.executable, "-m", "benchmarks.zoo.child", json.dumps(job)]
    offline = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=seconds,
            check=False,
            env={**os.environ, **offline},
            preexec_fn=limit if job["device"] == "cpu" else None,
        )
    except subprocess.TimeoutExpired:
        return {**job, "stage": "too slow", "reason": f"more than {seconds} s"}
    for line in reversed(done.stdout.split("\n")):
        if line.startswith("ROW "):
            return json.loads(line.removeprefix("ROW "))
    return {**job, "stage": "died", "reason": f"code {done.returncode}: {done.stderr[-800:]}"}


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
    parser.add_argument("--half", choices=["tuned", "measured"])
    parser.add_argument("--limit", type=int)
    parser.add_argument("--skip", type=int, default=0)
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
    known = {key(row) for row in rows}
    with asked.out.open("a") as out:
        for job in jobs(asked):
            if key(job) in known:
                continue
            row = run_one(job, asked.seconds, asked.gigabytes)
            out.write(json.dumps(row) + "\n")
            out.flush()
            print(row["target"], row["dtype"], row["stage"], row.get("status"), row.get("truth"))


if __name__ == "__main__":
    main()

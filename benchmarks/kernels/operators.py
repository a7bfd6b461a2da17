"""Judge torch's operators against themselves compiled by Inductor: one JSON row each, resumable.

    python -m benchmarks.kernels.operators OUT.jsonl --jobs 16 --seconds 540
    python -m benchmarks.kernels.operators OUT.jsonl --summary

The operators and samples are those of torch's own tests. Operators come in the order of a hash of
their names, so any beginning of the list is a fair sample. Each run is a forked process with a time
limit. Rows that OUT has already are not run again. Each case that fails is repeated by `truth.py`,
without paritas, and compared with float64.
"""

from __future__ import annotations

import argparse
import collections
import hashlib
import json
import os
import sys
import tempfile
import time
from pathlib import Path

import torch
from benchmarks.kernels import opinfo, truth
from benchmarks.kernels.rows import add_row, forked, half, share_out, usable_server
from benchmarks.lab.journals import read_rows

from paritas.kernels import KernelOptions
from paritas.kernels.judge import KernelJudge
from paritas.kernels.rows import CaseFamily

# A case of another family has other shapes or strides: each costs a compilation.
SAME_SHAPES = frozenset(
    {CaseFamily.GIVEN, CaseFamily.MEMORY, CaseFamily.VALUES, CaseFamily.NONFINITE}
)
PRELOADED = ("benchmarks.kernels.opinfo", "torch._inductor.compile_fx")
MOST_CHECKED = 3
# So that the processes that fork have one thread each, and share what compilers build.
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "TORCHINDUCTOR_COMPILE_THREADS": "1",
    "TORCH_WARM_POOL": "0",
}
CACHE = "TORCHINDUCTOR_CACHE_DIR"


def jobs(asked):
    names = sorted(opinfo.ENTRIES, key=lambda one: hashlib.sha256(one.encode()).digest())
    if asked.only:
        names = [name for name in names if name in asked.only]
    for name in names:
        if "empty" in name:  # it returns what is in memory
            continue
        supported = opinfo.ENTRIES[name].supported_dtypes(asked.device)
        for dtype in asked.dtypes:
            if getattr(torch, dtype) in supported and asked.half in {None, half(name)}:
                yield name, dtype


def judged(name, dtype, asked):
    options = KernelOptions(
        cases=asked.cases,
        families=None if asked.all_families else SAME_SHAPES,
        seconds=asked.each / 2,
        call_seconds=asked.each / 2,
        preload=PRELOADED,
        memory=0,
        device=asked.device,
    )

    def make():
        return opinfo.samples_of(name, getattr(torch, dtype), asked.device)

    module = "benchmarks.kernels.opinfo"
    began = time.monotonic()
    with KernelJudge(f"{module}:reference_{name}", options, inputs=make) as judge:
        made = time.monotonic() - began
        report = judge.judge(f"{module}:candidate_{name}")
        failing = [row for row in report.rows if not row.status.passes() and not row.is_limit]
        row = {
            "status": str(report.status),
            "cases": len(report.rows),
            "refused": len(report.refused),
            "statuses": dict(collections.Counter(str(one.status) for one in report.rows)),
            "compiling": round(max((one.seconds for one in report.rows), default=0.0), 2),
            "making": round(made, 2),
            "samples": len(judge.task.given[0].args),
            "accepts": list(report.rating.accepts),
            "notes": list(report.notes)[:4],
        }
        if failing:
            row["failing"] = [described(one) for one in failing[:MOST_CHECKED]]
            inputs = {one.case.name: one.case.inputs for one in judge.cases()}
            operator = getattr(opinfo, f"reference_{name}")
            for one in row["failing"]:
                if one["case"] in inputs:
                    one["truth"] = truth.errors(operator, inputs[one["case"]].args)
    return row


def described(row):
    worst = max(row.verdict.findings, key=lambda one: one.status.gravity)
    return {
        "case": row.case,
        "status": str(row.status),
        "item": worst.path,
        "reason": worst.reason[:300],
        "inputs": row.inputs[:300],
    }


def restarted(asked):
    """Start this program again if torch was imported in another environment than it needs.

    A process in which CUDA was looked at has threads, and cannot fork.
    """
    wanted = dict(ENVIRONMENT)
    if asked.device == "cpu":
        wanted["CUDA_VISIBLE_DEVICES"] = ""
    wanted[CACHE] = os.environ.get(CACHE) or str(Path(tempfile.gettempdir(), "operators-inductor"))
    if any(os.environ.get(name) != value for name, value in wanted.items()):
        command = [sys.executable, "-m", "benchmarks.kernels.operators", *sys.argv[1:]]
        os.execve(sys.executable, command, {**os.environ, **wanted})  # noqa: S606


def run(asked):
    """Share the operators out to workers, each with candidates' processes of its own."""
    asked.until = time.monotonic() + asked.seconds
    restarted(asked)
    # Whatever the first compilation of a process looks up or builds, forks inherit.
    torch.compile(lambda x: x.softmax(0) + 1)(torch.ones(9, device=asked.device))
    done = {(row["operator"], row["dtype"]) for row in read_rows(asked.out)}
    left = [job for job in jobs(asked) if job not in done]
    print(f"{len(done)} rows, {len(left)} to go", file=sys.stderr)

    def work(taken):
        server = usable_server(
            PRELOADED,
            forks=asked.device == "cpu",
            trial=lambda: judged("neg", "float32", asked),
        )
        for name, dtype in taken:
            seconds = int(min(asked.each, asked.until - time.monotonic()))
            if seconds < asked.least:
                break
            row = forked(lambda name=name, dtype=dtype: judged(name, dtype, asked), seconds)
            if row["status"] == "no result" and seconds < asked.each:
                break
            add_row(asked.out, {"operator": name, "dtype": dtype, "half": half(name), **row})
        server.stop()

    share_out(left, asked.jobs, work)


def is_true(row):
    return any(truth.stands(one.get("truth")) for one in row["failing"])


def summarize(asked):
    rows = read_rows(asked.out)
    for name in ("tuned", "measured"):
        for dtype in asked.dtypes:
            some = [row for row in rows if row["half"] == name and row["dtype"] == dtype]
            counts = collections.Counter(row["status"] for row in some)
            alarms = [row for row in some if row["status"] in {"different", "degraded"}]
            refuted = [row["operator"] for row in alarms if not is_true(row)]
            print(name, dtype, len(some), dict(counts.most_common()), "refuted:", refuted)
    for row in rows:
        if "failing" in row or row["status"] in {"error", "no result"}:
            print(json.dumps(row, indent=1))


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--only", nargs="+")
    parser.add_argument("--half", choices=["tuned", "measured"])
    parser.add_argument("--cases", type=int, default=12)
    parser.add_argument("--all-families", action="store_true", help="other shapes and strides too")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--jobs", type=int, default=1, help="operators at a time")
    parser.add_argument("--seconds", type=float, default=36000.0, help="all of them end by then")
    parser.add_argument("--each", type=int, default=120, help="time limit of one operator")
    parser.add_argument("--least", type=int, default=10, help="begin none with less time left")
    parser.add_argument("--summary", action="store_true")
    asked = parser.parse_args()
    summarize(asked) if asked.summary else run(asked)


if __name__ == "__main__":
    main()

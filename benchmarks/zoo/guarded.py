"""Guard right compilers over the zoo: every alarm is a false one, or a fault of a compiler.

    python -m benchmarks.zoo.guarded OUT.jsonl --limit 100 --jobs 2 --seconds 3600
    python -m benchmarks.zoo.guarded OUT.jsonl --backends inductor --limit 20 --device cuda
    python -m benchmarks.zoo.guarded OUT.jsonl --summary --json benchmarks/zoo/guarded.json

The classes are those of `zoo/*.toml`, in random order. Each pair of class and backend is a forked
process: the model is compiled with `backend=paritas.guard(backend)` and called, forward and
backward. The row has the verdict, and whether outputs and gradients are those of eager mode bit for
bit. For an alarm, `truth.py` measures the code of the same backend without a guard, without any
code of paritas. Rows are written as they come, and rows that OUT has already are not run again.
"""

from __future__ import annotations

import argparse
import collections
import copy
import json
import os
import random
import time
import tomllib
from pathlib import Path

import torch
from benchmarks.lab.journals import read_rows
from benchmarks.zoo import truth
from benchmarks.zoo.child import build
from benchmarks.zoo.run import _ALARMS, half, import_once, run_all

_ZOO = Path(__file__).parents[2] / "zoo"
_MOST_PARAMETERS = 30_000_000


def interpreter(graph, _inputs):
    """What a backend author writes first."""
    return torch.fx.Interpreter(graph).run


def forward(graph, _inputs):
    """What the documentation of `torch.compile` shows as a backend."""
    return graph.forward


_BACKENDS = {
    "eager": "eager", "aot_eager": "aot_eager", "interpreter": interpreter, "forward": forward,
    "inductor": "inductor",
}  # fmt: skip


def targets():
    lists = [
        tomllib.loads((_ZOO / f"{name}.toml").read_text()) for name in ("transformers", "timm")
    ]
    names = [name for one in lists for target in one["target"] for name in target["names"]]
    random.Random(0).shuffle(names)
    return names


def check(job):
    """The row of one model and one backend."""
    import paritas

    torch.set_num_threads(1)
    began = time.perf_counter()
    try:
        model, args, kwargs = build(job["target"], train=job["train"], seed=0)
    except paritas.UsageError as error:
        return {**job, "stage": "not built", "reason": str(error)}
    if sum(one.numel() for one in model.parameters()) > _MOST_PARAMETERS:
        return {**job, "stage": "too large"}
    model = model.train(job["train"]).to(job["device"])
    args, kwargs = (truth.move(one, device=job["device"]) for one in (args, kwargs))

    def observe(make):
        own = copy.deepcopy(model)
        return truth.observe(make(own), own, truth.move(args), truth.move(kwargs), gradients=True)

    try:
        eager = observe(lambda one: one)
    except Exception as error:  # noqa: BLE001 - nothing to compare with
        return {**job, "stage": "eager fails", "reason": f"{type(error).__name__}: {error!s:.300}"}
    backend = _BACKENDS[job["backend"]]
    guard = paritas.guard(backend, on_mismatch="record")
    try:
        guarded = observe(lambda one: torch.compile(one, backend=guard))
    except Exception as error:  # noqa: BLE001 - a row, too
        reason = f"{type(error).__name__}: {error!s:.300}"
        return {**job, "stage": "compiled fails", "reason": reason}
    verdict = guard.verdict()
    row = {
        **job, "stage": "guarded", "status": verdict.status.value,
        "graphs": len(guard.journal.graphs), "compared": verdict.coverage.compared,
        "calls": sum(entry.calls for entry in guard.journal.graphs),
        "checked": sum(entry.checked for entry in guard.journal.graphs),
        "skipped": list(verdict.coverage.skipped)[:6], "notes": list(verdict.notes)[:6],
        "failures": [(one.path, one.status.value, one.reason) for one in verdict.failures[:8]],
        "same_as_eager": eager.keys() == guarded.keys()
        and all(torch.equal(value, guarded[name]) for name, value in eager.items()),
        "seconds": round(time.perf_counter() - began, 2),
        "cpu_seconds": round(time.process_time(), 2),
    }  # fmt: skip
    if verdict.status.value in _ALARMS:
        torch.compiler.reset()
        try:
            rows = truth.measure(
                model, args, kwargs, lambda one: torch.compile(one, backend=backend), gradients=True
            )
            row |= {"truth": truth.decide(rows), "worst": rows[:4]}
        except Exception as error:  # noqa: BLE001 - the row says that there is no truth
            row |= {"truth": "unknown", "reason": f"{type(error).__name__}: {error!s:.300}"}
    return row


def tally(rows):
    """For each backend: classes, statuses, alarms, what was left out."""
    table = {}
    for name in _BACKENDS:
        own = [row for row in rows if row["backend"] == name]
        guarded = [row for row in own if row["stage"] == "guarded"]
        if own:
            table[name] = {
                "classes": len(guarded),
                "statuses": dict(collections.Counter(row["status"] for row in guarded)),
                "alarms": [
                    {"target": row["target"], "truth": row["truth"], "first": row["failures"][0]}
                    for row in guarded
                    if row["status"] in _ALARMS
                ],
                "values_compared": sum(row["compared"] for row in guarded),
                "same_as_eager": sum(row["same_as_eager"] for row in guarded),
                "with_something_skipped": sum(bool(row["skipped"]) for row in guarded),
                "not_guarded": dict(
                    collections.Counter(row["stage"] for row in own if row not in guarded)
                ),
            }
    return table


def summarise(rows):
    for name, one in tally(rows).items():
        print(f"{name}: {one['classes']} classes, {one['values_compared']} values compared")
        print(f"  {one['statuses']}, {one['same_as_eager']} same as eager bit for bit")
        print(f"  alarms: {len(one['alarms'])}; not guarded: {one['not_guarded'] or 'none'}")
        for alarm in one["alarms"]:
            print(f"    {alarm['target']}, truth {alarm['truth']}: {alarm['first']}")
    for row in rows:
        named = f"  {row['target']} {row['backend']}"
        if row["stage"] != "guarded":
            print(f"{named}: {row['stage']}, {row.get('reason', '')[-200:]}")
        elif row["status"] in {"unverified", "unstable"} or row["skipped"]:
            first = (row["failures"] or row["skipped"] or row["notes"] or [""])[0]
            print(f"{named}: {row['status']}, {first!s:.200}")


def jobs(asked):
    for target in asked.targets or targets()[asked.skip :][: asked.limit]:
        for backend in asked.backends:
            yield {
                "target": target, "half": half(target), "backend": backend,
                "device": asked.device, "train": asked.train,
            }  # fmt: skip


def key(row):
    return tuple(row[name] for name in ("target", "backend", "device", "train"))


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--backends", nargs="+", default=["eager", "aot_eager", "interpreter"],
                        choices=list(_BACKENDS))  # fmt: skip
    parser.add_argument("--targets", nargs="+", help="these instead of those of zoo/*.toml")
    parser.add_argument("--limit", type=int)
    parser.add_argument("--skip", type=int, default=0)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--train", action="store_true", help="in training mode")
    parser.add_argument("--jobs", type=int, default=1, help="processes at a time")
    parser.add_argument("--seconds", type=float, default=36000, help="in all; what runs is ended")
    parser.add_argument("--each", type=int, default=300, help="seconds for one class and backend")
    parser.add_argument("--gigabytes", type=int, default=12)
    parser.add_argument("--summary", action="store_true")
    parser.add_argument("--json", type=Path, help="where to write the table")
    asked = parser.parse_args()
    rows = read_rows(asked.out)
    if not asked.summary:
        import_once()
        known = {key(row) for row in rows}
        limits = argparse.Namespace(
            workers=asked.jobs, minutes=asked.seconds / 60, grace=0, seconds=asked.each,
            gigabytes=asked.gigabytes,
        )  # fmt: skip
        with asked.out.open("a") as out:

            def write(row):
                rows.append(row)
                out.write(json.dumps(row) + "\n")
                out.flush()
                about = [row["target"], row["backend"], row["stage"], row.get("status", "")]
                print(*about, "ALARM" if row.get("status") in _ALARMS else "", flush=True)

            run_all((job for job in jobs(asked) if key(job) not in known), limits, write, check)
    summarise(rows)
    if asked.json:
        about = {"torch": torch.__version__.partition("+")[0], "device": asked.device}
        about["processor"] = os.uname().machine
        asked.json.write_text(json.dumps({**about, "backends": tally(rows)}, indent=1) + "\n")


if __name__ == "__main__":
    main()

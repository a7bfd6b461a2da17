"""All serving relations of `paritas invariants` over the generative classes of transformers.

    python -m benchmarks.zoo.invariants OUT.jsonl --limit 50 --dtype float32
    python -m benchmarks.zoo.invariants OUT.jsonl --summary

Each class is a forked process with a time limit and one JSON row. Rows that OUT has already are not
run again. `truth` has the same relations computed by hand in float64 (`invariants_truth.py`).
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import time
import warnings
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = os.environ["TRANSFORMERS_OFFLINE"] = "1"

import torch
from benchmarks.lab.journals import read_rows
from benchmarks.zoo import invariants_truth
from benchmarks.zoo.run import half

_HERE = Path(__file__).parent
_ALARMS = ("different", "degraded")


def check(name, dtype, only):
    """The row of one class."""
    from paritas.core.targets import build_target
    from paritas.relations.checking import invariants

    warnings.simplefilter("ignore")
    began = time.monotonic()
    torch.manual_seed(0)
    model, inputs = build_target("hf:" + name)
    model.eval().to(dtype)
    built = time.monotonic()
    report = invariants(model, inputs, target=name, only=only)
    row = {
        "build_s": built - began,
        "check_s": time.monotonic() - built,
        "rows": {},
        "cpu_s": time.process_time(),
    }
    for one in report.rows:
        failing = [
            (f.item.option, f.status.value, f.origin.name if f.origin else "", f.reason[:200])
            for f in one.verdict.failures
        ]
        row["rows"][one.relation] = (one.word, one.summary[:300], failing, round(one.seconds, 2))
    try:
        row["truth"] = invariants_truth.differences(model.float(), inputs.kwargs)
    except Exception as error:  # noqa: BLE001  (the truth is an extra)
        row["truth"] = {"error": str(error)[:120]}
    row["truth_s"] = time.monotonic() - built - row["check_s"]
    return row


def in_process(name, dtype, only, seconds):
    """The row of one class, from a forked process."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(read)
        try:
            row = check(name, dtype, only)
        except BaseException as error:  # noqa: BLE001  (a crash is a row too)
            row = {"error": f"{type(error).__name__}: {str(error)[:300]}"}
        with os.fdopen(write, "w") as out:
            out.write(json.dumps(row))
        os._exit(0)
    os.close(write)
    signal.signal(signal.SIGALRM, lambda *_: os.kill(child, signal.SIGKILL))
    signal.alarm(seconds)
    with os.fdopen(read) as pipe:
        text = pipe.read()
    signal.alarm(0)
    os.waitpid(child, 0)
    return json.loads(text) if text else {"error": f"killed after {seconds} s"}


def told(value):
    if isinstance(value, str):
        return "not known"
    if value <= invariants_truth.NO_FAULT:
        return "refuted"
    return "true" if value >= invariants_truth.FAULT else "to be looked at"


def summary(rows):
    """Alarms and what the truth says about them, for both halves."""
    for which in ("tuned", "measured"):
        mine = [row for row in rows if row["half"] == which]
        checked = [row for row in mine if "rows" in row]
        pairs = [
            (row["name"], relation, *found)
            for row in checked
            for relation, found in row["rows"].items()
            if found[0] not in ("does not apply", "not promised")
        ]
        seconds = sum(row["build_s"] + row["check_s"] for row in checked)
        print(
            f"{which}: {len(checked)} of {len(mine)} classes, {len(pairs)} pairs, {seconds:.0f} s"
        )
        for name, relation, word, about, *_ in pairs:
            row = next(one for one in checked if one["name"] == name)
            true = row["truth"].get(relation, "not computed")
            if word in _ALARMS:
                print(f"  {name} {relation}: {word}, by hand {true} {told(true)}; {about[:150]}")
            elif word in ("unverified", "unstable"):
                print(f"  {name} {relation}: {word}; {about[:150]}")
            elif not isinstance(true, str) and true >= invariants_truth.FAULT:
                print(f"  {name} {relation}: MISSED? {word}, by hand {true:.1e}")
        for row in mine:
            if "rows" not in row:
                print(f"  {row['name']}: {row['error'][:150]}")


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--names", nargs="*")
    parser.add_argument("--half", choices=["tuned", "measured"])
    parser.add_argument("--limit", type=int)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--only", default="serving")
    parser.add_argument("--seconds", type=int, default=120)
    parser.add_argument("--minutes", type=float, default=1e9, help="start nothing after this time")
    parser.add_argument("--summary", action="store_true")
    asked = parser.parse_args()
    known = read_rows(asked.out)
    if asked.summary:
        summary(known)
        return
    import transformers

    import paritas.core.targets.hugging_face
    import paritas.relations.checking

    transformers.logging.set_verbosity_error()
    paritas.core.targets.build_target(
        "hf:LlamaForCausalLM"
    )  # what all children need is imported here
    names = asked.names or (_HERE / "generative.txt").read_text().split()
    names = [name for name in names if asked.half in (None, half(f"hf:{name}"))]
    random.Random(0).shuffle(names)
    done = {row["name"] for row in known}
    dtype = getattr(torch, asked.dtype)
    began = time.monotonic()
    for name in [one for one in names if one not in done][: asked.limit]:
        if time.monotonic() - began > 60 * asked.minutes:
            break
        row = in_process(name, dtype, asked.only.split(","), asked.seconds)
        row = {"name": name, "half": half(f"hf:{name}"), "dtype": asked.dtype, **row}
        with asked.out.open("a") as out:
            out.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()

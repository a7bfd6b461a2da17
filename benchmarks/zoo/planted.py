"""Plant faults in models of the zoo and count those that paritas finds, and the false alarms.

    python -m benchmarks.zoo.planted OUT.jsonl --lists transformers timm --models 30
    python -m benchmarks.zoo.planted OUT.jsonl --summary

Each model is one process, forked from this one so that the libraries are imported once. Jobs that
OUT has already are not run again. Half of the models (`run.half`) may be looked at when rules and
limits are tuned; the other half is only counted.
"""

from __future__ import annotations

import argparse
import collections
import hashlib
import itertools
import json
import math
import os
import resource
import sys
import time
from pathlib import Path

from benchmarks.lab.journals import read_rows
from benchmarks.zoo.run import _ALARMS, _LISTS, half, import_once, targets

_SOURCES = {"hf": "transformers", "timm": "timm", "torchvision": "torchvision", "zoo": "others"}
_LEFT_OUT = {"too large", "not built"}
_NAMES = ("target", "dtype", "train", "route", "compiler", "seed")


def zoo(row):
    return _SOURCES[row["target"].partition(":")[0]]


def _digest(target):
    return hashlib.sha256(target.encode()).digest()


def jobs(asked):
    """The models of all zoos in turn, each half in turn, in the order of a hash of the name."""
    queues = [[one] for one in asked.targets]
    for name in asked.lists if not asked.targets else ():
        order = sorted(targets(name), key=_digest)
        queues += [
            [one for one in order if half(one) == which][: asked.models]
            for which in ("tuned", "measured")
            if asked.half in {None, which}
        ]
    for turn in range(max(map(len, queues), default=0)):
        for target in (queue[turn] for queue in queues if turn < len(queue)):
            for dtype, route in itertools.product(asked.dtypes, asked.routes):
                if route == "compiler" and _digest(target)[1] % asked.one_in:
                    continue
                known = ("trusted", "foreign")[_digest(target)[2] % 2]
                compiler = known if route == "compiler" else ""
                yield {
                    "target": target, "half": half(target), "dtype": dtype, "train": asked.train,
                    "route": route, "compiler": compiler, "seed": asked.seed,
                    "modules": asked.modules, "kinds": asked.kinds, "most": asked.most,
                    "seconds": asked.seconds, "faults": asked.faults, "mutants": asked.mutants,
                }  # fmt: skip


def key(row):
    return tuple(row[name] for name in _NAMES)


def run_one(job, out, gigabytes):
    """Run a job in a fork of this process."""
    child = os.fork()
    if child == 0:
        from benchmarks.zoo.planted_child import run_all

        resource.setrlimit(resource.RLIMIT_AS, (gigabytes << 30, gigabytes << 30))
        resource.setrlimit(resource.RLIMIT_CPU, (4 * job["seconds"],) * 2)
        sys.stderr = sys.stdout = Path(os.devnull).open("w")  # noqa: SIM115  (until it ends)
        run_all({**job, "out": str(out)})
        os._exit(0)
    _, status = os.waitpid(child, 0)
    if status:
        with out.open("a") as file:
            file.write(json.dumps({**job, "stage": "died", "reason": f"status {status}"}) + "\n")
    return json.loads(out.read_text().rstrip().rpartition("\n")[2])


# --- Figures --------------------------------------------------------------------------------------


def wilson(found, count, z=1.96):
    """The lower end of Wilson's interval for a share."""
    if not count:
        return 0.0
    share = found / count
    middle = share + z * z / (2 * count)
    width = z * math.sqrt(share * (1 - share) / count + z * z / (4 * count * count))
    return (middle - width) / (1 + z * z / count)


def tally(rows):
    """Faults by strength: how many were planted, found, and missed as `unstable` or otherwise.

    The strength is that in units of eager's error; the same by noise has its own entry. `natively`
    is what the native run alone finds, of the faults below `planted_child._GROSS`.
    """
    found = _by_strength(rows, "band")
    found["by noise"] = _by_strength(rows, "noise_band")
    honest = [row for row in rows if row["kind"] == "honest" and "status" in row]
    found["honest"] = {
        "runs": len(honest),
        "alarms": sum(row["status"] in _ALARMS and row["band"] == "weak" for row in honest),
        "unstable": sum(row["status"] == "unstable" for row in honest),
        "unverified": sum(row["status"] == "unverified" for row in honest),
    }
    found["models"] = len({row["target"] for row in rows})
    return found


def _by_strength(rows, yardstick):
    found = {}
    for band in ("strong", "moderate"):
        own = [row for row in rows if row.get(yardstick) == band and row["kind"] != "honest"]
        own = [row for row in own if "status" in row]
        caught = sum(row["status"] in _ALARMS for row in own)
        found[band] = {
            "planted": len(own), "found": caught,
            "unverified": sum(row["status"] == "unverified" for row in own),
            "unstable": sum(row["status"] == "unstable" for row in own),
            "share": caught / len(own) if own else None, "at_least": wilson(caught, len(own)),
            "natively": [
                sum(row["native"] in _ALARMS for row in own if "native" in row),
                sum("native" in row for row in own),
            ],
        }  # fmt: skip
    return found


def summary(rows):
    """The figures, by half and group."""
    faults = [row for row in rows if "kind" in row and "band" in row]
    groups = collections.defaultdict(list)
    for row in faults:
        for group in (
            "all",
            zoo(row),
            row["dtype"],
            f"{row['route']} {row['compiler']}".strip(),
            f"faults of {row.get('source', 'pass')}",
            "accuracy" if row.get("native_only") else "meaning",
        ):
            groups[group, row["half"]].append(row)
    return {f"{group}, {which}": tally(own) for (group, which), own in sorted(groups.items())}


def show(rows):
    for name, figures in summary(rows).items():
        parts = []
        yardsticks = {"by eager's error": figures, "by noise": figures["by noise"]}
        for yardstick, band in itertools.product(yardsticks, ("strong", "moderate")):
            one = yardsticks[yardstick][band]
            parts.append(f"{yardstick} {band} {one['found']}/{one['planted']}")
            parts.append(f"(unstable {one['unstable']}, unverified {one['unverified']},")
            parts.append(f"natively {one['natively'][0]}/{one['natively'][1]});")
        honest = figures["honest"]
        parts.append(f"honest {honest['alarms']} alarms, {honest['unstable']} unstable,")
        parts.append(f"{honest['unverified']} unverified of {honest['runs']}")
        print(f"{name}: {figures['models']} models;", *parts)
    stages = collections.Counter(row["stage"] for row in rows if "stage" in row)
    print(dict(stages))
    for row in rows:
        missed = row.get("status") not in _ALARMS and row.get("kind") not in {None, "honest"}
        alarm = row.get("status") in _ALARMS and row.get("kind") == "honest"
        if row["half"] != "tuned" or not (alarm or (missed and row["band"] == "strong")):
            continue
        what = [row.get(one) for one in ("kind", "variant", "operator", "ordinal", "size", "item")]
        how = f"{row['ratio']:.3g} {row.get('noise_ratio', math.nan):.3g}"
        print(*key(row), *what, how, row.get("status"), row.get("findings"))


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--lists", nargs="+", default=list(_LISTS), choices=_LISTS)
    parser.add_argument("--targets", nargs="+", default=[], help="these models, not the lists")
    parser.add_argument("--dtypes", nargs="+", default=["float32"])
    parser.add_argument("--routes", nargs="+", default=["graph", "compiler"])
    parser.add_argument("--one-in", type=int, default=4, help="models that are compiled, too")
    parser.add_argument("--train", action="store_true")
    parser.add_argument("--half", choices=["tuned", "measured"])
    parser.add_argument("--models", type=int, default=15, help="of each half of each list")
    parser.add_argument("--faults", type=int, default=6, help="of the pass, per job")
    parser.add_argument("--mutants", type=int, default=6, help="of power, per job")
    parser.add_argument("--kinds", nargs="+", help="of the pass; by default all")
    parser.add_argument("--most", type=float, default=40.0, help="strength of a fault with a size")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--modules", type=int, default=80, help="larger models are left out")
    parser.add_argument("--seconds", type=int, default=120, help="of processor time, per job")
    parser.add_argument("--minutes", type=float, default=math.inf, help="in all")
    parser.add_argument("--gigabytes", type=int, default=12)
    parser.add_argument("--summary", action="store_true")
    parser.add_argument("--json", type=Path, help="write the figures of the summary to this file")
    asked = parser.parse_args()
    rows = read_rows(asked.out)
    if asked.json:
        asked.json.write_text(json.dumps(summary(rows), indent=1) + "\n")
    if asked.summary or asked.json:
        show(rows)
        return
    # With a larger limit, models that were too large are tried again.
    ended = [row for row in rows if "stage" in row]
    ended = [r for r in ended if r["stage"] != "too large" or r["modules"] >= asked.modules]
    known = {key(row) for row in ended}
    import_once()
    deadline = time.monotonic() + 60 * asked.minutes
    left_out = {row["target"] for row in ended if row["stage"] in _LEFT_OUT}
    for job in jobs(asked):
        if key(job) in known or job["target"] in left_out or time.monotonic() > deadline:
            continue
        print(*key(job), flush=True)
        last = run_one(job, asked.out, asked.gigabytes)
        if last["stage"] in _LEFT_OUT:
            left_out.add(job["target"])


if __name__ == "__main__":
    main()

"""Right programs of zoo models against the limits of the error as a whole.

    python -m benchmarks.zoo.rights OUT.jsonl --lists transformers timm --half measured --models 10
    python -m benchmarks.zoo.rights OUT.jsonl --summary

A model is traced, forward and backward, and computed in other right ways: Inductor, and those of
`ways.py`. Each is a JSON row: the error over eager's own, where that is largest (as `planted.py`
measures faults), both figures of `WholeNoise` as shares of their limits after 12 perturbed runs,
without what decisions and the rounding of a last sum may add, and the verdict (of Inductor's
program: natively only).
"""

from __future__ import annotations

import argparse
import collections
import copy
import json
import math
import os
import resource
import time
import traceback
from pathlib import Path

import torch
from benchmarks.lab.journals import read_rows
from benchmarks.zoo import truth, ways
from benchmarks.zoo.child import _DTYPES, build
from benchmarks.zoo.planted import _digest
from benchmarks.zoo.run import _LISTS, half, import_once, targets

_MOST_PARAMETERS, _MOST_SECONDS = 6_000_000, 200
_WAYS = ("inductor", *ways.WAYS)


def inductor(program):
    """The traced graph, compiled."""
    from torch._inductor import compile as compile_graph  # noqa: TID251

    unused = torch.ops.aten._local_scalar_dense.default  # noqa: SLF001
    graph = copy.deepcopy(program.module.graph)
    for node in reversed(graph.nodes):
        if node.target is unused and not node.users:
            graph.erase_node(node)
    module = torch.fx.GraphModule(program.module, graph)
    return compile_graph(module, program.fresh_inputs())


def limits(measured):
    """Item -> what is known about the whole errors of right programs."""
    from paritas.core.numerics.automatic import MOST_RUNS
    from paritas.core.numerics.criterion import rms, unit_roundoff
    from paritas.core.numerics.whole_error import WholeNoise, whole_error

    evidence, found = measured.evidence, {}
    for item, known in measured.items.items():
        native = measured.native.outputs[item]
        own = whole_error(native, known.truth)
        if own is None or evidence.spread(evidence.unit, 0, item, MOST_RUNS) is None:
            continue
        found[item] = WholeNoise(
            own=own,
            rounding=max(evidence.unit, unit_roundoff(native.dtype)),
            typical=rms(known.truth),
            numel=known.truth.numel(),
            runs=evidence.whole_errors(evidence.unit, 0, item),
            cuts=not native.is_cpu,
        )
    return found


def shares(found, measured, noise, least):
    """The largest figures of one program, and the items."""
    from paritas.core.numerics.whole_error import whole_error

    row = dict.fromkeys(("ratio", "size", "factor"), (0.0, ""))
    for item, known in noise.items():
        error = whole_error(found[item], measured.items[item].truth)
        # Of what has vanished only rounding is left; the judge allows four times as much.
        if error is None or known.typical < 1e-3 * known.own.size:
            continue
        ratio = error.size / max(known.own.size, least * known.typical, 1e-300)
        excess = known.excess(error, last=True)
        own = {"ratio": ratio, "size": excess.size, "factor": excess.factor}
        for name, value in own.items():
            row[name] = max(row[name], (value, measured.names[item].text))
    return row


def study(job):
    """Yield a row for every way."""
    from paritas import Inputs
    from paritas.mutants.planting import judge_mutant, program_noise
    from paritas.mutants.power import _call_positionally
    from paritas.mutants.programs import trace_program

    dtype = _DTYPES[job["dtype"]]
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = job["tf32"]
    model, args, kwargs = build(job["target"], train=False, seed=0)
    many, modules = sum(p.numel() for p in model.parameters()), len(list(model.modules()))
    if many > _MOST_PARAMETERS or modules > job["modules"]:
        yield {**job, "stage": "too large"}
        return
    model = model.eval().to(device=job["device"], dtype=dtype)
    args, kwargs = (truth.move(one, dtype, job["device"]) for one in (args, kwargs))
    torch.manual_seed(0)
    call = _call_positionally(model, Inputs(args, kwargs))
    program = trace_program(call, [*args, *kwargs.values()], gradients=True, seed=0)
    measured = program_noise(program)
    noise = limits(measured)
    for way in job["ways"]:
        began = time.process_time()
        row = {**job, "way": way}
        try:
            run = inductor(program) if way == "inductor" else ways.under(way, program.module)
            with torch.no_grad():
                values = run(*program.fresh_inputs())
            found = dict(zip(measured.native.outputs, values, strict=True))
            row |= shares(found, measured, noise, torch.finfo(dtype).eps)
            verdict = judge_mutant(run, measured, lift=way != "inductor")
        except Exception as error:  # noqa: BLE001 - a way that cannot be gone is a row
            yield {**row, "stage": f"{type(error).__name__}: {error!s:.200}"}
            continue
        alarms = [(f.path, f.reason) for f in verdict.findings if f.reason][:3]
        cpu = time.process_time() - began
        yield {**row, "stage": "done", "status": str(verdict.status), "why": alarms, "cpu": cpu}


def show(rows):
    groups = collections.defaultdict(list)
    for row in rows:
        if row["stage"] == "done":
            device = row["device"] + (" TF32" if row["tf32"] else "")
            groups[row["half"], device, row["dtype"], row["way"]].append(row)
    for name, own in sorted(groups.items()):
        ratio, size, factor = (
            max(row[one][0] for row in own) for one in ("ratio", "size", "factor")
        )
        above = sum(row["ratio"][0] > truth.NO_FAULT for row in own)
        alarms = sum(row["status"] in {"different", "degraded"} for row in own)
        print(
            *name, f"{len(own)} rows: at most {size:.2f} and {factor:.2f} of the limits;",
            f"{alarms} alarms; {above} above {truth.NO_FAULT:g} times eager's error,",
            f"at most {ratio:.2f}",
        )  # fmt: skip


def jobs(asked):
    names = list(asked.targets)
    if not names:
        queues = []
        for one in asked.lists:
            order = sorted(targets(one), key=_digest)
            own = [name for name in order if asked.half in {None, half(name)}]
            queues.append(own[asked.skip : asked.skip + asked.models])
        turns = range(max(map(len, queues)))
        names = [queue[turn] for turn in turns for queue in queues if turn < len(queue)]
    return [
        {
            "target": name, "half": half(name), "dtype": dtype, "device": asked.device,
            "tf32": asked.tf32, "ways": asked.ways, "modules": asked.modules,
        }
        for name in names
        for dtype in asked.dtypes
    ]  # fmt: skip


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--lists", nargs="+", default=list(_LISTS), choices=_LISTS)
    parser.add_argument("--targets", nargs="+", default=[], help="these models, not the lists")
    parser.add_argument("--half", choices=["tuned", "measured"])
    parser.add_argument("--models", type=int, default=10, help="of each list")
    parser.add_argument("--skip", type=int, default=0, help="as many models of each list")
    parser.add_argument("--modules", type=int, default=150, help="larger models are left out")
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"], choices=_DTYPES)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--tf32", action="store_true")
    parser.add_argument("--ways", nargs="+", default=list(_WAYS), choices=_WAYS)
    parser.add_argument("--minutes", type=float, default=math.inf)
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--summary", action="store_true")
    asked = parser.parse_args()
    rows = read_rows(asked.out)
    if asked.summary:
        show(rows)
        return
    known = {(row["target"], row["dtype"], row["device"], row["tf32"]) for row in rows}
    todo = [
        job for job in jobs(asked)
        if (job["target"], job["dtype"], job["device"], job["tf32"]) not in known
    ]  # fmt: skip
    torch.set_num_threads(1)
    import_once()
    deadline = time.monotonic() + 60 * asked.minutes
    running = 0
    for job in todo:
        if running == asked.jobs:
            os.wait()
            running -= 1
        if time.monotonic() > deadline:
            break
        if os.fork() == 0:
            resource.setrlimit(resource.RLIMIT_CPU, (_MOST_SECONDS, _MOST_SECONDS))
            append(asked.out, job)
            os._exit(0)
        running += 1
    for _ in range(running):
        os.wait()


def append(out, job):
    """The rows of one model."""
    try:
        made = list(study(job))
    except Exception:  # noqa: BLE001 - a crash is a row
        made = [{**job, "stage": traceback.format_exc()[-500:]}]
    with out.open("ab", buffering=0) as file:  # in one piece: other processes write, too
        file.write("".join(json.dumps(row) + "\n" for row in made).encode())


if __name__ == "__main__":
    main()

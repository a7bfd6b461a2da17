"""Compiler faults inside whole models, shrunk by us and by the framework's own minifier.

Each method runs in its own process with an empty cache of compiled code, the same time limit, and
the same graph captured from the same model. Each method's judge sees the graph fail once before its
clock starts, because anyone who shrinks a failure has seen it. The methods:

- ours: `paritas.shrinking`; the run of the finished script is part of the time;
- minifier: `functorch.compile.minifier` in one process, with Dynamo's accuracy predicate;
- launcher: what users get from `TORCHDYNAMO_REPRO_AFTER=aot` and `TORCHDYNAMO_REPRO_LEVEL=4`: the
  model runs, and minifier_launcher.py with it.

The predicate gets a wrapper module of ours: in torch 2.13 it calls what Inductor compiles wrongly,
treats the exception as agreement, and would see no fault at all. Operator calls are counted. A
fault is found if no more than 3 are left (5 for a fusion fault), and if these still show the same
failure to our judge. By default this runs a sample of the faults; `BENCH_WHOLE=1` runs all, and the
launcher for the first two.
"""

# ruff: noqa: TID251  (the framework's own tools are among its private parts)

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import re
import resource
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.lab.figures import Figure, Report, Table, write

TESTS = Path(__file__).parents[1] / "tests"
sys.path.insert(0, str(TESTS))
# A process also has to import torch and capture the graph; and the last query may be a long one.
STARTUP = 120.0
WAYS = ("ours", "minifier", "launcher")
SHARE = ("relu_in_residual_net", "gelu_in_transformer", "nan_folded_away_in_experts")
WHOLE = os.environ.get("BENCH_WHOLE") == "1"


# --- one way on one fault, in a process of its own ------------------------------------------------


def prepared(name):
    """The fault, planted for good, and the programs of its model."""
    import torch

    from paritas.core.execution.compilation import Candidate
    from paritas.shrinking.sources import capture_programs
    from quality.faulty_compiler import plant, setup
    from quality.shrink_faults import FAULTS, STUBBORN

    fault = {**FAULTS, **STUBBORN}[name]
    plant(fault.plant)
    torch.set_grad_enabled(fault.training)
    model, inputs = fault.model()
    candidate = Candidate(dynamic=fault.dynamic, setup=setup(fault.plant))
    return fault, candidate, capture_programs(model, list(inputs), candidate)


def ours(name, seconds, folder):
    from paritas.core.time_limit import TimeLimit
    from paritas.shrinking.programs import Oracle
    from paritas.shrinking.shrink import shrink

    fault, candidate, programs = prepared(name)
    seen = Oracle(candidate, TimeLimit(2 * STARTUP)).first(programs[0]).signature
    busy = cpu_seconds()
    result = shrink(programs, candidate, signature=seen, limit=TimeLimit(seconds), outdir=folder)
    signature = result.signature
    same = signature.role == fault.role and signature.nonfinite == fault.nonfinite
    return {
        "before": len(result.original.calls),
        "left": len(result.program.calls),
        "same": bool(same and result.script.shows),
        "queries": result.report.queries,
        "seconds": result.report.seconds,
        "cpu": cpu_seconds() - busy,
        "said": "" if result.report.ended else "time over",
        "calls": [str(node.target) for node in result.program.calls],
    }


class OverError(BaseException):
    """The time is over; no `except Exception` of the framework catches it."""


def minifier(name, seconds, folder):
    from torch._dynamo.debug_utils import backend_accuracy_fails
    from torch._inductor.compile_fx import compile_fx

    fault, candidate, programs = prepared(name)
    program = programs[0]
    best, queries = [], 0

    def compiler(graph, inputs):
        return plain_module(compile_fx(graph, inputs))

    def fails(graph, inputs):
        nonlocal queries
        queries += 1
        answer = backend_accuracy_fails(graph, inputs, compiler, only_fwd=not program.gradients)
        if answer and (not best or size(graph) < size(best[0])):
            best[:] = [graph, list(inputs)]
        return answer

    seen, queries = fails(program.graph, list(program.inputs)), 0
    started, busy = time.monotonic(), cpu_seconds()
    said = "sees no failure"
    if seen:
        said = limited(lambda: minified(program, fails, folder), seconds)
    row = {"seconds": time.monotonic() - started, "cpu": cpu_seconds() - busy, "said": said}
    left, same = judged(fault, candidate, program, best) if best else (None, False)
    return {"before": len(program.calls), "left": left, "same": same, "queries": queries, **row}


def plain_module(function):
    """A module that is called with its arguments one by one, as the predicate does."""
    import torch

    class Compiled(torch.nn.Module):
        def forward(self, *args):
            return function(*args)

    return Compiled()


def minified(program, fails, folder):
    from functorch.compile import minifier as framework

    os.chdir(folder)
    with contextlib.redirect_stderr(io.StringIO()), contextlib.redirect_stdout(io.StringIO()):
        framework(
            program.graph,
            list(program.inputs),
            fails,
            dump_state=lambda *_: None,
            skip_sanity=True,
        )


def limited(action, seconds):
    """Do it until the time is over; how it ended, in words."""

    def over(*_):
        raise OverError

    signal.signal(signal.SIGALRM, over)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        action()
    except OverError:
        return "time over"
    except Exception as error:  # noqa: BLE001  (whatever ends it, it is what a user would see)
        return f"{type(error).__name__}: {error}"[:120]
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    return ""


def size(graph):
    from paritas.shrinking.programs import is_call

    return sum(map(is_call, graph.graph.nodes))


def judged(fault, candidate, program, best):
    """How many calls are left, and whether they show the failure that was asked about."""
    import dataclasses

    from paritas.core.time_limit import TimeLimit
    from paritas.shrinking.programs import Oracle

    inputs = tuple(
        value.detach().requires_grad_(value.requires_grad) if hasattr(value, "detach") else value
        for value in best[1]
    )
    small = dataclasses.replace(program, graph=best[0], inputs=inputs, dynamic={})
    signature = Oracle(candidate, TimeLimit(STARTUP)).ask(small).signature
    same = signature is not None and (signature.role, signature.nonfinite) == (
        fault.role,
        fault.nonfinite,
    )
    return len(small.calls), same


def launcher(name, seconds, folder):
    """The framework's own way from end to end; a fresh process gets the fault at its start."""
    from quality.shrink_faults import FAULTS

    folder = Path(folder)
    planting = (
        f"from quality.faulty_compiler import plant; plant({FAULTS[name].plant!r})\nimport torch\n"
    )
    (folder / "sitecustomize.py").write_text(planting)
    run = (
        "from quality.shrink_faults import FAULTS\nimport torch\n"
        f"fault = FAULTS[{name!r}]\nmodel, inputs = fault.model()\n"
        "torch.set_grad_enabled(fault.training)\n"
        "out = torch.compile(model, dynamic=fault.dynamic)(*inputs)\n"
        "if fault.training: out.sum().backward()\n"
    )
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(folder), str(TESTS)]),
        "TORCHDYNAMO_REPRO_AFTER": "aot",
        "TORCHDYNAMO_REPRO_LEVEL": "4",
        "TORCH_COMPILE_DEBUG_DIR": str(folder),
    }
    timed([sys.executable, "-c", run], 2 * STARTUP, folder, environment)
    scripts = list(folder.rglob("minifier_launcher.py"))
    said = "" if scripts else "sees no failure"
    started, busy = time.monotonic(), cpu_seconds()
    if scripts:
        del environment["TORCHDYNAMO_REPRO_AFTER"], environment["TORCHDYNAMO_REPRO_LEVEL"]
        command = [sys.executable, str(scripts[0])]
        done = timed(command, seconds, scripts[0].parent, environment)
        said = "time over" if done is None else ""
    spent = time.monotonic() - started
    checkpoints = [path.read_text() for path in folder.rglob("checkpoints/*.py")]
    call = re.compile(r"^        \w+ = torch\.ops\.", re.MULTILINE)
    counts = [len(call.findall(text)) for text in checkpoints]
    return {
        "before": None,
        "left": min(counts) if counts else None,
        # It keeps what its own predicate says of the graphs below autograd; we do not judge those.
        "same": bool(counts),
        "queries": len(checkpoints),
        "seconds": spent,
        "cpu": cpu_seconds() - busy,
        "said": said,
    }


def timed(command, seconds, folder, environment):
    """The output of a command, or None if it did not end in time; its children end with it."""
    process = subprocess.Popen(
        command,
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        return process.communicate(timeout=max(seconds, 1.0))[0]
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        return None


def cpu_seconds():
    """Of this process and those it waited for: what a busy machine does not change."""
    spent = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in spent)


# --- the table ------------------------------------------------------------------------------------


def measure(way, name, seconds):
    """One row, from a fresh process with an empty cache."""
    with tempfile.TemporaryDirectory() as folder:
        environment = {
            **os.environ,
            "TORCHINDUCTOR_CACHE_DIR": str(Path(folder) / "inductor"),
            # It runs in a folder of its own, from where this module has to be found all the same.
            "PYTHONPATH": os.pathsep.join([str(TESTS.parent), os.environ.get("PYTHONPATH", "")]),
            "TORCHINDUCTOR_COMPILE_THREADS": "1",
        }
        command = [
            sys.executable,
            "-m",
            "benchmarks.bench_shrink",
            "--child",
            way,
            folder,
            "--seconds",
            str(seconds),
            name,
        ]
        output = timed(command, seconds + 3 * STARTUP, folder, environment)
    lines = (output or "").strip().splitlines()
    if lines and lines[-1].startswith("{"):
        return json.loads(lines[-1])
    said = lines[-1][:120] if lines else "did not end"
    figures = {"queries": 0, "seconds": seconds, "cpu": 0.0}
    return {"left": None, "same": False, "said": said, **figures}


def is_found(row, fault):
    return row["same"] and row["left"] is not None and row["left"] <= fault.most_calls


def figures_of(rows, faults):
    """What the ways came to, over the faults that both were run on."""
    found = {
        way: [n for n, row in rows.items() if way in row and is_found(row[way], faults[n])]
        for way in WAYS
    }
    both = [name for name in found["ours"] if name in found["minifier"]]

    def ratio(figure):
        theirs, here = (sum(rows[n][way][figure] for n in both) for way in ("minifier", "ours"))
        return here / theirs if theirs else None

    note = f"of {len(rows)}; the minifier {len(found['minifier'])}"
    over = f"over the {len(both)} that both found, of the minifier's"
    more = len(found["ours"]) / max(1, len(found["minifier"]))
    return [
        Figure("faults found, over the minifier's", more, "x", 1.0, "higher", note),
        Figure("calls left", ratio("left"), "x", 1.0, note=over),
        Figure("seconds", ratio("seconds"), "x", 1.0, note=over),
        Figure("processor seconds", ratio("cpu"), "x", note=over),
        Figure("compiled programs", ratio("queries"), "x", note=over),
    ]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("names", nargs="*")
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--launcher", type=int, default=2 if WHOLE else 0)
    parser.add_argument("--child", nargs=2, metavar=("WAY", "FOLDER"))
    asked = parser.parse_args()
    if asked.child:
        way, folder = asked.child
        action = {"ours": ours, "minifier": minifier, "launcher": launcher}[way]
        print(json.dumps(action(asked.names[0], asked.seconds, folder)))
        return
    from quality.shrink_faults import FAULTS, STUBBORN

    faults = {**FAULTS, **STUBBORN}
    rows, told = {}, []
    for position, name in enumerate(asked.names or (faults if WHOLE else SHARE)):
        rows[name] = {}
        for way in WAYS if position < asked.launcher else WAYS[:2]:
            row = rows[name][way] = measure(way, name, asked.seconds)
            found = "yes" if is_found(row, faults[name]) else "no"
            figures = [row[key] for key in ("left", "queries", "seconds", "cpu")]
            told.append([name, way, found, *figures, row["said"]])
            print(*told[-1], sep="  ", flush=True)
    columns = ["fault", "way", "found", "left", "queries", "seconds", "processor", "said"]
    table = Table(f"{len(rows)} of {len(faults)} faults", columns, told)
    if not asked.names:
        write(Report("shrink", figures_of(rows, faults), [table], what=__doc__))


if __name__ == "__main__":
    main()

"""Judge published kernels of KernelBench's tasks: one JSON row each, resumable.

    python -m benchmarks.kernels.published OUT.jsonl --cuda-l1 h100.json a100.json
    python -m benchmarks.kernels.published OUT.jsonl --summary

The files are those of CUDA-L1 (deepreinforce-ai/CUDA-L1, optimized_cuda_code/*.json). They are read
and not kept. Kernels of plain torch run on a CPU: those that import nothing but torch and modules
of arithmetic, and do not name CUDA. Their tasks get small sizes. Beside the verdict stand two
answers without paritas: KernelBench's own (five draws, allclose with 1e-2), and what is true in
float64, with other inputs, other weights and in both modes.
"""

from __future__ import annotations

import argparse
import ast
import collections
import copy
import hashlib
import importlib.util
import json
import os
import re
import tempfile
import time
from pathlib import Path

import torch
from benchmarks.kernels.rows import add_row, forked, half, read_rows

from paritas.kernels.forking import shared_nursery
from paritas.kernels.judge import KernelJudge
from paritas.kernels.options import KernelOptions

PLAIN_MODULES = {"torch", "math", "typing", "functools", "collections", "itertools", "numpy"}
ON_DEVICES = re.compile(r"cuda|triton|load_inline|cpp_extension|cupy|jit\.script|torch\.compile")
# What the tasks promise: they have one shape, one dtype, and say nothing of NaN.
PROMISED = frozenset({"shapes", "layouts", "dtypes", "finite", "aliases"})
WRONG = 1e-6


def items(files):
    """Name -> (task, kernel), of the kernels that run on a CPU; each source once."""
    found, known = {}, set()
    for file in files:
        for row in map(json.loads, filter(None, file.read_text().split("\n"))):
            kernel, task = row["custom_code"] or "", row["ref_code"]
            if not kernel or ON_DEVICES.search(kernel) or not is_plain(kernel):
                continue
            digest = hashlib.sha256(ast.unparse(ast.parse(kernel)).encode()).digest()
            if digest not in known:
                known.add(digest)
                found[f"{file.stem}/{row['level_id']}_{row['task_id']}"] = task, kernel
    return dict(sorted(found.items(), key=lambda one: hashlib.sha256(one[0].encode()).digest()))


def is_plain(source):
    """Whether a file imports nothing that could reach beyond torch."""
    try:
        nodes = list(ast.walk(ast.parse(source)))
    except SyntaxError:
        return False
    names = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    names += [node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)]
    calls = {node.id for node in nodes if isinstance(node, ast.Name)}
    plain = all(name.partition(".")[0] in PLAIN_MODULES for name in names)
    return plain and not calls & {"exec", "eval", "open", "__import__", "compile"}


def shrunk(source, largest=16):
    """The same file with smaller numbers at its top: sizes, which inputs are made from."""

    def smaller(value):
        return (
            value
            if value <= largest
            else next(n for n in (16, 12, 13) if value % n == 0 or n == 13)
        )

    class Smaller(ast.NodeTransformer):
        def visit_Constant(self, node):
            is_size = isinstance(node.value, int) and not isinstance(node.value, bool)
            return ast.Constant(smaller(node.value)) if is_size else node

    tree = ast.parse(source)
    for node in tree.body:
        if isinstance(node, ast.Assign):
            node.value = Smaller().visit(node.value)
    return ast.unparse(ast.fix_missing_locations(tree))


# --- Without paritas ------------------------------------------------------------------------------


def loaded(path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def made(home, name, init, seed=0):
    torch.manual_seed(seed)
    return getattr(home, name)(*copy.deepcopy(init))


def distance(left, right):
    """The relative L2 distance of two results; infinity if they cannot be compared."""
    if isinstance(left, list | tuple):
        pairs = zip(left, right, strict=True)
        return max((distance(a, b) for a, b in pairs), default=0.0)
    if left.shape != right.shape or left.dtype is not right.dtype:
        return float("inf")
    left, right = left.detach().double(), right.detach().double()
    if not torch.equal(left.isfinite(), right.isfinite()):
        return float("inf")
    here = left.isfinite()
    scale = left[here].norm().item()
    return (
        (left - right)[here].norm().item() / scale if scale else (left - right)[here].norm().item()
    )


def asked_of_both(task, kernel):
    """KernelBench's own answer, and the distances in float64, by what was changed."""
    init = task.get_init_inputs() if hasattr(task, "get_init_inputs") else []
    passes, shown = True, {}
    with torch.no_grad():
        for seed in range(5):
            ours, theirs = made(kernel, "ModelNew", init, 42), made(task, "Model", init, 42)
            torch.manual_seed(seed)
            inputs = task.get_inputs()
            expected, found = theirs(*copy.deepcopy(inputs)), ours(*copy.deepcopy(inputs))
            passes &= expected.shape == found.shape and torch.allclose(expected, found, 1e-2, 1e-2)
        for change in ("nothing", "weights", "evaluation"):
            ours, theirs = made(kernel, "ModelNew", init, 42), made(task, "Model", init, 42)
            ours, theirs = ours.double(), theirs.double()
            if change == "evaluation":
                ours.eval()
                theirs.eval()
            own = dict(ours.named_parameters()) | dict(ours.named_buffers())
            state = dict(theirs.named_parameters()) | dict(theirs.named_buffers())
            if change == "weights":
                missing = [name for name in state if name not in own]
                if missing or not state:
                    shown[change] = f"no counterpart of {missing[:3]}" if missing else "none"
                    continue
                torch.manual_seed(7)
                for name, value in state.items():
                    if value.is_floating_point():
                        new = value * (0.5 + torch.rand_like(value))
                        value.copy_(new)
                        own[name].copy_(new)
            torch.manual_seed(11)
            inputs = [
                x.double() if torch.is_tensor(x) and x.is_floating_point() else x
                for x in task.get_inputs()
            ]
            expected = theirs(*copy.deepcopy(inputs))
            shown[change] = distance(expected, ours(*copy.deepcopy(inputs)))
    return {"kernelbench": bool(passes), "float64": shown}


# --- With paritas ---------------------------------------------------------------------------------


def judged(task_source, kernel_source, asked):
    with tempfile.TemporaryDirectory() as folder:
        task, kernel = Path(folder, "the_task.py"), Path(folder, "the_kernel.py")
        task.write_text(shrunk(task_source))
        kernel.write_text(shrunk(kernel_source))
        try:
            without = asked_of_both(loaded(task), loaded(kernel))
        except Exception as error:  # noqa: BLE001  (the row says so)
            without = {"raised": f"{type(error).__name__}: {error}"[:200]}
        options = KernelOptions(
            cases=asked.cases, seconds=asked.seconds / 2, fixed=PROMISED, memory=0
        )
        with KernelJudge(task, options) as judge:
            report = judge.judge(kernel)
    failing = [row for row in report.rows if not row.status.passes()]
    return {
        "status": str(report.status),
        "cases": len(report.rows),
        "accepts": list(report.rating.accepts),
        "given_accepts": list(report.rating.given_accepts),
        "limits": sorted({str(row.family) for row in failing if row.is_limit}),
        "failing": [described(row) for row in failing if not row.is_limit][:4],
        **without,
    }


def described(row):
    worst = max(row.verdict.findings, key=lambda one: one.status.gravity)
    return [row.case, str(row.status), worst.path, worst.reason[:200]]


def run(asked):
    done = {row["item"] for row in read_rows(asked.out)}
    assert shared_nursery().is_usable, "the process that forks candidates cannot fork"
    until = time.monotonic() + asked.minutes * 60
    for name, (task, kernel) in items(asked.cuda_l1).items():
        if name in done or time.monotonic() > until:
            continue
        row = forked(lambda task=task, kernel=kernel: judged(task, kernel, asked), asked.seconds)
        add_row(asked.out, {"item": name, "half": half(name), **row})
    os._exit(0)


def is_wrong(row):
    """Whether float64 shows that a kernel computes something else."""
    found = row.get("float64", {})
    return any(isinstance(one, float) and not one <= WRONG for one in found.values())


def summarize(asked):
    rows = read_rows(asked.out)
    for name in ("tuned", "measured"):
        some = [row for row in rows if row["half"] == name and "float64" in row]
        wrong = [row for row in some if is_wrong(row)]
        right = [row for row in some if not is_wrong(row)]
        print(name, len([row for row in rows if row["half"] == name]), "kernels,", len(some), "ran")
        for label, group in (("wrong", wrong), ("right", right)):
            counts = collections.Counter(row["status"] for row in group)
            print(
                f"  {label} in float64: {len(group)}",
                dict(counts),
                "allclose passes",
                sum(row["kernelbench"] for row in group),
            )
    for row in rows:
        if is_wrong(row) != (row["status"] in {"different", "degraded"}) or "float64" not in row:
            print(json.dumps(row))


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--cuda-l1", nargs="+", type=Path, default=[])
    parser.add_argument("--cases", type=int, default=30)
    parser.add_argument("--seconds", type=int, default=300, help="time limit of one kernel")
    parser.add_argument("--minutes", type=float, default=600.0, help="begin no kernel after this")
    parser.add_argument("--summary", action="store_true")
    asked = parser.parse_args()
    summarize(asked) if asked.summary else run(asked)


if __name__ == "__main__":
    main()

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


def items(files, levels):
    """Name -> (task, kernel), of the kernels that run on a CPU; each source once."""
    found, known = {}, set()
    for file in files:
        for row in map(json.loads, filter(None, file.read_text().split("\n"))):
            kernel, task = row["custom_code"] or "", row["ref_code"]
            if int(row["level_id"]) not in levels:
                continue
            if "class ModelNew" not in kernel or ON_DEVICES.search(kernel) or not is_plain(kernel):
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
    fitting = (largest, largest * 3 // 4, largest * 13 // 16)

    def smaller(value):
        if value <= largest:
            return value
        return next((n for n in fitting if value % n == 0), fitting[-1])

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
    if not torch.is_tensor(right) or left.shape != right.shape:
        return float("inf")
    left, right = left.detach().double(), right.detach().double()
    if not torch.equal(left.isfinite(), right.isfinite()):
        return float("inf")
    here = left.isfinite()
    scale = left[here].norm().item()
    return (left - right)[here].norm().item() / (scale or 1.0)


def state_of(module):
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def pairs_of(theirs, ours):
    """The names of parameters that are each other's, by name or by value; None if not all are."""
    own, pairs = state_of(ours), []
    for name, value in state_of(theirs).items():
        fits = [name] if name in own and own[name].shape == value.shape else []
        fits = fits or [other for other, one in own.items() if is_same(value, one)]
        if not fits:
            return None
        pairs.append((name, fits[0]))
    return pairs


def is_same(value, own):
    if own.numel() != value.numel():
        return False
    is_transpose = value.dim() == 2 and own.shape == value.T.shape and torch.equal(own, value.T)
    return is_transpose or torch.equal(own.reshape(-1), value.reshape(-1))


def set_others(theirs, ours, pairs):
    torch.manual_seed(7)
    state, own = state_of(theirs), state_of(ours)
    for name, other in pairs:
        value, fit = state[name], own[other]
        if value.is_floating_point():
            value.mul_(0.5 + torch.rand_like(value))
            is_transpose = fit.shape != value.shape and fit.shape == value.T.shape
            fit.copy_(value.T if is_transpose else value.reshape(fit.shape))


def changed_by(call, args):
    """Whether a call changes its inputs, or the result of the call before."""
    first = call(*args)
    kept = first.clone() if torch.is_tensor(first) else None
    given = copy.deepcopy(args)
    call(*args)
    other = [x + 1 if torch.is_tensor(x) and x.is_floating_point() else x for x in given]
    call(*other)
    writes = any(
        torch.is_tensor(a) and not torch.equal(a, b) for a, b in zip(args, given, strict=True)
    )
    return writes, kept is not None and not torch.equal(first, kept)


def asked_of_both(task, kernel):
    """KernelBench's own answer, and what is found in float64, by what was changed."""
    init = task.get_init_inputs() if hasattr(task, "get_init_inputs") else []
    passes, shown = True, {}
    with torch.no_grad():
        for seed in range(5):
            ours, theirs = made(kernel, "ModelNew", init, 42), made(task, "Model", init, 42)
            torch.manual_seed(seed)
            inputs = task.get_inputs()
            expected, found = theirs(*copy.deepcopy(inputs)), ours(*copy.deepcopy(inputs))
            passes &= torch.is_tensor(found) and expected.shape == found.shape
            passes = passes and torch.allclose(expected, found, 1e-2, 1e-2)
        for change in ("nothing", "weights", "evaluation"):
            try:
                shown[change] = distance_after(change, task, kernel, init)
            except Exception as error:  # noqa: BLE001  (the row says so)
                shown[change] = f"raises {type(error).__name__}: {error}"[:120]
        torch.manual_seed(11)
        try:
            reference = changed_by(made(task, "Model", init, 42), task.get_inputs())
            own = changed_by(made(kernel, "ModelNew", init, 42), task.get_inputs())
            shown["breaches"] = [
                what
                for what, ours, theirs in zip(("inputs", "results"), own, reference, strict=True)
                if ours and not theirs
            ]
        except Exception as error:  # noqa: BLE001  (the row says so)
            shown["breaches"] = f"raises {type(error).__name__}: {error}"[:120]
    return {"kernelbench": bool(passes), "float64": shown}


def distance_after(change, task, kernel, init):
    ours, theirs = made(kernel, "ModelNew", init, 42), made(task, "Model", init, 42)
    pairs = pairs_of(theirs, ours)
    ours, theirs = ours.double(), theirs.double()
    if change == "evaluation":
        ours.eval()
        theirs.eval()
    torch.manual_seed(11)
    inputs = [
        x.double() if torch.is_tensor(x) and x.is_floating_point() else x for x in task.get_inputs()
    ]
    if change == "weights":
        if pairs is None:
            return "folded: some parameters have no counterpart"
        if not pairs:
            return 0.0
        theirs(*copy.deepcopy(inputs))
        ours(*copy.deepcopy(inputs))
        set_others(theirs, ours, pairs)
    expected = theirs(*copy.deepcopy(inputs))
    return distance(expected, ours(*copy.deepcopy(inputs)))


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
    for name, (task, kernel) in items(asked.cuda_l1, asked.levels).items():
        if name in done or time.monotonic() > until or (asked.only and name not in asked.only):
            continue
        row = forked(lambda task=task, kernel=kernel: judged(task, kernel, asked), asked.seconds)
        add_row(asked.out, {"item": name, "half": half(name), **row})
    os._exit(0)


def is_wrong(row):
    """Whether a kernel computes something else, keeps old weights, or writes where it must not."""
    found = row.get("float64", {})
    values = [one for one in found.values() if isinstance(one, float)]
    folded = str(found.get("weights", "")).startswith("folded")
    breaches = isinstance(found.get("breaches"), list) and found["breaches"]
    return any(not one <= WRONG for one in values) or folded or bool(breaches)


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
    parser.add_argument("--only", nargs="+", help="names of items, as in the rows")
    parser.add_argument("--levels", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--cases", type=int, default=30)
    parser.add_argument("--seconds", type=int, default=300, help="time limit of one kernel")
    parser.add_argument("--minutes", type=float, default=600.0, help="begin no kernel after this")
    parser.add_argument("--summary", action="store_true")
    asked = parser.parse_args()
    summarize(asked) if asked.summary else run(asked)


if __name__ == "__main__":
    main()

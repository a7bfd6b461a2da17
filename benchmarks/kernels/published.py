"""Judge published kernels of KernelBench's tasks: one JSON row each, resumable.

    python -m benchmarks.kernels.published OUT.jsonl --cuda-l1 h100.json a100.json
    python -m benchmarks.kernels.published OUT.jsonl --kernels results --tasks KernelBench
    python -m benchmarks.kernels.published OUT.jsonl --summary

The sets are read and not kept. CUDA-L1 (deepreinforce-ai/CUDA-L1, optimized_cuda_code/*.json): the
kernels of plain torch run on a CPU, those that import nothing but torch and modules of arithmetic,
and do not name CUDA. A folder of kernels has them as levelN/TASK/.../KERNEL.py (Alisehen/LLMKernel)
or level_N_problem_M_sample_K_kernel.py (KernelBench's own runs), and the tasks as levelN/TASK.py.
On a CPU, those of plain torch run; `--device cuda --jobs 16` is for those in Triton. Tasks get
small sizes. Items come in the order of a hash of their names. Beside the verdict stand answers
without paritas (`answers.py`): KernelBench's own, and what is true.
"""

from __future__ import annotations

import argparse
import ast
import collections
import hashlib
import json
import os
import re
import tempfile
import time
from pathlib import Path

import torch
from benchmarks.kernels.answers import asked_of_both, is_wrong, loaded, made
from benchmarks.kernels.rows import add_row, forked, half, share_out, usable_server
from benchmarks.lab.journals import read_rows

from paritas.kernels import PROMISES, KernelOptions
from paritas.kernels.judge import KernelJudge
from paritas.kernels.rows import CaseFamily

PLAIN_MODULES = {"torch", "math", "typing", "functools", "collections", "itertools", "numpy"}
ON_DEVICES = re.compile(r"cuda|triton|load_inline|cpp_extension|cupy|jit\.script|torch\.compile")
# What the tasks promise: they have one shape, one dtype, and say nothing of NaN.
PROMISED = frozenset({"shapes", "layouts", "dtypes", "finite", "aliases"})
# Cases that break a promise show limits only: on a device, each may cost a build.
UNPROMISED = frozenset(CaseFamily) - {PROMISES[name] for name in PROMISED}
PLAIN_SIZE, SIZES, MOST_ELEMENTS = 16, (256, 64, 32, 16), 1 << 17


# --- The sets -------------------------------------------------------------------------------------


def items(asked):
    """Name -> (task, kernel); each source once, in the order of a hash, from one place on."""
    found, known = {}, set()
    for name, task, kernel in (*of_cuda_l1(asked), *of_folders(asked)):
        try:
            digest = hashlib.sha256(ast.unparse(ast.parse(kernel)).encode()).digest()
        except SyntaxError:
            continue
        wanted = "class ModelNew" in kernel and runs_on(asked.device, kernel)
        if wanted and digest not in known:
            known.add(digest)
            found[name] = task, kernel
    names = sorted(found, key=lambda one: hashlib.sha256(one.encode()).digest())
    return {name: found[name] for name in names[asked.start :] + names[: asked.start]}


def of_cuda_l1(asked):
    for file in asked.cuda_l1:
        for row in map(json.loads, filter(None, file.read_text().split("\n"))):
            if int(row["level_id"]) in asked.levels:
                name = f"{file.stem}/{row['level_id']}_{row['task_id']}"
                yield name, row["ref_code"], row["custom_code"] or ""


def of_folders(asked):
    for folder in asked.kernels:
        for file in sorted(folder.rglob("*.py")):
            name = str(file.relative_to(folder).with_suffix(""))
            found = re.search(r"level_?(\d+)(?:_problem_|/)(\d+)_", name)
            if found and int(found[1]) in asked.levels:
                for task in asked.tasks.glob(f"level{found[1]}/{found[2]}_*.py"):
                    yield name, task.read_text(), file.read_text()


def runs_on(device, source):
    """On a CPU, kernels of plain torch run; on a device, those in Triton are of interest."""
    if device == "cpu" and not os.environ.get("TRITON_INTERPRET"):
        return is_plain(source) and not ON_DEVICES.search(source)
    return "import triton" in source


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


def small_task(source):
    """The task at the largest of some sizes at which neither inputs nor outputs are large."""
    for largest in SIZES:
        smaller = shrunk(source, largest)
        with tempfile.TemporaryDirectory() as folder, torch.device("meta"), torch.no_grad():
            file = Path(folder, "sized_task.py")
            file.write_text(smaller)
            try:
                task = loaded(file)
                inputs = task.get_inputs()
                outputs = made(task, "Model", task.get_init_inputs(), device="meta")(*inputs)
            except Exception:  # noqa: BLE001, S112  (it does not run at this size)
                continue
        results = outputs if isinstance(outputs, list | tuple) else [outputs]
        if sum(one.numel() for one in (*inputs, *results) if torch.is_tensor(one)) <= MOST_ELEMENTS:
            return smaller
    return shrunk(source, PLAIN_SIZE)


# --- One kernel -----------------------------------------------------------------------------------


def judged(task, kernel, asked):
    """The row of a kernel: what is true is found in a process of its own, which may break."""
    with tempfile.TemporaryDirectory() as folder:
        sides = Path(folder, "the_task.py"), Path(folder, "the_kernel.py")
        plain = is_plain(kernel)
        sides[0].write_text(shrunk(task) if plain else small_task(task))
        sides[1].write_text(shrunk(kernel) if plain else kernel)
        without = forked(lambda: true_about(*sides, asked), asked.each)
        if without.get("status"):
            without = {"raised": str(without)[-400:]}
        return {**verdict_on(*sides, asked), **without}


def true_about(task, kernel, asked):
    allow_tf32(asked)
    return asked_of_both(
        loaded(task),
        loaded(kernel),
        plain=is_plain(kernel.read_text()),
        device=asked.device,
        source=task.read_text(),
    )


def allow_tf32(asked):
    """Kernels in Triton round the factors of their products to TF32, unless told not to."""
    if asked.device != "cpu":
        torch.backends.cuda.matmul.allow_tf32 = True


def verdict_on(task, kernel, asked):
    allow_tf32(asked)
    options = KernelOptions(
        cases=asked.cases,
        families=None if asked.device == "cpu" else UNPROMISED,
        seconds=asked.each / 2,
        call_seconds=max(20.0, asked.each / 2),  # a first call builds and tunes
        fixed=PROMISED,
        memory=0,
        device=asked.device,
        preload=asked.preload,
        stop_early=asked.device != "cpu",
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
        # A kernel that fails in these families only would pass without them.
        "families": sorted({str(row.family) for row in failing if not row.is_limit}),
        "callers": {
            row.case: str(row.status) for row in report.rows if row.family is CaseFamily.CALLERS
        },
        "notes": [note[:200] for note in report.notes],
    }


def described(row):
    worst = max(row.verdict.findings, key=lambda one: one.status.gravity)
    return [row.case, str(row.status), worst.path, worst.reason[:200]]


# --- All of them ----------------------------------------------------------------------------------


def run(asked):
    until = time.monotonic() + asked.minutes * 60
    done = {row["item"] for row in read_rows(asked.out)}
    left = [
        (name, *sides)
        for name, sides in items(asked).items()
        if name not in done and (not asked.only or name in asked.only)
    ]
    print(f"{len(done)} rows, {len(left)} to go", flush=True)

    def work(taken):
        server = usable_server(asked.preload)
        for name, task, kernel in taken:
            limit = int(min(2 * asked.each, until - time.monotonic()))
            if limit < asked.least:
                break
            row = forked(lambda task=task, kernel=kernel: judged(task, kernel, asked), limit)
            if row["status"] == "no result" and limit < 2 * asked.each:
                break  # it had less time than the others
            add_row(asked.out, {"item": name, "half": half(name), **row})
        server.stop()

    share_out(left, asked.jobs, work)


def summarize(asked):
    rows = read_rows(asked.out)
    for name in ("tuned", "measured"):
        all_ = [row for row in rows if row["half"] == name]
        ran = [row for row in all_ if "truth" in row and has_answer(row)]
        print(name, len(all_), "kernels,", len(ran), "run on the inputs of the task")
        for label in ("wrong", "right"):
            group = [row for row in ran if is_wrong(row) == (label == "wrong")]
            counts = dict(collections.Counter(row["status"] for row in group))
            passes = {
                key: sum(row[key] for row in group) for key in ("kernelbench", "kernelbench_1e-4")
            }
            print(f"  {label}: {len(group)}", counts, "pass by allclose:", passes)
    for row in rows:
        fails = row["status"] in {"different", "degraded"}
        if "truth" not in row or (has_answer(row) and is_wrong(row) != fails):
            print(json.dumps(row))


def has_answer(row):
    """Whether kernel and task run on the inputs of the task, and the task draws no numbers."""
    return not isinstance(row["truth"].get("nothing"), str)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--cuda-l1", nargs="+", type=Path, default=[])
    parser.add_argument("--kernels", nargs="+", type=Path, default=[], help="folders of kernels")
    parser.add_argument("--tasks", type=Path, help="folder with levelN/TASK.py")
    parser.add_argument("--only", nargs="+", help="names of items, as in the rows")
    parser.add_argument("--levels", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--start", type=int, default=0, help="begin with this item, and go round")
    parser.add_argument("--cases", type=int, default=30)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--preload", nargs="+", default=(), help="modules, such as triton")
    parser.add_argument("--jobs", type=int, default=1, help="kernels at a time")
    parser.add_argument(
        "--each", type=int, default=150, help="time limit of the verdict, and of the truth"
    )
    parser.add_argument("--least", type=int, default=10, help="begin none with less time left")
    parser.add_argument("--minutes", type=float, default=600.0, help="all of them end by then")
    parser.add_argument("--summary", action="store_true")
    asked = parser.parse_args()
    asked.preload = tuple(asked.preload)
    summarize(asked) if asked.summary else run(asked)


if __name__ == "__main__":
    main()

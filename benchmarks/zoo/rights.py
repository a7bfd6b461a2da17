"""Right programs of zoo models against the limits of the error as a whole; one JSON row each.

    python -m benchmarks.zoo.rights OUT.jsonl --lists transformers timm --half measured --models 10
    python -m benchmarks.zoo.rights OUT.jsonl --summary

A model is traced, forward and backward, and computed in other right ways: Inductor, Inductor's
decompositions, sums and products in reverse order, in parts, and one term after the other. Each
row has the error over eager's own, where that is largest (as `planted.py` measures faults), and the
two figures of `WholeNoise` as shares of their limits, without what decisions may add.
"""

from __future__ import annotations

import argparse
import collections
import copy
import json
import math
import time
import traceback
from pathlib import Path

import torch
from benchmarks.zoo import truth
from benchmarks.zoo.child import build
from benchmarks.zoo.planted import _digest
from benchmarks.zoo.run import _LISTS, half, import_once, targets
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: TID251  (other kernels)

aten = torch.ops.aten
_DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
_MOST_PARAMETERS, _RUNS = 6_000_000, 12


# --- Other right ways to compute a graph ----------------------------------------------------------


class _Reversed(TorchDispatchMode):
    """Products and sums in reverse order."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func in {aten.mm.default, aten.bmm.default}:
            return func(args[0].flip(-1).contiguous(), args[1].flip(-2).contiguous())
        if func is aten.addmm.default:
            left, right = args[1].flip(1).contiguous(), args[2].flip(0).contiguous()
            return func(args[0], left, right, *args[3:], **kwargs)
        if func in {aten.sum.dim_IntList, aten.mean.dim} and args[1]:
            return func(args[0].flip(args[1]), *args[1:], **kwargs)
        return func(*args, **kwargs)


class _InParts(TorchDispatchMode):
    """Products of `parts` parts in float32 (0: term by term), sums term by term."""

    parts = 4

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        narrow = args and isinstance(args[0], torch.Tensor) and args[0].dtype in _DTYPES.values()
        if not narrow:
            return func(*args, **kwargs)
        if func in {aten.mm.default, aten.bmm.default}:
            return self._product(*args).to(args[0].dtype)
        if func is aten.addmm.default and not kwargs:
            return (self._product(*args[1:]) + args[0].float()).to(args[1].dtype)
        if func is aten.sum.dim_IntList and args[1]:
            dims = [dim % args[0].dim() for dim in args[1]]
            rest = [dim for dim in range(args[0].dim()) if dim not in dims]
            shape = [1 if dim in dims else size for dim, size in enumerate(args[0].shape)]
            rows = args[0].float().permute(*dims, *rest).flatten(0, len(dims) - 1)
            total = rows[0].clone()
            for row in rows[1:]:
                total = total + row
            is_kept = len(args) > 2 and args[2]
            total = total.reshape(shape) if is_kept else total
            return total.to(kwargs.get("dtype") or args[0].dtype)
        return func(*args, **kwargs)

    def _product(self, left, right):
        terms = left.shape[-1]
        parts = min(self.parts or terms, terms)
        pairs = zip(left.float().chunk(parts, -1), right.float().chunk(parts, -2), strict=True)
        first, *others = (a @ b for a, b in pairs)
        for other in others:
            first = first + other
        return first


class _TermByTerm(_InParts):
    parts = 0


class _Decomposed(TorchDispatchMode):
    """The operators that Inductor makes of these, run eagerly."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        from torch._inductor.decomposition import select_decomp_table  # noqa: TID251

        rule = select_decomp_table().get(func)
        found = NotImplemented if rule is None else rule(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {})) if found is NotImplemented else found


def _under(mode):
    def make(program):
        def run(*given):
            with mode():
                return program.module(*given)

        return run

    return make


def _by_inductor(program):
    from torch._inductor import compile as compile_graph  # noqa: TID251

    graph = copy.deepcopy(program.module.graph)
    for node in reversed(graph.nodes):
        if node.target is aten._local_scalar_dense.default and not node.users:  # noqa: SLF001
            graph.erase_node(node)
    module = torch.fx.GraphModule(program.module, graph)
    return compile_graph(module, program.fresh_inputs())


WAYS = {
    "reversed": _under(_Reversed), "in parts": _under(_InParts),
    "term by term": _under(_TermByTerm), "decomposed": _under(_Decomposed),
    "inductor": _by_inductor,
}  # fmt: skip


# --- Their errors ---------------------------------------------------------------------------------


def study(job):
    """Yield a row for every way."""
    from paritas import Inputs
    from paritas.mutants.planting import program_noise
    from paritas.mutants.power import _call_positionally
    from paritas.mutants.programs import trace_program
    from paritas.numerics.criterion import WholeNoise, rms, unit_roundoff, whole_error

    dtype = _DTYPES[job["dtype"]]
    model, args, kwargs = build(job["target"], train=False, seed=0)
    if sum(one.numel() for one in model.parameters()) > _MOST_PARAMETERS:
        yield {**job, "stage": "too large"}
        return
    model, args, kwargs = model.eval().to(dtype), truth.move(args, dtype), truth.move(kwargs, dtype)
    torch.manual_seed(0)
    call = _call_positionally(model, Inputs(args, kwargs))
    program = trace_program(call, [*args, *kwargs.values()], gradients=True, seed=0)
    measured = program_noise(program)
    evidence, native = measured.evidence, measured.native.outputs
    floats = {
        item: value for item, value in measured.base.outputs.items() if item in measured.items
    }
    runs = [evidence.perturbed(evidence.unit, seed, evidence.everything) for seed in range(_RUNS)]
    limits = {
        item: WholeNoise(
            own=whole_error(native[item], true),
            rounding=max(evidence.unit, unit_roundoff(native[item].dtype)),
            typical=rms(true),
            numel=true.numel(),
            runs=tuple(whole_error(run[0].outputs[item], true) for run in runs),
        )
        for item, true in floats.items()
        if whole_error(native[item], true) is not None
    }
    for way in job["ways"]:
        try:
            with torch.no_grad():
                found = dict(zip(native, WAYS[way](program)(*program.fresh_inputs()), strict=True))
        except Exception as error:  # noqa: BLE001 - a way that cannot be gone is a row
            yield {**job, "way": way, "stage": f"{type(error).__name__}: {error!s:.200}"}
            continue
        row = {**job, "way": way, "stage": "done", "ratio": 0.0, "size": 0.0, "factor": 0.0}
        for item, noise in limits.items():
            error = whole_error(found[item], floats[item])
            # Of what has vanished only rounding is left; the judge allows four times as much.
            if error is None or noise.typical < 1e-3 * noise.own.size:
                continue
            least = torch.finfo(dtype).eps * noise.typical
            excess = noise.excess(error, last=True)
            row["ratio"] = max(row["ratio"], error.size / max(noise.own.size, least, 1e-300))
            row["size"] = max(row["size"], excess.size)
            row["factor"] = max(row["factor"], excess.factor)
        yield row


def show(rows):
    groups = collections.defaultdict(list)
    for row in rows:
        if row["stage"] == "done":
            groups[row["half"], row["dtype"], row["way"]].append(row)
    for name, own in sorted(groups.items()):
        size, factor = (max(row[one] for row in own) for one in ("size", "factor"))
        above = sum(row["ratio"] > truth.NO_FAULT for row in own)
        print(
            *name, f"{len(own)} rows: at most {size:.2f} and {factor:.2f} of the limits;",
            f"{above} above {truth.NO_FAULT:g} times eager's error,",
            f"at most {max(row['ratio'] for row in own):.2f}",
        )  # fmt: skip


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--lists", nargs="+", default=list(_LISTS), choices=_LISTS)
    parser.add_argument("--targets", nargs="+", default=[], help="these models, not the lists")
    parser.add_argument("--half", choices=["tuned", "measured"])
    parser.add_argument("--models", type=int, default=10, help="of each list")
    parser.add_argument("--dtypes", nargs="+", default=list(_DTYPES), choices=_DTYPES)
    parser.add_argument("--ways", nargs="+", default=list(WAYS), choices=WAYS)
    parser.add_argument("--minutes", type=float, default=math.inf)
    parser.add_argument("--summary", action="store_true")
    asked = parser.parse_args()
    rows = []
    if asked.out.exists():
        rows = [json.loads(line) for line in asked.out.read_text().split("\n") if line]
    if asked.summary:
        show(rows)
        return
    names = list(asked.targets)
    for one in asked.lists if not names else ():
        order = sorted(targets(one), key=_digest)
        names += [name for name in order if asked.half in {None, half(name)}][: asked.models]
    known = {(row["target"], row["dtype"]) for row in rows}
    torch.set_num_threads(1)
    import_once()
    deadline = time.monotonic() + 60 * asked.minutes
    for name in names:
        for dtype in asked.dtypes:
            if (name, dtype) in known or time.monotonic() > deadline:
                continue
            job = {"target": name, "half": half(name), "dtype": dtype, "ways": asked.ways}
            try:
                made = list(study(job))
            except Exception:  # noqa: BLE001 - a crash is a row
                made = [{**job, "stage": traceback.format_exc()[-500:]}]
            with asked.out.open("a") as out:
                out.writelines(json.dumps(row) + "\n" for row in made)


if __name__ == "__main__":
    main()

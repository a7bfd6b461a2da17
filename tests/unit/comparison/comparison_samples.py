"""Comparisons as they come out of real dumps, made up: for the tests of everything that shows one.

A transformer with three calls fused per layer. Figures come from a seeded generator, so that two
calls give equal comparisons.
"""

from __future__ import annotations

import math
import random

import msgspec

from paritas.comparison.rows import (
    Basis,
    Comparison,
    ComparisonRow,
    Divergence,
    DumpFacts,
    SideFacts,
)
from paritas.core.results.details import Detail, HeatMap, WorstElement
from paritas.core.results.findings import Aspect, Coverage, Score, Status
from paritas.core.results.items import Extremes, Metrics, PairFigures

NOISE = 2.0e-4  # what bfloat16 does to a value of this model, relative to its norm
FAULT = 0.031
SHAPE = (2, 16, 256)
# Per layer: name within it, operator, fused nodes, calls it reads by name ("": the layer's input).
CALLS: tuple[tuple[str, str, tuple[str, ...], tuple[str, ...]], ...] = (
    ("attn_norm", "aten.native_layer_norm.default", (), ("",)),
    ("attn.q", "aten.addmm.default", (), ("attn_norm",)),
    ("attn.k", "aten.addmm.default", (), ("attn_norm",)),
    ("attn.v", "aten.addmm.default", (), ("attn_norm",)),
    ("attn.sdpa", "aten.scaled_dot_product_attention", (), ("attn.q", "attn.k", "attn.v")),
    ("attn.out", "aten.addmm.default", (), ("attn.sdpa",)),
    ("mlp_norm", "aten.native_layer_norm.default", ("add", "native_layer_norm"), ("attn.out", "")),
    ("mlp.up", "aten.addmm.default", (), ("mlp_norm",)),
    ("mlp.act", "aten.gelu.default", ("mul", "erf", "add", "mul_1"), ("mlp.up",)),
    ("mlp.down", "aten.addmm.default", (), ("mlp.act",)),
    ("residual", "aten.add.Tensor", (), ("mlp.down", "mlp_norm")),
)


def dump(path: str, *, kind: str = "paritas", records: int = 0, **facts) -> DumpFacts:
    return DumpFacts(
        path=path,
        kind=kind,
        records=records,
        **{
            "ranks": (0,),
            "steps": (0,),
            "program": "train.py",
            "torch": "2.13.0",
            "sources": ("fx",),
            "fusion": "on",
            **facts,
        },
    )


def metrics(rel_l2: float, numel: int = math.prod(SHAPE), **changes) -> Metrics:
    worst = 9 * rel_l2
    return Metrics(
        **{
            "numel": numel,
            "mismatched": numel * 9 // 10,
            "max_abs": worst,
            "max_abs_index": (1, 3, 17),
            "max_abs_reference": 1.25,
            "max_abs_candidate": 1.25 + worst,
            "max_rel": 40 * rel_l2,
            "mean_abs": 0.7 * rel_l2,
            "rmse": rel_l2,
            "rel_l2": rel_l2,
            "cosine": 1 - rel_l2**2 / 2,
            "pcc": 1 - rel_l2**2 / 2,
            "max_ulp": max(1.0, rel_l2 * 2**12 // 1),
            **dict.fromkeys(
                [
                    f"{count}_{side}"
                    for count in ("nan", "posinf", "neginf", "zero")
                    for side in ("reference", "candidate")
                ],
                0,
            ),
            "nonfinite_mismatches": 0,
            **changes,
        }
    )


def figures(rel_l2: float, **changes) -> PairFigures:
    ends = Extremes(minimum=-3.9, maximum=4.1, mean=0.011)
    if rel_l2 == 0:
        return PairFigures(reference=ends, candidate=ends, identical=True)
    moved = Extremes(minimum=-3.9, maximum=4.1 + rel_l2, mean=0.011 + rel_l2 / 8)
    return PairFigures(
        reference=ends,
        candidate=moved,
        metrics=metrics(rel_l2, **changes),
        mean_rel=3 * rel_l2,
        kl_divergence=rel_l2**2,
    )


def score(times: float) -> Score:
    """The worst element so many times over what is allowed."""
    return Score(
        max_z=12 * times,
        max_limit=12.0,
        rms_z=2.5 * times * 0.7,
        rms_limit=2.5,
        index=(1, 3, 17),
        noise="bfloat16",
    )


def detail(seed: int = 0, *, down: int = 16, across: int = 32) -> Detail:
    """Mismatches in the columns from 192 on, the worst of them in one row."""
    rng = random.Random(seed)
    cells, counts = [], []
    for row in range(down):
        bad = [row == 3 or column >= 3 * across // 4 for column in range(across)]
        cells.append(tuple(rng.uniform(0.3, 1.0) if hit else 0.0 for hit in bad))
        counts.append(tuple(rng.randint(1, 16) if hit else 0 for hit in bad))
    return Detail(
        heat=HeatMap(axes=(1, 2), extents=(16, 256), cells=tuple(cells), counts=tuple(counts)),
        ulps=((-1, 5200), (0, 700), (1, 600), (2, 420), (5, 300), (6, 510), (7, 390), (8, 72)),
        worst=tuple(
            WorstElement(index=(1, 3, 17 + k), my=1.53 - k / 50, golden=1.25, ulps=320.0 - 9 * k)
            for k in range(8)
        ),
        region=((0, 2), (3, 16), (17, 256)),
    )


def row(
    index: int, layer: str, call: tuple[str, str, tuple[str, ...]], status: Status, **facts
) -> ComparisonRow:
    """The output of one call of a layer."""
    local, op, fused = call
    module = f"{layer}.{local}"
    file = "attention" if "attn" in local else "mlp"
    short = f"{layer.replace('.', '_')}_{local.replace('.', '_')}"
    name = f"forward/graph_0/{short}#0/output.0"
    my = SideFacts(
        path=f"rank0/step0.safetensors:{short}",
        id=f"forward/graph_0/buf{index}#0/output.0" if fused else name,
        op="fused" if fused else op,
        dtype="bfloat16",
        shape=SHAPE,
        ranks=(0,),
        minimum=-3.9,
        maximum=4.1,
        mean=0.011,
    )
    golden = msgspec.structs.replace(my, id=name, op=op, path=f"golden/rank0/{short}.safetensors")
    return ComparisonRow(
        **{
            "index": index,
            "step": 0,
            "name": name,
            "status": status,
            "call": name.rpartition("/")[0],
            "level": "buffer" if fused else "node",
            "op": op,
            "module": module,
            "line": f"model/{file}.py:{40 + len(local)}, in forward",
            "code": f"x = self.{local.rpartition('.')[2]}(x)",
            "graph": "graph_0",
            "kernel": f"cpp_fused_{'_'.join(fused)}_{index}" if fused else "",
            "nodes": fused,
            "matched_by": "node" if fused else "id",
            "my": my,
            "golden": golden,
            "judged_by": "noise of bfloat16",
            **facts,
        }
    )


def _inherits(status: Status, error: float) -> dict[str, str]:
    if status is not Status.DIFFERENT:
        return {}
    return {
        "made": "before",
        "reason": f"off by {error:.2g} of its norm; its inputs were off by as much",
    }


def transformer_rows(
    layers: int = 12, faulty: int | None = 7, seed: int = 20
) -> list[ComparisonRow]:
    """All outputs of all layers; in layer `faulty`, `mlp.act` computes something else."""
    rng = random.Random(seed)
    rows: list[ComparisonRow] = []
    error, before = 0.0, ()
    for number in range(layers):
        layer, places = f"layers.{number}", {"": before}
        for local, op, fused, reads in CALLS:
            index = len(rows)
            own = NOISE * rng.uniform(0.3, 1.2) if number or len(rows) > 2 else 0.0
            planted = number == faulty and local == "mlp.act"
            own = FAULT if planted else own
            total = math.hypot(error, own)
            bad = faulty is not None and total > 0.01
            status = Status.DIFFERENT if bad else Status.EQUIVALENT if total else Status.IDENTICAL
            facts = {} if planted else _inherits(status, total)
            if planted:
                facts = {
                    "made": "here",
                    "reason": "7372 of 8192 elements differ, the worst by 0.28; 0.0074 is allowed",
                    "advice": "run this call by itself: paritas verify",
                    "detail": detail(index),
                }
            rows.append(
                row(
                    index,
                    layer,
                    (local, op, fused),
                    status,
                    figures=figures(total),
                    score=score(total / (40 * NOISE)) if total else None,
                    judged_by="noise of bfloat16" if total else "bits",
                    own=own,
                    inherited=error,
                    attributed="replayed" if number % 2 else "estimated",
                    sources=tuple(place for name in reads for place in places[name]),
                    **facts,
                )
            )
            places[local] = (index,)
            error = total * (0.95 if local.endswith("norm") else 1.0)
        before = places["residual"]
    return rows


def transformer(layers: int = 12, faulty: int | None = 7) -> Comparison:
    """Wrong from `mlp.act` of layer 7 on, with rows of every other kind behind."""
    rows = transformer_rows(layers, faulty)
    rows += odd_rows(len(rows))
    first = next((row.index for row in rows if row.made == "here"), None)
    return Comparison(
        my=dump("runs/compiled", records=len(rows) - 1, sources=("fused",)),
        golden=dump("runs/eager", records=len(rows), sources=("fx",), fusion="off"),
        rows=tuple(rows),
        coverage=Coverage(
            compared=len(rows) - 2,
            skipped=("12 parameters: the same file on both sides",),
            unmatched=(
                "forward/graph_0/head_dropout#0/output.0",
                "forward/graph_0/buf991#0/output.0",
            ),
        ),
        notes=("step 0 of mine is step 0 of golden",),
        first=None if first is None else Divergence(kind="made", row=first),
        created="2026-01-15T10:00:00+00:00",
        paritas="0.1.0",
        torch="2.13.0",
        seconds=1.75,
        nbytes=2 * 2 * math.prod(SHAPE) * len(rows),
    )


def odd_rows(start: int) -> list[ComparisonRow]:
    """No counterpart on either side; statistics alone; unstable; degraded; a shape; no tensor."""
    base = {"step": 0, "phase": "forward", "level": "node"}
    side = SideFacts(id="x", dtype="float32", shape=(2, 4), path="a.safetensors", ranks=(0,))
    odd = [
        {
            "name": "forward/graph_0/head_dropout#0/output.0",
            "status": Status.UNVERIFIED,
            "aspect": Aspect.STRUCTURE,
            "golden": side,
            "reason": "mine has no such value; nearest: head_norm, head_drop",
        },
        {
            "name": "forward/graph_0/buf991#0/output.0",
            "status": Status.UNVERIFIED,
            "aspect": Aspect.STRUCTURE,
            "my": side,
            "reason": "golden has no such value",
        },
        {
            "name": "forward/graph_0/head_norm#0/output.0",
            "status": Status.UNVERIFIED,
            "my": side,
            "golden": side,
            "matched_by": "order",
            "judged_by": "statistics",
            "basis": Basis.SUMMARIES,
            "limits": "only minimum, maximum, mean and norm were recorded: elements may be swapped",
            "reason": "the norms agree to 1e-7; that does not show that the elements do",
        },
        {
            "name": "forward/graph_0/topk#0/output.1",
            "status": Status.UNSTABLE,
            "my": msgspec.structs.replace(side, dtype="int64"),
            "golden": msgspec.structs.replace(side, dtype="int64"),
            "matched_by": "id",
            "position": "1",
            "op": "aten.topk.default",
            "reason": "2 of 8 indices differ, within the margin of the reference's own rounding",
        },
        {
            "name": "forward/graph_0/head#0/output.0",
            "status": Status.DEGRADED,
            "my": side,
            "golden": side,
            "matched_by": "rename",
            "op": "aten.mm.default",
            "figures": figures(0.004),
            "score": score(2.5),
            "judged_by": "float64 replay",
            "reason": "the same function, 2.5 times as far off as rounding allows",
            "detail": detail(5),
        },
        {
            "name": "backward/graph_0/head_grad#0/input.0",
            "status": Status.DIFFERENT,
            "phase": "backward",
            "side": "input",
            "aspect": Aspect.SHAPE,
            "my": side,
            "golden": msgspec.structs.replace(side, shape=(4, 2)),
            "matched_by": "id",
            "made": "before",
            "reason": "shape (2, 4) where golden has (4, 2)",
        },
        {
            "name": "forward/graph_0/scale#0/input.1",
            "status": Status.IDENTICAL,
            "side": "input",
            "position": "1",
            "my": SideFacts(value="0.125", ranks=(0,)),
            "golden": SideFacts(value="0.125", ranks=(0,)),
            "matched_by": "id",
            "judged_by": "text",
        },
    ]
    return [
        ComparisonRow(
            index=start + k, **{**base, "call": facts["name"].rpartition("/")[0], **facts}
        )
        for k, facts in enumerate(odd)
    ]

"""Comparisons at the edges: nothing, nothing but the same, NaNs, very many, and hostile ones."""

from __future__ import annotations

import itertools
import math

import msgspec

from paritas.comparison.rows import Comparison, ComparisonRow, Divergence
from paritas.core.results.details import WorstElement
from paritas.core.results.findings import Coverage, Status
from unit.comparison.comparison_samples import (
    detail,
    dump,
    figures,
    metrics,
    score,
    transformer,
    transformer_rows,
)

HOSTILE = (
    "</script><script>document.title='owned'</script><b onclick=\"x\">'&\u2028\u2029\x00🜂\"`${1}"
)


def empty() -> Comparison:
    """Two dumps that have nothing in common; nothing was compared."""
    return Comparison(
        my=dump("runs/a", problems=("rank 3: index.jsonl ends in the middle of a line",)),
        golden=dump("runs/b", kind="npy_tree", torch="", ranks=(), steps=()),
    )


def identical() -> Comparison:
    """Every row is the same bit for bit."""
    rows = [
        msgspec.structs.replace(
            row,
            status=Status.IDENTICAL,
            figures=figures(0.0),
            score=None,
            own=0.0,
            inherited=0.0,
            judged_by="bits",
        )
        for row in transformer_rows(4, faulty=None)
    ]
    whole = transformer(1, faulty=None)
    coverage = Coverage(compared=len(rows))
    return msgspec.structs.replace(whole, rows=tuple(rows), coverage=coverage, first=None)


def non_finite() -> Comparison:
    """As the transformer, but the fault is an overflow: figures are infinite or NaN."""
    whole = transformer()
    assert whole.first is not None
    start = whole.first.row
    nan, inf = math.nan, math.inf
    worst = WorstElement(index=(1, 3, 17), my=nan, golden=1.25)
    bad = metrics(
        inf,
        max_abs=inf,
        max_abs_candidate=inf,
        cosine=nan,
        pcc=nan,
        rmse=inf,
        max_ulp=None,
        nan_candidate=40,
        posinf_candidate=2,
        nonfinite_mismatches=42,
    )
    rows = list(whole.rows)
    for place in range(start, 132):
        here = place == start
        closer = msgspec.structs.replace(detail(place), worst=(worst,), ulps=())
        rows[place] = msgspec.structs.replace(
            rows[place],
            figures=msgspec.structs.replace(figures(1.0), metrics=bad, kl_divergence=nan),
            score=score(inf),
            own=inf if here else nan,
            inherited=0.001 if here else inf,
            reason="42 of 8192 values are NaN or infinite where golden has a number",
            detail=closer if here else None,
        )
    first = Divergence(kind="made", row=start)
    return msgspec.structs.replace(whole, rows=tuple(rows), first=first, first_non_finite=first)


def wide(count: int = 50_000, layers: int = 48) -> Comparison:
    """A great many rows: many steps of a deep model, wrong from the second step on."""
    right = transformer_rows(layers, faulty=None)
    wrong = transformer_rows(layers, faulty=7)
    rows: list[ComparisonRow] = []
    for step in itertools.count():
        start = len(rows)
        for row in (wrong if step else right)[: count - start]:
            moved = tuple(start + place for place in row.sources)
            rows.append(msgspec.structs.replace(row, index=len(rows), step=step, sources=moved))
        if len(rows) >= count:
            break
    first = next((row.index for row in rows if row.made == "here"), None)
    steps = tuple(range(rows[-1].step + 1))
    return Comparison(
        my=dump("runs/compiled", records=count, steps=steps),
        golden=dump("runs/eager", records=count, steps=steps),
        rows=tuple(rows),
        coverage=Coverage(compared=count),
        first=None if first is None else Divergence(kind="made", row=first),
        seconds=41.5,
        nbytes=count * 32768,
    )


def many_ranks(ranks: int = 2048) -> Comparison:
    """One long-named value on each of very many ranks, and one put together from all of them."""
    layer = "model.language_model.decoder.transformer_block_with_a_long_name.layers.7"
    [sample] = [row for row in transformer_rows(8) if row.made == "here"]
    module = f"{layer}.feed_forward.experts.gate_and_up_projection_activation"
    name = (
        f"forward/graph_0/{module}/torch_npu.npu_swiglu_quant_with_a_long_name.default#0/output.0"
    )
    assert sample.my is not None
    rows = [
        msgspec.structs.replace(
            sample,
            index=rank,
            rank=rank,
            name=name,
            module=module,
            call=name.rpartition("/")[0],
            sources=(),
            status=Status.DIFFERENT if rank % 7 == 3 else Status.EQUIVALENT,
            made="here" if rank % 7 == 3 else "",
            detail=sample.detail if rank == 3 else None,
        )
        for rank in range(ranks)
    ]
    whole = msgspec.structs.replace(
        sample.my, ranks=tuple(range(ranks)), made_of=f"put together from ranks 0-{ranks - 1}"
    )
    rows.append(msgspec.structs.replace(rows[3], index=ranks, rank=None, my=whole, golden=whole))
    everywhere = tuple(range(ranks))
    return Comparison(
        my=dump("/very/long/path/" * 12 + "runs/compiled", ranks=everywhere),
        golden=dump("runs/eager", ranks=everywhere),
        rows=tuple(rows),
        coverage=Coverage(compared=len(rows)),
        first=Divergence(kind="unclear", row=3, reason="no input of this call was recorded"),
    )


def hostile() -> Comparison:
    """Every text is one that tries to get out of where it is put."""
    whole = transformer(2, faulty=1)
    side = {"path": HOSTILE, "id": HOSTILE, "op": HOSTILE, "value": HOSTILE, "made_of": HOSTILE}
    rows = []
    for row in whole.rows:
        assert row.my or row.golden
        replaced = msgspec.structs.replace(
            row,
            name=f"{HOSTILE}{row.index}",
            op=HOSTILE,
            module=f"{HOSTILE}.{row.index % 3}",
            line=HOSTILE,
            code=HOSTILE,
            kernel=HOSTILE,
            nodes=(HOSTILE, HOSTILE),
            reason=HOSTILE,
            advice=HOSTILE,
            judged_by=HOSTILE,
            limits=HOSTILE,
            my=row.my and msgspec.structs.replace(row.my, **side),
            golden=row.golden and msgspec.structs.replace(row.golden, **side),
        )
        rows.append(replaced)
    assert whole.first is not None
    return msgspec.structs.replace(
        whole,
        rows=tuple(rows),
        my=dump(HOSTILE, kind=HOSTILE, problems=(HOSTILE,), program=HOSTILE),
        coverage=Coverage(compared=3, skipped=(HOSTILE,), unmatched=(HOSTILE,)),
        notes=(HOSTILE,),
        first=msgspec.structs.replace(whole.first, kind="unclear", reason=HOSTILE),
    )

"""What a dump looks like on a terminal."""

from __future__ import annotations

import io

import msgspec
import pytest
from rich.console import Console

from paritas.core.numerics.statistics import Statistics
from paritas.core.results.wording import size
from paritas.formats.dumps.report import (
    MOST_NAMES,
    dump_report,
    dump_verdict_line,
    record_lines,
)
from paritas.formats.dumps.survey import (
    DumpSummary,
    ExaminedRecord,
    NameFacts,
    NonFinite,
    RankFacts,
)
from paritas.formats.files.records import Header, Observed, Payload, Record, Site, TensorFacts

SITE = Site(
    source="eager",
    level="op",
    name="layers.1.attn/aten.log.default",
    op="aten.log.default",
    module="layers.1.attn",
    line="model.py:18, in forward",
    code="scores = torch.log(scores)",
)


def printed(summary, width=80):
    stream = io.StringIO()
    console = Console(file=stream, width=width, highlight=False)
    console.print(dump_report(summary), crop=False)
    return [line.rstrip() for line in stream.getvalue().splitlines()]


def text_of(summary):
    """Without regard to where lines are broken."""
    return " ".join(" ".join(printed(summary)).split())


def name(path, **facts):
    defaults = {
        "phase": "forward",
        "records": 2,
        "kinds": ("float32[2,16]",),
        "minimum": -1.25,
        "maximum": 3.5,
        "non_finite": 0,
    }
    return NameFacts(name=path, **{**defaults, **facts})


def non_finite(**facts):
    defaults = {
        "kind": "NaN",
        "rank": 0,
        "step": 3,
        "sequence": 41,
        "id": SITE.id,
        "site": SITE,
        "count": 2,
        "of": 64,
        "earlier": 41,
        "origin": "made",
        "inputs": 1,
    }
    return NonFinite(**{**defaults, **facts})


def summary_of(**facts):
    header = Header(
        run="3f2a9c",
        created="2026-01-02T03:04:05+00:00",
        torch="2.13.0",
        paritas="0.1.0",
        program="train.py",
        closed=True,
        records=8,
    )
    defaults = {
        "path": "runs/eager",
        "kind": "paritas",
        "header": header,
        "ranks": (RankFacts(rank=0, records=8, state="closed", expected=8),),
        "missing": (),
        "steps": ((0, 3), (7, 7)),
        "levels": {"module": 2, "op": 6},
        "sources": ("eager",),
        "records": 8,
        "tensors": 7,
        "bytes_on_disk": 12_345_678,
        "files": 3,
        "payload_bytes": 30_000_000,
        "stored_bytes": 12_000_000,
        "observed": (),
        "notes": (),
        "problems": (),
        "selected": 8,
        "names": (name("layers.0"), name("layers.1.attn", phase="backward")),
        "non_finite": (),
        "from_payloads": 0,
    }
    return DumpSummary(**{**defaults, **facts})


def with_header(**changes):
    return msgspec.structs.replace(summary_of().header, **changes)


def test_a_complete_dump_reads_like_this():
    assert printed(summary_of()) == [
        "dump     runs/eager",
        "run      3f2a9c, of train.py, 2026-01-02T03:04:05+00:00, torch 2.13.0, paritas",
        "         0.1.0",
        "ranks    0 (the run has 1); closed",
        "source   eager",
        "data     tensors; layout packed",
        "steps    0-3, 7",
        "records  8 (2 module, 6 op); 1 of them not tensors",
        "on disk  12.3 MB in 3 files",
        "dedupe   saved 18 MB of 30 MB (factor 2.5)",
        "",
        "8 records under 2 names",
        "name                     records value           min max NaN/Inf",
        "────────────────────────────────────────────────────────────────",
        "layers.0                       2 float32[2,16] -1.25 3.5",
        "layers.1.attn (backward)       2 float32[2,16] -1.25 3.5",
        "value, min, max: of the outputs, or of the inputs if no output is recorded",
        "NaN/Inf: the number of records that contain one",
        "",
        "every value is finite",
        "",
        "complete: 8 records of 1 rank",
    ]


def test_the_first_nan_is_told_with_its_operator_its_line_and_who_made_it():
    lines = printed(summary_of(non_finite=(non_finite(),)))
    start = lines.index(
        "first NaN: rank 0, step 3, forward/layers.1.attn/aten.log.default#0/output.0"
    )
    assert lines[start + 1 : start + 4] == [
        "  2 of 64 values, by aten.log.default in layers.1.attn",
        "  model.py:18, in forward: scores = torch.log(scores)",
        "  made here: the 1 recorded input of this call is finite",
    ]


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        ({"inputs": 2}, "made here: the 2 recorded inputs of this call are finite"),
        (
            {"origin": "entered", "inputs": 2, "bad_inputs": 1},
            "not made here: 1 of the 2 recorded inputs of this call is not finite",
        ),
        (
            {"origin": "entered", "site": msgspec.structs.replace(SITE, side="input")},
            "not made here: it is an input of the call; 41 tensors were recorded before it",
        ),
        (
            {"origin": "unknown", "inputs": 0, "earlier": 1},
            (
                "unknown whether it was made here: no input of this call is recorded; 1 tensor was "
                "recorded before it"
            ),
        ),
    ],
)
def test_who_made_it_is_told_only_as_far_as_it_is_known(facts, words):
    assert words in text_of(summary_of(non_finite=(non_finite(**facts),)))


def test_a_fused_buffer_is_told_with_what_it_stands_for():
    site = Site(
        source="fused", level="buffer", name="buf3", graph="graph 0", kernel="cpp_fused_0",
        nodes=("add", "log"), op="aten.log.default",
    )  # fmt: skip
    words = text_of(summary_of(non_finite=(non_finite(site=site, id=site.id),)))
    assert "stands for add, log; written by cpp_fused_0" in words


def test_a_module_may_owe_it_to_its_parameters():
    site = Site(source="eager", level="module", name="head", module="head", op="Linear")
    words = text_of(summary_of(non_finite=(non_finite(site=site, id=site.id),)))
    assert "2 of 64 values, by Linear" in words
    assert "is finite, so its code or parameters caused it" in words


def test_what_is_missing_of_a_killed_run_is_told():
    ranks = (
        RankFacts(rank=0, records=5, state="closed", expected=5, last_step=2, last="a"),
        RankFacts(rank=2, records=3, state="ended early", last_step=1, last="forward/b#0/output.0"),
    )
    summary = summary_of(
        ranks=ranks, missing=(1, 3), header=with_header(world_size=4), problems=("rank 2: cut off",)
    )
    words = text_of(summary)
    assert "0, 2 (the run has 4); missing: 1, 3; rank 2 was cut off, not closed" in words
    assert "(3 records, the last is forward/b#0/output.0 of step 1)" in words
    assert "problem: rank 2: cut off" in words
    assert dump_verdict_line(summary) == "incomplete: 8 records of 2 ranks can be read; 1 problem"
    assert printed(summary)[-1] == dump_verdict_line(summary)


def test_changed_outputs_are_told_by_graph():
    observed = (
        Observed(graph="graph 0 forward", status="unchanged"),
        Observed(graph="graph 0 backward", status="changed", detail="output 1 differs by 2e-7"),
    )
    summary = summary_of(
        observed=observed, sources=("fused",), header=with_header(taps=True, fusion="off")
    )
    words = text_of(summary)
    assert "recording CHANGED the outputs of 1 of 2 graphs: graph 0 backward (output 1" in words
    assert "recording did not change the outputs of 1 of 2 graphs" in words
    assert "fused; fusion off; every node recorded, which may change the fusion" in words


@pytest.mark.parametrize("bad", [1, MOST_NAMES])
def test_many_names_share_a_row_but_the_first_stay_and_what_is_not_finite(bad):
    names = [name(f"layers.{number}") for number in range(MOST_NAMES + 10)]
    names[-bad:] = [name("the.bad.one", non_finite=2)] * bad
    lines = printed(summary_of(names=tuple(names)))
    assert any(line.startswith("layers.0 ") for line in lines)
    assert any(line.startswith("the.bad.one") and line.endswith("2") for line in lines)
    assert any(line.startswith("10 more; use --layer GLOB") for line in lines)


def test_nothing_is_wider_than_80_columns():
    long = "encoder.layers.11.self_attention.output_projection/aten.native_layer_norm.default"
    site = msgspec.structs.replace(SITE, name=long, code="x = " + "y + " * 40 + "z")
    summary = summary_of(
        names=(name(long, kinds=("complex128[2,16,128,4096,64]", "float32[1]")),),
        non_finite=(non_finite(site=site, id=site.id),),
        problems=("rank 0: " + "something was cut off " * 10,),
        notes=("a note that is long enough to be broken " * 5,),
    )
    assert max(map(len, printed(summary))) <= 80


def test_a_record_is_listed_with_its_statistics():
    facts = TensorFacts(dtype="float32", shape=(2, 3), stride=(3, 1))
    statistics = Statistics(
        count=6, minimum=-1, maximum=2.5, mean=0.5, l2=4, zeros=1, nans=2, positive_infinities=3
    )
    payload = Payload(file="rank0/data-0000.safetensors", nbytes=24, shape=(2, 3))
    record = Record(
        sequence=4, step=1, rank=0, id=SITE.id, site=SITE, tensor=facts, payload=payload, alias_of=2
    )
    assert record_lines(ExaminedRecord(record=record, statistics=statistics)) == [
        "rank 0 step 1 forward/layers.1.attn/aten.log.default#0/output.0",
        "  float32[2,3]; min -1 max 2.5 mean 0.5 l2 4; 1 zero, 2 NaN, 3 Inf; 24 B; shares",
        "    memory with record 2",
    ]
    value = Record(sequence=5, step=1, rank=0, id=SITE.id, site=SITE, value="0.5")
    assert record_lines(ExaminedRecord(record=value))[1] == "  0.5"


@pytest.mark.parametrize(
    ("count", "words"),
    [(0, "0 B"), (999, "999 B"), (1000, "1 kB"), (65_536, "65.5 kB"), (3_400_000_000, "3.4 GB")],
)
def test_sizes_have_units(count, words):
    assert size(count) == words

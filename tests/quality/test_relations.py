"""Do relations find planted faults, by the right relation and module, and stay quiet without?"""

from __future__ import annotations

import os

import pytest

import paritas
from quality.relation_models import Decoder, Trained, plant, tokens

# Which relation fails, and where, is asked; not what kind of wrong it is.
pytestmark = pytest.mark.usefixtures("undiagnosed")

SERVING = (
    "cached-decoding",
    "chunked-prefill",
    "padding",
    "row-independence",
    "logits-to-keep",
    "causality",
    "cache-crop",
    "cache-reorder",
    "prefix-reuse",
    "call-history",
)
DECODING, CHUNKS, PADDING, ROWS, KEEP, CAUSAL, CROP, REORDER, PREFIX, HISTORY = SERVING

# The kind of model, the module with the fault, the fault, and the relation that must find it.
ATTENTION = "layers.1.mixer"
CASES = [
    ("attention", ATTENTION, "cached keys rotated twice", DECODING),
    ("attention", ATTENTION, "first cached token forgotten", DECODING),
    ("attention", ATTENTION, "last cached value overwritten", DECODING),
    ("attention", ATTENTION, "cached rows mixed up", DECODING),
    ("attention", ATTENTION, "cached values in half precision", DECODING),
    ("attention", ATTENTION, "cached output scaled", DECODING),
    ("attention", ATTENTION, "other scale with a cache", DECODING),
    ("attention", "layers.0.mixer", "cached keys rotated twice", DECODING),
    ("attention", "layers.0.mixer", "other scale with a cache", DECODING),
    ("attention", ATTENTION, "mask of a chunk not moved", CHUNKS),
    ("attention", ATTENTION, "mask of a chunk one too far", CHUNKS),
    ("attention", ATTENTION, "a chunk sees all of itself", CHUNKS),
    ("window", ATTENTION, "window one wider with a cache", DECODING),
    ("window", "layers.0.mixer", "window one wider with a cache", DECODING),
    ("attention", ATTENTION, "sees one later token", CAUSAL),
    ("attention", ATTENTION, "padding attended", PADDING),
    ("attention", "layers.0.mixer", "padding attended", PADDING),
    ("attention", ATTENTION, "padding attended with a cache", PADDING),
    ("attention", ATTENTION, "mask of the first row for all", PADDING),
    ("attention", ATTENTION, "mask not extended", PADDING),
    ("attention", "", "positions start again", DECODING),
    ("attention", "", "positions one too far", DECODING),
    ("absolute", "", "positions of the first row", PADDING),
    ("absolute", "", "given positions ignored", PADDING),
    ("absolute", "", "positions start again", DECODING),
    ("absolute", "", "positions one too far", CHUNKS),
    ("attention", "", "position of a chunk repeated", CHUNKS),
    ("attention", "", "padding token changes others", PADDING),
    ("attention", "", "cache of the last call used", HISTORY),
    ("attention", "", "keeps the first positions", KEEP),
    ("attention", "", "keeps one position earlier", KEEP),
    ("attention", "", "kept positions scaled", KEEP),
    ("attention", "", "crop leaves the last layer", CROP),
    ("attention", "", "crop removes one too few", CROP),
    ("attention", "", "crop leaves the keys", CROP),
    ("attention", "", "crop removes the first", CROP),
    ("attention", "", "reorder does nothing", REORDER),
    ("attention", "", "reorder leaves the last layer", REORDER),
    ("attention", "", "reorder leaves the values", REORDER),
    ("attention", "", "a copied cache is the same cache", PREFIX),
    ("attention", "layers.1", "normalised over the sequence", CAUSAL),
    ("attention", "layers.1", "normalised over the batch", ROWS),
    ("attention", "layers.0", "normalised over the batch", ROWS),
    ("attention", "layers.1", "rows compete", ROWS),
    ("recurrent", ATTENTION, "state not carried", DECODING),
    ("recurrent", "layers.0.mixer", "state not carried", DECODING),
    ("recurrent", ATTENTION, "state not carried into a chunk", CHUNKS),
    ("recurrent", ATTENTION, "convolution not carried", DECODING),
    ("recurrent", ATTENTION, "convolution one step late", DECODING),
    ("recurrent", ATTENTION, "state of another row", DECODING),
    ("recurrent", ATTENTION, "decay applied twice with a cache", DECODING),
    ("recurrent", ATTENTION, "state of the first token kept", CHUNKS),
    ("recurrent", ATTENTION, "padding enters the state", PADDING),
    ("recurrent", "layers.0.mixer", "padding enters the convolution", PADDING),
    ("recurrent", ATTENTION, "mask of a single row ignored", PADDING),
    ("recurrent", ATTENTION, "padding of a later chunk enters the state", PADDING),
    ("attention", "", "remembers its longest call", HISTORY),
]
# Which module computes a wrong value first cannot be seen from outside: the cache or the head.
UNPLACED = {KEEP, CROP, REORDER, PREFIX}


# Each takes a second of one core; the default run has every eighteenth.
WHOLE = os.environ.get("PARITAS_WHOLE_CORPUS") == "1"


@pytest.mark.one_in(2)
@pytest.mark.usefixtures("undiagnosed")
@pytest.mark.parametrize(("kind", "module", "fault", "relation"), CASES if WHOLE else CASES[::18])
def test_a_planted_fault_is_found_by_its_relation(
    kind: str, module: str, fault: str, relation: str
) -> None:
    model = plant(Decoder(kind), fault, module)
    report = paritas.invariants(model, tokens(), only=[relation])
    row = report.row(relation)
    assert row.status is paritas.Status.DIFFERENT, str(report)
    assert report.exit_code == 1
    origin = row.verdict.failures[0].origin
    if relation not in UNPLACED and module:
        assert origin is not None
        assert origin.name == module, str(report)


# With absolute positions, relations hold as with others; a window cuts what is seen of them.
@pytest.mark.parametrize("kind", ["window", "recurrent", *(["attention", "absolute"] * WHOLE)])
def test_a_right_model_holds_all_serving_relations(kind: str) -> None:
    report = paritas.invariants(Decoder(kind).eval(), tokens(), only=SERVING)
    assert report.passed, str(report)
    wrong = [row for row in report.rows if row.promise != "checked"]
    assert [row.relation for row in wrong] == ([CROP] if kind == "recurrent" else [])


TRAINING_CASES = [
    ("", "count ignored", "accumulation"),
    ("", "divided twice", "accumulation"),
    ("", "padding counted", "accumulation"),
    ("", "averaged over rows", "accumulation"),
    ("layers.1", "carries over from row to row", "accumulation"),
    ("layers.1", "weights rows by their place", "sample-order"),
    ("layers.0", "carries over from row to row", "sample-order"),
    ("layers.1", "counts its calls", "checkpointing"),
    ("layers.1", "counts its calls", "resume"),
    ("layers.0", "buffer that is not saved", "resume"),
    ("", "loads one weight not", "resume"),
    ("", "tie lost when loaded", "resume"),
    ("", "loads one weight not", "round-trip"),
    ("", "loads weights transposed", "round-trip"),
    ("", "tie lost when loaded", "round-trip"),
    ("", "loaded in half precision", "round-trip"),
    ("layers.1", "remembers a mean", "eval-after-train"),
    ("layers.0", "buffer that is not saved", "eval-after-train"),
    ("layers.1", "counts its calls", "eval-after-train"),
    ("layers.1", "stays in training mode", "eval-after-train"),
]
TRAINING = (
    "accumulation",
    "checkpointing",
    "resume",
    "round-trip",
    "sample-order",
    "eval-after-train",
    "optimizer-forms",
    "sharded-clipping",
)


@pytest.mark.parametrize(
    ("module", "fault", "relation"), TRAINING_CASES if WHOLE else TRAINING_CASES[::5]
)
def test_a_planted_fault_in_training_is_found(module: str, fault: str, relation: str) -> None:
    model = plant(Trained(), fault, module)
    report = paritas.invariants(model, tokens(), only=[relation])
    assert report.row(relation).status is paritas.Status.DIFFERENT, str(report)


def test_a_right_model_holds_all_training_relations() -> None:
    report = paritas.invariants(Trained().eval(), tokens(), only=["training"])
    assert report.passed, str(report)
    assert [row.relation for row in report.checked] == list(TRAINING)

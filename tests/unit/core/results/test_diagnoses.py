from __future__ import annotations

import msgspec
import pytest

from paritas.core.results.findings import Diagnosis, Pattern

EVIDENCE = {"terms": 8, "axis": -1, "rms": 2.0, "explained": 0.5, "fill": "zeros"}


def test_evidence_keeps_its_types_on_its_way_through_a_file():
    diagnosis = Diagnosis(
        patterns=(Pattern(kind="shift", confidence=0.9, sentence="shifted", evidence=EVIDENCE),)
    )
    back = msgspec.json.decode(msgspec.json.encode(diagnosis), type=Diagnosis)
    assert back == diagnosis
    types = {name: type(value) for name, value in back.patterns[0].evidence.items()}
    assert types == {name: type(value) for name, value in EVIDENCE.items()}


def test_evidence_of_floats_alone_as_it_was_once_written_is_read():
    text = b'{"kind": "shift", "confidence": 1, "sentence": "", "evidence": {"axis": 1.0}}'
    assert msgspec.json.decode(text, type=Pattern).evidence == {"axis": 1.0}


@pytest.mark.parametrize(
    ("evidence", "sentence"),
    [
        (
            {"bit for bit": 1.0, "within the noise": 1.0},
            "it (reproduces the candidate bit for bit)",
        ),
        (
            {"bit for bit": 0.4, "within the noise": 1.0},
            "it (reproduces 100 % of the elements within the noise)",
        ),
        (
            {"bit for bit": 0.4, "within the noise": 0.9999, "extent": "where it is wrong"},
            "it (reproduces 99.9 % of the wrong elements within the noise)",
        ),
        ({}, "it"),
    ],
)
def test_a_diagnosis_says_how_well_it_reproduces_the_candidate(evidence, sentence):
    pattern = Pattern(kind="scale", confidence=1.0, sentence="it", evidence=evidence)
    assert Diagnosis(patterns=(pattern,)).sentence == sentence

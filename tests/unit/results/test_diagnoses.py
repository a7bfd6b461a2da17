from __future__ import annotations

import msgspec

from paritas.results.findings import Diagnosis, Pattern

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

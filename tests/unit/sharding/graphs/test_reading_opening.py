"""What cannot be read is refused by name, and no code of a file runs."""

from __future__ import annotations

import copy
import json
import os
import pickle
import struct
import zipfile
from random import Random

import pytest
import torch
from torch import nn

from paritas.core.errors import UsageError
from paritas.sharding.graphs.calls import Graph
from paritas.sharding.graphs.opening import open_graph
from unit.sharding.graphs.test_reading_export import rewritten


@pytest.fixture(scope="module")
def archive(tmp_path_factory):
    path = tmp_path_factory.mktemp("archive") / "linear.pt2"
    torch.export.save(torch.export.export(nn.Linear(4, 4), (torch.ones(2, 4),)), path)
    return path


def test_an_archive_is_known_whatever_its_name(archive, tmp_path):
    other = tmp_path / "model.zip"
    other.write_bytes(archive.read_bytes())
    assert [call.operator for call in open_graph(str(other)).calls] == ["aten.linear.default"]


def test_a_graph_is_returned_unchanged():
    graph = Graph("mine", "fx", ())
    assert open_graph(graph) is graph


def test_a_model_is_exported_on_the_fly():
    graph = open_graph((nn.Linear(4, 3), torch.ones(2, 4)))
    assert graph.name == "Linear"
    assert [call.operator for call in graph.calls] == ["aten.linear.default"]


def test_a_model_without_inputs_is_refused():
    with pytest.raises(
        UsageError, match=r"Linear cannot be exported without inputs; give \(model, inputs\)"
    ):
        open_graph(nn.Linear(4, 3))


def test_a_model_that_cannot_be_exported_says_what_torch_says():
    class Deciding(nn.Module):
        def forward(self, x):
            return x * 2 if x.sum() > 0 else x

    with pytest.raises(UsageError, match=r"torch.export cannot export Deciding: .*Export it"):
        open_graph((Deciding(), torch.ones(2)))


@pytest.mark.parametrize("source", [3, None, [1], open])
def test_what_is_not_a_graph_is_refused(source):
    with pytest.raises(UsageError, match="cannot read a graph from"):
        open_graph(source)


def test_a_cut_off_archive_is_refused_wherever_it_is_cut(archive, tmp_path):
    whole = archive.read_bytes()
    for length in range(0, len(whole), 499):
        path = tmp_path / "cut.pt2"
        path.write_bytes(whole[:length])
        with pytest.raises(UsageError, match="is truncated"):
            open_graph(path)


def test_a_damaged_member_is_refused(archive, tmp_path):
    whole = bytearray(archive.read_bytes())
    at = whole.index(b"aten.linear")
    whole[at : at + 4] = b"ATEN"
    path = tmp_path / "damaged.pt2"
    path.write_bytes(whole)
    with pytest.raises(UsageError, match=r"models/model.json is damaged \(Bad CRC-32"):
        open_graph(path)


@pytest.mark.parametrize(
    ("major", "says"), [(9, "from a newer version"), (7, "from an older version")]
)
def test_a_graph_from_another_version_names_both(archive, tmp_path, major, says):
    def change(program):
        program["schema_version"] = {"major": major, "minor": 1}
        program["torch_version"] = "9.9.9"
        del program["graph_module"]

    path = tmp_path / "other.pt2"
    rewritten(archive, path, change)
    with pytest.raises(UsageError, match=rf"{says}: torch 9.9.9 .*schema {major}.1.*schema 8"):
        open_graph(path)


def test_a_format_of_the_archive_that_is_not_known_is_refused(archive, tmp_path):
    path = repacked(archive, tmp_path, {"linear/archive_version": b"7"})
    with pytest.raises(UsageError, match="format pt2 7; paritas reads pt2 0"):
        open_graph(path)


def test_a_missing_member_is_named(archive, tmp_path):
    path = repacked(archive, tmp_path, {"linear/data/weights/weight_0": None})
    graph = open_graph(path)
    with pytest.raises(UsageError, match="has no member data/weights/weight_0"):
        graph.state()


def test_an_archive_without_a_program_says_so(archive, tmp_path):
    path = repacked(archive, tmp_path, {"linear/models/model.json": None})
    with pytest.raises(UsageError, match="holds other things, but no program"):
        open_graph(path)


def test_weights_that_do_not_fit_their_description_are_refused(archive, tmp_path):
    path = repacked(archive, tmp_path, {"linear/data/weights/weight_0": b"\0" * 8})
    with pytest.raises(
        UsageError, match=r"weight_0 do not match .*8 bytes are too few for \[4, 4\]"
    ):
        open_graph(path).state()


def test_a_compressed_member_is_refused_before_it_is_unpacked(archive, tmp_path):
    zeros = b" " * (1 << 24)
    path = repacked(archive, tmp_path, {"linear/models/model.json": zeros}, zipfile.ZIP_DEFLATED)
    assert path.stat().st_size < 1 << 18
    with pytest.raises(UsageError, match="is compressed or encrypted"):
        open_graph(path)


def test_a_member_that_claims_to_be_larger_than_the_file_is_refused(archive, tmp_path):
    raw = bytearray(archive.read_bytes())
    at = raw.index(b"PK\x01\x02", raw.index(b"PK\x01\x02"))
    while b"models/model.json" not in raw[at : at + 100]:
        at = raw.index(b"PK\x01\x02", at + 4)
    raw[at + 20 : at + 28] = struct.pack("<II", 1 << 27, 1 << 27)
    path = tmp_path / "claiming.pt2"
    path.write_bytes(raw)
    with pytest.raises(UsageError, match="more than the whole file"):
        open_graph(path)


def test_json_that_is_nested_without_end_is_refused(archive, tmp_path):
    path = repacked(archive, tmp_path, {"linear/models/model.json": b'{"a":' * 100_000})
    with pytest.raises(UsageError, match=r"models/model.json cannot be read"):
        open_graph(path)


@pytest.mark.parametrize("text", [b"", b"[]", b'{"schema_version": {"major": 8, "minor": 20}}'])
def test_json_of_another_form_is_refused(archive, tmp_path, text):
    path = repacked(archive, tmp_path, {"linear/models/model.json": text})
    with pytest.raises(UsageError, match=r"models/model.json cannot be read"):
        open_graph(path)


class Payload:
    """Runs something when it is unpickled."""

    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return os.mkdir, (str(self.marker),)


def test_pickles_are_refused_and_not_run(archive, tmp_path):
    marker = tmp_path / "ran"
    saved, plain = tmp_path / "saved.pt", tmp_path / "plain.pkl"
    torch.save(Payload(marker), saved)
    plain.write_bytes(pickle.dumps(Payload(marker)))
    inside = repacked(archive, tmp_path, {"linear/data/sample_inputs/model.pt": saved.read_bytes()})
    for path in (saved, plain):
        with pytest.raises(UsageError, match="loading it would run the code in it"):
            open_graph(path)
    open_graph(inside).state()
    assert not marker.exists()


def test_a_file_that_is_not_a_graph_is_refused(tmp_path):
    path = tmp_path / "notes.txt"
    path.write_text("hello")
    with pytest.raises(
        UsageError, match=r"notes.txt is not a graph that paritas can read; give a .pt2"
    ):
        open_graph(path)
    with pytest.raises(UsageError, match="is a folder, not a graph"):
        open_graph(tmp_path)
    with pytest.raises(UsageError, match="does not exist"):
        open_graph(tmp_path / "none.pt2")


def repacked(path, folder, changed, compression=zipfile.ZIP_STORED):
    """A copy of an archive with other members; None leaves one out."""
    to = folder / "changed.pt2"
    with zipfile.ZipFile(path) as old, zipfile.ZipFile(to, "w") as new:
        for member in old.infolist():
            data = changed.get(member.filename, old.read(member))
            if data is not None:
                kind = compression if member.filename in changed else zipfile.ZIP_STORED
                new.writestr(member.filename, data, compress_type=kind)
    return to


def test_a_description_that_was_tampered_with_is_read_or_refused(archive, tmp_path):
    with zipfile.ZipFile(archive) as opened:
        program = json.loads(opened.read("linear/models/model.json"))
    places = list(places_in(program))
    random = Random(0)
    for _ in range(60):
        changed = copy.deepcopy(program)
        *path, last = random.choice(places)
        held = changed
        for key in path:
            held = held[key]
        held[last] = random.choice(JUNK)
        written = {"linear/models/model.json": json.dumps(changed).encode()}
        try:
            assert isinstance(open_graph(repacked(archive, tmp_path, written)), Graph)
        except UsageError:
            continue


JUNK = [None, -1, 2**70, "x", [], {}, {"as_name": 3}, {"as_expr": {"expr_str": "Symbol(3)"}}]


def places_in(tree, path=()):
    """Where something is in JSON."""
    items = tree.items() if isinstance(tree, dict) else enumerate(tree)
    for key, value in items:
        yield (*path, key)
        if isinstance(value, dict | list):
            yield from places_in(value, (*path, key))

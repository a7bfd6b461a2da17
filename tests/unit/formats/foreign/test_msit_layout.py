from __future__ import annotations

import csv
import re

import numpy as np
import pytest
import torch

from paritas.core.errors import ParitasError, UsageError
from paritas.formats.dumps.reading import Dump
from paritas.formats.dumps.writing import DumpWriter
from paritas.formats.files.records import Entry, Header, Record, Site, TensorFacts
from paritas.formats.files.tensor_bytes import as_stored, digest
from paritas.formats.foreign.npy_tree import NpyTree, call_name, is_of_tree, model_name, read_npy

TIME = r"\d{20}"


def site(name="mm", op="aten.mm.default", **more) -> Site:
    facts = {"source": "fx", "level": "node", "graph": "graph_0", **more}
    return Site(name=name, op=op, **facts)


def entry(where: Site, tensor: torch.Tensor, *, step=0, bare=False, sequence=0) -> Entry:
    stored = as_stored(tensor)
    facts = TensorFacts(
        dtype=str(tensor.dtype).removeprefix("torch."),
        shape=tuple(tensor.shape),
        stride=tensor.stride(),
    )
    return Entry(
        sequence=sequence,
        step=step,
        site=where,
        tensor=facts,
        stored=None if bare else stored,
        digest=digest(stored),
    )


def record_of(what: Entry) -> Record:
    return Record(
        sequence=0, step=what.step, rank=0, id=what.site.id, site=what.site, tensor=what.tensor
    )


@pytest.fixture(name="tree")
def _tree(tmp_path):
    return NpyTree(tmp_path, 1, 2)


def test_files_are_named_as_torchair_names_them(tree, tmp_path):
    where = site()
    first = tree.write(entry(where_input(where, "0"), torch.ones(2, 3)))
    listed = tree.write(entry(where_input(where, "1.2"), torch.zeros(3)))
    named = tree.write(entry(where_input(where, "mask"), torch.zeros(1)))
    result = tree.write(entry(where, torch.ones(2, 4), step=0))
    folder = "worldsize2_global_rank1/graph_0/0"
    assert re.fullmatch(rf"{folder}/mm-aten\.mm\.default\.INPUT\.0\.{TIME}\.npy", first.file)
    assert re.fullmatch(rf"{folder}/mm-aten\.mm\.default\.INPUT\.1\.2\.{TIME}\.npy", listed.file)
    assert re.fullmatch(rf"{folder}/mm-aten\.mm\.default\.INPUT\.mask\.{TIME}\.npy", named.file)
    assert re.fullmatch(rf"{folder}/mm-aten\.mm\.default\.OUTPUT\.0\.{TIME}\.npy", result.file)
    assert np.load(tmp_path / first.file).shape == (2, 3)
    assert first.nbytes == (tmp_path / first.file).stat().st_size


def where_input(where: Site, position: str) -> Site:
    return site(where.name, where.op, side="input", position=position, call=where.call)


def test_files_of_one_call_share_their_time_and_other_calls_have_their_own(tree):
    def time_of(where, step=0):
        return tree.write(entry(where, torch.ones(1), step=step)).file.split(".")[-2]

    taken, given = time_of(where_input(site(), "0")), time_of(site())
    assert taken == given
    others = [time_of(site(call=1)), time_of(site("add")), time_of(site(), step=1)]
    assert len({given, *others}) == 4
    assert sorted([given, *others]) == [given, *others]


def test_a_step_is_a_folder_and_the_backward_pass_a_model_of_its_own(tree):
    backward = tree.write(entry(site(phase="backward"), torch.ones(1), step=7))
    assert backward.file.startswith("worldsize2_global_rank1/graph_0_backward/7/")


def test_what_may_stand_in_no_file_name_is_replaced(tree):
    eager = {"op": "aten.mm.default", "source": "eager", "level": "op", "graph": ""}
    inside = tree.write(entry(site("layers.0/aten.mm.default", **eager), torch.ones(1)))
    outside = tree.write(entry(site("aten.mm.default", **eager), torch.ones(1)))
    assert "/eager/0/layers_0_mm-aten.mm.default.OUTPUT.0." in inside.file
    assert "/eager/0/mm-aten.mm.default.OUTPUT.0." in outside.file
    assert call_name("layers.0/aten.mm", "a b\\c:d") == "layers.0_aten.mm-a_b_c_d"
    assert model_name("a.b/c\\d e", "forward") == "a_b_c_d_e"
    module = site("layers.0.attn", "Attention", source="eager", level="module", graph="")
    assert "/layers_0_attn-Attention.OUTPUT.0." in tree.write(entry(module, torch.ones(1))).file


def test_a_node_of_fused_code_is_told_from_the_buffer_that_holds_its_value(tree):
    node = tree.write(entry(site(source="fused"), torch.ones(1)))
    buffer = tree.write(entry(site(source="fused", level="buffer"), torch.ones(1)))
    given = tree.write(entry(site("x", "placeholder", source="fused"), torch.ones(1)))
    names = [payload.file.split("/")[-1].split(".OUTPUT")[0] for payload in (node, buffer, given)]
    assert names == ["mm.node-aten.mm.default", "mm-aten.mm.default", "x-placeholder"]


def test_a_name_that_is_too_long_becomes_a_number_that_mapping_csv_explains(tree, tmp_path):
    long = "a" * 300
    payloads = [tree.write(entry(site(long, call=call), torch.ones(1))) for call in range(2)]
    with (tmp_path / payloads[0].file).with_name("mapping.csv").open() as file:
        rows = list(csv.reader(file))
    assert [row[0] for row in rows] == [payload.file.split("/")[-1] for payload in payloads]
    assert all(re.fullmatch(r"\d+\.npy", row[0]) for row in rows)
    assert all(row[1].startswith(f"{long}-aten.mm.default.OUTPUT.0.") for row in rows)


@pytest.mark.parametrize("text", ["2", "None", "'sum'", "1e-05", "device(type='cpu')"])
def test_what_is_no_tensor_is_a_file_too(tree, tmp_path, text):
    what = Entry(sequence=0, step=0, site=where_input(site(), "1"), value=text)
    found = np.load(tmp_path / tree.write(what).file, allow_pickle=False)
    assert str(found) == text.strip("'")


def test_known_bytes_are_a_second_name_of_the_same_file(tree, tmp_path):
    tensor = torch.arange(6.0)
    first = tree.write(entry(site(), tensor))
    again = tree.write(entry(site("view"), tensor, bare=True))
    assert (tmp_path / first.file).samefile(tmp_path / again.file)


def test_known_bytes_of_another_shape_or_dtype_are_taken_from_the_earlier_file(tree, tmp_path):
    tensor = torch.arange(6, dtype=torch.bfloat16)
    tree.write(entry(site(), tensor))
    for other in (tensor.reshape(2, 3), tensor.view(torch.int16), tensor.expand(4, 6)):
        what = entry(site("view"), other, bare=True)
        path = tmp_path / tree.write(what).file
        assert torch.equal(read_npy(path, record_of(what)), other)


def test_the_same_bytes_repeated_along_another_dimension_are_other_values(tree, tmp_path):
    row = torch.arange(3.0)
    for call, tensor in enumerate((row.expand(3, 3), row[:, None].expand(3, 3))):
        what = entry(site(call=call), tensor, bare=call > 0)
        path = tmp_path / tree.write(what).file
        assert torch.equal(read_npy(path, record_of(what)), tensor)


def test_bytes_that_never_came_are_an_error(tree):
    with pytest.raises(ParitasError, match=r"mm#0/output\.0 of step 0 has no values"):
        tree.write(entry(site(), torch.ones(2), bare=True))


def test_nothing_is_written_over(tree, tmp_path):
    first = tree.write(entry(site(), torch.ones(2)))
    second = tree.write(entry(site(), torch.zeros(2)))
    assert np.load(tmp_path / first.file).tolist() == [1, 1]
    assert np.load(tmp_path / second.file).tolist() == [0, 0]


def test_a_dropped_step_leaves_nothing_and_links_to_it_stay_whole(tree, tmp_path):
    tensor = torch.arange(6.0)
    gone = tree.write(entry(site(), tensor, step=0))
    stays = tree.write(entry(site(), tensor, step=1))
    tree.drop_step(0)
    assert not (tmp_path / gone.file).parent.exists()
    assert np.load(tmp_path / stays.file).tolist() == tensor.tolist()
    after = tree.write(entry(site(), tensor, step=2))
    assert np.load(tmp_path / after.file).tolist() == tensor.tolist()
    assert sorted(p.name for p in (tmp_path / "worldsize2_global_rank1/graph_0").iterdir()) == [
        "1",
        "2",
    ]


def test_a_damaged_file_is_refused(tree, tmp_path):
    what = entry(site(), torch.ones(2))
    path = tmp_path / tree.write(what).file
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ParitasError, match=r"\.npy is damaged: its header says"):
        read_npy(path, record_of(what))


def test_what_belongs_to_such_a_dump_is_known_by_name():
    graph = "dynamo_original_graph_0_rank_0_pid_1_ts_20240125031118787351.txt"
    assert is_of_tree("worldsize2_global_rank1")
    assert is_of_tree(graph)
    assert not is_of_tree("notes.txt")
    assert not is_of_tree("worldsize2_global_rank1.zip")


def header(rank=0, world_size=1) -> Header:
    return Header(run="same", rank=rank, world_size=world_size, layout="msit")


def test_a_dump_in_this_layout_is_read_like_any_other(tmp_path):
    tensors = [torch.arange(6.0), torch.arange(6.0).bfloat16(), torch.ones(1).expand(2, 3)]
    for rank in range(2):
        writer = DumpWriter(tmp_path, header(rank, 2))
        for call, tensor in enumerate(tensors):
            writer.add(entry(site(call=call), tensor + rank, sequence=call))
        writer.add(Entry(sequence=9, step=0, site=where_input(site(), "1"), value="0.5"))
        writer.close(header(rank, 2))
    dump = Dump.open(tmp_path)
    assert dump.problems == []
    records = list(dump.records())
    assert [record.value for record in records if record.tensor is None] == ["0.5", "0.5"]
    found = [record for record in records if record.tensor is not None]
    assert len(found) == 6
    for record in found:
        read = dump.read(record)
        assert torch.equal(read, tensors[record.site.call] + record.rank)
        assert read.dtype == tensors[record.site.call].dtype


def test_a_ring_keeps_the_last_steps_in_this_layout_too(tmp_path):
    writer = DumpWriter(tmp_path, header(), last=2)
    for step in range(4):
        writer.begin_step(step)
        writer.add(entry(site(), torch.ones(3), step=step, sequence=step))
    writer.close(header())
    kept = tmp_path / "worldsize1_global_rank0" / "graph_0"
    assert sorted(path.name for path in kept.iterdir()) == ["2", "3"]
    dump = Dump.open(tmp_path)
    assert dump.problems == []
    assert [dump.read(record).tolist() for record in dump.records()] == [[1.0] * 3] * 2


def test_a_second_run_is_refused_or_replaces_the_tree_as_a_whole(tmp_path):
    writer = DumpWriter(tmp_path, header())
    writer.add(entry(site(), torch.ones(3), step=5))
    writer.close(header())
    with pytest.raises(UsageError, match="is not empty"):
        DumpWriter(tmp_path, header())
    writer = DumpWriter(tmp_path, header(), overwrite=True)
    writer.add(entry(site(), torch.ones(3), step=6))
    writer.close(header())
    kept = tmp_path / "worldsize1_global_rank0" / "graph_0"
    assert [path.name for path in kept.iterdir()] == ["6"]

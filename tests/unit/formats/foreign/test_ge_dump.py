"""A tree of tensor files of Ascend's graph engine."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from paritas.core.errors import UsageError
from paritas.formats.dumps.opening import open_dump as open_any
from paritas.formats.foreign.ge_dump import looks_like, open_dump
from paritas.formats.foreign.ge_files import Levels, parse_levels, parse_name
from unit.formats.foreign import ge_files as ge
from unit.formats.foreign.ge_graph_texts import graph_text, op_text

NEW = "msit_ge_dump/worldsize2_global_rank{rank}/20240130064152/{rank}/graph_1/11/{step}"
OLD = "msprobe_ge_dump/20240130064152/{rank}/graph_1/11/{step}"
ONES, TWOS = np.float32([1, 1]), np.float32([[2, 2]])


def add_bytes(taken=ONES, given=TWOS, name="Add_2"):
    return ge.ge_bytes([ge.tensor(taken, ge.F32)], [ge.tensor(given, ge.F32)], name=name)


def ids(dump, rank=0):
    return [record.id for record in dump.ranks[rank].records]


@pytest.mark.parametrize("layout", [NEW, OLD])
def test_both_generations_of_the_tree_are_read_rank_by_rank(tmp_path, layout):
    for rank in (0, 1):
        for step in (2, 10):
            folder = layout.format(rank=rank, step=step)
            data = add_bytes(given=TWOS + step + 100 * rank)
            ge.write(tmp_path, folder, ge.file_name("Add", "Add_2", ge.TIME + step), data)
    assert looks_like(tmp_path)
    dump = open_any(tmp_path)
    assert (dump.kind, dump.problems, list(dump.ranks)) == ("ge", [], [0, 1])
    assert [record.step for record in dump.ranks[1].records] == [2, 2, 10, 10]
    last = dump.ranks[1].records[-1]
    assert last.id == "forward/graph_1/Add_2#0/output.0"
    assert (last.sequence, last.rank, last.site.op) == (3, 1, "Add")
    assert (last.site.source, last.site.level) == ("fused", "buffer")
    assert (last.tensor.dtype, last.tensor.shape) == ("float32", (1, 2))
    assert dump.read(last).tolist() == [[112.0, 112.0]]
    assert (dump.header(1).world_size, dump.header(1).data) == (2, "tensor")


@pytest.mark.parametrize(
    "given",
    ["", "msit_ge_dump", "msit_ge_dump/worldsize2_global_rank1", NEW.format(rank=1, step=3)],
)
def test_any_level_of_the_tree_may_be_given(tmp_path, given):
    ge.write(tmp_path, NEW.format(rank=1, step=3), ge.file_name("Add", "Add_2"), add_bytes())
    dump = open_dump(tmp_path / given)
    assert [(record.rank, record.step) for record in dump.records()] == [(1, 3), (1, 3)]
    assert ids(dump, 1)[0] == "forward/graph_1/Add_2#0/input.0"
    assert dump.read(dump.ranks[1].records[0]).tolist() == [1, 1]


def test_one_file_is_a_dump_too(tmp_path):
    path = ge.write(tmp_path, "", ge.file_name("Add", "Add_2"), add_bytes())
    assert looks_like(path)
    dump = open_dump(path)
    assert ids(dump) == ["forward/Add_2#0/input.0", "forward/Add_2#0/output.0"]
    assert dump.read(dump.ranks[0].records[1]).tolist() == [[2, 2]]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("Add.Add_2.44.6.1706596912161941", ("Add", "Add_2", (44, 6))),
        ("Add.a.b.0.Add_2.44.6.1706596912161941", ("Add", "a.b.0.Add_2", (44, 6))),
        ("Conv2D.c_lxslice0.2.9.1670205071724946.4.487.0.0", ("Conv2D", "c_lxslice0", (2, 9))),
        ("Add.Add_2.44.1706596912161941", ("Add", "Add_2", (44,))),
        ("Add.1706596912161941.44.6.1706596912161942", ("Add", "1706596912161941", (44, 6))),
        ("mm-aten.mm.default.INPUT.0.20240125031118787351.npy", None),
        ("libc.so.1.2.3", None),
        ("Add.Add_2.1706596912161941", None),
        ("Add.Add_2.44.6.1706596912161941.txt", None),
        ("a.b.c.d.e", None),
        ("Add..44.6.1706596912161941", None),
    ],
)
def test_names_are_taken_apart_from_the_right(name, expected):
    found = parse_name(name)
    told = found and (found.op_type, found.op_name, found.numbers[: len(expected[2])])
    assert told == expected


def test_folders_that_only_look_like_the_tree_say_nothing(tmp_path):
    assert parse_levels(tmp_path / "20240130064152" / "data", ()) == Levels()
    assert parse_levels(tmp_path / "data", ("7",)).step == 7


def test_calls_of_one_operator_in_a_step_are_all_kept_in_their_order(tmp_path):
    folder = OLD.format(rank=0, step=0)
    for number in (10, 2, 1):
        name = ge.file_name("Add", "Add_2", ge.TIME + number)
        ge.write(tmp_path, folder, name, add_bytes(given=TWOS * number))
    dump = open_dump(tmp_path)
    given = [record for record in dump.records() if record.site.side == "output"]
    assert [record.site.call for record in given] == [0, 1, 2]
    assert [dump.read(record)[0, 0].item() for record in given] == [2, 4, 20]


def test_threads_of_one_call_are_told_apart_by_their_numbers(tmp_path):
    for thread in (10, 9):
        name = ge.file_name("Conv2D", "conv") + f".4.487.{thread}.0"
        ge.write(tmp_path, OLD.format(rank=0, step=0), name, add_bytes(given=TWOS * thread))
    dump = open_dump(tmp_path)
    given = [record for record in dump.records() if record.site.side == "output"]
    assert [dump.read(record)[0, 0].item() for record in given] == [18, 20]


def test_the_header_spells_a_name_that_a_file_name_cannot(tmp_path):
    data = add_bytes(name="layers.0/Add 2")
    ge.write(tmp_path, "", ge.file_name("Add", "layers_0_Add_2"), data)
    ge.write(tmp_path, "", ge.file_name("Add", "Mul_1", ge.TIME + 1), data)
    names = [record.site.name for record in open_dump(tmp_path).records()]
    assert names == ["layers.0/Add 2"] * 2 + ["Mul_1"] * 2


def test_numbers_for_names_are_looked_up(tmp_path):
    folder = OLD.format(rank=0, step=0)
    long_name = "Add_2Cast_9" * 30
    ge.write(tmp_path, folder, "12345678901234567890", add_bytes(name=long_name))
    ge.write(tmp_path, folder, "777", add_bytes())
    rows = f"12345678901234567890,{ge.file_name('AutomaticBufferFusionOp', long_name)}\n"
    ge.write(tmp_path, folder, "mapping.csv", rows.encode())
    assert looks_like(tmp_path)
    dump = open_dump(tmp_path)
    assert {record.site.name for record in dump.records()} == {long_name}
    assert {record.site.op for record in dump.records()} == {"AutomaticBufferFusionOp"}
    assert "777 has a number for a name, but no mapping.csv explains it" in dump.problems[0]


def test_the_graphs_beside_it_tell_the_nodes(tmp_path):
    top = tmp_path / "msit_ge_dump"
    original = graph_text(
        op_text("x", "Data", outputs=[""]),
        op_text("Add_2", "Add", ["x:0"], outputs=["add_1-aten.add.Tensor.OUTPUT.0"]),
        op_text("Cast_9", "Cast", ["Add_2:0"], outputs=["to-aten._to_copy.default.OUTPUT.0"]),
        op_text("Mul", "Mul", ["Cast_9:0"], outputs=["mul-aten.mul.Tensor.OUTPUT.0"]),
    )
    for rank in (0, 1):
        name = f"dynamo_original_graph_1_rank_{rank}_pid_7_ts_2024.txt"
        text = original if rank else original.replace("mul-", "other-")
        ge.write(top, "", name, text.encode())
        folder = NEW.format(rank=rank, step=0).removeprefix("msit_ge_dump/")
        fused = ge.file_name("AutomaticBufferFusionOp", "Add_2Cast_9")
        ge.write(top, folder, fused, add_bytes(name="Add_2Cast_9"))
        ge.write(top, folder, ge.file_name("Mul", "Mul", ge.TIME + 1), add_bytes(name="Mul"))
    dump = open_dump(tmp_path)
    assert dump.problems == []
    sites = [record.site for record in dump.ranks[1].records]
    assert [(site.name, site.side, site.nodes, site.exact) for site in sites] == [
        ("Add_2Cast_9", "input", ("x",), False),
        ("Add_2Cast_9", "output", ("add_1", "to"), True),
        ("Mul", "input", ("to",), True),
        ("Mul", "output", ("mul",), True),
    ]
    assert dump.ranks[0].records[3].site.nodes == ("other",)


def test_an_om_model_in_json_beside_it_tells_what_was_fused(tmp_path):
    listed = {"key": "_datadump_original_op_names", "value": {"list": {"s": ["Add_2", "Cast_9"]}}}
    ops = [{"name": "fused_1", "type": "Fused", "input": ["x:0"], "attr": [listed]}]
    model = json.dumps({"name": "m", "graph": [{"name": "g", "op": ops}]})
    captured = graph_text(
        op_text("x", "Data", outputs=[""]),
        op_text("Add_2", "Add", ["x:0"], outputs=["add_1-aten.add.Tensor.OUTPUT.0"]),
        op_text("Cast_9", "Cast", ["Add_2:0"], outputs=["to-aten._to_copy.default.OUTPUT.0"]),
    )
    seen = {}
    for name, text in (("model.json", model), ("settings.json", '{"other": 1}')):
        top = tmp_path / name / "msit_ge_dump"
        ge.write(top, "", name, text.encode())
        ge.write(top, "", "dynamo_original_graph_1_rank_0_pid_7_ts_2024.txt", captured.encode())
        folder = NEW.format(rank=0, step=0).removeprefix("msit_ge_dump/")
        ge.write(top, folder, ge.file_name("Fused", "fused_1"), add_bytes(name="fused_1"))
        dump = open_dump(top)
        assert dump.problems == []
        seen[name] = [record.site.nodes for record in dump.ranks[0].records]
    assert seen["model.json"][-1] == ("add_1", "to")
    assert seen["settings.json"][-1] == ()


@pytest.mark.parametrize("name", ["model.json", "ge_proto_00000001_Build.txt"])
def test_a_graph_alone_is_refused_with_what_to_give_instead(name, tmp_path):
    model = {"name": "m", "graph": [{"name": "g", "op": [{"name": "x", "type": "Data"}]}]}
    text = json.dumps(model) if name.endswith("json") else graph_text(op_text("x", "Data"))
    (tmp_path / name).write_text(text)
    message = "is a graph of Ascend's engine, which has no tensors: put it into the folder"
    with pytest.raises(UsageError, match=message):
        open_any(tmp_path / name)


def test_models_of_one_name_are_told_apart_by_their_numbers(tmp_path):
    for number in (11, 12):
        folder = f"20240130064152/0/graph_1/{number}/0"
        ge.write(tmp_path, folder, ge.file_name("Add", "Add_2", ge.TIME + number), add_bytes())
    graphs = {record.site.graph for record in open_dump(tmp_path).records()}
    assert graphs == {"graph_1_11", "graph_1_12"}


def test_two_runs_in_one_folder_are_a_problem(tmp_path):
    for time in ("20240130064152", "20240130064999"):
        ge.write(tmp_path, f"{time}/0/graph_1/11/0", ge.file_name("Add", "Add_2"), add_bytes())
    dump = open_dump(tmp_path)
    assert [record.site.call for record in dump.records()] == [0, 0, 1, 1]
    (problem,) = dump.problems
    assert problem == (
        "rank 0: runs that began at 20240130064152, 20240130064999 have the same steps; the later "
        "ones count as further calls. Give the folder of one run"
    )


def test_what_is_damaged_is_named_and_the_rest_goes_on(tmp_path):
    good, bad = ge.file_name("Add", "Add_2"), ge.file_name("Add", "Bad", ge.TIME + 1)
    ge.write(tmp_path, "", good, add_bytes()[:-3])
    ge.write(tmp_path, "", bad, b"\xff" * 40)
    ge.write(
        tmp_path, "", ge.file_name("Str", "s", ge.TIME + 2), ge.ge_bytes([ge.tensor(ONES, 13)])
    )
    ge.write(tmp_path, "", "notes.pdf", b"")
    dump = open_dump(tmp_path)
    first, cut, damaged, text = dump.records()
    assert dump.read(first).tolist() == [1, 1]
    with pytest.raises(UsageError, match=r"output\.0 of .* the file ends at byte .*, before byte"):
        dump.read(cut)
    with pytest.raises(UsageError, match="claims a header of 18446744073709551615 bytes"):
        dump.read(damaged)
    with pytest.raises(UsageError, match="its dtype DT_STRING cannot be read as a tensor"):
        dump.read(text)
    assert text.tensor is None
    assert len(dump.problems) == 5
    assert "1 files have names that the engine never uses: notes.pdf" in dump.problems


def test_a_file_that_changed_since_is_not_read_as_another(tmp_path):
    path = ge.write(tmp_path, "", ge.file_name("Add", "Add_2"), add_bytes())
    dump = open_dump(tmp_path)
    path.write_bytes(add_bytes(taken=np.float32([1, 2, 3])))
    with pytest.raises(UsageError, match="it changed after the dump was opened"):
        dump.read(dump.ranks[0].records[1])
    path.unlink()
    with pytest.raises(UsageError, match="is missing"):
        dump.read(dump.ranks[0].records[1])


def test_a_link_to_outside_is_not_followed(tmp_path):
    outside = ge.write(tmp_path, "outside", "secret", add_bytes())
    ge.write(tmp_path, "dump", ge.file_name("Add", "Add_2"), add_bytes())
    (tmp_path / "dump" / ge.file_name("Add", "Link")).symlink_to(outside)
    dump = open_dump(tmp_path / "dump")
    assert {record.site.name for record in dump.records()} == {"Add_2"}
    assert "outside the dump" in dump.problems[0]


def test_blocked_layouts_without_the_programs_shape_are_pointed_out(tmp_path):
    one = ge.tensor(np.zeros((1, 1, 16, 16), np.float32), ge.F32, format=29)
    one.pop("original")
    ge.write(tmp_path, "", ge.file_name("Add", "Add_2"), ge.ge_bytes([one]))
    dump = open_dump(tmp_path)
    assert "only in the device's layout (FRACTAL_NZ), including its padding" in dump.problems[0]


def test_positions_count_numerically(tmp_path):
    taken = [ge.tensor(np.float32([number]), ge.F32) for number in range(12)]
    ge.write(tmp_path, "", ge.file_name("ConcatV2", "c"), ge.ge_bytes(taken, name="c"))
    dump = open_dump(tmp_path)
    assert [record.site.position for record in dump.records()] == [str(n) for n in range(12)]
    assert torch.cat([dump.read(record) for record in dump.records()]).tolist() == [*range(12)]


def test_a_folder_without_such_files_is_refused(tmp_path):
    ge.write(tmp_path, "", "mm-aten.mm.default.INPUT.0.20240125031118787351.npy", b"")
    assert not looks_like(tmp_path)
    with pytest.raises(UsageError, match="has no tensor files of the graph engine"):
        open_dump(tmp_path)

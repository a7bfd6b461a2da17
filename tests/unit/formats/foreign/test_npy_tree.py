"""The trees of `.npy` files that torchair leaves, in all three generations of the layout."""

from __future__ import annotations

import datetime as dt
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

from paritas.core.errors import UsageError
from paritas.formats.foreign import npy_tree

if TYPE_CHECKING:
    from pathlib import Path

NOW = "20240125031118787351"
LATER = "20240125031118900000"
MM = "mm-aten.mm.default"


def save(folder: Path, name: str, values: object) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    np.save(folder / name, np.array(values) if not isinstance(values, np.ndarray) else values)


def ids(path: Path) -> list[tuple[int, int, str]]:
    return [(record.rank, record.step, record.id) for record in npy_tree.open_dump(path).records()]


@pytest.mark.parametrize("top", ["msit_fx_dump", "msprobe_fx_dump", ""])
def test_the_layout_with_ranks_gives_rank_model_and_token(tmp_path: Path, top: str) -> None:
    for rank in (0, 1):
        for token in (0, 10, 2):
            folder = tmp_path / top / f"worldsize2_global_rank{rank}" / "graph_1" / str(token)
            save(folder, f"{MM}.OUTPUT.0.{NOW}.npy", np.ones((2, 3), np.float32))
    assert npy_tree.looks_like(tmp_path)
    assert ids(tmp_path) == [
        (rank, token, "forward/graph_1/mm#0/output.0") for rank in (0, 1) for token in (0, 2, 10)
    ]
    assert npy_tree.open_dump(tmp_path).header(1).world_size == 2


@pytest.mark.parametrize(
    "layout", ["msit_fx_dump/data_dump/{}/gm_{}_dump", "data_dump/{}/gm_{}_dump"]
)
def test_the_token_folder_of_older_layouts_is_one_higher_than_the_token(
    tmp_path: Path, layout: str
) -> None:
    for token in (1, 2):
        for number, time in enumerate(("20240125031100000000", "20240125031199000000")):
            save(tmp_path / layout.format(token, time), f"{MM}.OUTPUT.0.{NOW}.npy", [float(number)])
    assert npy_tree.looks_like(tmp_path)
    # The time of compilation differs from run to run; the place among the graphs does not.
    assert ids(tmp_path) == [
        (0, token, f"forward/gm_{graph}/mm#0/output.0") for token in (0, 1) for graph in (0, 1)
    ]


def test_the_folder_of_the_graph_may_come_before_that_of_the_token(tmp_path: Path) -> None:
    folder = tmp_path / "gm_20240125031100000000_dump" / "data_dump" / "3"
    save(folder, f"{MM}.OUTPUT.0.{NOW}.npy", [1.0])
    assert ids(tmp_path) == [(0, 2, "forward/gm_0/mm#0/output.0")]


def test_a_part_of_a_tree_keeps_rank_and_token_of_the_folders_above(tmp_path: Path) -> None:
    folder = tmp_path / "worldsize4_global_rank3" / "graph_1" / "7"
    save(folder, f"{MM}.OUTPUT.0.{NOW}.npy", [1.0])
    assert ids(folder) == [(3, 7, "forward/graph_1/mm#0/output.0")]
    assert ids(folder.parent) == [(3, 7, "forward/graph_1/mm#0/output.0")]


def test_inputs_are_in_numeric_order_and_before_outputs(tmp_path: Path) -> None:
    for place in ("10", "2", "0.10", "0.9"):
        save(tmp_path, f"cat-aten.cat.default.INPUT.{place}.{NOW}.npy", np.zeros(1, np.float32))
    save(tmp_path, f"cat-aten.cat.default.OUTPUT.0.{NOW}.npy", np.zeros(1, np.float32))
    found = list(npy_tree.open_dump(tmp_path).records())
    assert [(one.site.side, one.site.position) for one in found] == [
        ("input", "0.9"), ("input", "0.10"), ("input", "2"), ("input", "10"), ("output", "0"),
    ]  # fmt: skip
    assert [one.sequence for one in found] == [0, 1, 2, 3, 4]
    assert {one.site.op for one in found} == {"aten.cat.default"}


def test_nodes_are_in_the_order_of_their_times_and_calls_are_counted(tmp_path: Path) -> None:
    save(tmp_path, f"{MM}.OUTPUT.0.{LATER}.npy", [2.0])
    save(tmp_path, f"{MM}.OUTPUT.0.{NOW}.npy", [1.0])
    save(tmp_path, "add-aten.add.Tensor.OUTPUT.0.20240125031118800000.npy", [3.0])
    dump = npy_tree.open_dump(tmp_path)
    found = list(dump.records())
    assert [one.id for one in found] == [
        "forward/mm#0/output.0", "forward/add#0/output.0", "forward/mm#1/output.0",
    ]  # fmt: skip
    assert [dump.read(one).item() for one in found] == [1.0, 3.0, 2.0]


@pytest.mark.parametrize(
    ("given", "text"),
    [
        (3, "3"),
        (0.5, "0.5"),
        (float("inf"), "inf"),
        (True, "True"),
        (1 + 2j, "(1+2j)"),
        ("mean", "'mean'"),
        (None, "None"),
        (torch.float16, "torch.float16"),
    ],
)
def test_an_argument_that_is_no_tensor_is_a_value(tmp_path: Path, given: object, text: str) -> None:
    save(tmp_path, f"to-aten.to.dtype.INPUT.1.{NOW}.npy", np.array(given))
    (record,) = npy_tree.open_dump(tmp_path).records()
    assert (record.value, record.tensor) == (text, None)


def test_a_result_without_dimensions_is_a_tensor(tmp_path: Path) -> None:
    save(tmp_path, f"sum-aten.sum.default.OUTPUT.0.{NOW}.npy", np.array(2.5))
    dump = npy_tree.open_dump(tmp_path)
    (record,) = dump.records()
    assert record.tensor is not None
    assert dump.read(record).item() == 2.5


def test_a_number_can_be_read_as_a_tensor_for_it_may_have_been_one(tmp_path: Path) -> None:
    save(tmp_path, f"add-aten.add.Tensor.INPUT.1.{NOW}.npy", np.array(7))
    dump = npy_tree.open_dump(tmp_path)
    (record,) = dump.records()
    assert dump.read(record).item() == 7


def test_a_number_for_a_name_is_looked_up_in_the_mapping(tmp_path: Path) -> None:
    long = "add_" * 70 + f"-aten.add.Tensor.OUTPUT.0.{NOW}"
    save(tmp_path, "1234567890.npy", np.ones(2, np.float32))
    (tmp_path / "mapping.csv").write_text(f"1234567890,{long}\n")
    (record,) = npy_tree.open_dump(tmp_path).records()
    assert record.site.name == "add_" * 70
    assert record.payload is not None
    assert record.payload.file == "1234567890.npy"


def test_a_name_that_nothing_explains_is_told_and_its_tensor_kept(tmp_path: Path) -> None:
    save(tmp_path / "worldsize1_global_rank0" / "g" / "0", "99.npy", np.ones(2, np.float32))
    dump = npy_tree.open_dump(tmp_path)
    assert [record.id for record in dump.records()] == ["forward/g/99#0/output.0"]
    (problem,) = dump.problems
    assert problem == (
        "worldsize1_global_rank0/g/0/99.npy is not named after a node of a graph; its own name "
        "is used"
    )


def test_a_least_and_a_greatest_value_become_statistics(tmp_path: Path) -> None:
    save(tmp_path, f"{MM}.OUTPUT.0.{NOW}_min_max.npy", np.array([-1.5, np.inf], np.float32))
    dump = npy_tree.open_dump(tmp_path)
    (record,) = dump.records()
    assert record.statistics is not None
    assert (record.statistics.minimum, record.statistics.maximum) == (-1.5, None)
    assert record.statistics.positive_infinities == 1
    assert dump.header(0).data == "stats"
    with pytest.raises(UsageError, match="only statistics were recorded"):
        dump.read(record)


def test_the_whole_tensor_is_taken_where_its_summary_lies_beside_it(tmp_path: Path) -> None:
    save(tmp_path, f"{MM}.OUTPUT.0.{NOW}_min_max.npy", np.array([0.0, 1.0]))
    save(tmp_path, f"{MM}.OUTPUT.0.{NOW}.npy", np.array([0.0, 0.5, 1.0]))
    (record,) = npy_tree.open_dump(tmp_path).records()
    assert record.statistics is None
    assert record.tensor is not None
    assert record.tensor.shape == (3,)


def test_files_of_captured_graphs_are_read_too(tmp_path: Path) -> None:
    folder = tmp_path / "worldsize2_global_rank1"
    folder.mkdir()
    for count in (0, 10, 2):
        torch.save(torch.full((2,), float(count)), folder / f"mm_1_device_0_{count}.pt")
    assert npy_tree.looks_like(tmp_path)
    dump = npy_tree.open_dump(tmp_path)
    found = [
        (one.rank, one.step, one.site.name, dump.read(one)[0].item()) for one in dump.records()
    ]
    assert found == [(1, 0, "mm_1", 0.0), (1, 2, "mm_1", 2.0), (1, 10, "mm_1", 10.0)]


def test_values_come_out_as_they_went_in_whatever_their_order_in_memory(tmp_path: Path) -> None:
    values = np.random.default_rng(0).normal(size=(3, 4, 2)).astype(">f8")
    save(tmp_path, f"{MM}.OUTPUT.0.{NOW}.npy", np.asfortranarray(values))
    save(tmp_path, f"{MM}.OUTPUT.1.{NOW}.npy", values)
    dump = npy_tree.open_dump(tmp_path)
    for record in dump.records():
        assert np.array_equal(dump.read(record).numpy(), values)


def test_a_damaged_file_has_a_record_that_says_why_and_the_rest_goes_on(tmp_path: Path) -> None:
    save(tmp_path, f"{MM}.OUTPUT.0.{NOW}.npy", np.ones((8, 8), np.float32))
    save(tmp_path, f"{MM}.OUTPUT.1.{NOW}.npy", np.ones(2, np.float32))
    cut = tmp_path / f"{MM}.OUTPUT.0.{NOW}.npy"
    cut.write_bytes(cut.read_bytes()[:-5])
    dump = npy_tree.open_dump(tmp_path)
    first, second = dump.records()
    why = f"{MM}.OUTPUT.0.{NOW}.npy: shape (8, 8) of float32 takes 256 bytes, but there are 251"
    assert dump.problems == [why]
    with pytest.raises(UsageError, match="takes 256 bytes, but there are 251"):
        dump.read(first)
    assert dump.read(second).tolist() == [1.0, 1.0]


def test_a_link_out_of_the_dump_is_not_followed(tmp_path: Path) -> None:
    save(tmp_path / "dump", f"{MM}.OUTPUT.0.{NOW}.npy", [1.0])
    save(tmp_path, "secret.npy", [2.0])
    (tmp_path / "dump" / f"{MM}.OUTPUT.1.{NOW}.npy").symlink_to(tmp_path / "secret.npy")
    dump = npy_tree.open_dump(tmp_path / "dump")
    assert len(list(dump.records())) == 1
    assert dump.problems == [f"skipped: {MM}.OUTPUT.1.{NOW}.npy is a link to outside the dump"]


def test_a_tree_of_ours_is_read_without_its_index(tmp_path: Path) -> None:
    from paritas.formats.foreign.npy_tree import call_name, model_name, time_stamp

    time = time_stamp(dt.datetime(2024, 1, 2, tzinfo=dt.UTC))
    for phase, value in (("forward", 1.0), ("backward", 2.0)):
        folder = tmp_path / "worldsize1_global_rank0" / model_name("graph_0", phase) / "4"
        save(folder, f"{call_name('mul', 'aten.mul.Tensor')}.OUTPUT.0.{time}.npy", [value])
        save(folder, f"{call_name('mul', 'aten.mul.Tensor')}.INPUT.mask.{time}.npy", [value])
    assert sorted(ids(tmp_path)) == [
        (0, 4, "backward/graph_0/mul#0/input.mask"),
        (0, 4, "backward/graph_0/mul#0/output.0"),
        (0, 4, "forward/graph_0/mul#0/input.mask"),
        (0, 4, "forward/graph_0/mul#0/output.0"),
    ]


def test_a_folder_of_other_arrays_is_no_such_tree(tmp_path: Path) -> None:
    save(tmp_path, "weights.npy", [1.0])
    assert not npy_tree.looks_like(tmp_path)


def test_an_empty_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="has nothing to read as fx"):
        npy_tree.open_dump(tmp_path)

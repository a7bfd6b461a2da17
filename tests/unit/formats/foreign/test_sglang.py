"""Files of SGLang's dumper: tags in the name, a value and its meta-data inside."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from paritas.core.errors import UsageError
from paritas.formats.foreign import sglang

if TYPE_CHECKING:
    from pathlib import Path


def put(folder: Path, value: Any, meta: dict[str, Any] | None = None, **tags: object) -> None:
    """Write a file as the dumper does."""
    folder.mkdir(parents=True, exist_ok=True)
    name = "___".join(f"{key}={tag}" for key, tag in tags.items()) + ".pt"
    content = value if meta is None else {"value": value, "meta": {**tags, **meta}}
    torch.save(content, folder / name)


def test_tags_become_step_rank_name_and_order(tmp_path: Path) -> None:
    run = tmp_path / "dump_20250101"
    for rank in (0, 1):
        for index, layer in enumerate((9, 10, 2)):
            put(
                run, torch.full((2,), float(layer)), {"world_size": 2},
                step=4, rank=rank, dump_index=index + 1, name="attn_out",
                recompute_status="disabled", layer_id=layer,
            )  # fmt: skip
    assert sglang.looks_like(tmp_path)
    dump = sglang.open_dump(tmp_path)
    found = [(one.rank, one.step, one.sequence, one.site.name) for one in dump.records()]
    assert found == [
        (rank, 4, place, f"attn_out[layer_id={layer}]")
        for rank in (0, 1)
        for place, layer in enumerate((9, 10, 2))
    ]
    first = next(dump.records())
    assert first.site.module == "layers.9"
    assert dump.read(first).tolist() == [9.0, 9.0]
    assert dump.tags[0, 0]["dump_index"] == "1"
    assert dump.header(0).world_size == 2


def test_the_order_of_the_dump_index_is_numeric(tmp_path: Path) -> None:
    for index in (10, 9, 100):
        put(tmp_path, torch.zeros(1), {}, step=0, rank=0, dump_index=index, name=f"n{index}")
    assert [one.site.name for one in sglang.open_dump(tmp_path).records()] == ["n9", "n10", "n100"]


def test_dims_and_the_place_among_ranks_are_kept(tmp_path: Path) -> None:
    dims = "b s[cp:zigzag] h[tp] d # dp:=moe_dp"
    info = {"tp_rank": 1, "tp_size": 2, "tp_group": "x"}
    meta = {"dims": dims, "sglang_parallel_info": info}
    put(tmp_path, torch.zeros(1), meta, step=0, rank=1, dump_index=1, name="q")
    dump = sglang.open_dump(tmp_path)
    (record,) = dump.records()
    assert dump.dims_of(record) == dims
    assert dump.parallel == {1: {"tp_rank": 1, "tp_size": 2}}


@pytest.mark.parametrize("step", ["curr_step", "forward_pass_id"])
def test_earlier_releases_name_the_step_otherwise_and_save_the_bare_value(
    tmp_path: Path, step: str
) -> None:
    for rank in (0, 1):
        folder = tmp_path / f"sglang_dump_1753000000.5_{rank}"
        put(folder, torch.ones(3), **{step: 7}, name="hidden_states", layer_id=1)
    dump = sglang.open_dump(tmp_path)
    assert [(one.rank, one.step) for one in dump.records()] == [(0, 7), (1, 7)]


def test_the_same_name_again_is_another_call(tmp_path: Path) -> None:
    for index, status in ((1, "original"), (2, "recompute")):
        tags = {"step": 0, "rank": 0, "dump_index": index, "name": "x"}
        put(tmp_path, torch.zeros(1), {}, **tags, recompute_status=status)
    found = [record.id for record in sglang.open_dump(tmp_path).records()]
    assert found == ["forward/x#0/output.0", "forward/x#1/output.0"]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("grad__x", "backward/x#0/output.0"),
        ("param__model.w", "forward/model.w#0/output.0"),
        ("grad__param__model.w", "backward/model.w#0/output.0"),
        ("non_intrusive__model.layers.0.inputs.1", "forward/model.layers.0#0/input.1"),
        ("non_intrusive__bert.output.dense.output", "forward/bert.output.dense#0/output.0"),
        ("non_intrusive__m.output.1", "forward/m#0/output.1"),
        ("a=b___c", "forward/a=b___c#0/output.0"),
    ],
)
def test_names_that_the_dumper_makes_are_understood(
    tmp_path: Path, name: str, expected: str
) -> None:
    put(tmp_path, torch.zeros(1), {}, step=0, rank=0, dump_index=1, name=name)
    assert [record.id for record in sglang.open_dump(tmp_path).records()] == [expected]


def test_a_value_of_several_tensors_has_a_record_for_each(tmp_path: Path) -> None:
    value = {"k": torch.zeros(1), "v": [torch.ones(2), 3]}
    put(tmp_path, value, {}, step=0, rank=0, dump_index=1, name="cache")
    found = [(one.id, one.value) for one in sglang.open_dump(tmp_path).records()]
    assert found == [
        ("forward/cache#0/output.k", None),
        ("forward/cache#0/output.v.0", None),
        ("forward/cache#0/output.v.1", "3"),
    ]


def test_two_runs_in_one_folder_are_refused(tmp_path: Path) -> None:
    for run in ("dump_1", "dump_2"):
        put(tmp_path / run, torch.zeros(1), {}, step=0, rank=0, dump_index=1, name="x")
    with pytest.raises(UsageError, match="has 2 runs of sglang: give one of them, as dump_1"):
        sglang.open_dump(tmp_path)


def test_a_damaged_file_is_told_and_the_rest_goes_on(tmp_path: Path) -> None:
    put(tmp_path, torch.ones(1), {}, step=0, rank=0, dump_index=1, name="good")
    bad = "step=0___rank=0___dump_index=2___name=bad.pt"
    (tmp_path / bad).write_bytes(b"PK\x03\x04 no archive")
    dump = sglang.open_dump(tmp_path)
    good, damaged = dump.records()
    assert dump.read(good).tolist() == [1.0]
    assert len(dump.problems) == 1
    with pytest.raises(UsageError, match="not a zip archive"):
        dump.read(damaged)


def test_other_files_of_torch_are_no_such_dump(tmp_path: Path) -> None:
    torch.save(torch.zeros(1), tmp_path / "model___v=2.pt")
    assert not sglang.looks_like(tmp_path)

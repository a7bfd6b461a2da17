"""Dumps of other tools, compared: with themselves, with one another, sharded, ported."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import paritas
from paritas.core.results.findings import Status

ASCEND = Path(__file__).parents[3] / "shared" / "fixtures" / "ascend"
GE = Path(__file__).parents[1] / "data" / "ge"

needs_fixtures = pytest.mark.skipif(not ASCEND.is_dir(), reason="the fixtures are not here")


@needs_fixtures
def test_a_real_msprobe_dump_is_identical_to_itself_and_differs_from_its_other_step():
    steps = [ASCEND / "msprobe_gpu_stats" / f"step{n}" for n in (0, 1)]
    same = paritas.compare(steps[0], steps[0])
    assert same.status is Status.IDENTICAL
    assert same.coverage.compared > 2000
    assert all(row.limits for row in same.rows if row.judged_by == "statistics")
    other = paritas.compare(steps[1], steps[0])
    assert other.status is Status.DIFFERENT
    assert other.first.kind == "given"
    assert other.rows[other.first.row].name == "forward/conv1#0/input.0"


def test_files_of_the_graph_engine_are_identical_to_themselves():
    found = paritas.compare(GE, GE)
    assert found.status is Status.IDENTICAL
    assert {row.golden.path.rpartition(",")[0].rpartition(",")[2] for row in found.rows} == {
        "inputs",
        "outputs",
    }


def npy_dump(folder, values, token="1", call="20240125031118787351"):
    place = folder / "data_dump" / token / "gm_20240125031118_dump"
    place.mkdir(parents=True)
    for name, value in values.items():
        np.save(place / f"{name}.{call}.npy", value)
    return folder


def node(seed, inputs=12):
    rng = np.random.default_rng(seed)
    values = {f"cat-aten.cat.default.INPUT.0.{n}": rng.normal(size=(2, 3)) for n in range(inputs)}
    values["cat-aten.cat.default.OUTPUT.0"] = np.concatenate(list(values.values()))
    return values


def test_more_than_ten_inputs_keep_their_order(tmp_path):
    mine, golden = node(0), node(0)
    mine["cat-aten.cat.default.INPUT.0.10"] = mine["cat-aten.cat.default.INPUT.0.10"] + 1
    found = paritas.compare(npy_dump(tmp_path / "a", mine), npy_dump(tmp_path / "b", golden))
    inputs = [row for row in found.rows if row.side == "input"]
    assert [row.position for row in inputs] == [f"0.{n}" for n in range(12)]
    assert [row.position for row in inputs if not row.status.passes()] == ["0.10"]


def test_the_two_generations_of_token_folders_meet(tmp_path):
    old = npy_dump(tmp_path / "old", node(0), token="4")
    place = tmp_path / "new" / "worldsize1_global_rank0" / "graph_1" / "3"
    place.mkdir(parents=True)
    for name, value in node(0).items():
        np.save(place / f"{name}.20240125031118787351.npy", value)
    found = paritas.compare(tmp_path / "new", old)
    assert found.status is Status.IDENTICAL
    assert {row.step for row in found.rows} == {3}


def test_a_truncated_file_is_a_row_and_the_rest_goes_on(tmp_path):
    mine = npy_dump(tmp_path / "a", node(0))
    golden = npy_dump(tmp_path / "b", node(0))
    broken = next(mine.rglob("*INPUT.0.3.*"))
    broken.write_bytes(broken.read_bytes()[:150])
    found = paritas.compare(mine, golden)
    assert found.exit_code == 3
    (row,) = [row for row in found.rows if row.status is Status.UNVERIFIED]
    assert row.position == "0.3"
    assert "but there are 22" in row.reason
    assert sum(row.status is Status.IDENTICAL for row in found.rows) == 12


def test_a_port_with_other_names_layouts_and_a_fused_weight(tmp_path):
    torch.manual_seed(0)
    qkv, out = torch.randn(24, 8), torch.randn(8, 6)
    (tmp_path / "mine").mkdir()
    save_file(
        {"model.0.qkv.weight": qkv, "model.0.out.weight": out}, tmp_path / "mine" / "a.safetensors"
    )
    (tmp_path / "golden").mkdir()
    for name, part in zip("qkv", qkv.chunk(3), strict=True):
        np.save(tmp_path / "golden" / f"h.0.{name}_proj.weight.npy", part.numpy())
    np.save(tmp_path / "golden" / "h.0.out.weight.npy", out.T.numpy())
    rules = tmp_path / "rules.toml"
    rules.write_text(
        r"""
        [[rename]]
        my = '^model\.(\d+)\.qkv\.weight'
        golden = 'h.\1.{part}_proj.weight'
        split = { dim = 0, parts = ["q", "k", "v"] }

        [[rename]]
        my = '^model\.(\d+)\.out\.weight'
        golden = 'h.\1.out.weight'
        permute = [1, 0]
        """
    )
    found = paritas.compare(tmp_path / "mine", tmp_path / "golden", config=rules)
    assert found.status is Status.IDENTICAL
    assert [row.matched_by for row in found.rows] == ["rename"] * 4


def sglang_dump(folder, parts, dims):
    folder.mkdir()
    for rank, part in enumerate(parts):
        name = f"step=0___rank={rank}___dump_index=1___name=attn___layer_id=0.pt"
        meta = {"dims": dims, "sglang_parallel_info": {"tp_rank": rank, "tp_size": len(parts)}}
        torch.save({"value": part, "meta": meta}, folder / name)
    return folder


@pytest.mark.parametrize(
    ("split", "dims"),
    [
        (lambda whole: whole.chunk(2, dim=1), "b h[tp] d"),
        (lambda whole: (0.25 * whole, 0.75 * whole), "b h d[tp:partial]"),
        (lambda whole: (whole, whole.clone()), "b h d # tp:replicated"),
    ],
    ids=["split", "partial sums", "replicated"],
)
def test_ranks_are_put_together_and_compared_with_the_whole(tmp_path, split, dims):
    whole = torch.randn(2, 4, 3, generator=torch.Generator().manual_seed(0))
    golden = sglang_dump(tmp_path / "golden", [whole], "b h d")
    mine = sglang_dump(tmp_path / "mine", split(whole), dims)
    found = paritas.compare(mine, golden)
    assert found.passed
    (row,) = found.rows
    assert row.my.ranks == (0, 1)
    wrong = sglang_dump(tmp_path / "wrong", [split(whole)[0], split(whole)[1] * 1.01], dims)
    assert paritas.compare(wrong, golden).status is Status.DIFFERENT

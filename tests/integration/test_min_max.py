"""Dumps of which the least and the greatest values are left, as torchair's users make them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from click.testing import CliRunner

from integration.dump_making import Making, site, values
from paritas import compare
from paritas.app.cli import main
from paritas.core.results.findings import Status
from paritas.formats.dumps.opening import open_dump
from paritas.formats.foreign.ge_writing import GeTree

NOW = "20240125031118787351"


def fx_tree(root, arrays):
    """One token of a graph, an output for each node."""
    folder = root / "worldsize1_global_rank0" / "graph_1" / "0"
    folder.mkdir(parents=True)
    for node, array in arrays.items():
        np.save(folder / f"{node}-aten.mm.default.OUTPUT.0.{NOW}.npy", array)
    return root


def ge_tree(root, tensors):
    """One token of a graph; each operator takes a tensor and a number, and gives the tensor."""
    tree = GeTree(root)
    for name, tensor in tensors.items():
        given = [tensor, torch.tensor([3])]
        tree.write(step=0, model="g", op_type="Add", op_name=name, inputs=given, outputs=[tensor])
    return root


def extremes(array):
    return [array.min(), array.max()]


def reduce_to_extremes(root):
    """What the script of the document does with each file of a dump."""
    dump = open_dump(root, "ge") if not any(root.rglob("*.npy")) else None
    for path in sorted(path for path in root.rglob("*") if path.is_file()):
        if path.suffix == ".npy":
            np.save(path.with_name(f"{path.stem}_min_max"), extremes(np.load(path)))
            path.unlink()
        elif dump is not None:
            name = path.relative_to(root).as_posix()
            sides = {"input": [], "output": []}
            for record in dump.records():
                if record.payload.file == name:
                    sides[record.site.side].append(extremes(dump.read(record).numpy()))
            inputs, outputs = (np.array(sides[side]) for side in ("input", "output"))
            np.savez(f"{path}_min_max.npz", inputs=inputs, outputs=outputs)
            path.unlink()
    return root


def array(seed=0, *, dtype=np.float32):
    return values(4, 5, seed=seed).numpy().astype(dtype)


def statuses(mine, golden):
    return {row.status for row in compare(mine, golden).rows}


@pytest.fixture(params=["fx", "ge"])
def kind(request):
    return request.param


def dump_of(kind, root, **arrays):
    if kind == "fx":
        return fx_tree(root, arrays)
    return ge_tree(root, {name: torch.from_numpy(one.copy()) for name, one in arrays.items()})


def test_extremes_against_themselves_are_compared(tmp_path, kind):
    dump = reduce_to_extremes(dump_of(kind, tmp_path / "a", mm=array(0), mm_1=array(1)))
    table = compare(dump, dump)
    assert table.verdict.status is Status.IDENTICAL
    assert {row.judged_by for row in table.rows} == {"statistics"}
    assert table.verdict.coverage.compared == len(table.rows) > 0
    assert {row.limits for row in table.rows} == {
        "minimum and maximum only: differences between them are not detected"
    }


def test_the_command_says_what_it_went_by(tmp_path, kind):
    dump = reduce_to_extremes(dump_of(kind, tmp_path / "a", mm=array()))
    arguments = ["--my-path", dump, "--golden-path", dump, "--output", tmp_path / "out"]
    done = CliRunner().invoke(main, ["compare", *map(str, arguments)])
    assert done.exit_code == 0, done.output
    assert "identical: the candidate is the same in everything recorded" in done.output
    assert "by statistics only" in done.output


def test_extremes_of_one_side_against_the_values_of_the_other(tmp_path, kind):
    whole = dump_of(kind, tmp_path / "whole", mm=array())
    few = reduce_to_extremes(dump_of(kind, tmp_path / "few", mm=array()))
    for pair in ((few, whole), (whole, few)):
        (row, *_) = rows = compare(*pair).rows
        assert {one.status for one in rows} == {Status.EQUIVALENT}
        assert row.golden.maximum == row.my.maximum == pytest.approx(array().max())


@pytest.mark.parametrize(("factor", "status"), [(1 + 2**-23, "equivalent"), (1.01, "different")])
def test_an_extreme_may_be_off_by_rounding_and_no_more(tmp_path, kind, factor, status):
    other = array() * np.float32(factor)
    golden = reduce_to_extremes(dump_of(kind, tmp_path / "golden", mm=array()))
    whole = dump_of(kind, tmp_path / "whole", mm=other)
    few = reduce_to_extremes(dump_of(kind, tmp_path / "few", mm=other))
    for mine in (few, whole):
        rows = [row for row in compare(mine, golden).rows if row.golden.minimum != 3]
        assert {row.status.value for row in rows} == {status}
        if status == "different":
            assert f"maximum is {other.max():.9g} instead of {array().max():.9g}" in rows[0].reason


def test_what_lies_between_the_extremes_is_not_seen_and_that_is_said(tmp_path, kind):
    other = array()
    other[tuple(np.argwhere((other > other.min()) & (other < other.max()))[0])] *= 0.5
    mine = reduce_to_extremes(dump_of(kind, tmp_path / "mine", mm=other))
    golden = reduce_to_extremes(dump_of(kind, tmp_path / "golden", mm=array()))
    table = compare(mine, golden)
    assert table.verdict.status is Status.IDENTICAL
    assert all("differences between them are not detected" in row.limits for row in table.rows)


def test_half_precision_is_allowed_what_half_precision_needs(tmp_path, kind):
    golden = array(dtype=np.float16)
    mine = np.nextafter(golden, np.float16(np.inf))
    few = [
        reduce_to_extremes(dump_of(kind, tmp_path / name, mm=one))
        for name, one in (("mine", mine), ("golden", golden))
    ]
    assert statuses(*few) <= {Status.EQUIVALENT, Status.IDENTICAL}
    assert Status.EQUIVALENT in statuses(*few)


def test_integers_are_exact(tmp_path):
    golden = fx_tree(tmp_path / "golden", {"ids": np.array([0, 31_999_999])})
    mine = reduce_to_extremes(fx_tree(tmp_path / "mine", {"ids": np.array([0, 31_999_998])}))
    assert statuses(mine, golden) == {Status.DIFFERENT}


def test_a_nan_hides_the_extremes_and_that_is_said(tmp_path, kind):
    spoiled = array()
    spoiled[0, 0], spoiled[0, 1] = np.nan, np.inf
    whole = dump_of(kind, tmp_path / "whole", mm=spoiled)
    few = reduce_to_extremes(dump_of(kind, tmp_path / "few", mm=spoiled))
    for pair in ((few, few), (whole, few)):
        rows = [row for row in compare(*pair).rows if row.golden.minimum is None]
        assert {row.status for row in rows} == {Status.UNVERIFIED}
        assert {row.reason for row in rows} == {
            "both sides contain a NaN, which replaces the minimum and the maximum"
        }
    sound = dump_of(kind, tmp_path / "sound", mm=array())
    rows = [row for row in compare(few, sound).rows if row.golden.minimum != 3]
    assert {row.reason.partition(";")[0] for row in rows} == {"NaN: some instead of none"}


def test_ranks_with_other_extremes_are_not_taken_for_copies(tmp_path):
    for name, second in (("mine", 2.0), ("golden", 1.0)):
        for rank, value in enumerate((1.0, second)):
            folder = tmp_path / name / f"worldsize2_global_rank{rank}" / "graph_1" / "0"
            folder.mkdir(parents=True)
            np.save(folder / f"mm-aten.mm.OUTPUT.0.{NOW}_min_max.npy", [0.0, value])
    table = compare(tmp_path / "mine", tmp_path / "golden")
    assert [row.status for row in table.rows].count(Status.DIFFERENT) == 1


def test_inspect_shows_them(tmp_path, kind):
    dump = reduce_to_extremes(dump_of(kind, tmp_path / "a", mm=np.float32([[-1.5, 0.25]])))
    done = CliRunner().invoke(main, ["inspect", str(dump), "--records"])
    assert done.exit_code == 0, done.output
    assert "float32[?]; min -1.5 max 0.25" in done.output
    assert "statistics, no tensors" in done.output
    assert "every value is finite" in done.output


def test_a_recording_of_ours_whose_files_were_replaced_is_still_whole(tmp_path):
    making = Making(tmp_path / "dump", layout="msit")
    making.add(site("a"), values(4, 5))
    making.add(site("b"), values(4, 5, seed=1), statistics=False)
    making.add(site("c"), [1, 2])
    making.close()
    whole = Making(tmp_path / "whole", layout="msit")
    whole.add(site("a"), values(4, 5))
    whole.add(site("b"), values(4, 5, seed=1) * 2)
    whole.add(site("c"), [1, 2])
    whole.close()
    reduce_to_extremes(tmp_path / "dump")
    dump = open_dump(tmp_path / "dump")
    assert dump.problems == []
    assert dump.header(0).notes == ("2 tensors were replaced by their minimum and maximum",)
    first, second, third = dump.records()
    assert first.statistics.count == 20, "the index knows more than the file"
    assert second.statistics.maximum == pytest.approx(values(4, 5, seed=1).max().item())
    assert (third.value, third.statistics) == ("[1, 2]", None)
    found = [row.status.value for row in compare(tmp_path / "dump", tmp_path / "whole").rows]
    assert found == ["identical", "different", "identical"]


def test_what_is_gone_without_a_trace_is_missing_all_the_same(tmp_path):
    making = Making(tmp_path / "dump", layout="msit")
    making.add(site("a"), values(4, 5))
    making.close()
    next((tmp_path / "dump").rglob("*.npy")).unlink()
    assert "is missing" in open_dump(tmp_path / "dump").problems[0]

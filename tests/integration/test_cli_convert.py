"""`paritas convert`, from the command line to the exit code."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from click.testing import CliRunner

from integration.dump_making import Making, assert_same_records, site, values, write_run
from paritas.app.cli import main
from paritas.core.numerics.sketch import sketch, sketch_distance
from paritas.core.numerics.statistics import summarize
from paritas.core.results.items import LocalPlacement
from paritas.formats.dumps.reading import Dump


def convert(*arguments):
    return CliRunner().invoke(main, ["convert", *map(str, arguments)])


@pytest.fixture
def dump(tmp_path):
    return write_run(tmp_path / "dump")


# --- statistics -----------------------------------------------------------------------------------


def test_statistics_and_sketches_take_the_place_of_values(dump, tmp_path):
    result = convert(dump, "--to", "stats")
    assert result.exit_code == 0, result.output
    assert f"18 records of 1 rank in {tmp_path / 'dump_stats'}; " in result.stdout
    made, source = Dump.open(tmp_path / "dump_stats"), Dump.open(dump)
    assert made.problems == []
    assert made.header(0).data == "stats"
    assert made.header(0).closed
    assert_same_records(made, source)
    for new, old in zip(made.records(), source.records(), strict=True):
        assert new.payload is None
        if old.tensor is not None:
            assert new.statistics == summarize(source.read(old))
            assert torch.equal(made.read_sketch(new), sketch(source.read(old)))


@pytest.mark.parametrize("dtype", [torch.float64, torch.int64, torch.bfloat16, torch.bool])
def test_sketches_of_every_dtype_can_be_read_back(tmp_path, dtype):
    making = Making(tmp_path / "dump")
    tensor = (values(40) * 100).to(dtype)
    making.add(site("a"), tensor, statistics=False)
    making.close()
    assert convert(tmp_path / "dump", "--to", "stats").exit_code == 0
    made = Dump.open(tmp_path / "dump_stats")
    (record,) = made.records()
    assert made.problems == []
    assert sketch_distance(sketch(tensor), made.read_sketch(record)) == 0


def test_the_sketch_of_a_shard_is_placed_in_the_whole(tmp_path):
    whole = values(8, 6)
    making = Making(tmp_path / "dump")
    for row in (0, 4):
        placement = LocalPlacement(
            mesh=(2,),
            coordinate=(row // 4,),
            placements=("shard(0)",),
            global_shape=(8, 6),
            global_offset=(row, 0),
        )
        making.add(site(f"part{row}"), whole[row : row + 4].clone(), placement=placement)
    making.close()
    assert convert(tmp_path / "dump", "--to", "stats").exit_code == 0
    made = Dump.open(tmp_path / "dump_stats")
    first, second = (made.read_sketch(record) for record in made.records())
    torch.testing.assert_close(first + second, sketch(whole))


def test_equal_bytes_that_are_repeated_or_of_another_dtype_are_told_apart(tmp_path):
    making = Making(tmp_path / "dump")
    tensors = [torch.ones(()), torch.ones(()).expand(3, 4), torch.ones(()).view(torch.int32)]
    for place, tensor in enumerate(tensors):
        making.add(site("a", position=str(place)), tensor, statistics=False)
    making.close()
    assert convert(tmp_path / "dump", "--to", "stats").exit_code == 0
    made = list(Dump.open(tmp_path / "dump_stats").records())
    assert [record.statistics for record in made] == [summarize(tensor) for tensor in tensors]


# --- layouts --------------------------------------------------------------------------------------


def test_a_packed_dump_becomes_files_for_numpy_and_packed_again(dump, tmp_path):
    assert convert(dump, "--to", "msit").exit_code == 0
    npy = tmp_path / "dump_msit"
    files = list((npy / "worldsize1_global_rank0").rglob("*.npy"))
    assert len(files) == 18
    assert all(np.load(file, allow_pickle=False) is not None for file in files)
    assert convert(npy, "--to", "packed", "--output", tmp_path / "again").exit_code == 0
    source, made = Dump.open(dump), Dump.open(tmp_path / "again")
    assert made.problems == []
    assert_same_records(made, source)
    for new, old in zip(made.records(), source.records(), strict=True):
        if old.tensor is not None:
            assert made.read(new).view(torch.int32).equal(source.read(old).view(torch.int32))


def test_the_msit_layout_becomes_statistics_too(dump, tmp_path):
    assert convert(dump, "--to", "msit").exit_code == 0
    output = tmp_path / "stats"
    result = convert(tmp_path / "dump_msit", "--to", "stats", "--output", output, "--delete")
    assert result.exit_code == 0, result.output
    assert list((tmp_path / "dump_msit").rglob("*.npy")) == []
    assert_same_records(Dump.open(output), Dump.open(dump))


# --- what cannot be done --------------------------------------------------------------------------


def test_a_dump_of_statistics_has_nothing_to_convert(dump, tmp_path):
    assert convert(dump, "--to", "stats").exit_code == 0
    for target in ("stats", "packed"):
        result = convert(tmp_path / "dump_stats", "--to", target)
        assert result.exit_code == 2
        assert "holds statistics only" in result.stderr


def test_another_dump_is_not_written_over(dump, tmp_path):
    write_run(tmp_path / "dump_stats")
    result = convert(dump, "--to", "stats")
    assert result.exit_code == 2
    assert "is not a conversion of this dump to stats" in result.stderr
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.txt").write_text("three years")
    result = convert(dump, "--to", "stats", "--output", tmp_path / "other")
    assert result.exit_code == 2
    assert (tmp_path / "other" / "thesis.txt").exists()


def test_the_output_is_not_inside_the_dump(dump):
    for output in (dump, dump / "stats", dump.parent):
        result = convert(dump, "--to", "stats", "--output", output)
        assert result.exit_code == 2
        assert "use a folder outside of it" in result.stderr


def test_what_is_no_dump_is_wrong_usage(tmp_path):
    result = convert(tmp_path / "nowhere", "--to", "stats")
    assert result.exit_code == 2
    assert "nowhere does not exist" in result.stderr


def test_a_record_that_cannot_be_read_is_told_and_the_rest_converted(dump, tmp_path):
    data = dump / "rank0" / "data-0000.safetensors"
    whole = bytearray(data.read_bytes())
    whole[-1] ^= 1  # the last tensor of the last step
    data.write_bytes(whole)
    result = convert(dump, "--to", "stats", "--delete")
    assert result.exit_code == 3
    assert (
        "problem: rank 0: forward/layers.2/aten.log.default#0/output.0 of step 1" in result.stdout
    )
    assert "17 records of 1 rank" in result.stdout
    made = Dump.open(tmp_path / "dump_stats")
    assert not made.header(0).closed
    assert "1 record could not be converted" in made.header(0).notes
    assert data.exists(), "it holds what was not converted"
    # Nor is it forgotten when the same is asked for again.
    again = convert(dump, "--to", "stats", "--delete")
    assert again.exit_code == 3
    assert data.exists()


# --- deleting -------------------------------------------------------------------------------------


def test_values_that_a_damaged_line_may_name_are_kept(dump):
    index = dump / "rank0" / "index.jsonl"
    lines = index.read_bytes().splitlines(keepends=True)
    index.write_bytes(b"".join([*lines[:3], b"{}\n", *lines[4:]]))
    result = convert(dump, "--to", "stats", "--delete")
    assert result.exit_code == 3
    assert f"problem: {index}, byte " in result.stdout
    assert (dump / "rank0" / "data-0000.safetensors").exists()


def test_deleting_leaves_the_index_and_says_what_was_freed(dump, tmp_path):
    before = list(Dump.open(dump).records())
    result = convert(dump, "--to", "stats", "--delete")
    assert result.exit_code == 0, result.output
    assert "deleted " in result.stdout
    assert "in 1 file of" in result.stdout
    assert list(dump.rglob("*.safetensors")) == []
    left = Dump.open(dump)
    assert list(left.records()) == before
    assert "values were deleted by paritas convert; see dump_stats" in left.header(0).notes
    assert any("missing" in problem for problem in left.problems)
    # Once more is no mistake: what was converted is all that is left.
    assert convert(dump, "--to", "stats", "--delete").exit_code == 0
    made = Dump.open(tmp_path / "dump_stats")
    assert made.problems == []
    assert len(list(made.records())) == 18


def test_a_file_outside_of_the_dump_is_never_deleted(dump, tmp_path):
    treasure = tmp_path / "data-0000.safetensors"
    treasure.write_bytes(b"x" * 100_000)
    index = dump / "rank0" / "index.jsonl"
    index.write_text(index.read_text().replace("rank0/data-0000", "rank0/../../data-0000"))
    assert convert(dump, "--to", "stats", "--delete").exit_code == 3
    assert treasure.exists()

"""`paritas inspect`, from the command line to the exit code."""

from __future__ import annotations

import json

import pytest
import torch
from click.testing import CliRunner

from integration.dump_making import Making, site, values, write_run
from paritas.app.cli import main


def inspect(*arguments):
    return CliRunner().invoke(main, ["inspect", *map(str, arguments)])


def words(result):
    """What was printed, without regard to where lines are broken."""
    return " ".join(result.stdout.split())


def last_line(result):
    return result.stdout.splitlines()[-1]


def summary_of(dump, folder, *options):
    """The same as data."""
    result = inspect(dump, "--json", folder / "summary.json", *options)
    assert result.exit_code in (0, 3), result.output
    return json.loads((folder / "summary.json").read_text())


@pytest.fixture
def dump(tmp_path):
    return write_run(tmp_path / "dump")


# --- the whole ------------------------------------------------------------------------------------


def test_a_closed_dump_is_complete_and_the_exit_code_is_0(dump):
    result = inspect(dump)
    assert result.exit_code == 0, result.output
    assert last_line(result) == "complete: 18 records of 1 rank"
    assert "18 (18 op); 6 of them not tensors" in words(result)
    assert "steps 0-1" in words(result)


def test_the_report_fits_80_columns(dump):
    assert max(map(len, inspect(dump, "--records").stdout.splitlines())) <= 80


def test_what_dedupe_saved_is_told(dump, tmp_path):
    summary = summary_of(dump, tmp_path)["summary"]
    # Two steps of three layers: each layer's output is the next one's input.
    assert summary["payload_bytes"] == 2 * 6 * 128
    assert summary["stored_bytes"] == 2 * 4 * 128
    assert "saved 512 B of 1.54 kB (factor 1.5)" in words(inspect(dump))


def test_every_layer_has_a_row_with_the_range_of_its_outputs(dump, tmp_path):
    names = summary_of(dump, tmp_path)["summary"]["names"]
    assert [row["name"] for row in names] == [f"layers.{n}/aten.log.default" for n in range(3)]
    assert names[1]["kinds"] == ["float32[4,8]"]
    outputs = [values(4, 8, seed=step).cos().cos() + 1 for step in range(2)]
    assert names[1]["minimum"] == pytest.approx(min(float(out.min()) for out in outputs))
    assert names[1]["maximum"] == pytest.approx(max(float(out.max()) for out in outputs))


def test_ranks_that_left_nothing_are_told(tmp_path):
    for rank in (0, 2):
        write_run(tmp_path / "dump", rank=rank, world_size=4)
    result = inspect(tmp_path / "dump")
    assert "0, 2 (the run has 4); missing: 1, 3" in words(result)
    assert result.exit_code == 3
    assert "problem: rank 1 left nothing problem: rank 3 left nothing" in words(result)


def test_ranks_that_were_not_asked_for_are_not_missed(tmp_path):
    write_run(tmp_path / "dump", rank=1, world_size=2, selection={"ranks": "1"})
    assert inspect(tmp_path / "dump").exit_code == 0


# --- the first NaN --------------------------------------------------------------------------------


def test_the_operator_that_made_the_first_nan_is_named(dump):
    result = inspect(dump)
    assert "first NaN: rank 0, step 1, forward/layers.2/aten.log.default#0/output.0" in words(
        result
    )
    assert "by aten.log.default in layers.2" in words(result)
    assert "model.py:18, in forward: y = torch.log(y)" in words(result)
    assert "made here: the 1 recorded input of this call is finite" in words(result)


def test_a_nan_that_came_in_was_not_made_there(tmp_path):
    making = Making(tmp_path / "dump")
    bad = torch.tensor([1.0, torch.nan])
    making.call("a/aten.neg.default", [bad], -bad)
    making.close()
    first = summary_of(tmp_path / "dump", tmp_path)["summary"]["non_finite"]
    assert [(item["kind"], item["id"], item["origin"]) for item in first] == [
        ("NaN", "forward/a/aten.neg.default#0/input.0", "entered")
    ]


def test_an_infinity_given_as_a_number_was_not_made_there(tmp_path):
    making = Making(tmp_path / "dump")
    mask = torch.tensor([0.0, -torch.inf])
    making.call("a/aten.full.default", [float("-inf")], mask)
    making.call("b/aten.sub.Tensor", [mask, mask], mask - mask)
    making.close()
    found = summary_of(tmp_path / "dump", tmp_path)["summary"]["non_finite"]
    # A mask is often meant, so the first NaN is told beside the first infinity.
    assert [(item["kind"], item["site"]["name"], item["origin"]) for item in found] == [
        ("Inf", "a/aten.full.default", "entered"),
        ("NaN", "b/aten.sub.Tensor", "entered"),
    ]


def test_without_recorded_inputs_it_is_not_known_who_made_it(tmp_path):
    making = Making(tmp_path / "dump")
    making.add(site("a"), torch.tensor([torch.nan]))
    making.close()
    result = inspect(tmp_path / "dump")
    expected = "unknown whether it was made here: no input of this call is recorded; 0 tensors were"
    assert expected in words(result)


def test_in_the_backward_pass_of_modules_a_gradient_of_an_input_is_what_was_made(tmp_path):
    making = Making(tmp_path / "dump")
    facts = {"level": "module", "phase": "backward", "op": "Linear"}
    making.add(site("head", "output", **facts), torch.tensor([1.0]))
    making.add(site("head", "input", **facts), torch.tensor([torch.nan]))
    making.close()
    (found,) = summary_of(tmp_path / "dump", tmp_path)["summary"]["non_finite"]
    assert (found["id"], found["origin"]) == ("backward/head#0/input.0", "made")


# --- what is asked for ----------------------------------------------------------------------------


def test_layers_steps_and_ranks_choose_records(tmp_path):
    for rank in (0, 1):
        write_run(tmp_path / "dump", rank=rank, world_size=2)
    dump = tmp_path / "dump"

    def ids(*options):
        found = summary_of(dump, tmp_path, "--records", *options)["records"]
        return {(item["record"]["rank"], item["record"]["step"]) for item in found}, len(found)

    assert ids() == ({(0, 0), (0, 1), (1, 0), (1, 1)}, 36)
    assert ids("--layer", "LAYERS.1") == ({(0, 0), (0, 1), (1, 0), (1, 1)}, 12)
    assert ids("--layer", "layers.[02]/*", "--rank", "1") == ({(1, 0), (1, 1)}, 12)
    assert ids("--step", "1-5", "--rank", "0") == ({(0, 1)}, 9)
    assert ids("--phase", "forward")[1] == 36


def test_single_records_are_listed_with_their_statistics(dump):
    result = inspect(dump, "--records", "--layer", "layers.0", "--step", "0")
    lines = result.stdout.splitlines()
    assert lines[0] == "rank 0 step 0 forward/layers.0/aten.log.default#0/input.0"
    assert lines[1].startswith("  float32[4,8]; min -")
    assert lines[3] == "  0.5"


def test_asking_for_nothing_that_is_there_is_wrong_usage_and_names_what_is_near(dump):
    result = inspect(dump, "--layer", "layer.2*")
    assert result.exit_code == 2
    assert "none of the 18 records" in result.stderr
    assert "'layers.2/aten.log.default'" in result.stderr or "'layers.2'" in result.stderr


@pytest.mark.parametrize("steps", ["3-1", "x", "-2", "1-", ""])
def test_a_step_that_is_none_is_wrong_usage(dump, steps):
    result = inspect(dump, f"--step={steps}")
    assert result.exit_code == 2
    assert f"{steps!r} is neither a step (3) nor a range of steps (2-5)" in result.stderr


def test_statistics_that_are_not_in_the_index_are_taken_from_the_values(tmp_path):
    making = Making(tmp_path / "dump")
    making.call("a", [values(3)], torch.tensor([2.0, torch.nan]), statistics=False)
    making.close()
    result = inspect(tmp_path / "dump")
    assert "2 have no statistics in the index, their values were read" in words(result)
    assert "first NaN: rank 0, step 0, forward/a#0/output.0" in words(result)


# --- what is amiss --------------------------------------------------------------------------------


def test_what_is_no_dump_is_wrong_usage(tmp_path):
    for path in (tmp_path, tmp_path / "nowhere"):
        result = inspect(path)
        assert result.exit_code == 2
        assert str(path) in result.stderr


def test_a_dump_that_is_being_written_can_be_looked_at(tmp_path):
    making = Making(tmp_path / "dump")
    making.add(site("a"), values(3))
    result = inspect(tmp_path / "dump")
    assert result.exit_code == 3
    assert (
        "rank 0 is still being written (1 record, the last is forward/a#0/output.0 of step 0)"
        in words(result)
    )
    assert last_line(result) == "incomplete: 1 record of 1 rank can be read; 1 problem"
    making.close()
    assert inspect(tmp_path / "dump").exit_code == 0


def test_a_dump_without_any_record_can_be_looked_at(tmp_path):
    Making(tmp_path / "dump").close()
    result = inspect(tmp_path / "dump")
    assert result.exit_code == 0, result.output
    assert last_line(result) == "complete: 0 records of 1 rank"


def test_a_truncated_index_is_told_and_the_rest_is_shown(dump):
    index = dump / "rank0" / "index.jsonl"
    index.write_bytes(index.read_bytes()[:-10])
    result = inspect(dump)
    assert result.exit_code == 3
    assert last_line(result).startswith("incomplete: 17 records of 1 rank can be read; ")


def test_a_missing_data_file_is_told(dump):
    (dump / "rank0" / "data-0000.safetensors").unlink()
    result = inspect(dump)
    assert result.exit_code == 3
    assert "problem: " in result.stdout
    assert "data-0000.safetensors is missing" in words(result)


def test_statistics_alone_need_no_values(tmp_path):
    making = Making(tmp_path / "dump", data="stats")
    making.add(site("a"), values(3))
    making.close()
    result = inspect(tmp_path / "dump")
    assert result.exit_code == 0, result.output
    assert "statistics, no tensors" in words(result)
    assert "every value is finite" in words(result)

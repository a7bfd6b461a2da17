"""Dumps that were damaged after they were recorded: never identical, and never a traceback."""

from __future__ import annotations

import json
import os
import shutil

import numpy as np
import pytest
import torch
from click.testing import CliRunner

from integration.damaged_dumps import LAYOUTS, experiment, make
from paritas.app.cli import main
from paritas.comparison.compare import compare
from paritas.comparison.report import comparison_verdict_line
from paritas.core.errors import UsageError
from paritas.core.results.findings import Status

# More of them where that is asked for: see tests/README.md.
FLIPS = 330 if os.environ.get("PARITAS_WHOLE_CORPUS") else 14
DATA = "rank0/data-0000.safetensors"
FIRST = 65536  # where the values of the first file begin, behind the room for its header


@pytest.fixture
def golden(tmp_path):
    return make("packed", tmp_path / "golden")


@pytest.fixture
def my(golden, tmp_path):
    return shutil.copytree(golden, tmp_path / "my")


def change(path, at, mask=1):
    data = bytearray(path.read_bytes())
    data[at] ^= mask
    path.write_bytes(data)


def edit_index(dump, edit, rank=0):
    path = dump / f"rank{rank}" / "index.jsonl"
    lines = [json.loads(line) for line in path.read_bytes().splitlines()]
    for line in lines:
        edit(line)
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))


def failing(comparison):
    return [row for row in comparison.rows if not row.status.passes()]


def run(*arguments):
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


# --- single bytes of every layout -----------------------------------------------------------------


@pytest.mark.one_in(3)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_values_that_a_changed_byte_leaves_identical_are_the_same(layout, tmp_path):
    counts, wrong = experiment(layout, tmp_path, FLIPS)
    assert not wrong
    assert counts.total() == FLIPS
    assert counts["identical"] < FLIPS


# --- values that do not match their digest --------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"quick": True}])
@pytest.mark.parametrize("damaged", ["my", "golden"])
def test_a_changed_value_is_unverified_and_names_the_record_and_the_file(
    my, golden, damaged, options
):
    change((my if damaged == "my" else golden) / DATA, FIRST)
    found = compare(my, golden, **options)
    assert (found.status, found.exit_code) == (Status.UNVERIFIED, 3)
    (row,) = failing(found)
    assert row.reason.startswith(
        f"forward/layers.0/aten.log.default#0/input.0 of step 0: the bytes at {FIRST} of {DATA} "
        f"have digest "
    )
    assert row.reason.endswith(": the file or the index is damaged; copy or record the dump again")
    assert found.coverage.compared == len(found.rows) - 1


def test_one_damaged_dump_on_both_sides_is_unverified(golden):
    change(golden / DATA, FIRST)
    assert compare(golden, golden).status is Status.UNVERIFIED


def test_damage_to_one_rank_is_told_of_that_rank(my, golden):
    change(my / "rank1" / "data-0000.safetensors", FIRST)
    assert {row.rank for row in failing(compare(my, golden))} == {1}


def test_a_value_that_several_records_share_is_unverified_in_each(my, golden):
    path = my / DATA
    change(path, FIRST + 4 * 8 * 4)  # what the first layer gives, and the second takes
    names = {row.name for row in failing(compare(my, golden))}
    assert names == {
        "forward/layers.0/aten.log.default#0/output.0",
        "forward/layers.1/aten.log.default#0/input.0",
    }


def test_a_file_that_is_cut_off_is_unverified(my, golden):
    os.truncate(my / DATA, FIRST + 100)
    found = compare(my, golden)
    assert found.exit_code == 3
    assert f"{DATA} ends at byte {FIRST + 100}" in failing(found)[0].reason


def test_a_file_that_is_missing_is_unverified(my, golden):
    (my / DATA).unlink()
    found = compare(my, golden)
    assert found.exit_code == 3
    assert f"{DATA} is missing" in failing(found)[0].reason


def test_a_digest_that_was_edited_is_unverified(my, golden):
    def edit(line):
        line["digest"] = line["digest"] and f"{'0' * 31}1"

    edit_index(my, edit)
    found = compare(my, golden, ranks=[0])
    assert found.exit_code == 3
    assert f"the index says {'0' * 31}1" in failing(found)[0].reason


def test_a_digest_that_is_none_is_damage(my, golden):
    edit_index(my, lambda line: line.update(digest=line["digest"] and "v" * 32))
    found = compare(my, golden, ranks=[0])
    assert found.exit_code == 3
    assert "its digest is 'vvvv" in found.my.problems[0]
    assert "not 32 hexadecimal digits" in found.my.problems[0]


def test_values_without_digests_are_compared_bit_by_bit(my, golden):
    edit_index(my, lambda line: line.update(digest=""))
    assert compare(my, golden).status is Status.IDENTICAL
    change(my / DATA, FIRST + 3, 0x40)
    assert compare(my, golden).status is Status.DIFFERENT


@pytest.mark.parametrize("at", [10, 2000], ids=["header", "room behind it"])
def test_bytes_that_are_of_no_value_change_nothing(my, golden, at):
    change(my / DATA, at)
    assert compare(my, golden).status is Status.IDENTICAL


def test_the_files_of_the_msit_layout_are_held_against_their_digests(tmp_path):
    golden = make("msit", tmp_path / "golden")
    my = shutil.copytree(golden, tmp_path / "my")
    file = min(my.rglob("*-aten.log.default.OUTPUT.0.*.npy"))
    change(file, -1)
    (row,) = failing(compare(my, golden))
    assert row.status is Status.UNVERIFIED
    assert file.name in row.reason


def test_statistics_of_equal_digests_that_contradict_each_other_are_unverified(tmp_path):
    golden = make("stats", tmp_path / "golden")
    my = shutil.copytree(golden, tmp_path / "my")
    edit_index(my, lambda line: line["statistics"].update(maximum=9.5))
    found = compare(my, golden)
    assert found.exit_code == 3
    assert failing(found)[0].reason.startswith(
        "a dump is damaged: the digests are equal, but maximum is 9.5"
    )
    assert compare(my, golden, trust_digests=True).status is Status.IDENTICAL


def test_equal_statistics_of_other_digests_are_not_identical(tmp_path):
    golden = make("stats", tmp_path / "golden")
    my = shutil.copytree(golden, tmp_path / "my")
    edit_index(my, lambda line: line.update(digest="0" * 32))
    assert compare(my, golden).status is Status.EQUIVALENT


# --- digests that are trusted ---------------------------------------------------------------------


def test_digests_that_are_trusted_are_compared_alone_and_the_verdict_says_so(my, golden, tmp_path):
    change(my / DATA, FIRST)
    found = compare(my, golden, trust_digests=True)
    assert (found.status, found.nbytes) == (Status.IDENTICAL, 0)
    assert {row.judged_by for row in found.rows} == {"digest, data not read", "equality"}
    assert found.notes == ("10 of 14 rows are judged by digest, data not read",)
    told = (
        "identical: the candidate has equal digests; 14 items compared, 10 by digest, data not read"
    )
    assert comparison_verdict_line(found).plain == told
    out = tmp_path / "out"
    ran = run("compare", "--my-path", my, "--golden-path", golden, "--output", out)
    assert ran.exit_code == 3
    assert "have digest" in ran.output.replace("\n", " ")
    options = ("--trust-digests", "--quiet", "--overwrite")
    ran = run("compare", "--my-path", my, "--golden-path", golden, "--output", out, *options)
    assert ran.exit_code == 0
    assert ran.output == f"{told}\n"


def test_without_values_the_verdict_says_that_digests_were_compared(tmp_path):
    golden = make("stats", tmp_path / "golden")
    assert comparison_verdict_line(compare(golden, golden)).plain == (
        "identical: the candidate has equal digests; 3 items compared, 3 by digest, data not stored"
    )


def test_a_value_that_differs_is_different_whoever_is_trusted(tmp_path):
    for name, factor in (("my", 2.0), ("golden", 1.0)):
        torch.save({"w": torch.arange(6.0) * factor}, tmp_path / f"{name}.pt")
    found = compare(tmp_path / "my.pt", tmp_path / "golden.pt", trust_digests=True)
    assert found.status is Status.DIFFERENT


# --- archives -------------------------------------------------------------------------------------

VALUES = torch.randn(64, generator=torch.Generator().manual_seed(0))


def save_npz(path):
    np.savez(path, w=VALUES.numpy())


def save_pt(path):
    torch.save({"w": VALUES}, path)


def change_value(path):
    change(path, path.read_bytes().index(VALUES.numpy().tobytes()) + 3, 0x40)


@pytest.mark.parametrize(("ending", "save"), [("npz", save_npz), ("pt", save_pt)])
def test_a_member_that_does_not_match_its_checksum_is_unverified(tmp_path, ending, save):
    my, golden = tmp_path / f"my.{ending}", tmp_path / f"golden.{ending}"
    save(my)
    save(golden)
    assert compare(my, golden).status is Status.IDENTICAL
    change_value(my)
    (row,) = failing(compare(my, golden))
    assert row.status is Status.UNVERIFIED
    assert f"of my.{ending} has checksum" in row.reason
    # The same damage on both sides is the same bits, and damage all the same.
    assert compare(my, my).status is Status.UNVERIFIED
    assert compare(my, golden, trust_digests=True).status is Status.DIFFERENT


def test_files_that_torch_saved_without_checksums_are_compared_as_they_are(tmp_path):
    torch.serialization.set_crc32_options(compute_crc32=False)
    try:
        for name in ("my", "golden"):
            save_pt(tmp_path / f"{name}.pt")
    finally:
        torch.serialization.set_crc32_options(compute_crc32=True)
    my, golden = tmp_path / "my.pt", tmp_path / "golden.pt"
    assert compare(my, golden).status is Status.IDENTICAL
    ran = run("inspect", my, "--check")
    assert ran.exit_code == 3
    assert ran.output.splitlines()[-1] == (
        "unverified: 1 record of 1 rank; 1 of 1 stored value without a checksum (.pt files)"
    )
    change_value(my)
    assert compare(my, golden).status is Status.DIFFERENT


# --- inspect --check ------------------------------------------------------------------------------

CHECKED = {
    "packed": "complete: 14 records of 2 ranks; 10 of 10 stored values match their checksums",
    "msit": "complete: 14 records of 2 ranks; 10 of 10 stored values match their checksums",
    "stats": "unverified: 3 records of 1 rank; no stored values to check",
    "msprobe": "complete: 18 records of 1 rank; 15 of 15 stored values match their checksums",
    "msprobe_numpy": "unverified: 1 record of 1 rank; "
    "1 of 1 stored value without a checksum (.npy files)",
    "msprobe_statistics": "unverified: 2 records of 1 rank; no stored values to check",
    "npy": "unverified: 4 records of 1 rank; 4 of 4 stored values without a checksum (.npy files)",
    "npz": "complete: 4 records of 1 rank; 4 of 4 stored values match their checksums",
    "npz_compressed": "complete: 5 records of 1 rank; 5 of 5 stored values match their checksums",
    "pt": "complete: 7 records of 1 rank; 6 of 6 stored values match their checksums",
    "safetensors": "unverified: 4 records of 1 rank; "
    "4 of 4 stored values without a checksum (.safetensors files)",
    "sglang": "complete: 4 records of 1 rank; 4 of 4 stored values match their checksums",
    "fx": "unverified: 5 records of 1 rank; 1 of 2 stored values match their checksums, "
    "1 of 2 stored values without a checksum (.npy files)",
    "graph_engine": "unverified: 4 records of 1 rank; "
    "2 of 2 stored values without a checksum (ge files)",
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_check_says_what_matches_its_checksum_and_what_has_none(layout, tmp_path):
    ran = run("inspect", make(layout, tmp_path / "dump"), "--check")
    assert ran.output.splitlines()[-1] == CHECKED[layout]
    assert ran.exit_code == (0 if CHECKED[layout].startswith("complete") else 3)


def test_a_check_names_what_is_damaged(golden):
    assert run("inspect", golden).exit_code == 0
    change(golden / DATA, FIRST)
    assert run("inspect", golden).exit_code == 0  # which reads the index alone
    ran = run("inspect", golden, "--check")
    assert ran.exit_code == 3
    said = " ".join(ran.output.split())
    assert "problem: rank 0, step 0: forward/layers.0/aten.log.default#0/input.0" in said
    assert f"the bytes at {FIRST} of {DATA} have digest" in said
    assert ran.output.splitlines()[-1] == (
        "incomplete: 14 records of 2 ranks can be read; 1 problem; 9 of 10 stored values match "
        "their checksums, 1 of 10 stored values damaged"
    )


def test_a_check_looks_at_what_was_asked_for(golden):
    change(golden / DATA, FIRST)
    assert run("inspect", golden, "--check", "--rank", "1").exit_code == 0
    assert run("inspect", golden, "--check", "--rank", "0").exit_code == 3


def test_a_check_holds_the_header_of_a_file_against_the_index(golden):
    header = (golden / DATA).read_bytes()[:FIRST]
    at = header.index(b'"F32"') + 1
    change(golden / DATA, at, ord("F") ^ ord("I"))
    ran = run("inspect", golden, "--check")
    assert ran.exit_code == 3
    assert (
        f"problem: rank 0: {DATA}: its header differs from the index for 1 of 4 values, "
        "first '0/forward/layers.0/aten.log.default#0/input.0'"
    ) in " ".join(ran.output.split())


def test_a_check_of_an_archive_names_the_member(tmp_path):
    save_npz(tmp_path / "all.npz")
    change_value(tmp_path / "all.npz")
    ran = run("inspect", tmp_path / "all.npz", "--check")
    assert ran.exit_code == 3
    assert "w.npy of all.npz has checksum" in " ".join(ran.output.split())


def test_what_a_check_found_is_in_the_json(golden, tmp_path):
    run("inspect", golden, "--check", "--json", tmp_path / "found.json")
    found = json.loads((tmp_path / "found.json").read_bytes())["summary"]["checksums"]
    assert found == {"fit": 10, "without": 0, "damaged": 0, "endings": []}


def test_a_header_that_is_no_text_is_refused(golden):
    change(golden / "rank0" / "header.json", 1, 0x80)
    change(golden / "rank1" / "header.json", 1, 0x80)
    with pytest.raises(UsageError, match="is not a dump header"):
        compare(golden, golden)

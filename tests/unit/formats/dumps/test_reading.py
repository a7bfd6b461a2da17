"""The reader believes nothing: cut off, damaged and hostile dumps."""

from __future__ import annotations

import json
import os

import msgspec
import pytest
import torch
from safetensors import safe_open

from paritas.core.errors import UsageError
from paritas.formats.dumps import reading
from paritas.formats.dumps.reading import Dump
from paritas.formats.dumps.writing import DumpWriter
from paritas.formats.files.records import Header
from unit.formats.files.entries import abandon, entry_of, site, write_dump

VALUES = [torch.arange(4.0) + number for number in range(3)]
WHOLE = bool(os.environ.get("PARITAS_WHOLE_CORPUS"))


@pytest.fixture
def dump_path(tmp_path):
    write_dump(tmp_path / "dump", VALUES)
    return tmp_path / "dump"


def index_of(path):
    return path / "rank0" / "index.jsonl"


def data_of(path):
    return path / "rank0" / "data-0000.safetensors"


def change_record(path, number, **changes):
    """Rewrite a line of the index; a name with dots changes what lies deeper."""
    lines = index_of(path).read_text().splitlines()
    record = json.loads(lines[number])
    for name, value in changes.items():
        *above, last = name.split("__")
        place = record
        for key in above:
            place = place[key]
        place[last] = value
    lines[number] = json.dumps(record)
    index_of(path).write_text("\n".join(lines) + "\n")


# --- what is no dump ------------------------------------------------------------------------------


def test_what_is_no_dump_is_refused_with_what_was_looked_for(tmp_path):
    with pytest.raises(UsageError, match="missing does not exist: give the folder of a dump"):
        Dump.open(tmp_path / "missing")
    with pytest.raises(UsageError, match=r"looked for rank0/header\.json, .*, found nothing"):
        Dump.open(tmp_path)
    (tmp_path / "notes.txt").write_text("x")
    with pytest.raises(UsageError, match=r"found notes\.txt$"):
        Dump.open(tmp_path)
    with pytest.raises(UsageError, match=r"notes\.txt is not a folder"):
        Dump.open(tmp_path / "notes.txt")


def test_the_folder_of_a_rank_is_told_from_a_dump(dump_path):
    with pytest.raises(UsageError, match="is one rank of a dump: give its parent folder"):
        Dump.open(dump_path / "rank0")


@pytest.mark.parametrize(
    ("header", "message"),
    [
        (b"", "is not a dump header"),
        (b"{", "is not a dump header"),
        (b'{"run": "r", "colour": "red"}', "unknown field `colour`"),
        (b'{"run": "r", "format": 2}', "has format 2, but this version of paritas reads 1"),
        (b'{"run": "r", "rank": 3}', "has the header of rank 3"),
    ],
)
def test_a_header_that_does_not_fit_is_refused(dump_path, header, message):
    (dump_path / "rank0" / "header.json").write_bytes(header)
    with pytest.raises(UsageError, match=message):
        Dump.open(dump_path)


# --- cut off --------------------------------------------------------------------------------------


def test_an_index_cut_off_at_any_byte_gives_every_whole_line(dump_path):
    whole = index_of(dump_path).read_bytes()
    ends = {at + near for at, byte in enumerate(whole) if byte == 10 for near in (-1, 0, 1, 2)}
    sizes = set(range(0, len(whole), 1 if WHOLE else 7)) | ends
    for size in sorted(sizes & set(range(len(whole)))):
        index_of(dump_path).write_bytes(whole[:size])
        dump = Dump.open(dump_path)
        records = list(dump.records())
        assert len(records) == whole[:size].count(b"\n")
        for record in records:
            assert torch.equal(dump.read(record), VALUES[record.sequence])
        assert dump.problems, size
        cut = any(
            "is truncated: the record being written was lost" in text for text in dump.problems
        )
        assert cut == (size > 0 and whole[size - 1 : size] != b"\n")


def test_data_cut_off_at_any_byte_gives_every_whole_payload(dump_path):
    whole = data_of(dump_path).read_bytes()
    ends = [r.payload.begin + r.payload.nbytes for r in Dump.open(dump_path).records()]
    for size in [0, 7, 8, 100, *range(ends[0] - 17, len(whole))]:
        data_of(dump_path).write_bytes(whole[:size])
        dump = Dump.open(dump_path)
        lost = [end for end in ends if end > size]
        assert len(dump.problems) == len(lost) > 0
        for record, end in zip(dump.records(), ends, strict=True):
            if end <= size:
                assert torch.equal(dump.read(record), VALUES[record.sequence])
                continue
            with pytest.raises(UsageError, match=f"ends at byte {size}, before byte {end}"):
                dump.read(record)


def test_a_missing_file_is_a_problem_and_the_rest_is_read(dump_path):
    data_of(dump_path).unlink()
    dump = Dump.open(dump_path)
    assert len(dump.problems) == 3
    assert "rank0/data-0000.safetensors is missing: No such file" in dump.problems[0]
    assert len(list(dump.records())) == 3
    index_of(dump_path).unlink()
    assert "cannot be read" in Dump.open(dump_path).problems[0]


# --- damaged --------------------------------------------------------------------------------------


def test_a_damaged_line_in_the_middle_is_noted_and_the_rest_goes_on(dump_path):
    lines = index_of(dump_path).read_bytes().splitlines(keepends=True)
    for damage in (
        b"\n",
        b"nonsense\n",
        b"\xff\xfe\n",
        lines[1].replace(b"step", b"pets"),
        b"[]\n",
    ):
        index_of(dump_path).write_bytes(lines[0] + damage + lines[2])
        dump = Dump.open(dump_path)
        assert [record.sequence for record in dump.records()] == [0, 2]
        assert dump.problems[0].startswith("rank 0: rank0/index.jsonl, line 2 is damaged: ")
        assert dump.problems[1] == "rank 0: 3 records were written, but 2 can be read"


def test_a_line_without_end_is_skipped(dump_path, monkeypatch):
    monkeypatch.setattr(reading, "LONGEST_LINE", 2000)
    lines = index_of(dump_path).read_bytes().splitlines(keepends=True)
    index_of(dump_path).write_bytes(lines[0] + b"x" * 10_000 + b"\n" + lines[2])
    dump = Dump.open(dump_path)
    assert [record.sequence for record in dump.records()] == [0, 2]
    assert "line 2 is damaged: it is longer than 2000 bytes" in dump.problems[0]


def test_a_thousand_damaged_lines_are_counted_not_listed(dump_path):
    index_of(dump_path).write_bytes(b"x\n" * 1000)
    problems = Dump.open(dump_path).problems
    assert len(problems) < 30
    assert any("and 980 more problems" in problem for problem in problems)


def test_a_record_twice_is_noted(dump_path):
    index_of(dump_path).write_bytes(index_of(dump_path).read_bytes() * 2)
    dump = Dump.open(dump_path)
    assert len(list(dump.records())) == 3
    assert "record 0 comes after record 2" in dump.problems[0]


def test_bytes_that_changed_are_noticed(dump_path):
    dump = Dump.open(dump_path)
    first, *_ = dump.records()
    with data_of(dump_path).open("r+b") as file:
        file.seek(first.payload.begin)
        file.write(b"\x01")
    with pytest.raises(UsageError, match="the file or the index is damaged"):
        dump.read(first)
    assert dump.read(first, check=False).shape == (4,)


def test_ranks_of_two_runs_are_noted(dump_path):
    other = Header(run="b" * 32, rank=1)
    os.rename(  # noqa: PTH104
        write_dump(dump_path.parent / "other", VALUES, header=other).folder, dump_path / "rank1"
    )
    problems = Dump.open(dump_path).problems
    assert problems[-1] == "it mixes 2 runs: rank 0 of aaaaaaaa, rank 1 of bbbbbbbb"


# --- hostile --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"payload__file": "../secret"}, "'../secret' is not a path inside the dump"),
        ({"payload__file": "rank0/../../secret"}, "is not a path inside the dump"),
        ({"payload__file": "/etc/passwd"}, "'/etc/passwd' is not a path inside the dump"),
        ({"payload__file": "C:\\secret"}, "is not a path inside the dump"),
        ({"payload__file": ""}, "is not a path inside the dump"),
        ({"payload__file": "link"}, "is a link to .*secret, outside the dump"),
        ({"payload__file": "folder/secret"}, "outside the dump"),
        ({"payload__file": "pipe"}, "is not a regular file$"),
        ({"payload__file": "rank0"}, "is not a regular file$"),
        ({"payload__begin": -8}, "its offset -8 is negative"),
        ({"payload__begin": 2**62}, "ends at byte"),
        ({"payload__nbytes": 2**62}, "each needs 16"),
        ({"payload__nbytes": -16}, "each needs 16"),
        ({"payload__nbytes": 2**62, "payload__shape": [2**60]}, "ends at byte|does not expand"),
        ({"payload__shape": [2**62, 4], "payload__nbytes": 0}, "each needs 7378"),
        ({"payload__shape": [-4]}, "each needs -16"),
        ({"payload__shape": [2, 2]}, r"the stored shape \(2, 2\) does not expand to \(4,\)"),
        ({"tensor__shape": [5]}, r"the stored shape \(4,\) does not expand to \(5,\)"),
        ({"tensor__dtype": "float64"}, "each needs 32"),
        ({"tensor__dtype": "__file__"}, "has no dtype '__file__'"),
        ({"tensor": None}, "it is not a tensor"),
    ],
)
def test_a_payload_that_is_not_what_it_says_is_refused_before_it_is_read(
    dump_path, changes, message
):
    (dump_path.parent / "secret").write_bytes(bytes(1 << 17))
    (dump_path / "link").symlink_to(dump_path.parent / "secret")
    (dump_path / "folder").symlink_to(dump_path.parent)
    os.mkfifo(dump_path / "pipe")
    change_record(dump_path, 1, **changes)
    dump = Dump.open(dump_path)
    assert len(dump.problems) == 1
    records = list(dump.records())
    with pytest.raises(UsageError, match=message):
        dump.read(records[1])
    assert torch.equal(dump.read(records[2]), VALUES[2])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rank": 3}, "it belongs to rank 3"),
        ({"id": "other"}, "its id is 'other', but its site's id is 'forward/x1#0/output.0'"),
        ({"sequence": -1}, "its sequence -1 or"),
        (
            {"tensor__shape": [2**40, 2**40]},
            f"its shape {(2**40, 2**40)} is not valid",
        ),
        ({"tensor__shape": [-1]}, "its shape (-1,) is not valid"),
    ],
)
def test_a_line_that_contradicts_itself_is_left_out(dump_path, changes, message):
    change_record(dump_path, 1, **changes)
    dump = Dump.open(dump_path)
    assert message in dump.problems[0]
    assert [record.sequence for record in dump.records()] == [0, 2]


def test_a_sketch_is_checked_like_the_values(tmp_path):
    header = Header(run="r")
    writer = DumpWriter(tmp_path, header)
    record = writer.add(entry_of(torch.ones(2), sketch=torch.ones(8)))
    writer.close(header)
    dump = Dump.open(tmp_path)
    assert torch.equal(dump.read_sketch(record), torch.ones(8))
    wrong = msgspec.structs.replace(record.sketch, nbytes=2**40)
    with pytest.raises(UsageError, match=r"sketch of .*: 1099511627776 bytes are stored"):
        dump.read_sketch(msgspec.structs.replace(record, sketch=wrong))
    with pytest.raises(UsageError, match="it has no sketch"):
        dump.read_sketch(msgspec.structs.replace(record, sketch=None))


# --- being written, killed, repaired --------------------------------------------------------------


def test_a_dump_can_be_read_while_it_is_written(tmp_path):
    header = Header(run="r")
    writer = DumpWriter(tmp_path, header)
    for number in range(3):
        writer.add(entry_of(torch.ones(3) * number, number, site=site(f"x{number}")))
        dump = Dump.open(tmp_path)
        assert dump.ranks[0].state == "being written"
        assert [dump.read(record)[0] for record in dump.records()] == list(range(number + 1))
    with pytest.raises(UsageError, match="is still being written"):
        Dump.open(tmp_path).repair()
    writer.close(header)
    assert Dump.open(tmp_path).ranks[0].state == "closed"


@pytest.mark.parametrize("last", [0, 2])
def test_a_killed_dump_is_read_and_repaired(tmp_path, last):
    writer = DumpWriter(tmp_path, Header(run="r"), last=last)
    odd = [torch.ones(3, dtype=torch.uint8), torch.ones(2), torch.ones(2), torch.ones(0, 3)]
    for number, tensor in enumerate(odd):
        writer.add(entry_of(tensor, number, name=f"x{number}", sketch=torch.ones(number + 4)))
    abandon(writer)
    dump = Dump.open(tmp_path)
    assert dump.ranks[0].state == "ended early"
    (mended,) = dump.repair()
    with safe_open(mended, framework="pt") as opened:
        for record in dump.records():
            assert torch.equal(opened.get_tensor(record.payload.key), odd[record.sequence])
            assert opened.get_tensor(record.sketch.key).shape == record.sketch.shape
    assert Dump.open(tmp_path).repair() == []
    assert all(torch.equal(dump.read(r), odd[r.sequence]) for r in Dump.open(tmp_path).records())


def test_what_cannot_be_repaired_is_a_problem(tmp_path):
    abandon(write_dump(tmp_path, VALUES, close=False))
    data_of(tmp_path).write_bytes(bytes(100))
    dump = Dump.open(tmp_path)
    assert dump.repair() == []
    assert "rank0/data-0000.safetensors was not repaired" in dump.problems[-1]

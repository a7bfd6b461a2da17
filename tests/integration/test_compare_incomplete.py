"""What cannot be compared never passes: dumps that lack something, and files that are no files."""

from __future__ import annotations

import json
import os
import random
import shutil
import socket

import pytest
import torch
from click.testing import CliRunner

from integration.dump_making import Making, values
from paritas.app.cli import main
from paritas.comparison.compare import compare
from paritas.core.errors import UsageError
from paritas.core.results.findings import Status
from paritas.formats.dumps.opening import open_dump
from paritas.formats.files.records import LOCK

RANKS = 2
# More of them where that is asked for: see tests/README.md.
DAMAGES = 200 if os.environ.get("PARITAS_WHOLE_CORPUS") else 16


def write_dump(path, **facts):
    """Two ranks, two steps, two layers."""
    for rank in range(RANKS):
        making = Making(path, rank=rank, world_size=RANKS, **facts)
        for step in range(2):
            x = values(2, 3, seed=10 * rank + step)
            for layer in range(2):
                y = x.cos() + layer
                making.call(f"layers.{layer}/aten.log.default", [x, 0.5], y, step=step)
                x = y
        making.close()
    return path


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return write_dump(tmp_path_factory.mktemp("whole") / "dump")


@pytest.fixture
def dump(whole, tmp_path):
    return shutil.copytree(whole, tmp_path / "dump")


def run(*arguments):
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


def edit_header(dump, rank=0, **changes):
    path = dump / f"rank{rank}" / "header.json"
    path.write_text(json.dumps({**json.loads(path.read_bytes()), **changes}))


def edit_index(dump, edit):
    path = dump / "rank0" / "index.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    edit(lines)
    path.write_text("".join(lines))


def repeat(lines):
    record = json.loads(lines[0])
    record["sequence"] = len(lines)
    lines.append(f"{json.dumps(record)}\n")


LOSSES = {
    "a rank": (lambda dump: shutil.rmtree(dump / "rank1"), "rank 1 left nothing"),
    "the header of a rank": (
        lambda dump: (dump / "rank1" / "header.json").unlink(),
        "rank1/header.json cannot be read: No such file or directory",
    ),
    "a record": (
        lambda dump: edit_index(dump, lambda lines: lines.pop(3)),
        "rank 0: 12 records were written, but 11 can be read",
    ),
    "a line": (
        lambda dump: edit_index(dump, lambda lines: lines.__setitem__(3, "{}\n")),
        "index.jsonl, line 4 is damaged",
    ),
    "the end": (
        lambda dump: edit_header(dump, closed=False),
        "rank 0: it was not closed, so the run ended early; 12 records can be read",
    ),
    "a name": (
        lambda dump: edit_index(dump, repeat),
        "forward/layers.0/aten.log.default#0/input.0 of step 0 is recorded 2 times",
    ),
    "the index": (
        lambda dump: (dump / "rank0" / "index.jsonl").unlink(),
        "index.jsonl cannot be read: No such file or directory",
    ),
}


@pytest.mark.parametrize("lost", LOSSES)
def test_what_both_dumps_have_lost_is_unverified_with_the_reason(dump, tmp_path, lost):
    lose, reason = LOSSES[lost]
    assert compare(dump, dump).status is Status.IDENTICAL
    lose(dump)
    found = compare(dump, dump)
    assert (found.status, found.exit_code) == (Status.UNVERIFIED, 3)
    assert found.verdict.status is Status.UNVERIFIED
    assert any(reason in loss for loss in found.my.losses)
    ran = run("compare", "--my-path", dump, "--golden-path", dump, "--output", tmp_path / "out")
    assert ran.exit_code == 3
    said = " ".join(ran.output.split())
    assert "my dump: unverified (harness) it is incomplete: " in said
    assert reason.rpartition("header.json")[2] in said
    assert ran.output.splitlines()[-1].startswith("unverified: ")


@pytest.mark.parametrize("lost", LOSSES)
def test_a_conversion_does_not_hide_what_was_lost(dump, tmp_path, lost):
    LOSSES[lost][0](dump)
    ran = run("convert", dump, "--to", "packed", "--output", tmp_path / "made")
    assert ran.exit_code in (2, 3)
    if ran.exit_code == 3:
        assert compare(tmp_path / "made", tmp_path / "made").exit_code == 3


def test_what_is_selected_and_complete_passes(dump):
    shutil.rmtree(dump / "rank1")
    assert compare(dump, dump).exit_code == 3
    assert compare(dump, dump, ranks=[0]).status is Status.IDENTICAL


def test_a_dump_of_selected_ranks_passes(whole, tmp_path):
    part = write_dump(tmp_path / "part", selection={"ranks": "0"})
    shutil.rmtree(part / "rank1")
    assert compare(part, part).status is Status.IDENTICAL
    found = compare(part, whole)
    assert found.status is Status.IDENTICAL
    assert found.coverage.not_selected
    assert "were not selected when my dump was recorded (ranks 0)" in found.notes[-1]


def test_a_dump_of_selected_steps_passes(whole, tmp_path):
    part = tmp_path / "part"
    for rank in range(RANKS):
        making = Making(part, rank=rank, world_size=RANKS, selection={"steps": "0"})
        x = values(2, 3, seed=10 * rank)
        for layer in range(2):
            making.call(f"layers.{layer}/aten.log.default", [x, 0.5], x := x.cos() + layer)
        making.close()
    assert compare(part, whole).exit_code == 0


def test_a_damaged_value_in_steps_that_are_not_compared_does_not_matter(dump):
    def move(lines):
        record = json.loads(lines[-1])
        record["payload"]["file"] = "rank0/data-0009.safetensors"
        lines[-1] = f"{json.dumps(record)}\n"

    edit_index(dump, move)
    assert compare(dump, dump).exit_code == 3
    assert compare(dump, dump, steps=["0"]).exit_code == 0


def test_a_rank_of_another_tool_that_is_missing_is_unverified(tmp_path):
    for rank in (0, 2):
        (tmp_path / "dump" / f"rank{rank}").mkdir(parents=True)
        torch.save({"w": values(3)}, tmp_path / "dump" / f"rank{rank}" / "all.pt")
    found = compare(tmp_path / "dump", tmp_path / "dump")
    assert found.exit_code == 3
    assert found.my.losses == ("rank 1 left nothing",)
    assert compare(tmp_path / "dump", tmp_path / "dump", ranks=[0, 2]).exit_code == 0


def test_a_step_that_one_rank_of_another_tool_lacks_is_unverified(tmp_path):
    run_of_sglang = tmp_path / "run"
    run_of_sglang.mkdir()
    for rank, step in ((0, 0), (1, 0), (0, 1)):
        name = f"step={step}___rank={rank}___dump_index={step}___name=x.pt"
        torch.save(values(3), run_of_sglang / name)
    found = compare(run_of_sglang, run_of_sglang)
    assert found.exit_code == 3
    assert found.my.losses == ("rank 1 has nothing of step 1, which other ranks recorded",)
    assert compare(run_of_sglang, run_of_sglang, steps=["0"]).exit_code == 0


# --- what would hang ------------------------------------------------------------------------------


def make_socket(path):
    # Names of sockets are short, whatever the folder.
    here = os.open(".", os.O_RDONLY)
    os.chdir(path.parent)
    try:
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(path.name)
    finally:
        os.fchdir(here)
        os.close(here)


STRANGE = {
    "pipe": os.mkfifo,
    "device": lambda path: path.symlink_to("/dev/zero"),
    "loop": lambda path: path.symlink_to(path.name),
    "socket": make_socket,
    "folder": lambda path: path.mkdir(),
}
FILES = ("header.json", "index.jsonl", "data-0000.safetensors")


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("kind", STRANGE)
def test_what_is_no_file_is_a_problem_and_is_not_read(dump, tmp_path, kind, name):
    path = dump / "rank1" / name
    path.unlink()
    STRANGE[kind](path)
    assert compare(dump, dump).exit_code == 3
    assert run("inspect", dump, "--check").exit_code == 3
    assert run("convert", dump, "--to", "stats", "--output", tmp_path / "made").exit_code in (2, 3)


@pytest.mark.parametrize("kind", STRANGE)
def test_a_report_is_not_read_from_what_is_no_file(tmp_path, kind):
    STRANGE[kind](tmp_path / "comparison.json")
    ran = run("report", tmp_path)
    assert ran.exit_code == 2
    assert "comparison.json" in ran.output


def test_any_number_of_ranks_is_told_at_once(dump):
    for rank in range(RANKS):
        edit_header(dump, rank, world_size=10**9)
    ran = run("inspect", dump)
    assert ran.exit_code == 3
    said = " ".join(ran.output.split())
    assert "0-1 (the run has 1000000000); missing: 2-999999999" in said
    assert "problem: ranks 2-999999999 left nothing" in said
    assert compare(dump, dump).exit_code == 3


def test_a_value_that_claims_to_be_repeated_without_end_is_not_read(dump):
    def widen(lines):
        record = json.loads(lines[0])
        record["tensor"].update(shape=[2**40, 2, 3], stride=[0, 3, 1])
        record["payload"].update(shape=[1, 2, 3])
        lines[0] = f"{json.dumps(record)}\n"

    edit_index(dump, widen)
    found = compare(dump, dump)
    assert found.exit_code == 3
    assert any("is repeated" in row.reason for row in found.rows)
    assert run("inspect", dump, "--check").exit_code == 3


# --- damage of any kind ---------------------------------------------------------------------------

NUMBERS = (10**9, 10**18, 2**63 - 1, 2**62, 10**30, -1, 0, 1)


def list_numbers(tree, way=()):
    """The ways to all whole numbers of a document."""
    parts = tree.items() if isinstance(tree, dict) else enumerate(tree)
    for key, part in parts:
        if isinstance(part, (dict, list)):
            yield from list_numbers(part, (*way, key))
        elif isinstance(part, int) and not isinstance(part, bool):
            yield (*way, key)


def change_number(text, draw):
    tree = json.loads(text)
    *way, last = draw.choice(list(list_numbers(tree)))
    place = tree
    for key in way:
        place = place[key]
    place[last] = draw.choice(NUMBERS)
    return json.dumps(tree)


def damage(dump, draw):
    """Change one thing; returns what was done."""
    file = draw.choice(
        sorted(path for path in dump.rglob("*.*") if path.is_file() and path.name != LOCK)
    )
    content = file.read_bytes()
    what = draw.choice(["remove", "cut", "flip", "number", "line", "swap", *STRANGE])
    if what in ("number", "line") and file.suffix == ".safetensors":
        what = "cut"
    if what == "remove" or what in STRANGE:
        file.unlink()
        STRANGE.get(what, lambda _: None)(file)
    elif what == "cut":
        os.truncate(file, draw.randrange(len(content)))
    elif what == "flip":
        at = draw.randrange(len(content))
        file.write_bytes(
            content[:at] + bytes([content[at] ^ (1 << draw.randrange(8))]) + content[at + 1 :]
        )
    elif what == "swap":
        other = draw.choice(sorted(dump.rglob(file.name)))
        file.write_bytes(other.read_bytes())
        other.write_bytes(content)
    elif file.suffix == ".json":
        file.write_text(change_number(content, draw))
    else:
        lines = content.decode().splitlines()
        at = draw.randrange(len(lines))
        lines[at : at + 1] = [] if what == "line" else [change_number(lines[at], draw)]
        file.write_text("".join(f"{line}\n" for line in lines))
    return what, file.relative_to(dump).as_posix()


def contents(path):
    """All values that can be read, whatever their names."""
    try:
        dump = open_dump(path)
    except UsageError:
        return []
    found = []
    for record in dump.records():
        try:
            found.append(record.value or dump.read(record).numpy().tobytes())
        except UsageError:
            continue
    return sorted(found, key=repr)


def test_no_damage_that_loses_something_passes_hangs_or_gives_a_traceback(whole, tmp_path):
    expected = contents(whole)
    for seed in range(DAMAGES):
        draw = random.Random(seed)
        my = shutil.copytree(whole, tmp_path / "my")
        done = damage(my, draw)
        golden = my if seed % 2 else whole
        for command in (
            (
                "compare",
                "--my-path",
                my,
                "--golden-path",
                golden,
                "--output",
                tmp_path / "out",
                "--no-html",
            ),
            ("inspect", my, "--check"),
        ):
            ran = run(*command)
            assert isinstance(ran.exception, SystemExit | None), (seed, done, ran.exception)
            assert ran.exit_code or contents(my) == expected, (seed, done, command[0])
        shutil.rmtree(my)
        shutil.rmtree(tmp_path / "out", ignore_errors=True)

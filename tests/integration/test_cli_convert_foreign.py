"""`paritas convert` of other tools' dumps: every layout that is read, also while it is written."""

from __future__ import annotations

import os
import shutil

import numpy as np
import pytest
import torch
from click.testing import CliRunner

from integration.dump_making import Making, site, values
from paritas import compare
from paritas.app.cli import main
from paritas.core.numerics.statistics import summarize
from paritas.core.results.findings import Status
from paritas.formats.dumps.opening import open_dump
from paritas.formats.dumps.reading import Dump
from paritas.formats.files.records import Entry, TensorFacts
from paritas.formats.files.tensor_bytes import digest
from paritas.formats.foreign.ge_writing import GeTree
from paritas.recording import conversion, rewriting
from unit.formats.foreign.msprobe_dumps import linear_program
from unit.formats.foreign.test_sglang import put

NOW = "20240125031118787351"


def convert(*arguments):
    return CliRunner().invoke(main, ["convert", *map(str, arguments)])


# --- every layout that is read --------------------------------------------------------------------


def save_node(root, layout, token, node, array):
    folder = root / layout.format(token)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{node}-aten.mm.default.OUTPUT.0.{NOW}.npy"
    np.save(path, array)
    return path


def fx(root, layout="worldsize1_global_rank0/graph_1/{}"):
    for token in (1, 2):
        for node in ("mm", "mm_1"):
            save_node(root, layout, token, node, values(3, 4, seed=token).numpy())
    folder = root / layout.format(1)
    np.save(folder / f"mm-aten.mm.default.INPUT.0.{NOW}.npy", np.array(2.5))
    np.save(folder / f"mm-aten.mm.default.INPUT.1.{NOW}.npy", np.array("sum"))


def old_fx(root):
    fx(root, "data_dump/{}/gm_20240125031100000000_dump")


def ge(root):
    tree = GeTree(root)
    for step in (0, 1):
        taken = [values(3, 4, seed=step).half(), torch.tensor([step])]
        for name in ("Add_2", "a/Mul_3"):
            tree.write(
                step=step, model="g", op_type="Add", op_name=name, inputs=taken, outputs=taken[:1]
            )


def msprobe(root):
    linear_program(root / "step0" / "rank0")


def sglang(root):
    for layer in (0, 1):
        tags = {"step": 0, "rank": 0, "dump_index": layer + 1, "name": "h", "layer_id": layer}
        put(root, values(2, 3, seed=layer), {}, **tags)


def files(root):
    root.mkdir()
    np.save(root / "a.npy", values(2, 3).numpy())
    torch.save({"b": values(3), "c": values(2, seed=1).bfloat16()}, root / "state.pt")


LAYOUTS = [fx, old_fx, ge, msprobe, sglang, files]


@pytest.mark.parametrize("make", LAYOUTS)
def test_every_layout_becomes_one_of_ours_bit_for_bit(tmp_path, make):
    source = tmp_path / "dump"
    make(source)
    before = {path: path.read_bytes() for path in source.rglob("*") if path.is_file()}
    for target in ("packed", "msit", "ge", "stats"):
        done = convert(source, "--to", target)
        assert done.exit_code == 0, done.output
    assert {path: path.read_bytes() for path in source.rglob("*") if path.is_file()} == before
    old, packed = open_dump(source), Dump.open(tmp_path / "dump_packed")
    assert packed.problems == []
    assert packed.header(0).closed
    pairs = list(zip(old.records(), packed.records(), strict=True))
    assert [(one.id, one.step, one.value) for one, _ in pairs] == [
        (other.id, other.step, other.value) for _, other in pairs
    ]
    tensors = [(one, other) for one, other in pairs if one.tensor is not None]
    assert all(old.read(one).equal(packed.read(other)) for one, other in tensors)
    for target in ("packed", "msit", "ge", "stats"):
        table = compare(tmp_path / f"dump_{target}", source)
        assert table.verdict.status is Status.IDENTICAL, target
        assert {row.judged_by for row in table.rows} >= {"sketch" if target == "stats" else "bits"}


def test_a_tree_of_the_engine_keeps_its_operators_when_it_is_written_again(tmp_path):
    ge(tmp_path / "dump")
    assert convert(tmp_path / "dump", "--to", "packed").exit_code == 0
    assert convert(tmp_path / "dump", "--to", "ge").exit_code == 0
    # Without our index it is a tree like the engine's own.
    tree = tmp_path / "dump_ge"
    shutil.rmtree(tree / "rank0")
    old, new = open_dump(tmp_path / "dump"), open_dump(tree)
    assert new.kind == "ge"
    assert new.problems == []
    pairs = list(zip(old.records(), new.records(), strict=True))
    assert all(
        (one.site, one.step, one.tensor) == (two.site, two.step, two.tensor) for one, two in pairs
    )
    assert all(old.read(one).equal(new.read(two)) for one, two in pairs)


def test_the_last_call_is_written_before_its_files_are_deleted(tmp_path):
    fx(tmp_path / "dump")
    done = convert(tmp_path / "dump", "--to", "ge", "--delete")
    assert done.exit_code == 0, done.output
    assert list((tmp_path / "dump").rglob("*.npy")) == []
    made = Dump.open(tmp_path / "dump_ge")
    tensors = [one for one in made.records() if one.tensor is not None]
    assert [made.read(one).equal(values(3, 4, seed=one.step)) for one in tensors] == [True] * 4


def test_statistics_of_another_tool_become_an_index(tmp_path):
    folder = tmp_path / "dump" / "worldsize1_global_rank0" / "graph_1" / "0"
    folder.mkdir(parents=True)
    np.save(folder / f"mm-aten.mm.OUTPUT.0.{NOW}_min_max.npy", np.float16([-1, 2]))
    assert convert(tmp_path / "dump", "--to", "stats").exit_code == 0
    (record,) = Dump.open(tmp_path / "dump_stats").records()
    assert (record.dtype, record.statistics.minimum, record.statistics.maximum) == (
        "float16",
        -1,
        2,
    )
    table = compare(tmp_path / "dump_stats", tmp_path / "dump")
    assert table.verdict.status is Status.IDENTICAL
    refused = convert(tmp_path / "dump", "--to", "packed")
    assert refused.exit_code == 2
    assert "holds statistics only, so its values are not recorded" in refused.stderr


def test_graphs_in_words_go_along_into_a_tree(tmp_path):
    ge(tmp_path / "dump")
    name = "dynamo_original_graph_1_rank_0_pid_7_ts_20240125031118787351.txt"
    (tmp_path / "dump" / name).write_text('op { name: "Add_2" type: "Add" }')
    assert convert(tmp_path / "dump", "--to", "msit").exit_code == 0
    assert (tmp_path / "dump_msit" / name).read_text() == 'op { name: "Add_2" type: "Add" }'


# --- what cannot be done --------------------------------------------------------------------------


def test_what_is_no_dump_of_that_kind_is_wrong_usage(tmp_path):
    fx(tmp_path / "dump")
    wrong = convert(tmp_path / "dump", "--to", "stats", "--kind", "ge")
    assert wrong.exit_code == 2
    assert "no tensor files of the graph engine" in wrong.stderr
    (tmp_path / "empty").mkdir()
    empty = convert(tmp_path / "empty", "--to", "stats")
    assert empty.exit_code == 2
    assert "is not a known dump" in empty.stderr
    assert not (tmp_path / "dump_stats").exists()


def test_a_file_that_was_cut_off_is_told_and_kept_and_the_rest_converted(tmp_path):
    for make, pattern in ((fx, "mm_1-*.npy"), (ge, "Add.a_Mul*")):
        source = tmp_path / make.__name__
        make(source)
        broken = min(source.rglob(pattern))
        os.truncate(broken, broken.stat().st_size - 1)
        done = convert(source, "--to", "stats", "--delete")
        assert done.exit_code == 3
        assert f"problem: {broken.relative_to(source)}" in done.output or broken.name in done.output
        assert [path for path in source.rglob("*") if path.is_file()] == [broken]
        made = Dump.open(source.with_name(f"{source.name}_stats"))
        assert not made.header(0).closed
        assert list(made.records())


def test_an_output_that_cannot_be_written_loses_nothing(tmp_path, monkeypatch):
    fx(tmp_path / "dump")
    (tmp_path / "taken").write_text("a file")
    done = convert(tmp_path / "dump", "--to", "stats", "--delete", "--output", tmp_path / "taken")
    assert done.exit_code == 2
    assert len(list((tmp_path / "dump").rglob("*.npy"))) == 6

    def full(folder):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(conversion, "sync_to_disk", full)
    done = convert(tmp_path / "dump", "--to", "stats", "--delete")
    assert done.exit_code == 2
    assert len(list((tmp_path / "dump").rglob("*.npy"))) == 6


# --- deleting, and going on -----------------------------------------------------------------------


def test_files_are_deleted_once_what_they_hold_is_converted(tmp_path):
    fx(tmp_path / "dump")
    done = convert(tmp_path / "dump", "--to", "packed", "--delete")
    assert done.exit_code == 0, done.output
    assert "in 6 files of" in done.stdout
    assert "its index is kept" not in done.stdout
    assert list((tmp_path / "dump").rglob("*.npy")) == []
    assert len(list(Dump.open(tmp_path / "dump_packed").records())) == 6


def test_a_link_to_outside_of_the_dump_is_not_deleted(tmp_path):
    fx(tmp_path / "dump")
    treasure = tmp_path / "treasure.npy"
    np.save(treasure, values(2).numpy())
    folder = tmp_path / "dump" / "worldsize1_global_rank0" / "graph_1" / "1"
    (folder / f"x-aten.mm.OUTPUT.0.{NOW}.npy").symlink_to(treasure)
    assert convert(tmp_path / "dump", "--to", "stats", "--delete").exit_code == 3
    assert treasure.exists()


def test_a_record_that_was_not_written_down_is_made_once_more(tmp_path):
    fx(tmp_path / "dump")
    assert convert(tmp_path / "dump", "--to", "stats").exit_code == 0
    sources = tmp_path / "dump_stats" / "rank0" / "sources.jsonl"
    lines = sources.read_bytes().splitlines(keepends=True)
    sources.write_bytes(b"".join(lines[:-1]) + lines[-1][:-2])
    done = convert(tmp_path / "dump", "--to", "stats")
    assert done.exit_code == 0, done.output
    assert "6 records of 1 rank" in done.stdout
    assert "5 of them from an earlier run" in done.stdout
    ids = [(one.step, one.id) for one in Dump.open(tmp_path / "dump_stats").records()]
    assert len(set(ids)) == len(ids) == 6


# --- while it is written --------------------------------------------------------------------------


def watch(monkeypatch, source, steps, *options):
    """Convert with --watch; each of the steps happens between two looks, then Ctrl-C."""
    waiting = iter(steps)

    def pause(_):
        step = next(waiting, None)
        if step is None:
            raise KeyboardInterrupt
        step()

    monkeypatch.setattr(conversion.time, "sleep", pause)
    return convert(source, "--watch", "--to", "stats", *options)


def nothing():
    pass


def test_files_of_another_tool_are_freed_as_they_are_completed(tmp_path, monkeypatch):
    source, layout = tmp_path / "dump", "worldsize1_global_rank0/graph_1/{}"
    left = []

    def look():
        left.append(len(list(source.rglob("*.npy"))))

    def write(token):
        return lambda: save_node(source, layout, token, "mm", values(3, seed=token).numpy())

    steps = [nothing, write(0), nothing, look, write(1), write(2), nothing, look]
    done = watch(monkeypatch, source, steps, "--delete")
    assert done.exit_code == 130
    assert left == [0, 0]
    assert "3 records of 1 rank" in done.stdout
    made = Dump.open(tmp_path / "dump_stats")
    assert [one.statistics for one in made.records()] == [
        summarize(values(3, seed=token)) for token in range(3)
    ]


@pytest.mark.parametrize("make", [fx, ge])
def test_half_a_file_is_left_until_it_is_whole(tmp_path, monkeypatch, make):
    source, other = tmp_path / "dump", tmp_path / "other"
    make(other)
    whole = max(path for path in other.rglob("*") if path.is_file() and "mm-" not in path.name)
    name = whole.relative_to(other)
    seen = []

    def begin():
        (source / name).parent.mkdir(parents=True)
        (source / name).write_bytes(whole.read_bytes()[:-3])

    def finish():
        seen.append((source / name).exists())
        (source / name).write_bytes(whole.read_bytes())

    done = watch(
        monkeypatch, source, [begin, nothing, nothing, finish, nothing, nothing], "--delete"
    )
    assert done.exit_code == 130
    assert seen == [True], "it was not whole"
    assert not (source / name).exists()
    assert "problem" not in done.output


def test_an_interrupted_conversion_that_deleted_files_goes_on(tmp_path, monkeypatch):
    source, layout = tmp_path / "dump", "worldsize1_global_rank0/graph_1/{}"
    for token in range(3):
        save_node(source, layout, token, "mm", values(3, seed=token).numpy())
    assert watch(monkeypatch, source, [nothing], "--delete").exit_code == 130
    monkeypatch.undo()
    assert list(source.rglob("*.npy")) == []
    for token in (3, 4):
        save_node(source, layout, token, "mm", values(3, seed=token).numpy())
    done = convert(source, "--to", "stats", "--delete")
    assert done.exit_code == 0, done.output
    assert "5 records of 1 rank" in done.stdout
    assert "3 of them from an earlier run" in done.stdout
    assert list(source.rglob("*.npy")) == []
    made = Dump.open(tmp_path / "dump_stats")
    assert made.problems == []
    assert [(one.step, one.statistics) for one in made.records()] == [
        (token, summarize(values(3, seed=token))) for token in range(5)
    ]


def test_when_all_was_converted_and_deleted_the_last_command_closes_the_dump(tmp_path, monkeypatch):
    source = tmp_path / "dump"
    save_node(source, "worldsize1_global_rank0/graph_1/{}", 0, "mm", values(3).numpy())
    assert watch(monkeypatch, source, [nothing], "--delete").exit_code == 130
    monkeypatch.undo()
    assert not Dump.open(tmp_path / "dump_stats").header(0).closed
    done = convert(source, "--to", "stats", "--delete")
    assert done.exit_code == 0, done.output
    assert "1 record of 1 rank" in done.stdout
    assert Dump.open(tmp_path / "dump_stats").problems == []
    other = convert(source, "--to", "packed")
    assert other.exit_code == 2
    assert "is not a known dump" in other.stderr


def test_a_file_of_which_a_part_is_converted_is_not_deleted_when_that_is_interrupted(
    tmp_path, monkeypatch
):
    ge(tmp_path / "dump")
    before = sorted(path for path in (tmp_path / "dump").rglob("*") if path.is_file())
    count, rewrite = 0, rewriting.Rewriter.rewrite

    def interrupted(self, record, source):
        nonlocal count
        count += 1
        if count == 2:
            raise KeyboardInterrupt
        return rewrite(self, record, source)

    monkeypatch.setattr(rewriting.Rewriter, "rewrite", interrupted)
    assert convert(tmp_path / "dump", "--to", "packed", "--delete").exit_code == 130
    monkeypatch.undo()
    assert sorted(path for path in (tmp_path / "dump").rglob("*") if path.is_file()) == before
    done = convert(tmp_path / "dump", "--to", "packed", "--delete")
    assert done.exit_code == 0, done.output
    assert "12 records of 1 rank" in done.stdout
    assert not any(path.is_file() for path in (tmp_path / "dump").rglob("*"))


def test_a_second_call_of_what_is_gone_is_a_call_of_its_own(tmp_path, monkeypatch):
    source = tmp_path / "dump"
    folder = source / "worldsize1_global_rank0" / "graph_1" / "0"

    def call(number):
        def step():
            folder.mkdir(parents=True, exist_ok=True)
            path = folder / f"mm-aten.mm.OUTPUT.0.2024012503111878735{number}.npy"
            np.save(path, values(3, seed=number).numpy())

        return step

    watch(monkeypatch, source, [call(1), nothing, nothing, call(2), nothing, nothing], "--delete")
    found = [one.id for one in Dump.open(tmp_path / "dump_stats").records()]
    assert found == ["forward/graph_1/mm#0/output.0", "forward/graph_1/mm#1/output.0"]


def test_files_of_calls_are_freed_while_they_are_recorded(tmp_path, monkeypatch):
    source = tmp_path / "dump"
    left, making = [], []

    def call(number):
        return lambda: making[0].writer.add_many(
            [
                Entry(
                    sequence=2 * number + at,
                    step=0,
                    site=site(f"a{number}", side),
                    tensor=TensorFacts(dtype="float32", shape=(9,), stride=(1,)),
                    stored=values(9, seed=number),
                )
                for at, side in enumerate(("input", "output"))
            ]
        )

    def look():
        left.append(len(list((source / "worldsize1_global_rank0").rglob("*.*.*.*.*"))))

    def close():
        making[0].close()

    steps = [
        lambda: making.append(Making(source, layout="ge")),
        *map(call, range(3)),
        look,
        close,
    ]
    done = watch(monkeypatch, source, steps, "--delete")
    assert done.exit_code == 0, done.output
    assert left == [0]
    assert "6 records of 1 rank" in done.stdout
    assert "in 3 files of" in done.stdout
    made = list(Dump.open(tmp_path / "dump_stats").records())
    assert [one.statistics for one in made] == [
        summarize(values(9, seed=number)) for number in (0, 0, 1, 1, 2, 2)
    ]


def test_files_of_our_npy_layout_are_freed_while_it_is_recorded(tmp_path, monkeypatch):
    source = tmp_path / "dump"
    left, making = [], []
    tensors = [values(50, seed=number) for number in range(5)]

    def begin():
        making.append(Making(source, layout="msit"))

    def add(number, tensor, **facts):
        return lambda: making[0].add(site(f"a{number}"), tensor, **facts)

    def look():
        left.append(len(list(source.rglob("*.npy"))))

    def again():
        # The recorder sends no bytes of what it has sent before; their file is gone by now.
        facts = TensorFacts(dtype="float32", shape=(5, 10), stride=(10, 1))
        entry = Entry(
            sequence=5, step=0, site=site("again"), tensor=facts, digest=digest(tensors[0])
        )
        making[0].writer.add(entry)

    def close():
        making[0].close()

    adding = [add(number, tensor) for number, tensor in enumerate(tensors)]
    steps = [begin, *adding[:3], look, *adding[3:], look, again, nothing, close]
    done = watch(monkeypatch, source, steps, "--delete")
    assert done.exit_code == 0, done.output
    assert left == [0, 0]
    assert "6 records of 1 rank" in done.stdout
    assert "in 5 files of" in done.stdout
    made = list(Dump.open(tmp_path / "dump_stats").records())
    assert [one.statistics for one in made] == [summarize(one) for one in [*tensors, tensors[0]]]

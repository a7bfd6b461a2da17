"""Dumps of torchair's users: of a selection against whole ones, and in Ascend's tree and files."""

from __future__ import annotations

import collections
import json
import os
import re
import shutil
import subprocess
import sys

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from torch import nn

import paritas
from integration import ge_tree_rules
from paritas import torchair_dump
from paritas.app.cli import main
from paritas.core.errors import UsageError
from paritas.formats.dumps.reading import Dump

pytestmark = pytest.mark.usefixtures("scalar_kernels")
TOKENS = 3


class Net(nn.Module):
    """GELU is fused with the addition after it, which is of another module."""

    def __init__(self):
        super().__init__()
        self.linear, self.gelu, self.norm = nn.Linear(8, 8), nn.GELU(), nn.LayerNorm(8)

    def forward(self, x):
        return self.norm(self.gelu(self.linear(x)) + x)


@torch.no_grad()
def run(config):
    """Three tokens through the model under a configuration; gives what came out."""
    torch.compiler.reset()
    torch.manual_seed(7)
    backend = torchair_dump.get_npu_backend(compiler_config=config)
    model = torch.compile(Net(), backend=backend)
    seeded = torch.Generator().manual_seed(11)
    results = [model(torch.randn(4, 8, generator=seeded)) for _ in range(TOKENS)]
    backend.close()
    return results


@pytest.fixture(scope="module")
def dumps(tmp_path_factory):
    """Makes each dump once: `dumps("fx")`, `dumps("ge", dump_token=[1, 2])`."""
    made, results = {}, {}

    def dump(kind, **given):
        key = (kind, json.dumps(given))
        if key not in made:
            folder = tmp_path_factory.mktemp("dump")
            config = getattr(torchair_dump, f"get_{kind}_dump_config")(str(folder), **given)
            made[key] = folder / f"msit_{kind}_dump"
            results[made[key]] = run(config)
        return made[key]

    dump.results = results
    return dump


def compare(my, golden, output, *options):
    """Exit code of `msit llm compare`'s counterpart, its last line, and the comparison."""
    command = ["compare", "--my-path", my, "--golden-path", golden, "--output", output, *options]
    result = CliRunner().invoke(main, [*map(str, command), "--no-html", "--overwrite"])
    assert result.exit_code in (0, 1, 3), result.output
    data = json.loads((output / "comparison.json").read_text())
    return result.exit_code, result.stdout, data


# --- a dump of selected tokens or layers ----------------------------------------------------------


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("given", "why", "compared"),
    [
        ({"dump_token": [1, 2]}, "steps 1|2", {1, 2}),
        ({"dump_layer": ["addmm"]}, "layers addmm", {0, 1, 2}),
        ({"dump_layer": ["gelu"]}, "layers gelu", {0, 1, 2}),
        ({"dump_mode": "input"}, "mode input", {0, 1, 2}),
    ],
    ids=str,
)
def test_what_both_dumps_were_asked_for_is_compared(given, why, compared, dumps, tmp_path):
    code, printed, found = compare(dumps("ge", **given), dumps("fx"), tmp_path)
    assert code == 0, printed
    assert {row["step"] for row in found["rows"]} == compared
    coverage = found["coverage"]
    assert coverage["compared"] == len(found["rows"]) > 0
    assert coverage["unmatched"] == []
    names = coverage["not_selected"]
    assert f"{len(names)} not selected" in printed
    assert any(f"not selected when my dump was recorded ({why})" in one for one in found["notes"])
    assert all(re.fullmatch(r"forward/graph_0/\S+ \(step \d; golden only\)", one) for one in names)


def test_a_whole_dump_against_one_of_selected_tokens_is_the_same_the_other_way_round(
    dumps, tmp_path
):
    code, _, found = compare(dumps("fx"), dumps("ge", dump_token=[1, 2]), tmp_path)
    assert code == 0
    assert found["coverage"]["not_selected"]
    (note,) = [one for one in found["notes"] if "not selected" in one]
    assert "my values were not selected when the golden dump was recorded (steps 1|2)" in note


def without_lines(dump, tmp_path, gone):
    """A copy of a dump whose index has lost some records, as if they had never been written."""
    copy = tmp_path / "lossy"
    shutil.copytree(dump, copy)
    index = copy / "rank0" / "index.jsonl"
    kept = [line for line in index.read_text().splitlines() if not gone(json.loads(line))]
    index.write_text("".join(f"{line}\n" for line in kept))
    return copy


def test_a_row_that_was_asked_for_and_is_missing_still_fails(dumps, tmp_path):
    selected = dumps("ge", dump_layer=["addmm"])
    lossy = without_lines(
        selected,
        tmp_path,
        lambda record: record["step"] == 1 and "addmm" in record["site"].get("nodes", ()),
    )
    code, _, found = compare(lossy, dumps("fx"), tmp_path / "out")
    assert code == 3
    failing = [row for row in found["rows"] if row["status"] == "unverified"]
    assert {row["step"] for row in failing} == {1}
    assert "forward/graph_0/addmm#0/output.0" in {row["name"] for row in failing}


def test_a_token_that_was_asked_for_and_is_missing_still_fails(dumps, tmp_path):
    selected = dumps("ge", dump_token=[1, 2])
    lossy = without_lines(selected, tmp_path, lambda record: record["step"] == 2)
    code, _, found = compare(lossy, dumps("fx"), tmp_path / "out")
    assert code == 3
    failing = [row for row in found["rows"] if row["status"] == "unverified"]
    assert {row["step"] for row in failing} == {2}
    assert all("(step 0; golden only)" in one for one in found["coverage"]["not_selected"])


# --- Ascend's tree --------------------------------------------------------------------------------

LAYOUTS = {"ge": ge_tree_rules.NEW, "ge-7.1.0": ge_tree_rules.OLD}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_tree_is_that_of_the_document(layout, dumps):
    folder = dumps("ge", layout=layout)
    tops = collections.Counter()
    for path in folder.iterdir():
        graph = ge_tree_rules.GRAPH.fullmatch(path.name)
        tops[graph[1] if graph else re.sub(r"\d{14}", "${time}", path.name)] += 1
        assert graph is None or graph.group(2, 3) == ("graph_0", "0")
    tree = {"worldsize1_global_rank0": 1, "rank0": 1} if layout == "ge" else {"${time}": 1}
    assert tops == {"original": 1, "optimized": 1, **tree}
    files = ge_tree_rules.tensor_files(folder, LAYOUTS[layout])
    assert {named["token"] for named, _ in files} == {"0", "1", "2"}
    assert {named.group("device", "model") for named, _ in files} == {("0", "graph_0")}
    assert len({named.group("time", "model_id") for named, _ in files}) == 1


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_tool_that_knows_the_rules_alone_finds_operators_and_their_values(layout, dumps):
    folder, fx = dumps("ge", layout=layout), dumps("fx")
    original = ge_tree_rules.graph_operators(next(folder.glob("dynamo_original_*")))
    optimized = ge_tree_rules.graph_operators(next(folder.glob("dynamo_optimized_*")))
    compared = collections.Counter()
    for named, path in ge_tree_rules.tensor_files(folder, LAYOUTS[layout]):
        kind, op_name = ge_tree_rules.operator(named["file"])
        inputs, outputs, told = ge_tree_rules.read(path)
        assert told == op_name
        if kind == "NetOutput":
            result = dumps.results[folder][int(named["token"])]
            assert np.array_equal(inputs[0], result.numpy())
            continue
        if kind == "Reformat":  # holds no value of the graph
            assert op_name not in original
            continue
        parts = ge_tree_rules.split(op_name, original)
        assert parts, op_name
        computed = [part for part in parts if not part.startswith(("permute", "getitem"))]
        assert (kind == "AutomaticBufferFusionOp") == (len(computed) > 1)
        if kind != "Data":
            assert optimized[op_name]["_datadump_original_op_names"] == parts
        (stem,) = original[parts[-1]]["_fx_tensor_name"][:1]
        token = fx / "worldsize1_global_rank0" / "graph_0" / named["token"]
        (file,) = token.glob(f"{stem}.*.npy")
        np.testing.assert_allclose(outputs[0], np.load(file), rtol=1e-5, atol=1e-6)
        compared[kind] += len(inputs) + len(outputs)
    assert compared["AutomaticBufferFusionOp"] >= TOKENS
    assert compared["aten_addmm_default"] == 4 * TOKENS
    assert compared["Data"] == 5 * TOKENS


def statuses(found):
    return {
        (row["step"], row["name"], (row["my"] or {}).get("id", "")): row["status"]
        for row in found["rows"]
    }


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_comparison_says_what_it_says_of_the_default_layout(layout, dumps, tmp_path):
    fx = dumps("fx")
    code, printed, usual = compare(dumps("ge"), fx, tmp_path / "usual")
    assert code == 0, printed
    code, printed, found = compare(dumps("ge", layout=layout), fx, tmp_path / "found")
    assert code == 0, printed
    assert statuses(found) == statuses(usual)
    assert found["coverage"] == usual["coverage"]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_read_as_a_dump_of_another_tool_the_tree_says_the_same(layout, dumps, tmp_path):
    fx = dumps("fx")
    _, _, usual = compare(dumps("ge"), fx, tmp_path / "usual")
    folder = dumps("ge", layout=layout)
    code, printed, found = compare(folder, fx, tmp_path / "found", "--my-kind", "ge")
    assert code == 0, printed
    counted = collections.Counter((row["step"], row["status"]) for row in found["rows"])
    before = collections.Counter((row["step"], row["status"]) for row in usual["rows"])
    # What the program gives is there once more in NetOutput, which is compared where it was made;
    # what one operator of a kernel gives to the next is compared once more.
    assert {status for _, status in counted} == {status for _, status in before}
    assert sum((before - counted).values()) <= TOKENS


def test_a_fault_is_found_in_the_tree(dumps, tmp_path):
    from paritas.formats.foreign.ge_writing import write_tensor_file

    folder = dumps("ge", layout="ge")
    files = ge_tree_rules.tensor_files(folder, ge_tree_rules.NEW)
    fused = [path for named, path in files if "erf" in path.name and named["token"] == "2"]
    path = min(fused, key=lambda path: len(path.name))
    inputs, outputs, name = ge_tree_rules.read(path)
    before = path.read_bytes()
    try:
        wrong = [torch.from_numpy(outputs[0] * 1.01)]
        write_tensor_file(path, [torch.tensor(one) for one in inputs], wrong, op_name=name)
        code, _, found = compare(folder, dumps("fx"), tmp_path, "--my-kind", "ge", "--steps", "2")
        assert code == 1
        assert name.endswith(found["rows"][found["first"]["row"]]["nodes"][-1])
        # The index knows what was written, and takes this for damage.
        code, _, found = compare(folder, dumps("fx"), tmp_path, "--steps", "2")
        assert code == 3
        (row,) = [row for row in found["rows"] if row["status"] == "unverified"]
        assert "the file or the index is damaged" in row["reason"]
    finally:
        path.write_bytes(before)


def test_fusion_off_in_the_tree_has_one_operator_for_each_node(dumps, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    off = {"Switch": {"GraphFusion": {"ALL": "off"}, "UBFusion": {"ALL": "off"}}}
    (tmp_path / "fusion_switch.json").write_text(json.dumps(off))
    given = {"fusion_switch_file": str(tmp_path / "fusion_switch.json"), "layout": "ge"}
    folder = dumps("ge", **given)
    names = [
        ge_tree_rules.operator(named["file"])[1]
        for named, _ in ge_tree_rules.tensor_files(folder, ge_tree_rules.NEW)
    ]
    assert {"mul", "erf", "add"} <= set(names)
    code, printed, found = compare(dumps("ge", layout="ge"), folder, tmp_path / "out")
    assert code == 0, printed
    assert found["coverage"]["compared"] > 0


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_values_fit_their_digests_and_can_be_inspected(layout, dumps):
    dump = Dump.open(dumps("ge", layout=layout))
    assert dump.problems == []
    tensors = [record for record in dump.records() if record.tensor is not None]
    assert all(dump.verify(record) for record in tensors)
    result = CliRunner().invoke(main, ["inspect", str(dump.path), "--check"])
    assert result.exit_code == 0, result.output


# --- what the format cannot hold, rings, second runs ----------------------------------------------


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_the_format_cannot_hold_is_not_lost(layout, tmp_path):
    class Odd(nn.Module):
        def forward(self, x, scale):
            return x.to(torch.float8_e4m3fnuz), x.expand(3, 4) * scale

    x = torch.linspace(0, 1, 4)
    with paritas.capture(tmp_path / "odd", layout=layout):
        made, _ = Odd()(x, 3)
    dump = Dump.open(tmp_path / "odd")
    assert dump.problems == []
    read = {record.id: dump.read(record) for record in dump.records() if record.tensor is not None}
    assert all(dump.verify(record) for record in dump.records() if record.tensor is not None)
    found = [one for one in read.values() if one.dtype is torch.float8_e4m3fnuz]
    assert found
    assert torch.equal(found[0].view(torch.uint8), made.view(torch.uint8))
    expanded = [one for one in read.values() if one.shape == (3, 4)]
    assert expanded
    assert {record.value for record in dump.records() if record.tensor is None} >= {"3"}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_conversion_deletes_every_file_of_values(layout, dumps, tmp_path):
    """Also one with an input that has its record in the file of another operator."""
    made = dumps("ge", layout=layout)
    for folder in made.parent.glob("msit_ge_dump*"):
        shutil.copytree(folder, tmp_path / folder.name)
    dump, new = tmp_path / "msit_ge_dump", tmp_path / "new"
    command = ["convert", str(dump), "--to", "stats", "--output", str(new), "--delete"]
    done = CliRunner().invoke(main, command)
    assert done.exit_code == 0, done.output
    left = [path for path in dump.rglob("*") if path.is_file() and path.parent.name != "rank0"]
    assert {path.name.split("_")[0] for path in left} == {"dynamo"}


@pytest.mark.parametrize("layout", ["ge", "ge-7.1.0"])
def test_a_ring_of_the_last_steps_leaves_the_folders_of_these_alone(layout, tmp_path):
    model = nn.Linear(2, 2)
    with torch.no_grad(), paritas.capture(tmp_path / "ring", layout=layout, last=2):
        for _ in range(5):
            model(torch.ones(1, 2))
    files = ge_tree_rules.tensor_files(tmp_path / "ring", LAYOUTS[layout])
    assert {named["token"] for named, _ in files} == {"3", "4"}
    dump = Dump.open(tmp_path / "ring")
    assert dump.problems == []
    assert {record.step for record in dump.records()} == {3, 4}
    assert all(dump.read(record) is not None for record in dump.records() if record.tensor)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_second_run_is_refused_and_replaces_the_first_when_asked_to(layout, tmp_path):
    def record(value, **given):
        with paritas.capture(tmp_path / "dump", layout=layout, **given):
            nn.Identity()(torch.full((2,), value))

    record(1.0)
    with pytest.raises(UsageError, match="not empty"):
        record(2.0)
    record(3.0, overwrite=True)
    dump = Dump.open(tmp_path / "dump")
    assert dump.problems == []
    values = {dump.read(one)[0].item() for one in dump.records() if one.tensor is not None}
    assert values == {3.0}
    files = ge_tree_rules.tensor_files(tmp_path / "dump", LAYOUTS[layout])
    assert all(ge_tree_rules.read(path)[1][0][0] == 3.0 for _, path in files)


def test_other_things_in_the_folder_of_an_old_tree_are_left_alone(tmp_path):
    (tmp_path / "dump").mkdir()
    (tmp_path / "dump" / "notes.txt").write_text("mine")
    with (
        pytest.raises(UsageError, match=r"contains notes\.txt"),
        paritas.capture(tmp_path / "dump", layout="ge-7.1.0", overwrite=True),
    ):
        nn.Identity()(torch.ones(2))


def test_statistics_have_no_place_in_the_tree(tmp_path):
    with pytest.raises(UsageError, match='layout="ge" cannot hold statistics'):
        paritas.record(tmp_path / "dump", layout="ge", data="stats")


def test_a_layout_that_there_is_not_is_refused_and_torchairs_own_configuration_has_one():
    with pytest.raises(UsageError, match=r"layout='bin': give one of msit, ge, ge-7\.1\.0"):
        torchair_dump.get_ge_dump_config(layout="bin")
    with pytest.raises(UsageError, match="always writes Ascend's tree"):
        torchair_dump.get_ge_dump_config(layout="ge", compiler_config=object())


def test_a_file_appears_under_its_name_when_it_is_whole(tmp_path, monkeypatch):
    from paritas.formats.foreign import ge_writing

    seen = []
    replace = ge_writing.Path.replace

    def watched(path, target):
        files = [one for one in (tmp_path / "dump").rglob("*.*.*.*.*") if one.is_file()]
        seen.extend(ge_tree_rules.read(one) for one in files if not one.name.endswith(".swp"))
        return replace(path, target)

    monkeypatch.setattr(ge_writing.Path, "replace", watched)
    with paritas.capture(tmp_path / "dump", layout="ge"):
        nn.Sequential(nn.Linear(2, 2), nn.GELU())(torch.ones(1, 2))
    assert seen


# --- the end of the program -----------------------------------------------------------------------

WHOLE = bool(os.environ.get("PARITAS_WHOLE_CORPUS"))
ENDING = """
import atexit
import sys
import paritas.torchair_dump as torchair

assert "torch._inductor.lowering" not in sys.modules  # a second of time, and only to compile
atexit.register(print, "a callback of the program")
torchair.get_npu_backend(compiler_config=torchair.get_ge_dump_config("dump"))
if sys.argv[1:]:
    raise LookupError("of the program")
"""


@pytest.mark.slow
@pytest.mark.parametrize(("arguments", "code"), [([], 2), *([(["fail"], 1)] if WHOLE else [])])
def test_a_failure_at_exit_is_not_exit_code_0(arguments, code, tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", ENDING, *arguments],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == code, done.stderr
    assert "paritas: part of the selection was not recorded; 0 values are in" in done.stderr
    assert done.stderr.count("Traceback") == len(arguments)
    assert "a callback of the program" in done.stdout


# --- the captured graph in the old tree -----------------------------------------------------------


def test_the_captured_graph_is_written_in_the_old_tree_too(dumps, tmp_path):
    new, old = dumps("fx"), dumps("fx", layout="msit-7.1.0")
    assert {path.name for path in old.iterdir()} == {"rank0", "data_dump"}
    folders = {path.parent.relative_to(old).as_posix() for path in old.rglob("*.npy")}
    times = {re.fullmatch(r"data_dump/([123])/gm_(\d+)_dump", name).groups() for name in folders}
    assert sorted(token for token, _ in times) == ["1", "2", "3"]
    assert len({time for _, time in times}) == 1

    def plain(dump):
        return sorted(re.sub(r"\.\d{20}\.npy", "", path.name) for path in dump.rglob("*.npy"))

    assert plain(old) == plain(new)
    found = {}
    for golden in (new, old, old / "data_dump"):
        code, _, comparison = compare(dumps("ge"), golden, tmp_path / "out")
        assert code == 0
        found[golden] = statuses(comparison)
    assert found[old] == found[new]
    # Without the index, the graph has no name.
    without_index = collections.Counter(found[old / "data_dump"].values())
    assert without_index == collections.Counter(found[new].values())


def test_the_old_tree_is_replaced_and_freed_and_has_no_ranks(dumps, tmp_path, monkeypatch):
    old = shutil.copytree(dumps("fx", layout="msit-7.1.0"), tmp_path / "dump")
    command = ["convert", str(old), "--to", "stats", "--delete"]
    done = CliRunner().invoke(main, command)
    assert done.exit_code == 0, done.output
    assert not list(old.rglob("*.npy"))
    with pytest.raises(UsageError, match=r"exists already"):
        paritas.record(old, source="fx", layout="msit-7.1.0")
    backend = paritas.record(old, source="fx", layout="msit-7.1.0", overwrite=True)
    backend.session.close(raising=False)
    assert not (old / "data_dump").exists()
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(UsageError, match="has no place for 2 ranks"):
        paritas.record(tmp_path / "other", source="fx", layout="msit-7.1.0")

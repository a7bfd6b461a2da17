"""The public way to read dumps: `paritas.dumps`."""

from __future__ import annotations

import importlib

import numpy as np
import pytest
import torch

import paritas.dumps
from integration.dump_making import values, write_run
from paritas.core.errors import ParitasError, UsageError
from paritas.formats.dumps.reading import Dump
from unit.formats.foreign.ge_files import F32, ge_bytes, tensor


def test_each_public_name_is_what_its_home_says():
    for name in paritas.dumps.__all__:
        home = importlib.import_module(paritas.dumps._HOMES[name])
        assert getattr(paritas.dumps, name) is getattr(home, name)
    assert set(paritas.dumps._HOMES) == set(paritas.dumps.__all__) == set(dir(paritas.dumps))
    with pytest.raises(AttributeError, match="has no attribute 'close'"):
        _ = paritas.dumps.close


@pytest.fixture
def dump(tmp_path):
    return paritas.dumps.open(write_run(tmp_path / "dump"))


def test_names_steps_and_ranks_are_there_without_a_value_being_read(dump, monkeypatch):
    monkeypatch.setattr(Dump, "_values", None)
    assert (dump.kind, dump.ranks, dump.steps, len(dump), dump.problems) == (
        "paritas", (0,), (0, 1), 18, ()
    )  # fmt: skip
    assert dump.names[:3] == (
        "forward/layers.0/aten.log.default#0/input.0",
        "forward/layers.0/aten.log.default#0/input.1",
        "forward/layers.0/aten.log.default#0/output.0",
    )
    first, second, third = list(dump)[:3]
    assert repr(first) == f"<{dump.names[0]}, step 0, rank 0: float32[4,8]>"
    assert (second.value, second.shape, second.dtype, second.has_values) == ("0.5", None, "", False)
    assert (third.side, third.position, third.op) == ("output", "0", "aten.log.default")
    assert (third.shape, third.dtype, third.has_values) == ((4, 8), "float32", True)


def test_values_and_statistics_come_when_they_are_asked_for(dump):
    value = dump.get("layers.1/aten.log.default", step=0)
    expected = values(4, 8).cos().cos() + 1
    assert value.tensor().equal(expected)
    assert value.statistics().maximum == pytest.approx(expected.max().item())
    assert [one.step for one in dump.find("layers.2/*", side="output")] == [0, 1]
    assert [one.id for one in dump.find("*input.0", step=1, phase="forward", rank=0)] == [
        f"forward/layers.{layer}/aten.log.default#0/input.0" for layer in range(3)
    ]


def test_a_name_that_is_not_there_and_one_that_is_several_are_told(dump, tmp_path):
    with pytest.raises(UsageError) as missing:
        dump.get("layers.3/aten.log.default", step=0)
    told = "has no value 'layers.3/aten.log.default' of that step and rank; it has "
    assert str(missing.value).startswith(f"{tmp_path / 'dump'} {told}")
    with pytest.raises(UsageError) as several:
        dump.get("layers.1/aten.log.default")
    assert "6 values of" in str(several.value)
    assert str(several.value).endswith("give the whole id, step= and rank=")


def test_statistics_alone_say_that_there_are_no_values(tmp_path):
    folder = tmp_path / "worldsize1_global_rank0" / "graph_1" / "0"
    folder.mkdir(parents=True)
    name = "mm-aten.mm.default.OUTPUT.0.20240125031118787351_min_max.npy"
    np.save(folder / name, np.float16([-1, 2]))
    (value,) = paritas.dumps.open(tmp_path)
    assert (value.dtype, value.shape, value.has_values) == ("float16", None, False)
    assert value.statistics().minimum == -1
    assert repr(value) == "<forward/graph_1/mm#0/output.0, step 0, rank 0: float16[?]>"
    with pytest.raises(UsageError, match="only statistics were recorded"):
        value.tensor()


def test_what_is_no_dump_is_refused(tmp_path):
    with pytest.raises(UsageError, match="is not a known dump"):
        paritas.dumps.open(tmp_path)
    with pytest.raises(UsageError, match="kind='npz': give one of paritas, msprobe"):
        paritas.dumps.open(tmp_path, kind="npz")


def test_a_bin_file_is_written_and_read(tmp_path):
    path = tmp_path / "Add.Add_2.44.6.1706596912161941"
    taken, given = (torch.ones(2, 3), torch.arange(4)), (torch.zeros(()).bfloat16(),)
    paritas.dumps.write_bin(path, taken, given, op_name="Add_2")
    found = paritas.dumps.read_bin(path)
    assert found.op_name == "Add_2"
    assert all(one.equal(other) for one, other in zip(found.inputs, taken, strict=True))
    assert found.outputs[0].equal(given[0])
    assert found.outputs[0].dtype is torch.bfloat16
    # A tree of such files is a dump.
    assert len(paritas.dumps.open(tmp_path)) == 3


def test_a_bin_file_that_is_cut_off_missing_or_elsewhere_is_told(tmp_path):
    whole = ge_bytes(outputs=[tensor(np.float32([1, 2]), F32)])
    path = tmp_path / "Add.a.1.0.1706596912161941"
    path.write_bytes(whole[:-1])
    with pytest.raises(UsageError) as cut:
        paritas.dumps.read_bin(path)
    assert str(cut.value) == (
        f"{path.name} has {len(whole) - 1} bytes, but its header needs {len(whole)}"
    )
    with pytest.raises(UsageError, match="cannot be read: No such file"):
        paritas.dumps.read_bin(tmp_path / "nowhere")
    with pytest.raises(ParitasError, match=r"cannot write .*: No such file"):
        paritas.dumps.write_bin(tmp_path / "no" / "folder", [torch.ones(1)])

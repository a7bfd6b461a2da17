"""Files of Ascend's graph engine that we write, by the format's own rules and to our reader."""

from __future__ import annotations

import struct

import pytest
import torch

from paritas.core.errors import UsageError
from paritas.formats.foreign import ge_dump, ge_files, ge_tensors
from paritas.formats.foreign.ge_files import parse_name
from paritas.formats.foreign.ge_writing import GeTree, write_tensor_file
from unit.formats.foreign import ge_files as ge

DTYPES = [
    torch.float32, torch.float16, torch.int8, torch.uint8, torch.int16, torch.uint16, torch.int32,
    torch.int64, torch.uint32, torch.uint64, torch.bool, torch.float64, torch.complex64,
    torch.complex128, torch.bfloat16, torch.complex32, torch.float8_e5m2, torch.float8_e4m3fn,
    torch.float8_e8m0fnu,
]  # fmt: skip
# To move values by: torch warns of some dtypes, and has few operators for others.
CARRIERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}


def sample(dtype, shape=(2, 3)):
    """Every bit pattern may be in it, but a bool is 0 or 1."""
    count = dtype.itemsize
    for extent in shape:
        count *= extent
    raw = torch.arange(7, 7 + count, dtype=torch.uint8)
    return (raw % 2 if dtype is torch.bool else raw).view(dtype).reshape(shape)


def same_bits(one, other):
    assert (one.dtype, one.shape) == (other.dtype, other.shape)
    return one.reshape(-1).view(torch.uint8).equal(other.reshape(-1).view(torch.uint8))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_is_read_back_bit_for_bit(tmp_path, dtype):
    values = sample(dtype)
    path = tmp_path / "Add.Add_2.44.6.1706596912161941"
    write_tensor_file(path, [values], [values.mT], op_name="Add_2")
    found = ge_files.read_ge_header(path)
    assert (found.op_name, found.end) == ("Add_2", path.stat().st_size)
    taken, given = (ge_tensors.read_ge_values(path, one) for one in found.tensors)
    assert same_bits(taken, values)
    turned = values.view(CARRIERS[dtype.itemsize]).mT.contiguous()
    assert same_bits(given.view(turned.dtype), turned)


def test_the_bytes_are_those_of_the_published_format(tmp_path):
    array = torch.tensor([[1.0, 2.0]]).numpy()
    path = tmp_path / "file"
    write_tensor_file(path, [torch.from_numpy(array)], op_name="Add_2", moment=ge.TIME)
    body = ge.number_field(1, ge.F32) + ge.number_field(2, ge.ND) + ge.shape_field(3, (1, 2))
    body += ge.number_field(5, 8) + ge.shape_field(6, (1, 2))
    header = ge.bytes_field(1, b"2.0") + ge.number_field(2, ge.TIME) + ge.bytes_field(4, body)
    header += ge.bytes_field(6, b"Add_2")
    assert path.read_bytes() == struct.pack("<Q", len(header)) + header + array.tobytes()


def test_scalars_empty_tensors_repeated_values_and_four_bit_numbers(tmp_path):
    path = tmp_path / "file"
    pairs = torch.tensor([[0x21], [0x9F]], dtype=torch.uint8).view(torch.float4_e2m1fn_x2)
    few = torch.ones(1, 2)
    tensors = [torch.tensor(3.5), torch.empty(0, 4), few.expand(3, 2), pairs]
    write_tensor_file(path, [*tensors, few.to(torch.float8_e4m3fn).expand(3, 2)])
    found = ge_files.read_ge_header(path)
    scalar, empty, repeated, four, narrow = (
        ge_tensors.read_ge_values(path, one) for one in found.tensors
    )
    assert narrow.float().equal(torch.ones(3, 2))
    assert (scalar.shape, scalar.item()) == ((), 3.5)
    assert empty.shape == (0, 4)
    assert repeated.equal(torch.ones(3, 2))
    assert four.tolist() == [[0.5, 1.0], [-6.0, -0.5]]


def test_the_tree_has_the_levels_of_the_engine(tmp_path):
    tree = GeTree(tmp_path, rank=1, world_size=2)
    for step in (0, 1):
        for name in ("a/Add_2", "a/Mul.3"):
            values = torch.full((2,), float(step))
            tree.write(
                step=step, model="graph 1", op_type="aten.add", op_name=name, outputs=[values]
            )
    files = sorted(path for path in tmp_path.rglob("*") if path.is_file())
    run, device, model, number, step, name = files[0].relative_to(tmp_path / tree.top).parts
    assert (tree.top, device, model, number) == ("worldsize2_global_rank1", "1", "graph_1", "1")
    assert (len(run), step, parse_name(name).op_type) == (14, "0", "aten_add")
    dump = ge_dump.open_dump(tmp_path)
    assert not dump.problems
    found = [
        (one.rank, one.step, one.site.name, dump.read(one)[0].item()) for one in dump.records()
    ]
    assert found == [
        (1, 0, "a/Add_2", 0.0),
        (1, 0, "a/Mul.3", 0.0),
        (1, 1, "a/Add_2", 1.0),
        (1, 1, "a/Mul.3", 1.0),
    ]


def test_a_name_that_no_file_system_takes_is_a_number_that_the_mapping_explains(tmp_path):
    long = "layer" * 60
    file, _ = GeTree(tmp_path).write(
        step=0, model="m", op_type="Add", op_name=long, outputs=[torch.ones(1)]
    )
    assert (tmp_path / file).name.isdecimal()
    assert [one.site.name for one in ge_dump.open_dump(tmp_path).records()] == [long]


def test_what_the_format_lacks_is_refused_and_leaves_no_file(tmp_path):
    with pytest.raises(UsageError) as caught:
        write_tensor_file(tmp_path / "file", [], [torch.zeros(2, dtype=torch.float8_e4m3fnuz)])
    assert str(caught.value) == (
        "output 0: torch.float8_e4m3fnuz is not among the engine's dtypes: cast the tensor"
    )
    assert list(tmp_path.iterdir()) == []


def test_a_file_is_there_whole_or_not_at_all(tmp_path, monkeypatch):
    seen = []

    def look(tensor):
        seen.extend(path.suffix for path in tmp_path.iterdir())
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("paritas.formats.foreign.ge_writing.raw_bytes", look)
    with pytest.raises(OSError, match="No space left"):
        write_tensor_file(tmp_path / "Add.a.1.0.1706596912161941", [torch.ones(2)])
    assert seen == [".swp"]
    assert list(tmp_path.iterdir()) == []

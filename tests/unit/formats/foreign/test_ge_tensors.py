"""One tensor file of Ascend's graph engine: what its header says, and the values."""

from __future__ import annotations

import math
import struct
from pathlib import Path

import numpy as np
import pytest
import torch

from paritas.core.errors import UsageError
from paritas.formats.foreign import ge_files, ge_tensors
from unit.formats.foreign import ge_files as ge

FILES = Path(__file__).parents[3] / "data" / "ge"


def read(tmp_path, data):
    """What a file holds, by key."""
    path = tmp_path / "file"
    path.write_bytes(data)
    found = ge_files.read_ge_header(path)
    return {one.key: ge_tensors.read_ge_values(path, one) for one in found.tensors}


def read_one(tmp_path, **facts):
    return read(tmp_path, ge.ge_bytes(outputs=[facts]))["output.0"]


def facts_of(tmp_path, **facts):
    path = tmp_path / "file"
    path.write_bytes(ge.ge_bytes(outputs=[facts]))
    return ge_tensors.facts_of(ge_files.read_ge_header(path).tensors[0])


def test_files_that_googles_protobuf_encoded_are_read():
    path = FILES / "Add.Add_2.44.6.1706596912161941"
    found = ge_files.read_ge_header(path)
    values = {one.key: ge_tensors.read_ge_values(path, one) for one in found.tensors}
    assert found.op_name == "Add_2"
    assert found.end == path.stat().st_size
    assert values["output.0"].dtype is torch.float16
    assert torch.equal(values["input.0"] + values["input.1"], values["output.0"])
    path = FILES / "Cast.Cast_9.19.6.1706596911887829"
    taken, given = ge_files.read_ge_header(path).tensors
    wide = ge_tensors.read_ge_values(path, taken)
    assert torch.equal(wide.bfloat16(), ge_tensors.read_ge_values(path, given))


def test_payloads_lie_inputs_first_whatever_the_order_in_the_header(tmp_path):
    taken = [ge.tensor(np.float32([1, 2]), ge.F32), ge.tensor(np.int64([[3]]), ge.I64)]
    data = ge.ge_bytes(
        taken, [ge.tensor(np.float16([4, 5, 6]), ge.F16)], buffers=[b"ab"], space=[b"cde"]
    )
    found = read(tmp_path, data)
    assert found["input.0"].tolist() == [1, 2]
    assert found["input.1"].tolist() == [[3]]
    assert found["output.0"].tolist() == [4, 5, 6]
    assert bytes(found["buffer.0"].tolist()) == b"ab"
    assert bytes(found["space.0"].tolist()) == b"cde"


def test_field_7_is_scratch_space_in_the_old_schema_and_an_attribute_in_the_new(tmp_path):
    taken = [ge.tensor(np.float32([1]), ge.F32)]
    old = read(tmp_path, ge.ge_bytes(taken, old_space=[b"xyz"]))
    assert bytes(old["space.0"].tolist()) == b"xyz"
    new = read(tmp_path, ge.ge_bytes(taken, attrs=[("thread", '{"a": 1}')], space=[b"xy"]))
    assert list(new) == ["input.0", "space.0"]
    assert bytes(new["space.0"].tolist()) == b"xy"


@pytest.mark.parametrize(
    ("code", "array", "dtype"),
    [
        (1, np.float32([1.5, -2]), torch.float32),
        (3, np.int8([-1, 2]), torch.int8),
        (4, np.uint8([255, 2]), torch.uint8),
        (5, np.int16([-300, 2]), torch.int16),
        (6, np.uint16([65535, 2]), torch.uint16),
        (7, np.int32([-(2**31), 2]), torch.int32),
        (8, np.int64([2**62, 2]), torch.int64),
        (9, np.uint32([2**32 - 1, 2]), torch.uint32),
        (10, np.uint64([2**64 - 1, 2]), torch.uint64),
        (11, np.bool_([True, False]), torch.bool),
        (12, np.float64([1e300, 2]), torch.float64),
        (16, np.complex64([1 + 2j, 3]), torch.complex64),
        (17, np.complex128([1 + 2j, 3]), torch.complex128),
        (18, np.int8([-1, 2]), torch.int8),
        (22, np.uint16([65535, 2]), torch.uint16),
        (23, np.int64([-5, 2]), torch.int64),
    ],
)
def test_dtypes_that_numpy_has_come_back_as_they_were(tmp_path, code, array, dtype):
    values = read_one(tmp_path, **ge.tensor(array, code))
    assert values.dtype is dtype
    assert values.tolist() == array.tolist()
    assert facts_of(tmp_path, **ge.tensor(array, code)).dtype == str(dtype).removeprefix("torch.")


@pytest.mark.parametrize(
    ("code", "dtype"),
    [
        (27, torch.bfloat16),
        (32, torch.complex32),
        (34, torch.float8_e5m2),
        (35, torch.float8_e4m3fn),
        (36, torch.float8_e8m0fnu),
    ],
)
def test_dtypes_that_only_torch_has_keep_every_bit(tmp_path, code, dtype):
    raw = bytes(range(16))
    count = 16 // dtype.itemsize
    values = read_one(tmp_path, payload=raw, dtype=code, shape=(count,), original=(count,))
    assert values.dtype is dtype
    assert bytes(values.view(torch.uint8).tolist()) == raw


def test_integers_of_less_than_a_byte_are_unpacked_lowest_bits_first(tmp_path):
    int4 = read_one(tmp_path, payload=b"\x21\xf8", dtype=28, shape=(3,), original=(3,))
    assert (int4.dtype, int4.tolist()) == (torch.int8, [1, 2, -8])
    int2 = read_one(tmp_path, payload=b"\xe4", dtype=30, shape=(4,))
    assert int2.tolist() == [0, 1, -2, -1]
    uint2 = read_one(tmp_path, payload=b"\xe4", dtype=31, shape=(2, 2), original=(2, 2))
    assert uint2.tolist() == [[0, 1], [2, 3]]


def test_single_bits_are_unpacked_highest_first(tmp_path):
    bits = [1, 0, 1, 1, 0, 0, 0, 0, 1]
    packed = np.packbits(np.uint8(bits)).tobytes()
    values = read_one(tmp_path, payload=packed, dtype=ge.UINT1, shape=(9,), original=(9,))
    assert (values.dtype, values.tolist()) == (torch.uint8, bits)


def test_narrow_floats_without_a_dtype_in_torch_are_widened(tmp_path):
    four = read_one(tmp_path, payload=b"\x10\xfe", dtype=39, shape=(4,), original=(4,))
    assert (four.dtype, four.tolist()) == (torch.float32, [0.0, 0.5, -4.0, -6.0])
    codes = {0: 0.0, 1: 2.0**-22, 7: 2.0**-16, 8: 1.0, 0x6E: 2.0**15, 0x6F: math.inf}
    codes |= {0x88: -1.0, 0xEF: -math.inf, 0x0C: 1.5, 0x10: 2.0, 0x18: 0.5, 0x20: 4.0, 0x30: 0.25}
    values = read_one(tmp_path, payload=bytes(codes), dtype=33, shape=(len(codes),))
    assert values.tolist() == list(codes.values())
    assert read_one(tmp_path, payload=b"\x80", dtype=33, shape=(1,)).isnan().all()


def test_hifloat8_has_a_value_of_its_own_for_each_byte():
    values = ge_tensors._hifloat8_values()
    assert values.isnan().sum() == 1
    assert values[~values.isnan()].unique().numel() == 255
    # Magnitudes between neighbours never differ by more than the narrowest mantissa allows.
    finite = values[values.isfinite() & (values > 0)].sort().values
    assert (finite[1:] / finite[:-1]).max() == 2.0


@pytest.mark.parametrize(("code", "name"), [(13, "DT_STRING"), (26, "DT_VARIANT"), (37, "FLOAT6")])
def test_what_is_no_tensor_is_refused_with_its_name(tmp_path, code, name):
    with pytest.raises(UsageError, match=name):
        read_one(tmp_path, payload=b"abcd", dtype=code, shape=(4,))


def test_an_unknown_dtype_is_refused_with_its_number(tmp_path):
    with pytest.raises(UsageError, match="unknown dtype number 99"):
        read_one(tmp_path, payload=b"abcd", dtype=99, shape=(4,))


def test_padding_behind_the_values_is_not_read(tmp_path):
    padded = np.float32([1, 2, 3]).tobytes() + bytes(20)
    values = read_one(tmp_path, payload=padded, dtype=ge.F32, shape=(3,), original=(3,))
    assert values.tolist() == [1, 2, 3]


def test_without_a_shape_the_values_are_flat(tmp_path):
    payload = np.float32([1, 2, 3]).tobytes()
    assert read_one(tmp_path, payload=payload, dtype=ge.F32).tolist() == [1, 2, 3]
    single = read_one(tmp_path, payload=payload[:4], dtype=ge.F32)
    assert (single.shape, single.item()) == ((), 1.0)
    # A dimension that is not known makes the shape unknown.
    values = read_one(tmp_path, payload=payload, dtype=ge.F32, shape=(-1, 3), original=(-1, 3))
    assert values.tolist() == [1, 2, 3]


def test_bytes_without_a_dtype_are_bytes(tmp_path):
    values = read_one(tmp_path, payload=b"\x01\xff\x03\x04", dtype=0, shape=(1,), original=(1,))
    assert (values.dtype, values.tolist()) == (torch.int8, [1, -1, 3, 4])


def test_an_empty_tensor_has_its_shape(tmp_path):
    values = read_one(tmp_path, payload=b"", dtype=ge.F32, shape=(0, 7), original=(0, 7))
    assert values.shape == (0, 7)


def test_dimensions_that_are_not_packed_are_read_too(tmp_path):
    one = ge.tensor(np.float32([[1, 2]]), ge.F32, packed=False)
    assert read_one(tmp_path, **one).tolist() == [[1, 2]]


def test_the_binary_header_of_small_devices_is_read(tmp_path):
    first, second = np.float32([[1, 2]]), np.float16([3, 4, 5])
    third = np.int64([6])
    data = ge.nano_bytes(
        [(first.tobytes(), 0, (1, 2), (1, 2)), (second.tobytes(), 1, (3,), (3,))],
        [(third.tobytes(), 9, (1,), (1,))],
    )
    found = read(tmp_path, data)
    assert found["input.0"].tolist() == [[1, 2]]
    assert found["input.1"].tolist() == [3, 4, 5]
    assert found["output.0"].dtype is torch.int64
    assert found["output.0"].tolist() == [6]


def test_a_shape_with_more_elements_than_bytes_is_refused(tmp_path):
    one = ge.tensor(np.float32([1, 2]), ge.F32, shape=(2**40, 2**20))
    with pytest.raises(UsageError, match="but its 8 bytes hold only 2"):
        read_one(tmp_path, **one)
    one = ge.tensor(np.float32([]), ge.F32, shape=(0, 2**40, 2**40))
    with pytest.raises(UsageError, match="its 0 bytes hold only 0"):
        read_one(tmp_path, **one)


def test_a_header_longer_than_the_file_is_refused_before_it_is_read(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(struct.pack("<Q", 2**40) + b"abc")
    with pytest.raises(UsageError, match="claims a header of 1099511627776 bytes, but the"):
        ge_files.read_ge_header(path)


@pytest.mark.parametrize(
    ("header", "why"),
    [
        (b"\x22\xff\x01", "field 4 ends at byte 258 of 3"),
        (b"\x22" + b"\xff" * 11, "has more than 10 bytes"),
        (b"\x23", "field 4 has wire type 3"),
        (b"\x20\x05", "the number 5 where a message is expected"),
        (b"\x22\x00" * 5000, "it lists more than 4096 tensors"),
        (ge.bytes_field(4, ge.shape_field(3, [1] * 33)), "more than 32 dimensions"),
        (ge.bytes_field(4, ge.number_field(5, 2**63)), "its tensors would end at byte"),
        (struct.pack("<IIIII", 0x5A5A5A5A, 1, 9, 4, 0), "unexpected list with tag 9"),
        (struct.pack("<IIIII", 0x5A5A5A5A, 1, 4, 4, 2**31), "it lists 2147483648 tensors"),
    ],
)
def test_a_damaged_header_is_refused_with_the_reason(tmp_path, header, why):
    path = tmp_path / "file"
    path.write_bytes(struct.pack("<Q", len(header)) + header)
    with pytest.raises(UsageError, match=why):
        ge_files.read_ge_header(path)


def test_a_file_that_ends_too_soon_is_refused_when_it_is_read(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(ge.ge_bytes([ge.tensor(np.float32([1, 2]), ge.F32)])[:-3])
    (one,) = ge_files.read_ge_header(path).tensors
    with pytest.raises(UsageError, match="it is truncated"):
        ge_tensors.read_ge_values(path, one)

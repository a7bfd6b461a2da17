from __future__ import annotations

import math
import tracemalloc

import numpy as np
import pytest
import torch

from paritas.core.errors import ParitasError
from paritas.formats.files.records import TensorFacts
from paritas.formats.files.tensor_bytes import as_stored
from paritas.formats.foreign.npy_files import (
    array_of,
    array_of_value,
    read_array,
    tensor_of,
    write_array,
)

QUANTISED = {torch.qint8, torch.quint8, torch.qint32, torch.quint4x2, torch.quint2x4}
DTYPES = sorted(
    {value for value in vars(torch).values() if isinstance(value, torch.dtype)} - QUANTISED, key=str
)
quiet = pytest.mark.filterwarnings("ignore:ComplexHalf support")


def facts_of(tensor: torch.Tensor) -> TensorFacts:
    return TensorFacts(
        dtype=str(tensor.dtype).removeprefix("torch."),
        shape=tuple(tensor.shape),
        stride=tensor.stride(),
    )


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def every_pattern(dtype: torch.dtype) -> torch.Tensor:
    """All bytes there are in every place of the value, NaNs of any payload among them."""
    count = 4096 * dtype.itemsize
    seeded = torch.Generator().manual_seed(4)
    raw = torch.randint(0, 256, (count,), dtype=torch.uint8, generator=seeded)
    if dtype.itemsize == 1:
        raw = torch.arange(256, dtype=torch.uint8).repeat(16)
    if dtype is torch.bool:
        raw = raw & 1
    if dtype.itemsize == 2:
        raw = torch.arange(65536).to(torch.uint16).view(torch.uint8)
    return raw.view(dtype)


@quiet
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(-1,), (2, -1), (2, 2, -1)], ids=str)
def test_every_bit_of_every_dtype_comes_back(tmp_path, dtype, shape):
    tensor = every_pattern(dtype).reshape(shape)
    write_array(tmp_path / "a.npy", array_of(as_stored(tensor), tuple(tensor.shape)))
    back = tensor_of(read_array(tmp_path / "a.npy"), facts_of(tensor))
    assert back.dtype is dtype
    assert back.shape == tensor.shape
    assert bits(back) == bits(tensor)
    assert np.load(tmp_path / "a.npy", allow_pickle=False).shape[:-1] == tensor.shape[:-1]


@quiet
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (1,)], ids=str)
def test_scalars_and_empty_tensors_come_back(tmp_path, dtype, shape):
    tensor = torch.zeros(math.prod(shape) * dtype.itemsize, dtype=torch.uint8)
    tensor = tensor.view(dtype).reshape(shape)
    write_array(tmp_path / "a.npy", array_of(as_stored(tensor), shape))
    back = tensor_of(read_array(tmp_path / "a.npy"), facts_of(tensor))
    assert (back.dtype, back.shape, bits(back)) == (dtype, tensor.shape, bits(tensor))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_what_numpy_lacks_has_the_same_values_in_float32(dtype):
    tensor = every_pattern(dtype)
    array = array_of(tensor, tuple(tensor.shape))
    assert array.dtype == np.float32
    assert np.array_equal(array, tensor.float().numpy(), equal_nan=True)


def test_two_numbers_of_four_bits_are_written_out():
    pairs = torch.tensor([0x21, 0xF8], dtype=torch.uint8).view(torch.float4_e2m1fn_x2)
    assert array_of(pairs, (2,)).tolist() == [0.5, 1.0, -0.0, -6.0]


def test_what_a_stride_of_0_repeats_is_written_out():
    tensor = torch.arange(3.0)[:, None].expand(3, 4)
    stored = as_stored(tensor)
    assert stored.shape == (3, 1)
    assert np.array_equal(array_of(stored, (3, 4)), tensor.numpy())


def test_a_nan_that_another_program_wrote_becomes_a_nan():
    facts = TensorFacts(dtype="float8_e5m2", shape=(2,), stride=(1,))
    assert tensor_of(np.array([np.nan, 1.0], dtype=np.float32), facts).float().isnan().tolist() == [
        True,
        False,
    ]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("2", np.array(2)),
        ("-0.5", np.array(-0.5)),
        ("True", np.array(True)),
        ("inf", np.array(np.inf)),
        ("(1+2j)", np.array(1 + 2j)),
        ("[1, 2]", np.array([1, 2])),
        ("'gelu'", np.array("gelu")),
        ("None", np.array("None")),
        ("torch.float32", np.array("torch.float32")),
        ("[[1], [2, 3]]", np.array("[[1], [2, 3]]")),
        ("123456789012345678901234567890", np.array("123456789012345678901234567890")),
        ("{'a': 1}", np.array("{'a': 1}")),
        ("[1, None]", np.array("[1, None]")),
        ("", np.array("")),
    ],
)
def test_what_is_no_tensor_is_a_number_or_text(tmp_path, text, expected):
    write_array(tmp_path / "a.npy", array_of_value(text))
    found = np.load(tmp_path / "a.npy", allow_pickle=False)
    assert found.dtype == expected.dtype
    assert found.tolist() == expected.tolist()


def test_a_damaged_file_is_refused_before_memory_is_taken(tmp_path):
    path = tmp_path / "a.npy"
    write_array(path, np.zeros(8, dtype=np.float32))
    whole = path.read_bytes()
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        with pytest.raises(ParitasError, match=r"a\.npy (cannot be read|is damaged)"):
            read_array(path)
    path.write_bytes(whole.replace(b"(8,), }      ", b"(1<<40,), } ".ljust(13)))
    with pytest.raises(ParitasError):
        read_array(path)
    path.write_bytes(whole.replace(b"(8,), }               ", b"(1099511627776,), }   "))
    with pytest.raises(ParitasError, match="1099511627776"):
        read_array(path)


def test_pickled_objects_are_refused(tmp_path):
    path = tmp_path / "a.npy"
    np.save(path, np.array([{"a": 1}], dtype=object), allow_pickle=True)
    with pytest.raises(ParitasError, match="damaged"):
        read_array(path)


def test_a_file_of_another_shape_or_dtype_than_the_index_says_is_refused():
    facts = TensorFacts(dtype="float32", shape=(2, 2), stride=(2, 1))
    for array in (np.zeros((4,), np.float32), np.zeros((2, 2), np.float64)):
        with pytest.raises(ParitasError, match=r"float32 of \(2, 2\) is stored as"):
            tensor_of(array, facts)


def test_half_a_file_is_never_seen(tmp_path, monkeypatch):
    def fail(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(np.lib.format, "write_array", fail)
    with pytest.raises(OSError, match="No space left"):
        write_array(tmp_path / "a.npy", np.zeros(3))
    assert list(tmp_path.iterdir()) == []


def test_a_header_that_claims_gigabytes_is_refused_before_they_are_taken(tmp_path):
    path = tmp_path / "hostile.npy"
    path.write_bytes(b"\x93NUMPY\x02\x00" + (3 << 30).to_bytes(4, "little") + b"{}")
    tracemalloc.start()
    try:
        with pytest.raises(ParitasError, match="its header claims 3221225472 bytes"):
            read_array(path)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()

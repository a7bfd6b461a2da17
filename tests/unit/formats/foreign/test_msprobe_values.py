import math

import numpy as np
import pytest
import torch

from paritas.formats.foreign.msprobe import open_dump
from unit.formats.foreign.msprobe_dumps import scalar, tensor, write_process


def only(folder, leaf, **more):
    """The record of a dump with one leaf."""
    data = {"Torch.f.0.forward": {"input_args": [], "input_kwargs": {}, "output": [leaf]}}
    write_process(folder, data, **more)
    dump = open_dump(folder)
    (record,) = dump.records()
    return dump, record


@pytest.mark.parametrize(
    ("figures", "known"),
    [
        ({"Max": math.nan, "Min": math.nan, "Mean": math.nan, "Norm": math.nan}, {"nans": 1}),
        ({"Max": "NaN", "Min": "nan"}, {"nans": 1}),
        (
            {"Max": math.inf, "Min": -1.5, "Mean": math.inf, "Norm": math.inf},
            {"minimum": -1.5, "positive_infinities": 1},
        ),
        ({"Max": "Infinity", "Min": "-inf"}, {"positive_infinities": 1, "negative_infinities": 1}),
        ({"Max": -math.inf, "Min": -math.inf}, {"negative_infinities": 6}),
        (
            {"Max": 6e4, "Min": 5e4, "Mean": 5.5e4, "Norm": math.inf},
            {"minimum": 5e4, "maximum": 6e4, "mean": 5.5e4},
        ),
        ({"Max": 0.0, "Min": 0.0, "Mean": 0.0, "Norm": 0.0}, {"zeros": 6}),
    ],
)
def test_figures_say_of_values_that_are_not_finite_what_can_be_known(tmp_path, figures, known):
    _, record = only(tmp_path / "d", tensor(torch.zeros(2, 3)) | figures)
    found = {name: getattr(record.statistics, name) for name in known}
    assert found == known
    infinite = any(name in known for name in ("nans", "positive_infinities", "negative_infinities"))
    assert record.statistics.is_finite is not infinite


@pytest.mark.parametrize(
    ("leaf", "figures"),
    [
        # A tensor without dimensions has its value written as its norm.
        (tensor(torch.tensor(-3.0), Norm=-3.0), (1, -3.0, -3.0, -3.0, 3.0)),
        (tensor(torch.tensor([True, False])), (2, 0.0, 1.0, None, None)),
        (tensor(torch.tensor([4, -9])), (2, -9.0, 4.0, None, None)),
        (tensor(torch.empty(0, 8)), (0, None, None, None, None)),
    ],
)
def test_figures_of_every_kind_of_tensor_are_taken_over(tmp_path, leaf, figures):
    _, record = only(tmp_path / "d", leaf)
    found = record.statistics
    assert (found.count, found.minimum, found.maximum, found.mean, found.l2) == figures


def test_a_checksum_is_kept_under_its_own_name_where_there_are_no_figures(tmp_path):
    bare = {"type": "torch.Tensor", "dtype": "torch.float32", "shape": [2], "requires_grad": True}
    _, crc = only(tmp_path / "crc", bare | {"md5": "b3d93473"})
    _, xor = only(tmp_path / "xor", bare | {"md5": "0x039f503980256602"})
    assert (crc.digest, xor.digest) == ("crc32:b3d93473", "xor:039f503980256602")
    assert crc.statistics is None
    assert crc.tensor.requires_grad


@pytest.mark.parametrize(
    ("leaf", "text"),
    [
        (scalar("int", 2), "2"),
        (scalar("bool", True), "True"),
        (scalar("float", math.inf), "inf"),
        (scalar("str", "mean"), "'mean'"),
        (scalar("slice", [1, None, None]), "slice(1, None, None)"),
        (scalar("ellipsis", "..."), "Ellipsis"),
        (scalar("torch.dtype", "torch.float16"), "torch.float16"),
        (scalar("torch.device", "cuda:1"), repr(torch.device("cuda:1"))),
        (scalar("torch.device", "cpu:None"), repr(torch.device("cpu"))),
        ({"type": "torch.memory_format", "format": "channels_last"}, "torch.channels_last"),
        (None, "None"),
        (
            {"type": "numpy.ndarray", "dtype": "<U4", "shape": [3]},
            "numpy.ndarray of <U4, shape [3]",
        ),
        (scalar("str", "\ud800"), "'\\ud800'"),
        (scalar("str", "a" * 5000), "'" + "a" * 996 + "..."),
    ],
)
def test_a_plain_value_is_written_as_our_own_recordings_write_it(tmp_path, leaf, text):
    _, record = only(tmp_path / "d", leaf)
    assert record.value == text
    assert record.tensor is None


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.complex64, torch.bool]
)
def test_tensors_of_any_dtype_are_read_bit_for_bit(tmp_path, dtype):
    values = torch.tensor([[1.0, -2.0], [0.0, 0.5]]).to(dtype)
    leaf = {"type": "torch.Tensor", "dtype": str(dtype), "shape": [2, 2], "data_name": "v.pt"}
    dump, record = only(tmp_path / "d", leaf, files={"v.pt": values})
    read = dump.read(record)
    assert read.dtype is dtype
    assert torch.equal(read.view(torch.uint8), values.view(torch.uint8))


def test_arrays_of_mindspore_are_read(tmp_path):
    folder = tmp_path / "step0/rank0"
    leaf = {"type": "mindspore.Tensor", "shape": [3], "Max": 3.0, "Min": 1.0}
    one = leaf | {"dtype": "Float32", "data_name": "one.npy"}
    two = leaf | {"dtype": "BFloat16", "data_name": "two.npy"}
    write_process(folder, {"Cell.net.fc.Dense.forward.0": {"output": [one, two]}})
    (folder / "dump_tensor_data").mkdir()
    for name in ("one", "two"):
        np.save(folder / f"dump_tensor_data/{name}.npy", np.array([1, 2, 3], dtype=np.float32))
    dump = open_dump(tmp_path)
    first, second = dump.records()
    assert first.id == "forward/net.fc#0/output.0"
    assert torch.equal(dump.read(first), torch.tensor([1.0, 2.0, 3.0]))
    assert torch.equal(dump.read(second), torch.tensor([1, 2, 3], dtype=torch.bfloat16))

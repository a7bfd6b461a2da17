"""Device layouts, undone: what an independent encoder put into one comes back."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paritas.core.errors import UsageError
from paritas.formats.foreign import ge_files, ge_tensors
from unit.formats.foreign import ge_files as ge

SIZES = st.integers(1, 5)
WIDE = st.integers(1, 37)
FILL = 9999


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("files")


def undo(folder, device, original, **facts):
    """What is read of a tensor that lies in the file like this."""
    one = ge.tensor(device, ge.I32, **facts) | {"original": tuple(original)}
    path = folder / "file"
    path.write_bytes(ge.ge_bytes(outputs=[one]))
    (tensor,) = ge_files.read_ge_header(path).tensors
    values = ge_tensors.read_ge_values(path, tensor)
    assert ge_tensors.facts_of(tensor).shape == tuple(values.shape)
    return values.numpy()


def counted(*shape):
    return np.arange(math.prod(shape), dtype=np.int32).reshape(shape)


@settings(max_examples=40)
@given(n=SIZES, c=WIDE, h=SIZES, w=SIZES, block=st.sampled_from([8, 16, 32]))
def test_nc1hwc0_comes_back(folder, n, c, h, w, block):
    logical = counted(n, c, h, w)
    axes = ("N", "C1", "H", "W", "C0")
    device = ge.to_blocks(logical, "NCHW", axes, {"C": block}, FILL)
    assert np.array_equal(undo(folder, device, logical.shape, format=3), logical)


@settings(max_examples=40)
@given(n=SIZES, c=WIDE, d=SIZES, h=SIZES, w=SIZES)
def test_ndc1hwc0_comes_back(folder, n, c, d, h, w):
    logical = counted(n, c, d, h, w)
    axes = ("N", "D", "C1", "H", "W", "C0")
    device = ge.to_blocks(logical, "NCDHW", axes, {"C": 16}, FILL)
    assert np.array_equal(undo(folder, device, logical.shape, format=32), logical)


@settings(max_examples=60)
@given(many=st.lists(SIZES, max_size=2), height=WIDE, width=WIDE, columns=st.sampled_from([8, 32]))
def test_fractal_nz_comes_back(folder, many, height, width, columns):
    logical = counted(*many, height, width)
    device = ge.to_tiles(logical, 16, columns, FILL)
    assert np.array_equal(undo(folder, device, logical.shape, format=29), logical)


@settings(max_examples=40)
@given(n=WIDE, c=WIDE, h=SIZES, w=SIZES)
def test_fractal_z_comes_back(folder, n, c, h, w):
    logical = counted(n, c, h, w)
    axes = ("C1", "H", "W", "N1", "N0", "C0")
    device = ge.to_blocks(logical, "NCHW", axes, {"C": 16, "N": 16}, FILL)
    device = device.reshape(-1, *device.shape[3:])
    assert np.array_equal(undo(folder, device, logical.shape, format=4), logical)


@settings(max_examples=30)
@given(n=WIDE, c=WIDE, d=SIZES, h=SIZES, w=SIZES)
def test_fractal_z_3d_comes_back(folder, n, c, d, h, w):
    logical = counted(n, c, d, h, w)
    axes = ("D", "C1", "H", "W", "N1", "N0", "C0")
    device = ge.to_blocks(logical, "NCDHW", axes, {"C": 16, "N": 16}, FILL)
    device = device.reshape(-1, *device.shape[4:])
    assert np.array_equal(undo(folder, device, logical.shape, format=33), logical)


@pytest.mark.parametrize(("code", "axes"), [(0, "NCHW"), (1, "NHWC"), (16, "HWCN")])
def test_plain_layouts_of_four_dimensions_become_nchw(folder, code, axes):
    logical = counted(2, 3, 4, 5)
    device = ge.to_blocks(logical, "NCHW", tuple(axes), {}, FILL)
    assert np.array_equal(undo(folder, device, logical.shape, format=code), logical)


@pytest.mark.parametrize(("code", "axes"), [(30, "NCDHW"), (27, "NDHWC")])
def test_plain_layouts_of_five_dimensions_become_ncdhw(folder, code, axes):
    logical = counted(2, 3, 4, 5, 6)
    device = ge.to_blocks(logical, "NCDHW", tuple(axes), {}, FILL)
    assert np.array_equal(undo(folder, device, logical.shape, format=code), logical)


def test_a_program_that_has_its_channels_last_gets_them_last(folder):
    logical = counted(2, 5, 6, 3)
    axes = ("N", "C1", "H", "W", "C0")
    device = ge.to_blocks(logical, "NHWC", axes, {"C": 16}, FILL)
    assert np.array_equal(undo(folder, device, logical.shape, format=3), logical)
    assert np.array_equal(undo(folder, logical, logical.shape, format=1), logical)


def test_where_the_shapes_fit_two_layouts_the_program_s_own_word_decides(folder):
    logical = counted(2, 3, 3, 3)
    device = ge.to_blocks(logical, "NHWC", ("N", "C1", "H", "W", "C0"), {"C": 16}, FILL)
    read = undo(folder, device, logical.shape, format=3, original_format=1)
    assert np.array_equal(read, logical)
    # Without it, torch's own.
    read = undo(folder, device, logical.shape, format=3)
    assert np.array_equal(read, logical.transpose(0, 3, 1, 2))


def test_dimensions_of_extent_one_may_be_missing_in_the_program(folder):
    logical = counted(4, 20)
    axes = ("N", "C1", "H", "W", "C0")
    device = ge.to_blocks(logical.reshape(4, 20, 1, 1), "NCHW", axes, {"C": 16}, FILL)
    assert np.array_equal(undo(folder, device, (4, 20), format=3), logical)


def test_a_vector_in_tiles_is_one_row(folder):
    logical = counted(20)
    device = ge.to_tiles(logical.reshape(1, 20), 16, 16, FILL)
    assert np.array_equal(undo(folder, device, (20,), format=29), logical)


def test_a_default_layout_on_another_rank_means_nothing(folder):
    logical = counted(6, 4)
    assert np.array_equal(undo(folder, logical, (6, 4), format=0), logical)
    assert np.array_equal(undo(folder, logical, (2, 3, 4), format=ge.ND), logical.reshape(2, 3, 4))


def test_padding_at_the_ends_of_a_plain_layout_is_dropped(folder):
    device = counted(4, 8)
    assert np.array_equal(undo(folder, device, (3, 5), format=ge.ND), device[:3, :5])


@pytest.mark.parametrize(
    ("code", "device", "original"),
    [
        (3, (1, 1, 2, 2, 16), (1, 17, 2, 2)),  # two blocks of channels are needed
        (3, (1, 1, 2, 2, 0), (1, 1, 2, 2)),
        (29, (2, 1, 16, 16), (16, 16)),  # one block too many
        (29, (16, 16), (16, 16, 1)),
        (4, (4, 1, 16, 16), (3, 3, 3, 3)),
        (4, (4, 1, 16, 16), (16, 16)),
        (33, (4, 1, 16, 16), (1, 1, 2, 2)),
        (ge.ND, (2, 3), (3, 3)),
        (28, (2, 3), (3, 2)),  # a layout that is not known
    ],
)
def test_shapes_that_do_not_bear_out_the_layout_are_refused(folder, code, device, original):
    with pytest.raises(UsageError, match="which does not match the shape"):
        undo(folder, np.zeros(device, np.int32), original, format=code)


def test_grouped_weights_are_refused_rather_than_read_wrong(folder):
    with pytest.raises(UsageError, match="FRACTAL_Z with 4 groups, which is not supported"):
        undo(folder, counted(1, 1, 16, 16), (16, 16, 1, 1), format=4, sub_format=4)


def test_without_the_program_s_shape_the_device_s_stands(folder):
    device = counted(1, 1, 16, 16)
    one = ge.tensor(device, ge.I32, format=29)
    one.pop("original")
    path = folder / "bare"
    path.write_bytes(ge.ge_bytes([one]))
    (tensor,) = ge_files.read_ge_header(path).tensors
    assert np.array_equal(ge_tensors.read_ge_values(path, tensor).numpy(), device)

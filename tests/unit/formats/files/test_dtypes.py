"""How tensors lie in a file."""

from __future__ import annotations

import pytest
import torch

from paritas.core.errors import UsageError
from paritas.formats.files.tensor_bytes import (
    as_stored,
    digest,
    in_safetensors,
    known_dtype,
    stored_dtype,
    stored_shape,
)
from unit.formats.files.entries import DTYPES, PLAIN, QUANTISED, bits, filled


def test_every_dtype_of_torch_is_known_by_its_name():
    assert len(DTYPES) > 30
    for dtype in DTYPES:
        assert known_dtype(str(dtype).removeprefix("torch.")) is dtype


def test_a_dtype_that_torch_has_not_is_refused_by_name():
    with pytest.raises(UsageError, match="has no dtype 'float3'"):
        known_dtype("float3")
    with pytest.raises(UsageError, match="has no dtype 'nn'"):
        known_dtype("nn")


@pytest.mark.parametrize("dtype", PLAIN, ids=str)
def test_a_strided_tensor_of_every_dtype_is_stored_bit_for_bit(dtype):
    whole = filled(dtype, (4, 6), seed=1)
    strided = whole[:, ::2].t()
    stored = as_stored(strided)
    assert stored.is_contiguous()
    assert (stored.dtype, stored.shape) == (dtype, strided.shape)
    assert bits(stored) == bits(strided)


@pytest.mark.parametrize("dtype", PLAIN, ids=str)
def test_what_a_stride_of_zero_repeats_is_stored_once(dtype):
    tensor = filled(dtype, (3, 1), seed=2).expand(2, 3, 1000)
    stored = as_stored(tensor)
    assert stored.shape == (1, 3, 1)
    assert stored.shape == stored_shape(tensor.shape, tensor.stride())
    assert bits(stored.expand(tensor.shape)) == bits(tensor)


def test_a_contiguous_tensor_is_not_copied():
    tensor = torch.randn(3, 4, requires_grad=True)
    stored = as_stored(tensor)
    assert stored.data_ptr() == tensor.data_ptr()
    assert not stored.requires_grad


def test_conjugate_and_negative_views_are_resolved():
    plain = torch.randn(3, 2, dtype=torch.complex64, generator=torch.Generator().manual_seed(0))
    for view in (plain.conj(), plain.conj().imag, plain.conj().t()):
        stored = as_stored(view)
        assert not stored.is_conj()
        assert not stored.is_neg()
        assert torch.equal(stored, view)


def test_an_empty_tensor_keeps_its_shape_even_where_it_repeats():
    tensor = torch.empty(0, 1).expand(0, 5)
    assert as_stored(tensor).shape == (0, 5)
    assert stored_shape(tensor.shape, tensor.stride()) == (0, 5)


def test_a_parameter_and_a_plain_subclass_are_stored_as_tensors():
    class Named(torch.Tensor):
        pass

    values = torch.arange(4.0)
    for tensor in (torch.nn.Parameter(values), values.as_subclass(Named)):
        stored = as_stored(tensor)
        assert type(stored) is torch.Tensor
        assert torch.equal(stored, values)


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor:UserWarning")
@pytest.mark.parametrize("dtype", [torch.qint8, torch.quint8, torch.qint32], ids=str)
def test_a_quantised_tensor_is_stored_as_what_its_integers_stand_for(dtype):
    tensor = torch.quantize_per_tensor(torch.tensor([[0.1, 0.2], [0.3, 0.4]]), 0.1, 3, dtype)
    assert dtype in QUANTISED
    stored = as_stored(tensor.t())
    assert stored.dtype is stored_dtype(dtype) is torch.float32
    assert torch.equal(stored, tensor.dequantize().t())


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor:UserWarning")
def test_a_quantised_tensor_without_scales_is_refused():
    tensor = torch.empty(3, dtype=torch.qint8)
    with pytest.raises(UsageError, match=r"cannot dequantise a tensor of torch\.qint8"):
        as_stored(tensor)


def _freed():
    tensor = torch.ones(8)
    tensor.untyped_storage().resize_(0)
    return tensor


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: torch.ones(3).to_sparse(), r"cannot store a tensor of layout torch\.sparse_coo"),
        (lambda: torch.ones(3, device="meta"), "meta device has no values"),
        (lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]), "nested tensor"),
        (torch.nn.UninitializedParameter, "UninitializedParameter has no values yet"),
        (_freed, r"shape \(8,\) needs 32 bytes and its storage holds 0: its memory was freed"),
    ],
    ids=["sparse", "meta", "nested", "uninitialised", "freed"],
)
def test_what_has_no_plain_values_is_refused_with_what_it_is(make, message):
    with pytest.raises(UsageError, match=message):
        as_stored(make())


def test_a_class_that_keeps_its_values_elsewhere_is_refused():
    class Wrapper(torch.Tensor):
        @classmethod
        def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
            raise NotImplementedError

    wrapper = torch.Tensor._make_wrapper_subclass(Wrapper, (3,))
    with pytest.raises(UsageError, match=r"cannot store a tensor of class .*Wrapper"):
        as_stored(wrapper)


@pytest.mark.parametrize("transform", [torch.vmap, torch.func.grad])
def test_a_tensor_inside_a_transform_is_refused(transform):
    def look(tensor):
        with pytest.raises(UsageError, match=r"inside a torch\.func transform"):
            as_stored(tensor)
        return tensor.sum()

    transform(look)(torch.ones(3))


def test_equal_bytes_have_equal_digests_whatever_they_are_called():
    ints = torch.arange(4, dtype=torch.int32)
    assert digest(ints) == digest(ints.view(torch.float32)) == digest(ints.reshape(2, 2))
    assert digest(ints) != digest(ints + 1)
    assert len(digest(torch.empty(0))) == 32


@pytest.mark.parametrize("dtype", PLAIN, ids=str)
def test_a_stride_that_leads_nowhere_does_not_matter(dtype):
    whole = filled(dtype, (10,), seed=4)
    assert digest(as_stored(whole[5::5])) == digest(whole[5:6])
    assert digest(as_stored(whole[:0].unsqueeze(0).expand(3, 0))) == digest(whole[:0])


@pytest.mark.parametrize("dtype", PLAIN, ids=str)
def test_safetensors_counts_as_many_bytes_as_torch(dtype):
    sizes = {"BOOL": 8, "F4": 4, "BF16": 16, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8}
    for shape in ((), (3,), (2, 0), (2, 3)):
        name, given = in_safetensors(dtype, shape)
        width = sizes.get(name) or int(name[1:])
        assert torch.Size(given).numel() * width == torch.Size(shape).numel() * 8 * dtype.itemsize

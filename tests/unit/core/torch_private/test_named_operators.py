from __future__ import annotations

import importlib

import pytest
import torch

from paritas.core.errors import UsageError
from paritas.core.torch_private.named_operators import (
    fits_kernel,
    operator_named,
    registering_module,
)

aten = torch.ops.aten


@pytest.mark.parametrize(
    "name",
    [
        "aten.mm.default",
        "aten.addmm.default",
        "aten.convolution.default",
        "aten.convolution_backward.default",
        "aten.native_layer_norm_backward.default",
        "aten._softmax_backward_data.default",
        "aten._scaled_dot_product_flash_attention_for_cpu.default",
        "aten._to_copy.default",
        "aten.copy_.default",
        "aten.index.Tensor",
        "aten.embedding.default",
        "aten.cat.default",
        "aten.t.default",
        "aten.full.default",
        "prims.convert_element_type.default",
        "prims.iota.default",
        "getitem",
    ],
)
def test_what_models_are_made_of_is_found(name):
    assert operator_named(name).name == name


@pytest.mark.parametrize(
    "name",
    [
        "aten.from_file.default",
        "aten._print.default",
        "aten.set_.source_Tensor",
        "aten.resize_.default",
        "aten.record_stream.default",
        "aten.item.default",
        "aten.sym_size.int",
        "aten.bernoulli.default",
        "aten.native_dropout.default",
        "aten.randn.default",
        "aten.empty.memory_format",
        "aten.fbgemm_linear_int8_weight.default",
        "aten._sparse_coo_tensor_unsafe.default",
        "prims.normal.default",
        "prims.item.default",
        "prim.device.default",
        "aten.nosuch.default",
        "aten.mm",
        "eval",
    ],
)
def test_what_draws_reaches_out_or_gives_no_tensor_is_refused(name):
    with pytest.raises(UsageError):
        operator_named(name)


def test_the_size_of_a_result_is_known_before_it_is_made():
    x = torch.ones(4, 6)
    assert operator_named("aten.mm.default").foretell([x, x.t()], {}) == 4 * 4 * 4
    huge = operator_named("aten.full.default").foretell([[1 << 20, 1 << 20], 1.0], {})
    assert huge == 4 << 40
    with pytest.raises(UsageError, match="cannot determine the size"):
        operator_named("aten.mm.default").foretell([x, x], {})


def test_a_view_of_a_tensor_that_lies_otherwise_is_made_all_the_same():
    x = torch.arange(6).reshape(2, 3).t()
    assert operator_named("aten.view.default").run(x, [6]).tolist() == [0, 3, 1, 4, 2, 5]


def test_numbers_are_only_sizes():
    assert operator_named("operator.mul").run(6, 7) == 42
    for left, right in (("a", 10), (1 << 70, 2), (torch.ones(1), 2)):
        with pytest.raises(TypeError):
            operator_named("mul").run(left, right)


def test_kernels_get_what_a_program_would_give_them():
    torch.manual_seed(0)
    x = torch.randn(3, 4, 6, 6)
    _, places = aten.max_pool2d_with_indices(x, [2, 2])
    pool = {"self": x, "indices": places, "grad_output": torch.ones(places.shape)}
    assert fits_kernel("max_pool2d_with_indices_backward", pool)
    assert not fits_kernel("max_pool2d_with_indices_backward", {**pool, "indices": places + 36})
    _, mean, rstd = aten.native_layer_norm(x, [6], None, None, 1e-5)
    norm = {"input": x, "grad_out": x, "normalized_shape": [6], "mean": mean, "rstd": rstd}
    norm |= {"weight": None, "bias": None}
    assert fits_kernel("native_layer_norm_backward", norm)
    assert not fits_kernel("native_layer_norm_backward", {**norm, "mean": mean[:1]})
    loss = {"self": x[:, :, 0, 0], "target": torch.tensor([0, 3, -100]), "weight": None}
    loss |= {"ignore_index": -100, "reduction": 1}
    loss |= {"grad_output": torch.ones(()), "total_weight": torch.ones(())}
    assert fits_kernel("nll_loss_backward", loss)
    assert not fits_kernel("nll_loss_backward", {**loss, "target": torch.tensor([0, 4, 1])})
    words = {"indices": torch.tensor([[0, 4]]), "grad_output": torch.ones(1, 2, 3)}
    assert fits_kernel("embedding_dense_backward", {**words, "num_weights": 5})
    assert not fits_kernel("embedding_dense_backward", {**words, "num_weights": 4})
    assert not fits_kernel("embedding_dense_backward", {})


REGISTERING = """
import torch

library = torch.library.Library("{name}", "DEF")
library.define("of_library(Tensor x) -> Tensor")
torch.library.define("{name}::with_fake", "(Tensor x) -> Tensor")
torch.library.register_fake("{name}::with_fake", lambda x: torch.empty_like(x))


@torch.library.custom_op("{name}::of_function", mutates_args=())
def of_function(x: torch.Tensor) -> torch.Tensor:
    return x.clone()
"""


def test_the_module_that_registers_an_operator_is_found(tmp_path, monkeypatch):
    name = "registering_operators"
    (tmp_path / f"{name}_here.py").write_text(REGISTERING.format(name=name))
    monkeypatch.syspath_prepend(tmp_path)
    module = importlib.import_module(f"{name}_here")
    operators = getattr(torch.ops, name)
    for target in (operators.of_library, operators.with_fake, operators.of_function.default):
        assert registering_module(target) == module.__name__


def test_operators_of_torch_and_of_the_main_program_have_no_such_module():
    def clone(x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    clone.__module__ = "__main__"
    torch.library.custom_op("registering_in_main::cloned", clone, mutates_args=())
    for target in (aten.add, torch.ops.prims.sin.default, torch.ops.registering_in_main.cloned):
        assert registering_module(target) is None

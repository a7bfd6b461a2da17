from __future__ import annotations

import pytest
import torch

from paritas import UsageError
from paritas.partition import IRObject, TensorInfo, VerifyConfig
from paritas.sharding.operators.configuration import make_call
from paritas.sharding.operators.resolving import resolve_operator

SHAPE = "shape"


def made(fsig, *args, seed=0, **kwargs):
    """The call of an operator; a tuple is a shape."""
    infos = [
        arg
        if isinstance(arg, TensorInfo)
        else TensorInfo(SHAPE if isinstance(arg, tuple) else "value", arg)
        for arg in args
    ]
    config = VerifyConfig(fsig, infos, kwargs, 1, [])
    return make_call(config, resolve_operator(fsig), seed=seed)


def test_tensors_are_float32_of_the_very_shape_and_the_same_for_the_same_seed():
    first, again = made("torch.add", (1,), (4, 3)), made("torch.add", (1,), (4, 3))
    other = made("torch.add", (1,), (4, 3), seed=1)
    assert [tuple(arg.shape) for arg in first.args] == [(1,), (4, 3)]
    assert all(arg.dtype == torch.float32 for arg in first.args)
    assert all(map(torch.equal, first.args, again.args))
    assert not torch.equal(first.args[1], other.args[1])
    assert (first.seed, other.seed) == (0, 1)


def test_one_more_argument_leaves_the_others_as_they_were():
    two, three = made("torch.add", (3,), (3,)), made("torch.addcmul", (3,), (3,), (3,))
    assert all(map(torch.equal, two.args, three.args))


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("fsig", ["torch.nn.functional.embedding", "torch.embedding"])
def test_ids_are_rows_of_the_table_and_hit_its_ends(fsig, seed):
    ids_first = "functional" in fsig
    args = [(1, 9), (50257, 8)] if ids_first else [(50257, 8), (1, 9)]
    ids = made(fsig, *args, seed=seed).args[0 if ids_first else 1]
    assert ids.dtype == torch.int64
    assert (ids.min(), ids.max()) == (0, 50256)
    assert {25127, 25128} <= set(ids.flatten().tolist())


def test_ids_of_a_part_of_the_vocabulary_begin_where_it_does():
    fsig = "nnscaler.runtime.function.embedding"
    ids = made(fsig, (1, 9), (5, 8), padding_idx=None, start=10, stop=15).args[0]
    assert (ids.min(), ids.max()) == (10, 14)


@pytest.mark.parametrize(
    ("fsig", "args", "kwargs", "place", "size"),
    [
        ("torch.gather", [(3, 5), 1, (3, 4)], {}, 2, 5),
        ("torch.gather", [(3, 5), -2, (3, 4)], {}, 2, 3),
        ("torch.index_select", [(3, 5), 1, (7,)], {}, 2, 5),
        ("nnscaler.runtime.function.index_select", [(3, 5), (7,)], {"dim": 1}, 1, 5),
        ("torch.take", [(3, 5), (30,)], {}, 1, 15),
        ("torch.Tensor.scatter_add_", [(3, 5), 1, (3, 4), (3, 4)], {}, 2, 5),
        ("torch.nn.functional.nll_loss", [(6, 5), (6,)], {}, 1, 5),
        ("torch.nn.functional.cross_entropy", [(2, 5, 4), (2, 4)], {}, 1, 5),
        ("torch.nn.functional.one_hot", [(8,)], {"num_classes": 4}, 0, 4),
    ],
)
def test_indices_are_in_range_and_reach_the_last(fsig, args, kwargs, place, size):
    call = made(fsig, *args, **kwargs)
    index = call.args[place]
    assert index.dtype == torch.int64
    assert (index.min(), index.max()) == (0, size - 1)
    call.function(*call.args, **call.kwargs)


def test_indices_that_are_written_to_come_once():
    index = made("torch.scatter", (3, 5), 1, (3, 4), (3, 4)).args[2]
    assert all(len(set(row)) == 4 for row in index.tolist())
    with pytest.raises(UsageError, match=r"the shape can be at most \(3, 5\)"):
        made("torch.scatter", (3, 5), 1, (3, 6), (3, 6))


def test_ignored_targets_are_not_the_same_number_on_each_rank():
    call = made("torch.nn.functional.cross_entropy", (8, 5), (8,), ignore_index=-1)
    halves = call.args[1].chunk(2)
    assert (halves[0] == -1).sum() == 2
    assert (halves[1] == -1).sum() == 0


@pytest.mark.parametrize(
    ("fsig", "args", "place", "low", "high"),
    [
        ("torch.rsqrt", [(50,)], 0, 0.1, 4.0),
        ("torch.Tensor.log_", [(50,)], 0, 0.1, 4.0),
        ("torch.acosh", [(50,)], 0, 1.0, 4.0),
        ("torch.asin", [(50,)], 0, -1.0, 1.0),
        ("torch.nn.functional.binary_cross_entropy", [(50,), (50,)], 0, 0.0, 1.0),
        ("torch.nn.functional.binary_cross_entropy", [(50,), (50,)], 1, 0.0, 1.0),
        ("torch.nn.functional.batch_norm", [(9, 50), (50,), (50,)], 2, 0.1, 4.0),
        ("torch.nn.functional.instance_norm", [(2, 5, 3), (5,), (5,)], 2, 0.1, 4.0),
    ],
)
def test_numbers_are_within_what_the_operator_takes(fsig, args, place, low, high):
    drawn = made(fsig, *args).args[place]
    assert low < drawn.min()
    assert drawn.max() < high


def test_masks_are_bools_of_both_kinds():
    for mask in (
        made("torch.where", (1, 1, 9, 9), (1, 12, 9, 9), (1,)).args[0],
        made("torch.Tensor.masked_fill", (9, 9), (9, 9), 1.0).args[1],
    ):
        assert mask.dtype == torch.bool
        assert 0 < mask.sum() < mask.numel()


def test_probabilities_as_targets_sum_up_to_one():
    scores, target = made("torch.nn.functional.cross_entropy", (4, 5), (4, 5)).args
    assert scores.shape == target.shape
    assert torch.allclose(target.sum(1), torch.ones(4))


def test_running_statistics_of_a_wrapped_batch_norm_fit():
    fsig = "nnscaler.graph.function.wrapnn.wrap_batchnorm2d_func"
    *_, variance, count = made(fsig, (2, 8, 2, 2), (8,), (8,), (8,), (8,), (1,)).args
    assert variance.min() > 0
    assert count.dtype == torch.int64


def test_running_statistics_never_need_a_gradient():
    by_position = made("torch.nn.functional.batch_norm", (2, 8), (8,), (8,), (8,), (8,))
    assert by_position.without_gradient == {1, 2}
    statistics = {name: TensorInfo(SHAPE, (8,)) for name in ("running_mean", "running_var")}
    by_name = made("torch.nn.functional.batch_norm", (2, 8), **statistics)
    assert by_name.without_gradient == set(statistics)
    assert by_name.kwargs["running_var"].min() > 0
    assert made("torch.batch_norm", (2, 8), *[(8,)] * 4).without_gradient == {3, 4}


def test_matrices_can_be_inverted_and_factored():
    definite = made("torch.linalg.cholesky", (3, 5, 5)).args[0]
    torch.linalg.cholesky(definite)
    assert torch.linalg.cond(made("torch.linalg.inv", (16, 16)).args[0]) < 100


@pytest.mark.parametrize(
    "dtype",
    [torch.bfloat16, torch.float64, torch.int32, torch.uint8, torch.bool, torch.complex64],
)
def test_a_requested_dtype_is_used(dtype):
    drawn = made("torch.add", TensorInfo("shape", (64,), dtype=dtype), 1).args[0]
    assert drawn.dtype == dtype
    assert len(set(drawn.tolist())) > 1


def test_the_dtype_changes_the_rounding_and_not_the_numbers():
    wide, narrow = (
        made("torch.abs", TensorInfo("shape", (64,), dtype=dtype)).args[0]
        for dtype in (torch.float64, torch.bfloat16)
    )
    assert torch.equal(wide.to(torch.bfloat16), narrow)


def test_a_dtype_that_cannot_hold_the_indices_is_refused():
    ids = TensorInfo("shape", (1, 9), dtype=torch.float32)
    fsig = "nnscaler.runtime.function.embedding"
    rest = {"padding_idx": None, "start": 0, "stop": 50257}
    assert made(fsig, ids, (50257, 2), **rest).args[0].max() == 50256
    small = TensorInfo("shape", (1, 9), dtype=torch.bfloat16)
    with pytest.raises(UsageError, match=r"up to 50256, which torch\.bfloat16 cannot"):
        made(fsig, small, (50257, 2), **rest)


def test_a_generator_is_drawn_from_and_a_function_is_called():
    state = torch.Generator().manual_seed(7)
    drawn = made("torch.abs", TensorInfo("shape", (3,), generator=state)).args[0]
    again = torch.randn(3, generator=torch.Generator().manual_seed(7), dtype=torch.float64)
    assert torch.equal(drawn, again.float())
    ones = made("torch.abs", TensorInfo("shape", (3,), generator=torch.ones)).args[0]
    assert torch.equal(ones, torch.ones(3))


@pytest.mark.parametrize(
    ("info", "message"),
    [
        (TensorInfo("shape", (3,), generator=lambda shape: torch.ones(4)), r"shape \(4,\), not"),
        (TensorInfo("shape", (3,), generator=lambda shape: 3), "must return a tensor, got 3"),
        (
            TensorInfo("shape", (3,), dtype=torch.int64, generator=torch.ones),
            "returned torch.float32, not torch.int64",
        ),
    ],
)
def test_a_generator_function_must_return_the_requested_tensor(info, message):
    with pytest.raises(UsageError, match=message):
        made("torch.abs", info)


def test_tensors_may_be_given_by_keyword_and_objects_anywhere():
    call = made(
        "torch.nn.functional.linear",
        (4, 3),
        weight=TensorInfo("shape", (2, 3), requires_grad=False),
        bias=IRObject("none", value=None, is_constant=True),
    )
    assert call.kwargs["bias"] is None
    assert tuple(call.kwargs["weight"].shape) == (2, 3)
    assert call.without_gradient == {"weight"}
    view = made("torch.Tensor.view", (2, 6), size=(IRObject("n", 3), -1))
    assert view.function(*view.args, **view.kwargs).shape == (3, 4)

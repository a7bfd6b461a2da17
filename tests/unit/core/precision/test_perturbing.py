from __future__ import annotations

import functools
import itertools
import random

import pytest
import torch
import torch.nn.functional as F

from paritas.core.numerics.criterion import UNIT_F64
from paritas.core.precision import perturbing
from paritas.core.precision.lifting import DtypeLog, LiftMode
from paritas.core.precision.perturbing import UNIT_F32, NoisePool, PerturbMode

U32 = 2.0**-24
RUNS = 6
INDEX = torch.tensor([0, 1, 0, 2, 2, 2, 3, 1]).expand(8, 8)


def values(*shape, seed=0):
    """Float32 numbers, in float64."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).double()


def rms(tensor):
    return float(tensor.detach().double().square().mean().sqrt())


def perturbed(program, *inputs, unit=U32, seed=0, **options):
    with PerturbMode(torch.float32, torch.float32, unit, seed, **options):
        return program(*inputs)


def spread(program, *inputs, **options):
    """The root mean square deviation per element over a few perturbed runs."""
    still = program(*inputs)
    moved = [perturbed(program, *inputs, seed=seed, **options) - still for seed in range(RUNS)]
    return torch.stack(moved).square().mean(0).sqrt()


def measured(program, *inputs):
    """The error that float32 really makes."""
    return program(*(x.float() for x in inputs)).double() - program(*inputs)


# --- size -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [64, 128])
@pytest.mark.parametrize("positive", [False, True])
@pytest.mark.parametrize(
    "program",
    [lambda a, b: a @ b, lambda a, b: (a * b).sum(0), lambda a, b: (a + b).mean(1)],
    ids=["matmul", "sum", "mean"],
)
def test_the_spread_is_the_error_that_float32_makes(program, n, positive):
    a, b = values(n, n), values(n, n, seed=1)
    if positive:
        a, b = a.abs(), b.abs()
    guessed, made = rms(spread(program, a, b)), rms(measured(program, a, b))
    assert made / 3 < guessed < made * 3


def test_a_sum_that_a_row_is_reduced_by_moves_its_values_together():
    """As in attention: gradients that are nearly equal cancel, the error of their sum does not."""

    def in_one_sweep(scores, grad):
        """A kernel that sums one by one, as loops do; its row sums would be 0 without rounding."""
        output = scores.float().softmax(-1)
        terms = output * grad.float()
        total = functools.reduce(torch.add, terms.unbind(-1))
        return (terms - output * total[:, None]).double().sum(-1)

    def row_sums(scores, grad):
        return torch.autograd.grad(scores.softmax(-1), scores, grad)[0].sum(-1)

    scores, grad = (values(64, 256) / 4).requires_grad_(), 30 + values(64, 256, seed=1)
    made, guessed = rms(in_one_sweep(scores.detach(), grad)), rms(spread(row_sums, scores, grad))
    assert made / 3 < guessed < made * 5


def test_the_gradients_of_a_batch_norm_in_evaluation_are_long_sums():
    x, grad = values(4, 3, 32, 32), 1 + values(4, 3, 32, 32, seed=1) / 8
    statistics = torch.zeros(3, dtype=torch.float64), torch.ones(3, dtype=torch.float64)

    def gradients(weight, bias):
        result = F.batch_norm(x, *statistics, weight, bias)
        return torch.stack(torch.autograd.grad(result, (weight, bias), grad))

    def one_by_one(terms):
        rows = terms.transpose(0, 1).flatten(1)
        ends = rows.float().numpy().cumsum(-1)[:, -1]
        return torch.from_numpy(ends).double() - rows.sum(-1)

    leaves = [torch.ones(3, dtype=torch.float64, requires_grad=True) for _ in range(2)]
    made = torch.stack([one_by_one(grad * x), one_by_one(grad)])
    guessed = spread(gradients, *leaves)
    assert rms(made[1]) / 3 < rms(guessed[1]) < 6 * rms(made[1])
    assert rms(made[0]) < 3 * rms(guessed[0])


def bias_of_convolution(grad):
    x, weight = torch.ones(256, 1, 1).to(grad), torch.ones(64, 1, 1).to(grad)
    rest = [64], [1], [0], [1], False, [0], 1, [False, False, True]
    return torch.ops.aten.convolution_backward(grad.unsqueeze(-1), x, weight, *rest)[2]


@pytest.mark.parametrize(
    "program",
    [lambda x: x.sum(0), lambda x: x.mean(0), bias_of_convolution],
    ids=["sum", "mean", "bias of a convolution"],
)
def test_terms_that_are_nearly_equal_are_rounded_alike(program):
    """As in the gradient of a bias below attention that hardly prefers one token to another."""
    x = values(64, seed=1) * (1 + values(256, 64) * 1e-6)
    total = program(x)
    added = functools.reduce(torch.add, x.float().unbind()).double()
    made, guessed = rms(added / rms(x.sum(0)) - x.sum(0) / rms(x.sum(0))), rms(spread(program, x))
    assert made / 3 < guessed / rms(total) < made * 3


@pytest.mark.parametrize(
    "norm",
    [lambda x: F.layer_norm(x, x.shape[1:]), lambda x: F.group_norm(x, 1), F.instance_norm],
    ids=["layer", "group", "instance"],
)
def test_means_that_a_norm_s_backward_subtracts_move_a_row_together(norm):
    """A row of these gradients adds up to 0, except for the errors of its means."""

    def gradient(x, grad):
        given = x.detach().requires_grad_()
        return torch.autograd.grad(norm(given), given, grad)[0]

    inputs = values(32, 4, 96), 1 + values(32, 4, 96, seed=1)
    still = gradient(*inputs)
    moved = [perturbed(gradient, *inputs, seed=seed) - still for seed in range(RUNS)]
    guessed = rms(torch.stack(moved).sum((-2, -1)))
    assert rms(measured(gradient, *inputs).sum((-2, -1))) < 2 * guessed


@pytest.mark.parametrize("place", [1, 2], ids=["weight", "bias"])
def test_gradients_of_a_group_norm_s_parameters_are_long_sums(place):
    def gradient(x, weight, bias, grad):
        given = [each.detach().requires_grad_() for each in (x, weight, bias)]
        return torch.autograd.grad(F.group_norm(given[0], 2, *given[1:]), given[place], grad)[0]

    inputs = values(8, 8, 100), values(8, seed=1), values(8, seed=2), values(8, 8, 100, seed=3)
    terms = inputs[3] if place == 2 else inputs[3] * F.group_norm(inputs[0], 2)
    rows = terms.transpose(0, 1).flatten(1).float()
    made = rms(functools.reduce(torch.add, rows.unbind(1)).double() - rows.double().sum(1))
    assert made / 2 < rms(spread(gradient, *inputs)) < made * 5


@pytest.mark.parametrize("place", range(3), ids=["query", "key", "value"])
def test_sums_inside_of_fused_attention_round_too(place):
    """Scores, weights and row sums are made in the backward kernel, and seen nowhere else."""
    inputs = [values(2, 2, 96, 32, seed=seed) for seed in range(4)]

    def gradient(query, key, value, grad):
        given = [each.detach().requires_grad_() for each in (query, key, value)]
        attended = F.scaled_dot_product_attention(*given)
        return torch.autograd.grad(attended, given[place], grad + 3)[0]

    guessed, made = rms(spread(gradient, *inputs)), rms(measured(gradient, *inputs))
    assert made / 2 < guessed < made * 3


def test_the_rounding_of_an_output_moves_whole_rows_of_a_gpu_kernels_gradients():
    """The kernel takes the sum of each row from the output in memory; all its scores share that."""
    query, key = values(1, 2, 96, 32), values(1, 2, 96, 32, seed=1)
    value, grad = values(1, 2, 96, 32, seed=2) + 3, values(1, 2, 96, 32, seed=3) + 3
    weights = (query @ key.mT / 32**0.5).softmax(-1)
    rounded = (weights @ value).bfloat16().double() - weights @ value
    made = weights.mT @ (query * (grad * rounded).sum(-1, keepdim=True)) / 32**0.5
    attend = torch.ops.aten._scaled_dot_product_flash_attention.default
    back = torch.ops.aten._scaled_dot_product_flash_attention_backward.default

    def gradient():
        out, top, *_, seed, offset, _ = attend(query, key, value)
        rest = (None, None, 96, 96, 0.0, False, seed, offset)
        return back(grad, query, key, value, out, top, *rest)[1].sum(-2)

    with LiftMode(torch.bfloat16, torch.float32):
        still = gradient()
    moved = [perturbed(gradient, unit=2.0**-8, seed=seed) - still for seed in range(RUNS)]
    guessed, made = rms(torch.stack(moved)), rms(made.sum(-2))
    assert made / 2 < guessed < made * 5


def test_logarithms_of_sums_are_kept_in_float32():
    query, key, value = (values(1, 2, 16, 8, seed=seed) for seed in range(3))
    attend = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    moved = spread(lambda *given: attend(*given)[1], query * 1e-6, key, value, unit=2.0**-8)
    assert U32 / 2 < rms(moved) < 100 * U32


def test_the_spread_of_one_rounding_is_about_one_rounding():
    x = values(1000).abs() + 1
    share = rms(spread(lambda x: x.sin() + 2, x)) / rms(x.sin() + 2)
    assert U32 / 5 < share < U32


def test_the_spread_follows_the_scale_of_a_program():
    a, b = values(32, 32), values(32, 32, seed=1)
    here, there = (spread(lambda a, b: a @ b, a * s, b) for s in (1.0, 2.0**-40))
    assert torch.allclose(there * 2.0**40, here, rtol=1e-9, atol=0.0)


def test_the_spread_is_in_proportion_to_the_unit():
    a, b = values(32, 32), values(32, 32, seed=1)
    fine, coarse = (spread(lambda a, b: a + b, a, b, unit=unit) for unit in (U32, 16 * U32))
    assert rms(coarse) == pytest.approx(16 * rms(fine), rel=1e-3)


def test_cancellation_is_seen_where_it_happens():
    x = values(64)
    wobble = spread(lambda x: torch.cat([(x + 1e4) - 1e4, x + 1]), x)
    assert rms(wobble[:64]) > 1000 * rms(wobble[64:])


@pytest.mark.parametrize(
    "program",
    [
        lambda x: x.relu().t(),
        lambda x: x.abs().amax(0),
        lambda x: x[1:].clone().reshape(-1),
        lambda x: torch.where(x > 0, x, 0.0).topk(3).values,
        lambda x: x.argmax(1),
        lambda x: x.argmax(1).to(torch.float32),
        lambda x: (x > 0).float(),
        lambda x: x.scatter_reduce(0, INDEX, x, "amax"),
        lambda x: x.index_reduce(0, INDEX[0], x, "amin"),
        lambda x: torch.segment_reduce(x, "max", lengths=torch.tensor([3, 5])),
        lambda x: torch.aminmax(x).max,
        lambda x: x.cummax(0).values,
        lambda x: x.kthvalue(2).values,
        lambda x: x.clone().index_put((INDEX[0],), x),
        lambda x: x.scatter(0, INDEX, x),
    ],
)
@pytest.mark.filterwarnings("ignore:index_reduce")
def test_what_rounds_nothing_is_not_perturbed(program):
    x = values(8, 8)
    assert torch.equal(perturbed(program, x), program(x))


@pytest.mark.parametrize(
    "program",
    [
        lambda x: x.scatter_reduce(0, INDEX, x, "sum"),
        lambda x: x.index_put((INDEX[0],), x, accumulate=True),
        lambda x: x.scatter(0, INDEX, x, reduce="add"),
    ],
)
@pytest.mark.filterwarnings("ignore:The reduce argument of torch.scatter")
def test_what_meets_in_one_place_and_is_added_up_is_rounded(program):
    x = values(8, 8)
    assert 0 < rms(perturbed(program, x) - program(x)) < 10 * U32


def test_the_gradient_of_a_greatest_value_finds_it_in_every_run():
    x = values(8, 8).requires_grad_()

    def gradient(x):
        greatest = x.new_full((8, 8), -9.0).scatter_reduce(0, INDEX, x * 3, "amax")
        return torch.autograd.grad(greatest.sum(), x)[0]

    assert rms(spread(gradient, x)) < 10 * U32


def in_order(x):
    return (x[0] + x[1]) + x[2]


def test_a_term_below_the_last_digit_of_two_that_cancel_is_lost_in_float64_too():
    huge = torch.tensor([1e30, -1e30, 4.0])
    assert spread(in_order, huge, unit=2.0**-53) > 1e12
    assert spread(lambda x: x.cumsum(0)[-1], huge, unit=2.0**-53) > 1e12
    # Scale has no part in it, but distance has: whole numbers are exact in every order.
    assert spread(in_order, huge * 1e-30, unit=2.0**-53) > 1e-18
    for near in (torch.tensor([7.0, -7.0, 4.0]), torch.tensor([5e8, -5e8, 4.0])):
        assert spread(in_order, near, unit=2.0**-53) == 0
        assert spread(lambda x: x.sum(), near - near.mean().round(), unit=2.0**-53) == 0


@pytest.mark.parametrize("one", [1.0, torch.ones(4)])
@pytest.mark.parametrize("unit", [U32, 2.0**-53])
def test_a_mask_of_ones_and_zeros_masks_in_every_run(unit, one):
    # Everybody's attention mask: 1 - 1 is 0 in any precision, and is then multiplied by 1e38.
    mask = torch.tensor([1, 1, 1, 0])
    scores = values(4, 4)

    def attend(scores):
        return F.softmax(scores + (one - mask.float()) * torch.finfo(torch.float32).min, -1)

    assert rms(spread(attend, scores, unit=unit)) < 100 * unit


@pytest.mark.parametrize("unit", [U32, UNIT_F64])
def test_a_mask_may_be_a_term_of_a_sum(unit):
    mask = torch.tensor([True, False, True, False])
    moved = perturbed(lambda x: x + mask, values(4), unit=unit)
    assert torch.allclose(moved, values(4) + mask, atol=1e-6, rtol=0)


def test_an_operator_in_place_is_perturbed_and_gives_its_argument_back():
    x = values(64)
    with PerturbMode(torch.float32, torch.float32, U32, 0):
        y = x.clone()
        same = y.add_(1)
    assert same is y
    assert 0 < rms(y - (x + 1)) < 4 * U32


def test_the_backward_pass_is_perturbed_too():
    x, cotangent = values(16, 16).requires_grad_(), values(16, 16, seed=2)

    def slope(x):
        return torch.autograd.grad(F.layer_norm(x.sin() @ x, (16,)), x, cotangent)[0]

    wobble = spread(slope, x)
    assert bool((wobble > 0).all())
    assert rms(wobble) < 1e-4 * rms(slope(x))


@pytest.mark.parametrize(
    "program",
    [
        lambda x, w: F.conv1d(x.unsqueeze(0), w[:, :, None].expand(-1, -1, 3)),
        lambda x, w: F.softmax(x @ w, -1).cumsum(0),
        lambda x, w: torch.addmm(x[0], x, w),
        lambda x, w: F.embedding(torch.arange(8) % 3, w) * x[0],
        lambda x, w: torch.complex(x, w).abs(),
        lambda x, w: F.batch_norm(x, None, None, training=True) * w[0],
        lambda x, w: F.scaled_dot_product_attention(x, w, x),
        lambda x, w: torch.stack([x, w]).std(0).split(4)[1],
    ],
)
def test_programs_run_perturbed_forward_and_backward(program):
    x, w = values(16, 16).requires_grad_(), values(16, 16, seed=1).requires_grad_()

    def run(x, w):
        result = program(x, w)
        cotangent = values(*result.shape, seed=2)
        return [result, *torch.autograd.grad(result, [x, w], cotangent, allow_unused=True)]

    for moved, still in zip(perturbed(run, x, w), run(x, w), strict=True):
        if still is not None:
            assert moved.dtype is torch.float64
            assert moved.shape == still.shape
            assert rms(moved - still) < 1e-4 * rms(still)


@pytest.mark.parametrize("kind", [torch.nn.BatchNorm1d, torch.nn.BatchNorm2d])
def test_running_statistics_are_as_noisy_as_the_sums_behind_them(kind):
    shape = (512, 4) if kind is torch.nn.BatchNorm1d else (8, 4, 8, 8)
    x = values(*shape) + 3

    def run(x):
        norm = kind(4).to(x.dtype)
        norm(x)
        return torch.stack([norm.running_mean, norm.running_var])

    # The mean of 512 rounded inputs would be off by far less. The variance was 1 before.
    mean, variance = spread(run, x) / run(x.double()).abs() / U32
    assert 2 < float(mean.min()) < float(mean.max()) < 30
    assert 0.2 < float(variance.min()) < float(variance.max()) < 3


def test_a_normalised_channel_shifts_as_a_whole():
    x = values(8, 4, 8, 8) + 3

    def mean_of_channels(x):
        return F.batch_norm(x, None, None, training=True).mean(dim=(0, 2, 3))

    def one_value(x):
        return F.batch_norm(x, None, None, training=True)[0, :, 0, 0]

    # Noise of single values would cancel in the mean over 512 of them.
    assert rms(spread(mean_of_channels, x)) > rms(spread(one_value, x)) / 3


# --- the native dtype -----------------------------------------------------------------------------


def test_a_call_is_perturbed_by_the_dtype_it_ran_in():
    def program(x):
        return (x.to(torch.bfloat16) @ x.to(torch.bfloat16)).to(torch.float32), x @ x

    with DtypeLog() as log:
        program(values(32, 32).float())
    x = values(32, 32)
    still = x @ x
    with PerturbMode(torch.float32, torch.float32, U32, 0, log=log.calls):
        coarse, fine = program(x)
    assert rms(coarse - still) > 1e-3 * rms(still)
    assert rms(fine - still) < 1e-6 * rms(still)


def test_without_widening_a_program_stays_in_its_dtype():
    x = values(32, 32).float()
    still = x @ x
    moved = [perturbed(lambda x: x @ x, x, seed=seed, widen=False) for seed in range(4)]
    assert all(result.dtype is torch.float32 for result in moved)
    assert all(1e-8 < rms(result - still) / rms(still) < 1e-5 for result in moved)
    bits = perturbed(lambda x: x.view(torch.int32), x, widen=False)
    assert torch.equal(bits, x.view(torch.int32))


# --- chance ---------------------------------------------------------------------------------------


def test_a_seed_gives_the_same_run_again_and_another_seed_another():
    a, b = values(32, 32), values(32, 32, seed=1)
    first, again, other = (perturbed(torch.mm, a, b, seed=seed) for seed in (3, 3, 4))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_the_random_numbers_of_the_caller_are_left_alone():
    x = values(32, 32)
    torch.manual_seed(0)
    state, python = torch.get_rng_state(), random.getstate()
    perturbed(lambda x: (x @ x).sum(), x)
    assert torch.equal(torch.get_rng_state(), state)
    assert random.getstate() == python


def test_a_perturbed_program_draws_the_numbers_of_the_native_one():
    torch.manual_seed(5)
    native = torch.rand(64)
    torch.manual_seed(5)
    drawn = perturbed(lambda: torch.rand(64))
    assert torch.equal(drawn, native.double())


def test_the_noise_of_one_operand_is_not_that_of_the_other():
    # Were it the same, x / x would be 1 whatever the noise.
    x = values(1000).abs() + 1
    assert rms(perturbed(lambda x: (x + 0.1) / (x + 0.1), x) - 1) > U32 / 4


def test_equal_values_are_rounded_alike_and_others_apart():
    """Rounding is a function of the value: errors on equal inputs add up in step."""
    x = torch.full((64,), 0.1, dtype=torch.float64)
    y = torch.linspace(0.1, 0.9, 64, dtype=torch.float64)
    with PerturbMode(torch.float32, torch.float32, UNIT_F32, seed=0):
        same, apart = x * 3.3, y * 3.3
    assert same.unique().numel() == 1
    assert float(same[0]) != 0.1 * 3.3
    errors = (apart / (y * 3.3) - 1) / UNIT_F32
    assert errors.unique().numel() > 60
    assert float(errors.abs().max()) <= 0.5 + 1e-6


def test_a_single_operator_has_inputs_as_coarse_as_the_coarsest_of_its_dtypes():
    """Fused, a cast to float32 is given what was never rounded to float16 before it."""
    x = torch.linspace(0.1, 0.9, 64, dtype=torch.float64)
    cast = torch.ops.aten._to_copy.default
    coarse = torch.finfo(torch.float16).eps / 2
    log = {(cast, 0): torch.float32}
    with PerturbMode(torch.float16, torch.float32, coarse, seed=0, log=log, shake_inputs=True):
        moved = cast(x, dtype=torch.float32)
    assert coarse / 8 < rms(moved.double() / x - 1) < coarse


@pytest.fixture
def tf32_allowed():
    """The switch is no plain attribute: monkeypatch would delete what it cannot put back."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = True
    yield
    torch.backends.cuda.matmul.allow_tf32 = before


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_what_tensor_cores_may_round_is_shaken_that_much(tf32_allowed):
    x = torch.rand(64, 64, dtype=torch.float64, device="cuda") + 0.5
    with PerturbMode(torch.float32, torch.float32, UNIT_F32, seed=0):
        moved = x @ x
    off = float(((moved - x @ x) / (x @ x)).square().mean().sqrt())
    assert 1e-5 < off < 1e-3


class OnCuda(torch.Tensor):
    """A tensor that says it is on a GPU."""

    is_cuda = True

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        with torch.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


def off_by(x, unit):
    with PerturbMode(torch.float32, torch.float32, unit, seed=0):
        moved = x @ x
    exact = x.as_subclass(torch.Tensor) @ x.as_subclass(torch.Tensor)
    return float(((moved - exact) / exact).square().mean().sqrt())


def test_tensor_cores_round_nothing_in_a_lifted_run_which_is_in_float64(tf32_allowed):
    x = (torch.rand(16, 16, dtype=torch.float64) + 0.5).as_subclass(OnCuda)
    assert off_by(x, UNIT_F32) > 1e-5  # natively they do
    assert off_by(x, UNIT_F64) < 1e-14


def test_they_round_in_a_native_run_too_where_there_is_no_float64_run(tf32_allowed):
    x = (torch.rand(16, 16) + 0.5).as_subclass(OnCuda)
    with PerturbMode(torch.float32, torch.float32, UNIT_F32, seed=0, widen=False):
        moved = x @ x
    exact = x.as_subclass(torch.Tensor) @ x.as_subclass(torch.Tensor)
    assert 1e-5 < float(((moved - exact) / exact).square().mean().sqrt()) < 1e-3


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_nor_do_they_on_a_device(tf32_allowed):
    x = torch.rand(64, 64, dtype=torch.float64, device="cuda") + 0.5
    assert off_by(x, UNIT_F32) > 1e-5
    assert off_by(x, UNIT_F64) < 1e-14


def test_a_coarse_matmul_that_the_user_allows_does_not_reach_a_lifted_run():
    x = torch.rand(32, 32, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        with LiftMode(torch.float32, torch.float32):
            lifted = x.float() @ x.float()
        shaken = off_by(x + 0.5, UNIT_F64)
        assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_float32_matmul_precision(before)
    assert torch.equal(lifted, x @ x)
    assert shaken < 1e-14


def test_a_result_that_is_no_tensor_is_left_as_it_is():
    """An optimizer's step begins with a mark for the profiler, which is an opaque object."""
    weight = torch.nn.Parameter(torch.ones(3))
    weight.grad = torch.full((3,), 0.3)
    optimizer = torch.optim.SGD([weight], lr=0.1)
    with PerturbMode(torch.float32, torch.float32, UNIT_F32, seed=0):
        optimizer.step()
    assert torch.allclose(weight.detach(), torch.full((3,), 0.97))


def test_runs_that_share_a_pool_differ_and_noise_follows_the_layout_of_a_tensor():
    pool, x = NoisePool(0), torch.rand(64, 48, dtype=torch.float64).t() + 1
    moved = []
    for seed in range(3):
        with PerturbMode(torch.float32, torch.float32, UNIT_F32, seed, pool=pool):
            moved.append(x * 1.1)
    noise = [run / (x * 1.1) - 1 for run in moved]
    assert all(run.stride() == x.stride() for run in moved)
    assert not any(torch.equal(left, right) for left, right in itertools.pairwise(noise))
    for one in noise:
        assert float(one.abs().max()) <= 0.51 * UNIT_F32
        assert float(one.std()) > 0.25 * UNIT_F32


def test_a_large_pool_is_not_kept_as_factors_and_gives_the_same_noise(monkeypatch):
    x = torch.rand(1 << 10, dtype=torch.float64)
    small, large = NoisePool(0), NoisePool(0)
    for _ in range(1 << 9):  # until factors of the whole pool are worth their memory
        expected = small.factors(x, 7, UNIT_F32)
    monkeypatch.setattr(perturbing, "_LARGEST_FACTORS", 0)
    for _ in range(1 << 9):
        factors = large.factors(x, 7, UNIT_F32)
    assert torch.equal(factors, expected)
    assert expected.untyped_storage().nbytes() > 1 << 20
    assert factors.untyped_storage().nbytes() == x.nbytes


def test_a_sum_of_counts_in_integers_is_exact():
    """As mixtures of experts count their tokens."""

    def offsets(chosen):
        counts = torch.histc(chosen.to(torch.float32), bins=4, min=0, max=3)
        return torch.cumsum(counts, 0, dtype=torch.int32), counts.sum(0, dtype=torch.int64)

    chosen = torch.randint(4, (3000,), generator=torch.Generator().manual_seed(0))
    for seed in range(RUNS):
        ends, count = perturbed(offsets, chosen, seed=seed)
        assert (ends.tolist(), int(count)) == (offsets(chosen)[0].tolist(), 3000)


@pytest.mark.parametrize(
    "into_bins",
    [
        lambda x, edges: torch.bucketize(x, edges, right=True),
        lambda x, edges: torch.searchsorted(edges, x, right=True),
    ],
)
def test_exact_values_on_exact_boundaries_fall_into_one_bin(into_bins):
    """As vision models find the position of a patch; what is rounded may fall on either side."""

    def positions(count, edges):
        step = 1.0 / count
        return into_bins(torch.arange(8, dtype=torch.float32) * step, edges)

    exact, rounded = torch.arange(0.125, 1, 0.125), torch.arange(1, 7) / 7
    runs = [perturbed(positions, torch.tensor(8), exact, seed=seed) for seed in range(RUNS)]
    assert [run.tolist() for run in runs] == [list(range(8))] * RUNS
    runs = [perturbed(positions, torch.tensor(7), rounded, seed=seed) for seed in range(RUNS)]
    assert len({tuple(run.tolist()) for run in runs}) > 1


# --- decisions ------------------------------------------------------------------------------------

WEIGHT = values(8, 8, seed=3)
SMOOTH = {
    "products": lambda x: torch.softmax(F.gelu(x @ WEIGHT), -1).sum(),
    "norms": lambda x: F.silu(F.layer_norm(x, (8,))) / x.pow(2).mean().sqrt(),
    "masks of integers": lambda x: x.masked_fill(torch.arange(8) > 4, 0.0)[INDEX[0]],
    "dropped out": lambda x: F.dropout(x, 0.5),
    "backward": lambda x: torch.autograd.grad(torch.tanh(x.requires_grad_() @ WEIGHT).sum(), x)[0],
    # A convolution of an input that needs no gradient has None for it.
    "gradients of weights only": lambda x: torch.autograd.grad(
        F.conv1d(WEIGHT, weight := x[..., None].requires_grad_()).sum(), weight
    )[0],
}
DECIDES = {
    "piecewise": torch.relu,
    "comparison": lambda x: torch.where(x > 0, x, -x),
    "greatest": lambda x: x.max(-1).values,
    "cast to integers": lambda x: (8 * x).long().double(),
    "written to integers": lambda x: torch.zeros(8, 8, dtype=torch.long).copy_(8 * x).double(),
    "rounding mode": lambda x: torch.div(x, 3.0, rounding_mode="floor"),
    "number for Python": lambda x: x * x.sum().item(),
    "computed probabilities": lambda x: torch.bernoulli(torch.sigmoid(x)),
    "unknown operator": torch.linalg.inv,
}


@pytest.mark.parametrize("program", SMOOTH.values(), ids=SMOOTH)
def test_a_run_of_smooth_operators_decides_nothing(program):
    mode = PerturbMode(torch.float32, torch.float32, U32, 0)
    assert not mode.is_smooth  # nothing has run
    with mode:
        program(values(8, 8))
    assert mode.is_smooth


@pytest.mark.parametrize("program", DECIDES.values(), ids=DECIDES)
def test_a_run_with_an_operator_that_may_jump_is_not_smooth(program):
    mode = PerturbMode(torch.float32, torch.float32, U32, 0)
    with mode:
        program(values(8, 8))
    assert not mode.is_smooth
    mode.start_over()
    with mode:
        SMOOTH["products"](values(8, 8))
    assert mode.is_smooth

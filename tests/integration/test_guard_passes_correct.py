"""No pass over a correct program is called wrong, whatever the passes do to its random draws."""

from __future__ import annotations

import os

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from integration.pass_checks import checked, without_kernels
from paritas.core.compiled.passes import PassChecks
from quality.guard_program_table import run
from quality.guard_programs import PROGRAMS

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("fresh_compiler")]


WHOLE = bool(os.environ.get("PARITAS_WHOLE_CORPUS"))
RIGHT = [
    "branch_inside_the_graph",
    "causal_attention",
    "checkpointed_dropout",
    "checkpointed_dropout_with_random_numbers_of_eager",
    "convolution_batch_norm_relu_training",
    "custom_operator_that_writes",
    "empty_tensors",
    "freezing",
    "nan_from_the_inputs_and_the_formula",
    "scatter_and_index_put",
]
# Passes that others see, too, over more graphs, in another dtype, or over draws as below.
LIKE_OTHERS = [
    "adam_training",
    "autocast_bfloat16",
    "bfloat16",
    "compiled_optimizer_step",
    "dropout",
    "dropout_inside_a_model",
    "dropout_with_random_numbers_of_eager",
    "dynamic_shapes",
    "embedding_and_cross_entropy",
    "random_numbers",
    "random_numbers_of_eager",
]


@pytest.mark.one_in(3)
@pytest.mark.filterwarnings("ignore")  # what torch warns of is not the matter here
@pytest.mark.parametrize("name", [*RIGHT, *(LIKE_OTHERS if WHOLE else [])])
def test_the_passes_over_a_correct_program_are_passed_over(name):
    checks = PassChecks()
    with without_kernels(), checks.watching():
        run(PROGRAMS[name], "inductor")
    assert checks.findings == []
    assert checks.passes + checks.splits > 0


def attention(q, k, v):
    weights = (q @ k.transpose(-2, -1)).div(4.0).softmax(-1)
    return F.dropout(weights, 0.3) @ v


def many_draws(x):
    floats = torch.rand(4, 8) + torch.rand(4, 8, dtype=torch.bfloat16) * torch.randn(4, 8)
    integers = torch.randint(3, 9, (4, 8)) + torch.randint(0, 5, (4, 8), dtype=torch.int32)
    return x * floats + integers + torch.rand_like(x) + torch.bernoulli(torch.full((4, 8), 0.3))


def sampled(logits):
    noise = torch.empty_like(logits).exponential_(1.0)
    return (F.softmax(logits, dim=-1) / noise).argmax(dim=-1, keepdim=True)


@torch.compiler.nested_compile_region
def region(x, weight):
    return F.dropout((x @ weight).sin(), 0.4)


def regions(x, weight):
    return region(region(x, weight), weight) + 1


def both_branches_draw(x):
    return torch.cond(
        x.sum() > 0, lambda x: F.dropout(x.sin(), 0.5), lambda x: x * torch.rand(4, 8), (x,)
    )


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("function", "shapes", "settings"),
    [
        (attention, [(2, 2, 8, 16)] * 3, {}),
        *([(attention, [(2, 2, 8, 16)] * 3, {"fallback_random": True})] if WHOLE else []),
        (many_draws, [(4, 8)], {}),
        (many_draws, [(4, 8)], {"fallback_random": True}),
        (sampled, [(16, 50)], {"apply_gumbel_max_trick": True}),
        (regions, [(8, 8)] * 2, {}),
        (both_branches_draw, [(4, 8)], {}),
    ],
)
def test_draws_that_passes_move_and_replace_stay_the_same_draws(function, shapes, settings):
    args = [torch.randn(shape, requires_grad=function is not sampled) for shape in shapes]
    checks = checked(function, *args, **settings)
    assert checks.findings == []
    assert checks.passes > 0


def test_batch_normalisation_folded_into_a_convolution_is_passed_over():
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU()).eval()
    for _, buffer in net.named_buffers():
        if buffer.is_floating_point():
            buffer.uniform_(0.5, 2)
    checks = checked(net, torch.randn(2, 3, 8, 8), efficient_conv_bn_eval_fx_passes=True)
    assert checks.findings == []
    assert checks.passes > 0

"""Right ways to split operators: none of them may be called wrong.

Sizes are such that two, three, four and eight ranks each have something; where a rule holds for
parts of equal size only (a mean of means) the size is 24.
"""

from __future__ import annotations

import torch
from torch.nn import functional

from paritas.core.placement.placement import Divided, Range
from paritas.core.results.items import Once, Partial, Replicate, Shard
from quality.partition_corpus_making import (
    AVG,
    CAT0,
    CAT1,
    CAT2,
    CAT3,
    S0,
    S1,
    S2,
    S3,
    SUM,
    Case,
    integers,
    operator,
    rule,
    t,
)
from quality.partition_corpus_operators import (
    BINARY,
    UNARY,
    heads_apart,
    row_norm,
    vocabulary_part,
)

_BCE = functional.binary_cross_entropy_with_logits


def _elementwise():
    for name, (function, low) in UNARY.items():
        make = operator(function, t(9, 12, low=low))
        for dim in range(2):
            yield Case(f"{name} {dim}", make, rule({0: Shard(dim)}, Shard(dim)))
    for name, function in BINARY.items():
        make = operator(function, t(9, 12), t(9, 12, low=0.5))
        for dim in range(2):
            both = {0: Shard(dim), 1: Shard(dim)}
            yield Case(f"{name} {dim}", make, rule(both, Shard(dim)))
        row = operator(function, t(9, 12), t(12, low=0.5))
        yield Case(f"{name} row 0", row, rule({0: S0}, CAT0))
        yield Case(f"{name} row 1", row, rule({0: S1, 1: S0}, CAT1))


def _case(name, make, *recipes):
    for place, recipe in enumerate(recipes):
        yield Case(f"{name} option {place}", make, recipe)


def _products():
    x, w, b = t(9, 16), t(10, 16), t(10)
    yield from _case(
        "linear",
        operator(functional.linear, x, w, b),
        rule({0: S0}, CAT0),
        rule({1: S0, 2: S0}, CAT1),
        rule({0: S1, 1: S1, 2: Once()}, SUM),
        rule({0: Partial(), 2: Once()}, SUM),
        rule({}, Replicate()),
        rule({place: Replicate(summed=False) for place in range(3)}, Replicate()),
    )
    yield from _case(
        "matmul",
        operator(torch.matmul, x, t(16, 10)),
        rule({0: S0}, CAT0),
        rule({1: S1}, CAT1),
        rule({0: S1, 1: S0}, SUM),
        rule({1: Partial()}, SUM),
    )
    yield from _case(
        "bmm",
        operator(torch.bmm, t(8, 9, 16), t(8, 16, 10)),
        rule({0: S0, 1: S0}, CAT0),
        rule({0: S1}, CAT1),
        rule({1: S2}, CAT2),
        rule({0: S2, 1: S1}, SUM),
    )
    yield from _case(
        "addmm",
        operator(torch.addmm, t(9, 10), t(9, 16), t(16, 10)),
        rule({0: S0, 1: S0}, CAT0),
        rule({0: S1, 2: S1}, CAT1),
        rule({0: Once(), 1: S1, 2: S0}, SUM),
        rule({0: Partial(), 1: S1, 2: S0}, SUM),
    )
    yield from _case(
        "einsum",
        operator(torch.einsum, "bij,bjk->bik", t(8, 9, 16), t(8, 16, 10)),
        rule({1: S0, 2: S0}, CAT0),
        rule({1: S2, 2: S1}, SUM),
    )
    yield from _case("outer", operator(torch.outer, t(9), t(11)), rule({0: S0}, CAT0))
    yield from _case("dot", operator(torch.dot, t(24), t(24)), rule({0: S0, 1: S0}, SUM))


def _convolutions():
    yield from _case(
        "conv2d",
        operator(functional.conv2d, t(8, 8, 7, 7), t(10, 8, 3, 3), t(10), padding=1),
        rule({0: S0}, CAT0),
        rule({1: S0, 2: S0}, CAT1),
        rule({0: S1, 1: S1, 2: Once()}, SUM),
    )
    yield from _case(
        "conv2d in groups",
        operator(functional.conv2d, t(2, 16, 6, 6), t(24, 2, 3, 3), t(24), groups=8),
        rule(
            {0: Shard(1, unit=2), 1: Shard(0, unit=3), 2: Shard(0, unit=3)},
            CAT1,
            numbers={"groups": Divided()},
        ),
    )
    yield from _case(
        "conv1d with a halo",
        operator(functional.conv1d, t(2, 3, 26), t(4, 3, 3)),
        rule({0: Shard(2, halo=(0, 2))}, CAT2),
    )
    yield from _case(
        "conv_transpose2d",
        operator(functional.conv_transpose2d, t(8, 8, 5, 5), t(8, 10, 3, 3), t(10)),
        rule({0: S0}, CAT0),
        rule({1: S1, 2: S0}, CAT1),
        rule({0: S1, 1: S0, 2: Once()}, SUM),
    )
    yield from _case(
        "conv3d",
        operator(functional.conv3d, t(8, 2, 4, 4, 4), t(8, 2, 3, 3, 3)),
        rule({0: S0}, CAT0),
        rule({1: S0}, CAT1),
    )
    yield from _case(
        "max_pool2d",
        operator(functional.max_pool2d, t(8, 8, 4, 4, distinct=True), 2),
        rule({0: S0}, CAT0),
        rule({0: S1}, CAT1),
    )
    yield from _case(
        "avg_pool1d",
        operator(functional.avg_pool1d, t(8, 9, 16), 2),
        rule({0: S0}, CAT0),
        rule({0: S1}, CAT1),
        rule({0: Shard(2, unit=2)}, CAT2),
        rule({0: Partial()}, SUM),
    )
    yield from _case(
        "interpolate",
        operator(functional.interpolate, t(8, 9, 8), scale_factor=2.0, mode="nearest"),
        rule({0: S0}, CAT0),
        rule({0: S1}, CAT1),
        rule({0: S2}, CAT2),
    )


def _norms():
    norm = operator(functional.layer_norm, t(9, 10, 16), (16,), t(16), t(16))
    yield from _case("layer_norm", norm, rule({0: S0}, CAT0), rule({0: S1}, CAT1))
    yield from _case(
        "rms_norm",
        operator(functional.rms_norm, t(9, 10, 16), (16,), t(16)),
        rule({0: S0}, CAT0),
        rule({0: S1}, CAT1),
    )
    yield from _case(
        "group_norm",
        operator(functional.group_norm, t(8, 16, 9), 8, t(16), t(16)),
        rule({0: S0}, CAT0),
        rule(
            {0: Shard(1, unit=2), 2: Shard(0, unit=2), 3: Shard(0, unit=2)},
            CAT1,
            numbers={1: Divided()},
        ),
    )
    training = operator(
        functional.batch_norm,
        t(8, 9, 5),
        t(9),
        t(9, low=0.5),
        t(9),
        t(9),
        without=(1, 2),
        training=True,
    )
    yield from _case(
        "batch_norm in training",
        training,
        rule({0: S1, 1: S0, 2: S0, 3: S0, 4: S0}, CAT1),
    )
    frozen = operator(functional.batch_norm, t(8, 9, 8), t(9), t(9, low=0.5), without=(1, 2))
    yield from _case(
        "batch_norm in evaluation",
        frozen,
        rule({0: S0}, CAT0),
        rule({0: S2}, CAT2),
        rule({0: S1, 1: S0, 2: S0}, CAT1),
    )
    yield from _case(
        "instance_norm",
        operator(functional.instance_norm, t(8, 9, 10)),
        rule({0: S0}, CAT0),
        rule({0: S1}, CAT1),
    )
    for name, function in (("softmax", torch.softmax), ("log_softmax", torch.log_softmax)):
        yield from _case(
            name, operator(function, t(9, 10, 12), dim=1), rule({0: S0}, CAT0), rule({0: S2}, CAT2)
        )
    yield from _case("a norm of its own", operator(row_norm, t(9, 16)), rule({0: S0}, CAT0))


def _reductions():
    yield from _case(
        "sum",
        operator(torch.sum, t(9, 24), dim=1),
        rule({0: S0}, CAT0),
        rule({0: S1}, SUM),
        rule({0: Partial()}, SUM),
    )
    yield from _case(
        "mean",
        operator(torch.mean, t(24, 24), dim=1),
        rule({0: S0}, CAT0),
        rule({0: S1}, AVG),
        rule({0: Partial("avg")}, AVG),
    )
    yield from _case("mean of all", operator(torch.mean, t(24, 5)), rule({0: S0}, AVG))
    yield from _case(
        "amax",
        operator(torch.amax, t(9, 16, distinct=True), dim=1),
        rule({0: S0}, CAT0),
        rule({0: S1}, Partial("max")),
    )
    yield from _case(
        "amin", operator(torch.amin, t(9, 16, distinct=True), dim=1), rule({0: S1}, Partial("min"))
    )
    yield from _case(
        "prod",
        operator(torch.prod, t(9, 12, low=0.5), dim=1),
        rule({0: S0}, CAT0),
        rule({0: S1}, Partial("product")),
    )
    yield from _case("var", operator(torch.var, t(9, 12), dim=1), rule({0: S0}, CAT0))
    yield from _case("logsumexp", operator(torch.logsumexp, t(9, 12), dim=1), rule({0: S0}, CAT0))
    for name, function in (("cumsum", torch.cumsum), ("cumprod", torch.cumprod)):
        yield from _case(name, operator(function, t(9, 12), dim=1), rule({0: S0}, CAT0))
    yield from _case(
        "sort", operator(torch.sort, t(9, 16, distinct=True), dim=1), rule({0: S0}, CAT0, CAT0)
    )
    yield from _case(
        "topk", operator(torch.topk, t(9, 16, distinct=True), 3), rule({0: S0}, CAT0, CAT0)
    )
    yield from _case(
        "argmax", operator(torch.argmax, t(9, 16, distinct=True), dim=1), rule({0: S0}, CAT0)
    )
    yield from _case("flip", operator(torch.flip, t(9, 12), [1]), rule({0: S0}, CAT0))


def _lookups():
    ids = integers(24, 9, 10)
    yield from _case(
        "embedding",
        operator(functional.embedding, ids, t(24, 16)),
        rule({0: S0}, CAT0),
        rule({0: S1}, CAT1),
        rule({1: S1}, CAT2),
    )
    yield from _case(
        "a vocabulary in parts",
        operator(vocabulary_part, ids, t(24, 16), start=0, stop=24),
        rule({1: S0}, SUM, numbers={"start": Range(1, "begin"), "stop": Range(1, "end")}),
    )
    yield from _case(
        "index_select",
        operator(torch.index_select, t(9, 12), 0, integers(9, 10)),
        rule({0: S1}, CAT1),
        rule({2: S0}, CAT0),
    )
    yield from _case(
        "gather",
        operator(torch.gather, t(9, 12), 1, integers(12, 9, 4)),
        rule({0: S0, 2: S0}, CAT0),
    )
    yield from _case(
        "where",
        operator(torch.where, integers(2, 9, 12).bool(), t(9, 12), t(9, 12)),
        rule({0: S0, 1: S0, 2: S0}, CAT0),
        rule({0: S1, 1: S1, 2: S1}, CAT1),
    )


def _losses():
    classes = integers(12, 24)
    for reduction, combined in (("none", CAT0), ("sum", SUM), ("mean", AVG)):
        both = rule({0: S0, 1: S0}, combined)
        for name, function, target in (
            ("cross_entropy", functional.cross_entropy, classes),
            ("nll_loss", functional.nll_loss, classes),
            ("mse_loss", functional.mse_loss, t(24, 12)),
            ("smooth_l1_loss", functional.smooth_l1_loss, t(24, 12)),
            ("binary_cross_entropy_with_logits", _BCE, t(24, 12, low=0.0)),
        ):
            make = operator(function, t(24, 12), target, reduction=reduction)
            yield Case(f"{name} {reduction}", make, both)


def _shapes():
    yield from _case(
        "transpose",
        operator(torch.transpose, t(9, 10, 12), 0, 2),
        rule({0: S0}, CAT2),
        rule({0: S1}, CAT1),
        rule({0: S2}, CAT0),
    )
    yield from _case(
        "reshape",
        operator(torch.reshape, t(9, 24), (9, 8, 3)),
        rule({0: S0}, CAT0, numbers={1: Divided(0)}),
        rule({0: Shard(1, unit=3)}, CAT1, numbers={1: Divided(1)}),
    )
    yield from _case(
        "heads apart",
        operator(heads_apart, t(9, 10, 24), heads=8),
        rule({0: Shard(2, unit=3)}, CAT1, numbers={"heads": Divided()}),
    )
    yield from _case("cat", operator(torch.cat, [t(9, 10), t(9, 12)], 1), rule({0: S0}, CAT0))
    yield from _case(
        "stack",
        operator(torch.stack, [t(9, 10), t(9, 10)]),
        rule({0: S0}, CAT1),
        rule({0: S1}, CAT2),
        rule({0: Partial()}, SUM),
    )
    yield from _case("chunk", operator(torch.chunk, t(9, 12), 2, 1), rule({0: S0}, CAT0, CAT0))
    qkv = [t(8, 8, 9, 16) for _ in range(3)]
    yield from _case(
        "attention",
        operator(functional.scaled_dot_product_attention, *qkv),
        rule({0: S0, 1: S0, 2: S0}, CAT0),
        rule({0: S1, 1: S1, 2: S1}, CAT1),
        rule({0: S2}, CAT2),
        rule({2: S3}, CAT3),
        rule({2: Partial()}, SUM),
    )
    yield from _case(
        "dropout",
        operator(functional.dropout, t(9, 12), p=0.4),
        rule({0: S0}, CAT0),
        rule({0: S1}, CAT1),
    )
    yield from _case("relu_", operator(functional.relu_, t(9, 12)), rule({0: S0}, CAT0))


RIGHT = [
    case
    for group in (
        _elementwise,
        _products,
        _convolutions,
        _norms,
        _reductions,
        _lookups,
        _losses,
        _shapes,
    )
    for case in group()
]

"""Wrong ways to split operators, each of which somebody has written: all must be called wrong.

Where a fault is in one rank's own code, the operator is given where its part begins.
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
    S0,
    S1,
    S2,
    SUM,
    Case,
    integers,
    operator,
    rule,
    t,
)
from quality.partition_corpus_operators import (
    Later,
    all_lost,
    counting,
    doubled,
    heads_apart,
    lower_triangle,
    masked_mean,
    mean_and_shape,
    off_the_mean,
    one_column_lost,
    one_column_wrong,
    row_norm,
    rows_flipped,
    rows_in_reverse,
    rows_of_another,
    running_maximum,
    scaled,
    shifted,
    sorted_rows,
    vocabulary_part,
)

BEGIN = {"start": Range(0, "begin")}
BOTH = {"start": Range(0, "begin"), "stop": Range(0, "end")}
OWN = Replicate(summed=False)
MAX, MIN, PRODUCT = Partial("max"), Partial("min"), Partial("product")


# --- one rank's own code ----------------------------------------------------------------------

_LATER = {
    "a scale of 1e-6 on one rank": Later(scaled),
    "a scale of 1e-6 in one rank's gradient": Later(scaled, backward=True),
    "a shift of 1e-6 on one rank": Later(shifted),
    "one element wrong on one rank": Later(one_column_wrong),
    "a gradient that stops on one rank": Later(torch.detach),
    "a gradient summed twice on one rank": Later(doubled, backward=True),
    "a gradient of the wrong sign on one rank": Later(torch.neg, backward=True),
    "a NaN on one rank": Later(one_column_lost),
    "rows shuffled on one rank": Later(rows_flipped),
    "a NaN in one rank's gradient": Later(all_lost, backward=True),
}


def _of_one_rank():
    for name, function in _LATER.items():
        make = operator(function, t(9, 12), start=0)
        yield Case(name, make, rule({0: S0}, CAT0, numbers=BEGIN))
    like, x = t(10, 6), t(10, 6)
    halves = rule({0: S0}, CAT0, numbers=BOTH)
    yield Case(
        "the rows of another rank", operator(rows_of_another, like, x, start=0, stop=10), halves
    )
    yield Case(
        "parts in the wrong order", operator(rows_in_reverse, like, x, start=0, stop=10), halves
    )
    yield Case(
        "a buffer that each rank adds its own part to",
        operator(counting, t(8, 5), t(5), without=(1,)),
        rule({0: S0}, CAT0),
    )


# --- operators that mix what is split -------------------------------------------------------------

_MIXING: dict[str, tuple] = {
    "flip": (torch.flip, [1]),
    "roll": (torch.roll, 1, 1),
    "cumsum": (torch.cumsum, 1),
    "cumprod": (torch.cumprod, 1),
    "softmax": (torch.softmax, 1),
    "log_softmax": (torch.log_softmax, 1),
    "a norm of its own": (row_norm,),
    "normalize": (functional.normalize,),
    "cummax": (running_maximum,),
    "difference from the mean": (off_the_mean,),
    "logcumsumexp": (torch.logcumsumexp, 1),
    "sort": (sorted_rows,),
    "lower triangle": (lower_triangle,),
}


def _mixing():
    for name, (function, *more) in _MIXING.items():
        yield Case(
            f"{name} over the split", operator(function, t(9, 12), *more), rule({0: S1}, CAT1)
        )
    yield Case(
        "sort with its indices", operator(torch.sort, t(9, 12), dim=1), rule({0: S1}, CAT1, CAT1)
    )
    size = {1: Divided(0)}
    yield Case(
        "layer_norm over the split",
        operator(functional.layer_norm, t(9, 12), (12,)),
        rule({0: S1}, CAT1, numbers=size),
    )
    yield Case(
        "rms_norm over the split",
        operator(functional.rms_norm, t(9, 12), (12,)),
        rule({0: S1}, CAT1, numbers=size),
    )
    yield Case(
        "instance_norm over the split",
        operator(functional.instance_norm, t(2, 4, 12)),
        rule({0: S2}, CAT2),
    )
    yield Case(
        "group_norm with all groups on each rank",
        operator(functional.group_norm, t(2, 16, 5), 8),
        rule({0: S1}, CAT1),
    )
    statistics = operator(
        functional.batch_norm, t(8, 6), t(6), t(6, low=0.5), without=(1, 2), training=True
    )
    yield Case("batch_norm over the batch", statistics, rule({0: S0}, CAT0))
    yield Case(
        "interpolate over the split",
        operator(functional.interpolate, t(2, 3, 8), scale_factor=2.0, mode="linear"),
        rule({0: S2}, CAT2),
    )
    qkv = [t(2, 2, 8, 4) for _ in range(3)]
    attention = functional.scaled_dot_product_attention
    yield Case("attention over its keys", operator(attention, *qkv), rule({1: S2, 2: S2}, SUM))
    yield Case(
        "causal attention over its queries",
        operator(attention, *qkv, is_causal=True),
        rule({0: S2}, CAT2),
    )
    yield Case(
        "gather along the split",
        operator(torch.gather, t(9, 12), 1, integers(6, 9, 12)),
        rule({0: S1, 2: S1}, CAT1),
    )
    yield Case(
        "classes of a cross entropy",
        operator(functional.cross_entropy, t(8, 12), integers(6, 8)),
        rule({0: S1}, SUM),
    )


# --- how parts are put together -------------------------------------------------------------------


def _combining():
    linear = operator(functional.linear, t(9, 16), t(10, 16), t(10))
    plain = operator(functional.linear, t(9, 16), t(10, 16))
    k = {0: S1, 1: S1}
    yield Case("a bias on each rank", linear, rule(k, SUM))
    yield Case("a bias on each rank, averaged", linear, rule(k, AVG))
    yield Case("a missing reduction", plain, rule(k, Replicate()))
    yield Case("terms side by side", plain, rule(k, CAT1))
    yield Case("an average for a sum", plain, rule(k, AVG))
    yield Case("the largest for a sum", plain, rule(k, MAX))
    yield Case("a product for a sum", plain, rule(k, PRODUCT))
    yield Case("columns added up", plain, rule({1: S0}, SUM))
    yield Case("columns for rows", operator(torch.matmul, t(8, 6), t(6, 8)), rule({1: S1}, CAT0))
    yield Case("an extra reduction", plain, rule({}, SUM))
    yield Case(
        "only one side split", operator(torch.matmul, t(9, 16), t(16, 10)), rule({0: S1}, SUM)
    )
    yield Case(
        "the added matrix on each rank",
        operator(torch.addmm, t(9, 10), t(9, 16), t(16, 10)),
        rule({1: S1, 2: S0}, SUM),
    )
    yield Case("a result too few", operator(mean_and_shape, t(8, 5)), rule({0: S0}, CAT0))
    yield Case("a result too many", operator(torch.sin, t(8, 5)), rule({0: S0}, CAT0, CAT0))
    rows = t(8, 12, distinct=True)
    yield Case("a sum for the largest", operator(torch.amax, rows, dim=1), rule({0: S1}, SUM))
    yield Case("the least for the largest", operator(torch.amax, rows, dim=1), rule({0: S1}, MIN))
    yield Case("a sum for an average", operator(torch.mean, t(8, 12), dim=1), rule({0: S1}, SUM))
    yield Case(
        "a sum for a product", operator(torch.prod, t(8, 12, low=0.5), dim=1), rule({0: S1}, SUM)
    )
    yield Case(
        "an average for a variance", operator(torch.var, t(8, 12), dim=1), rule({0: S1}, AVG)
    )
    yield Case(
        "a sum for a logsumexp", operator(torch.logsumexp, t(8, 12), dim=1), rule({0: S1}, SUM)
    )
    yield Case(
        "a norm added up", operator(torch.linalg.vector_norm, t(8, 12), dim=1), rule({0: S1}, SUM)
    )
    yield Case("the largest index", operator(torch.argmax, rows, dim=1), rule({0: S1}, MAX))
    yield Case("an uneven mean", operator(torch.mean, t(9, 5)), rule({0: S0}, AVG))
    yield Case(
        "heads cut across", operator(heads_apart, t(4, 5, 12), heads=4), rule({0: Shard(2)}, CAT1)
    )
    yield Case(
        "a square's other side", operator(torch.transpose, t(8, 8), 0, 1), rule({0: S0}, CAT0)
    )


def _losses():
    targets = integers(5, 12)
    ignored = targets.masked_fill(torch.arange(12) % 5 == 0, -100)
    entropy, scores = functional.cross_entropy, t(12, 5)
    both = {0: S0, 1: S0}
    yield Case("a mean with ignored targets", operator(entropy, scores, ignored), rule(both, AVG))
    yield Case(
        "a mean with weighted targets",
        operator(entropy, scores, targets, weight=t(5, low=0.2), without=("weight",)),
        rule(both, AVG),
    )
    yield Case(
        "a likelihood's mean with ignored targets",
        operator(functional.nll_loss, scores, ignored),
        rule(both, AVG),
    )
    yield Case(
        "a mean loss added up", operator(functional.mse_loss, scores, t(12, 5)), rule(both, SUM)
    )
    yield Case(
        "a loss's sum averaged",
        operator(functional.mse_loss, scores, t(12, 5), reduction="sum"),
        rule(both, AVG),
    )
    mask = torch.tensor([1.0, 1, 1, 1, 1, 1, 0, 0, 1, 0, 0, 0])
    yield Case(
        "a masked mean", operator(masked_mean, t(12), mask.double(), without=(1,)), rule(both, AVG)
    )
    yield Case(
        "a mean of a batch of uneven parts",
        operator(entropy, t(9, 5), targets[:9]),
        rule(both, AVG),
    )


def _halos():
    conv = operator(functional.conv1d, t(2, 3, 16), t(4, 3, 3))
    padded = operator(functional.conv1d, t(2, 3, 16), t(4, 3, 3), padding=1)
    yield Case("no halo", conv, rule({0: S2}, CAT2))
    yield Case("no halo where padding hides it", padded, rule({0: S2}, CAT2))
    yield Case("half of a halo", conv, rule({0: Shard(2, halo=(0, 1))}, CAT2))
    yield Case("too much halo", conv, rule({0: Shard(2, halo=(1, 2))}, CAT2))
    yield Case(
        "a halo on the wrong side where sizes agree",
        padded,
        rule({0: Shard(2, halo=(0, 0), unit=2)}, CAT2),
    )
    pool = operator(functional.avg_pool1d, t(2, 3, 16), 3, 1, 1)
    yield Case("overlapping windows", pool, rule({0: S2}, CAT2))
    image = operator(functional.conv2d, t(2, 8, 5, 5), t(6, 8, 3, 3), t(6))
    yield Case("a convolution's bias on each rank", image, rule({0: S1, 1: S1}, SUM))
    yield Case("a convolution's terms side by side", image, rule({0: S1, 1: S1, 2: Once()}, CAT1))
    groups = operator(functional.conv2d, t(2, 8, 5, 5), t(8, 2, 3, 3), groups=4)
    yield Case("all groups on each rank", groups, rule({0: S1, 1: S0}, CAT1))


# --- what is partial, and whose gradient is whose -------------------------------------------------


def _partial():
    for name, function in (
        ("relu", torch.relu),
        ("gelu", functional.gelu),
        ("abs", torch.abs),
        ("sigmoid", torch.sigmoid),
    ):
        yield Case(f"{name} of terms", operator(function, t(8, 6)), rule({0: Partial()}, SUM))
    yield Case("softmax of terms", operator(torch.softmax, t(8, 6), 1), rule({0: Partial()}, SUM))
    yield Case(
        "a product of terms",
        operator(torch.mul, t(8, 6), t(8, 6)),
        rule({0: Partial(), 1: Partial()}, SUM),
    )
    yield Case(
        "something added to terms", operator(torch.add, t(8, 6), t(8, 6)), rule({0: Partial()}, SUM)
    )
    yield Case(
        "averaged terms added up", operator(torch.neg, t(8, 6)), rule({0: Partial("avg")}, SUM)
    )
    yield Case("terms averaged", operator(torch.neg, t(8, 6)), rule({0: Partial()}, AVG))
    yield Case(
        "the largest of what is turned around",
        operator(torch.neg, t(8, 6)),
        rule({0: Partial("max")}, MAX),
    )
    yield Case(
        "terms taken for the whole", operator(torch.neg, t(8, 6)), rule({0: Partial()}, Replicate())
    )


def _gradients():
    linear = operator(functional.linear, t(9, 16), t(10, 16), t(10))
    norm = operator(functional.layer_norm, t(9, 16), (16,), t(16), t(16))
    yield Case("a weight's gradient not reduced", linear, rule({0: S0, 1: OWN}, CAT0))
    yield Case("a bias's gradient not reduced", linear, rule({0: S0, 2: OWN}, CAT0))
    yield Case("an input's gradient not reduced", linear, rule({0: OWN, 1: S0, 2: S0}, CAT1))
    yield Case("a norm's weight not reduced", norm, rule({0: S0, 2: OWN}, CAT0))
    yield Case("a norm's bias not reduced", norm, rule({0: S0, 3: OWN}, CAT0))
    yield Case(
        "an embedding's gradient not reduced",
        operator(functional.embedding, integers(12, 8, 5), t(12, 6)),
        rule({0: S0, 1: OWN}, CAT0),
    )


def _vocabulary():
    ids, weight = integers(24, 6, 5), t(24, 8)
    make = operator(vocabulary_part, ids, weight, start=0, stop=24)
    yield Case(
        "a vocabulary without its beginning",
        make,
        rule({1: S0}, SUM, numbers={"stop": Range(1, "end")}),
    )
    yield Case(
        "a vocabulary averaged",
        make,
        rule({1: S0}, AVG, numbers={"start": Range(1, "begin"), "stop": Range(1, "end")}),
    )
    yield Case(
        "ids of others looked up",
        operator(functional.embedding, ids % 12, weight),
        rule({1: S0}, SUM),
    )
    yield Case(
        "ids that a rank has not", operator(functional.embedding, ids, weight), rule({1: S0}, SUM)
    )


WRONG = [
    case
    for group in (
        _of_one_rank,
        _mixing,
        _combining,
        _losses,
        _halos,
        _partial,
        _gradients,
        _vocabulary,
    )
    for case in group()
]

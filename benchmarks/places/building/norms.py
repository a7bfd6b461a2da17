"""Faults for building: norms, statistics and reductions."""

from __future__ import annotations

import math
from typing import Any

from benchmarks.places.calls import Call, Catalogue, fits

FAULTS = Catalogue()


@FAULTS.fault(
    "layer_norm rms_norm batch_norm group_norm batch_norm_from_statistics",
    kinds=["eps"],
    loose=["axis scale", "wrong argument"],
)
def eps_a_thousand_times_larger(call: Call) -> Any:
    """1e-2 instead of 1e-5."""
    place = {"layer_norm": 4, "rms_norm": 3, "batch_norm": 7, "group_norm": 4}.get(call.name, 6)
    fits(call.name != "batch_norm" or not call.get(5, "training", default=False))
    eps = call.get(place, "eps", default=1e-5)
    return call.put(place, 1000 * (eps or 1e-6), "eps").run()


@FAULTS.fault(
    "var std var_mean",
    kinds=["off by one reduction", "scale", "wrong statistics"],
    loose=["wrong argument", "wrong factor"],
)
def other_divisor_of_the_variance(call: Call) -> Any:
    """Divided by n instead of n - 1, or the other way round."""
    value = call.tensor(0)
    correction = call.kwargs.get("correction", 1)
    if "unbiased" in call.kwargs:
        correction = int(call.kwargs["unbiased"])
    dim = call.get(1, "dim", default=None)
    sizes = math.prod(value.shape[d] for d in ([dim] if isinstance(dim, int) else dim or range(
        value.dim())))  # fmt: skip
    now = max(sizes - correction, 1) / max(sizes - (1 - correction), 1)
    return call.instead(call.result() * (now if call.name != "std" else math.sqrt(now)))


@FAULTS.fault(
    "mean",
    kinds=["scale", "wrong factor", "wrong reduction"],
    loose=["missing reduction", "off by one reduction", "other function"],
)
def mean_without_division(call: Call) -> Any:
    """The sum."""
    value, result = call.tensor(0), call.result()
    return call.instead(result * (value.numel() / result.numel()))


@FAULTS.fault("sum mean", kinds=["off by one reduction", "partial sum", "tail"])
def last_element_not_added(call: Call) -> Any:
    """A loop that ends one too early."""
    value, dim = call.tensor(0), call.get(1, "dim")
    dim = dim[0] if isinstance(dim, list | tuple) and len(dim) == 1 else dim
    fits(isinstance(dim, int) and value.shape[dim] >= 3)
    short = value.narrow(dim, 0, value.shape[dim] - 1)
    share = 1.0 if call.name == "sum" else (value.shape[dim] - 1) / value.shape[dim]
    return call.instead(call.put(0, short).run() * share)


@FAULTS.fault("layer_norm rms_norm", kinds=["eps"], loose=["axis scale"])
def eps_outside_the_root(call: Call) -> Any:
    """Divided by sqrt(v) + eps."""
    value, shape = call.tensor(0), call.get(1)
    axes = list(range(-len(shape), 0))
    weight, bias = call.get(2, "weight"), call.get(3, "bias") if call.name == "layer_norm" else None
    eps = call.get(4 if call.name == "layer_norm" else 3, "eps") or 1e-5
    centred = value - value.mean(axes, keepdim=True) if call.name == "layer_norm" else value
    normal = centred / ((centred * centred).mean(axes, keepdim=True).sqrt() + eps)
    normal = normal if weight is None else normal * weight
    return call.instead(normal if bias is None else normal + bias)


@FAULTS.fault("rsqrt", kinds=["eps"], loose=["axis scale"])
def eps_added_again(call: Call) -> Any:
    """1 / (sqrt(x) + 1e-4)."""
    return call.instead(1 / (call.tensor(0).sqrt() + 1e-4))


@FAULTS.fault("group_norm", kinds=["wrong argument", "wrong statistics"])
def other_number_of_groups(call: Call) -> Any:
    """Half as many groups."""
    groups = call.get(1, "num_groups")
    fits(groups % 2 == 0)
    return call.put(1, groups // 2, "num_groups").run()


@FAULTS.fault(
    "batch_norm batch_norm_from_statistics",
    kinds=["axis offset", "wrong statistics", "wrong index"],
    loose=["wrong argument"],
)
def statistics_of_the_neighbouring_channel(call: Call) -> Any:
    """Mean of the next channel."""
    place = 1 if call.name == "batch_norm" else 3
    return call.put(place, call.tensor(place).roll(1), "running_mean").run()


@FAULTS.fault("mean sum amax", kinds=["wrong axis"], loose=["wrong argument"])
def reduced_over_the_wrong_axis(call: Call) -> Any:
    """Another axis of the same length."""
    value, dim = call.tensor(0), call.get(1, "dim")
    dim = dim[0] if isinstance(dim, list | tuple) and len(dim) == 1 else dim
    fits(isinstance(dim, int))
    dim %= value.dim()
    others = [i for i in range(value.dim()) if i != dim and value.size(i) == value.size(dim) > 1]
    fits(others)
    return call.put(0, value.transpose(dim, others[-1])).run()


@FAULTS.fault("mean", kinds=["scale", "off by one reduction", "wrong factor"])
def mean_divided_by_one_less(call: Call) -> Any:
    """N - 1."""
    n = call.tensor(0).numel() // call.result().numel()
    fits(n > 2)
    return call.instead(call.result() * (n / (n - 1)))


@FAULTS.fault("sum", kinds=["off by one reduction", "partial sum", "tail"])
def first_element_not_added(call: Call) -> Any:
    """A loop that begins at 1."""
    value, dim = call.tensor(0), call.get(1, "dim")
    dim = dim[0] if isinstance(dim, list | tuple) and len(dim) == 1 else dim
    fits(isinstance(dim, int) and value.size(dim) > 2)
    return call.put(0, value.narrow(dim, 1, value.size(dim) - 1)).run()

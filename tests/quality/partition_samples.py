"""Calls of the operators that the library of annotations knows, by the last part of their names.

Sizes are multiples of 2 and of 3 where a split must be even, and no two dimensions of a tensor are
equally long unless the operator wants it.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

_GENERATOR = torch.Generator().manual_seed(20240607)


@dataclasses.dataclass(frozen=True)
class Sample:
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    without_gradient: frozenset[int | str] = frozenset()


def call(*args: Any, **kwargs: Any) -> Sample:
    return Sample(args, kwargs)


def still(sample: Sample, *places: int | str) -> Sample:
    """A call of which some arguments have no gradient: torch has none, or wants none, for them."""
    return dataclasses.replace(sample, without_gradient=frozenset(places))


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=_GENERATOR, dtype=torch.float64)


def between(low: float, high: float, *shape: int) -> torch.Tensor:
    drawn = torch.rand(shape, generator=_GENERATOR, dtype=torch.float64)
    return drawn * (high - low) + low


def whole(low: int, high: int, *shape: int) -> torch.Tensor:
    return torch.randint(low, high, shape, generator=_GENERATOR)


def mask(*shape: int) -> torch.Tensor:
    return whole(0, 2, *shape).bool()


def definite(*shape: int) -> torch.Tensor:
    matrix = normal(*shape)
    return matrix @ matrix.mT + 3 * torch.eye(shape[-1], dtype=torch.float64)


def signs(*shape: int) -> torch.Tensor:
    return (whole(0, 2, *shape) * 2 - 1).double()


def unary() -> dict[str, list[Sample]]:
    inner = (
        "abs absolute neg negative positive exp exp2 expm1 sqrt square sin cos tan asin acos atan "
        "sinh cosh tanh asinh atanh sigmoid erf erfc erfinv ceil floor trunc frac sign sgn lgamma "
        "digamma i0 sinc deg2rad rad2deg isnan isinf isfinite isposinf isneginf signbit relu selu "
        "arcsin arccos arctan detach softsign tanhshrink logsigmoid float double half bfloat16 int "
        "long bool expit ndtr silu mish hardswish hardsigmoid alias log log2 log10 log1p rsqrt "
        "reciprocal round logit nan_to_num clone contiguous relu6 zeros_like ones_like gelu "
        "_to_copy"
    )
    samples = {name: [call(between(0.1, 0.9, 6, 4))] for name in inner.split()}
    for name in ["relu", "silu", "gelu", "tanh", "abs", "round", "floor"]:
        samples[name].append(call(normal(6, 1, 4) * 3))
    samples["acosh"] = [call(between(1.5, 3.0, 6, 4))]
    samples["logical_not"] = [call(mask(6, 4))]
    samples["bitwise_not"] = [call(whole(0, 9, 6, 4))]
    for name in ["elu", "celu", "leaky_relu", "softplus", "hardshrink", "softshrink", "hardtanh"]:
        samples[name] = [call(normal(6, 4)), call(normal(2, 6, 3), 0.7)]
    samples["threshold"] = [call(normal(6, 4), 0.1, 20.0)]
    samples["type"] = [call(normal(6, 4), torch.float32)]
    samples["to"] = [call(normal(6, 4), torch.float32)]
    samples["dropout"] = [call(normal(6, 4), 0.5, False), call(normal(6, 4), 0.3, True)]
    for count in (1, 2, 3):
        x = normal(6, 4, *(2, 3, 2)[:count])
        samples[f"dropout{count}d"] = [call(x, 0.5, training) for training in (False, True)]
    samples["prelu"] = [call(normal(4, 6, 3), normal(6)), call(normal(4, 6), normal(1))]
    samples["glu"] = [call(normal(6, 4, 3), 1), call(normal(6, 4))]
    return samples


def binary() -> dict[str, list[Sample]]:
    floats = (
        "maximum minimum fmax fmin atan2 arctan2 remainder fmod hypot eq ne lt le gt ge greater "
        "greater_equal less less_equal not_equal copysign logaddexp logaddexp2 xlogy "
        "float_power mul multiply true_divide add sub subtract rsub div divide isclose"
    )
    samples = {
        name: [
            call(between(0.5, 3, 6, 4), between(0.5, 3, 6, 4)),
            call(between(0.5, 3, 6, 1, 4), between(0.5, 3, 3, 1)),
        ]
        for name in floats.split()
    }
    for name in ["add", "mul", "sub", "div"]:
        samples[name].append(call(normal(6, 4), 2.0))
    for name in ["logical_and", "logical_or", "logical_xor"]:
        samples[name] = [call(mask(6, 4), mask(4))]
    for name in ["bitwise_and", "bitwise_or", "bitwise_xor"]:
        samples[name] = [call(whole(0, 9, 6, 4), whole(0, 9, 4))]
    samples["floor_divide"] = [still(call(normal(6, 4), between(0.5, 3, 4)), 0, 1)]
    samples["ldexp"] = [call(normal(6, 4), whole(0, 3, 4))]
    samples["pow"] = [call(between(0.5, 2, 6, 4), 2.5), call(between(0.5, 2, 6, 4), normal(4))]
    samples["lerp"] = [
        call(normal(6, 4), normal(6, 4), 0.3),
        call(normal(6, 4), normal(4), normal(6, 1)),
    ]
    for name in ["addcmul", "addcdiv"]:
        samples[name] = [call(normal(6, 4), normal(6, 1), between(1, 2, 4), value=0.5)]
    for name in ["clamp", "clip"]:
        samples[name] = [call(normal(6, 4), -0.5, 0.5), call(normal(6, 4), min=normal(4) - 1)]
    samples["masked_fill"] = [
        call(normal(6, 4), mask(4), 1.5),
        call(normal(2, 6, 4), mask(6, 1), 0.0),
    ]
    samples["where"] = [
        call(mask(6, 4), normal(6, 4), normal(6, 4)),
        call(mask(1, 1, 9, 9), normal(1, 12, 9, 9), normal(1)),
    ]
    samples["type_as"] = [call(normal(6, 4), normal(6, 4).float())]
    samples["expand_as"] = [call(normal(6, 1), normal(2, 6, 4))]
    return samples


def products() -> dict[str, list[Sample]]:
    matrices = [call(normal(4, 6), normal(6, 3))]
    stacks = [call(normal(3, 4, 6), normal(3, 6, 2))]
    vectors = [call(normal(6), normal(6))]
    return {
        "matmul": [*matrices, *stacks, *vectors, call(normal(4, 6), normal(6)),
                   call(normal(6), normal(6, 3)), call(normal(2, 1, 4, 6), normal(3, 6, 2))],
        "__matmul__": matrices,
        "mm": matrices,
        "bmm": stacks,
        "mv": [call(normal(4, 6), normal(6))],
        "dot": vectors,
        "vdot": vectors,
        "inner": [*vectors, call(normal(4, 6), normal(3, 6))],
        "outer": [call(normal(4), normal(6))],
        "ger": [call(normal(4), normal(6))],
        "addmm": [call(normal(4, 3), normal(4, 6), normal(6, 3)),
                  call(normal(3), normal(4, 6), normal(6, 3), beta=0.5, alpha=2.0)],
        "addmv": [call(normal(4), normal(4, 6), normal(6))],
        "addr": [call(normal(4, 6), normal(4), normal(6))],
        "baddbmm": [call(normal(3, 4, 2), normal(3, 4, 6), normal(3, 6, 2))],
        "addbmm": [call(normal(4, 2), normal(3, 4, 6), normal(3, 6, 2))],
        "linear": [call(normal(4, 6), normal(3, 6)), call(normal(2, 4, 6), normal(3, 6), normal(3)),
                   call(normal(4, 6), normal(3, 6), bias=normal(3))],
        "bilinear": [call(normal(4, 6), normal(4, 3), normal(2, 6, 3), normal(2))],
        "einsum": [call("bij,bjk->bik", normal(2, 4, 6), normal(2, 6, 3)),
                   call("ij,j", normal(4, 6), normal(6)), call("ij->", normal(4, 6))],
        "tensordot": [call(normal(4, 6, 3), normal(6, 3, 2)),
                      call(normal(4, 6), normal(2, 6), dims=([1], [1]))],
        "cdist": [call(normal(4, 6), normal(3, 6)), call(normal(2, 4, 6), normal(2, 3, 6), p=1.0)],
    }  # fmt: skip


def convolutions() -> dict[str, list[Sample]]:
    samples: dict[str, list[Sample]] = {}
    for count in (1, 2, 3):
        space, kernel = (5, 4, 3)[:count], (3, 2, 2)[:count]
        x, many = normal(2, 6, *space), normal(3, 12, *space)
        samples[f"conv{count}d"] = [
            call(x, normal(4, 6, *kernel)),
            call(x, normal(4, 6, *kernel), normal(4), padding=1, stride=2),
            call(x[0], normal(4, 6, *kernel), bias=normal(4)),
            call(many, normal(6, 2, *kernel), normal(6), groups=6),
            call(many, normal(12, 2, *kernel), normal(12), 1, 0, 1, 6),
        ]
        samples[f"conv_transpose{count}d"] = [
            call(x, normal(6, 4, *kernel), normal(4), stride=2),
            call(x[0], normal(6, 4, *kernel)),
            call(many, normal(12, 2, *kernel), normal(12), groups=6),
        ]
        once, none, twice = [1] * count, [0] * count, [2] * count
        samples[f"aten.conv{count}d"] = [
            call(x, normal(4, 6, *kernel), normal(4), twice, once, once, 1),
            call(many, normal(12, 2, *kernel), normal(12), once, none, once, 6),
        ]
        samples[f"aten.conv_transpose{count}d"] = [
            call(x, normal(6, 4, *kernel), normal(4), twice, none, none, 1),
            call(many, normal(12, 2, *kernel), normal(12), once, none, none, 6),
        ]
    samples["convolution"] = [
        call(normal(2, 6, 5), normal(4, 6, 3), normal(4), [1], [0], [1], False, [0], 1),
        call(normal(2, 6, 5), normal(6, 2, 3), None, [1], [0], [1], True, [0], 6),
    ]
    return samples


def norms() -> dict[str, list[Sample]]:
    along = [call(normal(4, 6, 3), 1), call(normal(4, 6), dim=-1)]
    samples = {n: list(along) for n in ["softmax", "log_softmax", "softmin", "cumsum", "cumprod"]}
    samples["logcumsumexp"] = list(along)
    for name in ["_softmax", "_log_softmax"]:
        samples[name] = [call(normal(4, 6), 1, False)]
    samples["normalize"] = [call(normal(4, 6, 3)), call(normal(4, 6), p=1.0, dim=0)]
    samples["layer_norm"] = [
        call(normal(2, 4, 6), (6,), normal(6), normal(6)),
        call(normal(2, 4, 6), [4, 6], weight=normal(4, 6)),
    ]
    samples["rms_norm"] = [call(normal(2, 4, 6), (6,), normal(6)), call(normal(4, 6), (6,))]
    samples["native_layer_norm"] = [call(normal(2, 4, 6), [6], normal(6), normal(6), 1e-5)]
    samples["group_norm"] = [
        call(normal(4, 12, 3), 6, normal(12), normal(12)),
        call(normal(4, 12, 3, 2), num_groups=6),
    ]
    running = (normal(6), between(0.5, 2, 6))
    affine = (normal(6), normal(6))
    samples["batch_norm"] = [
        still(call(normal(4, 6, 3), *running, *affine, False), 1, 2),
        still(call(normal(4, 6, 3), *running, *affine, training=True), 1, 2),
        call(normal(4, 6, 3, 2), None, None, training=True),
    ]
    for name in ("torch.batch_norm", "aten.batch_norm"):
        samples[name] = [
            still(call(normal(4, 6, 3), *affine, *running, training, 0.1, 1e-5, False), 3, 4)
            for training in (False, True)
        ]
    samples["instance_norm"] = [
        call(normal(4, 6, 3), None, None, *affine),
        still(call(normal(4, 6, 3), *running, *affine), 1, 2),
        still(call(normal(4, 6, 3), *running, use_input_stats=False), 1, 2),
    ]
    samples["local_response_norm"] = [call(normal(4, 6, 3, 2), 3)]
    samples["cosine_similarity"] = [
        call(normal(4, 6), normal(4, 6)),
        call(normal(4, 6), normal(1, 6), 1),
    ]
    samples["pairwise_distance"] = [call(normal(4, 6), normal(4, 6))]
    return samples


def reductions() -> dict[str, list[Sample]]:
    x = normal(6, 12)
    dims = [call(normal(6, 12, 2), 1), call(x, dim=[0, 1]), call(x, dim=[0], keepdim=True)]
    samples = {name: [call(x), *dims] for name in ["sum", "nansum", "mean"]}
    for name in ["amax", "amin"]:
        samples[name] = [*dims, call(x, ())]
    for name in ["any", "all"]:
        samples[name] = [call(mask(6, 12)), call(mask(6, 2), 1)]
    samples["count_nonzero"] = [call(whole(0, 3, 6, 4)), call(whole(0, 3, 6, 4), 1)]
    samples["prod"] = [call(normal(6, 4)), call(normal(6, 4), 1, True)]
    for name in ["max", "min"]:
        samples[name] = [call(x), call(x, 1), call(x, normal(6, 12))]
    for name in ["logsumexp", "argmax", "argmin", "kthvalue", "topk"]:
        extra = (3,) if name in ("kthvalue", "topk") else ()
        samples[name] = [call(x, *extra, 1)]
    samples["logsumexp"].append(call(x, [0], keepdim=True))
    for name in ["median", "nanmedian"]:
        samples[name] = [call(normal(6, 5)), call(normal(6, 5), 1)]
    samples["mode"] = [call(whole(0, 3, 6, 4))]
    for name in ["var", "std"]:
        samples[name] = [call(x, 1), call(x, [0], correction=0)]
        samples[f"aten.{name}"] = [call(x, [1]), call(x, [0], correction=0)]
    for name in ["var_mean", "std_mean"]:
        samples[name] = [call(x, 1)]
    samples["aminmax"] = [call(x, dim=1), call(x)]
    samples["vector_norm"] = samples["linalg_vector_norm"] = [
        call(x), call(x, 1), call(x, float("inf"), [1]), call(x, 2, [0], True)
    ]  # fmt: skip
    samples["norm"] = [call(x), call(x, 1, [1]), call(x, float("inf"), [0])]
    for name in ["sort", "argsort", "cummax", "cummin"]:
        samples[name] = [call(normal(4, 6), 1)]
    samples["one_hot"] = [call(whole(0, 5, 6, 4), 5)]
    return samples

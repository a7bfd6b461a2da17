"""Kernels without a true float64 form, and their replacements in float64."""

from __future__ import annotations

import contextlib
import functools
import math
from typing import TYPE_CHECKING, Any

import torch
from torch._decomp import decomposition_table
from torch._subclasses.fake_impls import op_implementations_dict
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map_only

from paritas.core.torch_private.tensors import lay_out_like

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from torch import Tensor
    from torch._ops import OpOverload


# --- Attention kernels of a GPU as plain arithmetic -----------------------------------------------

# They have no float64 form, and they draw their dropout mask inside. Here the mask is made from a
# seed, which is passed to the backward pass in place of the generator's state. A value is kept if a
# uniform number is above the probability, as in the operators that the kernels replace.

ATEN = torch.ops.aten
FORWARD = frozenset(
    {
        ATEN._scaled_dot_product_flash_attention.default,
        ATEN._scaled_dot_product_efficient_attention.default,
        ATEN._scaled_dot_product_cudnn_attention.default,
    }
)
BACKWARD = frozenset(
    {
        ATEN._scaled_dot_product_flash_attention_backward.default,
        ATEN._scaled_dot_product_efficient_attention_backward.default,
        ATEN._scaled_dot_product_cudnn_attention_backward.default,
    }
)
# The names of results that hold the state of the generator.
_STATES = {"philox_seed", "rng_state"}


def attend(op: OpOverload, args: Any, kwargs: Any, seed: int, uniform: Callable[..., Any]) -> Any:
    """The results of a forward kernel; `uniform(size, seed)` draws random numbers."""
    arguments = _name_arguments(op, args, kwargs)
    weights, mask = _weights(arguments, seed, uniform)
    results: list[Any] = []
    for result in op._schema.returns:
        if result.name == "output":
            results.append((weights * mask) @ arguments["value"])
        elif result.name in {"logsumexp", "log_sumexp"}:
            results.append(_log_sum_exp(op, arguments))
        elif result.name in _STATES:
            results.append(torch.tensor(seed, device=weights.device))
        elif result.name.startswith("max_"):
            results.append(arguments["query" if result.name == "max_q" else "key"].shape[-2])
        else:
            results.append(torch.zeros((), dtype=torch.int64, device=weights.device))
    return _lay_out(op, args, kwargs, results)


def attend_backward(op: OpOverload, args: Any, kwargs: Any, uniform: Callable[..., Any]) -> Any:
    """The results of a backward kernel, with the mask of the forward pass's seed."""
    arguments = _name_arguments(op, args, kwargs)
    query, key, value = arguments["query"], arguments["key"], arguments["value"]
    gradient = arguments["grad_out"] if "grad_out" in arguments else arguments["grad_out_"]
    seed = int(arguments["philox_seed"].reshape(-1)[0]) if arguments["dropout_p"] else 0
    weights, mask = _weights(arguments, seed, uniform)
    scale = _scale(arguments)
    to_weights = (gradient @ value.transpose(-2, -1)) * mask
    # The kernels take the sum of each row from the output as it is in memory, rounded.
    rows = (gradient * arguments["out"]).sum(dim=-1, keepdim=True)
    to_scores = weights * (to_weights - rows)
    results = [
        to_scores @ key * scale,
        to_scores.transpose(-2, -1) @ query * scale,
        (weights * mask).transpose(-2, -1) @ gradient,
    ]
    if "grad_input_mask" in arguments:
        bias = arguments.get("attn_bias")
        results.append(to_scores.sum_to_size(bias.shape) if bias is not None else None)
        expected = arguments["grad_input_mask"]
        results = [
            result if requested else None
            for result, requested in zip(results, expected, strict=True)
        ]
    return _lay_out(op, args, kwargs, results)


def _lay_out(op: OpOverload, args: Any, kwargs: Any, results: list[Any]) -> tuple[Any, ...]:
    """Give the results the kernel's memory layout: views of its results must work here too."""
    with _disable_current_modes():  # nothing is computed or drawn
        meta_args, named = tree_map_only(torch.Tensor, to_meta, (args, kwargs))
        originals = op(*meta_args, **named)
    return tuple(map(lay_out_like, results, originals))


def to_meta(tensor: Tensor) -> Tensor:
    """A meta tensor of the same shape, strides and dtype."""
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


@contextlib.contextmanager
def any_attention() -> Iterator[None]:
    """Within it, `scaled_dot_product_attention` also finds a kernel for float64.

    A program may allow only fused kernels (`torch.nn.attention.sdpa_kernel`), none of which accepts
    float64. The setting is shared by all threads, so it is changed only if needed.
    """
    if torch.backends.cuda.math_sdp_enabled():
        yield
        return
    torch.backends.cuda.enable_math_sdp(True)
    try:
        yield
    finally:
        torch.backends.cuda.enable_math_sdp(False)


def attends_in_one_kernel(tensors: Mapping[str, Any], options: Mapping[str, Any]) -> bool:
    """Whether `scaled_dot_product_attention` has a kernel for these arguments, by name."""
    with _disable_current_modes():  # nothing is computed
        return torch._fused_sdp_choice(**tensors, **options) != SDPBackend.MATH.value


def wide_attention(op: OpOverload) -> Callable[..., Any] | None:
    """The float64 form of an attention kernel, or None for other operators; no dropout."""
    if op in FORWARD:
        return lambda *args, **kwargs: attend(op, args, kwargs, 0, _refuse_dropout)
    if op in BACKWARD:
        return lambda *args, **kwargs: attend_backward(op, args, kwargs, _refuse_dropout)
    return None


def _refuse_dropout(_size: list[int], _seed: int) -> Tensor:
    message = "fused attention draws its dropout mask inside the kernel"
    raise NotImplementedError(message)


def _log_sum_exp(op: OpOverload, arguments: dict[str, Any]) -> Tensor:
    """The logarithm of the sum of exponentials of each row.

    The memory-efficient kernel computes it only on request, and pads it to a multiple of 32; that
    of cuDNN has one more dimension.
    """
    top = _scores(arguments).logsumexp(dim=-1)
    if not arguments.get("compute_log_sumexp", True):
        return top[..., :0]
    if "cudnn" in op._schema.name:
        return top.unsqueeze(-1)
    missing = -top.shape[-1] % 32 if "efficient" in op._schema.name else 0
    return torch.nn.functional.pad(top, (0, missing), value=math.inf) if missing else top


def _name_arguments(op: OpOverload, args: Any, kwargs: Any) -> dict[str, Any]:
    arguments = op._schema.arguments
    by_name = {argument.name: argument.default_value for argument in arguments}
    by_name |= {argument.name: value for argument, value in zip(arguments, args, strict=False)}
    return {**by_name, **kwargs}


def attention_weights(op: Any, args: Any, kwargs: Any) -> tuple[Tensor, float]:
    """What a kernel of attention weights the values with, without dropout; the scale of scores."""
    arguments = _name_arguments(op, args, kwargs)
    weights = _scores(arguments).softmax(dim=-1).nan_to_num(0.0)  # a row that attends to nothing
    return weights, _scale(arguments)


def place_of_argument(op: Any, name: str) -> int:
    """The position of an argument of an operator."""
    return [argument.name for argument in op._schema.arguments].index(name)


def _scores(arguments: dict[str, Any]) -> Tensor:
    scores: Tensor = arguments["query"] @ arguments["key"].transpose(-2, -1) * _scale(arguments)
    bias = arguments.get("attn_bias", arguments.get("attn_mask"))
    if bias is not None and bias.dim():
        scores = scores + bias
    if arguments.get("is_causal"):
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        scores = scores.masked_fill(hidden, -math.inf)
    return scores


def _weights(
    arguments: dict[str, Any], seed: int, uniform: Callable[..., Any]
) -> tuple[Tensor, Tensor]:
    weights = torch.nan_to_num(_scores(arguments).softmax(dim=-1), nan=0.0)  # fully masked rows
    dropped = arguments["dropout_p"]
    if not dropped:
        return weights, torch.ones_like(weights)
    mask = uniform(list(weights.shape), seed) > dropped
    return weights, mask.to(weights.dtype) / (1 - dropped)


def _scale(arguments: dict[str, Any]) -> float:
    scale = arguments.get("scale")
    return 1 / math.sqrt(arguments["query"].shape[-1]) if scale is None else float(scale)


# --- Attention on a CPU ---------------------------------------------------------------------------

# Compilers go by what torch says about a kernel's results. Torch 2.11 says that the sums of this
# kernel are float32, in float64 too. The code that Inductor makes then reads them as such, and the
# backward kernel refuses what it read.
_ON_CPU = ATEN._scaled_dot_product_flash_attention_for_cpu.default


@contextlib.contextmanager
def true_sums_of_attention() -> Iterator[None]:
    """In this block, torch says of which dtype the sums of attention on a CPU are."""
    if _says_float64():
        yield
        return
    former = op_implementations_dict.get(_ON_CPU)

    def describe(mode: Any, op: OpOverload, *args: Any, **kwargs: Any) -> Any:
        _restore(former)
        try:
            with mode:
                result, sums = op(*args, **kwargs)
                return result, sums.double() if result.dtype is torch.float64 else sums
        finally:
            op_implementations_dict[_ON_CPU] = describe

    op_implementations_dict[_ON_CPU] = describe
    FakeTensorMode.cache_clear()
    try:
        yield
    finally:
        _restore(former)
        FakeTensorMode.cache_clear()


def _says_float64() -> bool:
    with FakeTensorMode():
        query = torch.empty(1, 1, 2, 8, dtype=torch.float64)
        return bool(_ON_CPU(query, query, query)[1].dtype is torch.float64)


def _restore(former: Callable[..., Any] | None) -> None:
    op_implementations_dict.pop(_ON_CPU, None)
    if former is not None:
        op_implementations_dict[_ON_CPU] = former


# --- Kernels with float32 constants inside --------------------------------------------------------

# For example, `hardswish` on CUDA multiplies by `1.0f / 6.0f` in every dtype. Such an arbiter would
# be off by 3e-8, and every more accurate program would differ from it. So each elementwise operator
# is compared, once per device type, with torch's own decomposition into simpler operators, which
# replaces it if the two disagree.

# Far above float64's rounding, far below that of a float32 constant.
AGREEMENT = 1e-12
# The matrix product for mixtures of experts, which torch has only for up to float32.
GROUPED = frozenset(getattr(ATEN, name).default for name in ("_grouped_mm",) if hasattr(ATEN, name))


def grouped_mm(
    left: Tensor,
    right: Tensor,
    offs: Tensor | None = None,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """The products of groups of rows, columns or terms, one by one, in the arguments' dtype.

    `offs` are the ends of groups: rows of `left` if `right` has a matrix for each group, columns of
    `right` if `left` has one, and otherwise terms of the sums, with one matrix of the result per
    group. The part after the last group is zero; torch leaves it undefined.
    """
    del out_dtype  # no rounding to it, as everywhere in float64
    if offs is None:
        product = torch.matmul(left, right)
        return product if bias is None else product + bias
    ends = [int(end) for end in offs]
    groups = list(zip([0, *ends], ends, strict=False))
    if left.dim() == right.dim():
        return torch.stack([left[:, a:b] @ right[a:b] for a, b in groups])
    by_rows = right.dim() > left.dim()
    if by_rows:
        parts = [left[a:b] @ matrix for (a, b), matrix in zip(groups, right, strict=True)]
        if bias is not None:
            parts = [part + row for part, row in zip(parts, bias, strict=True)]
    else:
        parts = [matrix @ right[:, a:b] for (a, b), matrix in zip(groups, left, strict=True)]
    product = torch.cat(parts, dim=0 if by_rows else 1)
    total = left.shape[0] if by_rows else right.shape[1]
    rest = total - product.shape[0 if by_rows else 1]
    return torch.nn.functional.pad(product, (0, 0, 0, rest) if by_rows else (0, rest))


def weight_norm(v: Tensor, g: Tensor, dim: int = 0) -> tuple[Tensor, Tensor]:
    """The weight and the norms. torch's kernel on a GPU takes a float32 root, also in float64."""
    others = [axis for axis in range(v.dim()) if axis != dim]
    norms = torch.linalg.vector_norm(v, dim=others, keepdim=True)
    return v * (g / norms), norms


# Fused steps of optimizers, and what their kernels on a GPU read as float32 whatever it is.
_FUSED_STEPS = ("aten::_fused_adam", "aten::_fused_adagrad", "aten::_fused_sgd")
_READ_AS_FLOAT32 = {"state_steps", "lr", "grad_scale", "found_inf"}


def _fused_step(func: OpOverload, *args: Any, **options: Any) -> Any:
    """A fused step of an optimizer whose parameters are float64, as they would be natively."""
    names = [argument.name for argument in func._schema.arguments]

    def narrow(value: Any) -> Any:
        if isinstance(value, list | tuple):
            return [narrow(tensor) for tensor in value]
        return value.float() if isinstance(value, torch.Tensor) else value

    named_args = zip(names, args, strict=False)
    args = tuple(narrow(value) if name in _READ_AS_FLOAT32 else value for name, value in named_args)
    options = {
        name: narrow(value) if name in _READ_AS_FLOAT32 else value
        for name, value in options.items()
    }
    return func(*args, **options)


_KNOWN_KERNELS: dict[tuple[OpOverload, str], bool] = {}


@functools.cache
def _replacement(func: OpOverload) -> Callable[..., Any] | None:
    """A function for an operator whose own kernels do not compute in float64, if it is known."""
    if func in GROUPED:
        return grouped_mm
    if func is ATEN._weight_norm_interface.default:
        return weight_norm
    if func._schema.name.startswith(_FUSED_STEPS):
        return functools.partial(_fused_step, func)
    if func._schema.name.startswith("aten::quantize_per_"):
        # They take only float32, and round to far coarser steps than float32 does.
        return lambda value, *rest, **options: func(value.float(), *rest, **options)
    return wide_attention(func)


def decomposition_of(func: OpOverload) -> Callable[..., Any] | None:
    """The operator in simpler ones, as torch's compilers take it apart; None if they do not."""
    return decomposition_table.get(func)


def float64_kernel(func: OpOverload, args: tuple[Any, ...]) -> Callable[..., Any]:
    """The function that computes `func` in float64: itself, or a replacement."""
    replacement, functional, decomposition = _other_ways(func)
    if replacement is not None:
        return replacement
    if functional is not None:
        kernel = float64_kernel(functional, args)
        if kernel is functional:
            return func
        return lambda target, *rest, **options: target.copy_(kernel(target, *rest, **options))
    if decomposition is None:
        return func
    tensors = [value for value in args if isinstance(value, torch.Tensor)]
    if not tensors or not _is_elementwise(tensors):
        return func
    key = (func, tensors[0].device.type)
    if key not in _KNOWN_KERNELS:
        _KNOWN_KERNELS[key] = _agrees_with_decomposition(
            func, decomposition, args, tensors[0].device
        )
    return func if _KNOWN_KERNELS[key] else decomposition


@functools.cache
def _other_ways(
    func: OpOverload,
) -> tuple[Callable[..., Any] | None, OpOverload | None, Callable[..., Any] | None]:
    """What stands for an operator, its form that writes to nothing, and what it consists of.

    Each is None if it is not known, or nothing to compare its kernel with.
    """
    decomposition = decomposition_table.get(func) if _returns_one_new_tensor(func) else None
    return _replacement(func), _functional_form(func), decomposition


def _functional_form(func: OpOverload) -> OpOverload | None:
    """The functional form of an in-place operator, such as `relu` for `relu_`."""
    namespace, _, name = func._schema.name.partition("::")
    if namespace != "aten" or not name.endswith("_") or name.endswith("__"):
        return None
    packet = getattr(ATEN, name.removesuffix("_"), None)
    op_overload: OpOverload | None = getattr(packet, func._overloadname, None)
    return op_overload


def _is_elementwise(tensors: list[Tensor]) -> bool:
    return all(t.shape == tensors[0].shape and t.dtype is torch.float64 for t in tensors)


def _returns_one_new_tensor(func: OpOverload) -> bool:
    """Whether it does so and draws no random numbers."""
    returns = func._schema.returns
    single = len(returns) == 1 and returns[0].alias_info is None
    return single and torch.Tag.nondeterministic_seeded not in func.tags


def _agrees_with_decomposition(
    func: OpOverload,
    decomposition: Callable[..., Any],
    args: tuple[Any, ...],
    device: torch.device,
) -> bool:
    """Compare the two on a range of numbers; if that is impossible, trust the operator."""
    # No round numbers: at a kink the two may choose different sides.
    probe = torch.linspace(-4.0137, 4.0291, 257, dtype=torch.float64, device=device)
    probes = tuple(probe if isinstance(value, torch.Tensor) else value for value in args)
    try:
        ours, simpler = func(*probes), decomposition(*probes)
    except (RuntimeError, TypeError, ValueError, IndexError):
        return True  # it does not accept such numbers
    comparable = isinstance(ours, torch.Tensor) and isinstance(simpler, torch.Tensor)
    if not comparable or ours.shape != probe.shape or ours.shape != simpler.shape:
        return True
    close = torch.isclose(ours, simpler, rtol=AGREEMENT, atol=AGREEMENT, equal_nan=True)
    return bool(close.all())

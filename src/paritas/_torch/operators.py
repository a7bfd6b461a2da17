"""What an aten operator does: what it rounds, draws and writes, and the dtype of what it makes."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import threading
from typing import TYPE_CHECKING, Any

import torch
from torch._ops import HigherOrderOperator, OpOverload
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _disable_current_modes,
    is_traceable_wrapper_subclass,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor

# What the layers above may name: an operator of torch, one that takes functions, and what sees
# every operator that is called within it.
Operator = OpOverload
HigherOrder = HigherOrderOperator
DispatchMode = TorchDispatchMode


# --- Rounding, randomness, writes -----------------------------------------------------------------

# What a lifted run computes in, by the dtype that the program states.
WIDE = {
    torch.float32: torch.float64,
    torch.bfloat16: torch.float64,
    torch.float16: torch.float64,
    torch.complex64: torch.complex128,
    torch.complex32: torch.complex128,
}

# The operators for which `may_use_tf32` asks what holds for products of matrices.
_MATMULS = frozenset({"mm", "bmm", "addmm", "baddbmm", "matmul", "linear"})

# Operators whose floating results are chosen, moved or counted, never rounded.
_EXACT = frozenset(
    """
    abs alias amax amin aminmax arange argmax argmin as_strided as_strided_copy
    as_strided_scatter bernoulli bitwise_not cat ceil clamp clamp_max clamp_min clone
    constant_pad_nd contiguous copy copysign cummax cummin detach diag diagonal diagonal_copy
    diagonal_scatter embedding empty empty_like empty_strided eq equal expand expand_copy eye fill
    fix flip floor fmax fmin full full_like gather ge gt hardtanh heaviside im2col index
    index_copy index_fill index_put index_select kthvalue
    isfinite isinf isnan le lift_fresh lift_fresh_copy logical_and logical_not logical_or
    logical_xor lt masked_fill masked_scatter masked_select max max_pool2d_with_indices
    max_pool3d_with_indices adaptive_max_pool2d adaptive_max_pool3d maximum max_unpool2d
    max_unpool3d median min minimum mode nan_to_num nanmedian ne neg
    new_empty new_empty_strided new_full new_ones new_zeros nonzero ones ones_like permute
    permute_copy pixel_shuffle pixel_unshuffle real imag reflection_pad1d reflection_pad2d
    relu repeat replication_pad1d replication_pad2d roll round scalar_tensor scatter select
    select_copy select_scatter sgn sign slice slice_copy slice_scatter sort split
    split_with_sizes split_with_sizes_copy squeeze squeeze_copy stack t t_copy threshold
    threshold_backward topk transpose transpose_copy tril triu trunc unbind unfold unfold_copy
    unsafe_split unsqueeze unsqueeze_copy upsample_nearest1d upsample_nearest2d view view_copy
    where zero zeros zeros_like _local_scalar_dense _unsafe_index _unsafe_index_put _unsafe_view
    _reshape_alias _conj conj_physical resolve_conj view_as_real view_as_complex
    _unsafe_masked_index native_dropout complex
    """.split()  # noqa: SIM905  (a hundred quoted names are harder to read)
)

# Reductions by index of which an argument says whether they choose (of equal bits) or add up.
_REDUCES_AS_TOLD = frozenset(
    {"scatter_reduce", "index_reduce", "segment_reduce", "_segment_reduce_backward"}
)
_CHOOSING = frozenset({"amax", "amin", "max", "min"})
# Of those that only move values, some add up what meets in one place if told so.
_ADDS_IF_TOLD = frozenset({"index_put", "_unsafe_index_put", "scatter"})
_ADDING = frozenset({"add", "multiply"})

# Random operators that draw floats of the dtype they are asked for. The stream depends on that
# dtype, so a lifted run has to draw in the native one.
DRAWS_IN_ITS_DTYPE = frozenset(
    {"rand", "randn", "rand_like", "randn_like", "normal", "normal_functional", "uniform"}
    | {"bernoulli", "cauchy", "exponential", "log_normal", "geometric"}
)

# Other operators that only draw. Attention, say, may draw a dropout mask, but computes as well.
_ONLY_DRAWS = DRAWS_IN_ITS_DTYPE | {
    "multinomial",
    "native_dropout",
    "poisson",
    "randint",
    "randint_like",
    "random",
    "randperm",
}

# Operators that round their result correctly and nothing before it. Of the others, what happens
# inside is unknown; shaking their inputs stands for it.
_BASIC = frozenset(
    """
    add addcdiv addcmul addmm addmv addr baddbmm bmm convolution convolution_backward cumsum div
    dot embedding_dense_backward _grouped_mm index_add index_put lerp mean mm mul mv neg reciprocal
    rsub scatter scatter_add sqrt sub sum _to_copy _unsafe_index_put
    """.split()  # noqa: SIM905
)

# Running statistics that these write to in training, though their schemas do not say so.
_UNDECLARED_WRITES: dict[str, frozenset[int | str]] = {
    name: frozenset({3, 4, "running_mean", "running_var"})
    for name in ("native_batch_norm", "cudnn_batch_norm", "miopen_batch_norm")
}

COMPARISONS = frozenset({"gt", "ge", "lt", "le", "eq", "ne"})
ROUNDINGS = frozenset({"round", "floor", "ceil", "trunc", "fix"})
# What leaves the decision behind a value as it was.
CARRIERS = frozenset({"_to_copy", "clamp", "clamp_max", "clamp_min", "clone"})
CHOICES = frozenset({"argmax", "argmin", "max", "min", "sort", "topk", "kthvalue", "median"})


@dataclasses.dataclass(frozen=True)
class Traits:
    """What a dispatch mode needs to know about one operator.

    Attributes:
        name: the base name, without namespace, overload or a trailing underscore.
        namespace: "aten" for torch's own.
        view: the result shares storage with an argument and nothing is computed.
        mutates: positions and names of arguments that are written to.
        random: it draws from a generator.
        rounds: its floating results are rounded.
        basic: and nothing else happens inside it.
        reads_bits: it shows the bits of a value as another dtype.
    """

    name: str
    namespace: str
    view: bool
    mutates: frozenset[int | str]
    random: bool
    rounds: bool
    basic: bool
    reads_bits: bool


@functools.cache
def traits(func: OpOverload) -> Traits:
    """The traits of one operator overload."""
    schema = func._schema
    namespace, _, full = schema.name.partition("::")
    name = full.rstrip("_")
    written: set[int | str] = set(_UNDECLARED_WRITES.get(name, ()))
    for position, argument in enumerate(schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            written |= {position, argument.name}
    aliases = any(r.alias_info is not None and not r.alias_info.is_write for r in schema.returns)
    random = torch.Tag.nondeterministic_seeded in func.tags
    return Traits(
        name=name,
        namespace=namespace,
        view=aliases and not written,
        mutates=frozenset(written),
        random=random,
        rounds=not (aliases or name in _EXACT or name in _ONLY_DRAWS),
        basic=name in _BASIC,
        reads_bits=name == "view" and func._overloadname == "dtype",
    )


def call_rounds(kind: Traits, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether this call rounds: of some operators an argument decides, not the operator."""
    if kind.name in _REDUCES_AS_TOLD:
        # What looks for the greatest by equality afterwards would not find it if it were shaken.
        return not _is_any_argument_in(_CHOOSING, args, kwargs)
    if kind.name in _ADDS_IF_TOLD:
        accumulates = len(args) > 3 and args[3] is True  # noqa: PLR2004
        return (
            accumulates
            or kwargs.get("accumulate") is True
            or _is_any_argument_in(_ADDING, args, kwargs)
        )
    return kind.rounds


def _is_any_argument_in(
    words: frozenset[str], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> bool:
    return any(isinstance(value, str) and value in words for value in (*args, *kwargs.values()))


def is_wrapper(tensor: Tensor) -> bool:
    """Whether a tensor holds others in place of memory of its own."""
    return is_traceable_wrapper_subclass(tensor)


def may_use_tf32(name: str) -> bool:
    """Whether an operator on a GPU may round the factors of its products to TF32."""
    if name.startswith("convolution"):
        return bool(torch._C._get_cudnn_allow_tf32())
    return name in _MATMULS and bool(torch._C._get_cublas_allow_tf32())


def map_tensors(tree: Any, function: Callable[[Tensor], Any]) -> Any:
    """Apply `function` to the tensors of an operator's arguments or results."""
    if isinstance(tree, torch.Tensor):
        return function(tree)
    if isinstance(tree, list | tuple):
        return type(tree)(map_tensors(item, function) for item in tree)
    return tree


# --- The default dtype ----------------------------------------------------------------------------

# Torch has one default for the whole process: while it is changed, every thread's `torch.ones(3)`
# is of another dtype. So a lifted run states float64 call by call, where a mode can see that the
# default would decide; the default itself is changed only for programs that ask it where no mode
# looks.

# What was in force before each change of the default dtype that is not over yet, of all threads.
_defaults: list[torch.dtype] = []
_defaults_lock = threading.Lock()

# By call signature: the dtype of the results, where it is the default that decides it.
_result_dtypes: dict[tuple[Any, ...], torch.dtype | None] = {}


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Another default dtype for a while, in all threads.

    Where threads overlap in here, what the last one restores has to be what the first one found,
    or the other dtype would stay for good.
    """
    with _defaults_lock:
        _defaults.append(torch.get_default_dtype())
        torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        with _defaults_lock:
            torch.set_default_dtype(_defaults.pop())


def own_default() -> torch.dtype:
    """The default dtype of the process, whatever another thread's check has made of it just now."""
    with _defaults_lock:
        return _defaults[0] if _defaults else torch.get_default_dtype()


def is_of_default(fresh: Tensor, default: torch.dtype) -> bool:
    """Whether the default dtype may have decided what a tensor made of numbers is.

    A mode hears of `torch.tensor(0.1)` when it is made: rounded to the default dtype, for good.
    """
    dtype = fresh.dtype
    return bool(dtype == (default.to_complex() if dtype.is_complex else default))


def state_float64(
    func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a call without a floating tensor, such that its floats are float64.

    Only for operators that neither draw nor write: what it gives is found out by calling it.
    """
    if kwargs.get("dtype") is not None:
        return args, kwargs
    key = (func, *_argument_kinds(args), *_argument_kinds(sorted(kwargs.items())))
    if key not in _result_dtypes:
        _result_dtypes[key] = _find_floating_result(func, args, kwargs)
    dtype = _result_dtypes[key]
    if dtype is None:
        return args, kwargs
    if takes_dtype(func):
        return args, {**kwargs, "dtype": dtype}
    # Torch itself turns integers into floats of the default dtype before it computes.
    return _to_float64(args), {name: _to_float64(value) for name, value in kwargs.items()}


def takes_dtype(func: OpOverload) -> bool:
    """Whether an operator can be told the dtype of its result."""
    return any(argument.name == "dtype" for argument in func._schema.arguments)


def _find_floating_result(
    func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> torch.dtype | None:
    if "device" in kwargs:  # made from nothing: its size does not matter here
        kwargs = {**kwargs, "device": torch.device("meta")}
        kwargs.pop("pin_memory", None)
    with _disable_current_modes():
        result = func(*args, **kwargs)
    for item in result if isinstance(result, list | tuple) else [result]:
        if isinstance(item, torch.Tensor) and item.is_complex():
            return torch.complex128
        if isinstance(item, torch.Tensor) and item.is_floating_point():
            return torch.float64
    return None


def _argument_kinds(values: Any) -> Iterator[Any]:
    """What decides the dtype of a result: kinds of numbers and dtypes, no values."""
    for value in values:
        if isinstance(value, torch.Tensor):
            yield (value.dtype, value.dim() == 0)
        elif isinstance(value, list | tuple):
            yield tuple(_argument_kinds(value))
        else:
            yield value if isinstance(value, str | torch.dtype) else type(value)


def _to_float64(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.to(torch.float64)
    if isinstance(value, list | tuple):
        return type(value)(_to_float64(item) for item in value)
    return value

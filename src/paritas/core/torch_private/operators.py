"""Traits of operators by their schemas: what they draw and write, and the dtype of their results.

What needs no schema, such as what an operator rounds, is in `core.operators`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import operator
import re
import threading
import warnings
from typing import TYPE_CHECKING, Any

import torch
from torch._ops import HigherOrderOperator, OpOverload
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _disable_current_modes,
    is_traceable_wrapper_subclass,
)
from torch.utils._pytree import tree_leaves

from paritas.core.errors import UnsupportedTorchError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from torch import Tensor

# Names for the layers above: an operator of torch, an operator that takes functions, and a mode
# that sees every operator called within it.
Operator = OpOverload
HigherOrder = HigherOrderOperator
DispatchMode = TorchDispatchMode


# --- Randomness, writes, precision ----------------------------------------------------------------

# The dtype of a lifted run, by the dtype in the program.
WIDE = {
    torch.float32: torch.float64,
    torch.bfloat16: torch.float64,
    torch.float16: torch.float64,
    torch.complex64: torch.complex128,
    torch.complex32: torch.complex128,
}

# The products that cuBLAS computes under torch's switch for TF32; vectors are not among them.
_MATMULS = frozenset({"mm", "bmm", "addmm", "baddbmm", "matmul", "linear"})

# Running statistics that these write to in training, without declaring it in their schemas.
_UNDECLARED_WRITES: dict[str, frozenset[int | str]] = {
    name: frozenset({3, 4, "running_mean", "running_var"})
    for name in ("native_batch_norm", "cudnn_batch_norm", "miopen_batch_norm")
}


@dataclasses.dataclass(frozen=True)
class Traits:
    """What a dispatch mode needs to know about one operator.

    Attributes:
        name: the base name, without namespace, overload or a trailing underscore.
        namespace: "aten" for torch's own.
        view: whether the result shares storage with an argument and nothing is computed.
        mutates: positions and names of arguments that are written to.
        random: whether it draws from a generator.
        reads_bits: whether it reads the bits of a value as another dtype.
    """

    name: str
    namespace: str
    view: bool
    mutates: frozenset[int | str]
    random: bool
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
        reads_bits=name == "view" and func._overloadname == "dtype",
    )


# Torch's operators that another one calls after checking their arguments, and those that autograd
# calls with what the forward pass saved. The second pattern: those that check them themselves.
_KERNEL = re.compile("_.*|.*backward.*")
_CHECKING = re.compile("_(log_)?softmax(_backward_data)?|_to_copy|_cdist_forward")


@functools.cache
def checks_arguments(func: OpOverload) -> bool:
    """Whether an operator raises for arguments that it cannot take, and does not end the process.

    Those of users are often written in C++, and check what their own program needs.
    """
    kind = traits(func)
    is_kernel = _KERNEL.fullmatch(kind.name) and not _CHECKING.fullmatch(kind.name)
    return kind.namespace == "aten" and (not is_kernel or torch.Tag.pointwise in func.tags)


def is_wrapper(tensor: Tensor) -> bool:
    """Whether a tensor wraps others instead of having its own memory."""
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


def tensors_in(tree: Any) -> list[Tensor]:
    """The tensors that `map_tensors` sees, in its order."""
    if isinstance(tree, torch.Tensor):
        return [tree]
    if isinstance(tree, list | tuple):
        return [tensor for item in tree for tensor in tensors_in(item)]
    return []


def map_call(
    args: tuple[Any, ...], kwargs: Mapping[str, Any], function: Callable[[Tensor], Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a call with `function` applied to each of their tensors, in their order."""
    mapped = tuple(map_tensors(value, function) for value in args)
    return mapped, {name: map_tensors(value, function) for name, value in kwargs.items()}


def takes_shape_only(kind: Traits) -> bool:
    """Whether an operator makes a tensor like another one, without a look at its values."""
    return kind.name.endswith("_like") or kind.name.startswith("new_")


def returned_tensors(result: Any) -> list[Tensor]:
    """The tensors of what a program returns, also in dicts and registered classes."""
    return [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]


# --- The default dtype ----------------------------------------------------------------------------

# Torch has one default for the whole process: while it is changed, `torch.ones(3)` has another
# dtype in every thread. So a lifted run passes float64 call by call, where a mode sees that the
# default would decide. The default itself is changed only for programs that use it where no mode
# can see.

# The defaults before each active change of the default dtype, of all threads.
_defaults: list[torch.dtype] = []
_defaults_lock = threading.Lock()

# Call signature -> dtype of the results, if the default decides it.
_result_dtypes: dict[tuple[Any, ...], torch.dtype | None] = {}


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Temporarily change the default dtype, in all threads.

    If threads overlap, the last one must restore what the first one found, or the other dtype would
    stay.
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
    """The default dtype of the process, even while a check in another thread changes it."""
    with _defaults_lock:
        return _defaults[0] if _defaults else torch.get_default_dtype()


def is_of_default(fresh: Tensor, default: torch.dtype) -> bool:
    """Whether the default dtype may have decided the dtype of a tensor made of numbers.

    A mode sees `torch.tensor(0.1)` only after it has been rounded to the default dtype.
    """
    dtype = fresh.dtype
    return bool(dtype == (default.to_complex() if dtype.is_complex else default))


def state_float64(
    func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a call without floating tensors, changed to give float64 results.

    Only for operators that neither draw nor write: the operator is called to see its result.
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
    # Torch itself converts integers to the default dtype before it computes.
    return map_call(args, kwargs, torch.Tensor.double)


def takes_dtype(func: OpOverload) -> bool:
    """Whether an operator has a `dtype` argument."""
    return any(argument.name == "dtype" for argument in func._schema.arguments)


def bind_arguments(
    func: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> dict[str, Any]:
    """The arguments of a call by the names of the operator's schema, with its defaults."""
    defaults, _ = _defaults_of(func)
    return defaults | dict(zip(defaults, args, strict=False)) | dict(kwargs)


def call_bound(
    func: OpOverload, values: Mapping[str, Any], instead: Callable[..., Any] | None = None
) -> Any:
    """Call an operator, or what stands for it, with all of its arguments by name."""
    _, only_named = _defaults_of(func)
    args = [value for name, value in values.items() if name not in only_named]
    return (instead or func)(*args, **{name: values[name] for name in only_named})


@functools.cache
def _defaults_of(func: OpOverload) -> tuple[dict[str, Any], frozenset[str]]:
    """The arguments of an operator with their defaults, and those that are passed by name only."""
    arguments = func._schema.arguments
    defaults = {
        argument.name: argument.default_value if argument.has_default_value() else None
        for argument in arguments
    }
    return defaults, frozenset(argument.name for argument in arguments if argument.kwarg_only)


def count_results(func: OpOverload) -> int:
    """How many values an operator returns."""
    return len(func._schema.returns)


_OUT_OF_PLACE: dict[Any, Any] = {
    getattr(operator, f"i{name}"): getattr(operator, name)
    for name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "and_", "or_")
    if hasattr(operator, f"i{name}")
} | {operator.iand: operator.and_, operator.ior: operator.or_, operator.ixor: operator.xor}


def out_of_place(target: Callable[..., Any]) -> Callable[..., Any]:
    """The operator with the same result that writes to nothing; the same one if none is known."""
    if not isinstance(target, OpOverload):
        pure: Callable[..., Any] = _OUT_OF_PLACE.get(target, target)
        return pure
    namespace, _, name = target._schema.name.partition("::")
    if not name.endswith("_") or name.endswith("__"):
        return target
    packet = getattr(getattr(torch.ops, namespace), name[:-1], None)
    overload = getattr(packet, target._overloadname, None)
    return overload if isinstance(overload, OpOverload) else target


def signature_of(function: Callable[..., Any]) -> inspect.Signature:
    """The signature of a function of torch, also of one that is built in.

    Raises:
        TypeError: it has none.
    """
    if not inspect.isbuiltin(function):
        return inspect.signature(function)
    packet = getattr(torch.ops.aten, getattr(function, "__name__", ""), None)
    overload = getattr(packet, "default", None)
    if not isinstance(overload, OpOverload):
        raise TypeError(f"{function} has no signature")
    kinds = inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY
    return inspect.Signature(
        [
            inspect.Parameter(
                argument.name,
                kinds[argument.kwarg_only],
                default=argument.default_value
                if argument.has_default_value()
                else inspect.Parameter.empty,
            )
            for argument in overload._schema.arguments
        ]
    )


def optional_tensors(func: OpOverload) -> frozenset[str]:
    """The names of the tensors that a call of the operator may leave out."""
    arguments = func._schema.arguments
    return frozenset(
        argument.name for argument in arguments if str(argument.type) == "Optional[Tensor]"
    )


def _find_floating_result(
    func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> torch.dtype | None:
    if not func._schema.returns:  # an assertion, as exported programs have about the device
        return None
    if "device" in kwargs:  # a factory function: its size does not matter here
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
    """The argument properties that decide the dtype of a result: types and dtypes, no values."""
    for value in values:
        if isinstance(value, torch.Tensor):
            yield (value.dtype, value.dim() == 0)
        elif isinstance(value, list | tuple):
            yield tuple(_argument_kinds(value))
        else:
            yield value if isinstance(value, str | torch.dtype) else type(value)


# --- Flex attention -------------------------------------------------------------------------------


@contextlib.contextmanager
def plain_flex_attention(kind: type[DispatchMode]) -> Iterator[None]:
    """Compute flex attention by plain operators, also under a dispatch mode of this class.

    Its operator takes graphs, and has a rule for each class of modes. The mode sees none of what
    it computes, which is in float64 if its arguments are.

    Raises:
        UnsupportedTorchError: the operator keeps no such rules.
    """
    try:
        from torch._higher_order_ops.flex_attention import flex_attention

        rules = flex_attention.python_key_table
        is_known = kind in rules
    except (ImportError, AttributeError) as error:
        raise UnsupportedTorchError(f"flex attention has no rules for modes: {error}") from error

    def unseen(_: DispatchMode, *args: Any, **kwargs: Any) -> Any:
        return flex_attention(*args, **kwargs)

    if not is_known:
        flex_attention.py_impl(kind)(unseen)
    try:
        with warnings.catch_warnings(), torch.compiler.set_stance("force_eager"):
            warnings.filterwarnings("ignore", message="flex_attention called without torch.compile")
            yield
    finally:
        if not is_known:
            rules.pop(kind)
            flex_attention._dispatch_cache.clear()

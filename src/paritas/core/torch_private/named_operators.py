"""Operators of torch by name: to replay the calls that a dump records, and with sample inputs.

A dump may come from anywhere. So a name is looked up among torch's own tensor operators, and used
only if torch marks it as a pure building block of programs. Operators that draw random numbers,
read uninitialized memory, access files or return no tensor are refused.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import importlib.util
import math
import operator
import re
import sys
import types
import unittest
import warnings
from typing import TYPE_CHECKING, Any

import torch
from torch._decomp import decomposition_table
from torch._library import simple_registry
from torch._library.custom_ops import OPDEFS
from torch._ops import OpOverload, OpOverloadPacket

from paritas.core.errors import UnsupportedTorchError, UsageError, in_one_line
from paritas.core.torch_private.kernels import to_meta
from paritas.core.torch_private.operators import Traits, map_tensors, tensors_in, traits

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from torch import Tensor

    _Arguments = Mapping[str, Any]


# --- Argument checks that some kernels lack -------------------------------------------------------

# Some kernels do not check the size or range of saved statistics and indices, because those of a
# program always fit. With those of a damaged dump they would read or write out of bounds.


def fits_kernel(name: str, arguments: Mapping[str, Any]) -> bool:
    """Whether an operator may run on these arguments, named as in its schema."""
    check = _ARGUMENT_CHECKS.get(name)
    try:
        return check is None or check(arguments)
    except (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ZeroDivisionError):
        return False  # the arguments have wrong types


def _check_layer_norm(arguments: _Arguments) -> bool:
    x, shape = arguments["input"], tuple(arguments["normalized_shape"])
    if x.shape[x.dim() - len(shape) :] != shape or arguments["grad_out"].shape != x.shape:
        return False
    rows = x.numel() // max(1, math.prod(shape))
    return _have_count(rows, arguments["mean"], arguments["rstd"]) and _have_shape(
        shape, arguments["weight"], arguments["bias"]
    )


def _check_group_norm(arguments: _Arguments) -> bool:
    x, n, c = arguments["input"], arguments["N"], arguments["C"]
    groups = arguments["group"]
    sizes_fit = x.numel() == n * c * arguments["HxW"] and groups > 0 and c % groups == 0
    same = arguments["grad_out"].shape == x.shape
    statistics = _have_count(n * groups, arguments["mean"], arguments["rstd"])
    return sizes_fit and same and statistics and _have_shape((c,), arguments["weight"])


def _check_batch_norm(arguments: _Arguments) -> bool:
    x = arguments["input"]
    channels = x.shape[1]
    names = ("weight", "running_mean", "running_var", "save_mean", "save_invstd")
    present = [
        arguments[name] for name in names if arguments[name] is not None and arguments[name].numel()
    ]
    needed = ("save_mean", "save_invstd") if arguments["train"] else ("running_mean", "running_var")
    complete = all(arguments[name] is not None and arguments[name].numel() for name in needed)
    return complete and arguments["grad_out"].shape == x.shape and _have_count(channels, *present)


def _check_nll_loss(arguments: _Arguments) -> bool:
    x, target, weight = arguments["self"], arguments["target"], arguments["weight"]
    classes = x.shape[1 if x.dim() > 1 else 0]
    # One value per position: all axes except that of the classes.
    positions = x.numel() // max(1, classes)
    if target.numel() != positions or (weight is not None and weight.shape != (classes,)):
        return False
    expected = target[target != arguments["ignore_index"]]
    each = arguments["reduction"] == 0
    sizes = _have_count(positions if each else 1, arguments["grad_output"]) and _have_count(
        1, arguments["total_weight"]
    )
    return sizes and _are_in_range(expected, classes)


def _check_embedding(arguments: _Arguments) -> bool:
    indices, grad = arguments["indices"], arguments["grad_output"]
    same = tuple(grad.shape[:-1]) == tuple(indices.shape)
    return same and _are_in_range(indices, arguments["num_weights"])


def _check_max_pool(axes: int) -> Callable[[_Arguments], bool]:
    def check(arguments: _Arguments) -> bool:
        x, indices = arguments["self"], arguments["indices"]
        same = indices.shape == arguments["grad_output"].shape
        same = same and indices.shape[:-axes] == x.shape[:-axes]
        return same and _are_in_range(indices, math.prod(x.shape[-axes:]))

    return check


def _check_attention(arguments: _Arguments) -> bool:
    query, key, value, out = (arguments[name] for name in ("query", "key", "value", "out"))
    four_axes = all(tensor.dim() == 4 for tensor in (query, key, value))  # noqa: PLR2004
    same = out.shape == arguments["grad_out"].shape == query.shape[:-1] + value.shape[-1:]
    rows = tuple(query.shape[:-1])
    alike = key.shape == value.shape and key.shape[0] == query.shape[0]
    heads = query.shape[1] == key.shape[1] and query.shape[-1] == key.shape[-1]
    return four_axes and same and alike and heads and tuple(arguments["logsumexp"].shape) == rows


def _have_count(count: int, *tensors: Any) -> bool:
    return all(isinstance(tensor, torch.Tensor) and tensor.numel() == count for tensor in tensors)


def _have_shape(shape: tuple[int, ...], *tensors: Any) -> bool:
    return all(tensor is None or tuple(tensor.shape) == shape for tensor in tensors)


def _are_in_range(indices: Any, count: int) -> bool:
    if indices.dtype not in (torch.int64, torch.int32):
        return False
    return not indices.numel() or (int(indices.min()) >= 0 and int(indices.max()) < count)


_ARGUMENT_CHECKS: dict[str, Callable[[_Arguments], bool]] = {
    "native_layer_norm_backward": _check_layer_norm,
    "native_group_norm_backward": _check_group_norm,
    "native_batch_norm_backward": _check_batch_norm,
    "nll_loss_backward": _check_nll_loss,
    "nll_loss2d_backward": _check_nll_loss,
    "embedding_dense_backward": _check_embedding,
    "max_pool2d_with_indices_backward": _check_max_pool(2),
    "_scaled_dot_product_flash_attention_for_cpu_backward": _check_attention,
}


# --- Finding an operator by its name --------------------------------------------------------------

_OPERATOR_NAME = re.compile(r"(aten|prims)\.(\w{1,80})\.(\w{1,80})")
# Allowed in addition to those that torch marks as core or pointwise, or can decompose.
_ALSO_ALLOWED = frozenset(
    """
    _adaptive_avg_pool3d_backward _cdist_backward _conj _fft_c2c _fft_c2r _fft_r2c _linalg_det
    _linalg_eigh _linalg_slogdet _linalg_solve_ex _linalg_svd _to_copy
    _scaled_dot_product_flash_attention_for_cpu_backward absolute adaptive_avg_pool2d argsort
    avg_pool3d_backward batch_norm bilinear broadcast_tensors broadcast_to cdist cholesky chunk
    concat concatenate contiguous conv1d conv2d conv3d conv_transpose1d conv_transpose2d
    conv_transpose3d cosine_similarity cross cross_entropy_loss cummax cummin detach diff einsum
    expand_as flatten grid_sampler_2d_backward grid_sampler_3d grid_sampler_3d_backward group_norm
    hstack imag inner instance_norm isclose kron kthvalue layer_norm lift_fresh_copy
    linalg_cholesky_ex linalg_householder_product linalg_inv_ex linalg_lu linalg_lu_factor_ex
    linalg_lu_solve linalg_matrix_exp linalg_qr linalg_solve_triangular linear log_softmax
    logcumsumexp matmul max_pool1d max_pool2d max_pool3d median mode movedim narrow nanmedian
    outer pad real reflection_pad1d_backward reflection_pad2d_backward repeat_interleave
    replication_pad1d_backward replication_pad2d_backward replication_pad3d_backward reshape
    reshape_as resolve_conj resolve_neg rms_norm scaled_dot_product_attention searchsorted softmax
    softshrink_backward sort split t take_along_dim tensordot tile to type_as unflatten
    upsample_bicubic2d_backward upsample_bilinear2d_backward upsample_linear1d_backward
    upsample_nearest1d_backward upsample_nearest2d_backward upsample_nearest3d_backward
    upsample_trilinear3d_backward view_as view_as_complex view_as_real vstack
    """.split()  # noqa: SIM905  (a hundred quoted names are harder to read)
)
# Operators without a CPU kernel, or with one that does not check its arguments: decomposed.
_TAKEN_APART = frozenset(
    """
    _fused_rms_norm_backward batch_norm_backward cudnn_batch_norm cudnn_batch_norm_backward
    max_unpool2d max_unpool3d miopen_batch_norm_backward
    """.split()  # noqa: SIM905
)
# Operators that do not check their arguments and cannot be decomposed, or have side effects.
_NEVER_ALLOWED = frozenset({"_embedding_bag", "resize", "set"})
_UNWRITTEN = re.compile(r"(new_)?empty(_like|_strided|_permuted)?")
_PRIMS_REFUSED = re.compile(
    r"inductor_.*|_make_token|_sink_tokens|_unsafe.*|copy_.*|item|resize|svd"
)
_PRIMS_DRAWING = re.compile(r"inductor_(rand|seed|lookup_seed).*|normal|uniform")
_ALLOWED_TYPE = re.compile(
    r"Optional\[(.+)\]|List\[(.+)\]|(Tensor|number|int|SymInt|float|bool|complex"
    r"|ScalarType|Layout|Device|MemoryFormat|str|Generator)"
)
# Options about the location of a tensor, which are ignored here.
_PLACING_OPTIONS = frozenset({"pin_memory", "non_blocking"})


@dataclasses.dataclass(frozen=True)
class NamedOperator:
    """An operator that may be run.

    Attributes:
        name: its name in the dump.
        kind: its traits; None for functions on sizes and tuples.
        takes: name of each argument, and whether it is a list, in order.
        given: names of the arguments with a default.
    """

    name: str
    run: Callable[..., Any]
    kind: Traits | None = None
    func: Any = None
    takes: tuple[tuple[str, bool], ...] = ()
    given: frozenset[str] = frozenset()

    @property
    def writes(self) -> frozenset[int | str]:
        """Positions and names of the arguments that it writes to."""
        return frozenset() if self.kind is None else self.kind.mutates

    def foretell(self, args: Sequence[Any], kwargs: dict[str, Any]) -> int:
        """The size of its results in bytes, without computing them.

        Raises:
            UsageError: the size is unknown, or the arguments do not fit.
        """
        if self.kind is None:
            return 0
        names = [name for name, _ in self.takes]
        if not fits_kernel(self.kind.name, {**dict(zip(names, args, strict=False)), **kwargs}):
            raise UsageError(f"the recorded arguments of {self.name} do not fit together")
        args = [map_tensors(value, to_meta) for value in args]
        kwargs = {key: map_tensors(value, to_meta) for key, value in kwargs.items()}
        made_anew = any(name == "device" for name, _ in self.takes) and not _holds_tensor(args)
        if made_anew or kwargs.get("device") is not None:
            kwargs["device"] = torch.device("meta")
        try:
            result = self.func(*args, **kwargs)
        except Exception as error:
            raise UsageError(
                f"cannot determine the size of the result of {self.name} "
                f"({in_one_line(error, 100)})"
            ) from error
        return sum(map(_nbytes, tensors_in(result)))

    def settle_options(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        """Keyword arguments for a run on the CPU, whatever the recorded device."""
        options = {key: value for key, value in kwargs.items() if key not in _PLACING_OPTIONS}
        if options.get("device") is not None:
            options["device"] = torch.device("cpu")
        if options.get("layout") not in (None, torch.strided):
            raise UsageError(f"{self.name} creates a tensor of layout {options['layout']}")
        return options


def operator_named(name: str) -> NamedOperator:
    """The operator that a dump names.

    Raises:
        UsageError: no operator of this name may be run; the message says why.
    """
    plain = _ON_NUMBERS.get(name.removeprefix("operator."))
    if plain is not None:
        return NamedOperator(name, plain)
    match = _OPERATOR_NAME.fullmatch(name)
    if match is None:
        raise UsageError(f"{name[:100]!r} is not an operator of torch")
    func = _look_up(*match.groups())
    if not isinstance(func, OpOverload):
        raise UsageError(f"torch {torch.__version__} has no operator {name!r}")
    kind = traits(func)
    _check_purpose(name, func, kind)
    arguments = func._schema.arguments
    plainly = _AS_RESHAPE.get(name, func)
    return NamedOperator(
        name,
        decomposition_table[func] if kind.name in _TAKEN_APART else plainly,
        kind,
        plainly,
        tuple((argument.name, "List[" in str(argument.type)) for argument in arguments),
        frozenset(argument.name for argument in arguments if argument.has_default_value()),
    )


def _look_up(namespace: str, name: str, overload: str) -> Any:
    packet = getattr(getattr(torch.ops, namespace), name, None)
    if packet is None and namespace == "prims":
        importlib.import_module("torch._inductor.inductor_prims")  # defines the rest of them
        packet = getattr(torch.ops.prims, name, None)
    return getattr(packet, overload, None)


def _check_purpose(name: str, func: OpOverload, kind: Traits) -> None:
    draws = kind.random and not any(
        argument.name == "dropout_p" for argument in func._schema.arguments
    )
    is_prim = kind.namespace == "prims"
    if draws or (is_prim and _PRIMS_DRAWING.fullmatch(kind.name)):
        raise UsageError(f"{name} draws random numbers")
    if _UNWRITTEN.fullmatch(kind.name):
        raise UsageError(f"{name} returns uninitialized memory")
    if is_prim:
        is_accepted = _PRIMS_REFUSED.fullmatch(kind.name) is None
    else:
        is_accepted = (
            kind.name in _ALSO_ALLOWED
            or _is_core_or_decomposed(func)
            or (bool(kind.mutates) and _writes_as_a_known_one(kind))
        )
    apart = kind.name in _TAKEN_APART
    if (
        kind.name in _NEVER_ALLOWED
        or not is_accepted
        or (apart and func not in decomposition_table)
    ):
        raise UsageError(f"{name} is not among the operators that paritas replays")
    takes = [str(argument.type) for argument in func._schema.arguments]
    gives = [str(output.type) for output in func._schema.returns]
    if not gives or not all(give in {"Tensor", "List[Tensor]"} for give in gives):
        raise UsageError(f"{name} returns no tensor")
    strange = [take for take in takes if not _is_allowed_type(take)]
    if strange:
        raise UsageError(f"{name} takes a {strange[0]}")


def _is_core_or_decomposed(func: OpOverload) -> bool:
    core = torch.Tag.core in func.tags or torch.Tag.pointwise in func.tags
    return core or func in decomposition_table


def _writes_as_a_known_one(kind: Traits) -> bool:
    """Whether an in-place operator has a known functional form."""
    packet = getattr(torch.ops.aten, kind.name, None)
    if packet is None or kind.namespace != "aten":
        return False
    return any(_is_core_or_decomposed(getattr(packet, name)) for name in packet.overloads())


def _is_allowed_type(kind: str) -> bool:
    match = _ALLOWED_TYPE.fullmatch(kind)
    if match is None:
        return False
    inner = match[1] or match[2]
    return inner is None or _is_allowed_type(inner)


def _nbytes(tensor: Tensor) -> int:
    return math.prod(tensor.shape) * tensor.dtype.itemsize


def _holds_tensor(args: Sequence[Any]) -> bool:
    return any(
        isinstance(value, torch.Tensor)
        or (isinstance(value, list | tuple) and _holds_tensor(value))
        for value in args
    )


def _get_item(values: Any, index: Any) -> Any:
    if not isinstance(values, list | tuple) or type(index) is not int:
        raise TypeError(f"an item {index!r} of a {type(values).__name__}")
    return values[index]


def _on_integers(function: Callable[[int, int], int]) -> Callable[[Any, Any], int]:
    def run(left: Any, right: Any) -> int:
        # Only sizes: other numbers could grow without limit.
        if any(type(value) is not int or abs(value) >> 63 for value in (left, right)):
            raise TypeError(f"{function.__name__} of {left!r:.40} and {right!r:.40}")
        return function(left, right)

    return run


def _reshape_alias(tensor: Tensor, size: Sequence[int], _: Any) -> Tensor:
    """A named function, which can be pickled for another process."""
    return tensor.reshape(size)


# The strides of a tensor from a file are unknown: a view of it may need a copy.
_AS_RESHAPE: dict[str, Callable[..., Any]] = {
    "aten.view.default": torch.ops.aten.reshape.default,
    "aten._unsafe_view.default": torch.ops.aten.reshape.default,
    "aten._reshape_alias.default": _reshape_alias,
}
_ON_NUMBERS: dict[str, Callable[..., Any]] = {
    "getitem": _get_item,
    **{
        function.__name__: _on_integers(function)
        for function in (
            operator.add,
            operator.sub,
            operator.mul,
            operator.floordiv,
            operator.mod,
        )
    },
}


# --- Sample inputs, from torch's own test database ------------------------------------------------

# Importing it takes seconds, so it is imported when samples are asked for.
DATABASE = "torch.testing._internal.common_methods_invocations"
_BACKWARD = re.compile(r"_backward(_data)?$")
# In what the dispatcher says about an operator.
_REGISTERED_AT = re.compile(r"registered at (.+?\.py):\d+")
_OF_TORCH = frozenset({"aten", "prims", "prim"})


def find_operator(name: str) -> OpOverload | OpOverloadPacket | None:
    """An operator by its name, `aten.add.Tensor` or `aten.relu`; None if there is none."""
    parts = name.removeprefix("torch.ops.").replace("::", ".").split(".")
    if len(parts) not in {2, 3} or not all(part.isidentifier() for part in parts):
        return None
    operator_object: Any = torch.ops
    for part in parts:
        try:
            operator_object = getattr(operator_object, part)
        except (AttributeError, RuntimeError):
            return None
    if isinstance(operator_object, OpOverloadPacket) and "default" in operator_object.overloads():
        # That of `aten.add` adds two numbers, for TorchScript.
        takes_tensors = "Tensor" in str(operator_object.default._schema)
        operator_object = operator_object.default if takes_tensors else operator_object
    return operator_object if isinstance(operator_object, OpOverload | OpOverloadPacket) else None


def is_operator(value: Any) -> bool:
    """Whether a value is an operator of torch, with or without its overload."""
    return isinstance(value, OpOverload | OpOverloadPacket)


def registering_module(target: OpOverload | OpOverloadPacket) -> str | None:
    """The module that registers an operator when it is imported; None if torch does, or unknown.

    A function of Python is in that module, or a library remembers the line that created it. An
    operator in C++ belongs to the package with the name of its namespace, if there is one.
    """
    func: Any = target
    if isinstance(target, OpOverloadPacket):
        func = getattr(target, target.overloads()[0])
    homes = (
        possible_home for possible_home in _possible_homes(func) if possible_home in sys.modules
    )
    home = next(homes, "torch")
    return None if home.partition(".")[0] in {"torch", "__main__"} else home


def _possible_homes(func: OpOverload) -> Iterator[str]:
    name, namespace = func.name().partition(".")[0], func.namespace
    if namespace in _OF_TORCH:
        return
    yield str(getattr(getattr(OPDEFS.get(name), "_init_fn", None), "__module__", ""))
    files = set(_REGISTERED_AT.findall(torch._C._dispatch_dump(func.name())))
    fake = simple_registry.singleton.find(name).fake_impl.kernel
    if fake is not None:
        files.add(str(fake.source).rpartition(":")[0])
    for key, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if file in files and key.partition(".")[0] != "torch":
            yield key
    yield namespace


def sample_calls(
    name: str, dtype: torch.dtype, device: str = "cpu", most: int = 20
) -> Iterator[tuple[tuple[Any, ...], dict[str, Any]]]:
    """Arguments of calls of an operator that torch's tests make, as the operator itself gets them.

    The tests call functions, not operators. Each sample is run, and the arguments of the operator
    of that name are recorded; those of a backward operator, as gradients are computed. An operator
    in place gets what the one that returns a new tensor gets.

    Raises:
        UnsupportedTorchError: torch's database of operators cannot be imported or has another form.
    """
    target = find_operator(name)
    if target is None:
        return
    target = _out_of_place(target) or target
    packet = target.overloadpacket if isinstance(target, OpOverload) else target
    base = str(packet).removeprefix("aten.")
    remaining = most
    for entry in _entries(base):
        if dtype not in _dtypes_of(entry, device):
            continue
        for call in _calls_of(entry, target, dtype, device):
            yield call
            remaining -= 1
            if not remaining:
                return


def _out_of_place(target: OpOverload | OpOverloadPacket) -> OpOverload | OpOverloadPacket | None:
    """The operator that returns a new tensor, for one that writes to its first argument."""
    name, _, overload = str(target).removeprefix("aten.").partition(".")
    if not name.endswith("_") or name.endswith("__"):
        return None
    return find_operator(f"aten.{name[:-1]}{'.' if overload else ''}{overload}")


def operator_database() -> list[Any]:
    """All entries of the database of torch's tests.

    Raises:
        UnsupportedTorchError: it cannot be imported.
    """
    try:
        with warnings.catch_warnings(), _with_expecttest():
            warnings.simplefilter("ignore")
            return list(importlib.import_module(DATABASE).op_db)
    except Exception as error:
        raise UnsupportedTorchError(
            f"{DATABASE} cannot be used with torch {torch.__version__}: "
            f"{type(error).__name__}: {error}"
        ) from error


@contextlib.contextmanager
def _with_expecttest() -> Iterator[None]:
    """Let the database be imported without the package `expecttest`, which its samples do not use.

    torch's tests derive their test cases from a class of it, and torch does not depend on it.
    """
    if importlib.util.find_spec("expecttest") is not None:
        yield
        return
    stand_in = types.ModuleType("expecttest")
    stand_in.__dict__.update(TestCase=unittest.TestCase, ACCEPT=False)
    sys.modules["expecttest"] = stand_in
    try:
        yield
    finally:
        del sys.modules["expecttest"]


def _entries(base: str) -> list[Any]:
    """The entries of the database that are likely to call an operator."""
    base = _BACKWARD.sub("", base)
    plain = base.strip("_")
    short = [plain, plain.rpartition("_")[0] if plain.startswith("native_") else plain]
    names = {name.lower() for name in (base, *short)}
    names |= {plain.replace(prefix, "", 1) for prefix in ("linalg_", "special_", "fft_")}

    def is_near(entry: Any) -> bool:
        own_name = str(entry.name).rpartition(".")[2]
        own_names = {own_name, str(getattr(entry, "aten_name", "") or ""), f"_{own_name}"}
        own_names |= {alias.name for alias in getattr(entry, "aliases", ())}
        own_names |= {f"_{own_name}", own_name.replace("_", "")}
        return bool(own_names & (names | {f"_{n}" for n in names}))

    return [entry for entry in operator_database() if is_near(entry)]


def _dtypes_of(entry: Any, device: str) -> set[torch.dtype]:
    supported: set[torch.dtype] = set(entry.supported_dtypes(torch.device(device).type))
    return supported


def _calls_of(
    entry: Any, target: Any, dtype: torch.dtype, device: str
) -> Iterator[tuple[tuple[Any, ...], dict[str, Any]]]:
    from paritas.core.torch_private.operators import DispatchMode

    class Recorder(DispatchMode):
        def __init__(self) -> None:
            super().__init__()  # type: ignore[no-untyped-call]
            self.calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

        def __torch_dispatch__(
            self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
        ) -> Any:
            is_same = func is target or getattr(func, "overloadpacket", None) is target
            if is_same:
                self.calls.append((args, dict(kwargs or {})))
            return func(*args, **(kwargs or {}))

    is_backward = _BACKWARD.search(str(target).split(".")[1]) is not None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for sample in entry.sample_inputs(device, dtype, requires_grad=is_backward):
            recorder = Recorder()
            with contextlib.suppress(Exception), recorder, torch.set_grad_enabled(is_backward):
                result = entry.op(sample.input, *sample.args, **sample.kwargs)
                if is_backward:
                    result.backward(torch.randn_like(result))
            yield from recorder.calls[:1]

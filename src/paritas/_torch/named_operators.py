"""Operators by name, for running what a dump says was run: only those that can do no harm.

A dump may come from anywhere. So a name is looked up among torch's own tensor operators, and taken
only if torch itself says that it is one of the pure ones out of which programs are made. What draws
random numbers, reads memory that nobody wrote, knows of files or gives no tensor is refused.
"""

from __future__ import annotations

import dataclasses
import importlib
import math
import operator
import re
from typing import TYPE_CHECKING, Any

import torch
from torch._decomp import decomposition_table
from torch._ops import OpOverload

from paritas._torch.kernel_checks import fits_kernel
from paritas._torch.lifting import map_tensors
from paritas._torch.operators import Traits, traits
from paritas.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

__all__ = ["NamedOperator", "operator_named"]

_NAME = re.compile(r"(aten|prims)\.(\w{1,80})\.(\w{1,80})")
# Beyond those that torch marks as core or pointwise, or knows to take apart.
_FURTHER = frozenset(
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
# What has no kernel on the host, or one that believes all it is given, and can be taken apart.
_TAKEN_APART = frozenset(
    """
    _fused_rms_norm_backward batch_norm_backward cudnn_batch_norm cudnn_batch_norm_backward
    max_unpool2d max_unpool3d miopen_batch_norm_backward
    """.split()  # noqa: SIM905
)
# And what believes all it is given, and cannot; or has an effect.
_UNSAFE = frozenset({"_embedding_bag", "resize", "set"})
_UNWRITTEN = re.compile(r"(new_)?empty(_like|_strided|_permuted)?")
_PRIMS_REFUSED = re.compile(
    r"inductor_.*|_make_token|_sink_tokens|_unsafe.*|copy_.*|item|resize|svd"
)
_PRIMS_DRAWING = re.compile(r"inductor_(rand|seed|lookup_seed).*|normal|uniform")
_TAKEN = re.compile(
    r"Optional\[(.+)\]|List\[(.+)\]|(Tensor|number|int|SymInt|float|bool|complex"
    r"|ScalarType|Layout|Device|MemoryFormat|str|Generator)"
)
# Beside a whole tensor's values these say where and how it lies, which is decided anew here.
_PLACED = frozenset({"pin_memory", "non_blocking"})


@dataclasses.dataclass(frozen=True)
class NamedOperator:
    """An operator that may be run.

    Attributes:
        name: as the dump has it.
        kind: what it does; None for what works on sizes and tuples.
        takes: name, whether it is a list, of each argument, in order.
        given: those that have a default.
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
        """How many bytes its results will take, without making them.

        Raises:
            UsageError: that cannot be told, or the arguments do not fit.
        """
        if self.kind is None:
            return 0
        names = [name for name, _ in self.takes]
        if not fits_kernel(self.kind.name, {**dict(zip(names, args, strict=False)), **kwargs}):
            raise UsageError(f"{self.name} was given values that do not belong together")
        args = [map_tensors(value, _hollow) for value in args]
        kwargs = {key: map_tensors(value, _hollow) for key, value in kwargs.items()}
        made_anew = any(name == "device" for name, _ in self.takes) and not _holds_tensor(args)
        if made_anew or kwargs.get("device") is not None:
            kwargs["device"] = torch.device("meta")
        try:
            made = self.func(*args, **kwargs)
        except Exception as error:
            first = (str(error).strip().splitlines() or [""])[0]
            raise UsageError(
                f"{self.name}: how large its result is cannot be foretold "
                f"({type(error).__name__}: {first:.100})"
            ) from error
        sizes: list[int] = []
        map_tensors(made, lambda tensor: sizes.append(_nbytes(tensor)))
        return sum(sizes)

    def settled(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        """Named arguments for a run here: whatever device was asked for, it is the host."""
        kept = {key: value for key, value in kwargs.items() if key not in _PLACED}
        if kept.get("device") is not None:
            kept["device"] = torch.device("cpu")
        if kept.get("layout") not in (None, torch.strided):
            raise UsageError(f"{self.name} makes a tensor of layout {kept['layout']}")
        return kept


def operator_named(name: str) -> NamedOperator:
    """The operator that a dump names.

    Raises:
        UsageError: there is none of this name that may be run; the message says why.
    """
    plain = _ON_NUMBERS.get(name.removeprefix("operator."))
    if plain is not None:
        return NamedOperator(name, plain)
    found = _NAME.fullmatch(name)
    if found is None:
        raise UsageError(f"{name[:100]!r} is no operator of torch's own")
    func = _looked_up(*found.groups())
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
        tuple((one.name, "List[" in str(one.type)) for one in arguments),
        frozenset(one.name for one in arguments if one.has_default_value()),
    )


def _looked_up(namespace: str, name: str, overload: str) -> Any:
    packet = getattr(getattr(torch.ops, namespace), name, None)
    if packet is None and namespace == "prims":
        importlib.import_module("torch._inductor.inductor_prims")  # defines the rest of them
        packet = getattr(torch.ops.prims, name, None)
    return getattr(packet, overload, None)


def _check_purpose(name: str, func: OpOverload, kind: Traits) -> None:
    draws = kind.random and not any(one.name == "dropout_p" for one in func._schema.arguments)
    is_prim = kind.namespace == "prims"
    if draws or (is_prim and _PRIMS_DRAWING.fullmatch(kind.name)):
        raise UsageError(f"{name} draws random numbers")
    if _UNWRITTEN.fullmatch(kind.name):
        raise UsageError(f"{name} gives whatever lies in memory")
    if is_prim:
        known = _PRIMS_REFUSED.fullmatch(kind.name) is None
    else:
        known = kind.name in _FURTHER or _is_known(func) or (bool(kind.mutates) and _is_twin(kind))
    apart = kind.name in _TAKEN_APART
    if kind.name in _UNSAFE or not known or (apart and func not in decomposition_table):
        raise UsageError(f"{name} is none of the operators that are run again")
    takes = [str(one.type) for one in func._schema.arguments]
    gives = [str(one.type) for one in func._schema.returns]
    if not gives or not all(one in {"Tensor", "List[Tensor]"} for one in gives):
        raise UsageError(f"{name} gives no tensor")
    strange = [one for one in takes if not _is_plain(one)]
    if strange:
        raise UsageError(f"{name} takes a {strange[0]}")


def _is_known(func: OpOverload) -> bool:
    core = torch.Tag.core in func.tags or torch.Tag.pointwise in func.tags
    return core or func in decomposition_table


def _is_twin(kind: Traits) -> bool:
    """Whether an operator that writes has the name of one that does not and is known."""
    packet = getattr(torch.ops.aten, kind.name, None)
    if packet is None or kind.namespace != "aten":
        return False
    return any(_is_known(getattr(packet, name)) for name in packet.overloads())


def _is_plain(kind: str) -> bool:
    found = _TAKEN.fullmatch(kind)
    if found is None:
        return False
    inner = found[1] or found[2]
    return inner is None or _is_plain(inner)


def _hollow(tensor: Tensor) -> Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


def _nbytes(tensor: Tensor) -> int:
    return math.prod(tensor.shape) * tensor.dtype.itemsize


def _holds_tensor(args: Sequence[Any]) -> bool:
    return any(
        isinstance(value, torch.Tensor)
        or (isinstance(value, list | tuple) and _holds_tensor(value))
        for value in args
    )


def _item(values: Any, index: Any) -> Any:
    if not isinstance(values, list | tuple) or type(index) is not int:
        raise TypeError(f"an item {index!r} of a {type(values).__name__}")
    return values[index]


def _of_integers(function: Callable[[int, int], int]) -> Callable[[Any, Any], int]:
    def run(left: Any, right: Any) -> int:
        # Sizes; others than these could be made to grow without end.
        if any(type(value) is not int or abs(value) >> 63 for value in (left, right)):
            raise TypeError(f"{function.__name__} of {left!r:.40} and {right!r:.40}")
        return function(left, right)

    return run


def _reshape_alias(tensor: Tensor, size: Sequence[int], _: Any) -> Tensor:
    """Of a name, so that another process can be given it."""
    return tensor.reshape(size)


# How a tensor lies in memory is not known of one that was read: a view of it may need a copy.
_AS_RESHAPE: dict[str, Callable[..., Any]] = {
    "aten.view.default": torch.ops.aten.reshape.default,
    "aten._unsafe_view.default": torch.ops.aten.reshape.default,
    "aten._reshape_alias.default": _reshape_alias,
}
_ON_NUMBERS: dict[str, Callable[..., Any]] = {
    "getitem": _item,
    **{
        function.__name__: _of_integers(function)
        for function in (
            operator.add,
            operator.sub,
            operator.mul,
            operator.floordiv,
            operator.mod,
        )
    },
}

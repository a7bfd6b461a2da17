"""Mistakes that compilers and kernel authors make: where each fits a graph, and what it then gives.

A kind is a function of a running call, registered with a function that lists its variants for a
node. Nothing of paritas is used here.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx

aten: Any = torch.ops.aten
OVERLOAD = type(aten.add.Tensor)


# --- A call of the graph --------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Place:
    """A node as a rule sees it."""

    node: fx.Node
    backward: bool

    @property
    def name(self) -> str:
        """The operator, without overload."""
        target = self.node.target
        return str(target).split(".")[1] if isinstance(target, OVERLOAD) else ""

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the result, or of the first of several."""
        value = self.node.meta.get("val")
        value = next(iter(value), None) if isinstance(value, list | tuple) else value
        return tuple(map(int, value.shape)) if isinstance(value, Tensor) else ()

    def argument(self, position: int) -> Any:
        """An argument as it is in the graph."""
        return self.node.args[position] if position < len(self.node.args) else None

    def tensor(self, position: int) -> Tensor | None:
        """The shape and dtype of a tensor argument."""
        value = self.argument(position)
        known = value.meta.get("val") if isinstance(value, fx.Node) else None
        return known if isinstance(known, Tensor) else None

    @property
    def floats(self) -> bool:
        """Whether it computes one floating tensor with more than one element."""
        value = self.node.meta.get("val")
        whole = isinstance(value, Tensor) and value.is_floating_point() and value.numel() > 1
        return whole and self.name not in _IDLE


@dataclasses.dataclass(frozen=True)
class Call:
    """A call while it runs; `donor` is an earlier value of the shape of its first argument."""

    target: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    right: Any
    donor: Tensor | None = None
    size: float = 0.0

    def given(self, *changes: tuple[int, Any], **kwargs: Any) -> Any:
        """The result with other arguments."""
        args = list(self.args)
        for position, value in changes:
            args[position] = value
        return self.target(*args, **{**self.kwargs, **kwargs})


_IDLE = frozenset(
    """
    alias view reshape expand permute transpose t unsqueeze squeeze slice select split as_strided
    clone copy detach empty full full_like zeros zeros_like ones ones_like arange scalar_tensor
    convert_element_type _to_copy _unsafe_view unbind lift_fresh_copy empty_strided new_zeros
    new_empty new_full iota constant_pad_nd
    """.split()  # noqa: SIM905  (many quoted names are harder to read)
)
_LARGEST_EPSILON = 1e-2


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _narrow(tensor: Any) -> bool:
    return isinstance(tensor, Tensor) and tensor.dtype in {torch.float32, torch.bfloat16}


def _coarse(value: Any) -> Any:
    """Rounded to the next narrower dtype; float64 stays, as a compiler would leave it."""
    if not _narrow(value):
        return value
    narrow = torch.bfloat16 if value.dtype is torch.float32 else torch.float8_e4m3fn
    return value.to(narrow).to(value.dtype)


def _axis(place: Place, position: int = 1) -> int | None:
    """The one axis of a reduction, or None."""
    dims = place.argument(position)
    dims = [dims] if isinstance(dims, int) else dims
    given = place.tensor(0)
    if given is None or not isinstance(dims, list | tuple) or len(dims) != 1:
        return None
    return int(dims[0]) % max(1, given.dim())


# --- The kinds of faults: where each fits (its variants), and what the call then gives ------------

KINDS: dict[str, tuple[Any, Any]] = {}


def kind(where: Any) -> Any:
    """Register a kind under the name of its function."""

    def register(act: Any) -> Any:
        KINDS[act.__name__] = (where, act)
        return act

    return register


def named(*names: str, variants: tuple[str, ...] = ("",)) -> Any:
    """Calls of these operators."""
    return lambda place: list(variants) if place.name in names else []


_EPSILON = {
    "native_layer_norm": 4, "native_group_norm": 7, "native_batch_norm": 7,
    "_native_batch_norm_legit_functional": 7, "_native_batch_norm_legit_no_training": 6,
}  # fmt: skip


def _has_epsilon(place: Place) -> list[str]:
    position = 1 if place.name == "add" else _EPSILON.get(place.name)
    value = None if position is None else place.argument(position)
    fits = _number(value) and 0 < value <= _LARGEST_EPSILON
    return [f"{position} 10", f"{position} 0"] if fits else []


@kind(_has_epsilon)
def wrong_epsilon(call: Call, variant: str) -> Any:
    position, factor = map(int, variant.split())
    return call.given((position, call.args[position] * factor))


def _has_scale(place: Place) -> list[str]:
    if place.name.startswith("_scaled_dot_product") and not place.backward:
        return ["attention"]
    fits = place.name in {"mul", "div"} and place.floats and _number(place.argument(1))
    return ["factor"] if fits and place.argument(1) != 1 else []


@kind(_has_scale)
def dropped_scale(call: Call, variant: str) -> Any:
    return call.given(scale=1.0) if variant == "attention" else call.args[0]


def _scalar_constant(place: Place) -> list[str]:
    value = place.argument(1)
    if place.name not in {"mul", "div", "add", "sub", "pow"} or not place.floats:
        return []
    return [""] if isinstance(value, float) and value != _in_bfloat16(value) else []


def _in_bfloat16(value: float) -> float:
    return float(torch.tensor(value, dtype=torch.float64).to(torch.bfloat16))


@kind(_scalar_constant)
def constant_in_bfloat16(call: Call, variant: str) -> Any:
    del variant
    return call.given((1, _in_bfloat16(call.args[1])))


_SWAPS = {"le": aten.lt, "lt": aten.le, "ge": aten.gt, "gt": aten.ge}


@kind(named("threshold_backward", *_SWAPS))
def closed_for_open_interval(call: Call, variant: str) -> Any:
    del variant
    name = str(call.target).split(".")[1]
    if name in _SWAPS:
        return _SWAPS[name](*call.args)
    gradient, value, limit = call.args
    return torch.where(value >= limit, gradient, 0.0)


@kind(named("threshold_backward", "relu", "leaky_relu", "leaky_relu_backward", "elu"))
def wrong_slope(call: Call, variant: str) -> Any:
    del variant
    name = str(call.target).split(".")[1]
    if name == "threshold_backward":
        return torch.where(call.args[1] > call.args[2], call.args[0], call.args[0] * 0.01)
    if name == "relu":
        return F.leaky_relu(call.args[0], 0.01)
    if name == "leaky_relu_backward":
        return call.given((2, call.args[2] * 2))
    return call.given((1, call.args[1] * 2)) if len(call.args) > 1 else call.right * 0.9


def _other_axes(place: Place) -> list[str]:
    given = place.tensor(0)
    axis = _axis(place) if place.name in _ALONG_AXIS else None
    if axis is None or given is None:
        return []
    same = place.name in {"_softmax", "_log_softmax", "cumsum"}
    sizes = given.shape
    return [
        str(other)
        for other in range(given.dim())
        if other != axis and sizes[other] > 1 and (same or sizes[other] == sizes[axis])
    ][:2]


_ALONG_AXIS = {"sum", "mean", "amax", "amin", "_softmax", "_log_softmax", "cumsum", "argmax"}


@kind(_other_axes)
def wrong_axis(call: Call, variant: str) -> Any:
    other = int(variant) if isinstance(call.args[1], int) else [int(variant)]
    return call.given((1, other))


_BIAS = {"convolution": 2, "native_layer_norm": 3, "native_group_norm": 2}


def _has_bias(place: Place) -> list[str]:
    if place.name in {"addmm", "baddbmm"}:
        return [""]
    position = _BIAS.get(place.name)
    return [""] if position is not None and place.tensor(position) is not None else []


@kind(_has_bias)
def missing_bias(call: Call, variant: str) -> Any:
    del variant
    name = str(call.target).split(".")[1]
    if name in {"addmm", "baddbmm"}:
        return call.given((0, torch.zeros_like(call.args[0])))
    return call.given((_BIAS[name], None))


def _masks(place: Place) -> list[str]:
    if place.name == "where":
        condition = place.tensor(0)
        return ["condition"] if condition is not None and condition.shape[-1:] > (1,) else []
    if place.name.startswith("_scaled_dot_product") and place.node.kwargs.get("attn_mask"):
        return ["attention"]
    value = place.node.meta.get("val")
    is_mask = isinstance(value, Tensor) and value.dtype is torch.bool and value.shape[-1:] > (1,)
    return ["result"] if is_mask and place.name not in _IDLE else []


@kind(_masks)
def shifted_mask(call: Call, variant: str) -> Any:
    if variant == "condition":
        return call.given((0, call.args[0].roll(1, -1)))
    if variant == "attention":
        return call.given(attn_mask=call.kwargs["attn_mask"].roll(1, -1))
    return call.right.roll(1, -1)


_FACTORS = {"mm": (0, 1), "addmm": (1, 2), "bmm": (0, 1), "baddbmm": (1, 2), "convolution": (0, 1)}


def _squares(place: Place) -> list[str]:
    found = []
    for position in _FACTORS.get(place.name, ()):
        given = place.tensor(position)
        is_square = given is not None and given.dim() > 1 and given.shape[-1] == given.shape[-2] > 1
        if is_square and not (place.name == "convolution" and position == 0):
            found.append(str(position))
    return found


@kind(_squares)
def transposed_weights(call: Call, variant: str) -> Any:
    position = int(variant)
    return call.given((position, call.args[position].transpose(-1, -2)))


@kind(lambda place: [""] if place.name == "convolution" and place.shape[2:] > (1,) else [])
def mirrored_kernel(call: Call, variant: str) -> Any:
    del variant
    weight = call.args[1]
    return call.given((1, weight.flip(tuple(range(2, weight.dim())))))


@kind(lambda place: ["coarse operands"] if place.name in _FACTORS else [])
def low_precision_operands(call: Call, variant: str) -> Any:
    del variant
    name = str(call.target).split(".")[1]
    return call.given(*((p, _coarse(call.args[p])) for p in _FACTORS[name]))


def _contraction(place: Place) -> list[str]:
    left = place.tensor(0) if place.name in {"mm", "bmm"} else place.tensor(1)
    fits = place.name in {"mm", "bmm", "addmm"} and left is not None and left.shape[-1] > 3
    return [""] if fits else []


def _operands(call: Call) -> tuple[Tensor, Tensor, Tensor | None]:
    name = str(call.target).split(".")[1]
    if name == "addmm":
        return call.args[1], call.args[2], call.args[0]
    return call.args[0], call.args[1], None


@kind(_contraction)
def low_precision_accumulation(call: Call, variant: str) -> Any:
    """Partial sums are kept in bfloat16."""
    del variant
    left, right, bias = _operands(call)
    if not _narrow(left):
        return call.right
    total = torch.zeros_like(call.right, dtype=torch.bfloat16)
    pieces = zip(left.split(8, -1), right.split(8, -2), strict=True)
    for one, other in pieces:
        total = total + torch.matmul(one.float(), other.float()).to(torch.bfloat16)
    total = total.to(left.dtype)
    return total if bias is None else total + bias


@kind(_contraction)
def lost_term(call: Call, variant: str) -> Any:
    """The tail of the contracted axis is left out."""
    del variant
    left, right, bias = _operands(call)
    total = torch.matmul(left[..., :-1], right[..., :-1, :])
    return total if bias is None else total + bias


_TRANSCENDENTAL = (
    "exp", "rsqrt", "tanh", "sigmoid", "erf", "gelu", "silu", "log", "sqrt", "reciprocal", "div",
    "pow", "_softmax", "gelu_backward", "silu_backward", "softplus", "mish", "hardswish",
)  # fmt: skip


@kind(lambda place: [""] if place.name in _TRANSCENDENTAL and place.floats else [])
def fast_math(call: Call, variant: str) -> Any:
    """An approximation with half the digits, in float32 and narrower only."""
    del variant
    return _coarse(call.right)


def _computed(place: Place) -> list[str]:
    return ["last column", "zero column", "last row"] if _is_wide(place) else []


def _is_wide(place: Place) -> bool:
    return place.floats and len(place.shape) > 1 and min(place.shape[0], place.shape[-1]) > 1


@kind(_computed)
def stale_tail(call: Call, variant: str) -> Any:
    wrong = call.right.clone()
    if variant == "last row":
        wrong[-1] = wrong[-2]
    else:
        wrong[..., -1] = wrong[..., -2] if variant == "last column" else 0.0
    return wrong


@kind(lambda place: [""] if _is_wide(place) and min(place.shape[-2:]) > 3 else [])
def uninitialised_tile(call: Call, variant: str) -> Any:
    """The last tile holds another tile's values."""
    del variant
    wrong = call.right.clone()
    rows, columns = (max(1, size // 4) for size in wrong.shape[-2:])
    wrong[..., -rows:, -columns:] = call.right[..., :rows, :columns]
    return wrong


def _sums_of_two(place: Place) -> bool:
    left, right = place.tensor(0), place.tensor(1)
    is_sum = place.name == "add" and place.floats and left is not None and right is not None
    return is_sum and left.shape == right.shape


@kind(lambda place: ["0", "1"] if _sums_of_two(place) and place.backward else [])
def missing_gradient_contribution(call: Call, variant: str) -> Any:
    return call.args[int(variant)]


@kind(lambda p: ["twice", "dropped", "minus"] if _sums_of_two(p) and not p.backward else [])
def wrong_residual(call: Call, variant: str) -> Any:
    left, right = call.args[:2]
    return {"twice": left + left, "dropped": left.clone(), "minus": left - right}[variant]


def _means(place: Place) -> list[str]:
    return ["n - 1"] if place.name == "mean" and place.floats else []


@kind(_means)
def wrong_divisor(call: Call, variant: str) -> Any:
    del variant
    count = call.args[0].numel() / max(1, call.right.numel())
    return call.right * (count / (count - 1)) if count > 1 else call.right * 2


@kind(named("var_mean", "var"))
def wrong_correction(call: Call, variant: str) -> Any:
    del variant
    return call.given(correction=1 - min(1, int(call.kwargs.get("correction", 1) or 0)))


@kind(lambda p: [""] if p.name == "native_dropout" else [])
def dropped_dropout_scale(call: Call, variant: str) -> Any:
    del variant
    return call.right[0] * (1 - call.args[1]), call.right[1]


def _indices(place: Place) -> list[str]:
    positions = {"embedding": 1, "gather": 2, "index_select": 2}
    position = positions.get(place.name)
    return [] if position is None else [str(position)]


@kind(_indices)
def index_off_by_one(call: Call, variant: str) -> Any:
    position = int(variant)
    index = call.args[position]
    return call.given((position, (index - 1).clamp(min=0)))


def _slices(place: Place) -> list[str]:
    given = place.tensor(0)
    if place.name != "slice" or given is None or not given.is_floating_point():
        return []
    return [""] if place.shape != tuple(given.shape) else []


@kind(_slices)
def slice_off_by_one(call: Call, variant: str) -> Any:
    del variant
    dim = call.args[1] if len(call.args) > 1 else 0
    return call.given((0, call.args[0].roll(1, dim))).clone()


@kind(named("avg_pool2d", "max_pool2d_with_indices", "avg_pool2d_backward"))
def wrong_padding(call: Call, variant: str) -> Any:
    del variant
    if isinstance(call.right, Tensor):  # an average over a window with one element too many
        size = call.args[1] if isinstance(call.args[0], Tensor) else [2]
        count = int(torch.tensor(size if isinstance(size, list | tuple) else [size]).prod())
        return call.right * (count / (count + 1))
    return call.right[0].clamp(min=0.0), call.right[1]


@kind(named("gelu", "gelu_backward"))
def other_gelu(call: Call, variant: str) -> Any:
    del variant
    known = call.kwargs.get("approximate", "none")
    return call.given(approximate="tanh" if known == "none" else "none")


def _swappable(place: Place) -> list[str]:
    parts = place.argument(0)
    if place.name != "cat" or not isinstance(parts, list | tuple) or len(parts) < 2:
        return []
    shapes = {tuple(part.meta["val"].shape) for part in parts}
    return [""] if len(shapes) == 1 else []


@kind(_swappable)
def swapped_concatenation(call: Call, variant: str) -> Any:
    del variant
    return call.given((0, list(call.args[0])[::-1]))


def _differences(place: Place) -> list[str]:
    fits = place.name == "sub" and place.floats and place.tensor(0) is not None
    full = fits and tuple(place.tensor(0).shape) == place.shape  # type: ignore[union-attr]
    return [""] if full and place.tensor(1) is not None else []


@kind(_differences)
def missing_correction_term(call: Call, variant: str) -> Any:
    """A difference without its second term, as a softmax's gradient without its sum."""
    del variant
    return call.args[0].clone()


@kind(named("_softmax_backward_data", "native_layer_norm_backward"))
def incomplete_gradient(call: Call, variant: str) -> Any:
    del variant
    if isinstance(call.right, Tensor):
        return call.args[0] * call.args[1]
    gradient, _, shape, _, rstd, weight = call.args[:6]
    plain = gradient * rstd if weight is None else gradient * weight.reshape(shape) * rstd
    return plain, *call.right[1:]


def _sums(place: Place) -> list[str]:
    axis = _axis(place) if place.name == "sum" else None
    given = place.tensor(0)
    return [str(axis)] if axis is not None and given is not None and given.shape[axis] > 2 else []


@kind(_sums)
def lost_row_of_sum(call: Call, variant: str) -> Any:
    axis = int(variant)
    given = call.args[0]
    return call.given((0, given.narrow(axis, 0, given.shape[axis] - 1)))


@kind(named("index_put", "embedding_dense_backward", "scatter_add"))
def overwrites_instead_of_adding(call: Call, variant: str) -> Any:
    del variant
    name = str(call.target).split(".")[1]
    if name == "index_put":
        return aten.index_put(*call.args[:3], False)
    if name == "scatter_add":
        return aten.scatter.src(*call.args)
    gradient, index, rows = call.args[:3]
    table = gradient.new_zeros(rows, gradient.shape[-1])
    table[index.reshape(-1)] = gradient.reshape(-1, gradient.shape[-1])
    return table


def _bounded(place: Place) -> list[str]:
    if place.name not in {"clamp", "clamp_min", "clamp_max", "hardtanh", "minimum"}:
        return []
    numbers = [i for i in (1, 2) if _number(place.argument(i)) and place.argument(i) != 0]
    return [str(i) for i in numbers] if place.floats else []


@kind(_bounded)
def wrong_bound(call: Call, variant: str) -> Any:
    position = int(variant)
    return call.given((position, call.args[position] * 0.9))


@kind(named("tanh_backward", "sigmoid_backward"))
def wrong_derivative(call: Call, variant: str) -> Any:
    del variant
    gradient, value = call.args[:2]
    is_tanh = "tanh" in str(call.target)
    return gradient * (1 - value) if is_tanh else gradient * value


@kind(named("convolution_backward"))
def lost_batch_in_gradient(call: Call, variant: str) -> Any:
    """The gradient of the weights misses the last image."""
    del variant
    gradient, given = call.args[:2]
    if len(gradient) < 2:
        return call.right[0], call.right[1] * 0.5, call.right[2]
    part = call.given((0, gradient[:-1]), (1, given[:-1]))
    return call.right[0], part[1], call.right[2]


@kind(named("native_batch_norm", "_native_batch_norm_legit_functional"))
def wrong_momentum(call: Call, variant: str) -> Any:
    del variant
    return call.given((6, call.args[6] * 2))


@kind(lambda p: [""] if p.name == "neg" and p.floats else [])
def lost_sign(call: Call, variant: str) -> Any:
    del variant
    return call.args[0].clone()


@kind(lambda p: [""] if p.floats and p.tensor(0) is not None and donor_of(p.node) else [])
def buffer_reused_too_early(call: Call, variant: str) -> Any:
    """The first argument has been overwritten with another value of its shape."""
    del variant
    return call.given((0, call.donor))


def donor_of(node: fx.Node) -> fx.Node | None:
    """The last value of the shape and dtype of the first argument, computed after it."""
    first = node.args[0]
    known = first.meta["val"] if isinstance(first, fx.Node) else None
    if not isinstance(known, Tensor) or not known.is_floating_point() or known.numel() < 2:
        return None
    before = node.prev
    while before.op == "call_function" and before is not first:
        value = before.meta.get("val")
        is_like = isinstance(value, Tensor) and value.dtype == known.dtype
        if is_like and value.shape == known.shape and Place(before, backward=False).floats:
            return before
        before = before.prev
    return None


@kind(lambda place: [""] if place.floats else [])
def slightly_scaled(call: Call, variant: str) -> Any:
    del variant
    return call.right * (1 + call.size)


@kind(lambda place: [""] if place.floats else [])
def one_wrong_element(call: Call, variant: str) -> Any:
    del variant
    wrong = call.right.reshape(-1).clone()
    wrong[wrong.numel() // 2] *= 1 + call.size
    return wrong.reshape(call.right.shape)


@kind(lambda place: [""] if place.floats else [])
def slightly_scaled_natively(call: Call, variant: str) -> Any:
    """A biased kernel: in float64 there is another one."""
    del variant
    return call.right * (1 + call.size) if _narrow(call.right) else call.right


@kind(lambda place: [""] if place.floats else [])
def noisy_kernel(call: Call, variant: str) -> Any:
    """Rounding errors of this size, instead of those of the dtype."""
    del variant
    if not _narrow(call.right):
        return call.right
    generator = torch.Generator().manual_seed(0)
    noise = torch.rand(call.right.shape, generator=generator, dtype=torch.float64) * 2 - 1
    return call.right.double() * (1 + call.size * noise)


# Faults with a size, which can be chosen so that they have a given strength.
SIZED = frozenset(
    {"slightly_scaled", "one_wrong_element", "slightly_scaled_natively", "noisy_kernel"}
)
# Faults of accuracy: in float64 the program is right.
NATIVE_ONLY = frozenset(
    {"slightly_scaled_natively", "noisy_kernel", "fast_math", "low_precision_operands",
     "low_precision_accumulation"}
)  # fmt: skip

"""Norms, softmax, losses and their backward kernels, written out in simple operators."""

from __future__ import annotations

import dataclasses
import math
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import torch

from paritas.core.diagnosis.calls import step_names
from paritas.core.diagnosis.patterns.attention import factor_of, weights_and_values
from paritas.core.diagnosis.patterns.norms import NORMS, norm_of
from paritas.core.diagnosis.patterns.steps import with_output
from paritas.core.diagnosis.patterns.sums import reduced_dims
from paritas.core.torch_private.kernels import decomposition_of
from paritas.core.torch_private.operators import (
    DispatchMode,
    call_bound,
    count_results,
    tensors_in,
    traits,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch import Tensor

    from paritas.core.diagnosis.calls import Step

aten = torch.ops.aten


class Writer(Protocol):
    """Calls one simple operator of a formula."""

    def __call__(self, role: str, operator: Any, *args: Any, **kwargs: Any) -> Tensor:
        """The operator's result.

        Args:
            role: what it is for in the formula.
        """


@dataclasses.dataclass(frozen=True)
class Formula:
    """A fused operator in simple ones.

    Attributes:
        compute: its result, by its arguments.
        output: which of its results.
        joint: simple operators in which the same mistake may be made at once.
        statistics: those that compute statistics of rows, so that any mistake is in these.
        known: those whose mistakes are those of the whole: only their rounding is tried.
    """

    compute: Callable[[Step, Writer], Tensor]
    joint: tuple[tuple[str, ...], ...] = ()
    statistics: frozenset[str] = frozenset()
    known: frozenset[str] = frozenset()
    output: int = 0

    def rewrite(self, step: Step, at: Writer) -> Any:
        """The operator with this result as a writer computes it."""
        return with_output(step, self.output, self.compute(step, at))


def formulas_of(step: Step) -> tuple[Formula, ...]:
    """The ways to write the operator out; none if that is not known."""
    return _FORMULAS.get(step.name) or _decompose_backward(step)


# --- Backward kernels as torch takes them apart ---------------------------------------------------


def _decompose_backward(step: Step) -> tuple[Formula, ...]:
    """A backward kernel in the operators that torch's compilers make of it, for each result."""
    decompose = decomposition_of(step.operator)
    if decompose is None or "backward" not in step.name:
        return ()
    results = range(count_results(step.operator))
    return tuple(
        Formula(partial(_write_apart, decompose, output), output=output) for output in results
    )


def _write_apart(decompose: Callable[..., Any], output: int, step: Step, at: Writer) -> Tensor:
    with _Apart(at, step):
        results = call_bound(step.operator, step.values, decompose)
    value: Tensor | None = results if isinstance(results, torch.Tensor) else results[output]
    if value is None:
        raise ValueError("this result is not computed")
    return value


# Longer expressions are numbered instead.
_LONGEST = 60


class _Apart(DispatchMode):
    """Hands each simple operator of a decomposition to a writer; its expression is its role."""

    def __init__(self, at: Writer, step: Step) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._at = at
        self._steps = 0
        # The tensors are held, so that no other one gets the identity of one that has a name.
        self._names: dict[int, tuple[str, Tensor]] = {}
        for name, value in step.values.items():
            if isinstance(value, torch.Tensor):
                self._names[id(value)] = name, value

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        kind = traits(func)
        name = kind.name.strip("_")
        tensors = tensors_in(list(args))
        sentence = (
            self._name(args[0]) if kind.view else f"{name}({', '.join(map(self._name, args))})"
        )
        if kind.view or kind.mutates or not tensors or count_results(func) != 1:
            value = func(*args, **kwargs)
        else:
            self._steps += 1
            is_short = len(sentence) <= _LONGEST
            role = f"step {self._steps}, {sentence}" if is_short else f"step {self._steps}, {name}"
            value = self._at(role, func, *args, **kwargs)
        if isinstance(value, torch.Tensor):
            self._names[id(value)] = sentence if len(sentence) <= _LONGEST else "...", value
        return value

    def _name(self, value: Any) -> str:
        if isinstance(value, torch.Tensor):
            return self._names[id(value)][0] if id(value) in self._names else "..."
        return f"{value:.4g}" if isinstance(value, float) else str(value)


# --- Norms ----------------------------------------------------------------------------------------


def _write_norm(step: Step, at: Writer) -> Tensor:
    norm = norm_of(step)
    if norm is None:
        raise ValueError("its statistics are not known")
    x, dims = norm.rows, list(norm.dims)
    mean, variance = norm.mean, norm.var
    if mean is None and norm.centred:
        mean = at("the mean", aten.mean.dim, x, dims, True)
    if variance is None:
        apart = x if mean is None else at("the deviations", aten.sub.Tensor, x, mean)
        squares = at("the squares", aten.square.default, apart)
        variance = at("the variance", aten.mean.dim, squares, dims, True)
    raised = at("eps", aten.add.Tensor, variance, norm.eps)
    root = at("the root", aten.rsqrt.default, raised)
    value = x if mean is None else at("the centred values", aten.sub.Tensor, x, mean)
    value = at("the quotient", aten.mul.Tensor, value, root).reshape(norm.x.shape)
    if isinstance(norm.weight, torch.Tensor):
        value = at("the product with the weight", aten.mul.Tensor, value, norm.weight)
    if isinstance(norm.bias, torch.Tensor):
        value = at("the bias", aten.add.Tensor, value, norm.bias)
    return value


_NORM = Formula(
    _write_norm,
    joint=(("the mean", "the variance"),),
    statistics=frozenset(
        {
            *("the mean", "the deviations", "the squares", "the variance", "the root"),
            *("the centred values", "the quotient"),
        }
    ),
)


def _write_norm_gradient(step: Step, at: Writer) -> Tensor:
    values, name = step.values, step.name
    grad, x, weight = values["grad_out"], values["input"], values["weight"]
    mean, shape = values.get("mean", values.get("save_mean")), x.shape
    root = values.get("rstd", values.get("save_invstd"))
    if name == "native_batch_norm_backward":
        channels = (1, -1, *(1,) * (x.dim() - 2))
        dims = [0, *range(2, x.dim())]
        weight = None if weight is None else weight.reshape(channels)
        if not values["train"]:
            root = _running_root(step, at)
            grad = (
                grad
                if weight is None
                else at("the product with the weight", aten.mul.Tensor, grad, weight)
            )
            return at("the quotient", aten.mul.Tensor, grad, root)
        mean, root = mean.reshape(channels), root.reshape(channels)
    elif name == "native_group_norm_backward":
        dims = [2, 3]
        weight = None if weight is None else weight.reshape(1, -1, *(1,) * (x.dim() - 2))
        mean, root = mean[..., None, None], root[..., None, None]
    else:
        dims = list(range(x.dim() - len(values["normalized_shape"]), x.dim()))
    if weight is not None:
        grad = at("the product with the weight", aten.mul.Tensor, grad, weight)
    if name == "native_group_norm_backward":
        groups = (len(x), values["group"], x.shape[1] // values["group"], -1)
        grad, x = grad.reshape(groups), x.reshape(groups)
    apart = x if mean is None else at("the centred values", aten.sub.Tensor, x, mean)
    normal = at("the normalised values", aten.mul.Tensor, apart, root)
    products = at("the products with the gradient", aten.mul.Tensor, grad, normal)
    second = at("the mean of the products", aten.mean.dim, products, dims, True)
    along = at("the gradient through the deviation", aten.mul.Tensor, normal, second)
    if mean is not None:
        first = at("the mean of the gradient", aten.mean.dim, grad, dims, True)
        grad = at("the gradient through the mean", aten.sub.Tensor, grad, first)
    value = at("the difference", aten.sub.Tensor, grad, along)
    return at("the root", aten.mul.Tensor, value, root).reshape(shape)


def _write_weight_gradient(step: Step, at: Writer) -> Tensor:
    x, grad, mean = step.values["input"], step.values["grad_out"], _statistic(step, "mean")
    apart = x if mean is None else at("the centred values", aten.sub.Tensor, x, mean)
    is_running = step.values.get("train") is False
    root = _running_root(step, at) if is_running else _statistic(step, "rstd")
    normal = at("the normalised values", aten.mul.Tensor, apart, root)
    products = at("the products with the gradient", aten.mul.Tensor, grad, normal)
    return _sum_shared_terms(step, at, products)


def _write_bias_gradient(step: Step, at: Writer) -> Tensor:
    return _sum_shared_terms(step, at, step.values["grad_out"])


def _running_root(step: Step, at: Writer) -> Tensor:
    """The reciprocal deviation of a batch norm that does not compute its statistics."""
    variance = _by_channel(step.values["running_var"], step.values["input"])
    raised = at("eps", aten.add.Tensor, variance, step.values["eps"])
    return at("the root", aten.rsqrt.default, raised)


def _statistic(step: Step, name: str) -> Tensor | None:
    is_running = step.values.get("train") is False
    saved = {"mean": "running_mean" if is_running else "save_mean", "rstd": "save_invstd"}[name]
    value: Tensor | None = step.values.get(name, step.values.get(saved))
    x = step.values["input"]
    if value is None or "normalized_shape" in step.values:
        return value
    if "group" not in step.values:
        return _by_channel(value, x)
    return _by_channel(value.repeat_interleave(x.shape[1] // step.values["group"], 1), x)


def _by_channel(value: Tensor, x: Tensor) -> Tensor:
    return value.reshape(-1, x.shape[1], *(1,) * (x.dim() - 2))


def _sum_shared_terms(step: Step, at: Writer, terms: Tensor) -> Tensor:
    """The sum over all that share a weight."""
    if "normalized_shape" in step.values:
        terms = terms.reshape(-1, *step.values["normalized_shape"])
        return at("the sum", aten.sum.dim_IntList, terms, [0], False)
    dims = [0, *range(2, terms.dim())]
    return at("the sum", aten.sum.dim_IntList, terms, dims, False)


_NORM_GRADIENT = Formula(
    _write_norm_gradient,
    joint=(
        ("the mean of the gradient", "the mean of the products"),
        ("the gradient through the mean", "the difference"),
    ),
)


# --- Products with a bias -------------------------------------------------------------------------


def _write_biased(step: Step, at: Writer) -> Tensor:
    """A product, and what is done with its bias."""
    has_beta = "beta" in step.values
    bias = step.values["self" if has_beta else "bias"]
    if bias is None:
        raise ValueError("it has no bias")
    without = {"beta": 0} if has_beta else {"bias": None}
    call = partial(at, "the product", step.operator)
    product = call_bound(step.operator, {**step.values, **without}, call)
    if step.name == "convolution":
        bias = bias.reshape(-1, *(1,) * (product.dim() - 2))
    if has_beta and step.values["beta"] != 1:
        bias = bias * step.values["beta"]
    return at("the bias", aten.add.Tensor, product, bias)


_BIASED = Formula(_write_biased, known=frozenset({"the product"}))

# --- Spreads, gates -------------------------------------------------------------------------------


def _write_spread(step: Step, at: Writer) -> Tensor:
    x, keep = step.values["self"], bool(step.values.get("keepdim"))
    dims = list(reduced_dims(step))
    correction = step.values.get("correction", step.values.get("unbiased"))
    less = 1 if correction is None else int(correction)
    mean = at("the mean", aten.mean.dim, x, dims, True)
    apart = at("the deviations", aten.sub.Tensor, x, mean)
    squares = at("the squares", aten.square.default, apart)
    total = at("the sum", aten.sum.dim_IntList, squares, dims, keep)
    count = total.new_tensor(float(math.prod(x.shape[dim] for dim in dims) - less))
    value = at("the divisor", aten.div.Tensor, total, count)
    return at("the root", aten.sqrt.default, value) if step.name.startswith("std") else value


_SPREAD = Formula(_write_spread, statistics=frozenset({"the mean", "the deviations"}))


def _write_gelu(step: Step, at: Writer) -> Tensor:
    x = step.values["self"]
    if step.values["approximate"] == "none":
        argument = at("the argument", aten.mul.Scalar, x, 1 / math.sqrt(2))
        bent = at("the error function", aten.erf.default, argument)
    else:
        cube = at("the cube", aten.pow.Tensor_Scalar, x, 3)
        small = at("the cubic term", aten.mul.Scalar, cube, 0.044715)
        inner = at("the inner sum", aten.add.Tensor, x, small)
        argument = at("the argument", aten.mul.Scalar, inner, math.sqrt(2 / math.pi))
        bent = at("the tanh", aten.tanh.default, argument)
    above = at("the sum with 1", aten.add.Scalar, bent, 1.0)
    half = at("the half", aten.mul.Scalar, above, 0.5)
    return at("the product", aten.mul.Tensor, half, x)


def _write_silu(step: Step, at: Writer) -> Tensor:
    x = step.values["self"]
    gate = at("the gate", aten.sigmoid.default, x)
    return at("the product", aten.mul.Tensor, gate, x)


def _write_gated(step: Step, at: Writer) -> Tensor:
    left, right = step.values["self"].chunk(2, step.values["dim"])
    gate = at("the gate", aten.sigmoid.default, right)
    return at("the product", aten.mul.Tensor, left, gate)


# --- Distances ------------------------------------------------------------------------------------


def _write_distance(step: Step, at: Writer) -> Tensor:
    """The squares of both, less twice their product."""
    left, right = step.values["x1"], step.values["x2"]
    if step.values["p"] != 2:  # noqa: PLR2004
        raise ValueError("it is no sum of squares")
    squares = [
        at(f"the squares of {name}", aten.sum.dim_IntList, value.square(), [-1], True)
        for name, value in (("x1", left), ("x2", right))
    ]
    products = at("the products", aten.matmul.default, left, right.mT)
    twice = at("the factor 2", aten.mul.Tensor, products, products.new_tensor(2.0))
    both = at("the squares", aten.add.Tensor, squares[0], squares[1].mT)
    apart = at("the difference", aten.sub.Tensor, both, twice)
    return at("the root", aten.sqrt.default, apart.clamp(min=0.0))


_DISTANCE = Formula(
    _write_distance, joint=(("the squares of x1", "the squares of x2", "the products"),)
)

# --- Softmax --------------------------------------------------------------------------------------


def _write_softmax(step: Step, at: Writer) -> Tensor:
    x, dim = step.values["self"], step.values["dim"]
    shifted = x - x.amax(dim, keepdim=True)
    powers = at("the exponentials", aten.exp.default, shifted)
    total = at("the sum", aten.sum.dim_IntList, powers, [dim], True)
    if step.name == "softmax":
        return at("the quotient", aten.div.Tensor, powers, total)
    logarithm = at("the logarithm", aten.log.default, total)
    return at("the difference", aten.sub.Tensor, shifted, logarithm)


def _write_softmax_by_logarithms(step: Step, at: Writer) -> Tensor:
    x, dim = step.values["self"], step.values["dim"]
    total = at("the logarithm of the sum", aten.logsumexp.default, x, [dim], True)
    value = at("the difference", aten.sub.Tensor, x, total)
    return at("the exponential", aten.exp.default, value) if step.name == "softmax" else value


def _write_softmax_gradient(step: Step, at: Writer) -> Tensor:
    grad, output, dim = (step.values[name] for name in ("grad_output", "output", "dim"))
    products = at("the products", aten.mul.Tensor, grad, output)
    total = at("the sum", aten.sum.dim_IntList, products, [dim], True)
    apart = at("the difference", aten.sub.Tensor, grad, total)
    return at("the factor", aten.mul.Tensor, apart, output)


def _write_log_softmax_gradient(step: Step, at: Writer) -> Tensor:
    grad, output, dim = (step.values[name] for name in ("grad_output", "output", "dim"))
    total = at("the sum", aten.sum.dim_IntList, grad, [dim], True)
    powers = at("the exponentials", aten.exp.default, output)
    products = at("the products", aten.mul.Tensor, powers, total)
    return at("the difference", aten.sub.Tensor, grad, products)


# --- Losses ---------------------------------------------------------------------------------------

_MEAN, _SUM = 1, 2


def _reduce(at: Writer, terms: Tensor, reduction: int) -> Tensor:
    dims = list(range(terms.dim()))
    if reduction == _MEAN:
        return at("the mean", aten.mean.dim, terms, dims, False)
    return at("the sum", aten.sum.dim_IntList, terms, dims, False) if reduction == _SUM else terms


def _write_squared_loss(step: Step, at: Writer) -> Tensor:
    apart = at("the difference", aten.sub.Tensor, step.values["self"], step.values["target"])
    squares = at("the squares", aten.square.default, apart)
    return _reduce(at, squares, step.values["reduction"])


def _write_squared_gradient(step: Step, at: Writer) -> Tensor:
    values = step.values
    apart = at("the difference", aten.sub.Tensor, values["self"], values["target"])
    each = at("the factor 2", aten.mul.Tensor, apart, apart.new_tensor(2.0))
    if values["reduction"] == _MEAN:
        each = at("the divisor", aten.div.Tensor, each, each.new_tensor(float(each.numel())))
    return at("the gradient that comes in", aten.mul.Tensor, each, values["grad_output"])


def _write_class_gradient(step: Step, at: Writer) -> Tensor:
    """The negative gradient at the index of the class."""
    values = step.values
    x, target, weight = values["self"], values["target"], values["weight"]
    if x.dim() != 2:  # noqa: PLR2004
        raise ValueError("it has more axes")
    counts = target != values["ignore_index"]
    index = torch.where(counts, target, 0).unsqueeze(1)
    each = counts.to(x.dtype) if weight is None else counts * weight[index.squeeze(1)]
    grad = values["grad_output"].expand(len(x))
    if values["reduction"] == _MEAN:
        grad = at("the divisor", aten.div.Tensor, grad, values["total_weight"])
    terms = at("the terms that count", aten.mul.Tensor, each, grad)
    terms = at("the sign", aten.neg.default, terms)
    return torch.zeros_like(x).scatter(1, index, terms.unsqueeze(1))


def _write_logistic_loss(step: Step, at: Writer) -> Tensor:
    """-log sigmoid(x) where the target is 1, and -log sigmoid(-x) where it is 0."""
    values = step.values
    x, target = values["self"], values["target"]
    if values["weight"] is not None or values["pos_weight"] is not None:
        raise ValueError("it has weights")
    yes = at("the loss of ones", aten.mul.Tensor, -torch.nn.functional.logsigmoid(x), target)
    no = at("the loss of zeros", aten.mul.Tensor, -torch.nn.functional.logsigmoid(-x), 1 - target)
    terms = at("the loss of both", aten.add.Tensor, yes, no)
    return _reduce(at, terms, values["reduction"])


def _write_class_loss(step: Step, at: Writer) -> Tensor:
    """The negative value at the index of the class."""
    values = step.values
    x, target, weight = values["self"], values["target"], values["weight"]
    x = x if x.dim() > 1 else x.unsqueeze(0)
    target = target.reshape(x.shape[0], *x.shape[2:])
    counts = target != values["ignore_index"]
    index = torch.where(counts, target, 0)
    picked = x.gather(1, index.unsqueeze(1)).squeeze(1).reshape(-1)
    counts = counts.reshape(-1).to(x.dtype)
    if weight is not None:
        weights = weight[index.reshape(-1)]
        picked = at("the weight of the terms", aten.mul.Tensor, picked, weights)
        counts = at("the weight of the count", aten.mul.Tensor, counts, weights)
    picked_terms = at("the ignored", aten.mul.Tensor, picked, (counts != 0).to(x.dtype))
    terms = at("the sign", aten.neg.default, picked_terms)
    if values["reduction"] not in (_MEAN, _SUM):
        return terms.reshape(target.shape)
    total = at("the sum", aten.sum.dim_IntList, terms, [0], False)
    if values["reduction"] == _SUM:
        return total
    count = at("the count", aten.sum.dim_IntList, counts, [0], False)
    return at("the quotient", aten.div.Tensor, total, count)


_CLASS_LOSS = Formula(_write_class_loss, joint=(("the sum", "the count"),))

_MOST_PAIRS = 1 << 20


def _write_distance_gradient(step: Step, at: Writer) -> Tensor:
    values = step.values
    x1, x2, distance = values["x1"], values["x2"], values["cdist"]
    if values["p"] != 2 or distance.numel() * x1.shape[-1] > _MOST_PAIRS:  # noqa: PLR2004
        raise ValueError("another distance, or too many pairs")
    apart = at("the differences", aten.sub.Tensor, x1.unsqueeze(-2), x2.unsqueeze(-3))
    length = torch.where(distance == 0, 1.0, distance).unsqueeze(-1)
    unit = at("the division by the distances", aten.div.Tensor, apart, length)
    terms = at("the products", aten.mul.Tensor, unit, values["grad"].unsqueeze(-1))
    return at("the sum", aten.sum.dim_IntList, terms, [terms.dim() - 2], False)


# --- Attention ------------------------------------------------------------------------------------


def _write_attention_gradient(target: str, step: Step, at: Writer) -> Tensor:
    values = step.values
    query, key, value = (values[name] for name in ("query", "key", "value"))
    grad = values.get("grad_out", values.get("grad_out_"))
    scale, chances = factor_of(step), weights_and_values(step)[0]
    if target == "value":
        return at("the product of chances and gradient", aten.matmul.default, chances.mT, grad)
    inner = at("the gradient of the chances", aten.matmul.default, grad, value.mT)
    products = at("the products with the result", aten.mul.Tensor, grad, values["out"])
    total = at("the sum", aten.sum.dim_IntList, products, [products.dim() - 1], True)
    apart = at("the difference", aten.sub.Tensor, inner, total)
    scores = at("the gradient of the scores", aten.mul.Tensor, chances, apart)
    scores = at("the scale", aten.mul.Tensor, scores, scores.new_tensor(scale))
    if target == "query":
        return at("the product with the keys", aten.matmul.default, scores, key)
    return at("the product with the queries", aten.matmul.default, scores.mT, query)


# --- By name --------------------------------------------------------------------------------------

_FORMULAS: Mapping[str, tuple[Formula, ...]] = {
    **dict.fromkeys(("linear", "addmm", "baddbmm", "convolution"), (_BIASED,)),
    **dict.fromkeys(NORMS, (_NORM,)),
    **dict.fromkeys(step_names("variance", "deviation"), (_SPREAD,)),
    "glu": (Formula(_write_gated),),
    "gelu": (Formula(_write_gelu),),
    "silu": (Formula(_write_silu),),
    **dict.fromkeys(("cdist", "cdist_forward", "euclidean_dist"), (_DISTANCE,)),
    "fused_rms_norm_backward": (_NORM_GRADIENT, Formula(_write_weight_gradient, output=1)),
    **dict.fromkeys(
        # `batch_norm_backward` calls its arguments otherwise.
        step_names("layer norm backward", "batch norm backward", "group norm backward")
        - {"batch_norm_backward"},
        (
            _NORM_GRADIENT,
            Formula(_write_weight_gradient, output=1),
            Formula(_write_bias_gradient, output=2),
        ),
    ),
    **dict.fromkeys(
        step_names("softmaxes"),
        (Formula(_write_softmax_by_logarithms), Formula(_write_softmax)),
    ),
    "softmax_backward_data": (Formula(_write_softmax_gradient),),
    "log_softmax_backward_data": (Formula(_write_log_softmax_gradient),),
    "cdist_backward": (Formula(_write_distance_gradient),),
    **dict.fromkeys(
        # The formula was not tried on the kernel of cuDNN.
        step_names("attention backward") - {"scaled_dot_product_cudnn_attention_backward"},
        tuple(
            Formula(partial(_write_attention_gradient, name), output=output)
            for output, name in enumerate(("query", "key", "value"))
        ),
    ),
    "mse_loss": (Formula(_write_squared_loss),),
    "mse_loss_backward": (Formula(_write_squared_gradient),),
    "nll_loss_backward": (Formula(_write_class_gradient),),
    "binary_cross_entropy_with_logits": (Formula(_write_logistic_loss),),
    **dict.fromkeys(step_names("losses of classes"), (_CLASS_LOSS,)),
}


def divisor_of(step: Step) -> int:
    """How many elements a mean has."""
    dims = step.values["dim"]
    return math.prod(step.values["self"].shape[dim] for dim in dims)

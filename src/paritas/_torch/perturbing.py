"""Run a program with every rounding it could make drawn at random: the noise of this program.

Each operator's floating inputs and results are multiplied by (1 + u/2 * U), with U uniform in
[-1, 1]. Contractions and sums also get the error of adding up n products one by one,

    u/2 * sqrt(n) * sqrt(r^2 / 3 + (a^2 . b^2) / 2) * U,

which is what n roundings of partial sums amount to: partial sums of products of one sign grow like
r k/n (first term), those of random signs like the square root of the sum of squares (second term).
Accumulators are float32 for the half precisions, so u there is float32's.
"""

from __future__ import annotations

import math
import random
from typing import TYPE_CHECKING, Any

import torch

from paritas._torch.lifting import LiftMode, map_tensors

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor
    from torch._ops import OpOverload

    from paritas._torch.operators import Traits

UNIT_F32 = 2.0**-24
_WIDEST = {torch.float64, torch.complex128}
_SMALLEST_POOL = 1 << 20


class PerturbMode(LiftMode):
    """A lifted run with random rounding of the program's own precision."""

    def __init__(
        self,
        native: torch.dtype,
        default: torch.dtype,
        unit: float,
        seed: int,
        *,
        log: dict[tuple[OpOverload, int], torch.dtype] | None = None,
        remember_decisions: bool = False,
        widen: bool = True,
    ) -> None:
        """Perturb by unit roundoff `unit`, or by that of the dtype `log` says a call ran in.

        Without `widen` the run stays in the program's own dtype, for programs that have no
        meaning in float64; a perturbation then moves a value to a neighbour or leaves it.
        """
        super().__init__(native, default, remember_decisions=remember_decisions, widen=widen)
        self.reach = 0.5 if widen else 2.0
        self.unit = unit
        self.seed = seed
        self.log = log or {}
        self._counts: dict[OpOverload, int] = {}
        self._draws = random.Random(seed)
        self._pools: dict[torch.device, Tensor] = {}

    def compute(
        self, func: OpOverload, kind: Traits, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run the operator on perturbed arguments and perturb what it gives."""
        unit = self._unit_of(func)
        if not kind.rounds:
            return func(*args, **kwargs)
        if kind.name == "_to_copy":
            return self._shaken(func(*args, **kwargs), unit)  # a cast rounds once
        shaken = tuple(
            value if place in kind.mutates else map_tensors(value, lambda t: self._shaken(t, unit))
            for place, value in enumerate(args)
        )
        result = func(*shaken, **kwargs)
        accumulated = _accumulation(kind.name, func, args, kwargs, result)
        return self._perturb_results(kind, result, accumulated, unit)

    def _perturb_results(
        self, kind: Traits, result: Any, accumulated: list[Tensor | None], unit: float
    ) -> Any:
        single = isinstance(result, torch.Tensor)
        results = [result] if single else list(result) if result is not None else []
        accumulator = min(unit, UNIT_F32)
        for position, tensor in enumerate(results):
            if not _is_float(tensor):
                continue
            noisy = self._shaken(tensor, unit)
            extra = accumulated[position] if position < len(accumulated) else None
            if extra is not None:
                noisy = noisy + accumulator / 2 * extra * self._uniform(tensor).to(extra.dtype)
            # In-place operators hand back their argument, which has to keep its identity.
            results[position] = tensor.copy_(noisy) if kind.mutates else noisy
        if single:
            return results[0]
        return type(result)(results) if result is not None else None

    def _unit_of(self, func: OpOverload) -> float:
        ordinal = self._counts.get(func, 0)
        self._counts[func] = ordinal + 1
        dtype = self.log.get((func, ordinal))
        return self.unit if dtype is None else torch.finfo(dtype).eps / 2

    def _shaken(self, tensor: Tensor, unit: float) -> Tensor:
        if not _is_float(tensor):
            return tensor
        # As a factor, so that an infinity stays one; added, it would become NaN.
        factor = torch.mul(self._uniform(tensor), unit * self.reach).add_(1)
        if tensor.dtype in _WIDEST:
            return tensor * factor
        return (tensor.to(torch.float64) * factor).to(tensor.dtype)

    def _uniform(self, tensor: Tensor) -> Tensor:
        """Uniform noise in [-1, 1], cut from one pool at a random place: drawing is what costs."""
        count = tensor.numel()
        pool = self._pools.get(tensor.device)
        if pool is None or pool.numel() < 2 * count:
            generator = torch.Generator(tensor.device).manual_seed(self.seed)
            size = max(_SMALLEST_POOL, 2 * count)
            pool = torch.empty(size, dtype=torch.float64, device=tensor.device)
            self._pools[tensor.device] = pool.uniform_(-1, 1, generator=generator)
        start = self._draws.randrange(pool.numel() - count + 1)
        return pool.narrow(0, start, count).view(tensor.shape)


def _is_float(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and (value.is_floating_point() or value.is_complex())


def _accumulation(
    name: str, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any
) -> list[Tensor | None]:
    """Per result, sqrt(n) * sqrt(r^2 / 3 + q / 2), or nothing where no long sum is made."""
    rule = _RULES.get(name)
    if rule is None or not all(_is_float(t) for t in args[:1]):
        return []
    return rule(func, args, kwargs, result)


def _amplitude(result: Tensor, squares: Tensor, length: int) -> Tensor:
    return (length * (result.abs().square() / 3 + squares.abs() / 2)).sqrt()


def _squared(tensor: Tensor) -> Tensor:
    return tensor.abs().square()


def _matmul(position: int) -> Callable[..., list[Tensor | None]]:
    def rule(
        func: OpOverload,  # noqa: ARG001
        args: tuple[Any, ...],
        kwargs: dict[str, Any],  # noqa: ARG001
        result: Tensor,
    ) -> list[Tensor | None]:
        left, right = args[position], args[position + 1]
        squares = torch.matmul(_squared(left), _squared(right))
        return [_amplitude(result, squares, left.shape[-1])]

    return rule


def _sum(
    func: OpOverload,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    result: Tensor,
) -> list[Tensor | None]:
    x = args[0]
    length = max(1, x.numel() // max(1, result.numel()))
    squares = func(_squared(x), *args[1:], **kwargs)
    return [_amplitude(result, squares, length)]


def _mean(
    func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], result: Tensor
) -> list[Tensor | None]:
    x = args[0]
    length = max(1, x.numel() // max(1, result.numel()))
    squares = func(_squared(x), *args[1:], **kwargs)
    return [(length * result.abs().square() / 3 + squares.abs() / 2).sqrt()]


def _cumsum(
    func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], result: Tensor
) -> list[Tensor | None]:
    x, dim = args[0], args[1]
    squares = func(_squared(x), dim, **kwargs)
    return [_amplitude(result, squares, x.shape[dim] if x.dim() else 1)]


def _softmax(
    func: OpOverload,  # noqa: ARG001
    args: tuple[Any, ...],
    kwargs: dict[str, Any],  # noqa: ARG001
    result: Tensor,
) -> list[Tensor | None]:
    """Every value of a row is divided by the same sum of positive terms."""
    x, dim = args[0], args[1]
    return [result.abs() * math.sqrt((x.shape[dim] if x.dim() else 1) / 3)]


def _convolution(
    func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], result: Tensor
) -> list[Tensor | None]:
    x, weight, _, *rest = args
    squares = func(_squared(x), _squared(weight), None, *rest, **kwargs)
    length = weight.numel() // max(1, weight.shape[0])
    return [_amplitude(result, squares, length)]


def _convolution_backward(
    func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any
) -> list[Tensor | None]:
    grad, x, weight, *rest = args
    squares = func(_squared(grad), _squared(x), _squared(weight), *rest, **kwargs)
    positions = grad.numel() // max(1, grad.shape[1])
    lengths = (weight.numel() // max(1, weight.shape[1]), positions, positions)
    return [
        None if r is None or q is None else _amplitude(r, q, n)
        for r, q, n in zip(result, squares, lengths, strict=True)
    ]


def _layer_norm_backward(
    func: OpOverload,  # noqa: ARG001
    args: tuple[Any, ...],
    kwargs: dict[str, Any],  # noqa: ARG001
    result: Any,
) -> list[Tensor | None]:
    """Weight and bias gradients are sums over all rows."""
    grad, x, shape, mean, rstd = args[:5]
    rows = max(1, x.numel() // max(1, math.prod(shape)))
    normal = (x - mean) * rstd
    over = list(range(x.dim() - len(shape)))
    terms = (None, _squared(grad * normal), _squared(grad))
    return [
        None if r is None or q is None else _amplitude(r, q.sum(dim=over) if over else q, rows)
        for r, q in zip(result, terms, strict=True)
    ]


def _embedding_backward(
    func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], result: Tensor
) -> list[Tensor | None]:
    grad, indices, *rest = args
    squares = func(_squared(grad), indices, *rest, **kwargs)
    most = int(torch.bincount(indices.reshape(-1)).max()) if indices.numel() else 1
    return [_amplitude(result, squares, max(1, most))]


_RULES: dict[str, Callable[..., list[Tensor | None]]] = {
    "mm": _matmul(0),
    "bmm": _matmul(0),
    "mv": _matmul(0),
    "dot": _matmul(0),
    "addmm": _matmul(1),
    "baddbmm": _matmul(1),
    "addmv": _matmul(1),
    "sum": _sum,
    "mean": _mean,
    "cumsum": _cumsum,
    "_softmax": _softmax,
    "convolution": _convolution,
    "convolution_backward": _convolution_backward,
    "native_layer_norm_backward": _layer_norm_backward,
    "embedding_dense_backward": _embedding_backward,
}

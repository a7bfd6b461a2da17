"""Run a program with every rounding it could make drawn at random: the noise of this program.

Each operator's floating results are multiplied by (1 + u/2 * U), with U uniform in [-1, 1], where
they need rounding at all; and so are the inputs of operators that do more than one arithmetic step
inside. Those that add up many terms also get the error of doing so one by one, u/2 * a * U with
the amplitude a of `accumulation`. Accumulators are float32 for the half precisions, so u
there is float32's.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import torch

from paritas._torch.accumulation import Call, accumulation
from paritas._torch.lifting import LiftMode, map_tensors

if TYPE_CHECKING:
    from torch import Tensor
    from torch._ops import OpOverload

    from paritas._torch.operators import Traits

UNIT_F32 = 2.0**-24
_WIDEST = {torch.float64, torch.complex128}
_SMALLEST_POOL = 1 << 20
# So many values are looked at, and such a share of them has to be there twice.
_SAMPLE, _REPEATS = 512, 0.1
_UNIT_TF32 = 2.0**-10
_MATMULS = frozenset({"mm", "bmm", "addmm", "baddbmm", "matmul", "linear"})
_MULTIPLIER = -7046029254386353131  # the golden ratio in 64 bits: spreads the bits of a product
_MASK = (1 << 40) - 1
_UNITS = {dtype: torch.finfo(dtype).eps / 2 for dtype in (torch.bfloat16, torch.float16)}


class PerturbMode(LiftMode):
    """A lifted run with random rounding of the program's own precision."""

    def __init__(  # noqa: PLR0913
        self,
        native: torch.dtype,
        default: torch.dtype,
        unit: float,
        seed: int,
        *,
        log: dict[tuple[OpOverload, int], torch.dtype] | None = None,
        remember_decisions: bool = False,
        widen: bool = True,
        shake_inputs: bool = False,
    ) -> None:
        """Perturb by unit roundoff `unit`, or by that of the dtype `log` says a call ran in.

        Without `widen` the run stays in the program's own dtype, for programs that have no
        meaning in float64. With `shake_inputs` every operator's inputs are perturbed, whatever it
        does: for one operator alone, whose inputs were rounded on their way to it.
        """
        super().__init__(native, default, remember_decisions=remember_decisions, widen=widen)
        # Half a unit of a dtype narrower than the one computed in. Of that one itself it would
        # always be rounded away; two units move a value to a neighbour or leave it.
        self.reach = 0.5 if widen and unit > torch.finfo(torch.float64).eps else 2.0
        self.unit = unit
        self.shake_inputs = shake_inputs
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
        exact = not kind.rounds or (kind.name == "_to_copy" and not _is_float(args[0]))
        if exact and not self.shake_inputs:
            return func(*args, **kwargs)
        shaken = args
        coarse = self._input_unit(kind, args)
        if self.shake_inputs or not kind.basic or coarse > unit:
            unit_in = max(unit, coarse)
            shaken = tuple(
                value
                if place in kind.mutates
                else map_tensors(value, lambda tensor: self._shaken(tensor, unit_in))
                for place, value in enumerate(args)
            )
        result = self.kernel(func, kind, args)(*shaken, **kwargs)
        if exact:
            return result
        accumulated = accumulation(Call(kind.name, func, args, kwargs, result))
        return self._perturb_results(kind, result, accumulated, unit)

    def _perturb_results(
        self, kind: Traits, result: Any, accumulated: list[Tensor | None], unit: float
    ) -> Any:
        if not isinstance(result, torch.Tensor | list | tuple):
            return result  # nothing, or an opaque object such as a profiler's mark
        single = isinstance(result, torch.Tensor)
        results: list[Any] = [result] if single else list(result)
        accumulator = min(unit, UNIT_F32)
        for position, tensor in enumerate(results):
            if not _is_float(tensor):
                continue
            noisy = self._shaken(tensor, unit)
            extra = accumulated[position] if position < len(accumulated) else None
            if extra is not None:
                noisy = noisy + accumulator / 2 * extra * self._uniform(tensor).to(extra.dtype)
            if self.widths:
                noisy = torch.where(_needs_no_rounding(tensor, unit), tensor, noisy)
            # In-place operators hand back their argument, which has to keep its identity.
            results[position] = tensor.copy_(noisy) if kind.mutates else noisy
        return results[0] if single else type(result)(results)

    def _input_unit(self, kind: Traits, args: tuple[Any, ...]) -> float:
        """What the inputs of an operator are rounded to inside it: tensor cores may use TF32."""
        if self.native is not torch.float32 or not self.widths:
            return 0.0
        on_cuda = any(isinstance(value, torch.Tensor) and value.is_cuda for value in args)
        return _UNIT_TF32 if on_cuda and _may_use_tf32(kind.name) else 0.0

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
        """Uniform noise in [-1, 1].

        Rounding is a function of what is rounded: where values repeat, so do their errors, and
        add up. There each value has a noise of its own; elsewhere it is cut from one pool at a
        random place, which costs less.
        """
        if _repeats(tensor):
            return _noise_of(tensor, self._draws.getrandbits(62))
        count = tensor.numel()
        pool = self._pools.get(tensor.device)
        if pool is None or pool.numel() < 2 * count:
            generator = torch.Generator(tensor.device).manual_seed(self.seed)
            size = max(_SMALLEST_POOL, 2 * count)
            pool = torch.empty(size, dtype=torch.float64, device=tensor.device)
            self._pools[tensor.device] = pool.uniform_(-1, 1, generator=generator)
        start = self._draws.randrange(pool.numel() - count + 1)
        return pool.narrow(0, start, count).view(tensor.shape)


def _may_use_tf32(name: str) -> bool:
    if name.startswith("convolution"):
        return bool(torch._C._get_cudnn_allow_tf32())
    return name in _MATMULS and bool(torch._C._get_cublas_allow_tf32())


def _repeats(tensor: Tensor) -> bool:
    """Whether many values of a tensor are equal, going by a sample of them."""
    count = tensor.numel()
    if tensor.is_complex() or count < 2:  # noqa: PLR2004
        return False
    sample = tensor.reshape(-1)[:: max(1, count // _SAMPLE)]
    ordered = sample.sort().values
    same = (ordered[1:] == ordered[:-1]) & (ordered[1:] != 0)
    return int(same.sum()) > _REPEATS * sample.numel()


def _noise_of(tensor: Tensor, salt: int) -> Tensor:
    """Noise in [-1, 1] as a function of each value: its bits, multiplied and folded."""
    bits = tensor.to(torch.float64).contiguous().view(torch.int64)
    mixed = (bits ^ salt) * _MULTIPLIER
    mixed = (mixed ^ (mixed >> 29)) * _MULTIPLIER
    return ((mixed >> 12) & _MASK).to(torch.float64) * (2.0 / _MASK) - 1.0


def _is_float(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and (value.is_floating_point() or value.is_complex())


def _needs_no_rounding(tensor: Tensor, unit: float) -> Tensor:
    """Where a result fits the dtype it is rounded to, so that no rounding happens.

    Masks, counts, positions and powers of two are exact in every precision; a noise on them would
    be the noise of another program. What fits float32 in a float64 program is taken for such.
    """
    narrow = next((dtype for dtype, u in _UNITS.items() if unit >= u), torch.float32)
    parts = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    fits = parts.to(narrow).to(parts.dtype) == parts
    return fits.all(dim=-1) if tensor.is_complex() else fits

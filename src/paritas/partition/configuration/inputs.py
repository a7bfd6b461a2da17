"""The arguments of a call, made from a configuration: random tensors that fit the operator.

A shape is used as it is given: where it does not fit, the operator says so.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import torch

from paritas.errors import UsageError
from paritas.partition.configuration import input_domains as domains
from paritas.partition.configuration.config import TensorInfo, VerifyConfig, unwrap
from paritas.partition.configuration.input_rules import Asked, domain_of, is_buffer
from paritas.partition.recipes import OperatorCall, Place

__all__ = ["make_call", "make_value"]


def make_call(config: VerifyConfig, function: Callable[..., Any], *, seed: int = 0) -> OperatorCall:
    """The call that a configuration describes, the same for the same seed."""
    name = config.fsig.replace(":", ".")
    asked = Asked(name, config.args, config.kwargs)
    args = [make_value(asked, position, info, seed) for position, info in enumerate(config.args)]
    kwargs = {
        key: make_value(asked, key, value, seed) if isinstance(value, TensorInfo) else unwrap(value)
        for key, value in config.kwargs.items()
    }
    named = [(key, info) for key, info in config.kwargs.items() if isinstance(info, TensorInfo)]
    places: list[tuple[Place, TensorInfo]] = [*enumerate(config.args), *named]
    without = {
        place for place, info in places if info.requires_grad is False or is_buffer(asked, place)
    }
    return OperatorCall(
        function,
        tuple(args),
        kwargs,
        name=name,
        without_gradient=frozenset(without | set(config.non_grad_indices)),
        seed=seed,
    )


def make_value(asked: Asked, place: Place, info: TensorInfo, seed: int) -> Any:
    """One argument of a call: its value, or a tensor drawn to fit.

    Raises:
        UsageError: no tensor of this shape and dtype can fit.
    """
    if info.value_type == "value":
        value = unwrap(info.value)
        return value.detach() if isinstance(value, torch.Tensor) else value
    shape = info.shape or ()
    if info.generator is not None and not isinstance(info.generator, torch.Generator):
        return _from_the_user(asked, place, info.generator(shape), info)
    generator = info.generator or _generator(seed, place)
    drawn = _domain_for(domain_of(asked, place), info.dtype)(shape, generator)
    if tuple(drawn.shape) != shape:
        # Only unique indices can be fewer than asked for: there are no more of them.
        raise UsageError(
            f"{_told(place)} of {asked.name} has the shape {shape}, but only indices of the shape "
            f"{tuple(drawn.shape)} can all be different; give a smaller shape, or the indices as a "
            "'value'"
        )
    return _in_dtype(drawn, info.dtype, asked, place)


def _generator(seed: int, place: Place) -> torch.Generator:
    """An own stream for each argument: one more argument leaves the others as they were."""
    digest = hashlib.sha256(f"{seed}:{place}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))


def _domain_for(domain: domains.Domain, dtype: torch.dtype | None) -> domains.Domain:
    """What is drawn when the user asks for a dtype that holds no fractions."""
    if dtype is None or dtype.is_floating_point:
        return domain
    if dtype.is_complex:
        return lambda shape, generator: torch.complex(
            domains.normal(shape, generator), domains.normal(shape, generator)
        )

    def whole(shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
        drawn = domain(shape, generator)
        if not drawn.is_floating_point():
            return drawn
        if dtype == torch.bool:
            return domains.mask(shape, generator)
        signed = domain is domains.normal and dtype.is_signed
        return domains.whole_numbers(-9 if signed else 1, 10)(shape, generator)

    return whole


def _in_dtype(
    drawn: torch.Tensor, dtype: torch.dtype | None, asked: Asked, place: Place
) -> torch.Tensor:
    if dtype is None:
        return drawn.to(torch.float32) if drawn.is_floating_point() else drawn
    cast = drawn.to(dtype)
    exact = drawn.is_floating_point() or drawn.is_complex()
    if not exact and not torch.equal(cast.to(drawn.dtype), drawn):
        raise UsageError(
            f"{_told(place)} of {asked.name} takes whole numbers up to {int(drawn.max())}, which "
            f"{dtype} does not hold; leave dtype out, or give torch.int64"
        )
    return cast


def _from_the_user(asked: Asked, place: Place, made: Any, info: TensorInfo) -> torch.Tensor:
    """What the user's own function made; anything but the tensor that was asked for is refused."""
    told = f"the generator of {_told(place)} of {asked.name}"
    if not isinstance(made, torch.Tensor):
        raise UsageError(f"{told} gave {made!r:.60}; it must give a tensor")
    if tuple(made.shape) != info.shape:
        raise UsageError(f"{told} gave the shape {tuple(made.shape)}, not {info.shape}")
    if info.dtype is not None and made.dtype != info.dtype:
        raise UsageError(f"{told} gave {made.dtype}, not {info.dtype}")
    return made.detach()


def _told(place: Place) -> str:
    return f"args[{place}]" if isinstance(place, int) else repr(place)

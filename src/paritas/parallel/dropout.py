"""Dropout in a check of a plan: switched off, or with masks that every rank draws alike.

Ranks draw other random numbers than one device, even if the plan is right. What a plan must keep is
where dropout is applied and how it scales. So each mask is made a function of the values that it
masks: an element is dropped or kept wherever it is, in the whole tensor or in a shard of it.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from paritas.execution.observation import Contexts

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

# `drawn` is torch's own dropout; `off` drops nothing; `first` and `second` are two kinds of masks.
Dropout = Literal["drawn", "off", "first", "second"]
KEYED: tuple[Dropout, Dropout] = ("first", "second")

_PLAIN = {F.dropout, torch.dropout, F.alpha_dropout, F.feature_alpha_dropout}
_FEATURES = {F.dropout1d, F.dropout2d, F.dropout3d}
# Masks depend on the leading bits of these multiples of a value. The multiples are arbitrary, so
# that common numbers such as 1 and 1/2 are not next to where the leading bits change.
_MULTIPLES = {"first": 1.2345678912345, "second": 1.4567891234567}
_LOST_BITS = np.uint64(40)
_PRIME = np.uint64(0x5851F42D4C957F2D)
_RANGE = np.uint64(1 << 20)


class DropoutMode(TorchFunctionMode):
    """Replaces dropout, also that of attention."""

    def __init__(self, kind: Dropout) -> None:
        super().__init__()
        self.kind = kind

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _PLAIN or func in _FEATURES:
            return self._dropout(*args, **kwargs)
        if func is F.scaled_dot_product_attention:
            return self._attention(*args, **kwargs)
        return func(*args, **kwargs)

    def _dropout(
        self,
        input: Tensor,  # noqa: A002  (the name that torch gives it)
        p: float = 0.5,
        training: bool = True,  # noqa: FBT001, FBT002
        inplace: bool = False,  # noqa: FBT001, FBT002
        train: bool = True,  # noqa: FBT001, FBT002
    ) -> Tensor:
        if not (training and train) or p == 0 or self.kind == "off":
            return input
        return input.copy_(self._masked(input, p)) if inplace else self._masked(input, p)

    def _masked(self, value: Tensor, p: float) -> Tensor:
        from torch.distributed.tensor import DTensor, Replicate

        if not isinstance(value, DTensor):
            return value * self._mask(value, p)
        whole = [Replicate() if one.is_partial() else one for one in value.placements]
        value = value.redistribute(placements=whole)
        local = value.to_local()
        return DTensor.from_local(
            local * self._mask(local, p),
            value.device_mesh,
            value.placements,
            run_check=False,
            shape=value.shape,
            stride=value.stride(),
        )

    def _mask(self, value: Tensor, p: float) -> Tensor:
        """Zeros, and the factor of what is kept, by the leading bits of each value."""
        if p >= 1:
            return torch.zeros_like(value)
        # NumPy, because a run in float64 refuses to read bits, and a perturbed one adds noise.
        multiples = value.detach().double().cpu().numpy() * _MULTIPLES[self.kind]
        mixed = (np.ascontiguousarray(multiples).view(np.uint64) >> _LOST_BITS) * _PRIME
        kept = (mixed ^ (mixed >> np.uint64(29))) % _RANGE >= p * float(_RANGE)
        mask = torch.from_numpy(kept.reshape(value.shape) / (1 - p))
        return mask.to(value.device, value.dtype)

    def _attention(  # noqa: PLR0913, PLR0917  (in torch's order)
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,  # noqa: FBT001, FBT002
        scale: float | None = None,
        enable_gqa: bool = False,  # noqa: FBT001, FBT002
    ) -> Tensor:
        how: dict[str, Any] = {
            "attn_mask": attn_mask,
            "is_causal": is_causal,
            "scale": scale,
            "enable_gqa": enable_gqa,
        }
        if dropout_p == 0 or self.kind == "off":
            return F.scaled_dot_product_attention(query, key, value, **how)
        if enable_gqa:
            times = query.shape[-3] // key.shape[-3]
            key, value = (one.repeat_interleave(times, -3) for one in (key, value))
        # The weights of attention are what it returns for the identity matrix.
        length = key.shape[-2]
        identity = torch.eye(length, dtype=value.dtype, device=value.device)
        identity = identity.expand(*value.shape[:-2], length, length)
        how["enable_gqa"] = False
        weights = F.scaled_dot_product_attention(query, key, identity, **how)
        return self._masked(weights, dropout_p) @ value


def with_dropout(
    kind: Dropout, running: contextlib.AbstractContextManager[Any]
) -> contextlib.AbstractContextManager[Any]:
    """A context that also replaces dropout."""
    if kind == "drawn":
        return running
    return Contexts(running, DropoutMode(kind))

"""A program of ranks in float64: lifted as any other, but for what is sent between ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from paritas._torch.lifting import LiftMode

if TYPE_CHECKING:
    from torch._ops import OpOverload

__all__ = ["RankLiftMode"]

_SENDING = frozenset({"c10d", "_c10d_functional", "_c10d_functional_autograd", "fsdp"})


class RankLiftMode(LiftMode):
    """Dispatch mode under which everything is computed in float64, collectives left alone.

    Collectives write to tensors without saying so in their schemas: given a widened copy, they
    would leave what the program gave them as it was.
    """

    def __torch_dispatch__(
        self,
        func: OpOverload,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run one operator in float64; a collective as it is."""
        if func.namespace in _SENDING:
            return func(*args, **(kwargs or {}))
        return super().__torch_dispatch__(func, types, args, kwargs)

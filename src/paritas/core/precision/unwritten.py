"""Memory that no operator has written to: if it is read, a kernel that torch does not see has."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from paritas.core.torch_private.operators import map_tensors, returned_tensors, takes_shape_only

if TYPE_CHECKING:
    from torch import Tensor

    from paritas.core.torch_private.operators import Traits

_UNSET, _ZEROS = ("empty", "new_empty"), ("zeros", "new_zeros")


class UnwrittenMemory:
    """Follows what operators allocate, write and read.

    Attributes:
        is_read: whether an operator has read values that none has written.
    """

    def __init__(self) -> None:
        """Nothing is allocated yet."""
        self.is_read = False
        # By the place in memory: whether its values may be zeros.
        self._allocated: dict[int, bool] = {}

    def note(
        self, kind: Traits, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any
    ) -> None:
        """Note one operator."""
        is_unset, is_zero = kind.name.startswith(_UNSET), kind.name.startswith(_ZEROS)
        if self._allocated and not takes_shape_only(kind):
            for argument_key, value in (*enumerate(args), *kwargs.items()):
                forget = argument_key in kind.mutates
                map_tensors(value, self._forget if forget else self._note_read)
        if is_unset or is_zero:
            map_tensors(result, lambda tensor: self._allocated.update({_address(tensor): is_zero}))
        elif self._allocated:
            map_tensors(result, self._forget)

    def note_result(self, result: Any) -> None:
        """Note what a program returns."""
        for tensor in returned_tensors(result) if self._allocated else ():
            self._note_read(tensor)

    def _note_read(self, tensor: Tensor) -> None:
        """Note a read of a tensor, which may have values that no operator has written."""
        address = _address(tensor) if self._allocated else 0
        is_zero = self._allocated.get(address) if address else None
        if is_zero is not None and tensor.numel() and not self.is_read:
            self.is_read = not is_zero or bool(tensor.detach().any())

    def _forget(self, tensor: Tensor) -> None:
        self._allocated.pop(_address(tensor), None)


def _address(tensor: Tensor) -> int:
    try:
        return tensor.untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError):  # sparse, nested and wrapper tensors
        return 0

"""Whether a check fits into memory: as a whole, by blocks, or not at all."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING, Any

import msgspec
import torch

from paritas.core.errors import UsageError
from paritas.core.execution.observation import MOST_WHOLE_GRADIENTS
from paritas.core.execution.reachable import reachable_modules
from paritas.core.results.findings import Verdict, unverified
from paritas.core.results.wording import size
from paritas.core.torch_private.dynamo import original_of
from paritas.core.torch_private.operators import WIDE
from paritas.core.torch_private.tensors import bytes_asked, free_bytes, is_out_of_memory

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor


def check_by(by: str | None, blocks: object) -> None:
    """Raise `UsageError` unless these two arguments of a check are valid and fit together."""
    if by not in {None, "whole", "blocks"}:
        raise UsageError(f"by must be 'whole' or 'blocks', not {by!r}")
    if blocks is not None and by == "whole":
        raise UsageError("blocks=... cannot be combined with by='whole'")


# What a check of a whole model holds at least, beside the model: a copy of its parameters, and this
# many times their size in float64. Values between operators come on top; if they do not fit, the
# error of the allocator says so.
WIDE_COPIES_FORWARD = 1.5
WIDE_COPIES_GRADIENTS = 8.0
WIDE_COPIES_SKETCHES = 2.5
_ADVICE = (
    "free memory on the device, use shorter inputs or a smaller batch, or name smaller blocks with "
    "blocks=[...]"
)


def verify_where_it_fits(
    check_whole: Callable[[], Verdict],
    in_blocks: Callable[[], Verdict] | None,
    shortage: str,
    device: torch.device,
) -> Verdict:
    """Run a check as a whole, or by blocks where the whole does not fit.

    Args:
        check_whole: checks the whole models.
        in_blocks: checks them by blocks; None if that is not allowed.
        shortage: why the whole is known not to fit; empty if it may fit.
        device: where the models are.
    """
    reasons = [shortage] if shortage else []
    if not shortage or in_blocks is None:
        verdict, reason = _try_check(check_whole, device)
        if verdict is not None:
            return verdict
        reasons.append(f"the whole model: {reason}")
    if in_blocks is not None:
        try:
            verdict, reason = _try_check(in_blocks, device)
        except UsageError as error:
            if shortage:  # it was only an estimate
                return verify_where_it_fits(check_whole, None, "", device)
            verdict, reason = None, str(error)
        if verdict is not None:
            note = f"checked by blocks because of memory: {'; '.join(reasons)}"
            return msgspec.structs.replace(verdict, notes=(note, *verdict.notes))
        reasons.append(f"by blocks: {reason}")
    reason = f"there is not enough memory to check this: {'; '.join(reasons)}"
    return Verdict(findings=(unverified("memory", reason, _ADVICE),))


def _try_check(check: Callable[[], Verdict], device: torch.device) -> tuple[Verdict | None, str]:
    """The verdict, or why there is none: memory ran out."""
    try:
        return check(), ""
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        reason = _describe(error, device)
    # The error is gone by now, and with it the frames that held the tensors of the check.
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return None, reason


def _describe(error: BaseException, device: torch.device) -> str:
    requested_bytes, free = bytes_asked(error), free_bytes(device)
    needed = (
        "memory ran out" if requested_bytes is None else f"{size(requested_bytes)} more were needed"
    )
    return needed if free is None else f"{needed}, {size(free)} were free on {device}"


def describe_shortage(
    model: Any, *, gradients: bool, sketches: bool = False
) -> tuple[str, torch.device]:
    """Why a model is too large to be checked as a whole, or "", and the device that it is on.

    With `sketches`, the check keeps sketches of large gradients.
    """
    tensors: dict[int, Tensor] = {}
    for module in reachable_modules(model, original_of).values():
        module_tensors = (*module.parameters(), *module.buffers())
        tensors |= {
            id(tensor): tensor
            for tensor in module_tensors
            if not torch.nn.parameter.is_lazy(tensor)
        }
    if not tensors:
        return "", torch.device("cpu")
    device = max(tensors.values(), key=lambda tensor: tensor.nbytes).device
    here = [tensor for tensor in tensors.values() if tensor.device == device]
    native = sum(tensor.nbytes for tensor in here)
    wide = sum(
        tensor.numel() * WIDE[tensor.dtype].itemsize for tensor in here if tensor.dtype in WIDE
    )
    copies = WIDE_COPIES_GRADIENTS if gradients else WIDE_COPIES_FORWARD
    if gradients and sketches and native > MOST_WHOLE_GRADIENTS:
        copies = WIDE_COPIES_SKETCHES
    needed, free = int(native + copies * wide), free_bytes(device)
    if free is None or needed <= free:
        return "", device
    return f"the whole model needs about {size(needed)}, {size(free)} are free on {device}", device

"""Whether a check fits into memory: as a whole, by blocks, or not at all."""

from __future__ import annotations

import collections
import dataclasses
import gc
from typing import TYPE_CHECKING, Any

import msgspec
import torch

from paritas.core.errors import UsageError
from paritas.core.execution.blocks import count_alike, find_blocks, named_modules
from paritas.core.execution.observation import MOST_WHOLE_GRADIENTS
from paritas.core.execution.reachable import reachable_modules
from paritas.core.execution.subjects import ForeignProgram
from paritas.core.results.findings import Verdict, unverified
from paritas.core.results.wording import size
from paritas.core.torch_private.dynamo import backends_of, original_of
from paritas.core.torch_private.operators import WIDE
from paritas.core.torch_private.tensors import bytes_asked, free_bytes, is_out_of_memory

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

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
_CPU = torch.device("cpu")
_ADVICE = (
    "free memory on the device, use shorter inputs or a smaller batch, or name smaller blocks with "
    "blocks=[...]"
)


# A check by blocks compiles a few small programs whatever the size of the model, and needs the
# memory of a few blocks; but it makes more runs. With 156 million parameters on a CPU it takes
# twice the time of the whole, with 1.1 billion on a GPU less time and a quarter to half of the
# memory (benchmarks/README.md). It is taken from so many parameters on, in so many alike blocks.
LARGE_MODEL = 1 << 30
MANY_ALIKE = 4


def describe_saving(reference: Any, candidate: Any) -> str:
    """Why a check by blocks is cheaper than one of the whole models; "" if it is not.

    It is no weaker: each block is compared in float64, and the whole models natively.
    """
    modules = reachable_modules(reference, original_of)
    if isinstance(candidate, ForeignProgram) or backends_of(reference):
        return ""
    count = measure_model(modules.values(), gradients=False).parameters
    if count < LARGE_MODEL:
        return ""
    blocks = find_blocks(modules)
    others = named_modules(dict(reachable_modules(candidate, original_of)))
    alike = count_alike(blocks)
    if alike < MANY_ALIKE or any(name not in others for name in blocks):
        return ""
    return f"{alike} of its blocks are alike, and it has {count:,} parameters"


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
    modules = reachable_modules(model, original_of).values()
    model_size = measure_model(modules, gradients=gradients, sketches=sketches)
    needed, free, device = model_size.needed, model_size.free, model_size.device
    if free is None or needed <= free:
        return "", device
    return f"the whole model needs about {size(needed)}, {size(free)} are free on {device}", device


@dataclasses.dataclass(frozen=True)
class ModelSize:
    """The parameters and buffers of some modules, and the memory that a check of them needs.

    Attributes:
        parameters: the number of parameters, on all devices.
        nbytes: the bytes of parameters and buffers, on all devices.
        dtype: the most frequent dtype that can be lifted; None if there is none.
        device: the one of the largest tensor; the CPU if there is none.
        needed: at least so many bytes are needed on that device, beside the model.
        free: so many are free there; None if that is unknown.
    """

    parameters: int
    nbytes: int
    dtype: torch.dtype | None
    device: torch.device
    needed: int
    free: int | None


def measure_model(
    modules: Iterable[torch.nn.Module], *, gradients: bool, sketches: bool = False
) -> ModelSize:
    """Count what some modules hold; what they share counts once."""
    parameters: dict[int, Tensor] = {}
    tensors: dict[int, Tensor] = {}
    for module in modules:
        parameters |= {id(tensor): tensor for tensor in module.parameters()}
        tensors |= {id(tensor): tensor for tensor in (*module.parameters(), *module.buffers())}
    tensors = {
        key: tensor for key, tensor in tensors.items() if not torch.nn.parameter.is_lazy(tensor)
    }
    device = max(tensors.values(), key=lambda tensor: tensor.nbytes).device if tensors else _CPU
    here = [tensor for tensor in tensors.values() if tensor.device == device]
    lifted = [tensor for tensor in here if tensor.dtype in WIDE]
    wide = sum(tensor.numel() * WIDE[tensor.dtype].itemsize for tensor in lifted)
    native = sum(tensor.nbytes for tensor in here)
    copies = WIDE_COPIES_GRADIENTS if gradients else WIDE_COPIES_FORWARD
    if gradients and sketches and native > MOST_WHOLE_GRADIENTS:
        copies = WIDE_COPIES_SKETCHES
    numbers = collections.Counter[torch.dtype]()
    for tensor in lifted:
        numbers[tensor.dtype] += tensor.numel()
    return ModelSize(
        parameters=sum(tensors[key].numel() for key in parameters if key in tensors),
        nbytes=sum(tensor.nbytes for tensor in tensors.values()),
        dtype=numbers.most_common(1)[0][0] if numbers else None,
        device=device,
        needed=int(native + copies * wide),
        free=free_bytes(device),
    )

"""A model and its parallel plan, from options; joining torchrun's ranks."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import distributed

from paritas.candidates.building import call_user, move_leaf
from paritas.candidates.loading import find, resolve
from paritas.cli.verify_parallel import NAMED_PLANS
from paritas.errors import UsageError
from paritas.execution.subjects import usable_device
from paritas.numerics.contents import map_leaves

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from paritas.cli.running import Ranks
    from paritas.cli.verify_parallel import ParallelOptions


@dataclasses.dataclass(frozen=True)
class ParallelSetup:
    """What the user's functions gave."""

    model: torch.nn.Module
    plan: Any
    inputs: Any
    mesh: int | dict[str, int]
    loss: Callable[..., Any] | None
    optimizer: Callable[..., Any] | None
    step: Callable[..., Any] | None
    compute_dtype: torch.dtype | None


def build_parallel(factory: str, options: ParallelOptions, here: Ranks | None) -> ParallelSetup:
    """Find and call what the options name, under the seed that they name."""
    plan = options.plan if options.plan in NAMED_PLANS else _find_plan(options.plan)
    loss = None if options.loss is None else resolve(options.loss, "--loss")
    optimizer = None if options.optimizer is None else resolve(options.optimizer, "--optimizer")
    model, inputs = call_user(factory, options.inputs, options.seed)
    if not isinstance(model, torch.nn.Module):
        raise UsageError(
            f"FACTORY {factory!r} returned a model of type {type(model).__name__}; a parallel plan "
            "needs a torch.nn.Module"
        )
    dtype = None if options.dtype is None else getattr(torch, options.dtype)
    narrow = None if options.compute_dtype is None else getattr(torch, options.compute_dtype)
    device = None if options.device is None else usable_device(options.device)
    world = 2 if here is None else here.world
    return ParallelSetup(
        model=model.to(device=device, dtype=dtype),
        plan=plan,
        inputs=map_leaves(inputs, lambda leaf: move_leaf(leaf, device, dtype)),
        mesh=world if options.mesh is None else options.mesh,
        loss=loss,
        optimizer=optimizer,
        step=None if options.step is None else resolve(options.step, "--step"),
        compute_dtype=narrow,
    )


def _find_plan(spec: str) -> Any:
    plan = find(spec, "--plan")
    if not callable(plan) and not isinstance(plan, Mapping):
        raise UsageError(
            f"--plan {spec!r} is of type {type(plan).__name__}: {plan!r:.80}; name a dict of "
            "parallel styles, or a function of the model and the mesh"
        )
    return plan


@contextlib.contextmanager
def joined(here: Ranks | None) -> Iterator[str]:
    """Within it this process is a rank of torchrun's group; nothing where torchrun is not there.

    It yields what is to be said about the devices of the ranks.

    All ranks leave it together: torchrun ends the others as soon as one has ended with a code that
    is not 0, and the first rank must have told the verdict by then.
    """
    if here is None:
        yield ""
        return
    gpus, ranks = torch.cuda.device_count(), len(here.here)
    has_gpu = gpus >= ranks  # NCCL has no two ranks on one GPU
    note = ""
    if gpus and not has_gpu:
        note = (
            f"run on the CPU with gloo: NCCL needs one GPU per rank, and this machine has {gpus} "
            f"for {ranks} ranks"
        )
    if has_gpu:
        torch.cuda.set_device(here.rank - here.here.start)
    hook = sys.excepthook
    # Traces travel between hosts, so there is gloo beside NCCL.
    distributed.init_process_group("cpu:gloo,cuda:nccl" if has_gpu else "gloo")
    try:
        yield note
        distributed.barrier()
    finally:
        distributed.destroy_process_group()
        sys.excepthook = hook

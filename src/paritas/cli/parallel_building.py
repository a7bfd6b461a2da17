"""From the options of `paritas verify-parallel` to what is verified; joining torchrun's ranks."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import distributed

from paritas.cli.loading import call, find, model_and_inputs, resolve
from paritas.cli.verify_parallel import NAMED_PLANS
from paritas.errors import UsageError
from paritas.numerics.trees import map_leaves

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from paritas.cli.ranks import Ranks
    from paritas.cli.verify_parallel import Options

__all__ = ["Built", "build", "joined"]


@dataclasses.dataclass(frozen=True)
class Built:
    """What the user's functions gave."""

    model: torch.nn.Module
    plan: Any
    inputs: Any
    mesh: int | dict[str, int]
    loss: Callable[..., Any] | None
    optimizer: Callable[..., Any] | None


def build(factory: str, options: Options, here: Ranks | None) -> Built:
    """Find and call what the options name, under the seed that they name."""
    make_model = resolve(factory, "FACTORY")
    make_inputs = None if options.inputs is None else resolve(options.inputs, "--inputs")
    plan = options.plan if options.plan in NAMED_PLANS else _plan(options.plan)
    loss = None if options.loss is None else resolve(options.loss, "--loss")
    optimizer = None if options.optimizer is None else resolve(options.optimizer, "--optimizer")
    torch.manual_seed(options.seed)
    made = call(make_model, factory, "FACTORY")
    model, inputs = model_and_inputs(made, factory, model_alone=make_inputs is not None)
    if make_inputs is not None and options.inputs is not None:
        inputs = call(make_inputs, options.inputs, "--inputs")
    if not isinstance(model, torch.nn.Module):
        raise UsageError(
            f"FACTORY {factory!r} returned a model of type {type(model).__name__}; a parallel plan "
            "needs a torch.nn.Module"
        )
    dtype = None if options.dtype is None else getattr(torch, options.dtype)
    world = 2 if here is None else here.world
    return Built(
        model=model.to(dtype=dtype),
        plan=plan,
        inputs=map_leaves(inputs, lambda leaf: _cast(leaf, dtype)),
        mesh=world if options.mesh is None else options.mesh,
        loss=loss,
        optimizer=optimizer,
    )


def _plan(spec: str) -> Any:
    plan = find(spec, "--plan")
    if not callable(plan) and not isinstance(plan, Mapping):
        raise UsageError(
            f"--plan {spec!r} is of type {type(plan).__name__}: {plan!r:.80}; name a dict of "
            "parallel styles, or a function of the model and the mesh"
        )
    return plan


def _cast(leaf: Any, dtype: torch.dtype | None) -> Any:
    if dtype is None or not isinstance(leaf, torch.Tensor) or not leaf.is_floating_point():
        return leaf
    return leaf.detach().to(dtype=dtype).requires_grad_(leaf.requires_grad)


@contextlib.contextmanager
def joined(here: Ranks | None) -> Iterator[None]:
    """Within it this process is a rank of torchrun's group; nothing where torchrun is not there.

    All ranks leave it together: torchrun ends the others as soon as one has ended with a code that
    is not 0, and the first rank must have told the verdict by then.
    """
    if here is None:
        yield
        return
    has_gpu = torch.cuda.device_count() >= len(here.here)  # NCCL has no two ranks on one GPU
    if has_gpu:
        torch.cuda.set_device(here.rank - here.here.start)
    hook = sys.excepthook
    # Traces travel between hosts, so there is gloo beside NCCL.
    distributed.init_process_group("cpu:gloo,cuda:nccl" if has_gpu else "gloo")
    try:
        yield
        distributed.barrier()
    finally:
        distributed.destroy_process_group()
        sys.excepthook = hook

"""From options to models: the user's factory, a model by name, a parallel plan."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import difflib
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import distributed

from paritas.candidates.names import is_named, make
from paritas.cli.loading import call, find, model_and_inputs, resolve
from paritas.cli.verify_parallel import NAMED_PLANS
from paritas.errors import UsageError
from paritas.execution.subjects import usable_device
from paritas.numerics.contents import map_leaves
from paritas.targets import build_target, is_target

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from paritas.cli.options import BuildOptions
    from paritas.cli.running import Ranks
    from paritas.cli.verify import VerifyOptions
    from paritas.cli.verify_parallel import ParallelOptions


# --- A reference, its inputs and a candidate ------------------------------------------------------

SEED = 0


def build_reference(factory: str, options: BuildOptions) -> tuple[Any, Any]:
    """The model and its inputs, moved to where and in what they are to run."""
    device = None if options.device is None else usable_device(options.device)
    dtype = None if options.dtype is None else getattr(torch, options.dtype)
    model, inputs = _call_user(factory, options.inputs, SEED, train=options.train)
    if isinstance(model, torch.nn.Module):
        model = model.train(options.train).to(device=device, dtype=dtype)
    return model, map_leaves(inputs, lambda leaf: _move_leaf(leaf, device, dtype))


def _call_user(
    factory: str, inputs_spec: str | None, seed: int, *, train: bool = False
) -> tuple[Any, Any]:
    """The model and its inputs as the user's functions make them, under a seed."""
    make_inputs = None if inputs_spec is None else resolve(inputs_spec, "--inputs")
    torch.manual_seed(seed)
    model, inputs = _call_factory(factory, model_alone=make_inputs is not None, train=train)
    if make_inputs is not None and inputs_spec is not None:
        inputs = call(make_inputs, inputs_spec, "--inputs")
    return model, inputs


def _call_factory(factory: str, *, model_alone: bool, train: bool) -> tuple[Any, Any]:
    if is_target(factory):
        return build_target(factory, train=train, model_alone=model_alone)
    made = call(resolve(factory, "FACTORY"), factory, "FACTORY")
    return model_and_inputs(made, factory, model_alone=model_alone)


def build_candidate(model: Any, inputs: Any, options: VerifyOptions) -> Callable[..., Any]:
    """The candidate of that name, what the user's function makes, or else `torch.compile`."""
    if options.candidate is not None and is_named(options.candidate):
        return make(options.candidate, model, inputs)
    if options.candidate is not None:
        return _from_function(model, options.candidate)
    _check_backend(options.backend)
    asked = {name: getattr(options, name) for name in ("backend", "mode", "dynamic", "fullgraph")}
    try:
        return torch.compile(model, **asked)
    except Exception as error:
        shown = ", ".join(f"{name}={value!r}" for name, value in asked.items())
        raise UsageError(f"torch.compile({shown}) refuses: {error}") from error


def _check_backend(name: str) -> None:
    known = torch.compiler.list_backends(exclude_tags=())
    if name in known:
        return
    near = difflib.get_close_matches(name, known, n=1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    usual = torch.compiler.list_backends()
    others = f"and {len(known) - len(usual)} for debugging, such as eager and aot_eager"
    raise UsageError(f"unknown --backend {name!r}; {hint}known are {', '.join(usual)}, {others}")


def _from_function(model: Any, spec: str) -> Callable[..., Any]:
    """Call the user's function with a copy of the model.

    One that changes the model in place would otherwise change the reference with it, and the two
    would agree whatever it did.
    """
    function = resolve(spec, "--candidate")
    try:
        own = copy.deepcopy(model)
    except Exception as error:
        raise UsageError(
            f"the model cannot be copied for --candidate {spec!r}: "
            f"{type(error).__name__}: {error}; call paritas.verify from Python instead"
        ) from error
    candidate: Callable[..., Any] = call(function, spec, "--candidate", own)
    if not callable(candidate) or isinstance(candidate, type):
        raise UsageError(
            f"--candidate {spec!r} returned {candidate!r:.80}, which cannot be called; "
            "return what is to be called in place of the model"
        )
    return candidate


def _move_leaf(leaf: Any, device: torch.device | None, dtype: torch.dtype | None) -> Any:
    """An input where the model is: floating ones in its dtype, others only on its device."""
    if not isinstance(leaf, torch.Tensor) or (device is None and dtype is None):
        return leaf
    cast = dtype if leaf.is_floating_point() else None
    moved = leaf.detach().to(device=device, dtype=cast)
    return moved.requires_grad_(leaf.requires_grad)


# --- A model and its parallel plan; joining torchrun's ranks --------------------------------------


@dataclasses.dataclass(frozen=True)
class ParallelSetup:
    """What the user's functions gave."""

    model: torch.nn.Module
    plan: Any
    inputs: Any
    mesh: int | dict[str, int]
    loss: Callable[..., Any] | None
    optimizer: Callable[..., Any] | None


def build_parallel(factory: str, options: ParallelOptions, here: Ranks | None) -> ParallelSetup:
    """Find and call what the options name, under the seed that they name."""
    plan = options.plan if options.plan in NAMED_PLANS else _find_plan(options.plan)
    loss = None if options.loss is None else resolve(options.loss, "--loss")
    optimizer = None if options.optimizer is None else resolve(options.optimizer, "--optimizer")
    model, inputs = _call_user(factory, options.inputs, options.seed)
    if not isinstance(model, torch.nn.Module):
        raise UsageError(
            f"FACTORY {factory!r} returned a model of type {type(model).__name__}; a parallel plan "
            "needs a torch.nn.Module"
        )
    dtype = None if options.dtype is None else getattr(torch, options.dtype)
    world = 2 if here is None else here.world
    return ParallelSetup(
        model=model.to(dtype=dtype),
        plan=plan,
        inputs=map_leaves(inputs, lambda leaf: _move_leaf(leaf, None, dtype)),
        mesh=world if options.mesh is None else options.mesh,
        loss=loss,
        optimizer=optimizer,
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

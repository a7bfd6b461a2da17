"""From names to models: the user's factory, a model by name, a candidate."""

from __future__ import annotations

import copy
import difflib
from typing import TYPE_CHECKING, Any

import torch

from paritas.candidates.loading import call, is_named, make, model_and_inputs, resolve
from paritas.errors import UsageError
from paritas.execution.subjects import usable_device
from paritas.numerics.contents import map_leaves
from paritas.targets import build_target, is_target

if TYPE_CHECKING:
    from collections.abc import Callable

    from paritas.candidates.loading import BuildOptions, CandidateOptions


# --- A reference, its inputs and a candidate ------------------------------------------------------

SEED = 0


def build_reference(
    factory: str, options: BuildOptions, *, model_alone: bool = False
) -> tuple[Any, Any]:
    """The model and its inputs, moved to where and in what they are to run.

    With `model_alone`, a factory may return a model without inputs.
    """
    device = None if options.device is None else usable_device(options.device)
    dtype = None if options.dtype is None else getattr(torch, options.dtype)
    model, inputs = call_user(
        factory, options.inputs, SEED, train=options.train, model_alone=model_alone
    )
    if isinstance(model, torch.nn.Module):
        model = model.train(options.train).to(device=device, dtype=dtype)
    return model, map_leaves(inputs, lambda leaf: move_leaf(leaf, device, dtype))


def call_user(
    factory: str,
    inputs_spec: str | None,
    seed: int,
    *,
    train: bool = False,
    model_alone: bool = False,
) -> tuple[Any, Any]:
    """The model and its inputs as the user's functions make them, under a seed."""
    make_inputs = None if inputs_spec is None else resolve(inputs_spec, "--inputs")
    torch.manual_seed(seed)
    model_alone = model_alone or make_inputs is not None
    model, inputs = _call_factory(factory, model_alone=model_alone, train=train)
    if make_inputs is not None and inputs_spec is not None:
        inputs = call(make_inputs, inputs_spec, "--inputs")
    return model, inputs


def _call_factory(factory: str, *, model_alone: bool, train: bool) -> tuple[Any, Any]:
    if is_target(factory):
        return build_target(factory, train=train, model_alone=model_alone)
    made = call(resolve(factory, "FACTORY"), factory, "FACTORY")
    return model_and_inputs(made, factory, model_alone=model_alone)


def build_candidate(model: Any, inputs: Any, options: CandidateOptions) -> Callable[..., Any]:
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


def move_leaf(leaf: Any, device: torch.device | None, dtype: torch.dtype | None) -> Any:
    """An input where the model is: floating ones in its dtype, others only on its device."""
    if not isinstance(leaf, torch.Tensor) or (device is None and dtype is None):
        return leaf
    cast = dtype if leaf.is_floating_point() else None
    moved = leaf.detach().to(device=device, dtype=cast)
    return moved.requires_grad_(leaf.requires_grad)

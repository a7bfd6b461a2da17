"""From the options of `paritas verify` to a reference, its inputs and a candidate."""

from __future__ import annotations

import copy
import difflib
from typing import TYPE_CHECKING, Any

import torch

from paritas.candidates.making import make
from paritas.candidates.names import is_named
from paritas.checking.devices import usable_device
from paritas.cli.hugging_face import build_model, is_hugging_face
from paritas.cli.loading import call, model_and_inputs, resolve
from paritas.errors import UsageError
from paritas.numerics.trees import map_leaves

if TYPE_CHECKING:
    from collections.abc import Callable

    from paritas.cli.verify import Options

SEED = 0


def build_reference(factory: str, options: Options) -> tuple[Any, Any]:
    """The model and its inputs, moved to where and in what they are to run."""
    device = None if options.device is None else usable_device(options.device)
    dtype = None if options.dtype is None else getattr(torch, options.dtype)
    make_inputs = None if options.inputs is None else resolve(options.inputs, "--inputs")
    torch.manual_seed(SEED)
    model, inputs = _made(factory, model_alone=make_inputs is not None)
    if make_inputs is not None and options.inputs is not None:
        inputs = call(make_inputs, options.inputs, "--inputs")
    if isinstance(model, torch.nn.Module):
        model = model.train(options.train).to(device=device, dtype=dtype)
    return model, map_leaves(inputs, lambda leaf: _moved(leaf, device, dtype))


def _made(factory: str, *, model_alone: bool) -> tuple[Any, Any]:
    if not is_hugging_face(factory):
        made = call(resolve(factory, "FACTORY"), factory, "FACTORY")
        return model_and_inputs(made, factory, model_alone=model_alone)
    model, inputs = build_model(factory)
    if inputs is None and not model_alone:
        raise UsageError(
            f"FACTORY {factory!r}: what {type(model).__name__} takes is not known here; name a "
            "function that makes it with --inputs module:function"
        )
    return model, inputs


def build_candidate(model: Any, inputs: Any, options: Options) -> Callable[..., Any]:
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


def _moved(leaf: Any, device: torch.device | None, dtype: torch.dtype | None) -> Any:
    """An input where the model is: floating ones in its dtype, others only on its device."""
    if not isinstance(leaf, torch.Tensor) or (device is None and dtype is None):
        return leaf
    cast = dtype if leaf.is_floating_point() else None
    moved = leaf.detach().to(device=device, dtype=cast)
    return moved.requires_grad_(leaf.requires_grad)

"""The arguments of an operator as they are written on a command line."""

from __future__ import annotations

import ast
import dataclasses
import re
from typing import TYPE_CHECKING, Any

import torch

from paritas.checking.devices import usable_device
from paritas.errors import UsageError
from paritas.partition.configuration.config import TensorInfo, VerifyConfig
from paritas.partition.configuration.inputs import make_call
from paritas.partition.running.placing import on_device

if TYPE_CHECKING:
    from collections.abc import Callable

    from paritas.cli.partition import Options
    from paritas.partition.recipes import OperatorCall

__all__ = ["operator_call", "read_argument"]

_SHAPE = re.compile(r"(?P<sizes>\d+(?:x\d+)*)(?::(?P<dtype>\w+)(?:<(?P<below>\d+))?)?")
_FORMS = "8x32, 8x32:int64<100, 2.5 or value=(8, 4)"


def operator_call(spec: str, function: Callable[..., Any], options: Options) -> OperatorCall:
    """The call that the command line describes.

    Raises:
        UsageError: an argument cannot be read.
    """
    args = [read_argument(text, "--arg", options.seed) for text in options.args]
    kwargs: dict[str, Any] = {}
    for text in options.kwargs:
        name, equals, value = text.partition("=")
        if not equals or not name.isidentifier():
            raise UsageError(f"--kwarg {text!r} is not of the form name=..., as in dim=1")
        info = read_argument(value, f"--kwarg {name}", options.seed, keyword=True)
        kwargs[name] = info if info.value_type == "shape" else info.value
    config = VerifyConfig(
        fsig=spec,
        args=args,
        kwargs=kwargs,
        noutputs=1,
        parti_options=[],
        non_grad_indices=list(options.without_gradient),
    )
    call = make_call(config, function, seed=options.seed)
    dtype = getattr(torch, options.dtype)
    typed = dataclasses.replace(
        call,
        args=tuple(map(_in_dtype, call.args, args, [dtype] * len(args))),
        kwargs={name: _in_dtype(value, kwargs[name], dtype) for name, value in call.kwargs.items()},
    )
    if options.device is None:
        return typed
    return on_device(typed, usable_device(options.device))


def _in_dtype(value: Any, info: Any, dtype: torch.dtype) -> Any:
    """A floating tensor in the dtype that is asked for, unless it has one of its own."""
    if not isinstance(info, TensorInfo) or info.value_type == "value":
        return value
    if value.numel() == 0:
        raise UsageError(f"a tensor of the shape {tuple(value.shape)} is empty: nothing to split")
    return value.to(dtype) if info.dtype is None and value.is_floating_point() else value


def read_argument(text: str, parameter: str, seed: int = 0, *, keyword: bool = False) -> TensorInfo:
    """Read one argument.

    Args:
        text: what stands on the command line.
        parameter: which option this is, for messages.
        seed: of indices below a bound.
        keyword: whether a whole number is a number; otherwise it is the shape of a vector.
    """
    if text.startswith("value="):
        return TensorInfo("value", _literal(text.removeprefix("value="), text, parameter))
    form = _SHAPE.fullmatch(text)
    if form is not None and not (keyword and text.isdecimal()):
        return _tensor(form, text, parameter, seed)
    if keyword and re.fullmatch(r"[A-Za-z_]+", text) and text not in {"None", "True", "False"}:
        return TensorInfo("value", text)  # reduction=mean
    if text.startswith("torch."):
        found = getattr(torch, text.removeprefix("torch."), None)
        if isinstance(found, torch.dtype):
            return TensorInfo("value", found)
    return TensorInfo("value", _literal(text, text, parameter))


def _literal(text: str, whole: str, parameter: str) -> Any:
    try:
        tree = ast.parse(text.strip(), mode="eval").body
        match tree:
            case ast.Call(func=ast.Name(id="slice"), args=list(ends), keywords=[]):
                return slice(*map(ast.literal_eval, ends))
        return ast.literal_eval(tree)
    except (ValueError, SyntaxError, TypeError):
        raise UsageError(f"{parameter} {whole!r} cannot be read: write {_FORMS}") from None


def _tensor(form: re.Match[str], text: str, parameter: str, seed: int) -> TensorInfo:
    shape = tuple(map(int, form["sizes"].split("x")))
    if form["dtype"] is None:
        return TensorInfo("shape", shape)
    named = getattr(torch, form["dtype"], None)
    if not isinstance(named, torch.dtype):
        raise UsageError(f"{parameter} {text!r}: torch has no dtype {form['dtype']!r}")
    if form["below"] is None:
        return TensorInfo("shape", shape, dtype=named)
    below = int(form["below"])
    if below == 0 or named.is_floating_point or named.is_complex or named is torch.bool:
        raise UsageError(f"{parameter} {text!r}: '<{below}' is for whole numbers, from 0 on")

    def indices(shape: tuple[int, ...]) -> torch.Tensor:
        generator = torch.Generator().manual_seed(seed)
        drawn = torch.randint(below, shape, generator=generator, dtype=named)
        drawn.view(-1)[-1] = below - 1  # the last one is where faults hide
        return drawn

    return TensorInfo("shape", shape, dtype=named, generator=indices)

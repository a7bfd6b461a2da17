"""Find the reference and the candidate by name, and make what is called.

A side is named as people have it: `file.py` with a class `Model` or `ModelNew` (KernelBench's
convention), `file.py:function`, `package.module:function`, or an operator: `aten.softmax.int`.
The judging process loads only the reference, and a candidate's process only the candidate.
"""

from __future__ import annotations

import inspect
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from paritas.core.errors import UsageError, did_you_mean, in_one_line
from paritas.core.importing import (
    ImportFailedError,
    MissingNameError,
    find_attribute,
    import_file,
    import_module,
    look_here,
)
from paritas.core.torch_private.named_operators import find_operator, is_operator
from paritas.kernels.messages import SideName

if TYPE_CHECKING:
    import os
    from collections.abc import Callable
    from types import ModuleType

# KernelBench's names.
MODEL, NEW_MODEL = "Model", "ModelNew"
INPUTS, INIT_INPUTS = "get_inputs", "get_init_inputs"
# BackendBench's: a file that overrides an operator has one function of such a name.
OVERRIDE = "_kernel_impl"


def parse_side(side: str | os.PathLike[str] | Callable[..., Any], parameter: str) -> SideName:
    """Where a side is, from what the user gave.

    Raises:
        UsageError: it cannot be found by a name, as a lambda cannot.
    """
    if callable(side) and not isinstance(side, str | Path):
        return _side_of_object(side, parameter)
    text = str(side)
    head, colon, name = text.rpartition(":") if ":" in text else (text, "", "")
    if not colon:
        head, name = text, ""
    if head.endswith(".py"):
        path = Path(head).absolute()
        if not path.is_file():
            raise UsageError(f"{parameter} {text!r}: there is no file {head!r}")
        return SideName(file=str(path), name=name, shown=text)
    if colon:
        return SideName(module=head, name=name, shown=text)
    if find_operator(text) is not None:
        return SideName(name=text, shown=text)
    raise UsageError(
        f"{parameter} {text!r} is not a file.py, file.py:name, package.module:name or an operator "
        "such as aten.softmax.int"
    )


def _side_of_object(side_object: Any, parameter: str) -> SideName:
    """The name of a function or class that another process can import."""
    if is_operator(side_object):
        return SideName(name=str(side_object), shown=str(side_object))
    name = getattr(side_object, "__qualname__", "")
    module = sys.modules.get(getattr(side_object, "__module__", None) or "")
    resolved: Any = module
    for part in name.split("."):
        resolved = getattr(resolved, part, None)
    if not name or resolved is not side_object:
        raise UsageError(
            f"{parameter} {side_object!r:.80} has no name in its module, so another process cannot "
            "import it: define it at the top of a file, and give file.py:name"
        )
    file = getattr(module, "__file__", None)
    if getattr(module, "__name__", "") == "__main__" or file is None:
        if file is None:
            raise UsageError(f"{parameter} {name!r} is not in a file: save it in one, and name it")
        return SideName(file=str(Path(file).absolute()), name=name, shown=f"{file}:{name}")
    return SideName(module=module.__name__, name=name, shown=f"{module.__name__}:{name}")  # type: ignore[union-attr]


# --- Loading --------------------------------------------------------------------------------------


class Side:
    """A loaded reference or candidate.

    Attributes:
        name: where it came from.
        target: the function, the class of modules, or the module.
        home: the Python module that defines it; None for an operator.
    """

    def __init__(self, name: SideName, target: Any, home: ModuleType | None) -> None:
        self.name, self.target, self.home = name, target, home

    @property
    def is_module_class(self) -> bool:
        """Whether modules have to be constructed from it."""
        return isinstance(self.target, type) and issubclass(self.target, nn.Module)

    def construct(self, init: tuple[Any, ...], kwargs: dict[str, Any], seed: int) -> Any:
        """What is called: a new module under a seed, or the function itself."""
        if not self.is_module_class:
            return self.target
        torch.manual_seed(seed)
        return self.target(*init, **kwargs)

    @property
    def code_names(self) -> list[tuple[str, str]]:
        """The file and the qualified names of the functions that compute it."""
        function = self.target.forward if self.is_module_class else self.target
        code = getattr(inspect.unwrap(function) if callable(function) else None, "__code__", None)
        return [] if code is None else [(code.co_filename, code.co_qualname)]

    @property
    def file(self) -> str:
        """The file that defines it; empty if there is none."""
        return str(getattr(self.home, "__file__", None) or "")


def load_side(name: SideName, *, is_candidate: bool) -> Side:
    """Import a side.

    Raises:
        UsageError: it does not exist, or importing it raises.
    """
    role = "CANDIDATE" if is_candidate else "REFERENCE"
    if name.is_operator:
        return Side(name, find_operator(name.name), None)
    home = _import_home(name, role)
    try:
        target = find_attribute(home, name.name or _usual_name(home, is_candidate=is_candidate))
    except MissingNameError as error:
        public = [attribute for attribute in vars(home) if not attribute.startswith("_")]
        hint = did_you_mean(error.missing, public)
        raise UsageError(f"{role} {name.shown!r} has no {error.missing!r}: {hint}") from None
    if not callable(target):
        kind = type(target).__name__
        raise UsageError(f"{role} {name.shown!r} cannot be called; it has type {kind}")
    if isinstance(target, type) and not issubclass(target, nn.Module):
        raise UsageError(f"{role} {name.shown!r} is a class, but not an nn.Module: {target!r:.80}")
    return Side(name, target, home)


def _usual_name(home: ModuleType, *, is_candidate: bool) -> str:
    names = (NEW_MODEL, MODEL) if is_candidate else (MODEL,)
    for name in names:
        if hasattr(home, name):
            return name
    function_names = [
        name
        for name, value in vars(home).items()
        if inspect.isfunction(value)
        and value.__module__ == home.__name__
        and name not in {INPUTS, INIT_INPUTS}
    ]
    # Some operators have names with an underscore in front.
    overrides = [name for name in function_names if name.endswith(OVERRIDE)]
    public = [name for name in function_names if not name.startswith("_")]
    for candidate_names in (overrides, public):
        if len(candidate_names) == 1:
            return candidate_names[0]
    raise UsageError(
        f"{home.__file__} has neither a class {' or '.join(names)} nor exactly one function: "
        "name one, as in file.py:function"
    )


def _import_home(name: SideName, role: str) -> ModuleType:
    """The file or the module that defines a side."""
    try:
        if name.file:
            return import_file(Path(name.file))
        look_here()
        return import_module(name.module)
    except ImportFailedError as error:
        module = "it" if name.file else name.module
        raise UsageError(
            f"{role} {name.shown!r}: importing {module} raised {in_one_line(error.cause, 300)}"
        ) from error.cause


def resolve_inputs(inputs_source: str | Callable[[], Any] | None) -> Callable[[], Any] | None:
    """The function that makes the inputs.

    Raises:
        UsageError: there is no such function.
    """
    if inputs_source is None or callable(inputs_source):
        return inputs_source
    name = parse_side(inputs_source, "--inputs")
    if name.is_operator or not name.name:
        raise UsageError(f"--inputs {inputs_source!r} is not of the form file.py:function")
    return load_side(name, is_candidate=False).target  # type: ignore[no-any-return]


# --- What a custom operator registers beside its kernel: fake, autograd, vmap ---------------------

_LONGEST_TEXT = 300


def _is_custom_operator(target: Any) -> bool:
    """Whether a callable is a custom operator of `torch.library`."""
    return hasattr(target, "_opoverload") or hasattr(target, "_schema")


def check_registrations(target: Any, inputs: tuple[Any, dict[str, Any]]) -> dict[str, str]:
    """Run `torch.library.opcheck` in the candidate's process; returns test -> what it says."""
    args, kwargs = inputs
    if not _is_custom_operator(target):
        return {}
    try:
        check_outcomes = torch.library.opcheck(target, tuple(args), kwargs, raise_exception=False)
    except Exception as error:  # noqa: BLE001  (it becomes a finding)
        return {"opcheck": in_one_line(error, _LONGEST_TEXT)}
    return {
        name: ""
        if outcome == "SUCCESS"
        else in_one_line(outcome, _LONGEST_TEXT)
        if isinstance(outcome, BaseException)
        else str(outcome)[:_LONGEST_TEXT]
        for name, outcome in check_outcomes.items()
    }

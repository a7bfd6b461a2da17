"""Find what `package.module:name` names, and call it; every way this can fail has its message."""

from __future__ import annotations

import difflib
import importlib
import os
import sys
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paritas.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType

_MOST_NAMES = 8
_LONGEST_TEXT = 300


def check_form(spec: str, parameter: str) -> None:
    """Raise `UsageError` unless `spec` looks like `package.module:name`."""
    module, _, name = spec.partition(":")
    if not (module and name) or _is_path(module) or ":" in name:
        raise UsageError(
            f"{parameter} {spec!r} is not of the form package.module:name{_hint(spec)}"
        )


def resolve(spec: str, parameter: str) -> Callable[..., Any]:
    """The callable that `spec` names, looked for in the current directory as well.

    Args:
        spec: `package.module:name`; the name may have dots.
        parameter: which argument or option this is, for messages.

    Raises:
        UsageError: it is not there, or not callable, or importing it raises.
    """
    found = find(spec, parameter)
    if not callable(found):
        kind = type(found).__name__
        raise UsageError(f"{parameter} {spec!r} is no function but of type {kind}: {found!r:.80}")
    return found  # type: ignore[no-any-return]


def find(spec: str, parameter: str) -> Any:
    """Whatever `spec` names: as `resolve`, for what need not be callable."""
    module_name, colon, name = spec.partition(":")
    if not (colon and module_name and name) or _is_path(module_name):
        raise UsageError(
            f"{parameter} {spec!r} is not of the form package.module:name{_hint(spec)}"
        )
    look_here()
    found: Any = _import(module_name, f"{parameter} {spec!r}")
    for part in name.split("."):
        if not hasattr(found, part):
            raise UsageError(f"{parameter} {spec!r}: {_missing(found, part)}")
        found = getattr(found, part)
    return found


def look_here() -> None:
    """Let modules of the current directory be imported, as `python -m` would."""
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)


def call(function: Callable[..., Any], spec: str, parameter: str, *args: Any) -> Any:
    """Call what `resolve` found; what it raises becomes a `UsageError` that says where."""
    try:
        return function(*args)
    except (Exception, SystemExit) as error:
        given = "the model" if args else "no arguments"
        told = f"{parameter} {spec!r}, called with {given}, raised {_told(error)}"
        raise UsageError(f"{told}{_advice(spec, called=not args)}") from error


def model_and_inputs(result: Any, spec: str, *, model_alone: bool) -> tuple[Any, Any]:
    """Read what a factory returned: `(model, inputs)`, or a model alone where that will do."""
    is_pair = isinstance(result, tuple) and len(result) == 2  # noqa: PLR2004
    model, inputs = result if is_pair else (result, None)
    if not is_pair and not model_alone:
        raise UsageError(
            f"FACTORY {spec!r} returned {_kind(result)}, not (model, inputs); "
            "return both, or name a function that makes the inputs with --inputs module:function"
        )
    if not callable(model) or isinstance(model, type):
        what = "a class; return an instance" if isinstance(model, type) else "not callable"
        raise UsageError(f"FACTORY {spec!r} returned a model that is {what}: {model!r:.80}")
    return model, inputs


def _import(name: str, told: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        missing = error.name or ""
        if name == missing or name.startswith(f"{missing}."):
            places = "in the current directory or the environment"
            raise UsageError(f"{told}: there is no module {missing!r} {places}") from None
        raise UsageError(f"{told}: importing {name} raised {_told(error)}") from error
    except (Exception, SystemExit) as error:
        raise UsageError(f"{told}: importing {name} raised {_told(error)}") from error


def _missing(owner: Any, name: str) -> str:
    """What to say where `owner` has no `name`."""
    kind = "module" if isinstance(owner, type(sys)) else type(owner).__name__
    label = getattr(owner, "__name__", repr(owner)[:40])
    known = {key: value for key, value in vars(owner).items() if not key.startswith("_")}
    own = [key for key, value in known.items() if getattr(value, "__module__", None) == label]
    near = difflib.get_close_matches(name, known, n=3)
    if near:
        hint = f"; did you mean {' or '.join(map(repr, near))}?"
    elif own:
        rest = ", ..." if len(own) > _MOST_NAMES else ""
        hint = f"; it defines {', '.join(own[:_MOST_NAMES])}{rest}"
    else:
        hint = ", and defines nothing of its own"
    return f"{kind} {label} has no {name!r}{hint}"


def _told(error: BaseException) -> str:
    """An exception's kind, text and place, in one line."""
    text = " ".join(str(error).split())
    shown = f"{text[:_LONGEST_TEXT]} ..." if len(text) > _LONGEST_TEXT else text
    kind = type(error).__name__
    return f"{kind}: {shown}{_place(error)}" if shown else f"{kind}{_place(error)}"


def _place(error: BaseException) -> str:
    """Where it was raised, or where the user's code called what raised it."""
    if isinstance(error, SyntaxError):
        return ""  # its text says where
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if frame.filename != __file__ and not frame.filename.startswith("<frozen")
    ]
    own = [frame for frame in frames if "site-packages" not in frame.filename] or frames
    return f" at {_short(own[-1].filename)}:{own[-1].lineno} in {own[-1].name}" if own else ""


def _advice(spec: str, *, called: bool) -> str:
    module, _, name = spec.partition(":")
    if not called:
        return ""
    return f'\nFor the whole traceback: python -c "import {module}; {module}.{name}()"'


def _short(filename: str) -> str:
    """Relative to the current directory where it lies below it."""
    path = Path(filename)
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else filename


def _is_path(module: str) -> bool:
    return os.sep in module or "/" in module or module.endswith(".py")


def _hint(spec: str) -> str:
    module, colon, name = spec.partition(":")
    if _is_path(module):
        module = module.removesuffix(".py").strip("./").replace(os.sep, ".").replace("/", ".")
        return f"; did you mean '{module}:{name or 'build'}'?"
    if not colon and module.count(".") > 1:
        module, _, name = module.rpartition(".")
    example = f"{module or 'model'}:{name or 'build'}"
    return f"; put one colon between module and function, as in {example!r}"


def _kind(result: Any) -> str:
    if isinstance(result, tuple | list):
        return f"a {type(result).__name__} of {len(result)}"
    return f"a {type(result).__name__}"

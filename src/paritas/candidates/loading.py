"""Find what `package.module:name`, `--graph` and `--inputs` name; each failure has its message."""

from __future__ import annotations

import difflib
import importlib
import os
import sys
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paritas.errors import UsageError, in_one_line

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
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


def check_forms(named: Mapping[str, str | None]) -> None:
    """The same of several, by parameter; those that were not given are left out."""
    for parameter, spec in named.items():
        if spec is not None:
            check_form(spec, parameter)


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
            raise UsageError(f"{parameter} {spec!r}: {_describe_missing(found, part)}")
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
        told = f"{parameter} {spec!r}, called with {given}, raised {_describe_error(error)}"
        raise UsageError(f"{told}{_advice(spec, called=not args)}") from error


def model_and_inputs(result: Any, spec: str, *, model_alone: bool) -> tuple[Any, Any]:
    """Read what a factory returned: `(model, inputs)`, or a model alone where that will do."""
    is_pair = isinstance(result, tuple) and len(result) == 2  # noqa: PLR2004
    model, inputs = result if is_pair else (result, None)
    if not is_pair and not model_alone:
        raise UsageError(
            f"FACTORY {spec!r} returned {_describe_type(result)}, not (model, inputs); "
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
        raise UsageError(f"{told}: importing {name} raised {_describe_error(error)}") from error
    except (Exception, SystemExit) as error:
        raise UsageError(f"{told}: importing {name} raised {_describe_error(error)}") from error


def _describe_missing(owner: Any, name: str) -> str:
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


def _describe_error(error: BaseException) -> str:
    """An exception's kind, text and place, in one line."""
    shown = in_one_line(error, _LONGEST_TEXT, whole=True, cut=" ...")
    return f"{shown}{_describe_place(error)}"


def _describe_place(error: BaseException) -> str:
    """Where it was raised, or where the user's code called what raised it."""
    if isinstance(error, SyntaxError):
        return ""  # its text says where
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if frame.filename != __file__ and not frame.filename.startswith("<frozen")
    ]
    own = [frame for frame in frames if "site-packages" not in frame.filename] or frames
    return (
        f" at {_relative_path(own[-1].filename)}:{own[-1].lineno} in {own[-1].name}" if own else ""
    )


def _advice(spec: str, *, called: bool) -> str:
    module, _, name = spec.partition(":")
    if not called:
        return ""
    return f'\nFor the whole traceback: python -c "import {module}; {module}.{name}()"'


def _relative_path(filename: str) -> str:
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


def _describe_type(result: Any) -> str:
    if isinstance(result, tuple | list):
        return f"a {type(result).__name__} of {len(result)}"
    return f"a {type(result).__name__}"


# --- Graphs and their inputs ----------------------------------------------------------------------


def find_graph(spec: str) -> Any:
    """A file as it is; of `module:factory`, what the factory returns.

    Raises:
        UsageError: there is neither such a file nor such a function.
    """
    path = Path(spec)
    if path.exists():
        return path
    if not _names_function(spec):
        raise UsageError(
            f"--graph {spec!r}: there is no such file; give a .pt2, a .ckp, or module:factory"
        )
    check_form(spec, "--graph")
    return call(resolve(spec, "--graph"), spec, "--graph")


def find_inputs(spec: str) -> Any:
    """The inputs of a graph, by name or by position; the folder of a dump as it is.

    Raises:
        UsageError: there is no such thing, or it holds no tensors.
    """
    path = Path(spec)
    if path.is_dir():
        return path
    if path.is_file():
        return _read_tensors(path)
    if not _names_function(spec):
        raise UsageError(
            f"--inputs {spec!r}: there is no such file; give a .safetensors, a .pt, the folder of "
            "a dump, or module:function"
        )
    check_form(spec, "--inputs")
    return call(resolve(spec, "--inputs"), spec, "--inputs")


def _names_function(spec: str) -> bool:
    return ":" in spec and not Path(spec.partition(":")[0]).suffix


def _read_tensors(path: Path) -> Any:
    if path.suffix == ".safetensors":
        return _read_safetensors(path)
    import torch

    try:
        found = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises whatever a file makes it raise
        raise UsageError(
            f"--inputs {str(path)!r} cannot be read: {in_one_line(error)}; give "
            "tensors alone, by name or by position, saved by torch.save or as .safetensors"
        ) from error
    if isinstance(found, torch.Tensor):
        return (found,)
    if isinstance(found, (dict, list, tuple)):
        return found
    raise UsageError(
        f"--inputs {str(path)!r} holds a {type(found).__name__}; give tensors, by name or by "
        "position"
    )


def _read_safetensors(path: Path) -> Any:
    import safetensors
    from safetensors.torch import load_file

    try:
        return load_file(path)
    except (OSError, ValueError, safetensors.SafetensorError) as error:
        raise UsageError(f"--inputs {str(path)!r} cannot be read: {error}") from error

"""What names refer to: `package.module:name`, `--graph` and `--inputs`; named candidates.

Nothing here imports torch, to report a typo at once.
"""

from __future__ import annotations

import dataclasses
import difflib
import os
import sys
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paritas.core.errors import UsageError, in_one_line
from paritas.core.importing import (
    ImportFailedError,
    MissingNameError,
    import_module,
    import_named,
    look_here,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from torch import nn


# --- Objects --------------------------------------------------------------------------------------

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
    """Check several by parameter; None means that the parameter was not given."""
    for parameter, spec in named.items():
        if spec is not None:
            check_form(spec, parameter)


def resolve(spec: str, parameter: str) -> Callable[..., Any]:
    """Import the callable `package.module:name`, also from the current directory.

    Args:
        spec: the name may have dots.
        parameter: which argument or option this is, for messages.

    Raises:
        UsageError: it does not exist, is not callable, or importing it raises.
    """
    target = find(spec, parameter)
    if not callable(target):
        kind = type(target).__name__
        raise UsageError(
            f"{parameter} {spec!r} is not a function; it has type {kind}: {target!r:.80}"
        )
    return target  # type: ignore[no-any-return]


def find(spec: str, parameter: str) -> Any:
    """Import any object, callable or not; otherwise like `resolve`."""
    check_form(spec, parameter)
    subject = f"{parameter} {spec!r}"
    look_here()
    try:
        return import_named(spec)
    except ImportFailedError as error:
        raise _describe_import(error, subject) from error.cause
    except MissingNameError as error:
        hint = _describe_missing(error.owner, error.missing)
        raise UsageError(f"{subject}: {hint}") from None


def import_modules(names: Iterable[str]) -> None:
    """Import the modules of `--setup`, also from the current directory.

    Raises:
        UsageError: one of them cannot be imported.
    """
    look_here()
    for name in names:
        try:
            import_module(name)
        except ImportFailedError as error:
            raise UsageError(
                f"--setup {name!r} cannot be imported: {in_one_line(error.cause)}"
            ) from error.cause


def call(function: Callable[..., Any], spec: str, parameter: str, *args: Any) -> Any:
    """Call what `resolve` found; an exception becomes a `UsageError` with its location."""
    try:
        return function(*args)
    except (Exception, SystemExit) as error:
        arguments_text, advice = "the model", ""
        if not args:
            module, _, name = spec.partition(":")
            arguments_text = "no arguments"
            advice = f'\nFor the full traceback: python -c "import {module}; {module}.{name}()"'
        raise UsageError(
            f"{parameter} {spec!r}, called with {arguments_text}, raised "
            f"{_describe_error(error)}{advice}"
        ) from error


def model_and_inputs(result: Any, spec: str, *, model_alone: bool) -> tuple[Any, Any]:
    """Unpack what a factory returned: `(model, inputs)`, or only a model if that is allowed."""
    is_pair = isinstance(result, tuple) and len(result) == 2  # noqa: PLR2004
    model, inputs = result if is_pair else (result, None)
    if not is_pair and not model_alone:
        size = f" of {len(result)}" if isinstance(result, tuple | list) else ""
        raise UsageError(
            f"FACTORY {spec!r} returned a {type(result).__name__}{size}, not (model, inputs); "
            "return both, or give the inputs with --inputs module:function"
        )
    if not callable(model) or isinstance(model, type):
        what = "a class; return an instance" if isinstance(model, type) else "not callable"
        raise UsageError(f"FACTORY {spec!r} returned a model that is {what}: {model!r:.80}")
    return model, inputs


def _describe_import(error: ImportFailedError, subject: str) -> UsageError:
    """The message for a module that is missing, or raises."""
    name, cause = error.module, error.cause
    missing = (cause.name or "") if isinstance(cause, ModuleNotFoundError) else None
    if missing is not None and (name == missing or name.startswith(f"{missing}.")):
        return UsageError(
            f"{subject}: no module {missing!r} in the current directory or the environment"
        )
    return UsageError(f"{subject}: importing {name} raised {_describe_error(cause)}")


def _describe_missing(owner: Any, name: str) -> str:
    """The message for an `owner` without `name`: similar names, or those it defines."""
    kind = "module" if isinstance(owner, type(sys)) else type(owner).__name__
    label = getattr(owner, "__name__", repr(owner)[:40])
    public_members = {key: value for key, value in vars(owner).items() if not key.startswith("_")}
    keys = [
        key for key, value in public_members.items() if getattr(value, "__module__", None) == label
    ]
    near = difflib.get_close_matches(name, public_members, n=3)
    if near:
        hint = f"; did you mean {' or '.join(map(repr, near))}?"
    elif keys:
        rest = ", ..." if len(keys) > _MOST_NAMES else ""
        hint = f"; it defines {', '.join(keys[:_MOST_NAMES])}{rest}"
    else:
        hint = ", and defines no names of its own"
    return f"{kind} {label} has no {name!r}{hint}"


def _describe_error(error: BaseException) -> str:
    """The type, text and location of an exception, in one line."""
    shown = in_one_line(error, _LONGEST_TEXT, whole=True, cut=" ...")
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if frame.filename != __file__ and not frame.filename.startswith("<frozen")
    ]
    if not frames or isinstance(error, SyntaxError):  # whose text has the location
        return shown
    # Where it was raised, or where the user's code called the library that raised it.
    last = [frame for frame in frames if "site-packages" not in frame.filename] or frames
    path, here = Path(last[-1].filename), Path.cwd()
    shown_path = path.relative_to(here) if path.is_relative_to(here) else path
    return f"{shown} at {shown_path}:{last[-1].lineno} in {last[-1].name}"


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
    return f"; write one colon between module and function, as in {example!r}"


# --- Graphs and their inputs ----------------------------------------------------------------------


def find_graph(spec: str) -> Any:
    """The path of a file, or what `module:factory` returns.

    Raises:
        UsageError: no such file or function exists.
    """
    path = Path(spec)
    if path.exists():
        return path
    if not _names_function(spec):
        raise UsageError(
            f"--graph {spec!r}: no such file; give a .pt2 file, a .ckp file or module:factory"
        )
    check_form(spec, "--graph")
    return call(resolve(spec, "--graph"), spec, "--graph")


def find_inputs(spec: str) -> Any:
    """The inputs of a graph, by name or by position; or the path of a dump.

    Raises:
        UsageError: no such file or function exists, or it contains no tensors.
    """
    path = Path(spec)
    if path.is_dir():
        return path
    if path.is_file():
        return _read_tensors(path)
    if not _names_function(spec):
        raise UsageError(
            f"--inputs {spec!r}: no such file; give a .safetensors or .pt file, the folder of a "
            "dump, or module:function"
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
        file_content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch may raise anything for a damaged file
        raise UsageError(
            f"--inputs {str(path)!r} cannot be read: {in_one_line(error)}; save only tensors, by "
            "name or by position, with torch.save or as .safetensors"
        ) from error
    if isinstance(file_content, torch.Tensor):
        return (file_content,)
    if isinstance(file_content, (dict, list, tuple)):
        return file_content
    raise UsageError(
        f"--inputs {str(path)!r} contains a {type(file_content).__name__}; save tensors, by "
        "name or by "
        "position"
    )


def _read_safetensors(path: Path) -> Any:
    import safetensors
    from safetensors.torch import load_file

    try:
        return load_file(path)
    except (OSError, ValueError, safetensors.SafetensorError) as error:
        raise UsageError(f"--inputs {str(path)!r} cannot be read: {error}") from error


# --- Candidates -----------------------------------------------------------------------------------

NAMED = {
    "onnxruntime": "torch.onnx.export, run by ONNX Runtime",
    "aot_inductor": "torch.export, compiled ahead of time by AOTInductor",
    "export": "the program of torch.export",
    "export-decomposed": "the same after run_decompositions(): core ATen operators",
}


def is_named(spec: str) -> bool:
    """Whether `spec` is a name; with a colon, it is a function of the user."""
    return ":" not in spec


def check_name(spec: str) -> None:
    """Raise `UsageError` unless there is a candidate with this name."""
    if spec in NAMED:
        return
    lowercase_spec = spec.lower()
    near = [
        *difflib.get_close_matches(lowercase_spec.replace("_", "-"), NAMED, n=1),
        *difflib.get_close_matches(lowercase_spec, NAMED, n=1),
        *(name for name in NAMED if lowercase_spec and name.startswith(lowercase_spec)),
    ]
    hint = f"did you mean {near[0]!r}? " if near else ""
    raise UsageError(
        f"unknown --candidate {spec!r}; {hint}known are {', '.join(NAMED)}, "
        "or give your own function as package.module:function"
    )


def make(name: str, model: nn.Module, inputs: Any) -> Callable[..., Any]:
    """Make the candidate with this name from a model.

    Args:
        name: one of `paritas.core.candidates.loading.NAMED`.
        model: the reference. It is not changed.
        inputs: as for `paritas.verify`; each set is captured with its shapes.

    Raises:
        UsageError: the name is unknown, a package is missing, or the model cannot be captured.
    """
    check_name(name)
    from paritas.core.candidates import makers

    candidate: Callable[..., Any] = getattr(makers, name.replace("-", "_"))(model, inputs)
    return candidate


# --- What is asked for ----------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class BuildOptions:
    """How a reference is built: options that several commands share.

    Attributes:
        inputs: the function that makes the inputs.
        dtype: of parameters and inputs; None leaves them as they are built.
        train: training mode.
        device: where it runs; None leaves it where it is built.
    """

    inputs: str | None
    dtype: str | None
    train: bool
    device: str | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class CandidateOptions(BuildOptions):
    """How a reference and a candidate are built.

    Attributes:
        candidate: a name of `paritas.candidates`, or `package.module:function`; None for
            `torch.compile`, whose options are the others.
    """

    candidate: str | None
    backend: str = "inductor"
    mode: str | None = None
    dynamic: bool | None = None
    fullgraph: bool = False

    @property
    def candidate_name(self) -> str:
        """What the candidate is made by."""
        return self.candidate or self.mode or self.backend

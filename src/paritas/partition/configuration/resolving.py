"""From an operator's name to the function, by imports alone: no text of the user's is executed."""

from __future__ import annotations

import ast
import contextlib
import difflib
import importlib
import inspect
from collections.abc import Callable
from typing import Any

from paritas.errors import UsageError

__all__ = ["check_name", "resolve_operator"]

_NNSCALER = ("nnscaler.runtime.function", "nnscaler.graph.function.wrapnn")
# A rank's batch norm of its own exchanges statistics on CUDA, in groups that nnScaler itself has
# made; ours does in any group.
_OURS = ("wrap_batchnorm2d_func",)
_MOST_NAMES = 8


def check_name(fsig: str, parameter: str = "fsig") -> None:
    """Raise `UsageError` unless it looks like an operator's full name, before anything is imported.

    Args:
        parameter: how the user said it, for messages.
    """
    module, colon, name = fsig.partition(":")
    parts = [*module.split("."), *name.split(".")] if colon else module.split(".")
    if not all(part.isidentifier() for part in parts):
        raise UsageError(
            f"{parameter} {fsig!r} is not a dotted name such as 'torch.nn.functional.linear', nor "
            "'package.module:name'"
        )


def resolve_operator(
    fsig: str, imports: str = "", *, parameter: str = "fsig"
) -> Callable[..., Any]:
    """The function that a full name names.

    Args:
        fsig: `package.module.name`, or `package.module:name`; the name may go on inside a class
            (`torch.Tensor.view`), and may begin with a name that `imports` brings.
        imports: import statements, each of which is performed.
        parameter: how the user said it, for messages.

    Raises:
        UsageError: there is no such function, or `imports` has anything but imports.
    """
    check_name(fsig, parameter)
    told = f"{parameter} {fsig!r}"
    names = _imported_names(imports)
    module, colon, rest = fsig.partition(":")
    dotted = fsig.replace(":", ".")
    parts = dotted.split(".")
    if parts[0] in names:
        found = _walk(names[parts[0]], parts[1:], told)
    elif dotted.startswith(tuple(f"{home}." for home in _NNSCALER)):
        found = _nnscaler_function(dotted, told)
    elif colon:
        found = _walk(_imported_module(module, told), rest.split("."), told)
    else:
        found = _imported(parts, told)
    if not callable(found) or isinstance(found, type) or inspect.ismodule(found):
        kind = "class" if isinstance(found, type) else type(found).__name__
        raise UsageError(
            f"{told} is no function but a {kind}; name a function, or a method as "
            "'torch.Tensor.view'"
        )
    return found  # type: ignore[no-any-return]


def _imported_names(text: str) -> dict[str, Any]:
    """Perform import statements, and nothing else, and give what they bring by name."""
    if not isinstance(text, str):
        raise UsageError(f"import_customized_func must be text, not {text!r:.80}")
    try:
        statements = ast.parse(text).body
    except SyntaxError as error:
        line = (error.text or text).strip()
        raise UsageError(f"import_customized_func is not Python: {line!r} ({error.msg})") from None
    names: dict[str, Any] = {}
    for statement in statements:
        # Each statement is looked at before it is performed, those after it not: the first fault
        # is told, and an import has no effect that would have to be taken back.
        if isinstance(statement, ast.Import):
            for alias in statement.names:
                module = _module(alias.name, ast.unparse(statement))
                top = _module(alias.name.partition(".")[0], ast.unparse(statement))
                names[alias.asname or alias.name.partition(".")[0]] = (
                    module if alias.asname else top
                )
        elif isinstance(statement, ast.ImportFrom) and _is_plain(statement):
            names |= _from_import(statement)
        else:
            raise UsageError(
                f"import_customized_func, line {statement.lineno}: "
                f"{ast.unparse(statement).splitlines()[0]!r} is no plain import; only "
                "'import package.module' and 'from package.module import name' are allowed: put "
                "anything else into a module and import it"
            )
    return names


def _is_plain(statement: ast.ImportFrom) -> bool:
    """Whether it says from where and what: no dots in front, no star."""
    return not statement.level and all(alias.name != "*" for alias in statement.names)


def _from_import(statement: ast.ImportFrom) -> dict[str, Any]:
    told = ast.unparse(statement)
    assert statement.module is not None  # noqa: S101  (a relative import was refused above)
    module = _module(statement.module, told)
    brought = {}
    for alias in statement.names:
        if hasattr(module, alias.name):
            found = getattr(module, alias.name)
        else:
            found = _module(f"{statement.module}.{alias.name}", told)
        brought[alias.asname or alias.name] = found
    return brought


def _module(name: str, told: str) -> Any:
    try:
        return importlib.import_module(name)
    except Exception as error:
        raise UsageError(
            f"import_customized_func: {told!r} raised {type(error).__name__}: {error}"
        ) from error


def _nnscaler_function(fsig: str, told: str) -> Any:
    """The installed nnScaler's function, or our own that does what its documentation says."""
    module_name, _, name = fsig.rpartition(".")
    if name not in _OURS:
        with contextlib.suppress(ImportError, AttributeError):
            return getattr(importlib.import_module(module_name), name)
    from paritas.partition.configuration import nnscaler_functions

    if name in nnscaler_functions.__all__:
        return getattr(nnscaler_functions, name)
    known = ", ".join(nnscaler_functions.__all__)
    raise UsageError(
        f"{told}: nnscaler is not installed, and of its functions paritas has {known}; "
        "install nnscaler, or name a function of your own"
    )


def _imported_module(name: str, told: str) -> Any:
    try:
        return importlib.import_module(name)
    except Exception as error:
        raise UsageError(
            f"{told}: importing {name!r} raised {type(error).__name__}: {error}"
        ) from error


def _imported(parts: list[str], told: str) -> Any:
    """Import as much of a dotted name as is a module, and walk the rest."""
    if len(parts) == 1:
        raise UsageError(
            f"{told} has no module; write 'package.module.{parts[0]}', or import it in "
            "import_customized_func"
        )
    found: Any = None
    for length in range(1, len(parts)):
        name = ".".join(parts[:length])
        if length > 1 and hasattr(found, parts[length - 1]):
            # What the package already offers by that name goes first: `torch.ops` is no file.
            found = getattr(found, parts[length - 1])
            continue
        try:
            found = importlib.import_module(name)
        except ModuleNotFoundError as error:
            if length == 1 or not (error.name or "").startswith(parts[0]):
                raise UsageError(
                    f"{told}: importing {name!r} raised {type(error).__name__}: {error}"
                ) from error
            raise UsageError(f"{told}: {_missing(found, parts[length - 1])}") from None
        except Exception as error:
            raise UsageError(
                f"{told}: importing {name!r} raised {type(error).__name__}: {error}"
            ) from error
    return _walk(found, parts[-1:], told)


def _walk(found: Any, parts: list[str], told: str) -> Any:
    for part in parts:
        if not hasattr(found, part):
            raise UsageError(f"{told}: {_missing(found, part)}")
        found = getattr(found, part)
    return found


def _missing(owner: Any, name: str) -> str:
    """What is not there, and what is there that is spelt like it."""
    there = [item for item in dir(owner) if not item.startswith("_")]
    near = difflib.get_close_matches(name, there, n=1)
    owner_name = getattr(owner, "__name__", repr(owner))
    listed = ", ".join(there[:_MOST_NAMES])
    hint = f"did you mean {near[0]!r}?" if near else f"it has {listed or 'no names'}"
    return f"{owner_name} has no {name!r}; {hint}"

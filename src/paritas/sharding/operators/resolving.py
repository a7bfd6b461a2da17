"""Find an operator by its name. Only imports are performed; no code of the user is evaluated."""

from __future__ import annotations

import ast
import contextlib
import difflib
import importlib
import inspect
from typing import TYPE_CHECKING, Any

from paritas.core.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable


__all__ = ["check_name", "resolve_operator"]

_NNSCALER = ("nnscaler.runtime.function", "nnscaler.graph.function.wrapnn")
# nnScaler's batch norm communicates only on CUDA, in groups that nnScaler has made; ours in any
# group.
_OURS = ("wrap_batchnorm2d_func",)
_MOST_NAMES = 8


def check_name(fsig: str, parameter: str = "fsig") -> None:
    """Raise a `UsageError` if this is not the full name of an operator, without importing it.

    Args:
        parameter: name of the parameter in messages.
    """
    module, colon, name = fsig.partition(":")
    parts = [*module.split("."), *name.split(".")] if colon else module.split(".")
    if not all(part.isidentifier() for part in parts):
        raise UsageError(
            f"{parameter} {fsig!r} is not a dotted name such as 'torch.nn.functional.linear' or "
            "'package.module:name'"
        )


def resolve_operator(
    fsig: str, imports: str = "", *, parameter: str = "fsig"
) -> Callable[..., Any]:
    """The function with a full name.

    Args:
        fsig: `package.module.name` or `package.module:name`; the name may continue inside a class
            (`torch.Tensor.view`), and may start with a name that `imports` defines.
        imports: import statements, which are performed.
        parameter: name of the parameter in messages.

    Raises:
        UsageError: there is no such function, or `imports` contains other statements.
    """
    check_name(fsig, parameter)
    what = f"{parameter} {fsig!r}"
    names = _imported_names(imports)
    module, colon, rest = fsig.partition(":")
    dotted = fsig.replace(":", ".")
    parts = dotted.split(".")
    if parts[0] in names:
        found = _get_attribute(names[parts[0]], parts[1:], what)
    elif dotted.startswith(tuple(f"{home}." for home in _NNSCALER)):
        found = _nnscaler_function(dotted, what)
    elif colon:
        found = _get_attribute(_import_module(module, what), rest.split("."), what)
    else:
        found = _import_dotted(parts, what)
    if not callable(found) or isinstance(found, type) or inspect.ismodule(found):
        kind = "class" if isinstance(found, type) else type(found).__name__
        raise UsageError(
            f"{what} is a {kind}, not a function; name a function, or a method such as "
            "'torch.Tensor.view'"
        )
    return found  # type: ignore[no-any-return]


def _imported_names(text: str) -> dict[str, Any]:
    """Perform import statements, and return the names that they define."""
    if not isinstance(text, str):
        raise UsageError(f"import_customized_func must be a string, got {text!r:.80}")
    try:
        statements = ast.parse(text).body
    except SyntaxError as error:
        line = (error.text or text).strip()
        raise UsageError(f"import_customized_func is not Python: {line!r} ({error.msg})") from None
    names: dict[str, Any] = {}
    for statement in statements:
        line = ast.unparse(statement)
        what = f"import_customized_func: {line!r}"
        if isinstance(statement, ast.Import):
            for alias in statement.names:
                top = alias.name.partition(".")[0]
                module = _import_module(alias.name, what)
                names[alias.asname or top] = module if alias.asname else _import_module(top, what)
        elif isinstance(statement, ast.ImportFrom) and _is_plain(statement):
            names |= _import_from(statement, what)
        else:
            raise UsageError(
                f"import_customized_func, line {statement.lineno}: {line.splitlines()[0]!r} is not "
                "a plain import; only 'import package.module' and 'from package.module import "
                "name' are allowed: put other code into a module and import it"
            )
    return names


def _is_plain(statement: ast.ImportFrom) -> bool:
    """Whether it is neither a relative import nor a star import."""
    return not statement.level and all(alias.name != "*" for alias in statement.names)


def _import_from(statement: ast.ImportFrom, what: str) -> dict[str, Any]:
    assert statement.module is not None  # noqa: S101  (only relative imports have no module)
    module = _import_module(statement.module, what)
    found = {}
    for alias in statement.names:
        if hasattr(module, alias.name):
            value = getattr(module, alias.name)
        else:
            value = _import_module(f"{statement.module}.{alias.name}", what)
        found[alias.asname or alias.name] = value
    return found


def _import_module(name: str, what: str) -> Any:
    try:
        return importlib.import_module(name)
    except Exception as error:
        raise UsageError(
            f"{what}: importing {name!r} raised {type(error).__name__}: {error}"
        ) from error


def _nnscaler_function(fsig: str, what: str) -> Any:
    """The function of an installed nnScaler, or our implementation of its documentation."""
    module_name, _, name = fsig.rpartition(".")
    if name not in _OURS:
        with contextlib.suppress(ImportError, AttributeError):
            return getattr(importlib.import_module(module_name), name)
    from paritas.sharding.operators import nnscaler_functions

    if name in nnscaler_functions.__all__:
        return getattr(nnscaler_functions, name)
    known = ", ".join(nnscaler_functions.__all__)
    raise UsageError(
        f"{what}: nnscaler is not installed, and paritas implements only {known}; install "
        "nnscaler, or name a function of your own"
    )


def _import_dotted(parts: list[str], what: str) -> Any:
    """Import the modules of a dotted name, and look up the rest as attributes."""
    if len(parts) == 1:
        raise UsageError(
            f"{what} has no module; write 'package.module.{parts[0]}', or import it in "
            "import_customized_func"
        )
    found = _import_module(parts[0], what)
    for length in range(2, len(parts)):
        name = parts[length - 1]
        if hasattr(found, name):  # attributes come first: `torch.ops` is not a file
            found = getattr(found, name)
            continue
        try:
            found = _import_module(".".join(parts[:length]), what)
        except UsageError as error:
            cause = error.__cause__
            if isinstance(cause, ModuleNotFoundError) and str(cause.name).startswith(parts[0]):
                raise UsageError(f"{what}: {_describe_missing(found, name)}") from None
            raise
    return _get_attribute(found, parts[-1:], what)


def _get_attribute(found: Any, parts: list[str], what: str) -> Any:
    for part in parts:
        if not hasattr(found, part):
            raise UsageError(f"{what}: {_describe_missing(found, part)}")
        found = getattr(found, part)
    return found


def _describe_missing(owner: Any, name: str) -> str:
    """Say that a name is missing, and suggest one with a similar spelling."""
    there = [item for item in dir(owner) if not item.startswith("_")]
    near = difflib.get_close_matches(name, there, n=1)
    owner_name = getattr(owner, "__name__", repr(owner))
    listed = ", ".join(there[:_MOST_NAMES])
    hint = f"did you mean {near[0]!r}?" if near else f"it has {listed or 'no names'}"
    return f"{owner_name} has no {name!r}; {hint}"

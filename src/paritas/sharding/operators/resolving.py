"""Find an operator by its name. Only imports are performed; no code of the user is evaluated."""

from __future__ import annotations

import ast
import contextlib
import difflib
import inspect
from typing import TYPE_CHECKING, Any

from paritas.core.errors import UsageError
from paritas.core.importing import (
    ImportFailedError,
    MissingNameError,
    find_attribute,
    import_dotted,
    import_module,
    import_named,
)
from paritas.sharding.operators import nnscaler_functions

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


__all__ = ["check_name", "resolve_operator"]

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
    dotted = fsig.replace(":", ".")
    first, _, rest = dotted.partition(".")
    with _naming(what):
        if first in names:
            operator_function = find_attribute(names[first], rest) if rest else names[first]
        elif nnscaler_functions.is_nnscaler_function(dotted):
            operator_function = nnscaler_functions.find_function(dotted, what)
        elif ":" in fsig:
            operator_function = import_named(fsig)
        elif not rest:
            raise UsageError(
                f"{what} has no module; write 'package.module.{first}', or import it in "
                "import_customized_func"
            )
        else:
            operator_function = import_dotted(fsig)
    if (
        not callable(operator_function)
        or isinstance(operator_function, type)
        or inspect.ismodule(operator_function)
    ):
        kind = "class" if isinstance(operator_function, type) else type(operator_function).__name__
        raise UsageError(
            f"{what} is a {kind}, not a function; name a function, or a method such as "
            "'torch.Tensor.view'"
        )
    return operator_function  # type: ignore[no-any-return]


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
                with _naming(what):
                    module = import_module(alias.name)
                    names[alias.asname or top] = module if alias.asname else import_module(top)
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
    values = {}
    with _naming(what):
        module = import_module(statement.module)
        for alias in statement.names:
            if hasattr(module, alias.name):
                value = getattr(module, alias.name)
            else:
                value = import_module(f"{statement.module}.{alias.name}")
            values[alias.asname or alias.name] = value
    return values


@contextlib.contextmanager
def _naming(what: str) -> Iterator[None]:
    """Say of what a user wrote that it cannot be imported."""
    try:
        yield
    except ImportFailedError as error:
        shown = f"{type(error.cause).__name__}: {error.cause}"
        raise UsageError(f"{what}: importing {error.module!r} raised {shown}") from error.cause
    except MissingNameError as error:
        raise UsageError(f"{what}: {_describe_missing(error.owner, error.missing)}") from None


def _describe_missing(owner: Any, name: str) -> str:
    """Say that a name is missing, and suggest one with a similar spelling."""
    there = [item for item in dir(owner) if not item.startswith("_")]
    near = difflib.get_close_matches(name, there, n=1)
    owner_name = getattr(owner, "__name__", repr(owner))
    listed = ", ".join(there[:_MOST_NAMES])
    hint = f"did you mean {near[0]!r}?" if near else f"it has {listed or 'no names'}"
    return f"{owner_name} has no {name!r}; {hint}"

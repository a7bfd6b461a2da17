"""Import what a name refers to: a module, a Python file, or something in one of them.

This is how everything that a user names is found. The errors carry what is wrong as data: each
caller words it with what its user wrote.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from types import ModuleType


class ImportFailedError(ImportError):
    """A module cannot be imported.

    Attributes:
        module: its name.
        cause: what the import raised.
    """

    def __init__(self, module: str, cause: BaseException) -> None:
        super().__init__(str(cause), name=module)
        self.module = module
        self.cause = cause


class MissingNameError(AttributeError):
    """A module, or something in it, does not have a name.

    Attributes:
        owner: what does not have it.
        missing: the name.
    """

    def __init__(self, owner: Any, missing: str, cause: AttributeError | None = None) -> None:
        super().__init__(str(cause) if cause is not None else missing)
        self.owner = owner
        self.missing = missing


def import_named(spec: str) -> Any:
    """Import `package.module:name`, where the name may have dots.

    Raises:
        ImportFailedError: importing the module raises.
        MissingNameError: it has no such name.
    """
    module, _, name = spec.partition(":")
    return find_attribute(import_module(module), name)


def import_dotted(spec: str) -> Any:
    """Import `package.module.name`: attributes come first, since `torch.ops` is not a file.

    Raises:
        ImportFailedError: importing a module raises.
        MissingNameError: there is no such name.
    """
    parts = spec.split(".")
    current_object: Any = import_module(parts[0])
    for length in range(2, len(parts)):
        part = parts[length - 1]
        if hasattr(current_object, part):
            current_object = getattr(current_object, part)
            continue
        try:
            current_object = import_module(".".join(parts[:length]))
        except ImportFailedError as error:
            missing = error.cause.name if isinstance(error.cause, ModuleNotFoundError) else None
            if missing is not None and missing.startswith(parts[0]):
                raise MissingNameError(current_object, part) from None
            raise
    return find_attribute(current_object, parts[-1])


def import_module(name: str) -> ModuleType:
    """Import a module.

    Raises:
        ImportFailedError: that raises.
    """
    try:
        return importlib.import_module(name)
    except (Exception, SystemExit) as error:
        raise ImportFailedError(name, error) from error


def import_file(path: Path) -> ModuleType:
    """Import a Python file, which finds other files in its folder.

    Raises:
        ImportFailedError: that raises, or the file is not one of Python.
    """
    folder = str(path.parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise ImportFailedError(path.stem, ImportError(f"{path} is not a Python file"))
    module = importlib.util.module_from_spec(spec)
    # Like an import: pickling, dataclasses and Triton look a function's module up by its name.
    sys.modules.setdefault(path.stem, module)
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        raise ImportFailedError(path.stem, error) from error
    return module


def find_attribute(owner: Any, path: str) -> Any:
    """The attribute with this name, which may have dots.

    Raises:
        MissingNameError: there is none.
    """
    for name in path.split("."):
        try:
            owner = getattr(owner, name)
        except AttributeError as error:
            raise MissingNameError(owner, name, error) from None
    return owner


def import_on_use(door: dict[str, Any], homes: Mapping[str, str]) -> Callable[[str], Any]:
    """The `__getattr__` of a module whose names are imported when they are first used.

    Args:
        door: the `globals()` of the module.
        homes: its names, and the module that each comes from.
    """

    def find_name(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {door['__name__']!r} has no attribute {name!r}")
        door[name] = getattr(importlib.import_module(homes[name]), name)
        return door[name]

    return find_name


def look_here() -> None:
    """Make modules in the current directory importable, like `python -m` does."""
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)

"""Be there when a program first compiles something, without importing torch before it does.

Much of torch is set by variables of the environment that are read when it is imported. A program
may set them itself, and would be another program if torch were there before it.
"""

from __future__ import annotations

import contextlib
import importlib.machinery
import sys
import threading
from typing import TYPE_CHECKING, Any

from paritas.errors import UnsupportedTorchError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from types import ModuleType

MODULE = "torch._dynamo.eval_frame"
# What is asked, for every call of compiled code, which callback is to compile it.
HOOK = "_callback_from_stance"


@contextlib.contextmanager
def on_first_compile(prepare: Callable[[], None]) -> Iterator[None]:
    """Call `prepare` once, just before the first call of anything that `torch.compile` made.

    Raises:
        UnsupportedTorchError: torch has no such place; where torch comes later, in its import.
    """
    arming = _Arming(prepare)
    if MODULE in sys.modules:
        arming.arm(sys.modules[MODULE])
    else:
        sys.meta_path.insert(0, arming)
    try:
        yield
    finally:
        arming.disarm()


def compile_hook(module: ModuleType) -> Callable[[Any], Any]:
    """The function of torch's that every call of compiled code asks."""
    found = getattr(module, HOOK, None)
    if callable(found):
        return found  # type: ignore[no-any-return]
    version = getattr(sys.modules.get("torch"), "__version__", "")
    message = (
        f"torch {version} has no {MODULE}.{HOOK}, by which every torch.compile could be reached; "
        "guard each with torch.compile(..., backend=paritas.guard(...)) instead"
    )
    raise UnsupportedTorchError(message)


class _Arming:
    """A finder of modules that finds nothing, but sees torch's compiler come."""

    def __init__(self, prepare: Callable[[], None]) -> None:
        self.prepare = prepare
        self._lock = threading.Lock()
        self._undo: Callable[[], None] | None = None

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """The usual spec of the module, with a loader that arms it; of others, nothing."""
        if name != MODULE:
            return None
        others = [finder for finder in sys.meta_path if finder is not self]
        found = (finder.find_spec(name, path, target) for finder in others)
        spec = next((spec for spec in found if spec is not None), None)
        if spec is None or spec.loader is None:
            return spec
        loader: Any = spec.loader
        execute = loader.exec_module

        def execute_and_arm(module: ModuleType) -> None:
            execute(module)
            self.arm(module)

        loader.exec_module = execute_and_arm
        return spec

    def arm(self, module: ModuleType) -> None:
        """Wait for the first call in a module that is there."""
        original = compile_hook(module)

        def disarm() -> None:
            if getattr(module, HOOK) is first:
                setattr(module, HOOK, original)

        def first(callback: Any) -> Any:
            if callback is None or callback is False:  # nothing is compiled
                return original(callback)
            with self._lock:
                if getattr(module, HOOK) is first:
                    disarm()
                    self.prepare()
            return getattr(module, HOOK)(callback)

        setattr(module, HOOK, first)
        self._undo = disarm

    def disarm(self) -> None:
        """Leave no trace."""
        if self in sys.meta_path:
            sys.meta_path.remove(self)
        if self._undo is not None:
            self._undo()

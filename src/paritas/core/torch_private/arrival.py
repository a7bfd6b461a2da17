"""Hook the place where torch chooses the callback that compiles a call, before or after its import.

Many settings of torch are environment variables that are read when it is imported. A program may
set them itself, so torch must not be imported before the program does.
"""

from __future__ import annotations

import contextlib
import contextvars
import sys
import threading
from typing import TYPE_CHECKING, Any

from paritas.core.errors import UnsupportedTorchError

if TYPE_CHECKING:
    import importlib.machinery
    from collections.abc import Callable, Iterator, Sequence
    from types import ModuleType

    Ask = Callable[[Any], Any]
    # Takes a callback of torch and the function to ask next; returns the callback to use.
    Layer = Callable[[Any, Ask], Any]

MODULE = "torch._dynamo.eval_frame"
# Chooses the callback that compiles a call, for every call of compiled code.
HOOK = "_callback_from_stance"


@contextlib.contextmanager
def asking_first(layer: Layer) -> Iterator[None]:
    """Ask `layer` for each call of compiled code in the process; it may ask earlier layers.

    Contexts of several threads may end in any order.

    Raises:
        UnsupportedTorchError: torch has no such hook.
    """
    _layers.add(layer)
    try:
        yield
    finally:
        _layers.remove(layer)


@contextlib.contextmanager
def on_first_compile(prepare: Callable[[], None]) -> Iterator[None]:
    """Call `prepare` once, just before the first call of anything compiled by `torch.compile`.

    Layers that `prepare` adds take the position of this one.

    Raises:
        UnsupportedTorchError: torch has no such hook; raised by its import if that comes later.
    """
    arming = _CompilerImport(prepare)
    if MODULE in sys.modules:
        arming.arm()
    else:
        sys.meta_path.insert(0, arming)
    try:
        yield
    finally:
        arming.disarm()


def compile_hook(module: ModuleType) -> Callable[[Any], Any]:
    """The function of torch that every call of compiled code asks."""
    hook = getattr(module, HOOK, None)
    if callable(hook):
        return hook  # type: ignore[no-any-return]
    version = getattr(sys.modules.get("torch"), "__version__", "")
    message = (
        f"torch {version} has no {MODULE}.{HOOK}, so paritas cannot guard every torch.compile; "
        "guard each one with torch.compile(..., backend=paritas.guard(...)) instead"
    )
    raise UnsupportedTorchError(message)


class _CallbackLayers:
    """The layers to ask, last first, and finally torch itself.

    One function replaces torch's hook for all of them, while there are any. If each layer restored
    what it had found, layers that end in another order would restore too much.
    """

    def __init__(self) -> None:
        self._layers: tuple[Layer, ...] = ()
        self._lock = threading.RLock()
        self._undo: Callable[[], None] | None = None
        self._place: contextvars.ContextVar[int | None] = contextvars.ContextVar(
            "paritas_place", default=None
        )

    def add(self, layer: Layer) -> None:
        """Start asking a layer."""
        with self._lock:
            if self._undo is None:
                self._undo = self._put_in_place(sys.modules[MODULE])
            position = self._place.get()
            position = len(self._layers) if position is None else position
            self._layers = (*self._layers[:position], layer, *self._layers[position:])

    def remove(self, layer: Layer) -> None:
        """Stop asking a layer."""
        with self._lock:
            self._layers = tuple(existing for existing in self._layers if existing != layer)
            self._leave_if_unused()

    def replace(self, layer: Layer, prepare: Callable[[], None]) -> None:
        """Put the layers that `prepare` adds in place of a layer, if it is still there."""
        with self._lock:
            if layer not in self._layers:
                return
            token = self._place.set(self._layers.index(layer))
            self._layers = tuple(existing for existing in self._layers if existing != layer)
            try:
                prepare()
            finally:
                self._place.reset(token)
                self._leave_if_unused()

    def _leave_if_unused(self) -> None:
        if not self._layers and self._undo is not None:
            self._undo()
            self._undo = None

    def _put_in_place(self, module: ModuleType) -> Callable[[], None]:
        """Replace torch's hook; returns the function that undoes it."""
        original = compile_hook(module)

        def ask(callback: Any) -> Any:
            return self._ask(self._layers, callback, original)

        def undo() -> None:
            if getattr(module, HOOK, None) is ask:  # otherwise somebody has wrapped it
                setattr(module, HOOK, original)

        setattr(module, HOOK, ask)
        return undo

    def _ask(self, layers: tuple[Layer, ...], callback: Any, original: Ask) -> Any:
        if layers and callback is not None and callback is not False:  # else nothing is compiled
            return layers[-1](callback, lambda other: self._ask(layers[:-1], other, original))
        return original(callback)


_layers = _CallbackLayers()


class _CompilerImport:
    """A module finder that finds nothing, but notices the import of torch's compiler."""

    def __init__(self, prepare: Callable[[], None]) -> None:
        self.prepare = prepare

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """The usual spec of the compiler's module, with a loader that arms it; otherwise None."""
        if name != MODULE:
            return None
        others = [finder for finder in sys.meta_path if finder is not self]
        specs = (finder.find_spec(name, path, target) for finder in others)
        spec = next((spec for spec in specs if spec is not None), None)
        if spec is None or spec.loader is None:
            return spec
        loader: Any = spec.loader
        execute = loader.exec_module

        def execute_and_arm(module: ModuleType) -> None:
            execute(module)
            if self in sys.meta_path:
                self.arm()

        loader.exec_module = execute_and_arm
        return spec

    def arm(self) -> None:
        """Wait for the first call, once torch's compiler is imported."""
        _layers.add(self._first)

    def disarm(self) -> None:
        """Remove the finder and the layer."""
        if self in sys.meta_path:
            sys.meta_path.remove(self)
        _layers.remove(self._first)

    def _first(self, callback: Any, _: Ask) -> Any:
        # This waits if another thread is preparing, so that no call is missed.
        _layers.replace(self._first, self.prepare)
        return compile_hook(sys.modules[MODULE])(callback)

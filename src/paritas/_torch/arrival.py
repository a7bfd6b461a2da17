"""The one place where torch is asked which callback compiles a call; and being there when it comes.

Much of torch is set by variables of the environment that are read when it is imported. A program
may set them itself, and would be another program if torch were there before it.
"""

from __future__ import annotations

import contextlib
import contextvars
import importlib.machinery
import sys
import threading
from typing import TYPE_CHECKING, Any

from paritas.errors import UnsupportedTorchError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from types import ModuleType

    Ask = Callable[[Any], Any]
    # Is given a callback of torch's and whom to ask next, and gives the callback to use.
    Layer = Callable[[Any, Ask], Any]

MODULE = "torch._dynamo.eval_frame"
# What is asked, for every call of compiled code, which callback is to compile it.
HOOK = "_callback_from_stance"


@contextlib.contextmanager
def asking_first(layer: Layer) -> Iterator[None]:
    """Ask `layer` for each call of compiled code in the process; it may ask those before it.

    Contexts of several threads may end in any order.

    Raises:
        UnsupportedTorchError: torch has no such place.
    """
    _layers.add(layer)
    try:
        yield
    finally:
        _layers.remove(layer)


@contextlib.contextmanager
def on_first_compile(prepare: Callable[[], None]) -> Iterator[None]:
    """Call `prepare` once, just before the first call of anything that `torch.compile` made.

    Layers that `prepare` adds take the place that this one had among the others.

    Raises:
        UnsupportedTorchError: torch has no such place; where torch comes later, in its import.
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


class _CallbackLayers:
    """Who is asked, the last first, and torch itself at the end.

    One function stands in torch's place for all of them, for as long as there are any: were each to
    put back what it had found, one that ends before another would put back too much.
    """

    def __init__(self) -> None:
        self._layers: tuple[Layer, ...] = ()
        self._lock = threading.RLock()
        self._undo: Callable[[], None] | None = None
        self._place: contextvars.ContextVar[int | None] = contextvars.ContextVar(
            "paritas_place", default=None
        )

    def add(self, layer: Layer) -> None:
        """Ask it from now on."""
        with self._lock:
            if self._undo is None:
                self._undo = self._put_in_place(sys.modules[MODULE])
            place = self._place.get()
            place = len(self._layers) if place is None else place
            self._layers = (*self._layers[:place], layer, *self._layers[place:])

    def remove(self, layer: Layer) -> None:
        """Ask it no longer."""
        with self._lock:
            self._layers = tuple(one for one in self._layers if one != layer)
            self._leave_if_unused()

    def replace(self, layer: Layer, prepare: Callable[[], None]) -> None:
        """Let what `prepare` adds stand where a layer stood; nothing, if that is gone by now."""
        with self._lock:
            if layer not in self._layers:
                return
            token = self._place.set(self._layers.index(layer))
            self._layers = tuple(one for one in self._layers if one != layer)
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
        """Stand in torch's place; gives what undoes that."""
        original = compile_hook(module)

        def ask(callback: Any) -> Any:
            return self._ask(self._layers, callback, original)

        def undo() -> None:
            if getattr(module, HOOK, None) is ask:  # else somebody has put a thing around it
                setattr(module, HOOK, original)

        setattr(module, HOOK, ask)
        return undo

    def _ask(self, layers: tuple[Layer, ...], callback: Any, original: Ask) -> Any:
        if layers and callback is not None and callback is not False:  # else nothing is compiled
            return layers[-1](callback, lambda other: self._ask(layers[:-1], other, original))
        return original(callback)


_layers = _CallbackLayers()


class _CompilerImport:
    """A finder of modules that finds nothing, but sees torch's compiler come."""

    def __init__(self, prepare: Callable[[], None]) -> None:
        self.prepare = prepare

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
            if self in sys.meta_path:
                self.arm()

        loader.exec_module = execute_and_arm
        return spec

    def arm(self) -> None:
        """Wait for the first call, torch's compiler being there."""
        _layers.add(self._first)

    def disarm(self) -> None:
        """Leave no trace."""
        if self in sys.meta_path:
            sys.meta_path.remove(self)
        _layers.remove(self._first)

    def _first(self, callback: Any, _: Ask) -> Any:
        # Another thread may be preparing: it is waited for, so that no call slips by.
        _layers.replace(self._first, self.prepare)
        return compile_hook(sys.modules[MODULE])(callback)

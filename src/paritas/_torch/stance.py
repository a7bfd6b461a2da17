"""The place where `torch.compile` chooses the backend of a call, and another in its stead.

Torch's own switch for that, `torch.compiler.set_stance(force_backend=...)`, throws away which
backend, mode and options each `torch.compile` was given. Here they are seen, and kept.
"""

from __future__ import annotations

import contextlib
import contextvars
import threading
import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch._dynamo.convert_frame import CatchErrorsWrapper, catch_errors_wrapper
from torch._dynamo.eval_frame import get_compiler_fn, innermost_backend

from paritas._torch.arrival import asking_first
from paritas.errors import UnsupportedTorchError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    Backend = Callable[..., Any]
    Replace = Callable[[Backend], Backend | None]

# Why a call keeps its backend, if it does: it is ours, or the user asked for that.
OURS, ASKED = "ours", "asked"
_kept = contextvars.ContextVar("paritas_kept", default="")


@contextlib.contextmanager
def unguarded(why: str = OURS) -> Iterator[None]:
    """Let what is compiled in here keep its backend: it belongs to paritas, not to the user."""
    token = _kept.set(why)
    try:
        yield
    finally:
        _kept.reset(token)


@contextlib.contextmanager
def replacing_backends(
    replace: Replace, on_kept: Callable[[], None] = lambda: None
) -> Iterator[None]:
    """Let every `torch.compile` of the process, in whatever thread, use another backend.

    Args:
        replace: is given a backend as `torch.compile` keeps it, with its mode and options, and
            gives the one to use, or None for the same. For equal backends it has to give the same
            object, because Dynamo compares them to find its compiled code again. What it gave
            may come back to it.
        on_kept: called when a call keeps its backend because of `keeping_backends`.

    Raises:
        UnsupportedTorchError: this torch has no such place.
    """
    replaced = _Replaced(replace)

    def with_another_backend(callback: Any, ask: Callable[[Any], Any]) -> Any:
        if why := _kept.get():
            if why == ASKED:
                on_kept()
            return ask(callback)
        # A stance may put its own callback in place of the one it is given, hence also after it.
        return replaced.of(ask(replaced.of(callback)))

    with asking_first(with_another_backend):
        yield


@contextlib.contextmanager
def keeping_backends() -> Iterator[None]:
    """Let every `torch.compile` of the process keep its backend, whatever replaces it outside."""

    def as_it_is(callback: Any, ask: Callable[[Any], Any]) -> Any:
        with unguarded(ASKED):
            return ask(callback)

    with asking_first(as_it_is):
        yield


class _Replaced:
    """Callbacks with their backend replaced, each made once."""

    def __init__(self, replace: Replace) -> None:
        self.replace = replace
        self._known: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()
        self._lock = threading.RLock()

    def of(self, callback: Any) -> Any:
        """The callback to use in place of one; what compiles nothing stays as it is."""
        if callback is None or callback is False:
            return callback
        with self._lock:
            if callback not in self._known:
                self._known[callback] = self._make(callback)
            made = self._known[callback]
        return callback if made is None else made

    def _make(self, callback: Any) -> CatchErrorsWrapper | None:
        convert = getattr(callback, "_torchdynamo_orig_backend", None)
        if getattr(convert, "_export", False):  # the graph is what is wanted, not code
            return None
        backend = self.replace(innermost_backend(callback))
        if backend is None:
            return None
        try:
            # How DDP's optimizer does it: fullgraph, hooks and limits stay.
            clone = convert._clone_with_backend(get_compiler_fn(backend))  # type: ignore[union-attr]
            return catch_errors_wrapper(clone, callback.hooks)
        except (AttributeError, TypeError) as error:
            message = f"torch {torch.__version__} does not let a backend be replaced: {error}"
            raise UnsupportedTorchError(message) from error

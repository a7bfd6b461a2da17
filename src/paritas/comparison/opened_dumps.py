"""Open dumps, shared by the threads of a process and cached in worker processes."""

from __future__ import annotations

import platform
import threading
import weakref
from collections import OrderedDict
from typing import TYPE_CHECKING

from paritas.errors import UsageError
from paritas.execution.executors import session_of_work

if TYPE_CHECKING:
    from paritas.dumps.opening import ReadableDump

    _Key = tuple[str, str | None]

_MOST_KEPT = 4

_dumps_lock = threading.RLock()
# While a dump is in use, the threads of this process share it.
_held: weakref.WeakValueDictionary[_Key, ReadableDump] = weakref.WeakValueDictionary()
# A worker process keeps dumps only during one comparison: later, another dump may be at that path.
_kept: OrderedDict[_Key, ReadableDump] = OrderedDict()
_kept_for = ""


def opened(path: str, kind: str | None = None) -> ReadableDump:
    """Open a dump; a worker reuses one that is already open."""
    session = session_of_work()
    key = (path, kind)
    with _dumps_lock:
        _forget_others(session)
        found = _held.get(key) if session is not None else None
        if found is None:
            found = _open_for_worker(path, kind, session)
            _held[key] = _held[path, found.kind] = found
        if session:
            _kept[key] = found
            _kept.move_to_end(key)
            if len(_kept) > _MOST_KEPT:
                _kept.popitem(last=False)
        return found


def _forget_others(session: str | None) -> None:
    global _kept_for  # noqa: PLW0603  (one for each process)
    if session and session != _kept_for:
        for key in _kept:
            _held.pop(key, None)
        _kept.clear()
        _kept_for = session


def _open_for_worker(path: str, kind: str | None, session: str | None) -> ReadableDump:
    from paritas.dumps.opening import open_dump

    try:
        return open_dump(path, kind)
    except UsageError as error:
        if not session:
            raise
        raise UsageError(f"a worker on {platform.node()} cannot open the dump: {error}") from error

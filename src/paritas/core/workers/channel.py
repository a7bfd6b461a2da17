"""A connection between two processes that carries typed messages.

A message is a msgspec struct, sent as MessagePack and checked against its type when it arrives.
Nothing is unpickled here: that would run code of the other process in this one.
"""

from __future__ import annotations

import contextlib
import selectors
import socket
import struct
import weakref
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from paritas.core.time_limit import TimeLimit

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

K = TypeVar("K")
T = TypeVar("T")

_HEADER = struct.Struct("<Q")
# A longer message is not from us, unless more is allowed.
MOST_BYTES = 1 << 34
_CHUNK = 1 << 20
_MOST_DESCRIPTORS = 2


class MessageError(ValueError):
    """What has arrived is not a message of the expected type."""


class ChannelClosedError(ConnectionError):
    """The other process has ended, or closed its end."""


# The ends of this process.
_ends_here: weakref.WeakSet[Channel] = weakref.WeakSet()


def forget_ends() -> None:
    """In a fork, close the ends of its parent: otherwise nobody notices that the parent ends."""
    for end in list(_ends_here):
        end.forget()


def wait_for_any(channels: Mapping[K, Channel], seconds: float) -> list[K]:
    """The keys of the channels on which something has arrived, or that the other end has closed."""
    with selectors.DefaultSelector() as selector:
        for key, channel in channels.items():
            selector.register(channel, selectors.EVENT_READ, key)
        return [ready.data for ready, _ in selector.select(seconds)]


class Channel:
    """One end of a connection."""

    def __init__(self, end: socket.socket) -> None:
        self._socket = end

    @classmethod
    def pair(cls) -> tuple[Channel, Channel]:
        """Two ends: for this process, and for another one."""
        here, there = (cls(end) for end in socket.socketpair())
        _ends_here.add(here)
        return here, there

    @classmethod
    def of(cls, descriptor: int) -> Channel:
        """The end that another process has handed over."""
        return cls(socket.socket(fileno=descriptor))

    def fileno(self) -> int:
        """The file descriptor, for `select` and for processes that are started with it."""
        return self._socket.fileno()

    def send(
        self,
        message: msgspec.Struct,
        *,
        seconds: float | None = None,
        descriptors: Sequence[int] = (),
    ) -> None:
        """Send one message, with file descriptors for the other process.

        Raises:
            ChannelClosedError: nobody reads it.
            TimeoutError: the time limit was reached.
        """
        content = msgspec.msgpack.encode(message)
        header = _HEADER.pack(len(content))
        try:
            self._socket.settimeout(seconds)
            if descriptors:
                socket.send_fds(self._socket, [header], list(descriptors))
            else:
                self._socket.sendall(header)
            self._socket.sendall(content)
        except TimeoutError:
            raise
        except OSError as error:
            raise ChannelClosedError(str(error)) from error

    def receive(
        self, kind: type[T], *, seconds: float | None = None, most_bytes: int = MOST_BYTES
    ) -> T:
        """Wait for one message of a type, which may be a union, and is not longer than allowed.

        Raises:
            ChannelClosedError: the other end is closed.
            TimeoutError: the time limit was reached.
            MessageError: it is something else.
        """
        limit = None if seconds is None else TimeLimit(seconds)
        header = self._read(_HEADER.size, limit)
        message: T = self._decode(header, kind, limit, most_bytes)
        return message

    def receive_with_descriptors(self, kind: type[T]) -> tuple[T, list[int]]:
        """Wait for one message, and take the file descriptors that come with it.

        Raises:
            ChannelClosedError: the other end is closed.
            MessageError: it is something else.
        """
        try:
            self._socket.settimeout(None)
            header, descriptors, _, _ = socket.recv_fds(
                self._socket, _HEADER.size, _MOST_DESCRIPTORS
            )
        except OSError as error:
            raise ChannelClosedError(str(error)) from error
        if len(header) < _HEADER.size:
            header += self._read(_HEADER.size - len(header), None)
        return self._decode(header, kind, None, MOST_BYTES), descriptors

    def has_content(self, seconds: float = 0.0) -> bool:
        """Wait until a message begins, or the other end is closed; False after the time limit."""
        return bool(wait_for_any({0: self}, seconds))

    def close(self) -> None:
        """Close this end; the other process notices, and whoever waits here in another thread."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def forget(self) -> None:
        """Close what this process has of an end that is another's."""
        self._socket.close()

    def _decode(self, header: bytes, kind: Any, limit: TimeLimit | None, most_bytes: int) -> Any:
        (length,) = _HEADER.unpack(header)
        if length > most_bytes:
            raise MessageError(f"a message of {length} bytes")
        try:
            return msgspec.msgpack.decode(self._read(length, limit), type=kind)
        except (msgspec.DecodeError, RecursionError) as error:
            raise MessageError(f"not a message: {error}") from error

    def _read(self, count: int, limit: TimeLimit | None) -> bytes:
        """Read so many bytes; the time limit is that of all of them."""
        parts: list[bytes] = []
        while count:
            if limit is not None and limit.is_over:
                raise TimeoutError
            try:
                self._socket.settimeout(None if limit is None else max(limit.left, 0.001))
                part = self._socket.recv(min(count, _CHUNK))
            except TimeoutError:
                raise
            except OSError as error:
                raise ChannelClosedError(str(error)) from error
            if not part:
                raise ChannelClosedError("closed")
            parts.append(part)
            count -= len(part)
        return b"".join(parts)

"""Messages between processes: what arrives is of the expected type, or refused, in time."""

from __future__ import annotations

import socket

import msgspec
import pytest

from paritas.core.workers.channel import Channel, ChannelClosedError, MessageError


class Word(msgspec.Struct):
    text: str


class Number(msgspec.Struct, tag=True):
    value: int


@pytest.fixture
def ends():
    """Our end, and the socket of another process."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield Channel(ours), theirs


def test_a_message_that_breaks_off_is_noticed(ends) -> None:
    channel, theirs = ends
    Channel(theirs).send(Word("a" * 100))
    assert channel.receive(Word).text == "a" * 100
    theirs.sendall(b"\x05\x00\x00\x00\x00\x00\x00\x00ab")
    theirs.close()
    with pytest.raises(ChannelClosedError):
        channel.receive(Word)


def test_bytes_that_are_no_message_are_refused(ends) -> None:
    channel, theirs = ends
    theirs.sendall(b"\xff" * 8)
    with pytest.raises(MessageError, match="bytes"):
        channel.receive(Word)


def test_a_message_of_another_type_is_refused(ends) -> None:
    channel, theirs = ends
    Channel(theirs).send(Number(3))
    with pytest.raises(MessageError, match="not a message: "):
        channel.receive(Word)


def test_a_process_that_sends_byte_by_byte_is_out_of_time(ends) -> None:
    channel, theirs = ends
    theirs.sendall((1 << 20).to_bytes(8, "little"))
    theirs.sendall(b"x")
    with pytest.raises(TimeoutError):
        channel.receive(Word, seconds=0.2)


def test_a_process_that_does_not_read_is_out_of_time(ends) -> None:
    channel, _ = ends
    with pytest.raises(TimeoutError):
        channel.send(Word("x" * (1 << 24)), seconds=0.2)

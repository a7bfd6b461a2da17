"""The user's own line: the innermost that belongs neither to torch nor to paritas."""

from __future__ import annotations

import functools
import linecache
import os
import sys
from pathlib import Path
from types import FunctionType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

if TYPE_CHECKING:
    from collections.abc import Collection
    from types import FrameType


# The folders of torch and paritas, whose frames are between the user's line and this code.
_OTHERS = tuple(
    f"{folder}{os.sep}" for folder in (Path(torch.__file__).parent, Path(__file__).parents[2])
)


class UserLine(NamedTuple):
    """A line, `file.py:18, in forward`, and its text."""

    line: str
    code: str


NOWHERE = UserLine("", "")


def user_line(above: int = 1) -> UserLine:
    """The innermost line that belongs neither to torch nor to paritas.

    Args:
        above: how many callers certainly belong to paritas; checking each frame takes time.
    """
    frame = sys._getframe(above)  # noqa: SLF001  (a whole traceback takes a hundred times as long)
    while frame is not None:
        code = frame.f_code
        # By name: hashing a code object hashes all its constants.
        if is_user_file(code.co_filename):
            return format_line(code.co_filename, frame.f_lineno, code.co_name)
        frame = frame.f_back  # type: ignore[assignment]
    return NOWHERE


def user_frames(above: int = 1, within: Collection[str] = ()) -> tuple[tuple[str, int, str], ...]:
    """The running lines that belong neither to torch nor to paritas, the outermost first.

    Each is a file, a number and a function, as `format_line` takes them.

    Args:
        above: as of `user_line`.
        within: names of functions of torch or paritas; what called them is not looked at.
    """
    frame = sys._getframe(above)  # noqa: SLF001  (a whole traceback takes a hundred times as long)
    frames = []
    while frame is not None and frame.f_code.co_name not in within:
        code = frame.f_code
        if is_user_file(code.co_filename):
            frames.append((code.co_filename, frame.f_lineno, code.co_name))
        frame = frame.f_back  # type: ignore[assignment]
    return tuple(reversed(frames))


def user_frame(above: int = 1) -> FrameType | None:
    """The innermost running function that belongs neither to torch nor to paritas."""
    frame: FrameType | None = sys._getframe(above)  # noqa: SLF001  (as `user_frames`)
    while frame is not None and not is_user_file(frame.f_code.co_filename):
        frame = frame.f_back
    return frame


def function_of(frame: FrameType) -> FunctionType | None:
    """The function that runs in a frame, if its module or one of its callers has it by name."""
    value: Any = frame.f_globals
    for part in frame.f_code.co_qualname.split("."):
        value = value.get(part) if isinstance(value, dict) else getattr(value, part, None)
    callers: list[FrameType] = []
    caller = frame.f_back
    while caller is not None and len(callers) < _MOST_CALLERS:
        callers.append(caller)
        caller = caller.f_back
    nested = (f_local for each in callers for f_local in each.f_locals.values())
    for nested_value in (value, *nested):
        if isinstance(nested_value, FunctionType) and nested_value.__code__ is frame.f_code:
            return nested_value
    return None


_MOST_CALLERS = 4


@functools.cache
def is_user_file(file: str) -> bool:
    """Whether a file belongs neither to torch nor to paritas."""
    return not file.startswith((*_OTHERS, "<frozen "))


@functools.cache
def format_line(file: str, number: int, function: str) -> UserLine:
    """A line and its text."""
    return UserLine(f"{file}:{number}, in {function}", linecache.getline(file, number).strip())

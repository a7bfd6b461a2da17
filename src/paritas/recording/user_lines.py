"""The line of the user's own program that is being executed."""

from __future__ import annotations

import functools
import linecache
import os
import sys
from pathlib import Path
from typing import NamedTuple

import torch

__all__ = ["NOWHERE", "UserLine", "user_line"]

# The folders of torch and of paritas, whose frames lie between the user's line and us.
_OTHERS = tuple(
    f"{folder}{os.sep}" for folder in (Path(torch.__file__).parent, Path(__file__).parents[1])
)


class UserLine(NamedTuple):
    """A line, `file.py:18, in forward`, and its text."""

    line: str
    code: str


NOWHERE = UserLine("", "")


def user_line(above: int = 1) -> UserLine:
    """The innermost line that belongs neither to torch nor to paritas.

    Args:
        above: how many callers are paritas' own, for certain: each frame that is looked at costs.
    """
    frame = sys._getframe(above)  # noqa: SLF001  (a whole traceback takes a hundred times as long)
    while frame is not None:
        code = frame.f_code
        # By name, not by code object: to hash one of those, Python hashes all its constants.
        if _is_users(code.co_filename):
            return _written(code.co_filename, frame.f_lineno, code.co_name)
        frame = frame.f_back  # type: ignore[assignment]
    return NOWHERE


@functools.cache
def _is_users(file: str) -> bool:
    return not file.startswith((*_OTHERS, "<frozen "))


@functools.cache
def _written(file: str, number: int, function: str) -> UserLine:
    return UserLine(f"{file}:{number}, in {function}", linecache.getline(file, number).strip())

"""Which line of the user's program a node comes from, and in which module."""

from __future__ import annotations

import functools
import re
from pathlib import PurePosixPath, PureWindowsPath

from paritas._torch.graphs import module_path

__all__ = ["module_of_stack", "source_of"]

_FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+), in ')
# Torch itself: installed, as it names its own files without their folder, or code that it wrote.
_TORCHS = re.compile(
    r"^<eval_with_key>|(^|(site|dist)-packages[/\\])torch[/\\]"
    r"|[/\\]torch[/\\](nn|_dynamo|functional|fx|_higher_order_ops|utils|export|_export|_ops)\b"
)
_LONGEST_LINE = 300


@functools.lru_cache(maxsize=1024)
def source_of(trace: str) -> tuple[str, str]:
    """File and line, and the text of it, of the innermost frame that is the user's, or torch's.

    The file has its folder and no more: where it lay on the machine of the export tells nobody.
    """
    lines = trace.splitlines()
    best, users = ("", ""), False
    for position, text in enumerate(lines):
        found = _FRAME.search(text)
        if found is None or (users and _TORCHS.search(found["file"])):
            continue
        users = users or not _TORCHS.search(found["file"])
        code = lines[position + 1].strip() if position + 1 < len(lines) else ""
        code = "" if _FRAME.search(code) else code[:_LONGEST_LINE]
        best = (f"{_short(found['file'])}:{found['line']}", code)
    return best


@functools.lru_cache(maxsize=1024)
def module_of_stack(stack: str) -> str:
    """The path of the innermost module, from `key,path,type;key,path,type`."""
    parts = stack.rsplit(";", maxsplit=1)[-1].split(",", 2)
    if len(parts) < 2 or parts[0].startswith("_empty_nn_module_stack"):  # noqa: PLR2004
        return ""
    return module_path(parts[1])


def _short(file: str) -> str:
    path = PureWindowsPath(file) if "\\" in file else PurePosixPath(file)
    return "/".join(part.strip("/\\") for part in path.parts[-2:] if part.strip("/\\"))

"""What a page of the documentation holds, and how its examples are run.

A block of Python that follows a line which begins with the name of a file (`small.py`, ...) is that
file; the others run one after the other, in one namespace. A block `output` is what the block of
Python before it prints. A block `console` is a session of a shell: each `$ paritas ...` runs in
this process. What the page shows of an output has to come, in that order; `...` stands for lines
left out, and figures may differ between machines.
"""

from __future__ import annotations

import dataclasses
import io
import re
import shlex
import sys
import textwrap
import types
from contextlib import contextmanager, redirect_stdout
from pathlib import Path

from click.testing import CliRunner

import processes
from paritas.app.cli import main

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", flags=re.DOTALL | re.MULTILINE)
_NUMBER = re.compile(r"\d[\d.]*(e[+-]?\d+)?")


@dataclasses.dataclass(frozen=True)
class Block:
    """A fenced block: its language, its text, its line in the page, the file that it is, if any."""

    language: str
    text: str
    line: int
    file: str | None


def blocks(page):
    """All fenced blocks of a page, in order."""
    text = page.read_text(encoding="utf-8")
    found = []
    for match in _FENCE.finditer(text):
        paragraph = text[: match.start()].rstrip().rpartition("\n\n")[2]
        named = re.match(r"`([\w./]+\.py)`,", paragraph) if match[1] == "python" else None
        line = text[: match.start()].count("\n") + 1
        found.append(Block(match[1], match[2], line, named[1] if named else None))
    return found


def python_code(page):
    """The Python of a page that is no file, each line where it stands in the page."""
    code = ""
    for block in blocks(page):
        if block.language == "python" and block.file is None:
            code += "\n" * (block.line - code.count("\n")) + block.text
    return code


@contextmanager
def page_module():
    """A module for what a page defines: its functions can then be found by name, as in a script."""
    module = types.ModuleType("page")
    sys.modules["page"] = module
    try:
        yield vars(module)
    finally:
        del sys.modules["page"]


def run_python(page):
    """Run the Python of a page and give back its names."""
    with page_module() as namespace:
        exec(compile(python_code(page), str(page), "exec"), namespace)
        return dict(namespace)


def run_page(page, after=lambda block, printed: None):
    """Run all of a page in the current folder: files, Python, sessions.

    Args:
        after: told of each block of Python, and what it printed.
    """
    try:
        with page_module() as namespace:
            printed = io.StringIO()
            for block in blocks(page):
                if block.file is not None:
                    Path(block.file).write_text(block.text, encoding="utf-8")
                    sys.modules.pop(Path(block.file).stem, None)
                elif block.language == "python":
                    code = "\n" * block.line + block.text
                    printed = io.StringIO()
                    with redirect_stdout(printed), current_folder_on_path():
                        exec(compile(code, str(page), "exec"), namespace)
                    after(block, printed.getvalue())
                elif block.language == "output":
                    assert_shown(block.text.splitlines(), printed.getvalue())
                elif block.language == "console":
                    run_session(block.text)
    finally:
        for block in blocks(page):
            sys.modules.pop(Path(block.file or "").stem, None)


@contextmanager
def current_folder_on_path():
    """As in an interpreter; commands do without it."""
    sys.path.insert(0, str(Path.cwd()))
    try:
        yield
    finally:
        sys.path.remove(str(Path.cwd()))


def run_session(session):
    """Run the commands of a session; what is shown of their output has to come."""
    for part in re.split(r"^\$ ", session, flags=re.MULTILINE)[1:]:
        line, _, shown = part.partition("\n")
        command, told, _ = line.partition("; echo $?")
        code, printed = run_command(shlex.split(command))
        expected = shown.splitlines()
        if told:
            assert str(code) == expected.pop(), f"{command} ends with {code}:\n{printed}"
        assert_shown(expected, printed)


def run_command(words):
    """Exit code and stdout of a command of a page."""
    if words[0] == "python":
        ended = processes.run(*words[1:])
        return ended.returncode, ended.stdout
    assert words[0] == "paritas", words
    result = CliRunner().invoke(main, words[1:])
    return result.exit_code, result.stdout


def assert_shown(expected, printed):
    """That lines are in an output, in their order; figures and blanks aside."""
    left = iter(_plain(line) for line in printed.splitlines())
    for line in expected:
        if line.strip() != "...":
            assert any(_plain(line) == other for other in left), f"{line!r} is not in\n{printed}"


def _plain(line):
    return _NUMBER.sub("#", " ".join(line.replace("─", "").split()))


def shell_commands(page):
    """Each command of paritas in the blocks of a page that can be run as it stands."""
    for block in blocks(page):
        if block.language not in {"", "console", "sh", "bash"}:
            continue
        for line in re.sub(r"\n {4,}", " ", textwrap.dedent(block.text)).splitlines():
            told = line.removeprefix("$ ").partition("; echo")[0].partition("   #")[0]
            found = re.search(r"(?:^|no-python )(paritas .*)", told)
            # `[--option]` and `A|B` are said of a command, not to it.
            if found and not re.search(r"\[|\||\.\.\.", found[1].replace("'", "")):
                yield shlex.split(found[1])

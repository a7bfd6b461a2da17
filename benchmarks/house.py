"""Count what a reader of the code must hold: `python -m benchmarks.house`, from the root.

Rooms, imports between questions, names without content, long parameter lists, places that set a
status, lines, and the longest way from the inputs of `verify` to a status.
"""

from __future__ import annotations

import ast
import collections
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

import paritas

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import CodeType, FrameType

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "paritas"
# Names that say nothing about what they hold.
VAGUE = {
    *("one", "found", "place", "known", "given", "own", "whole", "seen", "made", "kept"),
    *("said", "left", "wanted", "asked", "held", "mine", "theirs"),
}
MOST_PARAMETERS = 7
PARTICIPLES = {
    *("found", "known", "given", "made", "kept", "taken", "left", "held", "seen", "shown", "said"),
    *("told", "built", "drawn", "written", "sent", "done", "meant", "bound", "worn"),
}
# Where a value gets its status.
STATUS_FILE = SOURCE / "core" / "judging" / "pairs.py"
STATUS_FUNCTIONS = {"settle_pair", "_check_value", "apply_ruling"}
NOT_QUESTIONS = {"core", "formats", "app"}


def source_trees() -> dict[Path, ast.Module]:
    """Each file of the package with its syntax tree."""
    files = sorted(SOURCE.rglob("*.py"))
    return {path: ast.parse(path.read_text(encoding="utf-8")) for path in files}


def assigned_names(tree: ast.AST) -> Iterator[str]:
    """Names of variables and of parameters, without `self`, `cls` and `_`."""
    for node in ast.walk(tree):
        name = ""
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            name = node.id
        elif isinstance(node, ast.arg):
            name = node.arg
        if name not in {"", "self", "cls", "_"}:
            yield name


def functions(tree: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    """All functions and methods of a file."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def parameter_count(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """How many parameters it has, without `self` and `cls`."""
    arguments = function.args
    parameters = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
    return sum(parameter.arg not in {"self", "cls"} for parameter in parameters)


def is_participle(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Whether its name is a bare participle, such as `_joined`.

    A property reads as an attribute, for which a participle is a good name: it is not counted.
    Nor is `put`, which is a verb as well.
    """
    word = function.name.strip("_")
    if "_" in word or not (word.endswith("ed") or word in PARTICIPLES):
        return False
    decorators = {ast.unparse(item).split(".")[-1] for item in function.decorator_list}
    return not decorators & {"property", "cached_property"}


def rooms() -> dict[str, list[str]]:
    """The folders of each floor."""
    folders = sorted(path.name for path in SOURCE.iterdir() if (path / "__init__.py").exists())
    inside = {
        floor: sorted(path.name for path in (SOURCE / floor).iterdir() if path.is_dir())
        for floor in NOT_QUESTIONS
    }
    questions = [name for name in folders if name not in NOT_QUESTIONS]
    return {
        "ground": [name for name in inside["core"] if name != "__pycache__"],
        "formats": [name for name in inside["formats"] if name != "__pycache__"],
        "questions": questions,
        "top": [name for name in inside["app"] if name != "__pycache__"],
    }


def imports_between_questions(trees: dict[Path, ast.Module]) -> list[str]:
    """Each file of a question that imports another question."""
    questions = set(rooms()["questions"])
    arrows = set()
    for path, tree in trees.items():
        room = path.relative_to(SOURCE).parts[0]
        for node in ast.walk(tree) if room in questions else ():
            if isinstance(node, ast.ImportFrom) and node.module:
                modules = [node.module]
            elif isinstance(node, ast.Import):
                modules = [alias.name for alias in node.names]
            else:
                continue
            for module in modules:
                parts = module.split(".")
                if parts[0] == "paritas" and len(parts) > 1 and parts[1] in questions - {room}:
                    arrows.add(f"{path.relative_to(SOURCE)} -> {parts[1]}")
    return sorted(arrows)


# A proof has another status: proved, refuted or not decided.
PROOFS = SOURCE / "sharding" / "proofs"


def status_places(trees: dict[Path, ast.Module]) -> list[str]:
    """Each call that gives a finding, a row or a copy of it its status, by keyword."""
    return [
        f"{path.relative_to(SOURCE)}:{node.lineno}"
        for path, tree in trees.items()
        if not path.is_relative_to(PROOFS)
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and any(keyword.arg == "status" for keyword in node.keywords)
        and re.search(r"(Finding|Row|replace)$", ast.unparse(node.func))
    ]


def trace_verify() -> tuple[list[CodeType], set[CodeType]]:
    """The deepest stack from `verify` to where a value gets its status, and all that was called.

    Of a compiled layer: a call graph without running it would be a guess.
    """
    deepest: list[CodeType] = []
    called: set[CodeType] = set()

    def note(frame: FrameType, event: str, _argument: object) -> None:
        code = frame.f_code
        if event != "call" or not code.co_filename.startswith(str(SOURCE)):
            return
        called.add(code)
        if code.co_filename != str(STATUS_FILE) or code.co_name not in STATUS_FUNCTIONS:
            return
        stack: list[CodeType] = []
        here: FrameType | None = frame
        while here is not None and here.f_code is not verify_code:
            if here.f_code.co_filename.startswith(str(SOURCE)):
                stack.append(here.f_code)
            here = here.f_back
        if len(stack) > len(deepest):
            deepest[:] = reversed(stack)

    layer = torch.nn.Linear(4, 3)
    compiled = torch.compile(layer, backend="aot_eager")
    verify: Any = paritas.verify
    while hasattr(verify, "__wrapped__"):
        verify = verify.__wrapped__
    verify_code = verify.__code__
    previous = sys.getprofile()
    sys.setprofile(note)
    try:
        paritas.verify([torch.randn(2, 4)], layer, compiled)
    finally:
        sys.setprofile(previous)
    return deepest, called


def place_of(code: CodeType) -> str:
    """A function as people find it: its file in the package, its name."""
    return f"{Path(code.co_filename).relative_to(SOURCE)}:{code.co_qualname}"


def line_count(folder: str) -> int:
    """Lines of Python below a folder of the repository."""
    files = (ROOT / folder).rglob("*.py")
    return sum(len(path.read_text(encoding="utf-8").splitlines()) for path in files)


def main() -> int:
    """Print the figures."""
    trees = source_trees()
    names = collections.Counter(name for tree in trees.values() for name in assigned_names(tree))
    vague = {name: names[name] for name in sorted(VAGUE, key=lambda name: -names[name])}
    all_functions = [(path, item) for path, tree in trees.items() for item in functions(tree)]
    participles = [item for _, item in all_functions if is_participle(item)]
    long = sorted(
        (
            (parameter_count(item), f"{path.relative_to(SOURCE)}:{item.name}")
            for path, item in all_functions
            if parameter_count(item) > MOST_PARAMETERS
        ),
        reverse=True,
    )
    for floor, folders in rooms().items():
        print(f"{floor}: {len(folders)} rooms ({', '.join(folders)})")
    arrows, places = imports_between_questions(trees), status_places(trees)
    print(f"imports between questions: {len(arrows)}", *arrows, sep="\n  ")
    print(
        f"places that set a status: {len(places)} in {len({p.split(':')[0] for p in places})} files"
    )
    share = sum(vague.values()) / names.total()
    print(f"vague names: {sum(vague.values())} of {names.total()} ({share:.1%}): {vague}")
    print(f"functions that are a participle: {len(participles)} of {len(all_functions)}")
    print(f"functions with more than {MOST_PARAMETERS} parameters: {len(long)}", *long, sep="\n  ")
    way, called = trace_verify()
    files = {code.co_filename for code in way}
    print(
        f"longest way from verify() to a status: {len(way)} calls in {len(files)} files, of "
        f"{len(called)} functions that run",
        *map(place_of, way),
        sep="\n  ",
    )
    print(f"public names: {len(paritas.__all__)}; files: {len(trees)}")
    print({folder: line_count(folder) for folder in ("src", "tests", "benchmarks")})
    return 0


if __name__ == "__main__":
    sys.exit(main())

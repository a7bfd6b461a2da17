"""The rules of the house that no linter knows; CONTRIBUTING.md argues them."""

from __future__ import annotations

import ast
import collections
import os
import pkgutil
import re
import subprocess
import sys
from pathlib import Path

import pytest

import paritas
from paritas.core import register
from paritas.core.register import find_entry
from sampling import is_run

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src"
CORE = SOURCE / "paritas" / "core"
SEAM = [CORE / "torch_private", CORE / "precision"]
CANARIES = [
    ROOT / "tests" / "unit" / "test_torch_canaries.py",
    ROOT / "tests" / "unit" / "test_compiler_canaries.py",
    ROOT / "tests" / "unit" / "test_graph_canaries.py",
    ROOT / "tests" / "unit" / "test_rank_canaries.py",
    ROOT / "tests" / "unit" / "test_backend_canaries.py",
]

BANNED_NAMES = {"util", "utils", "_util", "_utils"}


def python_files() -> list[Path]:
    files = [path for folder in ("src", "tests") for path in sorted((ROOT / folder).rglob("*.py"))]
    assert files, f"no Python file under {ROOT}: this test would pass on nothing"
    return files


def run_cold(code: str, cwd: Path) -> str:
    """Run code in a new interpreter, in a folder that has no configuration, and give its output."""
    # PYTEST_* would hand this run's own options on.
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST_")}
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, f"{code}\n{done.stdout}\n{done.stderr}"
    return done.stdout


# --- cold start -----------------------------------------------------------------------------------


def test_importing_the_pytest_plugin_leaves_torch_unimported(tmp_path):
    run_cold(
        "import _paritas_pytest, sys; "
        "assert 'torch' not in sys.modules; assert 'paritas' not in sys.modules",
        tmp_path,
    )


def test_pytest_loads_the_plugin_and_leaves_torch_unimported(tmp_path):
    output = run_cold(
        "import pytest, sys; code = pytest.main(['--markers']); "
        "assert 'torch' not in sys.modules; sys.exit(code)",
        tmp_path,
    )
    assert "@pytest.mark.parity(**settings):" in output


def test_help_leaves_torch_unimported(tmp_path):
    output = run_cold(
        "import sys; from paritas.app.cli import main; main(['--help'], standalone_mode=False); "
        "assert 'torch' not in sys.modules",
        tmp_path,
    )
    assert "Usage:" in output


def test_importing_paritas_leaves_torch_unimported(tmp_path):
    run_cold(
        "import paritas, sys; paritas.__version__; assert 'torch' not in sys.modules", tmp_path
    )


START = f"""
import importlib.util, sys
sys.path.insert(0, {str(SOURCE)!r})
exec(open({str(SOURCE / "paritas_guard.pth")!r}).read())
"""


def test_the_start_of_python_costs_nothing_without_a_guard(tmp_path, monkeypatch):
    monkeypatch.delenv("PARITAS_GUARD", raising=False)
    run_cold(
        START + "assert not {'_paritas_guard', 'paritas', 'torch'} & sys.modules.keys()", tmp_path
    )


def test_a_guard_asked_for_by_the_environment_waits_for_the_import_of_torch(tmp_path, monkeypatch):
    monkeypatch.setenv("PARITAS_GUARD", "1")
    before = "assert '_paritas_guard' in sys.modules; assert 'paritas' not in sys.modules\n"
    after = (
        "assert 'paritas.core.compiled.guard_settings' in sys.modules; "
        "assert 'torch' not in sys.modules"
    )
    run_cold(START + before + "importlib.util.find_spec('torch')\n" + after, tmp_path)


def test_a_guard_that_cannot_be_started_does_not_end_the_program(tmp_path, monkeypatch):
    monkeypatch.setenv("PARITAS_GUARD", "1")
    broken = "sys.modules['paritas'] = None; sys.stderr = sys.stdout\n"
    told = run_cold(START + broken + "importlib.util.find_spec('torch')", tmp_path)
    assert told.startswith(
        "paritas (PARITAS_GUARD): unverified: nothing was guarded: import paritas"
    )


# --- the front door -------------------------------------------------------------------------------


def test_all_is_the_sorted_public_names():
    modules = {module.name for module in pkgutil.iter_modules(paritas.__path__)}
    public = {name for name in dir(paritas) if not name.startswith("_")} - modules
    assert paritas.__all__ == sorted(public)


def test_every_public_name_has_one_home_that_type_checkers_see_too():
    tree = ast.parse(Path(paritas.__file__).read_text(encoding="utf-8"))
    seen = {
        (alias.asname or alias.name): node.module
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("paritas.")
        for alias in node.names
        if not (alias.asname or alias.name).startswith("_")
    }
    assert seen == paritas._HOMES
    assert sorted(paritas._HOMES) == paritas.__all__


def test_every_entry_of_the_register_is_there():
    missing = [name for name in register._HOMES if find_entry(name) is None]
    assert not missing


def test_every_public_name_is_there():
    missing = [name for name in [*paritas.__all__, "__version__"] if not hasattr(paritas, name)]
    assert not missing


def test_no_public_name_is_also_a_module():
    modules = {module.name for module in pkgutil.iter_modules(paritas.__path__)}
    assert not modules & set(paritas.__all__), "the module would shadow the name on second access"


def test_an_unknown_name_is_an_attribute_error():
    assert not hasattr(paritas, "verfy")


# --- files ----------------------------------------------------------------------------------------


def test_no_module_is_called_utils():
    named = [
        str(path.relative_to(ROOT))
        for path in python_files()
        if BANNED_NAMES & {path.stem, *path.relative_to(ROOT).parts[:-1]}
    ]
    assert not named, "name the module after what it holds"


# --- what people read is never read back ----------------------------------------------------------

SHOWN = {"path", "reason", "judged_by", "notes", "advice", "sentence"}
READING = {
    *("startswith", "endswith", "removeprefix", "removesuffix", "partition", "rpartition"),
    *("split", "rsplit", "find", "index", "search", "match", "fullmatch", "findall"),
}
# Words of a finding's path, which only `core/results/items.py` knows.
PATH_WORDS = re.compile(
    r"^( after the call| after backward|gradient of ?|second gradient( of ?)?|state )$"
)
# What a file has that may be found below: to parse the others takes seconds.
SUSPECT = re.compile(
    rf"\.\s*({'|'.join(SHOWN)})\b|\b(note|judged_by)\b|\bFinding\("
    r"|[\"'}]( after the call| after backward|gradient of ?|second gradient( of ?)?|state )[\"'{]"
)
# Other things than a finding, a row or a verdict, that also have a field of such a name.
OTHERS_PATH = {"os", "sys", "draw", "reached", "value", "request"}


def reads_text(node: ast.AST) -> bool:
    """Whether a finding's path, reason, note or judged_by is searched for words."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        given = [node.func.value, *node.args]
        return node.func.attr in READING and any(map(is_shown_text, given))
    if isinstance(node, ast.Compare) and isinstance(node.ops[0], ast.In | ast.NotIn):
        is_words = isinstance(node.left, ast.Constant | ast.JoinedStr | ast.Name)
        shown = node.comparators[0]
        return is_words and is_shown_text(shown) and getattr(shown, "attr", "") != "notes"
    if isinstance(node, ast.Compare) and isinstance(node.ops[0], ast.Eq | ast.NotEq):
        return getattr(node.left, "attr", "") in {"reason", "judged_by", "advice", "sentence"}
    return False


def is_shown_text(node: ast.AST) -> bool:
    """Whether it is `finding.path`, `row.reason` and the like, or a loop's `note`."""
    if isinstance(node, ast.Name):
        return node.id in {"note", "judged_by"}
    return (
        isinstance(node, ast.Attribute)
        and node.attr in SHOWN
        and not (isinstance(node.value, ast.Name) and node.value.id in OTHERS_PATH)
    )


def is_finding_by_path(node: ast.AST) -> bool:
    return (
        isinstance(node, ast.Call)
        and getattr(node.func, "id", "") == "Finding"
        and any(keyword.arg == "path" for keyword in node.keywords)
    )


READERS = {
    "paritas/core/results/items.py",  # makes the words
    "paritas/core/results/wording.py",  # not to say a remedy twice
}


def test_what_people_read_is_never_read_back_and_findings_are_made_of_items():
    read, made = [], []
    for file in sorted((SOURCE / "paritas").rglob("*.py")):
        name, text = str(file.relative_to(SOURCE)), file.read_text(encoding="utf-8")
        for node in ast.walk(ast.parse(text)) if SUSPECT.search(text) else ():
            if is_finding_by_path(node):
                made.append(f"{name}:{node.lineno}")
            if name in READERS:
                continue
            if reads_text(node):
                read.append(f"{name}:{node.lineno}: {ast.unparse(node)}")
            if isinstance(node, ast.Constant) and PATH_WORDS.match(str(node.value)):
                read.append(f"{name}:{node.lineno}: the words {node.value!r} of an item")
    assert not read, "\n".join(["ask the item, the status or a field instead:", *read])
    assert not made, f"a finding is made of an item, which has the path: {made}"


# --- a status is given in one place ---------------------------------------------------------------

FINDING_MAKERS = {
    "paritas/core/judging/pairs.py",  # of compared values: the judge
    "paritas/core/results/findings.py",  # of everything else: constructors with names
}
STATUS_CHANGERS = {
    "paritas/core/judging/pairs.py": 1,
    "paritas/sweeping/rows.py": 1,  # of a row, which has the status of its verdict
}
# What a file has that may be found below: to parse the others takes seconds.
STATUS_WORDS = re.compile(r"\bFinding\(|\bstatus\s*=|\"status\"|Aspect\.VALUE")
# A proof has another status, a word.
PROOFS = "paritas/sharding/proofs/"


def sets_status(node: ast.AST) -> str:
    """How a status is set there: by a new finding, by a changed one, past the judge; or not."""
    if isinstance(node, ast.Assign | ast.AugAssign | ast.AnnAssign):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        return "change" if any(getattr(one, "attr", "") == "status" for one in targets) else ""
    if not isinstance(node, ast.Call):
        return ""
    called = node.func.attr if isinstance(node.func, ast.Attribute) else ""
    called = called or getattr(node.func, "id", "")
    keywords = {keyword.arg for keyword in node.keywords}
    words = {one.value for one in node.args if isinstance(one, ast.Constant)}
    if called == "Finding":
        return "finding"
    if called in {"replace", "_replace"} and "status" in keywords:
        return "change"
    if called in {"force_setattr", "setattr", "__setattr__"} and "status" in words:
        return "change"
    is_value = any(ast.unparse(one) == "Aspect.VALUE" for one in node.args)
    return "value" if called == "add" and is_value else ""


def test_a_value_gets_its_status_from_the_judge_alone():
    made, added = [], []
    changed: collections.Counter[str] = collections.Counter()
    for file in sorted((SOURCE / "paritas").rglob("*.py")):
        name = str(file.relative_to(SOURCE))
        text = file.read_text(encoding="utf-8")
        for node in ast.walk(ast.parse(text)) if STATUS_WORDS.search(text) else ():
            how = sets_status(node)
            if how == "finding" and name not in FINDING_MAKERS:
                made.append(f"{name}:{node.lineno}")
            elif how == "change" and not name.startswith(PROOFS):
                changed[name] += 1
            elif how == "value":
                added.append(f"{name}:{node.lineno}")
    assert not made, f"use judge_pair, or mismatch, agreement, unverified, starting_place: {made}"
    assert changed == STATUS_CHANGERS, "give the judge a gate or a rule, or reconsider()"
    assert not added, f"add() is for what is not a value; judge_pair judges values: {added}"


# --- samples --------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [2, 3, 4])
def test_a_sample_has_one_case_of_each_n_and_not_always_the_same_one(n):
    chosen = [number for number in range(n * n) if is_run(number, n)]
    assert chosen[0] == 0
    assert [number // n for number in chosen] == [*range(n)]
    assert {number % n for number in chosen} == {*range(n)}


# --- one door to transformers ---------------------------------------------------------------------

LIBRARY_NAME = re.compile(r"transformers(\.\w+)*\.?")
# What a file has that may be found below: to parse the others takes seconds.
LIBRARY_WORDS = re.compile(r"[\"'}]transformers\b|\b_attn_implementation\b|\b_from_config\b")


def test_the_names_of_transformers_are_in_one_file():
    door = CORE / "transformers_library.py"
    named = [
        f"{path.relative_to(SOURCE)}:{node.lineno}"
        for path in sorted(SOURCE.rglob("*.py"))
        if path != door and LIBRARY_WORDS.search(text := path.read_text(encoding="utf-8"))
        for node in ast.walk(ast.parse(text))
        if (
            isinstance(node, ast.Constant)
            and isinstance(node.value, str)
            and LIBRARY_NAME.fullmatch(node.value)
        )
        or (
            isinstance(node, ast.Attribute)
            and node.attr in {"_attn_implementation", "_from_config"}
        )
    ]
    assert named == []

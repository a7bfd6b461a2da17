"""What is released: the two archives, and paritas as it is installed from them.

They are built for the occasion; `make dist` asks the same of those in dist/.
"""

from __future__ import annotations

import contextlib
import functools
import gzip
import json
import os
import re
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import venv
import zipfile
from email import message_from_string
from pathlib import Path, PurePosixPath
from unittest import mock

import pytest

backend = pytest.importorskip("hatchling.build", reason="hatchling, which builds, is missing")

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
INFO = f"paritas-{VERSION}.dist-info"
ASSETS = "paritas/core/reporting/assets"


def given(pattern: str) -> Path | None:
    """The archive of this kind that `make dist` asks about."""
    if not (folder := os.environ.get("DIST_FOLDER")):
        return None
    (found,) = (ROOT / folder).glob(pattern)
    return found


def files_below(folder: Path) -> set[str]:
    """What was written there by people, as an archive spells it."""
    return {
        path.relative_to(folder).as_posix()
        for path in folder.rglob("*")
        if path.is_file() and path.suffix != ".pyc"
    }


@pytest.fixture(scope="module")
def sdist(tmp_path_factory) -> Path:
    if found := given("*.tar.gz"):
        return found
    folder = tmp_path_factory.mktemp("sdist")
    quick = functools.partial(gzip.GzipFile, compresslevel=1)  # to compress well takes two seconds
    with contextlib.chdir(ROOT), mock.patch("gzip.GzipFile", quick):
        return folder / backend.build_sdist(str(folder))


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    if found := given("*.whl"):
        return found
    folder = tmp_path_factory.mktemp("wheel")
    with contextlib.chdir(ROOT):
        return folder / backend.build_wheel(str(folder))


@pytest.fixture(scope="module")
def unpacked(sdist, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("unpacked")
    with tarfile.open(sdist) as archive:
        archive.extractall(folder, filter="data")
    return folder / f"paritas-{VERSION}"


@pytest.fixture(scope="module")
def environment(wheel, tmp_path_factory) -> Path:
    """Its folder of programs: the wheel and what it needs, and no trace of the working tree."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, symlinks=True)
    scheme = {"base": str(folder), "platbase": str(folder)}
    packages = Path(sysconfig.get_path("purelib", "venv", scheme))
    for entry in Path(sysconfig.get_path("purelib")).iterdir():
        if "paritas" not in entry.name:
            (packages / entry.name).symlink_to(entry)
    programs = Path(sysconfig.get_path("scripts", "venv", scheme))
    quiet = ["--no-index", "--no-deps", "--no-compile", "--quiet", "--disable-pip-version-check"]
    run(programs / "python", "-m", "pip", "install", *quiet, wheel, cwd=folder)
    return programs


def run(*command, cwd: Path, **variables: str) -> str:
    # What this run was told must not reach the other: a path to the source, pytest's own options.
    kept = {
        key: value for key, value in os.environ.items() if not key.startswith(("PY", "PARITAS"))
    }
    done = subprocess.run(
        [str(word) for word in command],
        cwd=cwd,
        env={**kept, "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1", **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT if variables else subprocess.PIPE,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


# --- what the archives hold -----------------------------------------------------------------------


def test_the_wheel_holds_the_whole_source_and_nothing_else(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    held = {name for name in names if not name.startswith(f"{INFO}/")}
    assert len(names) == len(set(names))
    assert held == files_below(ROOT / "src")
    assert {"_paritas_pytest.py", "paritas/py.typed", f"{ASSETS}/report.css"} <= held


def test_the_sdist_holds_what_the_targets_of_the_makefile_need(unpacked):
    held = files_below(unpacked)
    for folder in ("benchmarks", "docs", "src", "tests"):
        below = {name for name in held if PurePosixPath(name).parts[0] == folder}
        assert below == {f"{folder}/{name}" for name in files_below(ROOT / folder)}
    alone = {name for name in held if "/" not in name}
    assert {"Makefile", "pyproject.toml", "constraints.txt", "zensical.toml", "LICENSE"} <= alone
    named = set(re.findall(r"[\w-]+\.(?:txt|toml|md)\b", (ROOT / "Makefile").read_text()))
    assert {name for name in named if (ROOT / name).is_file()} <= alone


def test_the_sdist_builds_the_same_wheel(unpacked, wheel, tmp_path):
    with contextlib.chdir(unpacked):
        again = zipfile.ZipFile(tmp_path / backend.build_wheel(str(tmp_path)))
    record = f"{INFO}/RECORD"  # a digest of every file
    assert again.read(record) == zipfile.ZipFile(wheel).read(record)


def test_the_wheel_bears_the_licence_of_everything_in_it(wheel):
    archive = zipfile.ZipFile(wheel)
    metadata = message_from_string(archive.read(f"{INFO}/METADATA").decode())
    licences = {name.removeprefix(f"{INFO}/licenses/"): name for name in archive.namelist()}
    listed = metadata.get_all("License-File")
    texts = {name: archive.read(licences[name]).decode() for name in listed}
    versions = archive.read(f"{ASSETS}/VERSIONS").decode()
    works = [line.split() for line in versions.splitlines() if not line.startswith("#")]
    vendored = {name for name in archive.namelist() if name.startswith(f"{ASSETS}/vendor/")}
    own = {f"{ASSETS}/vendor/{file}" for *_, file, _ in works}

    assert works
    assert metadata["License-Expression"] == "Apache-2.0 AND MIT"
    assert {licence for _, _, licence, *_ in works} == {"MIT"}
    assert texts.keys() == {"LICENSE", "THIRD_PARTY.md"} | {f"src/{n}" for n in vendored - own}
    for name, version, licence, file, _ in works:
        assert f"| {name} | {version} | {licence} |" in texts["THIRD_PARTY.md"]
        text = texts[f"src/{ASSETS}/vendor/{re.split('[._]', file)[0]}.LICENSE"]
        assert "Permission is hereby granted, free of charge" in text
        assert "Copyright (c)" in text


# --- what a package index shows -------------------------------------------------------------------


def test_the_description_has_no_link_to_a_file_that_an_index_does_not_have(wheel):
    archive = zipfile.ZipFile(wheel)
    metadata = message_from_string(archive.read(f"{INFO}/METADATA").decode())
    text = metadata.get_payload()
    assert metadata["Description-Content-Type"] == "text/markdown"
    assert "tutorial (`docs/tutorial.md`)" in text
    links = re.findall(r"\]\(([^)]*)\)", re.sub(r"```.*?```", "", text, flags=re.DOTALL))
    assert [link for link in links if not link.startswith(("http://", "https://"))] == []
    named = set(re.findall(r"\(`([\w/.]+\.md)`\)", text))
    assert named
    assert [name for name in named if not (ROOT / name).is_file()] == []


# --- the dependencies -----------------------------------------------------------------------------


def test_the_oldest_versions_that_are_tried_are_the_oldest_that_are_allowed():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    allowed = dict(one.split(">=") for one in project["dependencies"])
    lines = (ROOT / "constraints-oldest.txt").read_text().splitlines()
    tried = dict(line.split("==") for line in lines if "==" in line)
    del allowed["torch"]  # as in constraints.txt
    assert tried.keys() == allowed.keys()
    for name, version in tried.items():
        assert re.fullmatch(rf"{re.escape(allowed[name])}(\.0)*", version), name


# --- the version ----------------------------------------------------------------------------------


def test_the_version_stands_in_one_place():
    literal = re.compile(rf"""["']{re.escape(VERSION)}["']""")
    sources = sorted((ROOT / "src").rglob("*.py"))
    assert sources
    assert [path.name for path in sources if literal.search(path.read_text())] == []


def test_the_newest_heading_of_the_changelog_is_the_version_or_still_to_be_released():
    headings = re.findall(r"^## \[(.+?)\]", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert headings[0] == "Unreleased"
    assert headings[1:2] in ([], [VERSION])


# --- installed ------------------------------------------------------------------------------------

USE = """
import json
import torch
import paritas
from paritas.formats.dumps.reading import Dump

config = paritas.VerifyConfig(raise_on_mismatch=False)
x = torch.linspace(-1, 1, 12).reshape(3, 4)
model = torch.nn.Linear(4, 2)
verdicts = [paritas.verify([x], model, of, config) for of in (model, lambda x: model(x) * 1.01)]
with paritas.capture("dump"):
    model(x)
told = [paritas.__file__, paritas.__version__, *(verdict.status.value for verdict in verdicts)]
print(json.dumps([*told, Dump.open("dump").header(0).paritas]))
"""


def test_the_installed_command_tells_the_version(environment, tmp_path):
    assert run(environment / "paritas", "--version", cwd=tmp_path) == f"paritas {VERSION}\n"


@pytest.mark.skipif(
    not os.environ.get("DIST_FOLDER") and not os.environ.get("PARITAS_WHOLE_CORPUS"),
    reason="`make dist` and PARITAS_WHOLE_CORPUS=1 run it",
)
def test_what_is_installed_verifies_and_signs_its_dumps_with_the_version(environment, tmp_path):
    home, version, *rest = json.loads(run(environment / "python", "-c", USE, cwd=tmp_path))
    assert Path(home).is_relative_to(environment.parent)
    assert [version, *rest] == [VERSION, "identical", "different", VERSION]


PLAIN = """
import torch

torch.compile(lambda x: x * 2, backend="eager")(torch.ones(3))
"""


def test_the_environment_guards_a_program_that_does_not_import_paritas(environment, tmp_path):
    output = run(environment / "python", "-c", PLAIN, cwd=tmp_path, PARITAS_GUARD="1")
    assert "paritas (PARITAS_GUARD=1): identical: " in output
    # Nothing else waits for torch, so that a program that compiles need not be started again.
    waiting = "import sys; print('_paritas_guard' in sys.modules, file=sys.stderr)"
    assert run(environment / "python", "-c", waiting, cwd=tmp_path, PARITAS_GUARD="1") == "True\n"
    assert run(environment / "python", "-c", waiting, cwd=tmp_path, PARITAS_GUARD="") == "False\n"


def test_an_editable_installation_has_the_start_up_file_too(tmp_path):
    with contextlib.chdir(ROOT):
        wheel = zipfile.ZipFile(tmp_path / backend.build_editable(str(tmp_path)))
    assert wheel.read("paritas_guard.pth") == (ROOT / "src" / "paritas_guard.pth").read_bytes()


def test_pytest_finds_the_installed_plugin(environment, tmp_path):
    output = run(environment / "python", "-m", "pytest", "--markers", cwd=tmp_path)
    assert "@pytest.mark.parity" in output


def test_a_type_checker_sees_the_types_of_what_is_installed(environment, tmp_path):
    api = pytest.importorskip("mypy.api", reason="mypy is missing")
    program = tmp_path / "program.py"
    program.write_text("import paritas\nreveal_type(paritas.verify)\nparitas.verify()\n")
    # Types of others, and of other folders, which take long to read and are not asked about.
    others = ["torch", "numpy", "rich", "jinja2", "msgspec", "safetensors", "click"]
    folders = [path.relative_to(ROOT / "src").parent for path in ROOT.glob("src/**/__init__.py")]
    names = {".".join(folder.parts[:3]) for folder in folders}
    others += names - {"paritas", "paritas.core", "paritas.core.results", "paritas.verification"}
    skipped = ",".join(f"{name}.*" for name in others)
    settings = tmp_path / "mypy.ini"
    settings.write_text(f"[mypy]\n[mypy-{skipped}]\nfollow_imports = skip\n")
    place = ["--python-executable", str(environment / "python"), "--cache-dir", os.devnull]
    limit = sys.getrecursionlimit()  # mypy sets one for the whole process
    said, failed, code = api.run([*place, "--config-file", str(settings), str(program)])
    sys.setrecursionlimit(limit)
    assert (failed, code) == ("", 1), said
    assert "-> paritas.core.results.findings.Verdict" in said
    assert "Missing positional arguments" in said

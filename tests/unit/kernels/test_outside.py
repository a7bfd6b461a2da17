"""What a candidate does to the code that observes it, and around it."""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path

import pytest
import torch

from paritas.kernels import calling, observing
from paritas.kernels.outside import Audit, OwnCode
from paritas.kernels.servers import candidate_environment


def test_code_constants_and_contents_are_put_back() -> None:
    own_code = OwnCode()
    assert own_code.put_back() == {}
    patterns, plain = calling.PATTERNS, set(observing._PLAIN_CLASSES)
    code = calling.poisoned.__code__
    calling.poisoned.__code__ = (lambda tensor, pattern: tensor).__code__
    calling.PATTERNS = (0.0, 0.0)
    observing._PLAIN_CLASSES.add(int)
    assert own_code.put_back() == {
        "paritas.kernels.calling.PATTERNS": "replaced",
        "paritas.kernels.observing._PLAIN_CLASSES": "changed",
        "paritas.kernels.calling.poisoned": "rewritten",
    }
    assert calling.poisoned.__code__ is code
    assert calling.PATTERNS is patterns
    assert plain == observing._PLAIN_CLASSES


def test_a_detour_to_another_process_is_seen() -> None:
    audit = Audit()
    audit.is_calling = True
    Path(f"/proc/self/../{os.getppid()}/status").read_bytes()
    audit.is_calling = False
    assert ("reads", f"/proc/{os.getppid()}/status") in audit.take()


def test_modules_of_python_come_first(monkeypatch, tmp_path) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    paths = candidate_environment()["PYTHONPATH"].split(os.pathsep)
    own = str(Path(os.__file__).parent)
    assert paths.index(own) < paths.index(str(tmp_path))
    assert sorted(paths) == sorted(path for path in sys.path if path)


@pytest.mark.parametrize(
    ("folder", "is_seen"),
    [("packages", False), ("kernels/site-packages", False), ("kernels", True), ("scratch", True)],
)
def test_a_hook_of_a_package_is_its_own_affair(monkeypatch, tmp_path, folder, is_seen) -> None:
    """As `filelock` adds one, which torch's compilers import."""
    name = f"locks_in_{folder.replace('/', '_').replace('-', '_')}"
    (tmp_path / folder).mkdir(parents=True)
    adds = "import sys\nsys.addaudithook(lambda *_: None)\n"
    (tmp_path / folder / f"{name}.py").write_text(adds)
    monkeypatch.syspath_prepend(tmp_path / folder)
    monkeypatch.setenv("TMPDIR", str(tmp_path / "scratch"))
    audit = Audit()
    audit.own_file = str(tmp_path / "kernels" / "kernel.py")
    importlib.import_module(name)
    assert any(kind == "adds" for kind, _ in audit.take()) is is_seen


def test_an_operator_that_calls_something_else_is_put_back() -> None:
    overload = torch.ops.aten.neg.default
    overload(torch.ones(1))
    own_code, call = OwnCode(), overload._op
    overload._op = torch.neg
    assert own_code.put_back() == {"torch.ops.aten.neg.default": "replaced"}
    assert overload._op is call

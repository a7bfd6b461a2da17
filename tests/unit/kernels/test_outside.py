"""What a candidate does to the code that observes it, and around it."""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path

from paritas.kernels import memory, observing
from paritas.kernels.forking import environment
from paritas.kernels.outside import Audit, OwnCode


def test_code_constants_and_contents_are_put_back() -> None:
    own_code = OwnCode()
    assert own_code.put_back() == {}
    patterns, plain = memory.PATTERNS, set(observing._PLAIN_CLASSES)
    code = memory.poisoned.__code__
    memory.poisoned.__code__ = (lambda tensor, pattern: tensor).__code__
    memory.PATTERNS = (0.0, 0.0)
    observing._PLAIN_CLASSES.add(int)
    assert own_code.put_back() == {
        "paritas.kernels.memory.PATTERNS": "replaced",
        "paritas.kernels.observing._PLAIN_CLASSES": "changed",
        "paritas.kernels.memory.poisoned": "rewritten",
    }
    assert memory.poisoned.__code__ is code
    assert memory.PATTERNS is patterns
    assert plain == observing._PLAIN_CLASSES


def test_a_detour_to_another_process_is_seen() -> None:
    audit = Audit()
    audit.is_calling = True
    Path(f"/proc/self/../{os.getppid()}/status").read_bytes()
    audit.is_calling = False
    assert ["reads", f"/proc/{os.getppid()}/status"] in audit.take()


def test_modules_of_python_come_first(monkeypatch, tmp_path) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    paths = environment()["PYTHONPATH"].split(os.pathsep)
    own = str(Path(os.__file__).parent)
    assert paths.index(own) < paths.index(str(tmp_path))
    assert sorted(paths) == sorted(path for path in sys.path if path)


def test_a_hook_of_a_package_is_its_own_affair(monkeypatch, tmp_path) -> None:
    """As `filelock` adds one, which torch's compilers import."""
    adds = "import sys\nsys.addaudithook(lambda *_: None)\n"
    (tmp_path / "site-packages").mkdir()
    (tmp_path / "site-packages" / "locks_of_a_package.py").write_text(adds)
    (tmp_path / "own_kernel.py").write_text(adds)
    audit = Audit()
    for folder, name in (("site-packages", "locks_of_a_package"), (".", "own_kernel")):
        monkeypatch.syspath_prepend(tmp_path / folder)
        audit.take()
        importlib.import_module(name)
        assert any(kind == "adds" for kind, _ in audit.take()) is (name == "own_kernel")

"""Candidates by name: what is one, and what a slip is told."""

from __future__ import annotations

import subprocess
import sys

import pytest

from paritas import candidates
from paritas.core.candidates import makers
from paritas.core.candidates.loading import NAMED, check_name, is_named
from paritas.core.errors import UsageError


def test_with_a_colon_it_is_a_function_of_the_users():
    assert is_named("onnxruntime")
    assert not is_named("package.module:function")


@pytest.mark.parametrize(
    ("slip", "meant"),
    [
        ("onnxrutime", "onnxruntime"),
        ("ONNXRuntime", "onnxruntime"),
        ("aot-inductor", "aot_inductor"),
        ("exported", "export"),
        ("export_decomposed", "export-decomposed"),
    ],
)
def test_a_slip_is_told_the_nearest_name(slip, meant):
    with pytest.raises(UsageError, match=f"did you mean '{meant}'\\?"):
        check_name(slip)


def test_an_unknown_name_is_told_all_names():
    with pytest.raises(UsageError) as caught:
        check_name("tensorrt")
    assert str(caught.value) == (
        "unknown --candidate 'tensorrt'; known are onnxruntime, aot_inductor, export, "
        "export-decomposed, or give your own function as package.module:function"
    )


def test_every_name_has_its_maker():
    assert all(callable(getattr(makers, name.replace("-", "_"))) for name in NAMED)
    for name in candidates.__all__:
        assert callable(getattr(candidates, name))


def test_the_names_are_known_without_torch():
    code = "import sys, paritas.core.candidates.loading; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0

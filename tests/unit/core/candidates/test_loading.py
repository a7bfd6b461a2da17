"""`package.module:name`, found and called; and what is said where that fails."""

from __future__ import annotations

import sys
import textwrap

import pytest

from paritas.core.candidates.loading import call, check_form, model_and_inputs, resolve
from paritas.core.errors import UsageError


@pytest.fixture
def write(tmp_path, monkeypatch):
    """Write a module into the current directory; what it leaves in the interpreter is undone."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    before = set(sys.modules)

    def write(name, text):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(textwrap.dedent(text), encoding="utf-8")

    yield write
    for name in set(sys.modules) - before:
        del sys.modules[name]


def refusal(function, *args, **options):
    with pytest.raises(UsageError) as caught:
        function(*args, **options)
    return str(caught.value)


def test_a_function_is_found_in_the_current_directory(write):
    write("nets.py", "def build(): return 7")
    assert resolve("nets:build", "FACTORY")() == 7


def test_a_name_may_have_dots(write):
    write("nets.py", "class Net:\n    @staticmethod\n    def build(): return 7")
    assert resolve("nets:Net.build", "FACTORY")() == 7


@pytest.mark.parametrize(
    ("spec", "hint"),
    [
        ("nets", "write one colon between module and function, as in 'nets:build'"),
        ("pkg.nets", "write one colon between module and function, as in 'pkg.nets:build'"),
        ("pkg.nets.make", "write one colon between module and function, as in 'pkg.nets:make'"),
        ("nets:", "write one colon between module and function, as in 'nets:build'"),
        (":make", "write one colon between module and function, as in 'model:make'"),
        ("pkg/nets.py:make", "did you mean 'pkg.nets:make'?"),
        ("./nets.py", "did you mean 'nets:build'?"),
    ],
)
def test_what_has_another_form_is_told_the_right_one(spec, hint):
    expected = f"FACTORY {spec!r} is not of the form package.module:name; {hint}"
    assert refusal(check_form, spec, "FACTORY") == expected


def test_a_module_that_is_not_there(write):
    write("pkg/__init__.py", "")
    place = "in the current directory or the environment"
    assert (
        refusal(resolve, "pkg.nest:build", "--inputs")
        == f"--inputs 'pkg.nest:build': no module 'pkg.nest' {place}"
    )
    assert (
        refusal(resolve, "gkp.nets:build", "--inputs")
        == f"--inputs 'gkp.nets:build': no module 'gkp' {place}"
    )


def test_a_module_that_imports_what_is_not_there_is_not_said_to_be_missing(write):
    write("nets.py", "import torchh")
    assert refusal(resolve, "nets:build", "FACTORY") == (
        "FACTORY 'nets:build': importing nets raised "
        "ModuleNotFoundError: No module named 'torchh' at nets.py:1 in <module>"
    )


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("1 / 0", "ZeroDivisionError: division by zero at nets.py:1 in <module>"),
        ("import sys; sys.exit(4)", "SystemExit: 4 at nets.py:1 in <module>"),
        ("def build(:", "SyntaxError: invalid syntax (nets.py, line 1)"),
    ],
)
def test_a_module_that_cannot_be_imported_is_told_with_the_reason(write, text, told):
    write("nets.py", text)
    expected = f"FACTORY 'nets:build': importing nets raised {told}"
    assert refusal(resolve, "nets:build", "FACTORY") == expected


def test_a_misspelt_name_is_told_its_nearest(write):
    write("nets.py", "def build(): ...\ndef rebuild(): ...\ndef other(): ...")
    assert (
        refusal(resolve, "nets:biuld", "FACTORY")
        == "FACTORY 'nets:biuld': module nets has no 'biuld'; did you mean 'build' or 'rebuild'?"
    )


def test_a_name_like_no_other_is_told_what_there_is(write):
    write("nets.py", "from math import sin\ndef build(): ...\ndef _hidden(): ...")
    expected = "FACTORY 'nets:xyz': module nets has no 'xyz'; it defines build"
    assert refusal(resolve, "nets:xyz", "FACTORY") == expected
    write("bare.py", "n = 1")
    expected = "FACTORY 'bare:xyz': module bare has no 'xyz', and defines no names of its own"
    assert refusal(resolve, "bare:xyz", "FACTORY") == expected


def test_what_is_not_a_function(write):
    write("nets.py", "build = 7")
    expected = "FACTORY 'nets:build' is not a function; it has type int: 7"
    assert refusal(resolve, "nets:build", "FACTORY") == expected


def test_a_factory_that_raises_is_told_with_its_place(write):
    write("nets.py", "def build():\n    raise OSError('no weights:\\n  x.pt')")
    assert refusal(call, resolve("nets:build", "FACTORY"), "nets:build", "FACTORY") == (
        "FACTORY 'nets:build', called with no arguments, raised "
        "OSError: no weights: x.pt at nets.py:2 in build\n"
        'For the full traceback: python -c "import nets; nets.build()"'
    )


def test_a_candidate_function_that_raises_is_told_with_its_place(write):
    write("nets.py", "def change(model):\n    return model.nothing")
    function = resolve("nets:change", "--candidate")
    assert refusal(call, function, "nets:change", "--candidate", 7) == (
        "--candidate 'nets:change', called with the model, raised "
        "AttributeError: 'int' object has no attribute 'nothing' at nets.py:2 in change"
    )


def test_ctrl_c_is_nobodys_error():
    def build():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        call(build, "nets:build", "FACTORY")


def test_a_pair_is_a_model_and_its_inputs():
    assert model_and_inputs((abs, [1]), "nets:build", model_alone=False) == (abs, [1])
    assert model_and_inputs((abs, [1]), "nets:build", model_alone=True) == (abs, [1])
    assert model_and_inputs(abs, "nets:build", model_alone=True) == (abs, None)


@pytest.mark.parametrize(
    ("result", "told"),
    [
        (abs, "a builtin_function_or_method"),
        (None, "a NoneType"),
        ((abs, [1], 2), "a tuple of 3"),
        ([abs, [1]], "a list of 2"),
    ],
)
def test_what_is_no_pair_is_told(result, told):
    assert refusal(model_and_inputs, result, "nets:build", model_alone=False) == (
        f"FACTORY 'nets:build' returned {told}, not (model, inputs); return both, or give "
        "the inputs with --inputs module:function"
    )


def test_a_model_has_to_be_callable_and_made():
    assert refusal(model_and_inputs, (7, [1]), "nets:build", model_alone=False) == (
        "FACTORY 'nets:build' returned a model that is not callable: 7"
    )
    assert refusal(model_and_inputs, (int, [1]), "nets:build", model_alone=False) == (
        "FACTORY 'nets:build' returned a model that is a class; return an instance: <class 'int'>"
    )

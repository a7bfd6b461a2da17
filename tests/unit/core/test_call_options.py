"""A function that takes a struct of options is called, and described, by the struct's fields."""

from __future__ import annotations

import dataclasses
import inspect

import pytest

from paritas.core.call_options import takes_options


@dataclasses.dataclass(frozen=True)
class Options:
    folder: str = "here"
    _: dataclasses.KW_ONLY
    strict: bool = False
    steps: int = 1


@takes_options(Options)
def check(subject, options):
    return subject, options


def test_its_arguments_are_the_fields_of_the_struct():
    assert check("x") == ("x", Options())
    assert check("x", "there", strict=True) == ("x", Options("there", strict=True))
    assert check(subject="x", folder="there", steps=2) == ("x", Options("there", steps=2))


def test_a_function_without_a_subject_has_the_fields_alone():
    @takes_options(Options)
    def make(options):
        return options

    assert make() == Options()
    assert make("there", strict=True) == Options("there", strict=True)


def test_its_signature_shows_them():
    assert list(inspect.signature(check).parameters) == ["subject", "folder", "strict", "steps"]


@pytest.mark.parametrize(
    ("name", "advice"),
    [("stritc", "did you mean 'strict'?"), ("x", "known are folder, steps, strict, subject")],
)
def test_an_unknown_name_is_refused_with_the_one_that_was_meant(name, advice):
    with pytest.raises(TypeError) as caught:
        check("x", **{name: True})
    assert str(caught.value) == f"check() got an unexpected keyword argument {name!r}; {advice}"


def test_a_missing_subject_and_a_positional_keyword_are_refused_as_python_does():
    with pytest.raises(TypeError, match="missing a required argument: 'subject'"):
        check()
    with pytest.raises(TypeError, match="too many positional arguments"):
        check("x", "there", True)

from __future__ import annotations

import inspect
import pickle

import pytest

from paritas.core import errors
from paritas.core.errors import (
    ClusterLostError,
    MismatchError,
    ParitasError,
    UnsupportedTorchError,
    UsageError,
)


@pytest.mark.parametrize(
    ("error", "also"),
    [
        (UsageError, (ValueError,)),
        (MismatchError, (AssertionError, RuntimeError, ValueError)),
        (ClusterLostError, (ConnectionError,)),
        (UnsupportedTorchError, (RuntimeError,)),
    ],
)
def test_an_error_can_be_caught_by_either_name(error, also):
    assert issubclass(error, ParitasError)
    assert all(issubclass(error, builtin) for builtin in also)


def test_the_map_names_every_error():
    tree = {value.__name__ for value in vars(errors).values() if is_error(value)}
    assert tree <= set(errors.__doc__.split())


def is_error(value):
    return inspect.isclass(value) and issubclass(value, ParitasError)


def test_a_mismatch_survives_the_way_between_processes():
    error = MismatchError("1 of 2 outputs differs", {"findings": [1, 2]})
    error.add_note("seen on rank 3")

    copy = pickle.loads(pickle.dumps(error))

    assert type(copy) is MismatchError
    assert str(copy) == "1 of 2 outputs differs"
    assert copy.verdict == {"findings": [1, 2]}
    assert copy.__notes__ == ["seen on rank 3"]
    assert copy.args == error.args

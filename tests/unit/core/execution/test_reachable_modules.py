"""Which modules a callable computes with: their state is part of what it does."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import nn

from paritas.core.execution.reachable import reachable_modules, walk_reachable
from paritas.core.torch_private.dynamo import original_of

GLOBAL = nn.Linear(2, 2)


def uses_a_global(x):
    return GLOBAL(x)


class Owner(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(2, 2)

    def forward(self, x):
        return self.linear(x)

    def encode(self, x):
        return self.linear(x)


def apply(model, x):
    return model(x)


def closure_over(model):
    def run(x):
        return model(x)

    return run


def decorated(function):
    @functools.wraps(function)
    def wrapper(*args):
        return function(*args)

    return wrapper


MODEL = Owner()
REACHING = {
    "the module": MODEL,
    "a closure": closure_over(MODEL),
    "a closure around a closure": decorated(decorated(closure_over(MODEL))),
    "a bound method": MODEL.encode,
    "a closure over a bound method": decorated(MODEL.encode),
    "a partial with the module as argument": functools.partial(apply, MODEL),
    "a partial with the module by name": functools.partial(apply, model=MODEL),
    "a partial of the module": functools.partial(MODEL),
    "a partial of a bound method": functools.partial(MODEL.encode),
    "a partial of a closure": functools.partial(closure_over(MODEL)),
    "a compiled module": torch.compile(MODEL, backend="eager"),
    "a compiled closure": torch.compile(closure_over(MODEL), backend="eager"),
    "a compiled bound method": torch.compile(MODEL.encode, backend="eager"),
    "a closure over a compiled module": closure_over(torch.compile(MODEL, backend="eager")),
    "a closure over a compiled closure": closure_over(
        torch.compile(closure_over(MODEL), backend="eager")
    ),
    "a partial with a compiled module": functools.partial(
        apply, torch.compile(MODEL, backend="eager")
    ),
}


@pytest.mark.parametrize("function", REACHING.values(), ids=REACHING.keys())
def test_the_module_behind_a_callable_is_found(function):
    found = reachable_modules(function, original_of)
    assert list(found) == [""]
    assert found[""] is MODEL


def test_a_module_that_is_a_global_is_found():
    assert reachable_modules(uses_a_global, original_of) == {"": GLOBAL}


def test_two_modules_are_told_apart_by_their_names():
    encoder, decoder = Owner(), Owner()

    def run(x):
        return decoder(encoder(x))

    found = reachable_modules(run, original_of)
    assert found == {"encoder.": encoder, "decoder.": decoder}


def test_one_module_reached_twice_is_one():
    model = Owner()
    same = model

    def run(x):
        return same(model(x))

    assert reachable_modules(run, original_of) == {"": model}


@pytest.mark.parametrize("function", [torch.relu, len, apply, decorated(apply), object()])
def test_a_callable_without_modules_reaches_none(function):
    assert reachable_modules(function, original_of) == {}


def test_a_closure_that_is_not_filled_yet_is_no_error():
    def run(x):
        return later(x)

    assert reachable_modules(run, original_of) == {}
    later = torch.relu
    assert run(torch.ones(1)) == 1


def test_what_a_compiler_leaves_in_the_libraries_that_torch_needs_is_no_state():
    filelock = pytest.importorskip("filelock")  # of torch

    def program(x, lock=filelock.FileLock):
        return x, lock

    paths = [reached.path for reached in walk_reachable({}, program, {})]
    assert [path for path in paths if path.startswith(("class ", "global "))] == []

"""How long compilers have worked in this process, and on which program."""

from __future__ import annotations

import functools

import torch
from torch import nn

from paritas.core.torch_private.dynamo import compile_seconds, seconds_to_compile


class Doubled(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2


def unchanged(function):
    @functools.wraps(function)
    def wrapper(*args, **kwargs):
        return function(*args, **kwargs)

    return wrapper


class Decorated(nn.Module):
    @unchanged
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 3


def test_a_program_has_a_time_once_it_is_compiled_and_others_have_none():
    torch.compiler.reset()
    compiled, other = (torch.compile(each(), backend="aot_eager") for each in (Doubled, Decorated))
    before = compile_seconds()
    assert seconds_to_compile(compiled) is None
    compiled(torch.ones(2))
    seconds = seconds_to_compile(compiled)
    assert seconds is not None
    assert 0 < seconds <= 1.01 * (compile_seconds() - before)
    assert seconds_to_compile(other) is None
    other(torch.ones(2))
    assert seconds_to_compile(other) is not None


def test_the_backward_pass_is_part_of_it():
    torch.compiler.reset()
    compiled = torch.compile(Doubled(), backend="aot_eager")
    x = torch.ones(2, requires_grad=True)
    loss = compiled(x).sum()
    forward, before = seconds_to_compile(compiled), compile_seconds()
    loss.backward()
    backward = seconds_to_compile(compiled)
    assert forward is not None
    assert backward is not None
    assert backward > forward
    assert compile_seconds() > before


def test_after_a_reset_the_time_of_other_code_is_not_taken_for_it():
    def longer(x: torch.Tensor) -> torch.Tensor:
        for _ in range(50):
            x = x.sin()
        return x

    torch.compiler.reset()
    torch.compile(longer, backend="aot_eager")(torch.ones(2, requires_grad=True)).sum().backward()
    seconds = seconds_to_compile(longer)
    torch.compiler.reset()
    torch.compile(lambda x: x * 5, backend="eager")(torch.ones(2))  # under the same number
    assert seconds_to_compile(longer) == seconds


def test_what_is_no_torch_program_has_none():
    assert seconds_to_compile(len) is None
    assert seconds_to_compile(5) is None

"""Canaries for how a compiled program's backend is found again: see test_torch_canaries."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from paritas._torch import backends, compiled


def test_a_backend_is_known_by_its_name_and_its_function():
    assert backends.is_registered("inductor", backends.inductor_backend())
    assert not backends.is_registered("inductor", lambda graph, inputs: graph)
    assert not backends.is_registered("no such backend", backends.inductor_backend())


@pytest.mark.parametrize("dynamic", [None, False, True])
def test_what_a_compile_was_told_of_dynamic_shapes_can_be_read_back(dynamic):
    module = nn.Linear(2, 2)
    assert compiled.dynamic_of(torch.compile(module, dynamic=dynamic)) is dynamic
    assert compiled.dynamic_of(torch.compile(torch.sin, dynamic=dynamic)) is dynamic
    assert compiled.dynamic_of(module) is None

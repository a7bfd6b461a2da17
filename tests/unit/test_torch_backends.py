"""The canary of `paritas._torch.backends`; its place is `test_torch_canaries.py`."""

from __future__ import annotations

import inspect

import pytest
import torch

from paritas._torch import backends
from paritas.errors import UnsupportedTorchError


def test_inductor_is_a_function_of_a_graph_and_example_inputs():
    backend = backends.inductor_backend()
    inspect.signature(backend).bind(object(), [])
    assert "inductor" in torch.compiler.list_backends()


def test_a_torch_without_inductor_is_unsupported(monkeypatch):
    def refuse(name):
        raise RuntimeError(f"Invalid backend: {name!r}")

    monkeypatch.setattr(backends.torch._dynamo, "lookup_backend", refuse)
    with pytest.raises(UnsupportedTorchError, match="does not give its backend 'inductor'"):
        backends.inductor_backend()
    monkeypatch.setattr(backends.torch._dynamo, "lookup_backend", lambda name: None)
    with pytest.raises(UnsupportedTorchError, match="gives as its backend 'inductor' None"):
        backends.inductor_backend()

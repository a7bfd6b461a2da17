"""What a candidate's process shows about the candidate."""

from __future__ import annotations

import ctypes
import importlib.util
import operator
import shutil
import sys
from typing import TYPE_CHECKING

import pytest
import torch

from paritas.kernels.messages import Call
from paritas.kernels.observing import Observer
from paritas.kernels.outside import Audit, OwnCode
from paritas.kernels.wire import encode

if TYPE_CHECKING:
    from pathlib import Path

    from paritas.core.execution.subjects import Inputs

LIBRARY = getattr(importlib.util.find_spec("_ctypes"), "origin", None)


@pytest.mark.skipif(
    sys.platform != "linux" or not str(LIBRARY).endswith(".so"),
    reason="needs /proc and a shared library to copy",
)
def test_a_library_is_seen_however_it_is_loaded(tmp_path: Path) -> None:
    own_code = OwnCode()
    assert own_code.new_libraries() == []
    shutil.copy(str(LIBRARY), tmp_path / "own_kernels.so")
    ctypes.CDLL(str(tmp_path / "own_kernels.so"))
    assert own_code.new_libraries() == ["own_kernels.so"]


def test_inputs_that_shared_memory_do_not_overwrite_each_other() -> None:
    observer = Observer(lambda a, b: (a, b), "cpu", Audit(), OwnCode())
    shared = torch.zeros(3)

    def given(*args: torch.Tensor, reuse: str) -> Inputs:
        order = Call(inputs=encode((list(args), {})), reuse=reuse)
        return observer._make_inputs(order)

    old = given(shared, shared, reuse="")
    alike = given(torch.ones(3), torch.ones(3), reuse="same tensors")
    assert all(map(operator.is_, alike.args, old.args))
    other = given(torch.ones(3), torch.full((3,), 2.0), reuse="same tensors")
    assert [one[0].item() for one in other.args] == [1.0, 2.0]

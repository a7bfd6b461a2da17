"""Which real ranks are possible, and the messages if they are not."""

from __future__ import annotations

import pytest
import torch
from torch import distributed

from paritas.core.errors import UsageError
from paritas.partition import TensorInfo, VerifyConfig, check_partition
from paritas.sharding.operators.recipe_checks import check_confirm

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
NEG = VerifyConfig("torch.neg", [TensorInfo("shape", (4, 6))], {}, 1, [{"idx": 0, "dim": 0}])


@pytest.fixture
def _two_gpus(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(distributed, "is_nccl_available", lambda: True)


@pytest.mark.usefixtures("_two_gpus")
def test_nccl_needs_a_gpu_for_each_rank():
    check_confirm("nccl", CUDA, 2)
    with pytest.raises(UsageError, match=r"one GPU for each of 4 ranks, but torch sees 2: .* gloo"):
        check_confirm("nccl", CUDA, 4)


@pytest.mark.usefixtures("_two_gpus")
def test_nccl_needs_tensors_on_gpus_and_a_torch_that_has_it(monkeypatch):
    with pytest.raises(UsageError, match=r"device is 'cpu': use --device cuda \(device='cuda'\)"):
        check_confirm("nccl", CPU, 2)
    monkeypatch.setattr(distributed, "is_nccl_available", lambda: False)
    with pytest.raises(UsageError, match="built without NCCL: confirm with gloo"):
        check_confirm("nccl", CUDA, 2)


def test_gloo_needs_nothing_and_other_names_are_refused():
    check_confirm(None, CPU, 64)
    check_confirm("gloo", CPU, 64)
    check_confirm("gloo", CUDA, 64)
    with pytest.raises(UsageError, match="confirm must be 'gloo', 'nccl' or None, got 'mpi'"):
        check_confirm("mpi", CPU, 2)


def test_the_python_call_takes_a_device_and_refuses_what_is_not_there():
    assert check_partition(NEG, device="cpu").passed
    with pytest.raises(UsageError, match="device='abacus' cannot be used: "):
        check_partition(NEG, device="abacus")
    with pytest.raises(UsageError, match="NCCL needs tensors on GPUs"):
        check_partition(NEG, confirm="nccl")

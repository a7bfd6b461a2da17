import pytest
import torch
from torch import nn

from paritas.core.torch_private import tensors
from paritas.core.torch_private.tensors import (
    bytes_asked,
    copy_on_write,
    free_bytes,
    hold_shared,
    is_out_of_memory,
    is_shared,
)


@pytest.fixture
def container(tmp_path, monkeypatch):
    """A container that uses 6 of 8 MiB, one of them for files that can be read again."""
    monkeypatch.setattr(tensors, "CONTAINER", tmp_path)
    (tmp_path / "memory.max").write_text(f"{8 << 20}\n")
    (tmp_path / "memory.current").write_text(f"{6 << 20}\n")
    (tmp_path / "memory.stat").write_text(f"anon 5242880\ninactive_file {1 << 20}\n")
    return tmp_path


def test_no_more_is_free_than_is_left_to_the_container(container):
    assert free_bytes(torch.device("cpu")) == 3 << 20


@pytest.mark.parametrize("missing", ["memory.max", "memory.stat"])
def test_without_a_limit_the_kernel_s_estimate_counts(container, missing):
    (container / missing).unlink()
    assert free_bytes(torch.device("cpu")) > 8 << 20
    (container / "memory.max").write_text("max\n")
    assert free_bytes(torch.device("cpu")) > 8 << 20


def test_no_more_is_free_than_is_left_of_the_address_space(monkeypatch):
    resource = pytest.importorskip("resource")
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1 << 20, 1 << 20))
    assert free_bytes(torch.device("cpu")) == 0


def test_a_compiler_that_runs_out_of_memory_is_out_of_memory():
    def exhausted(graph, inputs):
        raise torch.OutOfMemoryError("Tried to allocate 2.00 GiB.")

    compiled = torch.compile(lambda x: x + 1, backend=exhausted)
    with pytest.raises(Exception, match="Tried to allocate") as caught:
        compiled(torch.ones(2))
    assert not isinstance(caught.value, torch.OutOfMemoryError), "it is wrapped"
    caught.value.__cause__ = None  # as Inductor raises it
    assert is_out_of_memory(caught.value)
    assert bytes_asked(caught.value) == 2 << 30


def test_other_errors_are_not():
    assert not is_out_of_memory(RuntimeError("shape mismatch"))
    assert bytes_asked(RuntimeError("shape mismatch")) is None


def test_a_copy_shares_memory_until_one_side_writes():
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))
    copies = [copy_on_write(model) for _ in range(2)]
    assert all(is_shared(one) for made in copies for one in made.parameters())
    before = model[0].weight.detach().clone()
    with torch.no_grad():
        copies[0][0].weight.add_(1)
        copies[1][0].bias.numpy()[:] = 7
    assert torch.equal(model[0].weight, before)
    assert torch.equal(copies[1][0].weight, before)
    assert torch.equal(copies[0][0].weight, before + 1)
    assert not model[0].bias.eq(7).any()
    assert is_shared(copies[1][0].weight)


def test_what_is_held_keeps_the_memory_that_every_copy_leaves():
    model = nn.Linear(8, 8)
    copies = [model, copy_on_write(model), copy_on_write(model)]
    before = model.weight.detach().clone()
    held = hold_shared(model)
    with torch.no_grad():
        for number, made in enumerate(copies, start=1):
            made.weight.fill_(number)
    assert [made.weight.sum().item() for made in copies] == [64.0, 128.0, 192.0]
    assert all(is_shared(one) for one in held)
    assert torch.equal(held[0], before)
    assert hold_shared(nn.Linear(2, 2)) == []  # no copy shares its memory


def test_what_cannot_be_shared_is_copied():
    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            flat = torch.randn(8)
            self.first, self.last = nn.Parameter(flat[:4]), nn.Parameter(flat[4:])
            self.array = nn.Parameter(torch.from_numpy(torch.ones(4).numpy().copy()))
            self.frozen = nn.Parameter(torch.ones(2), requires_grad=False)
            self.tied = self.frozen
            self.register_buffer("whole", torch.arange(4.0))
            self.register_buffer("part", self.whole[:2])
            self.register_buffer("empty", torch.empty(3, device="meta"))

    model = Odd()
    made = copy_on_write(model)
    for name, tensor in model.state_dict().items():
        assert tensor.is_meta or torch.equal(made.state_dict()[name], tensor)
    assert made.tied is made.frozen
    assert not made.frozen.requires_grad
    with torch.no_grad():
        for tensor in (*model.parameters(), model.whole):
            tensor.zero_()
    assert made.first.any()
    assert made.array.all()
    made.whole.fill_(9)  # views of one buffer stay views of one buffer
    assert made.part.tolist() == [9, 9]
    assert not model.part.any()

import pytest
import torch

from paritas._torch import memory
from paritas._torch.memory import bytes_asked, free_bytes, is_out_of_memory


@pytest.fixture
def container(tmp_path, monkeypatch):
    """A container that uses 6 of 8 MiB, one of them for files that can be read again."""
    monkeypatch.setattr(memory, "CONTAINER", tmp_path)
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

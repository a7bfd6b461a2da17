"""The C++ kernels of a lifted run are built in one call of the compiler."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from paritas import Status, VerifyConfig, verify
from paritas.core.torch_private import kernel_units
from paritas.verification import approximations

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty cache of Inductor. Kernels are built by one thread, as in every test."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    torch.compiler.reset()
    tests = kernel_units._asked.set(False)  # tests ask for it always
    yield tmp_path
    kernel_units._asked.reset(tests)


def libraries(cache: Path) -> list[str]:
    """The libraries that the compiler made, by how they were built: `main` is one kernel."""
    return sorted(path.suffixes[-2] for path in cache.rglob("*.so") if len(path.suffixes) > 1)


def two_kernels(x: torch.Tensor) -> torch.Tensor:
    return (x.sin() @ x).cos()


def slightly_off(x: torch.Tensor) -> torch.Tensor:
    return (x.sin() @ x).cos() * (1 + 1e-7)


QUIET = VerifyConfig(raise_on_mismatch=False)


def test_the_lifted_kernels_share_a_unit_and_still_show_a_fault(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Other inputs would be compiled for as well.
    monkeypatch.setattr(approximations, "MOST_SECONDS", -1.0)
    x = torch.randn(8, 8, generator=torch.Generator().manual_seed(0))
    verdict = verify([x], slightly_off, torch.compile(two_kernels), QUIET)
    assert libraries(cache) == [".main", ".main", ".unit"]
    assert (cache / "paritas_stand_ins" / "libtorch_cpu.so").exists()
    (finding,) = [one for one in verdict.findings if not one.status.passes()]
    assert finding.status is Status.DIFFERENT
    assert "in float64" in finding.reason


def test_kernels_that_cannot_share_a_unit_are_built_by_torch(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernel_units, "_unit_source", lambda _: "this is not C++\n")
    # Of another shape than above: torch keeps the kernels that a process has loaded.
    x = torch.randn(6, 6, generator=torch.Generator().manual_seed(0))
    with kernel_units.one_unit():
        found = torch.compile(two_kernels)(x)
    assert libraries(cache) == [".main", ".main"]
    torch.testing.assert_close(found, two_kernels(x))


def test_a_unit_that_cannot_be_loaded_is_linked_with_torchs_own_libraries(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tried = []

    def load(_: Any, options: str) -> None:
        tried.append(options)
        if options == "stand-ins":
            raise ImportError("undefined symbol")

    monkeypatch.setattr(kernel_units, "with_stand_ins", lambda _: "stand-ins")
    monkeypatch.setattr(kernel_units, "_load_unit", load)
    part: Any = SimpleNamespace(options="torch's own")
    kernel_units._build_unit([part])
    assert tried == ["stand-ins", "torch's own"]

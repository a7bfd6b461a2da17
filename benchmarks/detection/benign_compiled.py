"""Whole programs through torch's own compiler, and on other numbers of threads.

Each costs seconds, where a rewrite costs milliseconds; so they are listed apart.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

    from paritas.mutants.programs import Program

# What is set -> inductor's options. Each makes other kernels of the same graph.
OPTIONS: dict[str, dict[str, Any]] = {
    "inductor": {},
    "inductor_unfused": {"max_fusion_size": 1},
    "inductor_emulating_casts": {"emulate_precision_casts": True},
    "inductor_scalar": {"cpp.simdlen": 1},
    "inductor_freezing_layouts": {"layout_optimization": False},
}
BACKENDS = ("aot_eager", "aot_eager_decomp_partition")


@dataclasses.dataclass(frozen=True)
class OnThreads:
    """A program run on so many threads, which changes how reductions are split."""

    program: Callable[..., Any]
    threads: int

    def __call__(self, *inputs: Any) -> Any:
        """What the program gives; the number of threads is as before afterwards."""
        before = torch.get_num_threads()
        torch.set_num_threads(self.threads)
        try:
            return self.program(*inputs)
        finally:
            torch.set_num_threads(before)


def compiled_variants(program: Program) -> dict[str, Callable[..., Any]]:
    """Candidates that compute what the program computes; each is compiled on its first call."""
    variants: dict[str, Callable[..., Any]] = {
        f"threads_{count}": OnThreads(program.module, count) for count in (1, 2)
    }
    for backend in BACKENDS:
        variants[backend] = torch.compile(program.module, backend=backend)
    for name, options in OPTIONS.items():
        variants[name] = torch.compile(program.module, options=dict(options))
    return variants

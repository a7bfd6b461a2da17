"""Whole programs through torch's own compiler, and on another number of threads.

Each costs seconds, where a rewrite costs milliseconds; so they are drawn apart, by `compiled`.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

# Random numbers come from eager's stream, as whoever compares a compiled program has to set it.
SAME_DRAWS = {"fallback_random": True}
PLAIN = "inductor"
# What is set -> Inductor's options. Each makes other kernels of the same graph.
OPTIONS: dict[str, dict[str, Any]] = {
    PLAIN: {},
    "inductor_unfused": {"max_fusion_size": 1},
    "inductor_emulating_casts": {"emulate_precision_casts": True},
    "inductor_scalar": {"cpp.simdlen": 1},
    "inductor_narrow_vectors": {"cpp.simdlen": 256},
    "inductor_keeping_layouts": {"layout_optimization": False},
    "inductor_without_patterns": {"pattern_matcher": False},
    "inductor_two_pass_softmax": {"online_softmax": False},
    "inductor_contracting": {"cpp.enable_floating_point_contract_flag": "fast"},
}
DYNAMIC = "inductor_dynamic"
BACKENDS = ("aot_eager", "aot_eager_decomp_partition")
THREADS = {"threads_2": 2}
# Every variant, the plain compiler first.
VARIANTS = (*OPTIONS, DYNAMIC, *BACKENDS, *THREADS)


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


def compiled_variant(module: Callable[..., Any], name: str) -> Callable[..., Any]:
    """A candidate that computes what the module computes; it is compiled on its first call.

    What was compiled before is forgotten: Dynamo gives up on a function that it has compiled eight
    times, and runs it eagerly without a word, which would make every variant after that no variant.
    """
    torch.compiler.reset()
    if name in THREADS:
        return OnThreads(module, THREADS[name])
    if name in BACKENDS:
        return torch.compile(module, backend=name)
    if name == DYNAMIC:
        return torch.compile(module, dynamic=True, options=dict(SAME_DRAWS))
    return torch.compile(module, options={**SAME_DRAWS, **OPTIONS[name]})

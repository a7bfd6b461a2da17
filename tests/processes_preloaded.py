"""What `processes` forks from: torch with its compilers, and paritas, imported and tried once."""

from __future__ import annotations

import gc
import os

import torch
import torch._dynamo  # noqa: TID251  (the import alone is wanted)
import torch._inductor.compile_fx  # noqa: TID251
import torch.distributed.run
import torch.distributed.tensor
import torch.utils.data

import paritas.checks.verify
import paritas.cli
import paritas.cli.running
import paritas.comparison.compare
import paritas.recording.capture
import paritas.reports.terminal  # noqa: F401
import processes

torch.set_num_threads(1)
if os.environ.get("TORCHINDUCTOR_COMPILE_THREADS") == "1":
    # The first that is compiled takes most of a second more than others, for what is imported and
    # looked up then. With more threads there would be some now, and no fork may have any.
    torch.compile(torch.sin)(torch.ones(1, requires_grad=True)).backward()
    torch.compiler.reset()
processes.build_kernels_together()
# What is here stays: the collector of a forked process would copy all of it to look at it.
gc.collect()
gc.freeze()

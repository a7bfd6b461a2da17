"""What `processes` forks from: torch with its compilers, and paritas, imported and tried once."""

from __future__ import annotations

import functools
import gc
import importlib
import os
import pkgutil

import torch
import torch._dynamo  # noqa: TID251  (the import alone is wanted)
import torch._inductor.compile_fx  # noqa: TID251
import torch.distributed.run
import torch.distributed.tensor
import torch.utils.data

import paritas
import processes

# Every module of paritas: each of the workers and of the processes would import most of them.
for module in pkgutil.walk_packages(paritas.__path__, "paritas."):
    if not module.name.endswith("__main__"):
        importlib.import_module(module.name)
torch.set_num_threads(1)
# A fork has lost the threads of torch's pool. The next call of this function makes a new one, which
# each thread that computes calls: of two that do so at once, one would find no pool.
os.register_at_fork(after_in_child=functools.partial(torch.set_num_threads, 1))
if os.environ.get("TORCHINDUCTOR_COMPILE_THREADS") == "1":
    # The first that is compiled takes most of a second more than others, for what is imported and
    # looked up then. With more threads there would be some now, and no fork may have any.
    torch.compile(torch.sin)(torch.ones(1, requires_grad=True)).backward()
    torch.compiler.reset()
processes.build_kernels_together()
# What is here stays: the collector of a forked process would copy all of it to look at it.
gc.collect()
gc.freeze()

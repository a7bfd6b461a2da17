"""What `processes` forks from: torch with its compilers, and paritas, imported and not yet used."""

from __future__ import annotations

import torch
import torch._dynamo  # noqa: TID251  (the import alone is wanted)
import torch._inductor.compile_fx  # noqa: TID251
import torch.distributed.run
import torch.distributed.tensor
import torch.utils.data

import paritas.checks.verify
import paritas.cli
import paritas.cli.run_ending
import paritas.comparison.compare
import paritas.recording.capture  # noqa: F401

torch.set_num_threads(1)

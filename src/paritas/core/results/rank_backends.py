"""How ranks that are processes communicate: which backend for which device, and what it can do."""

from __future__ import annotations

import dataclasses
from typing import Literal, get_args

BackendName = Literal["gloo", "nccl"]
BACKEND_NAMES: tuple[BackendName, ...] = get_args(BackendName)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RankBackend:
    """A backend of `torch.distributed`.

    Attributes:
        name: as torch calls it.
        device: the type of the devices between which it sends.
        group: what `init_process_group` takes.
        needs_own_device: each rank needs a device of its own.
    """

    name: BackendName
    device: str
    group: str
    needs_own_device: bool


GLOO = RankBackend(name="gloo", device="cpu", group="gloo", needs_own_device=False)
# Metadata that ranks exchange before a collective lies on the host, and traces travel between
# hosts: there is gloo beside NCCL.
NCCL = RankBackend(name="nccl", device="cuda", group="cpu:gloo,cuda:nccl", needs_own_device=True)
RANK_BACKENDS = {backend.name: backend for backend in (GLOO, NCCL)}


def backend_of_group(described: str) -> RankBackend:
    """What sends the tensors of a group, by what `get_backend` says: `cpu:gloo,cuda:nccl`.

    Simulated ranks, and those of other backends, send from the host as gloo does.
    """
    return NCCL if NCCL.name in described else GLOO

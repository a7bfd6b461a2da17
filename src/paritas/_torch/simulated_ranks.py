"""Ranks without processes: as tensors that hold all ranks' values, and as threads."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import sys
import threading
import time
from typing import TYPE_CHECKING, Any

import torch
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh

from paritas.errors import UnsupportedTorchError, UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch import Tensor
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["ThreadOutcome", "of_ranks", "parts_of", "run_in_threads", "simulated_ranks"]

_SIMULATION = "torch.distributed._local_tensor"
_FAKE_GROUP = "torch.testing._internal.distributed.fake_pg"
_C10D, _ISOLATION = "torch._C._distributed_c10d", "_set_thread_isolation_mode"
_MODES = "torch.utils._python_dispatch"
_THREADED_GROUP = "torch.testing._internal.distributed.multi_threaded_pg"


def _part(module: str, *names: str) -> Any:
    """A private module of torch, once it is known to have what is needed of it."""
    try:
        found = importlib.import_module(module)
    except ImportError as error:
        raise UnsupportedTorchError(
            f"torch {torch.__version__} has no {module} ({error}): "
            "confirm on real ranks (gloo) instead"
        ) from None
    missing = [name for name in names if not hasattr(found, name)]
    if missing:
        raise UnsupportedTorchError(
            f"{module} of torch {torch.__version__} has no {', '.join(missing)}: "
            "confirm on real ranks (gloo) instead"
        )
    return found


def _refuse_a_group() -> None:
    if not distributed.is_available():
        raise UnsupportedTorchError(f"torch {torch.__version__} is built without distributed")
    if distributed.is_initialized():
        raise UsageError(
            "this process is already a rank of a process group: simulated ranks need one that is "
            "not; call torch.distributed.destroy_process_group() first"
        )


# --- tensors that hold the values of all ranks ----------------------------------------------------


@contextlib.contextmanager
def simulated_ranks(ranks: int) -> Iterator[DeviceMesh]:
    """Within it, tensors made by `of_ranks` are computed with once for each rank.

    `get_rank()` is 0 for all of them: a program that asks for its rank is not simulated.
    """
    _refuse_a_group()
    simulation = _part(_SIMULATION, "LocalTensor", "LocalTensorMode")
    store = _part(_FAKE_GROUP, "FakeStore").FakeStore()
    with _same_excepthook():
        distributed.init_process_group("fake", rank=0, world_size=ranks, store=store)
        try:
            with simulation.LocalTensorMode(ranks):
                yield init_device_mesh("cpu", (ranks,))
        finally:
            distributed.destroy_process_group()


@contextlib.contextmanager
def _same_excepthook() -> Iterator[None]:
    """A process group puts its own hook in the place of the user's, and leaves it there."""
    hook = sys.excepthook
    try:
        yield
    finally:
        sys.excepthook = hook


def of_ranks(parts: Sequence[Tensor]) -> Tensor:
    """One tensor that is, on each rank, that rank's part."""
    simulation = _part(_SIMULATION, "LocalTensor")
    made: Tensor = simulation.LocalTensor(dict(enumerate(part.detach() for part in parts)))
    return made


def parts_of(tensor: Tensor, ranks: int) -> list[Tensor]:
    """What it is on each rank."""
    held = getattr(tensor, "_local_tensors", None)
    if held is None:
        return [tensor.detach()] * ranks
    return [held[rank].detach() for rank in range(ranks)]


# --- threads that are ranks -----------------------------------------------------------------------


@dataclasses.dataclass
class ThreadOutcome:
    """What became of the program of one rank.

    Attributes:
        value: what it gave.
        error: what it raised.
        done: whether it came to an end by itself, in time.
    """

    value: Any = None
    error: BaseException | None = None
    done: bool = False


def run_in_threads(
    program: Callable[[int], Any], ranks: int, timeout: float
) -> list[ThreadOutcome]:
    """Run a program once per rank, each in a thread in which `get_rank()` is that rank."""
    _refuse_a_group()
    names = ("ProcessLocalGroup", "_install_threaded_pg", "_uninstall_threaded_pg")
    group = _part(_THREADED_GROUP, *names)
    isolate = _part(_C10D, _ISOLATION)._set_thread_isolation_mode
    outcomes = [ThreadOutcome() for _ in range(ranks)]
    store = _part(_C10D, "HashStore").HashStore()
    hook, flags = sys.excepthook, _mode_flags()
    group._install_threaded_pg()
    isolate(True)  # otherwise groups of one name in several threads are one group
    try:
        threads = [
            threading.Thread(
                target=_be_rank, args=(program, rank, outcomes, store, group), daemon=True
            )
            for rank in range(ranks)
        ]
        for thread in threads:
            thread.start()
        end = time.monotonic() + timeout
        for thread in threads:
            thread.join(max(0.0, end - time.monotonic()))
        if any(thread.is_alive() for thread in threads):
            # Those that wait for each other are let go; one that is busy cannot be ended.
            group.ProcessLocalGroup.exception_handle(None)
            for thread in threads:
                thread.join(0.5)
    finally:
        sys.excepthook = hook  # the group puts its own there
        _set_mode_flags(flags)
        isolate(False)
        group.ProcessLocalGroup.reset()
        group._uninstall_threaded_pg()
    return outcomes


def _mode_flags() -> dict[str, bool]:
    """What torch notes for the whole process of the dispatch modes that are entered."""
    module = _part(_MODES, "TorchDispatchMode")
    return {name: value for name, value in vars(module).items() if name.startswith("_is_in_")}


def _set_mode_flags(flags: dict[str, bool]) -> None:
    """Put them back.

    A mode restores on its exit what it found on its entry. Where threads come and go in another
    order, the last of them leaves the process in a mode for good, and Dynamo compiles otherwise.
    """
    module = _part(_MODES, "TorchDispatchMode")
    for name, value in flags.items():
        setattr(module, name, value)
    tell = getattr(module, "set_is_in_mode_without_ignore_compile_internals", None)
    if tell is not None:
        tell(flags.get("_is_in_any_mode_without_ignore_compile_internals", False))


def _be_rank(
    program: Callable[[int], Any],
    rank: int,
    outcomes: list[ThreadOutcome],
    store: Any,
    group: Any,
) -> None:
    outcome = outcomes[rank]
    try:
        distributed.init_process_group("threaded", rank=rank, world_size=len(outcomes), store=store)
        outcome.value = program(rank)
        outcome.done = True
    except Exception as error:  # noqa: BLE001  (told to who asked)
        outcome.error, outcome.done = error, True
        group.ProcessLocalGroup.exception_handle(error)
    except SystemExit:
        # How a thread is let go that waits for a rank which has failed.
        pass
    finally:
        with contextlib.suppress(Exception):
            distributed.destroy_process_group()

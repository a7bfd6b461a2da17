"""The program under its plan, on ranks: threads of this process, or processes of their own."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import os
import pickle
import threading
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import distributed

from paritas._torch.simulated_ranks import run_in_threads
from paritas.errors import UsageError
from paritas.partition.plans.data import check_batches
from paritas.partition.plans.rank_work import (
    RankFailedError,
    Task,
    empty_trace,
    train_as_rank,
    work_alone,
)
from paritas.partition.plans.training import Manner, build_model, same_surroundings
from paritas.partition.ranks.pool import (
    LET_GO,
    MOST_RANKS,
    LostRankError,
    RankPool,
    Told,
    warm_pool,
)
from paritas.partition.ranks.starting import start_method

if TYPE_CHECKING:
    from paritas._torch.simulated_ranks import ThreadOutcome
    from paritas.partition.plans.program import Program
    from paritas.partition.plans.traces import Trace

__all__ = ["LET_GO", "TEAMS", "Team", "device_here", "run_ranks"]

Team = Literal["simulated", "gloo", "here"]
TEAMS = ("simulated", "gloo", "here")

_STUCK = "it waits for a collective that not all ranks take part in, or is still busy"


def run_ranks(
    program: Program,
    team: Team = "simulated",
    *,
    wide: bool = False,
    watch_modules: bool = False,
    timeout: float = 120.0,
) -> list[Trace]:
    """Train the model under its plan, and give what each rank did, in the order of ranks.

    Args:
        team: `simulated` ranks are threads of this process, `gloo` ranks processes that are
            started for it; `here` this process is already a rank, and every rank calls this.
        wide: model, batches and default dtype in float64.
        watch_modules: in the last step, note what every module gives and the gradients that arrive
            there and leave it.
        timeout: seconds after which ranks that have not ended are given up. What they and those
            that raised had done is in their traces, with the error.

    Raises:
        UsageError: the mesh does not fit, a batch cannot be split, or the program cannot be sent.
    """
    if team not in TEAMS:
        raise UsageError(f"ranks={team!r}: known are {', '.join(TEAMS)}")
    if not distributed.is_available():
        raise UsageError(f"torch {torch.__version__} is built without torch.distributed")
    check_batches(program)
    _load_what_ranks_need()
    manner = Manner(wide=wide, watch_modules=watch_modules)
    if team == "here":
        return _run_here(program, manner, timeout)
    if program.ranks > MOST_RANKS:
        raise UsageError(f"mesh of {program.ranks} ranks: at most {MOST_RANKS} are started here")
    run = _run_threads if team == "simulated" else _run_processes
    return run(program, manner, timeout)


def _load_what_ranks_need() -> None:
    """Ahead of their time: it takes seconds, once here or in each process that is started."""
    for name in ("fsdp", "tensor.parallel"):
        importlib.import_module(f"torch.distributed.{name}")


# --- threads --------------------------------------------------------------------------------------


def _run_threads(program: Program, manner: Manner, timeout: float) -> list[Trace]:
    manner = dataclasses.replace(manner, alone=False)
    traces = [empty_trace(program, rank) for rank in range(program.ranks)]
    with same_surroundings(manner):
        models = [build_model(program, manner) for _ in traces]
        outcomes = run_in_threads(
            lambda rank: train_as_rank(program, models[rank], manner, traces[rank]),
            program.ranks,
            timeout,
        )
    failed = any(outcome.error is not None for outcome in outcomes)
    return [
        _ended(trace, outcome, timeout, failed=failed)
        for trace, outcome in zip(traces, outcomes, strict=True)
    ]


def _ended(trace: Trace, outcome: ThreadOutcome, timeout: float, *, failed: bool) -> Trace:
    """The trace as it is now: a thread that could not be ended may go on with its own."""
    if outcome.done and outcome.error is None:
        return trace
    if outcome.error is not None:
        error = trace.error or f"{type(outcome.error).__name__}: {outcome.error}"
    else:
        error = LET_GO if failed else f"had {timeout:g} s: no answer; {_STUCK}"
    return dataclasses.replace(trace, error=error, steps=list(trace.steps))


# --- processes ------------------------------------------------------------------------------------

# A forked process has all of its parent's memory: what cannot be pickled need not be.
_INHERITED: dict[str, Task] = {}


def _run_processes(program: Program, manner: Manner, timeout: float) -> list[Trace]:
    task, ranks = Task(program, manner), program.ranks
    try:
        if start_method() == "fork":
            _INHERITED["task"] = task
            with RankPool(ranks, "fork") as pool:
                told = pool.run(train_under_plan, [None] * ranks, timeout)
        else:
            _check_sendable(program)
            told = warm_pool(ranks).run(work_alone, [task] * ranks, timeout)
    except LostRankError as error:
        lost = error.ranks or range(ranks)
        reason = f"{error}; {_STUCK}" if "no answer" in str(error) else str(error)
        told = [
            Told(error=reason) if rank in lost else _after_loss(error.told.get(rank))
            for rank in range(ranks)
        ]
    finally:
        _INHERITED.clear()
    return [_answered(program, rank, one) for rank, one in enumerate(told)]


def _after_loss(told: Told | None) -> Told:
    """What a rank raises whose peer is gone says nothing more than that."""
    if told is None:
        return Told(error=LET_GO)
    return told if told.error is None else Told(error=LET_GO)


def train_under_plan(rank: int, ranks: int, _: None) -> Trace:
    """Do, in a forked process, what its parent had in mind."""
    return work_alone(rank, ranks, _INHERITED["task"])


def _answered(program: Program, rank: int, told: Told) -> Trace:
    trace: Trace = empty_trace(program, rank) if told.value is None else told.value
    if told.error is not None and trace.error is None:
        return dataclasses.replace(trace, error=told.error)
    return trace


def _check_sendable(program: Program) -> None:
    for field in ("model", "plan", "loss", "optimizer", "batches"):
        value = getattr(program, field)
        try:
            if b"__main__" in pickle.dumps(value):
                raise pickle.PicklingError("part of it is defined in __main__")
        except Exception as error:  # noqa: BLE001  (what a user's object raises is its own)
            raise UsageError(
                f"the {field} cannot be sent to another process ({type(error).__name__}: "
                f"{error!s:.120}): define it at the top of a module, or use simulated ranks"
            ) from None


# --- this process is a rank -----------------------------------------------------------------------


def device_here() -> torch.device | None:
    """Where a rank of the present group computes: an accelerator, or None for the host."""
    backend = str(distributed.get_backend())
    accelerator = torch.accelerator.current_accelerator() if backend != "gloo" else None
    if accelerator is None or accelerator.type == "cpu":
        return None
    index = torch.accelerator.current_device_index()
    local = int(os.environ.get("LOCAL_RANK", "0"))
    if index == 0 and local < torch.accelerator.device_count():
        index = local  # torchrun says which, and the program has not chosen
    return torch.device(accelerator.type, index)


def _run_here(program: Program, manner: Manner, timeout: float) -> list[Trace]:
    if not distributed.is_initialized():
        raise UsageError(
            "this process is no rank of a process group: start it with torchrun and call "
            "torch.distributed.init_process_group first, or use simulated ranks"
        )
    world, rank = distributed.get_world_size(), distributed.get_rank()
    if world != program.ranks:
        shown = " x ".join(f"{axis}={size}" for axis, size in program.mesh.items())
        raise UsageError(
            f"a mesh of {program.ranks} ranks ({shown}) in a group of {world}: make them equal"
        )
    # Of its own, so that ranks can tell each other how it went while others are still stuck.
    messages = distributed.new_group(backend="gloo")
    manner = dataclasses.replace(manner, device=device_here())
    trace = _in_time(rank, Task(program, manner), timeout)
    gathered: list[Any] = [None] * world
    distributed.all_gather_object(gathered, trace, group=messages)
    distributed.destroy_process_group(messages)
    return gathered


def _in_time(rank: int, task: Task, timeout: float) -> Trace:
    """Work in a thread, which can be left where it is if it never ends."""
    trace = empty_trace(task.program, rank)

    def work() -> None:
        if task.manner.device is not None:
            torch.accelerator.set_device_index(task.manner.device.index or 0)
        with contextlib.suppress(RankFailedError):  # it is in the trace
            work_alone(rank, task.program.ranks, task, trace)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(timeout)
    if not thread.is_alive():
        return trace
    error = f"had {timeout:g} s: no answer; {_STUCK}"
    return dataclasses.replace(trace, error=error, steps=list(trace.steps))

"""Train under a plan, save a checkpoint, load it on other ranks, and train on.

The checkpoint is one of `torch.distributed.checkpoint`, with the parameters, the buffers and the
state of the optimizer. The model that loads it has other numbers before, so that what is not
loaded is not right by chance. On one device, the training is not interrupted.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import itertools
import tempfile
from typing import TYPE_CHECKING, Any

import msgspec
import torch
from torch import nn

from paritas.core.errors import in_one_line
from paritas.core.results.findings import Coverage, Verdict
from paritas.sharding.plans.plan import PipelinedModel
from paritas.sharding.plans.shipped_plans import UnsupportedPlanError
from paritas.sharding.plans.traces import StepTrace

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from paritas.core.placement.rank_pieces import RankPiece
    from paritas.sharding.plans.plan import ParallelProgram
    from paritas.sharding.plans.traces import Trace

# --- Saving and loading, on a rank ----------------------------------------------------------------


def save_state(model: nn.Module, optimizer: torch.optim.Optimizer, folder: str) -> None:
    """Save what this rank holds."""
    from torch.distributed import checkpoint

    with _plain_errors("save"):
        checkpoint.save(_state(model, optimizer), checkpoint_id=folder)


def load_state(model: nn.Module, optimizer: torch.optim.Optimizer, folder: str) -> None:
    """Load what this rank is to hold."""
    from torch.distributed import checkpoint
    from torch.distributed.checkpoint.state_dict import set_state_dict

    state = _state(model, optimizer)
    with _plain_errors("load"):
        checkpoint.load(state, checkpoint_id=folder)
    set_state_dict(
        model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
    )


@contextlib.contextmanager
def _plain_errors(what: str) -> Iterator[None]:
    """Raise what a rank raised: torch raises all of them at once, and not as an `Exception`."""
    from torch.distributed.checkpoint import CheckpointException

    try:
        yield
    except CheckpointException as error:
        rank, first = min(error.failures.items())
        raised = in_one_line(first[0], 200)
        raise RuntimeError(
            f"torch.distributed.checkpoint cannot {what} it: rank {rank} raised {raised}"
        ) from error


def _state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    from torch.distributed.checkpoint.state_dict import get_state_dict

    if isinstance(model, PipelinedModel):
        raise UnsupportedPlanError("resume= cannot save the stages of a pipeline schedule")
    model_state, optimizer_state = get_state_dict(model, optimizer)
    return {"model": dict(model_state), "optimizer": dict(optimizer_state)}


# --- The training after it ------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Resumption:
    """A training that goes on under the same plan on another mesh.

    Attributes:
        before: up to the checkpoint.
        after: from the checkpoint on.
    """

    before: ParallelProgram
    after: ParallelProgram

    @property
    def mesh(self) -> str:
        """The other mesh, for people."""
        return ", ".join(f"{axis}={size}" for axis, size in self.after.mesh.items())

    def program(self) -> ParallelProgram:
        """What the ranks train from the checkpoint on; their model has other numbers at first."""
        other_numbers = _OtherNumbers(self.after)
        return dataclasses.replace(
            self.after, model=other_numbers, first=self.before.steps, later=0
        )

    def reference(self, run: Callable[..., Trace], program: ParallelProgram, **how: Any) -> Trace:
        """The training on one device without an interruption; its trace from the checkpoint on."""
        first = self.before.steps
        uninterrupted_program = dataclasses.replace(
            program,
            model=self.before.model,
            first=0,
            steps=first + program.steps,
        )
        trace = run(uninterrupted_program, **how)
        if len(trace.steps) < first:
            return trace
        last = trace.steps[first - 1]
        return _from_state(trace, last.parameters, last.buffers, trace.steps[first:])

    def ranks(
        self,
        run: Callable[..., list[Trace]],
        program: ParallelProgram,
        folder: str,
        **how: Any,
    ) -> list[Trace]:
        """Train on the first mesh and save, then load on the other and train on."""
        before = dataclasses.replace(self.before, dropout=program.dropout)
        saved = run(before, save_to=folder, **{**how, "watch_modules": False})
        if any(trace.error is not None for trace in saved):
            return [dataclasses.replace(trace, steps=[]) for trace in saved]
        return [_from_loaded(trace) for trace in run(program, load_from=folder, **how)]

    def join_verdicts(self, before: Verdict, after: Verdict) -> Verdict:
        """One verdict about both parts."""
        resumed = tuple(
            msgspec.structs.replace(finding, item=finding.item.in_graph(f"resumed on {self.mesh}"))
            for finding in after.findings
        )
        note = (
            f"after {self.before.steps} of {self.before.steps + self.after.steps} steps, a "
            f"checkpoint was saved, and loaded on {self.mesh}; step 1 there is what was loaded"
        )
        coverage = Coverage(
            compared=before.coverage.compared + after.coverage.compared,
            unmatched=(*before.coverage.unmatched, *after.coverage.unmatched),
        )
        notes = dict.fromkeys((note, *before.notes, *after.notes))
        return Verdict(
            findings=(*before.findings, *resumed),
            coverage=coverage,
            notes=tuple(notes),
            strict=before.strict,
        )


def _from_state(
    trace: Trace,
    parameters: dict[str, RankPiece],
    buffers: dict[str, RankPiece],
    steps: list[StepTrace],
) -> Trace:
    """A trace whose first step has computed a state.

    Ranks have rounded it, so it is not compared like initial values, which must be equal.
    """
    state = StepTrace(parameters=parameters, buffers=buffers)
    return dataclasses.replace(trace, initial={}, steps=[state, *steps])


def _from_loaded(trace: Trace) -> Trace:
    """The trace of a rank that has loaded a state, or failed to."""
    if not trace.initial:
        return trace
    buffers = trace.steps[0].buffers if trace.steps else {}
    parameters = {
        name: parameter_piece
        for name, parameter_piece in trace.initial.items()
        if name not in buffers
    }
    buffers_of_state = {
        name: buffer_piece for name, buffer_piece in trace.initial.items() if name in buffers
    }
    return _from_state(trace, parameters, buffers_of_state, trace.steps)


@dataclasses.dataclass(frozen=True)
class _OtherNumbers:
    """Makes the model of a program with other numbers in what a checkpoint holds."""

    program: ParallelProgram

    def __call__(self) -> nn.Module:
        model = self.program.model
        new_model = copy.deepcopy(model) if isinstance(model, nn.Module) else model()
        saved_ids = {
            id(state_tensor) for state_tensor in new_model.state_dict(keep_vars=True).values()
        }
        with torch.no_grad():
            for tensor in itertools.chain(new_model.parameters(), new_model.buffers()):
                if id(tensor) in saved_ids and tensor.is_floating_point():
                    tensor.mul_(0.5).add_(0.25)
        return new_model


def new_folder() -> tempfile.TemporaryDirectory[str]:
    """Where a checkpoint lies while the ranks need it."""
    return tempfile.TemporaryDirectory(prefix="paritas-checkpoint-", ignore_cleanup_errors=True)

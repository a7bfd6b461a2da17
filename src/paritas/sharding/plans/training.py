"""Train for a few steps: on one device, and under the plan on ranks."""

from __future__ import annotations

import collections
import contextlib
import copy
import dataclasses
import importlib
import itertools
import os
import pickle
import threading
import warnings
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import distributed, nn

from paritas.core.call_options import takes_options
from paritas.core.errors import ParitasError, UsageError, in_one_line
from paritas.core.execution.isolation import copy_inputs
from paritas.core.execution.observation import MOST_KEPT
from paritas.core.execution.saved_state import RandomState
from paritas.core.precision.lifting import RankLiftMode
from paritas.core.results.rank_backends import GLOO
from paritas.core.torch_private.operators import WIDE, default_dtype
from paritas.core.torch_private.ranks import (
    ThreadOutcome,
    gradient_factors,
    listening,
    run_in_threads,
)
from paritas.core.torch_private.tensors import copy_on_write, hold_shared, return_free_memory
from paritas.sharding.plans.boundaries import NotByBlocksError
from paritas.sharding.plans.pieces import Piece, PieceNames
from paritas.sharding.plans.plan import (
    PipelinedModel,
    StageNames,
    as_scalar,
    batch_size,
    check_batches,
    parallel_model,
    part_of_batch,
    plan_notes,
    samples_from,
    samples_of,
    to_device,
    training_loss,
    with_dropout,
)
from paritas.sharding.plans.rank_pool import (
    GIVEN_UP,
    LET_GO,
    MOST_RANKS,
    NO_ANSWER,
    LostRankError,
    RankAnswer,
    RankPool,
    lost_peer,
    operator_without_kernel,
    start_method,
    warm_pool,
)
from paritas.sharding.plans.resuming import load_state, save_state
from paritas.sharding.plans.shipped_plans import UnsupportedPlanError
from paritas.sharding.plans.traces import (
    EqualPieces,
    ModelNames,
    ModuleWatch,
    StepTrace,
    Trace,
    is_fsdp,
    merge_calls,
    named_pieces,
    piece_of,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor

    from paritas.core.execution.subjects import Inputs
    from paritas.core.placement.rank_pieces import RankPiece
    from paritas.sharding.plans.plan import ParallelProgram


# --- Train a few steps, on one device or as a rank, and record everything ------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class Manner:
    """How a program is run.

    Attributes:
        wide: in float64.
        watch_modules: in the last step, record the outputs of every module and the gradients on
            both sides of it.
        device: where to run; None leaves the model and the batches where they are.
        mode: entered around the program's own code, more than once; None means that a wide run
            also lifts the program's own casts to narrow dtypes.
        default: the default dtype of the program.
        alone: whether no other rank uses the random generator of this process.
        record: makes a context around the forward pass of each step, of the names in the model and
            the trace.
        abridge: see `Trace`.
        abridge_from: see `Trace`.
        load_from: a folder with a checkpoint to begin with; empty for none.
        save_to: a folder for a checkpoint at the end; empty for none.
        listen: record what a rank gives to collectives.
    """

    wide: bool = False
    watch_modules: bool = False
    device: torch.device | None = None
    mode: contextlib.AbstractContextManager[Any] | None = None
    default: torch.dtype = dataclasses.field(default_factory=torch.get_default_dtype)
    alone: bool = True
    record: Callable[[ModelNames, Trace], contextlib.AbstractContextManager[Any]] | None = None
    abridge: Callable[[str, int, RankPiece], RankPiece] | None = None
    abridge_from: int = 0
    load_from: str = ""
    save_to: str = ""
    listen: bool = False

    def running(self, native: torch.dtype) -> contextlib.AbstractContextManager[Any]:
        """The context around the program's own code."""
        if self.mode is not None:
            return self.mode
        return RankLiftMode(native, self.default) if self.wide else contextlib.nullcontext()


@contextlib.contextmanager
def same_surroundings(manner: Manner) -> Iterator[None]:
    """Restore the caller's random state afterwards; a wide run has float64 as default dtype."""
    state = RandomState.now()
    try:
        with (
            default_dtype(torch.float64 if manner.wide else manner.default),
            gradient_factors(once=manner.wide),
            warnings.catch_warnings(),
        ):
            # FSDP warns on each rank about what a model might do wrong; we check it.
            warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view")
            yield
    finally:
        state.restore()


@dataclasses.dataclass(frozen=True)
class BuiltModel:
    """A model to train.

    Attributes:
        model: the model that runs, under its plan if it has one.
        original: the model that the plan was applied to, which may be a submodule of `model`.
        dtype: the original floating dtype of most of its parameters.
    """

    model: nn.Module
    original: nn.Module
    dtype: torch.dtype


def build_model(program: ParallelProgram, manner: Manner) -> BuiltModel:
    """A copy of the user's model, with the same initial values each time.

    Raises:
        UsageError: the model cannot be made or copied.
    """
    given_model = program.model
    torch.manual_seed(program.seed)
    with default_dtype(manner.default):  # drawn in float64, the initial values would differ
        original = given_model if isinstance(given_model, nn.Module) else _make_model(given_model)
    try:
        model = (
            original if isinstance(original, Piece) else copy.deepcopy(original)
        )  # a piece is always new
    except Exception as error:
        if original is given_model:
            raise UsageError(
                f"the model cannot be copied ({in_one_line(error, 300)}): pass a function that "
                "makes it"
            ) from error
        model = original
    dtype = dtype_of(model, manner.default)
    for tensor in itertools.chain(model.parameters(), model.buffers()):
        tensor.grad = None
        if manner.wide and tensor.dtype in WIDE:
            tensor.data = tensor.data.to(WIDE[tensor.dtype])
    if manner.device is not None:
        model = model.move(manner.device) if isinstance(model, Piece) else model.to(manner.device)
    return BuiltModel(model, model, dtype)


def dtype_of(model: nn.Module, default: torch.dtype = torch.float32) -> torch.dtype:
    """The floating dtype of most of its parameters."""
    counts = collections.Counter[torch.dtype]()
    for tensor in itertools.chain(model.parameters(), model.buffers()):
        if tensor.is_floating_point():
            counts[tensor.dtype] += tensor.numel()
    return counts.most_common(1)[0][0] if counts else default


def _make_model(factory: Any) -> nn.Module:
    try:
        new_model = factory()
    except Exception as error:
        raised = in_one_line(error, 300)
        raise UsageError(f"the function that makes the model raised {raised}") from error
    if not isinstance(new_model, nn.Module):
        raise UsageError(
            f"the function that makes the model returned {new_model!r:.80}, not a module"
        )
    return new_model


def train(program: ParallelProgram, built: BuiltModel, manner: Manner, trace: Trace) -> None:
    """Run all steps and write them into the trace.

    If the program raises, the error is written there too and raised again.
    """
    model, running = built.model, with_dropout(program.dropout, manner.running(built.dtype))
    names: ModelNames
    if isinstance(model, PipelinedModel):
        names = StageNames(model)
    elif isinstance(model, Piece):
        model.begin()
        names = PieceNames(model)
    else:
        names = ModelNames.within(model, built.original)
    watch = ModuleWatch(names, trace, keep=program.steps if manner.watch_modules else None)
    trace.abridge, trace.abridge_from = manner.abridge, manner.abridge_from
    try:
        optimizer = _optimizer(program, model)
        if manner.load_from:
            load_state(model, optimizer, manner.load_from)
        trace.initial = {**_parameters(names, trace), **_buffers(names, trace)}
        trace.tied = _tied_names(names)
        _tidy(trace)
        with watch:
            for _ in range(program.steps):
                trace.steps.append(StepTrace())
                seed = program.seed + program.first + len(trace.steps)
                with _seed_step(seed, manner, trace):
                    _one_step(program, names, optimizer, manner, trace, watch, running)
                if manner.abridge_from and trace.is_abridged:
                    _drop_large(trace.steps[-1].outputs)
        if manner.save_to:
            save_state(model, optimizer, manner.save_to)
    except Exception as error:
        _note_failure(trace, error, manner)
        raise
    finally:
        trace.abridge = None


def _note_failure(trace: Trace, error: Exception, manner: Manner, before: str = "") -> None:
    """Write down what a rank raised, and whether it only shows what cannot be checked here."""
    if isinstance(error, NotByBlocksError | UnsupportedPlanError):
        trace.fail(str(error), unsupported=True)
        trace.whole_only = isinstance(error, NotByBlocksError)
        return
    on_cpu = manner.device is None or manner.device.type == "cpu"
    missing = operator_without_kernel(error) if on_cpu and trace.ranks > 1 else ""
    if missing:
        words = f"torch {torch.__version__} cannot run {missing} in this way on a CPU"
        trace.fail(f"{words}: check the plan on GPUs, with torchrun", unsupported=True)
        return
    trace.fail(f"{before}{in_one_line(error, 300)}", waited=lost_peer(error))


def _one_step(
    program: ParallelProgram,
    names: ModelNames,
    optimizer: torch.optim.Optimizer,
    manner: Manner,
    trace: Trace,
    watch: ModuleWatch,
    running: contextlib.AbstractContextManager[Any],
) -> None:
    number, noted = len(trace.steps) - 1, trace.steps[-1]
    rank_batch = (
        part_of_batch(program, trace.rank, number) if trace.ranks > 1 else program.batch(number)
    )
    batch = to_device(copy_inputs(rank_batch, widen=manner.wide), manner.device)
    if isinstance(names.model, PipelinedModel):
        with torch.enable_grad(), running:
            _run_schedule(program, names.model, batch, trace)
        watch.end_step()
    elif program.step is not None:
        with torch.enable_grad(), running:
            loss = as_scalar(program.step(names.model, *batch.args, **batch.kwargs))
        noted.loss = piece_of(loss)
        watch.end_step()
        merge_calls(noted)
    elif isinstance(names.model, Piece):
        names.model.run_step(trace, running, watch.backward(), wide=manner.wide)
    else:
        record = contextlib.nullcontext() if manner.record is None else manner.record(names, trace)
        with torch.enable_grad(), running:
            with record:
                output = names.model(*batch.args, **batch.kwargs)
            loss = training_loss(program, output, batch, trace)
        noted.outputs, noted.loss = named_pieces(output), piece_of(loss)
        with watch.backward(), running:
            loss.backward()
    noted.gradients = _gradient_pieces(names, trace)
    _tidy(trace)
    with running:
        optimizer.step()
    noted.parameters, noted.buffers = _parameters(names, trace), _buffers(names, trace)
    optimizer.zero_grad(set_to_none=True)
    _tidy(trace)


def _drop_large(outputs: dict[str, RankPiece]) -> None:
    """Keep what is small: a large output shows in the loss, and in gradients."""
    for path in [path for path, piece in outputs.items() if piece.local.numel() > MOST_KEPT]:
        del outputs[path]


def _tidy(trace: Trace) -> None:
    """After values were abridged: what the threads of ranks freed would stay with each of them."""
    if trace.is_abridged:
        return_free_memory()


def _run_schedule(
    program: ParallelProgram, model: PipelinedModel, batch: Inputs, trace: Trace
) -> None:
    """Run a step of a pipeline: the schedule calls the stages, the loss and their gradients."""
    pipeline, noted = model.pipeline, trace.steps[-1]
    size = batch_size(batch)
    if size is None or size % pipeline.microbatches:
        raise UnsupportedPlanError(
            f"the {size or 'missing'} samples of a rank do not divide evenly over the "
            f"{pipeline.microbatches} micro-batches of the schedule"
        )
    number = len(trace.steps) - 1
    begin = (samples_of(program, trace.rank, number) or (0, 0))[0]

    def loss(output: Any, rows: Tensor) -> Tensor:
        first, last = int(rows[0]), int(rows[-1]) + 1
        part = samples_from(batch, first, last)
        return training_loss(program, output, part, trace, (begin + first, begin + last))

    output, losses = pipeline.step(loss, torch.arange(size), batch.args, batch.kwargs)
    if losses:
        noted.outputs = named_pieces(output)
        noted.loss = piece_of(torch.stack([loss_value.detach() for loss_value in losses]).mean())
    merge_calls(noted, pipeline.microbatches)


@contextlib.contextmanager
def _seed_step(seed: int, manner: Manner, trace: Trace) -> Iterator[None]:
    """Start a step with the same seed everywhere, and record whether it drew random numbers.

    Threads share one generator, so none of them may reset it while another draws.
    """
    if manner.alone:
        torch.manual_seed(seed)
    before = RandomState.of_torch()
    yield
    trace.random = trace.random or not before.same_torch(RandomState.of_torch())


def _optimizer(program: ParallelProgram, model: nn.Module) -> torch.optim.Optimizer:
    parameters = list(model.parameters())
    if isinstance(model, Piece) and not parameters:
        parameters = [nn.Parameter(torch.zeros(()))]
    if program.optimizer is None:
        # On a GPU, the default form refuses a list of distributed and plain parameters.
        return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, foreach=False)
    optimizer = program.optimizer(iter(parameters))
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise UsageError(f"the function that makes the optimizer returned {optimizer!r:.80}")
    return optimizer


def _parameters(names: ModelNames, trace: Trace) -> dict[str, RankPiece]:
    return {
        (name := names.of(path)): trace.keep("parameter", name, parameter)
        for path, parameter in names.model.named_parameters(remove_duplicate=False)
    }


def _tied_names(names: ModelNames) -> list[tuple[str, ...]]:
    groups: dict[nn.Parameter, list[str]] = {}
    for path, parameter in names.model.named_parameters(remove_duplicate=False):
        groups.setdefault(parameter, []).append(names.of(path))
    return [tuple(group) for group in groups.values() if len(group) > 1]


def _buffers(names: ModelNames, trace: Trace) -> dict[str, RankPiece]:
    return {
        (name := names.of(path)): trace.keep("buffer", name, buffer)
        for path, buffer in names.model.named_buffers(remove_duplicate=False)
    }


def _gradient_pieces(names: ModelNames, trace: Trace) -> dict[str, RankPiece | None]:
    return {
        (name := names.of(path)): None
        if parameter.grad is None
        else trace.keep("gradient", name, parameter.grad)
        for path, parameter in names.model.named_parameters(remove_duplicate=False)
        if parameter.requires_grad
    }


# --- The program on one device --------------------------------------------------------------------


@takes_options(Manner)
def run_reference(program: ParallelProgram, manner: Manner) -> Trace:
    """Train the model without its plan; the fields of `Manner` are keyword arguments.

    Raises:
        UsageError: the program is not valid. Any other exception of it is in the trace.
    """
    trace = Trace()
    with same_surroundings(manner):
        built = build_model(program, manner)
        try:
            train(program, built, manner, trace)
        except UsageError:
            raise
        except Exception:  # noqa: BLE001  (it is in the trace and becomes a finding)
            return trace
    return trace


# --- One rank: apply the plan to the model, then train it -----------------------------------------


class RankFailedError(ParitasError, RuntimeError):
    """The program of a rank raised; `so_far` is its trace up to then."""

    def __init__(self, so_far: Trace) -> None:
        super().__init__(so_far)
        self.so_far = so_far

    def __str__(self) -> str:
        return str(self.so_far.error)


@dataclasses.dataclass(frozen=True)
class Task:
    """What is sent to a rank in another process."""

    program: ParallelProgram
    manner: Manner


def empty_trace(program: ParallelProgram, rank: int) -> Trace:
    """The trace of a rank that has done nothing yet."""
    return Trace(
        rank=rank,
        ranks=program.ranks,
        samples=samples_of(program, rank),
        data_rank=program.data_rank(rank),
        data_ranks=program.data_ranks,
    )


def train_as_rank(
    program: ParallelProgram, built: BuiltModel, manner: Manner, trace: Trace
) -> None:
    """Apply the plan to a model and train it, as a rank of the current process group.

    An exception is written into the trace and raised again.
    """
    try:
        notes = plan_notes(program, built.model)
        parallel = parallel_model(program, built.model, manner.device)
        if manner.record is not None:
            _check_blocks_run(parallel)
    except Exception as error:
        _note_failure(trace, error, manner, "while the plan was applied: ")
        raise
    trace.notes, trace.is_fsdp = notes, is_fsdp(parallel)
    heard = listening(trace.messages) if manner.listen else contextlib.nullcontext()
    with heard:
        train(program, dataclasses.replace(built, model=parallel), manner, trace)


def _check_blocks_run(model: nn.Module) -> None:
    """Make sure that a plan lets blocks be called one by one."""
    if isinstance(model, PipelinedModel):
        raise NotByBlocksError("a pipeline schedule calls the stages of the model itself")
    if any(isinstance(module, nn.parallel.DistributedDataParallel) for module in model.modules()):
        raise NotByBlocksError(
            "DistributedDataParallel reduces the gradients of all blocks at once"
        )


def work_alone(rank: int, _ranks: int, task: Task, trace: Trace | None = None) -> Trace:
    """Train as the only rank of this process, and record it in the trace.

    Raises:
        RankFailedError: the program raised.
    """
    trace = empty_trace(task.program, rank) if trace is None else trace
    with same_surroundings(task.manner):
        try:
            built = build_model(task.program, task.manner)
            train_as_rank(task.program, built, task.manner, trace)
        except Exception as error:
            if trace.error is None:
                _note_failure(trace, error, task.manner)
            raise RankFailedError(trace) from error
    return trace


# --- The program under its plan, on ranks that are threads or processes ---------------------------

Team = Literal["simulated", "gloo", "here"]
TEAMS = ("simulated", "gloo", "here")

_STUCK = "it waits in a collective that some ranks never entered, or is still busy"


@dataclasses.dataclass(frozen=True)
class RanksManner(Manner):
    """How a program is run on ranks.

    Attributes:
        team: `simulated` ranks are threads of this process, `gloo` ranks are new processes; with
            `here` this process is already a rank, and every rank runs the program.
        timeout: in seconds. The trace of a rank that raised, or did not finish in time, has the
            error and the steps before it.
    """

    team: Team = "simulated"
    _: dataclasses.KW_ONLY
    timeout: float = 120.0

    def __post_init__(self) -> None:
        if self.team not in TEAMS:
            raise UsageError(f"ranks={self.team!r}: use one of {', '.join(TEAMS)}")


@takes_options(RanksManner)
def run_ranks(program: ParallelProgram, manner: RanksManner) -> list[Trace]:
    """Train the model under its plan, and return the trace of each rank.

    The fields of `RanksManner` are keyword arguments.

    Raises:
        UsageError: the mesh does not fit, a batch cannot be split, or the program cannot be sent.
    """
    if not distributed.is_available():
        raise UsageError(f"torch {torch.__version__} was built without torch.distributed")
    check_batches(program)
    # These imports take seconds: do them here, not in each process.
    for name in ("fsdp", "tensor.parallel"):
        importlib.import_module(f"torch.distributed.{name}")
    if manner.team == "here":
        return _run_here(program, manner, manner.timeout)
    if program.ranks > MOST_RANKS:
        raise UsageError(
            f"the mesh has {program.ranks} ranks: use at most {MOST_RANKS} on one machine"
        )
    run = _run_threads if manner.team == "simulated" else _run_processes
    return run(program, manner, manner.timeout)


# --- threads --------------------------------------------------------------------------------------


def _run_threads(program: ParallelProgram, manner: Manner, timeout: float) -> list[Trace]:
    manner = dataclasses.replace(manner, alone=False)
    traces = [empty_trace(program, rank) for rank in range(program.ranks)]
    equal = EqualPieces()
    for trace in traces:
        trace.equal = equal
    with same_surroundings(manner):
        models = _build_models(program, manner)
        first = models[0].model
        shared_tensors = hold_shared(first.whole if isinstance(first, Piece) else first)

        def work(
            rank: int, _held: list[Tensor] = shared_tensors
        ) -> None:  # also if it is never done
            train_as_rank(program, models[rank], manner, traces[rank])

        outcomes = run_in_threads(work, program.ranks, timeout)
    models.clear()
    del first, shared_tensors, work
    return_free_memory()
    failed = any(outcome.error is not None for outcome in outcomes)
    for trace in traces:
        trace.equal = None
    return [
        _trace_of_thread(trace, outcome, timeout, failed=failed)
        for trace, outcome in zip(traces, outcomes, strict=True)
    ]


def _build_models(program: ParallelProgram, manner: Manner) -> list[BuiltModel]:
    """A model for each rank, in the memory of one until its plan changes it."""
    first = build_model(program, manner)
    models = [first]
    for _ in range(1, program.ranks):
        try:
            model_copy = (
                first.model.copy() if isinstance(first.model, Piece) else copy_on_write(first.model)
            )
        except Exception:  # noqa: BLE001  (a module may refuse to be copied in any way)
            models.append(build_model(program, manner))
        else:
            models.append(dataclasses.replace(first, model=model_copy, original=model_copy))
    return models


def _trace_of_thread(
    trace: Trace, outcome: ThreadOutcome, timeout: float, *, failed: bool
) -> Trace:
    """A copy of the trace, since a thread that could not be stopped may still write to its own."""
    if outcome.done and outcome.error is None:
        return trace
    trace_copy = dataclasses.replace(trace, steps=list(trace.steps))
    if outcome.error is None:
        in_vain = f"had {timeout:g} s: {NO_ANSWER}; {_STUCK}"
        trace_copy.fail(LET_GO if failed else in_vain, waited=True)
    elif trace_copy.error is None:
        trace_copy.fail(in_one_line(outcome.error, 300))
    return trace_copy


# --- processes ------------------------------------------------------------------------------------

# A forked process shares its parent's memory, so the task need not be pickled.
_INHERITED: dict[str, Task] = {}


def _run_processes(program: ParallelProgram, manner: Manner, timeout: float) -> list[Trace]:
    task, ranks = Task(program, manner), program.ranks
    try:
        if start_method() == "fork":
            _INHERITED["task"] = task
            with RankPool(ranks, "fork") as pool:
                answers = pool.run(train_under_plan, [None] * ranks, timeout)
        else:
            _check_sendable(program)
            answers = warm_pool(ranks).run(work_alone, [task] * ranks, timeout)
    except LostRankError as error:
        lost = error.ranks or range(ranks)
        reason = f"{error}; {_STUCK}" if error.timed_out else str(error)
        answers = [error.answers.get(rank, GIVEN_UP) for rank in range(ranks)]
        # The error that a rank raises when its peer is gone says nothing new.
        answers = [GIVEN_UP if answer.error else answer for answer in answers]
        for rank in lost:
            answers[rank] = RankAnswer(error=reason, waited=error.timed_out)
    finally:
        _INHERITED.clear()
    return [_trace_of_answer(program, rank, answer) for rank, answer in enumerate(answers)]


def train_under_plan(rank: int, ranks: int, _: None) -> Trace:
    """Run the parent's task in a forked process."""
    return work_alone(rank, ranks, _INHERITED["task"])


def _trace_of_answer(program: ParallelProgram, rank: int, answer: RankAnswer) -> Trace:
    trace: Trace = empty_trace(program, rank) if answer.value is None else answer.value
    if answer.error is not None and trace.error is None:
        trace.fail(answer.error, waited=answer.waited)
    return trace


def _check_sendable(program: ParallelProgram) -> None:
    for field in ("model", "plan", "loss", "optimizer", "step", "batches"):
        value = getattr(program, field)
        try:
            if b"__main__" in pickle.dumps(value):
                raise pickle.PicklingError("part of it is defined in __main__")
        except Exception as error:  # noqa: BLE001  (a user's object may raise anything)
            raise UsageError(
                f"the {field} cannot be sent to another process ({type(error).__name__}: "
                f"{error!s:.120}): define it at the top level of a module, or use simulated ranks"
            ) from None


# --- this process is a rank -----------------------------------------------------------------------


def device_here() -> torch.device | None:
    """The accelerator of this rank; None for the host."""
    backend = str(distributed.get_backend())
    accelerator = torch.accelerator.current_accelerator() if backend != GLOO.name else None
    if accelerator is None or accelerator.type == "cpu":
        return None
    index = torch.accelerator.current_device_index()
    local = int(os.environ.get("LOCAL_RANK", "0"))
    if index == 0 and local < torch.accelerator.device_count():
        index = local  # set by torchrun, and the program has not chosen another
    return torch.device(accelerator.type, index)


def _run_here(program: ParallelProgram, manner: Manner, timeout: float) -> list[Trace]:
    if not distributed.is_initialized():
        raise UsageError(
            "this process is not a rank of a process group: start it with torchrun and call "
            "torch.distributed.init_process_group first, or use simulated ranks"
        )
    world, rank = distributed.get_world_size(), distributed.get_rank()
    if world != program.ranks:
        shown = " x ".join(f"{axis}={size}" for axis, size in program.mesh.items())
        raise UsageError(
            f"the mesh has {program.ranks} ranks ({shown}) but the process group has {world}: make "
            "them equal"
        )
    # A separate group, so ranks can exchange their traces while others are still stuck.
    messages = distributed.new_group(backend=GLOO.group)
    manner = dataclasses.replace(manner, device=device_here())
    trace = _in_time(rank, Task(program, manner), timeout)
    gathered: list[Any] = [None] * world
    distributed.all_gather_object(gathered, trace, group=messages)
    distributed.destroy_process_group(messages)
    return gathered


def _in_time(rank: int, task: Task, timeout: float) -> Trace:
    """Train in a thread, which can be abandoned if it never ends."""
    trace = empty_trace(task.program, rank)

    def work() -> None:
        if task.manner.device is not None:
            torch.accelerator.set_device_index(task.manner.device.index or 0)
        with contextlib.suppress(RankFailedError):  # it is in the trace
            work_alone(rank, task.program.ranks, task, trace)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(timeout)
    outcome = ThreadOutcome(done=not thread.is_alive())
    return _trace_of_thread(trace, outcome, timeout, failed=False)

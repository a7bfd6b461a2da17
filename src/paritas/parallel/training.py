"""A training of a few steps: on one device, and under its plan on ranks."""

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

from paritas._torch.operators import WIDE, default_dtype
from paritas._torch.simulated_ranks import run_in_threads
from paritas.errors import ParitasError, UsageError, in_one_line
from paritas.execution.isolation import copy_inputs
from paritas.execution.saved_state import RandomState
from paritas.numerics.contents import leaves
from paritas.parallel.plan import batch_size, check_batches, part_of_batch, samples_of, to_device
from paritas.parallel.rank_pool import (
    LET_GO,
    MOST_RANKS,
    LostRankError,
    RankAnswer,
    RankPool,
    start_method,
    warm_pool,
)
from paritas.parallel.traces import (
    ModelNames,
    ModuleWatch,
    StepTrace,
    Trace,
    named_pieces,
    piece_of,
)
from paritas.precision.lifting import RankLiftMode

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor
    from torch.distributed.device_mesh import DeviceMesh

    from paritas._torch.simulated_ranks import ThreadOutcome
    from paritas.execution.subjects import Inputs
    from paritas.parallel.plan import ParallelProgram
    from paritas.parallel.traces import RankPiece


# --- The loss of a training: the user's, the model's own, or one that sees every element ----------

# Weights of the default loss are eighths up to one: exact in every floating dtype.
_EIGHTHS = 8


def training_loss(program: ParallelProgram, output: Any, batch: Inputs, trace: Trace) -> Tensor:
    """The loss of the step that a trace is at: as the user says, as the model says, or a mean.

    Raises:
        UsageError: it is not one number, or nothing can be learnt from it.
    """
    if program.loss is not None:
        loss = program.loss(output, *batch.args, **batch.kwargs)
    else:
        loss = _own_loss(output)
        if loss is None:
            loss = _weighted_mean(program, output, trace)
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        shown = list(loss.shape) if isinstance(loss, torch.Tensor) else f"{loss!r:.80}"
        raise UsageError(f"the loss is {shown}: it must be one number")
    if not loss.requires_grad:
        raise UsageError("the loss does not depend on anything that requires a gradient")
    return loss.reshape(()) if loss.dim() else loss


def _own_loss(output: Any) -> Tensor | None:
    """The loss that a model gives itself: its output, or what is called `loss` there."""
    for one in (output, getattr(output, "loss", None)):
        if isinstance(one, torch.Tensor) and one.numel() == 1 and one.is_floating_point():
            return one
    held = output.get("loss") if isinstance(output, dict) else None
    return held if isinstance(held, torch.Tensor) and held.numel() == 1 else None


def _weighted_mean(program: ParallelProgram, output: Any, trace: Trace) -> Tensor:
    """The mean of each floating output times weights that are drawn for the whole batch.

    A plain mean would not see elements that change places.
    """
    number = len(trace.steps) - 1
    total: Tensor | None = None
    for place, (_, leaf) in enumerate(leaves(output)):
        if not isinstance(leaf, torch.Tensor) or not leaf.requires_grad:
            continue
        whole = leaf.full_tensor() if hasattr(leaf, "full_tensor") else leaf
        seed = program.seed + 1009 * number + place
        weights = _loss_weights(tuple(whole.shape), program, trace, number, seed)
        term = (whole * weights.to(whole.device, whole.dtype)).mean()
        total = term if total is None else total + term
    if total is None:
        raise UsageError(
            "nothing that the model gives requires a gradient: give a loss, or a model that trains"
        )
    return total


def _loss_weights(
    shape: tuple[int, ...], program: ParallelProgram, trace: Trace, number: int, seed: int
) -> Tensor:
    samples = samples_of(program, trace.rank, number) if trace.ranks > 1 else None
    mine = samples is not None and bool(shape) and shape[0] == samples[1] - samples[0]
    size = batch_size(program.batch(number)) or 0
    whole = (size, *shape[1:]) if mine else shape
    draws = torch.Generator().manual_seed(seed)
    weights = torch.randint(1, _EIGHTHS + 1, whole, generator=draws) / _EIGHTHS
    signs = torch.randint(0, 2, whole, generator=draws) * 2 - 1
    found = weights * signs
    return found[samples[0] : samples[1]] if mine and samples is not None else found


# --- A training of a few steps, the same on one device and on a rank, with everything noted -------


@dataclasses.dataclass(frozen=True)
class Manner:
    """How a program is run.

    Attributes:
        wide: in float64.
        watch_modules: in the last step, note what every module gives and the gradients that arrive
            there and leave it.
        device: where; None leaves the model and the batches where they are.
        mode: entered around the program's own code, more than once; None lifts a wide run's own
            casts to narrow dtypes as well.
        default: the dtype that tensors of no stated dtype have in the program.
        alone: no other rank draws from the random numbers of this process.
    """

    wide: bool = False
    watch_modules: bool = False
    device: torch.device | None = None
    mode: contextlib.AbstractContextManager[Any] | None = None
    default: torch.dtype = dataclasses.field(default_factory=torch.get_default_dtype)
    alone: bool = True

    def running(self, native: torch.dtype) -> contextlib.AbstractContextManager[Any]:
        """What is entered around the program's own code."""
        if self.mode is not None:
            return self.mode
        return RankLiftMode(native, self.default) if self.wide else contextlib.nullcontext()


@contextlib.contextmanager
def same_surroundings(manner: Manner) -> Iterator[None]:
    """The caller's random numbers are left alone; the default dtype is float64 for a wide run."""
    state = RandomState.now()
    try:
        with (
            default_dtype(torch.float64 if manner.wide else manner.default),
            warnings.catch_warnings(),
        ):
            # FSDP warns of what a model might do wrong, on each rank; here it is looked at.
            warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view")
            yield
    finally:
        state.restore()


@dataclasses.dataclass(frozen=True)
class BuiltModel:
    """A model to be trained.

    Attributes:
        model: as it runs, under its plan if it has one.
        original: what the plan was applied to, which may be within `model`.
        dtype: the floating dtype that most of its parameters came with.
    """

    model: nn.Module
    original: nn.Module
    dtype: torch.dtype


def build_model(program: ParallelProgram, manner: Manner) -> BuiltModel:
    """A model of its own storage, with the same initial values each time; the user's is left alone.

    Raises:
        UsageError: it cannot be made or copied.
    """
    given = program.model
    torch.manual_seed(program.seed)
    with default_dtype(manner.default):  # drawn in float64, initial values would be others
        made = given if isinstance(given, nn.Module) else _make_model(given)
    try:
        model = copy.deepcopy(made)
    except Exception as error:
        if made is given:
            raise UsageError(
                f"the model cannot be copied ({in_one_line(error, 300)}): give a function that "
                "makes it"
            ) from error
        model = made
    counts = collections.Counter[torch.dtype]()
    for tensor in itertools.chain(model.parameters(), model.buffers()):
        tensor.grad = None
        if tensor.is_floating_point():
            counts[tensor.dtype] += tensor.numel()
        if manner.wide and tensor.dtype in WIDE:
            tensor.data = tensor.data.to(WIDE[tensor.dtype])
    dtype = counts.most_common(1)[0][0] if counts else manner.default
    model = model if manner.device is None else model.to(manner.device)
    return BuiltModel(model, model, dtype)


def _make_model(factory: Any) -> nn.Module:
    try:
        made = factory()
    except Exception as error:
        raised = in_one_line(error, 300)
        raise UsageError(f"the function that makes the model raised {raised}") from error
    if not isinstance(made, nn.Module):
        raise UsageError(f"the function that makes the model gave {made!r:.80}, not a module")
    return made


def train(program: ParallelProgram, built: BuiltModel, manner: Manner, trace: Trace) -> None:
    """Do all steps and write them into the trace, as far as they go.

    What the program raises is written there too and raised again.
    """
    model, running = built.model, manner.running(built.dtype)
    names = ModelNames.within(model, built.original)
    watch = ModuleWatch(names, trace, keep=program.steps if manner.watch_modules else None)
    try:
        trace.initial = {**_parameters(names), **_buffers(names)}
        optimizer = _optimizer(program, model)
        for _ in range(program.steps):
            trace.steps.append(StepTrace())
            with _seeded(program.seed + len(trace.steps), manner, trace):
                _one_step(program, names, optimizer, manner, trace, watch, running)
    except Exception as error:
        trace.error = in_one_line(error, 300)
        raise
    finally:
        watch.close()


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
    given = part_of_batch(program, trace.rank, number) if trace.ranks > 1 else program.batch(number)
    batch = to_device(copy_inputs(given, widen=manner.wide), manner.device)
    with torch.enable_grad(), running:
        output = names.model(*batch.args, **batch.kwargs)
        loss = training_loss(program, output, batch, trace)
    noted.outputs, noted.loss = named_pieces(output), piece_of(loss)
    with watch.backward(), running:
        loss.backward()
    noted.gradients = _gradient_pieces(names)
    with running:
        optimizer.step()
    noted.parameters, noted.buffers = _parameters(names), _buffers(names)
    optimizer.zero_grad(set_to_none=True)


@contextlib.contextmanager
def _seeded(seed: int, manner: Manner, trace: Trace) -> Iterator[None]:
    """Begin a step with the same random numbers everywhere, and note whether some were drawn.

    Threads share one generator: none of them may set it back while another draws.
    """
    if manner.alone:
        torch.manual_seed(seed)
    before = RandomState.of_torch()
    yield
    trace.random = trace.random or not before.same_torch(RandomState.of_torch())


def _optimizer(program: ParallelProgram, model: nn.Module) -> torch.optim.Optimizer:
    if program.optimizer is None:
        return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    made = program.optimizer(model.parameters())
    if not isinstance(made, torch.optim.Optimizer):
        raise UsageError(f"the function that makes the optimizer gave {made!r:.80}")
    return made


def _parameters(names: ModelNames) -> dict[str, RankPiece]:
    return {
        names.of(path): piece_of(parameter)
        for path, parameter in names.model.named_parameters(remove_duplicate=False)
    }


def _buffers(names: ModelNames) -> dict[str, RankPiece]:
    return {
        names.of(path): piece_of(buffer)
        for path, buffer in names.model.named_buffers(remove_duplicate=False)
    }


def _gradient_pieces(names: ModelNames) -> dict[str, RankPiece | None]:
    return {
        names.of(path): None if parameter.grad is None else piece_of(parameter.grad)
        for path, parameter in names.model.named_parameters(remove_duplicate=False)
        if parameter.requires_grad
    }


# --- The program on one device --------------------------------------------------------------------


def run_reference(
    program: ParallelProgram,
    *,
    wide: bool = False,
    mode: contextlib.AbstractContextManager[Any] | None = None,
    watch_modules: bool = False,
    device: torch.device | None = None,
) -> Trace:
    """Train the model as it is, without its plan.

    Args:
        wide: model, batches and default dtype in float64.
        mode: entered around forward, loss, backward and optimizer of each step, in turn. Without
            one, a wide run lifts the program's own casts to narrow dtypes as well.
        watch_modules: in the last step, note what every module gives and the gradients that arrive
            there and leave it.
        device: where; None leaves the model and the batches where they are.

    Raises:
        UsageError: the program makes no sense. Anything else that it raises is in the trace.
    """
    trace = Trace()
    manner = Manner(wide=wide, watch_modules=watch_modules, device=device, mode=mode)
    with same_surroundings(manner):
        built = build_model(program, manner)
        try:
            train(program, built, manner, trace)
        except UsageError:
            raise
        except Exception:  # noqa: BLE001  (it is in the trace, and becomes a finding)
            return trace
    return trace


# --- What one rank does: make the model parallel as the plan says, then train it ------------------


class RankFailedError(ParitasError, RuntimeError):
    """The program of a rank raised; `so_far` is what it had done."""

    def __init__(self, so_far: Trace) -> None:
        super().__init__(so_far)
        self.so_far = so_far

    def __str__(self) -> str:
        return str(self.so_far.error)


@dataclasses.dataclass(frozen=True)
class Task:
    """What a rank that is a process of its own is sent."""

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
    """Put a model under its plan and train it, as a rank of the group that is there.

    What is raised is written into the trace and raised again.
    """
    try:
        parallel = parallel_model(program, built.model, manner.device)
    except Exception as error:
        trace.error = f"while the plan was applied: {in_one_line(error, 300)}"
        raise
    train(program, dataclasses.replace(built, model=parallel), manner, trace)


def work_alone(rank: int, _ranks: int, task: Task, trace: Trace | None = None) -> Trace:
    """Be a rank that has its process to itself; what it does is written into the trace.

    Raises:
        RankFailedError: the program raised.
    """
    trace = empty_trace(task.program, rank) if trace is None else trace
    with same_surroundings(task.manner):
        try:
            built = build_model(task.program, task.manner)
            train_as_rank(task.program, built, task.manner, trace)
        except Exception as error:
            trace.error = trace.error or in_one_line(error, 300)
            raise RankFailedError(trace) from error
    return trace


def parallel_model(
    program: ParallelProgram, model: nn.Module, device: torch.device | None
) -> nn.Module:
    """The model under its plan; it may be the same object, changed."""
    from torch.distributed.device_mesh import init_device_mesh

    kind = next((tensor.device.type for tensor in model.parameters()), "cpu")
    mesh = init_device_mesh(kind, tuple(program.mesh.values()), mesh_dim_names=tuple(program.mesh))
    plan = program.plan
    if plan == "ddp":
        placed = None if device is None or device.index is None else [device.index]
        return nn.parallel.DistributedDataParallel(model, device_ids=placed)
    if plan == "fsdp":
        _shard_blocks(model, mesh)
        return model
    if isinstance(plan, dict):
        from torch.distributed.tensor.parallel import parallelize_module

        # Styles keep what they learn of a rank; ranks that are threads must not share them.
        return parallelize_module(model, mesh, copy.deepcopy(plan))
    made: Any = plan(model, mesh)
    if made is not None and not isinstance(made, nn.Module):
        raise TypeError(f"the plan gave {made!r:.80}, not a module")
    return model if made is None else made


def _shard_blocks(model: nn.Module, mesh: DeviceMesh) -> None:
    """FSDP as it is commonly used: on each block of a list or sequence, then on the rest."""
    from torch.distributed.fsdp import fully_shard

    for block in _blocks(model):
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)


def _blocks(module: nn.Module) -> list[nn.Module]:
    found: list[nn.Module] = []
    for child in module.children():
        holds = any(True for _ in child.parameters())
        listed = isinstance(module, nn.ModuleList | nn.Sequential)
        if listed and holds and not isinstance(child, nn.ModuleList | nn.ModuleDict):
            found.append(child)
        else:
            found += _blocks(child)
    return found


# --- The program under its plan, on ranks: threads of this process, or processes of their own -----

Team = Literal["simulated", "gloo", "here"]
TEAMS = ("simulated", "gloo", "here")

_STUCK = "it waits for a collective that not all ranks take part in, or is still busy"


def run_ranks(
    program: ParallelProgram,
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


def _run_threads(program: ParallelProgram, manner: Manner, timeout: float) -> list[Trace]:
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
        _trace_of_thread(trace, outcome, timeout, failed=failed)
        for trace, outcome in zip(traces, outcomes, strict=True)
    ]


def _trace_of_thread(
    trace: Trace, outcome: ThreadOutcome, timeout: float, *, failed: bool
) -> Trace:
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


def _run_processes(program: ParallelProgram, manner: Manner, timeout: float) -> list[Trace]:
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
            RankAnswer(error=reason) if rank in lost else _after_loss(error.told.get(rank))
            for rank in range(ranks)
        ]
    finally:
        _INHERITED.clear()
    return [_trace_of_answer(program, rank, one) for rank, one in enumerate(told)]


def _after_loss(told: RankAnswer | None) -> RankAnswer:
    """What a rank raises whose peer is gone says nothing more than that."""
    if told is None:
        return RankAnswer(error=LET_GO)
    return told if told.error is None else RankAnswer(error=LET_GO)


def train_under_plan(rank: int, ranks: int, _: None) -> Trace:
    """Do, in a forked process, what its parent had in mind."""
    return work_alone(rank, ranks, _INHERITED["task"])


def _trace_of_answer(program: ParallelProgram, rank: int, told: RankAnswer) -> Trace:
    trace: Trace = empty_trace(program, rank) if told.value is None else told.value
    if told.error is not None and trace.error is None:
        return dataclasses.replace(trace, error=told.error)
    return trace


def _check_sendable(program: ParallelProgram) -> None:
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


def _run_here(program: ParallelProgram, manner: Manner, timeout: float) -> list[Trace]:
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

"""Ranks without processes, pipeline schedules and FSDP, as training under a plan uses them."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import importlib
import inspect
import queue
import sys
import threading
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils import _pytree
from torch.utils._python_dispatch import TorchDispatchMode

from paritas.core.errors import UnsupportedTorchError, UsageError
from paritas.core.results.rank_backends import NCCL, backend_of_group
from paritas.core.time_limit import TimeLimit

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch import Tensor
    from torch.distributed.device_mesh import DeviceMesh


# --- Ranks without processes: as tensors that hold the values of all ranks, or as threads ---------

_SIMULATION = "torch.distributed._local_tensor"
_FAKE_GROUP = "torch.testing._internal.distributed.fake_pg"
_C10D, _ISOLATION = "torch._C._distributed_c10d", "_set_thread_isolation_mode"
_MODES = "torch.utils._python_dispatch"
_THREADED_GROUP = "torch.testing._internal.distributed.multi_threaded_pg"
# Seconds to wait for a thread that was told to stop.
_FAREWELL_SECONDS = 0.5


def _import_private(module: str, *names: str) -> Any:
    """Import a private module of torch that must have these names."""
    try:
        loaded = importlib.import_module(module)
    except ImportError as error:
        raise UnsupportedTorchError(
            f"torch {torch.__version__} has no {module} ({error}): "
            "confirm on real ranks (gloo) instead"
        ) from None
    missing = [name for name in names if not hasattr(loaded, name)]
    if missing:
        raise UnsupportedTorchError(
            f"{module} of torch {torch.__version__} has no {', '.join(missing)}: "
            "confirm on real ranks (gloo) instead"
        )
    return loaded


def _refuse_a_group() -> None:
    if not distributed.is_available():
        raise UnsupportedTorchError(f"torch {torch.__version__} is built without distributed")
    if distributed.is_initialized():
        raise UsageError(
            "this process is already a rank of a process group, which simulated ranks do not "
            "allow; call torch.distributed.destroy_process_group() first"
        )


# --- tensors that hold the values of all ranks ----------------------------------------------------


@contextlib.contextmanager
def simulated_ranks(ranks: int) -> Iterator[DeviceMesh]:
    """Within it, operators run on tensors of `of_ranks` once for each rank.

    `get_rank()` is 0 for all of them: programs that use their rank cannot be simulated.
    """
    _refuse_a_group()
    simulation = _import_private(_SIMULATION, "LocalTensor", "LocalTensorMode")
    store = _import_private(_FAKE_GROUP, "FakeStore").FakeStore()
    with _same_excepthook():
        distributed.init_process_group("fake", rank=0, world_size=ranks, store=store)
        try:
            with simulation.LocalTensorMode(ranks):
                yield init_device_mesh("cpu", (ranks,))
        finally:
            distributed.destroy_process_group()


@contextlib.contextmanager
def _same_excepthook() -> Iterator[None]:
    """Restore the user's excepthook, which a process group replaces."""
    hook = sys.excepthook
    try:
        yield
    finally:
        sys.excepthook = hook


def of_ranks(parts: Sequence[Tensor]) -> Tensor:
    """One tensor that holds each rank's part."""
    simulation = _import_private(_SIMULATION, "LocalTensor")
    local_tensor: Tensor = simulation.LocalTensor(dict(enumerate(part.detach() for part in parts)))
    return local_tensor


def parts_of(tensor: Tensor, ranks: int) -> list[Tensor]:
    """The parts of a tensor on each rank."""
    local_parts = getattr(tensor, "_local_tensors", None)
    if local_parts is None:
        return [tensor.detach()] * ranks
    return [local_parts[rank].detach() for rank in range(ranks)]


# --- threads that are ranks -----------------------------------------------------------------------


@dataclasses.dataclass
class ThreadOutcome:
    """The outcome of the program on one rank.

    Attributes:
        value: its return value.
        error: the exception it raised.
        done: whether it ended by itself, in time.
    """

    value: Any = None
    error: BaseException | None = None
    done: bool = False


def run_in_threads(
    program: Callable[[int], Any], ranks: int, timeout: float
) -> list[ThreadOutcome]:
    """Run a program once per rank, each in a thread with its own `get_rank()`."""
    with RankThreads(ranks) as threads:
        return threads.run(program, timeout)


class RankThreads(contextlib.AbstractContextManager["RankThreads"]):
    """Threads that are ranks of one group while the context is open.

    A program can keep objects from one run to the next, such as its group, or an autograd graph
    with collectives in its backward pass.
    """

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        self._threads: list[_RankThread] = []
        self._hook = sys.excepthook
        self._join: Any = None
        self._loss_switches: dict[str, Any] = {}

    def __enter__(self) -> Self:
        self._start()
        return self

    def __exit__(self, *error: object) -> None:
        self._end()

    def run(self, program: Callable[[int], Any], timeout: float) -> list[ThreadOutcome]:
        """Call `program(rank)` in every thread; after a failure, the next run has new threads."""
        if any(thread.is_lost for thread in self._threads):
            self._end()
            self._start()
        flags = _mode_flags()
        tasks = [_Task(program) for _ in self._threads]
        for thread, task in zip(self._threads, tasks, strict=True):
            thread.is_lost = True  # until it has ended: waiting may be interrupted
            thread.tasks.put(task)
        limit = TimeLimit(timeout)
        for task in tasks:
            task.ended.wait(max(0.0, limit.left))
        if not all(task.ended.is_set() for task in tasks):
            # Release threads that wait for each other; a busy thread cannot be stopped.
            _threaded_group().ProcessLocalGroup.exception_handle(None)
            for task in tasks:
                task.ended.wait(_FAREWELL_SECONDS)
        for thread, task in zip(self._threads, tasks, strict=True):
            thread.is_lost = not task.outcome.done or task.outcome.error is not None
        _set_mode_flags(flags)
        return [task.outcome for task in tasks]

    def _start(self) -> None:
        _refuse_a_group()
        group = _threaded_group()
        isolate = _import_private(_C10D, _ISOLATION)._set_thread_isolation_mode
        store = _import_private(_C10D, "HashStore").HashStore()
        self._hook = sys.excepthook
        group._install_threaded_pg()
        _deliver_messages(group.ProcessLocalGroup)
        self._join = group.Collective.join
        group.Collective.join = _hearing(self._join)
        self._loss_switches = _count_loss_switches()
        isolate(True)  # otherwise threads share groups of the same name
        self._threads = [_RankThread(rank, self.ranks, store) for rank in range(self.ranks)]
        for thread in self._threads:
            thread.start()

    def _end(self) -> None:
        group = _threaded_group()
        isolate = _import_private(_C10D, _ISOLATION)._set_thread_isolation_mode
        if any(thread.is_lost for thread in self._threads):
            group.ProcessLocalGroup.exception_handle(None)
        for thread in self._threads:
            thread.tasks.put(None)
        for thread in self._threads:
            thread.join(_FAREWELL_SECONDS if thread.is_lost else None)
        self._threads = []
        sys.excepthook = self._hook  # the group replaced it
        isolate(False)
        group.ProcessLocalGroup.reset()
        del group.ProcessLocalGroup.send, group.ProcessLocalGroup.recv
        group.Collective.join = self._join
        for name, switch in self._loss_switches.items():
            setattr(sys.modules[_LOSS], name, switch)
        group._uninstall_threaded_pg()


@dataclasses.dataclass
class _Task:
    """One run of a program on one rank."""

    program: Callable[[int], Any]
    outcome: ThreadOutcome = dataclasses.field(default_factory=ThreadOutcome)
    ended: threading.Event = dataclasses.field(default_factory=threading.Event)


class _RankThread(threading.Thread):
    """One rank: joins the group and runs tasks until it gets None.

    Attributes:
        is_lost: whether its last run failed, or did not end.
    """

    def __init__(self, rank: int, ranks: int, store: Any) -> None:
        super().__init__(daemon=True)
        self.rank, self.ranks, self.store = rank, ranks, store
        self.tasks: queue.SimpleQueue[_Task | None] = queue.SimpleQueue()
        self.is_lost = False

    def run(self) -> None:
        is_member = False
        while (task := self.tasks.get()) is not None:
            try:
                if not is_member:
                    distributed.init_process_group(
                        "threaded", rank=self.rank, world_size=self.ranks, store=self.store
                    )
                    is_member = True
                task.outcome.value = task.program(self.rank)
                task.outcome.done = True
            except SystemExit:
                # Raised in a thread that waits for a failed rank.
                break
            except BaseException as error:  # noqa: BLE001  (some of torch's are no `Exception`)
                task.outcome.error, task.outcome.done = error, True
                _threaded_group().ProcessLocalGroup.exception_handle(error)
            finally:
                task.ended.set()
        with contextlib.suppress(Exception):
            distributed.destroy_process_group()


def _threaded_group() -> Any:
    """The threaded process group of torch's own tests."""
    names = ("Collective", "ProcessLocalGroup", "_install_threaded_pg", "_uninstall_threaded_pg")
    return _import_private(_THREADED_GROUP, *names)


class _Mail:
    """Tensors that ranks have sent and others have not received yet."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.sent: dict[tuple[Any, ...], list[list[Tensor]]] = {}


# Seconds after which a waiting rank looks whether another one has failed.
_PATIENCE = 0.2


def _deliver_messages(group: Any) -> None:
    """Add `send` and `recv` to the threaded group, which has collectives only."""
    mail, done = _Mail(), _threaded_group().ret_work
    work: Any = _import_private(_C10D, "Work").Work

    class Receipt(work):  # type: ignore[misc]
        """A message that may not have been sent yet."""

        def __init__(self, key: tuple[Any, ...], tensors: list[Tensor]) -> None:
            super().__init__()
            self.key, self.tensors, self.arrived = key, tensors, False

        def wait(self, timeout: Any = None) -> bool:
            if self.arrived:
                return True
            with mail.changed:
                while not mail.sent.get(self.key):
                    if group._terminate.is_set():
                        sys.exit("another rank failed")
                    mail.changed.wait(_PATIENCE)
                parts = mail.sent[self.key].pop(0)
            with torch.no_grad():
                for tensor, part in zip(self.tensors, parts, strict=True):
                    tensor.copy_(part)
            self.arrived = True
            return True

        def is_completed(self) -> bool:
            return self.arrived

    def send(self: Any, tensors: list[Tensor], to: int, tag: int) -> Any:
        _hear("send", tensors)
        with mail.changed:
            parts = [tensor.detach().clone() for tensor in tensors]
            mail.sent.setdefault((self.pg_name, self._rank, to, tag), []).append(parts)
            mail.changed.notify_all()
        return done(tensors)

    def receive(self: Any, tensors: list[Tensor], source: int, tag: int) -> Any:
        return Receipt((self.pg_name, source, self._rank, tag), tensors)

    group.send, group.recv = send, receive


_LOSS = "torch.distributed.tensor.parallel.loss"
_SWITCHES = ("_enable_custom_loss_ops", "_disable_custom_loss_ops")


def _count_loss_switches() -> dict[str, Any]:
    """Let `loss_parallel()` end when the last thread leaves it; returns the original functions.

    It changes a table of the process, so the first rank to leave would end it for the others.
    """
    module = sys.modules.get(_LOSS)
    switches = {name: getattr(module, name) for name in _SWITCHES if hasattr(module, name)}
    if len(switches) < len(_SWITCHES):
        return {}
    lock, within = threading.Lock(), [0]

    def enable() -> None:
        with lock:
            if not within[0]:
                switches[_SWITCHES[0]]()
            within[0] += 1

    def disable() -> None:
        with lock:
            within[0] -= 1
            if not within[0]:
                switches[_SWITCHES[1]]()

    for name, switch in zip(_SWITCHES, (enable, disable), strict=True):
        setattr(module, name, switch)
    return switches


def _mode_flags() -> dict[str, bool]:
    """Torch's process-wide flags for active dispatch modes."""
    module = _import_private(_MODES, "TorchDispatchMode")
    return {name: value for name, value in vars(module).items() if name.startswith("_is_in_")}


def _set_mode_flags(flags: dict[str, bool]) -> None:
    """Restore these flags.

    On exit, a mode restores the flags from its entry. If threads exit in another order, the flags
    stay set forever, and Dynamo compiles differently.
    """
    module = _import_private(_MODES, "TorchDispatchMode")
    for name, value in flags.items():
        setattr(module, name, value)
    set_flag = getattr(module, "set_is_in_mode_without_ignore_compile_internals", None)
    if set_flag is not None:
        set_flag(flags.get("_is_in_any_mode_without_ignore_compile_internals", False))


# --- What ranks send ------------------------------------------------------------------------------

# Seen where it is sent. Only digests are kept: two ranks that always send the same have the same
# list of them.


@dataclasses.dataclass(frozen=True)
class Message:
    """What a rank gave to one collective, or sent to another rank.

    Attributes:
        kind: the name of the collective, in small letters: `allreduce`, `reducescatter` ...
        digest: of the bits of all tensors.
    """

    kind: str
    digest: bytes

    @property
    def scatters_a_sum(self) -> bool:
        """Whether each rank gets a part of a sum, as FSDP does with gradients."""
        return "reducescatter" in self.kind


def _message(name: str, tensors: Any) -> Message:
    digest = hashlib.blake2b(digest_size=16)
    for leaf in _pytree.tree_leaves(tensors):
        if isinstance(leaf, torch.Tensor) and not leaf.is_meta:
            digest.update(str((leaf.dtype, tuple(leaf.shape))).encode())
            digest.update(_bits(leaf))
    return Message(name.lower().replace("_", ""), digest.digest())


def _bits(tensor: Tensor) -> Any:
    with torch.no_grad():
        plain = tensor.detach().cpu().contiguous().reshape(-1)
        return plain.view(torch.uint8).numpy()


# Each rank listens to itself; ranks may be threads of one process.
_HEARD = threading.local()


@contextlib.contextmanager
def listening(messages: list[Message]) -> Iterator[list[Message]]:
    """Within it, what this rank gives to collectives is added to the list."""
    if distributed.get_backend() != "threaded":
        with Listener(messages):
            yield messages
        return
    _HEARD.messages = messages
    try:
        yield messages
    finally:
        _HEARD.messages = None


def _hear(name: str, tensors: Any) -> None:
    """Note what this thread, which is a rank, gives to a collective."""
    messages = getattr(_HEARD, "messages", None)
    if messages is not None:
        messages.append(_message(name, tensors))


def _hearing(join: Callable[..., Any]) -> Callable[..., Any]:
    """The method `join` of the threaded group's collectives, which also notes what it is given."""

    def heard(self: Any, rank: int, data: Any) -> Any:
        # A reduction or a broadcast has one list of tensors, all others have outputs and inputs.
        _hear(type(self._collective).__name__, data[1] if isinstance(data, tuple) else data)
        return join(self, rank, data)

    return heard


class Listener(TorchDispatchMode):
    """Notes the collectives of a process: those of torch.distributed and the functional ones."""

    def __init__(self, messages: list[Message]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.messages = messages

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in {"c10d", "_c10d_functional", "c10d_functional"}:
            name = func.__name__.partition(".")[0]
            if not name.startswith(("wait", "recv")):
                named = zip(func._schema.arguments, args, strict=False)
                values = [value for argument, value in named if not argument.name.startswith("out")]
                self.messages.append(_message(name, values))
        return func(*args, **(kwargs or {}))


# --- Redistribution of arguments by DTensor -------------------------------------------------------

_STEP = "redistribute_local_args"


class Redistributed(Exception):  # noqa: N818  (a signal to the caller, not a failure)
    """DTensor was about to move the arguments of an operator."""


@contextlib.contextmanager
def watch_redistribution(*, stop: bool = False) -> Iterator[list[str]]:
    """Yield a list of the operators for which DTensor redistributes the arguments.

    An operator that is not in it ran on the given placements: the placement of its result is a rule
    of DTensor. An operator with a cached rule may be listed as "an operator". With `stop`,
    `Redistributed` is raised instead of redistributing.
    """
    from torch.distributed.tensor import DTensor

    dispatcher: Any = getattr(DTensor, "_op_dispatcher", None)
    original = getattr(dispatcher, _STEP, None)
    if original is None:
        raise UnsupportedTorchError(
            f"DTensor of torch {torch.__version__} has no _op_dispatcher.{_STEP}: "
            "paritas cannot see which sharding rules it uses"
        )
    visited: list[str] = []

    def noting(op_info: Any, *args: Any, **kwargs: Any) -> Any:
        schema = getattr(op_info, "schema", None)
        visited.append(str(getattr(schema, "op", "an operator")))
        if stop:
            raise Redistributed(visited[-1])
        return original(op_info, *args, **kwargs)

    setattr(dispatcher, _STEP, noting)
    try:
        yield visited
    finally:
        delattr(dispatcher, _STEP)


# --- pipeline schedules ---------------------------------------------------------------------------

_SCHEDULES = "torch.distributed.pipelining.schedules"
_NEEDED = ("_loss_fn", "_has_backward", "_n_microbatches", "scale_grads", "step")


@dataclasses.dataclass(frozen=True, eq=False)
class Stage:
    """One stage of a pipeline on this rank.

    Attributes:
        number: of the stage among those of all ranks.
        module: what it runs.
    """

    number: int
    module: nn.Module
    is_first: bool
    is_last: bool


@dataclasses.dataclass(frozen=True, eq=False)
class Pipeline:
    """A pipeline schedule of torch, with the stages of this rank."""

    schedule: Any
    stages: tuple[Stage, ...]

    @property
    def microbatches(self) -> int:
        """Number of micro-batches of a step."""
        return int(self.schedule._n_microbatches)

    @property
    def has_loss(self) -> bool:
        """Whether the schedule has a loss, and so a backward pass."""
        return bool(self.schedule._has_backward)

    def step(
        self, loss: Callable[[Any, Tensor], Tensor], rows: Tensor, args: Any, kwargs: Any
    ) -> tuple[Any, list[Tensor]]:
        """Run one batch, forward and backward.

        Args:
            loss: of the output and the rows of a micro-batch, instead of the schedule's own loss.
            rows: number of each sample in the batch.
            args: of the first stage.
            kwargs: of all stages.

        Returns:
            The output and the loss of each micro-batch; None and nothing without the last stage.
        """
        losses: list[Tensor] = []
        self.schedule._loss_fn = loss
        first = any(stage.is_first for stage in self.stages)
        last = any(stage.is_last for stage in self.stages)
        loss_options = {"target": rows, "losses": losses} if last else {}
        output = self.schedule.step(*(args if first else ()), **loss_options, **kwargs)
        return output, losses


def pipeline_of(schedule: Any) -> Pipeline | None:
    """The pipeline of a schedule; None for any other object.

    Raises:
        UnsupportedTorchError: schedules of this torch are different.
    """
    schedules = sys.modules.get(_SCHEDULES)  # no plan returns what was never imported
    if schedules is None:
        return None
    single, several = schedules.PipelineScheduleSingle, schedules.PipelineScheduleMulti
    if not isinstance(schedule, single | several):
        return None
    single_stage = getattr(schedule, "_stage", None)
    stages = getattr(schedule, "_stages", None) if single_stage is None else [single_stage]
    missing = [name for name in _NEEDED if not hasattr(schedule, name)]
    if missing or not stages:
        raise UnsupportedTorchError(
            f"{type(schedule).__name__} of torch {torch.__version__} has no "
            f"{', '.join(missing) or 'stages'}: paritas cannot run its steps"
        )
    return Pipeline(
        schedule,
        tuple(
            Stage(int(stage.stage_index), stage.submod, bool(stage.is_first), bool(stage.is_last))
            for stage in stages
        ),
    )


# --- FSDP -----------------------------------------------------------------------------------------

_FSDP = "torch.distributed.fsdp._fully_shard._fsdp_collectives"
_FACTORS = "_get_gradient_divide_factors"
_ARGUMENTS = 6


def _has_nccl(group: Any) -> bool:
    """Whether a group sends by NCCL; simulated ranks do not, even on a GPU."""
    return backend_of_group(str(distributed.get_backend(group))) is NCCL


@contextlib.contextmanager
def gradient_factors(*, once: bool) -> Iterator[None]:
    """Within it, FSDP can divide gradients by a factor of the user without NCCL.

    For that, torch uses a reduction that only NCCL has; here it adds them up and divides the sum.

    Args:
        once: on a mesh of one rank, divide by the factor once. Torch divides by it when it copies
            the gradients and, in dtypes other than float32 and bfloat16, once more. A run in
            float64 would show that as a fault of a plan that is right in float32.
    """
    collectives: Any = sys.modules.get(_FSDP)
    original = getattr(collectives, _FACTORS, None)
    if original is None:  # FSDP is not used, or works in another way
        yield
        return

    def factors(
        scattering: Any,
        reducing: Any,
        dtype: torch.dtype,
        device_type: str = "",
        factor: float | None = None,
        force_sum: bool = False,  # noqa: FBT001, FBT002  (torch's order)
    ) -> Any:
        alone = scattering is None or scattering.size() == 1
        has_nccl = device_type != "cpu" and (alone or _has_nccl(scattering))
        summed = force_sum or (factor is not None and not alone and not has_nccl)
        computed = original(scattering, reducing, dtype, device_type, factor, summed)
        return (None, None, *computed[2:]) if once and alone and factor is not None else computed

    setattr(collectives, _FACTORS, factors)
    try:
        yield
    finally:
        setattr(collectives, _FACTORS, original)


def knows_factors() -> bool:
    """Whether this torch has the function that `gradient_factors` replaces, with its arguments."""
    function = getattr(importlib.import_module(_FSDP), _FACTORS, None)
    return function is not None and len(inspect.signature(function).parameters) == _ARGUMENTS

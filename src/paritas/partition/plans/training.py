"""A training of a few steps, the same on one device and on a rank, with everything noted."""

from __future__ import annotations

import collections
import contextlib
import copy
import dataclasses
import itertools
import warnings
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from paritas._torch.default_dtypes import default_dtype
from paritas._torch.lifting import WIDE
from paritas._torch.rank_lifting import RankLiftMode
from paritas.checking.isolation import copied
from paritas.errors import UsageError
from paritas.partition.plans.data import part_of_batch, to_device
from paritas.partition.plans.losses import loss_of
from paritas.partition.plans.traces import StepTrace
from paritas.partition.plans.watching import ModuleWatch, Names, named_pieces, piece_of
from paritas.partition.ranks.serving import described
from paritas.recording.isolation import RandomState

if TYPE_CHECKING:
    from collections.abc import Iterator

    from paritas.partition.plans.program import Program
    from paritas.partition.plans.traces import Piece, Trace

__all__ = ["Built", "Manner", "build_model", "same_surroundings", "train"]


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
class Built:
    """A model to be trained.

    Attributes:
        model: as it runs, under its plan if it has one.
        original: what the plan was applied to, which may be within `model`.
        dtype: the floating dtype that most of its parameters came with.
    """

    model: nn.Module
    original: nn.Module
    dtype: torch.dtype


def build_model(program: Program, manner: Manner) -> Built:
    """A model of its own storage, with the same initial values each time; the user's is left alone.

    Raises:
        UsageError: it cannot be made or copied.
    """
    given = program.model
    torch.manual_seed(program.seed)
    with default_dtype(manner.default):  # drawn in float64, initial values would be others
        made = given if isinstance(given, nn.Module) else _made(given)
    try:
        model = copy.deepcopy(made)
    except Exception as error:
        if made is given:
            raise UsageError(
                f"the model cannot be copied ({described(error)}): give a function that makes it"
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
    return Built(model, model, dtype)


def _made(factory: Any) -> nn.Module:
    try:
        made = factory()
    except Exception as error:
        raise UsageError(f"the function that makes the model raised {described(error)}") from error
    if not isinstance(made, nn.Module):
        raise UsageError(f"the function that makes the model gave {made!r:.80}, not a module")
    return made


def train(program: Program, built: Built, manner: Manner, trace: Trace) -> None:
    """Do all steps and write them into the trace, as far as they go.

    What the program raises is written there too and raised again.
    """
    model, running = built.model, manner.running(built.dtype)
    names = Names.within(model, built.original)
    watch = ModuleWatch(names, trace, keep=program.steps if manner.watch_modules else None)
    try:
        trace.initial = {**_parameters(names), **_buffers(names)}
        optimizer = _optimizer(program, model)
        for _ in range(program.steps):
            trace.steps.append(StepTrace())
            with _seeded(program.seed + len(trace.steps), manner, trace):
                _one_step(program, names, optimizer, manner, trace, watch, running)
    except Exception as error:
        trace.error = described(error)
        raise
    finally:
        watch.close()


def _one_step(
    program: Program,
    names: Names,
    optimizer: torch.optim.Optimizer,
    manner: Manner,
    trace: Trace,
    watch: ModuleWatch,
    running: contextlib.AbstractContextManager[Any],
) -> None:
    number, noted = len(trace.steps) - 1, trace.steps[-1]
    given = part_of_batch(program, trace.rank, number) if trace.ranks > 1 else program.batch(number)
    batch = to_device(copied(given, widen=manner.wide), manner.device)
    with torch.enable_grad(), running:
        output = names.model(*batch.args, **batch.kwargs)
        loss = loss_of(program, output, batch, trace)
    noted.outputs, noted.loss = named_pieces(output), piece_of(loss)
    with watch.backward(), running:
        loss.backward()
    noted.gradients = _gradients(names)
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


def _optimizer(program: Program, model: nn.Module) -> torch.optim.Optimizer:
    if program.optimizer is None:
        return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    made = program.optimizer(model.parameters())
    if not isinstance(made, torch.optim.Optimizer):
        raise UsageError(f"the function that makes the optimizer gave {made!r:.80}")
    return made


def _parameters(names: Names) -> dict[str, Piece]:
    return {
        names.of(path): piece_of(parameter)
        for path, parameter in names.model.named_parameters(remove_duplicate=False)
    }


def _buffers(names: Names) -> dict[str, Piece]:
    return {
        names.of(path): piece_of(buffer)
        for path, buffer in names.model.named_buffers(remove_duplicate=False)
    }


def _gradients(names: Names) -> dict[str, Piece | None]:
    return {
        names.of(path): None if parameter.grad is None else piece_of(parameter.grad)
        for path, parameter in names.model.named_parameters(remove_duplicate=False)
        if parameter.requires_grad
    }

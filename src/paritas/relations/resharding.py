"""Checkpoints on another number of ranks: what was saved must be what is loaded.

A model is trained for a few steps. Its parameters, buffers and the state of its optimizer are cut
into shards over simulated ranks by FSDP2, saved by `torch.distributed.checkpoint`, and loaded into
a new model on another number of ranks. Nothing is computed on the way, so every bit must be there.
"""

from __future__ import annotations

import copy
import tempfile
import warnings
from typing import TYPE_CHECKING, Any

import torch
from torch import distributed, nn

from paritas.core.errors import in_one_line
from paritas.core.execution.ways import DoesNotApply
from paritas.core.torch_private.dynamo import undo_compile
from paritas.core.torch_private.ranks import run_in_threads
from paritas.relations.relation import (
    Relation,
    RelationFamily,
    make_relations,
)
from paritas.relations.training import RATE, STEPS, Lesson, training

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from torch import Tensor

    from paritas.core.execution.subjects import Inputs
    from paritas.relations.relation import Case, CheckedModel

# From how many ranks onto how many; one rank loads without a process group.
PAIRS = ((2, 4), (4, 2), (2, 1))
_SECONDS = 300.0

# Parameters and buffers by name, and the state of the optimizer by name of the parameter.
State = tuple[dict[str, Any], dict[str, Any]]


def _reshard_cases(checked: CheckedModel) -> Iterator[Case]:
    """One case for each pair of numbers of ranks."""
    lesson = Lesson(checked)
    if undo_compile(checked.model) is not checked.model:
        raise DoesNotApply("a compiled model has no state of its own")
    if not distributed.is_available() or distributed.is_initialized():
        raise DoesNotApply("torch.distributed is not available, or in use by this process")

    def train_copy(model: Any, inputs: Inputs) -> State:
        own_copy = copy.deepcopy(model).cpu()
        optimizer = _adam(own_copy)
        with training(own_copy):
            for _ in range(STEPS):
                optimizer.zero_grad()
                lesson.loss(own_copy, inputs).backward()
                optimizer.step()
        return _whole_state(own_copy, optimizer)

    def straight(model: Any, inputs: Inputs) -> dict[str, Tensor]:
        return _collect_named_tensors(train_copy(model, inputs))

    def way(before: int, after: int) -> Callable[[Any, Inputs], dict[str, Tensor]]:
        def train_and_reshard(model: Any, inputs: Inputs) -> dict[str, Tensor]:
            state = train_copy(model, inputs)
            with tempfile.TemporaryDirectory(prefix="paritas-checkpoint-") as folder:
                save_on_ranks(model, state, before, folder)
                return _collect_named_tensors(load_on_ranks(model, after, folder))

        return train_and_reshard

    for before, after in PAIRS:
        label = f"{before} -> {after} rank{'s' * (after > 1)}"
        yield lesson.case(straight, way(before, after), label, draws_alike=True)


def save_on_ranks(model: nn.Module, state: State, ranks: int, folder: str) -> None:
    """Cut a state into shards on simulated ranks, and save it."""
    from torch.distributed import checkpoint

    models = [_another(model) for _ in range(ranks)]

    def save(rank: int) -> None:
        sharded = _shard_model(models[rank], ranks)
        optimizer = _adam(sharded)
        _set_state(sharded, optimizer, state, whole=True)
        own_state = _own_state(sharded, optimizer)
        checkpoint.save({"model": own_state[0], "optimizer": own_state[1]}, checkpoint_id=folder)

    _on_ranks(save, ranks)


def load_on_ranks(model: nn.Module, ranks: int, folder: str) -> State:
    """Load a checkpoint into a new model on simulated ranks; the whole state afterwards."""
    from torch.distributed import checkpoint

    models = [_another(model) for _ in range(ranks)]

    def load(rank: int) -> State:
        alone = ranks == 1
        sharded = models[rank] if alone else _shard_model(models[rank], ranks)
        pair = sharded, _adam(sharded, RATE / 2)
        own_state = _own_state(*pair)
        loaded = {"model": own_state[0], "optimizer": own_state[1]}
        with warnings.catch_warnings():
            # It warns about what no_dist says.
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            checkpoint.load(loaded, checkpoint_id=folder, no_dist=alone)
        _set_state(*pair, (loaded["model"], loaded["optimizer"]), whole=False)
        return _whole_state(*pair)

    state: State = load(0) if ranks == 1 else _on_ranks(load, ranks)[0]
    return state


def _on_ranks(program: Callable[[int], Any], ranks: int) -> list[Any]:
    outcomes = run_in_threads(program, ranks, _SECONDS)
    for rank, outcome in enumerate(outcomes):
        if outcome.error is not None:
            raised = in_one_line(outcome.error, 200)
            raise RuntimeError(f"rank {rank} of {ranks} raised {raised}") from outcome.error
        if not outcome.done:
            raise RuntimeError(f"rank {rank} of {ranks} did not end in {_SECONDS:g} s")
    return [outcome.value for outcome in outcomes]


def _another(model: nn.Module) -> nn.Module:
    """A model of the same form with other numbers: what is not loaded must not be right."""
    fresh = copy.deepcopy(model).cpu()
    with torch.no_grad():
        for tensor in fresh.state_dict().values():
            if isinstance(tensor, torch.Tensor) and tensor.is_floating_point():
                tensor.mul_(0.5).add_(0.25)
    return fresh


def _shard_model(model: nn.Module, ranks: int) -> nn.Module:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    fully_shard(model, mesh=init_device_mesh("cpu", (ranks,)))
    return model


def _adam(model: nn.Module, rate: float = RATE) -> torch.optim.Optimizer:
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return torch.optim.AdamW(trained, lr=rate)


def _own_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> State:
    from torch.distributed.checkpoint.state_dict import get_state_dict

    model_state, optimizer_state = get_state_dict(model, optimizer)
    return dict(model_state), dict(optimizer_state)


def _whole_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> State:
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    model_state, optimizer_state = get_state_dict(model, optimizer, options=options)
    return copy.deepcopy((dict(model_state), dict(optimizer_state)))


def _set_state(
    model: nn.Module, optimizer: torch.optim.Optimizer, state: State, *, whole: bool
) -> None:
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_state_dict

    state_to_set = copy.deepcopy(state) if whole else state
    set_state_dict(
        model,
        optimizer,
        model_state_dict=state_to_set[0],
        optim_state_dict=state_to_set[1],
        options=StateDictOptions(full_state_dict=whole),
    )


def _collect_named_tensors(state: State) -> dict[str, Tensor]:
    """All tensors of a state by name."""
    model_state, optimizer_state = state
    tensors = {
        name: tensor for name, tensor in model_state.items() if isinstance(tensor, torch.Tensor)
    }
    states: Mapping[str, Any] = optimizer_state.get("state", {})
    for name, table in states.items():
        for key, value in table.items():
            if isinstance(value, torch.Tensor):
                tensors[f"{key} of {name}"] = value
    for number, group in enumerate(optimizer_state.get("param_groups", ())):
        tensors[f"learning rate of group {number}"] = torch.tensor(group["lr"], dtype=torch.float64)
    return {name: tensor.detach() for name, tensor in tensors.items()}


RESHARDING: tuple[Relation, ...] = make_relations(
    RelationFamily.TRAINING,
    (
        "reshard",
        "a distributed checkpoint loaded on another number of ranks = what was saved",
        _reshard_cases,
    ),
    on_request=True,
)

"""What a real rank does for a check: run the operator on its part, then talk to the others.

The same code is run by processes and by threads. Before each collective the ranks tell each other
how it went and what they hold: one that failed, or holds something of another shape, would
otherwise leave its peers waiting, or bring them down.
"""

from __future__ import annotations

import dataclasses
import importlib
import pickle
from typing import TYPE_CHECKING, Any

import torch
from torch import distributed

from paritas._torch.default_dtypes import default_dtype
from paritas.errors import UsageError
from paritas.partition.ranks.collectives import gather, reduce
from paritas.partition.recipes import Concat, Group, OperatorCall, Reduce, Split, Whole
from paritas.partition.running.draws import Draws
from paritas.partition.running.placing import moved, tensors_in
from paritas.partition.running.runner import Runner

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from paritas.partition.recipes import Combine, Place, Placement
    from paritas.partition.running.draws import Reach
    from paritas.partition.running.placing import Values

__all__ = ["Back", "Done", "Sent", "Work", "go_back", "go_forward"]


@dataclasses.dataclass(frozen=True)
class Sent:
    """An operator on its way to a rank: pickled, or by a name under which it can be imported.

    Ranks that are threads of this process have it as it is.
    """

    pickled: bytes | None = None
    name: str = ""
    imports: tuple[str, ...] = ()
    itself: Callable[..., Any] | None = None

    @classmethod
    def pack(cls, function: Callable[..., Any], name: str, imports: Sequence[str] = ()) -> Sent:
        """Find out how it can be sent.

        Args:
            imports: modules that bring it, where it is known by what it is registered as.

        Raises:
            UsageError: in neither way.
        """
        own = f"{getattr(function, '__module__', '')}.{getattr(function, '__name__', '')}"
        for known in (name, own, f"torch.ops.{function}"):  # the last of aten's, and of custom ones
            if _resolved(known) is function:
                return cls(name=known, imports=tuple(imports))
        try:
            return cls(pickled=pickle.dumps(function), imports=tuple(imports))
        except Exception:  # noqa: BLE001  (what an object raises when pickled is its own)
            shown = name or getattr(function, "__qualname__", repr(function))
        raise UsageError(
            f"{shown} can neither be imported by its name nor pickled, so real ranks cannot have "
            "it; define it at the top of a module"
        )

    def unpack(self) -> Callable[..., Any]:
        """The operator, where the rank can have it.

        Raises:
            UsageError: it cannot.
        """
        if self.itself is not None:
            return self.itself
        found: Any = None
        reason = "nothing of that name"
        try:
            for module in self.imports:
                importlib.import_module(module)
            found = pickle.loads(self.pickled) if self.pickled else _resolved(self.name)  # noqa: S301
        except Exception as error:  # noqa: BLE001  (an import may raise anything)
            reason = f"{type(error).__name__}: {error}"
        if not callable(found):
            raise UsageError(
                f"a rank cannot import the operator ({reason}); define it in a module, and before "
                "the first check on real ranks"
            )
        return found  # type: ignore[no-any-return]


@dataclasses.dataclass(frozen=True)
class Work:
    """What a rank needs to run its part forward.

    Tensors travel on the host, and are moved to the device of that kind that the rank has.

    Attributes:
        exchanges: whether the operator is given a group. If it raises, its peers may wait for it
            there and not for what it says; the error itself lets them go.
    """

    operator: Sent
    values: Values
    asked: tuple[bool, ...]
    written: tuple[Place, ...]
    outputs: tuple[Combine, ...]
    default: torch.dtype
    device: str = "cpu"
    seed: int = 0
    draws: list[Tensor] | None = None
    reach: tuple[Reach, ...] = ()
    exchanges: bool = False


@dataclasses.dataclass(frozen=True)
class Back:
    """What a rank is sent for its part of the backward pass; `exchanges` as forward."""

    cotangents: dict[str, Tensor]
    placements: tuple[Placement, ...]
    exchanges: bool = False


@dataclasses.dataclass(frozen=True)
class Done:
    """What a rank gives back.

    Attributes:
        own: its results by path, or its gradients in the order of its tensors.
        live: paths of results that can be differentiated.
        together: what collectives made of all ranks' own; from rank 0 alone.
        error: what its own part raised.
        refused: whether that was no fault of the operator.
    """

    own: dict[Any, Any] = dataclasses.field(default_factory=dict)
    live: frozenset[str] = frozenset()
    together: dict[Any, Any] = dataclasses.field(default_factory=dict)
    error: str | None = None
    refused: bool = False


class _RankRunner(Runner):
    """Runs one part as the check in one process does."""

    def run_part(self, work: Work, values: Values) -> dict[str, Any]:
        self.is_first, self.written = False, work.written
        if work.draws is not None:
            self.draws = Draws()
            self.draws.kept = work.draws
        with default_dtype(work.default), torch.enable_grad():
            mine = {
                place: _own_group() if isinstance(value, Group) else value
                for place, value in self.cloned(values).items()
            }
            with self.drawing(list(work.reach)):
                return self.named(self.invoke(mine), mine)


# The graph of a rank between forward and backward; ranks that are threads share this module.
_KEPT: dict[int, tuple[dict[str, Tensor], list[Tensor]]] = {}


def go_forward(rank: int, ranks: int, work: Work) -> Done:
    """Run the operator on this rank's part, and put the results together by collectives."""
    _KEPT.pop(rank, None)
    done, live = Done(), {}
    tensors: list[Tensor] = []
    try:
        device = _own_device(work, rank)
        values = {place: _here(value, device) for place, value in work.values.items()}
        tensors = [tensor for value in values.values() for tensor in tensors_in(value)]
        for tensor, asked in zip(tensors, work.asked, strict=True):
            tensor.requires_grad_(asked)
        call = OperatorCall(work.operator.unpack())
        live = _RankRunner(call, (), work.seed).run_part(work, values)
    except Exception as error:
        done = Done(error=_words(error), refused=isinstance(error, UsageError))
        if work.exchanges and not done.refused:
            raise
    if not _all_went_well(done, ranks):
        return done
    found = {path: value for path, value in live.items() if isinstance(value, torch.Tensor)}
    _KEPT[rank] = ({path: value for path, value in found.items() if value.requires_grad}, tensors)
    own = {path: value.detach() if path in found else value for path, value in live.items()}
    results = [path for path in found if path.startswith("output")]
    together = {}
    for path, rule in zip(results, work.outputs, strict=False):
        value = _combined(own[path], rule, ranks)
        if value is not None:
            together[path] = value
    kept = together if rank == 0 else {}
    return Done(_on_the_host(own), frozenset(_KEPT[rank][0]), _on_the_host(kept))


def go_back(rank: int, ranks: int, back: Back) -> Done:
    """Send cotangents back through this rank's part, and put the gradients together."""
    outputs, tensors = _KEPT[rank]
    asked = [place for place, tensor in enumerate(tensors) if tensor.requires_grad]
    ends = {path: end for path, end in outputs.items() if path in back.cotangents}
    done, own = Done(), {}
    try:
        if ends and asked:
            found = torch.autograd.grad(
                list(ends.values()),
                [tensors[place] for place in asked],
                [back.cotangents[path].to(end.device) for path, end in ends.items()],
                retain_graph=True,
                allow_unused=True,
            )
            own = dict(zip(asked, found, strict=True))
    except Exception as error:
        done = Done(error=_words(error))
        if back.exchanges:
            raise
    if not _all_went_well(done, ranks):
        return done
    together = {}
    for place, placement in enumerate(back.placements):
        if not tensors[place].requires_grad:
            continue
        value = _combined_gradient(own.get(place), tensors[place], placement, ranks)
        if value is not None:
            together[place] = value
    return Done(_on_the_host(own), together=_on_the_host(together if rank == 0 else {}))


def _own_device(work: Work, rank: int) -> torch.device:
    """The device that a rank has: of GPUs its own, or one that it shares if there are fewer.

    Threads share one: what they exchange is put together where it lies.
    """
    if work.device != "cuda" or work.operator.itself is not None:
        return torch.device(work.device)
    device = torch.device("cuda", rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def _here(value: Any, device: torch.device) -> Any:
    """An argument where the rank has its device; another kind of device is the operator's own."""
    if isinstance(value, torch.device) and value.type != device.type:
        return value
    return moved(value, device)


def _on_the_host(items: dict[Any, Any]) -> dict[Any, Any]:
    return {
        key: item.cpu() if isinstance(item, torch.Tensor) else item for key, item in items.items()
    }


def _combined(tensor: Tensor, rule: Combine, ranks: int) -> Tensor | None:
    match rule:
        case Concat(dim=dim):
            return gather(tensor, dim, ranks)
        case Reduce(reduction=reduction):
            return reduce(tensor, reduction, ranks)
        case _:
            return None


def _combined_gradient(
    gradient: Tensor | None, tensor: Tensor, placement: Placement, ranks: int
) -> Tensor | None:
    """By a collective where a program would use one; a rank without a gradient adds nothing."""
    match placement:
        case Split(dim=dim, halo=(0, 0)):
            return gather(torch.zeros_like(tensor) if gradient is None else gradient, dim, ranks)
        case Whole(summed=True):
            mine = torch.zeros_like(tensor) if gradient is None else gradient
            return reduce(mine, "sum", ranks)
        case _:
            return None


# The group that operators of a rank are given, and the group of all ranks that it was made in.
_GROUPS: dict[int, tuple[Any, Any]] = {}


def _own_group() -> Any:
    """A group of all ranks for the operator alone: what it says there is for no one else's ears."""
    rank, world = distributed.get_rank(), distributed.group.WORLD
    known, group = _GROUPS.get(rank, (None, None))
    if known is not world:
        group = distributed.new_group()
        _GROUPS[rank] = world, group
    return group


def _all_went_well(done: Done, ranks: int) -> bool:
    told: list[Any] = [None] * ranks
    distributed.all_gather_object(told, done.error)
    return all(error is None for error in told)


def _resolved(name: str) -> Any:
    """What a dotted name stands for, or None."""
    parts = name.split(".")
    for cut in range(len(parts) - 1, 0, -1):
        try:
            found: Any = importlib.import_module(".".join(parts[:cut]))
        except (ImportError, ValueError):  # the latter of a name with nothing before a dot
            continue
        for part in parts[cut:]:
            found = getattr(found, part, None)
        return found
    return None


def _words(error: Exception) -> str:
    text = (str(error).strip().splitlines() or [""])[0]
    return f"{type(error).__name__}: {text:.200}"

"""A graph run once on sample inputs, call by call, to keep what calls were really given.

Drawn values fit an operator; recorded ones are those of the model: masks that mask, probabilities
that add up, activations of the size they have.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any

import torch

from paritas.errors import ParitasError, UsageError
from paritas.graphs.operators.foretelling import bytes_words, foretold, numbers_in
from paritas.graphs.operators.resolving import function_of, subject_of
from paritas.graphs.operators.values import CallValues, map_values
from paritas.graphs.recorded_values import values_from_dump
from paritas.graphs.samples import Samples, bound_inputs, copied, listed, shown, tensors_in

if TYPE_CHECKING:
    from paritas.graphs.calls import Graph, GraphCall, TensorValue

__all__ = ["Samples", "sample_values", "values_from_dump"]

_MOST_BYTES = 4 << 30


def sample_values(
    graph: Graph,
    inputs: Any,
    keep: Collection[int],
    *,
    imports: Sequence[str] = (),
    seed: int = 0,
) -> Samples:
    """Run a graph and keep copies of what some of its calls were given.

    Args:
        inputs: of the graph: a tensor, a list or tuple, a dict by name or position, or `Inputs`.
        keep: positions of the calls.
        imports: modules of the user's that hold functions of the graph.
        seed: of drawn numbers, those of dropout and of parameters that the graph does not hold.

    Raises:
        UsageError: the inputs are not those of the graph.
    """
    run = _Run(graph, bound_inputs(graph, inputs), imports, seed)
    kept: dict[int, CallValues] = {}
    last = max(keep, default=-1)
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        for call in graph.calls[: last + 1]:
            given = run.given(call)
            if call.position in keep and given is not None:
                kept[call.position] = copied(given)
            run.run(call, given)
    missing = [call for call in graph.calls if call.position in set(keep) - kept.keys()]
    return Samples(kept, run.notes(missing))


class _Run:
    """The values of a graph while it runs."""

    def __init__(
        self, graph: Graph, inputs: dict[str, torch.Tensor], imports: Sequence[str], seed: int
    ) -> None:
        self._graph = graph
        self._imports = imports
        self._seed = seed
        self._state = {} if graph.state is None else graph.state()
        self._known: dict[str, torch.Tensor] = {key: x.clone() for key, x in inputs.items()}
        self._failed: list[str] = []
        self._drawn: list[str] = []
        self._last_use: dict[str, int] = {}
        for call in graph.calls:
            for value in call.tensors():
                self._last_use[value.name] = call.position

    def given(self, call: GraphCall) -> CallValues | None:
        """What a call is given; None if some of it is unknown."""
        if not all(self._fetch(value) for value in call.tensors()):
            return None

        def tensor_of(value: TensorValue) -> torch.Tensor:
            return self._known[value.name]

        return CallValues(
            map_values(call.args, tensor_of), map_values(dict(call.kwargs), tensor_of)
        )

    def run(self, call: GraphCall, given: CallValues | None) -> None:
        """Run a call, whose results become known unless it fails, and forget what is used up."""
        wanted = [value for value in call.outputs if value.name not in self._known]
        if given is not None and wanted:
            try:
                self._take(call, self._result(call, given))
            except Exception as error:  # noqa: BLE001  (told of in the notes)
                if not call.idle:
                    first = next(iter(str(error).strip().splitlines()), type(error).__name__)
                    told = first if isinstance(error, ParitasError) else f"{call.name}: {first}"
                    self._failed.append(told[:200])
        for value in (*call.tensors(), *call.outputs):
            if self._last_use.get(value.name, -1) <= call.position:
                self._known.pop(value.name, None)

    def notes(self, missing: list[GraphCall]) -> tuple[str, ...]:
        """What did not go as asked."""
        notes: list[str] = []
        if self._drawn:
            notes.append(f"the graph does not hold {listed(self._drawn)}: drawn for the sample run")
        if self._failed:
            notes.append(f"not run on the sample inputs: {listed(self._failed, '; ')}")
        checked = [call for call in missing if not call.idle]
        if checked:
            names = listed([call.name for call in checked])
            notes.append(f"what these calls are given is not known, and drawn: {names}")
        return tuple(notes)

    def _fetch(self, value: TensorValue) -> bool:
        """Make a tensor known, if that can be."""
        if value.name in self._known:
            return True
        if value.kind in {"parameter", "buffer", "constant"}:
            held = self._state.get(value.name)
            if held is None:
                self._drawn.append(value.name)
                held = _drawn(value, self._seed)
            # A copy: what the graph writes to is not to be written to in the user's model.
            self._known[value.name] = held.detach().clone()
            return True
        return False

    def _result(self, call: GraphCall, given: CallValues) -> list[torch.Tensor]:
        if call.obstacle and call.function is None:
            raise UsageError(f"{call.name}: {call.obstacle}")
        self._check_size(call)
        function = function_of(call, self._imports)
        return list(tensors_in(function(*given.args, **given.kwargs)))

    def _check_size(self, call: GraphCall) -> None:
        """Refuse what does not fit the memory, as a file may ask for it."""
        size = sum(_bytes(value) for value in call.outputs)
        lengths = [math.prod(value.shape) for value in call.tensors()]
        numbers = math.prod(max(n, 1) for n in numbers_in((call.args, dict(call.kwargs))))
        widest = max(value.dtype.itemsize for value in call.outputs)
        most = numbers * max(lengths, default=1) * widest
        if most > _MOST_BYTES:
            told = foretold(subject_of(call, self._imports))
            if told is not None:
                size = max(size, told.bytes)
            elif not lengths:
                size = most
        if size > _MOST_BYTES:
            most_words = bytes_words(_MOST_BYTES)
            raise UsageError(f"{call.name} gives {bytes_words(size)}, more than {most_words}")

    def _take(self, call: GraphCall, results: list[torch.Tensor]) -> None:
        said = [(value.shape, value.dtype) for value in call.outputs]
        found = [(tuple(tensor.shape), tensor.dtype) for tensor in results]
        if said != found:
            raise UsageError(f"{call.name} gave {shown(found)}, where the graph says {shown(said)}")
        for value, tensor in zip(call.outputs, results, strict=True):
            self._known[value.name] = tensor


def _drawn(value: TensorValue, seed: int) -> torch.Tensor:
    """A parameter that keeps activations in their range; a buffer that may be a variance."""
    digest = hashlib.sha256(f"{seed}:{value.name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))
    if not value.dtype.is_floating_point:
        return torch.zeros(value.shape, dtype=value.dtype)
    if len(value.shape) > 1:
        scale = 1 / math.sqrt(max(1, math.prod(value.shape[1:])))
        return (torch.randn(value.shape, generator=generator) * scale).to(value.dtype)
    return (0.5 + torch.rand(value.shape, generator=generator)).to(value.dtype)


def _bytes(value: TensorValue) -> int:
    return math.prod(value.shape) * value.dtype.itemsize

"""Two graphs that should compute the same, run on generated inputs and compared."""

from __future__ import annotations

import abc
import contextlib
import dataclasses
import enum
import functools
import math
from typing import TYPE_CHECKING, Any

import torch

from paritas.core.errors import in_one_line
from paritas.core.execution.evidence import Evidence, WideDefault
from paritas.core.execution.item_evidence import GivenItem, GivenLift, ItemEvidence
from paritas.core.execution.observation import Observation, note_decisions
from paritas.core.execution.program import Program
from paritas.core.execution.saved_state import RandomState
from paritas.core.judging.failures import Explainer
from paritas.core.judging.pairs import UNTYPED, Checks, Pair, Ruling, judge_pair
from paritas.core.numerics.contents import leaves
from paritas.core.numerics.flattening import as_plain
from paritas.core.numerics.gates import half_the_digits_agree
from paritas.core.numerics.metrics import bitwise_equal
from paritas.core.precision.lifting import LiftMode, is_rounding
from paritas.core.results.findings import Aspect, Finding, Status, mismatch
from paritas.core.results.items import Item, after_call, output
from paritas.core.torch_private.graphs import as_traced, operator_name
from paritas.core.torch_private.operators import WIDE, own_default
from paritas.core.torch_private.passes import (
    SYMBOLS,
    UNKNOWN_SIZE,
    FrozenGraph,
    TensorSpec,
    UnplayableError,
    has_known_size,
    may_write,
    traced_value,
)
from paritas.core.torch_private.replaying import Stream, Unsized, carry_keys_over, draws_of, replay

if TYPE_CHECKING:
    from torch import Tensor
    from torch.fx import Node

    from paritas.core.execution.observation import RunOptions


# --- Programs, and how two of them compare --------------------------------------------------------

# They run in float64, where rounding is far below any fault, or in their own dtypes if an operator
# has no float64 form. Both sides draw the same random numbers.

# If a larger share of the results is NaN, a second set of inputs is added.
MANY_NANS = 0.1


class PassProgram(abc.ABC):
    """Something that runs on generated inputs: one graph, or two in sequence."""

    def __init__(self) -> None:
        """Start without runs."""
        self._seen: dict[tuple[NumberKind, bool], Observation] = {}
        self._wide_default = WideDefault()

    @abc.abstractmethod
    def play(self, inputs: MadeUpInputs, *, wide: bool) -> tuple[list[Any], dict[str, Tensor]]:
        """Return its results and, by name, the inputs that it may have written to."""

    @property
    @abc.abstractmethod
    def graphs(self) -> tuple[FrozenGraph, ...]:
        """Its graphs."""

    @property
    @abc.abstractmethod
    def returned(self) -> list[Any]:
        """The nodes and constants that it returns, in order."""

    def dtypes(self) -> dict[torch.dtype, int]:
        """Count the floating dtypes that it computes in or casts to."""
        counts: dict[torch.dtype, int] = {}
        for graph in self.graphs:
            for node in graph.nodes:
                for dtype in _node_dtypes(node):
                    counts[dtype] = counts.get(dtype, 0) + 1
        return counts

    def observe(
        self, inputs: MadeUpInputs, *, wide: bool, mode: LiftMode | None = None
    ) -> Observation:
        """Run it once; torch's generators are restored."""

        def once() -> Observation:
            return self._observe_once(inputs, wide=wide, mode=mode)

        return self._wide_default.run(mode, once) if wide else once()

    def _observe_once(
        self, inputs: MadeUpInputs, *, wide: bool, mode: LiftMode | None
    ) -> Observation:
        observation = Observation()
        rng = RandomState.now()
        try:
            with (
                torch.inference_mode(mode=False),
                as_traced(),
                mode or contextlib.nullcontext(),
            ):
                results, after = self.play(inputs, wide=wide)
        except Exception as error:  # noqa: BLE001  (the observation carries it)
            observation.error = error
            return observation
        finally:
            rng.restore()
        for path, leaf in leaves(results):
            observation.outputs[output(f"output{path}")] = leaf
        note_decisions(observation, observation.outputs, mode, floats=True)
        for name, value in after.items():
            if not bitwise_equal(value, inputs.copy(name, wide=wide, always=False)):
                observation.after[after_call(name)] = value
        return observation

    def cached_observation(
        self, inputs: MadeUpInputs, *, wide: bool, used: frozenset[torch.dtype] | None = None
    ) -> Observation:
        """Its results on these inputs; it runs on first use.

        A cast in it is not lifted if it is narrower than the `used` dtypes.
        """
        key = (inputs.numbers, wide)
        if key not in self._seen:
            mode = None
            if wide:
                lifts = None if used is None else functools.partial(is_rounding, used=used)
                mode = LiftMode(torch.float64, own_default(), lifts=lifts)
            self._seen[key] = self.observe(inputs, wide=wide, mode=mode)
        return self._seen[key]


class FrozenProgram(PassProgram):
    """A frozen graph and the keys of its random draws."""

    def __init__(self, graph: FrozenGraph, keys: dict[str, str]) -> None:
        """`keys` are the keys of `draw_keys`."""
        super().__init__()
        self.graph = graph
        self.keys = keys

    @property
    def graphs(self) -> tuple[FrozenGraph, ...]:
        """The one graph."""
        return (self.graph,)

    @property
    def returned(self) -> list[Any]:
        """What the graph returns."""
        return [leaf for _, leaf in leaves(self.graph.returned)]

    def play(self, inputs: MadeUpInputs, *, wide: bool) -> tuple[list[Any], dict[str, Tensor]]:
        """Run the graph."""
        writes = may_write(self.graph)
        args = inputs.of(self.graph, wide=wide, copied=writes)
        results = replay(self.graph, args, self.keys, wide=wide)
        results = list(results) if isinstance(results, list | tuple) else [results]
        return results, tensors_in(self.graph, args) if writes else {}


def tensors_in(graph: FrozenGraph, args: list[Any]) -> dict[str, Tensor]:
    """The tensor arguments of a graph, by name."""
    named = zip(graph.placeholders, args, strict=True)
    return {node.name: value for node, value in named if isinstance(value, torch.Tensor)}


@dataclasses.dataclass(frozen=True, eq=False)
class _PlayedProgram(Program):
    """The program before the pass, on one set of inputs; `wide` if both are compared in float64.

    `PassProgram.observe` sets the default dtype for both programs and for all their runs.
    """

    sets_default = True

    program: PassProgram
    inputs: MadeUpInputs
    wide: bool

    def dtypes(self, native: list[Observation]) -> dict[torch.dtype, int]:
        """The dtypes of the nodes."""
        return {torch.float64: 1} if self.wide else self.program.dtypes()

    def run(self, options: RunOptions) -> list[Observation]:
        """Run it once more."""
        # `as_traced` hides a watch, so a mixed graph is perturbed by its coarsest dtype throughout.
        with options.watch or contextlib.nullcontext():
            return [self.program.observe(self.inputs, wide=options.wide, mode=options.mode)]

    def initial(self, item: Item) -> Any:
        """The input before the run."""
        return self.inputs.copy(item.name, wide=self.wide)


@dataclasses.dataclass
class PassComparison:
    """How two programs compare.

    Attributes:
        differ: a finding for each result that differs.
        compared: number of compared results.
        undecided: results that depend on rounding.
        unknown: results that could not be compared, and why.
    """

    differ: list[Finding] = dataclasses.field(default_factory=list)
    compared: int = 0
    undecided: list[str] = dataclasses.field(default_factory=list)
    unknown: list[str] = dataclasses.field(default_factory=list)


def inputs_for(program: FrozenProgram, constants: dict[str, Tensor]) -> list[MadeUpInputs]:
    """Sets of inputs that a graph accepts; raises `UnplayableError` if there are none.

    `constants` are the known values of some inputs.
    """
    chosen: list[MadeUpInputs] = []
    fewest, failed = 1.0, ""  # the share of NaN, and why it did not run
    for numbers in NumberKind:
        inputs = make_up_inputs(program.graph, numbers).with_values(constants)
        observation = program.cached_observation(inputs, wide=True)
        if observation.error is not None:
            observation = program.cached_observation(inputs, wide=False)
        if observation.error is not None:
            failed = failed or in_one_line(observation.error, 160)
            continue
        share = _share_of_nans(observation)
        if not chosen or share < fewest:
            chosen, fewest = [*chosen[:1], inputs], share
        if fewest <= MANY_NANS:
            break
    if not chosen:
        raise UnplayableError(failed)
    if fewest == 1:
        raise UnplayableError("it gives only NaN on all generated inputs")
    return chosen


def compare(before: PassProgram, after: PassProgram, inputs: MadeUpInputs) -> PassComparison:
    """Run both and compare every result; raises `UnplayableError` if a side cannot be run."""
    failed = ""
    used = frozenset(before.dtypes())
    for wide in (True, False):
        left = before.cached_observation(inputs, wide=wide)
        right = after.cached_observation(inputs, wide=wide, used=used)
        error = left.error or right.error
        if error is None:
            runs = Evidence(_PlayedProgram(before, inputs, wide=wide), [left])
            # Folded constants were computed in their own dtype, and rounded to it.
            lifted = GivenLift(rounded=new_constants(before, after))
            return _compare_runs(runs, left, right, lifted)
        side = "before" if left.error is not None else "after"
        failed = f"the graph {side} it cannot be run op by op: {in_one_line(error, 160)}"
    raise UnplayableError(failed)


def new_constants(before: PassProgram, after: PassProgram) -> set[torch.dtype]:
    """The dtypes of the floating constants that only the program after the pass has."""

    def constants(program: PassProgram) -> dict[str, torch.dtype]:
        return {
            name: value.dtype
            for graph in program.graphs
            for name, value in graph.attributes.items()
            if isinstance(value, torch.Tensor) and value.is_floating_point()
        }

    old_constants = constants(before)
    return {dtype for name, dtype in constants(after).items() if name not in old_constants}


def _compare_runs(
    runs: Evidence[_PlayedProgram], left: Observation, right: Observation, lifted: GivenLift
) -> PassComparison:
    result = PassComparison()
    wide = runs.program.wide
    checks = Checks(dtype=False)
    items = [*left.outputs, *left.after]
    items += [item for item in (*right.outputs, *right.after) if item not in items]
    for item in items:
        pair = as_plain(runs.complete(left, item)), as_plain(runs.complete(right, item))
        result.compared += 1
        evidence = GivenItem(runs, item, *pair, lifted=lifted) if wide else ItemEvidence(runs, item)
        findings, _ = judge_pair(
            Pair(item, *pair, evidence),
            checks,
            gates=(_refuse_other_kind,),
            explainer=None if result.differ else Explainer(left=1),  # only the first is reported
        )
        for finding in findings:
            if finding.status is Status.DIFFERENT and not wide and _is_unmeasured(runs, finding):
                result.unknown.append(f"{item} differs, but its noise cannot be measured")
            elif finding.status is Status.DIFFERENT:
                result.differ.append(finding)
            elif finding.status is Status.UNVERIFIED:
                result.unknown.append(f"{item}: {finding.reason}")
            elif finding.status is Status.UNSTABLE:
                result.undecided.append(f"{item}: {finding.reason}")
    return result


def _refuse_other_kind(pair: Pair) -> Ruling | None:
    """A gate: a number of another kind is not compared by its value."""
    kinds = [_kind_of_value(value) for value in (pair.reference, pair.candidate)]
    if kinds[0] == kinds[1]:
        return None
    about = UNTYPED | {"aspect": Aspect.DTYPE}
    return Ruling(Status.DIFFERENT, f"{kinds[1]} instead of {kinds[0]}", about)


def _is_unmeasured(runs: Evidence[_PlayedProgram], finding: Finding) -> bool:
    """Whether a difference may be rounding of unknown size: half of the digits agree."""
    size = finding.metrics.rel_l2 if finding.metrics is not None else math.inf
    small = half_the_digits_agree(size, runs.unit)
    return small and runs.spread(runs.unit, 0, finding.item, 1) is None


def output_dtypes(before: PassProgram, after: PassProgram, inputs: MadeUpInputs) -> list[Finding]:
    """Results with another dtype, by the traced dtypes or, if those differ, by a run."""
    traced = [list(map(_traced_dtype, program.returned)) for program in (before, after)]
    if None not in traced[0] and traced[0] == traced[1]:
        return []
    native = [program.cached_observation(inputs, wide=False) for program in (before, after)]
    if any(observation.error is not None for observation in native):
        return []
    findings = []
    for item, left in native[0].outputs.items():
        right = native[1].outputs.get(item)
        dtypes = getattr(left, "dtype", None), getattr(right, "dtype", None)
        if dtypes[0] is not dtypes[1]:
            reason = f"dtype {dtypes[1]} instead of {dtypes[0]}"
            findings.append(mismatch(item, Aspect.DTYPE, reason))
    return findings


def _traced_dtype(returned: Any) -> str | None:
    """The dtype of a returned node, or its type; None if tracing does not say."""
    meta = getattr(returned, "meta", {"val": returned})
    if not {"val", "example_value"} & meta.keys():
        return None
    value = meta.get("val", meta.get("example_value"))
    return str(value.dtype) if isinstance(value, torch.Tensor) else type(value).__name__


def _node_dtypes(node: Any) -> list[torch.dtype]:
    value = node.meta.get("val", node.meta.get("example_value"))
    named = [arg for arg in (*node.args, *node.kwargs.values()) if isinstance(arg, torch.dtype)]
    value_dtypes = [value.dtype] if isinstance(value, torch.Tensor) else []
    return [dtype for dtype in (*value_dtypes, *named) if dtype in WIDE or dtype is torch.float64]


def _kind_of_value(value: Any) -> str:
    if not isinstance(value, torch.Tensor):
        return type(value).__name__
    if value.is_floating_point() or value.is_complex():
        return "complex numbers" if value.is_complex() else "floating numbers"
    return str(value.dtype)


def _share_of_nans(observation: Observation) -> float:
    values = [
        v for _, v in observation.items() if isinstance(v, torch.Tensor) and v.is_floating_point()
    ]
    count = sum(value.numel() for value in values)
    return sum(int(value.isnan().sum()) for value in values) / count if count else 0.0


# --- A joint graph split into forward and backward ------------------------------------------------

# The generators that torch passes to both graphs, to draw the same numbers in each.
FORWARD_STREAM, BACKWARD_STREAM = "fwd_rng_state", "bwd_rng_state"


class SplitProgram(PassProgram):
    """The two graphs, run as autograd runs them.

    Attributes:
        outputs: how many results of the forward graph are outputs of the program.
        forward: the forward graph.
        backward: the backward graph.
        drawn_again: nodes of the backward graph that repeat draws of the forward graph and get
            different numbers.
    """

    def __init__(
        self, joint: FrozenProgram, outputs: int, forward: FrozenGraph, backward: FrozenGraph
    ) -> None:
        """`joint` is the graph that was split."""
        super().__init__()
        self.outputs = outputs
        self.forward = forward
        self.backward = backward
        self._keys = carry_keys_over(joint.graph, joint.keys, forward)
        self._backward_keys, self.drawn_again = self._keys_of_backward(joint)
        self._saved = self._saved_positions()

    @property
    def graphs(self) -> tuple[FrozenGraph, ...]:
        """The forward graph, then the backward graph."""
        return (self.forward, self.backward)

    @property
    def returned(self) -> list[Any]:
        """The outputs of the program, then the gradients."""
        forward, backward = ([leaf for _, leaf in leaves(graph.returned)] for graph in self.graphs)
        return [*forward[: self.outputs], *backward]

    def play(self, inputs: MadeUpInputs, *, wide: bool) -> tuple[list[Any], dict[str, Tensor]]:
        """Run the forward graph and then the backward graph."""
        streams = [node for node in self.forward.placeholders if FORWARD_STREAM in node.name]
        inputs = inputs.with_values({node.name: Stream(node.name) for node in streams})
        writes = any(map(may_write, self.graphs))
        args = inputs.of(self.forward, wide=wide, copied=writes)
        results = list(replay(self.forward, args, self._keys, wide=wide))
        backward_inputs = [results[position] for position in self._saved]
        for node in self.backward.placeholders[len(backward_inputs) :]:
            if BACKWARD_STREAM in node.name:
                backward_inputs.append(Stream(node.name))
            else:
                backward_inputs.append(inputs.copy(node.name, wide=wide))
        gradients = replay(self.backward, backward_inputs, self._backward_keys, wide=wide)
        given_tensors = tensors_in(self.forward, args) if writes else {}
        return [*results[: self.outputs], *gradients], given_tensors

    def _keys_of_backward(self, joint: FrozenProgram) -> tuple[dict[str, str], list[str]]:
        drawn = {draw.key for draw in draws_of(self.forward, self._keys)}
        keys = carry_keys_over(joint.graph, joint.keys, self.backward)
        again: list[str] = []
        for draw in draws_of(self.backward, keys):
            if BACKWARD_STREAM in draw.source:
                twin = draw.source.replace(BACKWARD_STREAM, FORWARD_STREAM)
                keys[draw.source] = self._keys.get(twin, twin)
            elif draw.key in drawn:
                keys[draw.source] = f"{draw.key}, drawn again"
                again.append(draw.path)
        return keys, again

    def _saved_positions(self) -> list[int]:
        """The results of the forward graph that the backward graph takes, in its order.

        Autograd passes numbers first, then tensors.
        """
        returned = [leaf for _, leaf in leaves(self.forward.returned)]
        numbers: list[int] = []
        tensors: list[int] = []
        for position in range(self.outputs, len(returned)):
            value = getattr(returned[position], "meta", {}).get("val")
            positions = numbers if isinstance(value, SYMBOLS) else tensors
            if positions is tensors and not isinstance(value, torch.Tensor):
                raise UnplayableError(
                    f"the forward graph saves {returned[position]}, a {type(value).__name__}"
                )
            positions.append(position)
        saved = [*numbers, *tensors]
        if len(saved) > len(self.backward.placeholders):
            raise UnplayableError("the forward graph saves more than the backward graph takes")
        return saved


# --- Inputs for a graph with known shapes and dtypes ----------------------------------------------

# Operators between a variance and its square root.
_CARRIERS = frozenset(
    """
    convert_element_type _to_copy to unsqueeze view reshape expand add detach alias float double
    clone
    """.split()  # noqa: SIM905
)
_ROOTS = ("sqrt", "rsqrt")
_SEED_USERS = frozenset({"inductor_lookup_seed", "inductor_random", "inductor_randint"})
_STATE_USERS = frozenset({"run_with_rng_state"})
# Weights with at least this many dimensions are scaled to keep sums of their products near one.
_MATRIX = 2


class NumberKind(enum.Enum):
    """The kinds of numbers in a set of inputs; the first kind that a graph accepts is used."""

    ANY = "numbers of both signs"
    POSITIVE_VECTORS = "numbers of both signs, vectors positive"
    POSITIVE = "positive numbers"
    ANY_AND_ZEROS = "numbers of both signs, integers zero"
    POSITIVE_AND_ZEROS = "positive numbers, integers zero"
    NEAR_IDENTITY = "square matrices near the identity"


@dataclasses.dataclass(frozen=True)
class MadeUpInputs:
    """Values for the inputs of a graph, by name.

    Attributes:
        numbers: their kind.
        values: name -> float64 tensor, integer tensor or plain value.
        dtypes: name -> dtype of the tensor in the program.
    """

    numbers: NumberKind
    values: dict[str, Any]
    dtypes: dict[str, torch.dtype]

    def of(self, graph: FrozenGraph, *, wide: bool, copied: bool) -> list[Any]:
        """The inputs of a graph in order; `copied` if the graph may write to them."""
        return [self.copy(node.name, wide=wide, always=copied) for node in graph.placeholders]

    def copy(self, name: str, *, wide: bool, always: bool = True) -> Any:
        """One input; the original if `always` is False and its dtype fits."""
        if name not in self.values:
            raise UnplayableError(f"the pass added the input {name}")
        value = self.values[name]
        dtype = self.dtypes.get(name)
        copy_dtype = WIDE.get(dtype, dtype) if wide and dtype is not None else dtype
        if isinstance(value, Unsized) and copy_dtype is not None:
            make = value.make
            return Unsized(lambda sizes: _copy_as(make(sizes), copy_dtype))
        if isinstance(value, torch.Tensor) and copy_dtype is not None:
            return (
                value if value.dtype is copy_dtype and not always else _copy_as(value, copy_dtype)
            )
        return value

    def with_values(self, values: dict[str, Any]) -> MadeUpInputs:
        """Replace some values."""
        new_values = {
            name: value.detach().to("cpu") if isinstance(value, torch.Tensor) else value
            for name, value in values.items()
        }
        dtypes = {name: v.dtype for name, v in new_values.items() if isinstance(v, torch.Tensor)}
        return dataclasses.replace(
            self, values={**self.values, **new_values}, dtypes={**self.dtypes, **dtypes}
        )


def make_up_inputs(graph: FrozenGraph, numbers: NumberKind) -> MadeUpInputs:
    """Generate inputs for a graph, the same ones every time."""
    inputs = MadeUpInputs(numbers, {}, {})
    # A mask has to select as many elements as the graph's unknown size.
    masks = not all(map(has_known_size, graph.placeholders))
    for position, node in enumerate(graph.placeholders):
        spec = traced_value(node)
        if isinstance(spec, TensorSpec):
            inputs.dtypes[node.name] = spec.dtype
            make = functools.partial(_numbers_for, node, numbers, position + 1, masks=masks)
            inputs.values[node.name] = make({}) if has_known_size(node) else Unsized(make)
        elif isinstance(spec, torch.Generator):
            inputs.values[node.name] = Stream(node.name)
        elif spec is None or isinstance(spec, bool | int | float | complex | str):
            inputs.values[node.name] = spec
        else:
            raise UnplayableError(
                f"no input can be generated for {node.name}, a {type(spec).__name__}"
            )
    return inputs


def _numbers_for(
    node: Node, numbers: NumberKind, seed: int, sizes: dict[Any, int], *, masks: bool
) -> Tensor:
    spec = traced_value(node, sizes)
    generator = torch.Generator("cpu").manual_seed(seed)
    with as_traced():  # not under the caller's modes
        flat = _flat_numbers(node, spec, numbers, generator, masks=masks)
        tensor = flat.as_strided(spec.shape, spec.stride)
        is_square = len(spec.shape) >= _MATRIX and spec.shape[-1] == spec.shape[-2]
        is_square = is_square and tensor.is_floating_point() and 0 not in spec.stride
        if numbers is NumberKind.NEAR_IDENTITY and is_square:
            symmetric = (tensor + tensor.mT) / 8
            tensor.copy_(symmetric + torch.eye(spec.shape[-1], dtype=tensor.dtype, device="cpu"))
        return tensor


def _flat_numbers(
    node: Node, spec: TensorSpec, numbers: NumberKind, generator: torch.Generator, *, masks: bool
) -> Tensor:
    steps = zip(spec.shape, spec.stride, strict=True)
    count = 0 if 0 in spec.shape else 1 + sum((size - 1) * step for size, step in steps)
    if spec.dtype.is_floating_point or spec.dtype.is_complex:
        return _flat_floats(node, spec, numbers, generator, count)
    if spec.dtype is torch.bool and masks:
        return torch.arange(count, device="cpu") < UNKNOWN_SIZE
    if spec.dtype is torch.bool:
        return torch.randint(2, (count,), generator=generator, device="cpu").bool()
    users = {_base_name(user) for user in node.users}
    end = 1 if numbers in {NumberKind.ANY_AND_ZEROS, NumberKind.POSITIVE_AND_ZEROS} else 2
    if users and users <= _SEED_USERS:
        end = 2**62
    elif users and users <= _STATE_USERS:
        end = 256
    drawn = torch.randint(end, (count,), generator=generator, device="cpu")
    return drawn.to(spec.dtype)


def _flat_floats(
    node: Node, spec: TensorSpec, numbers: NumberKind, generator: torch.Generator, count: int
) -> Tensor:
    tensor_options: dict[str, Any] = {
        "generator": generator,
        "dtype": torch.float64,
        "device": "cpu",
    }
    vector = len(spec.shape) < _MATRIX
    positive = numbers in {NumberKind.POSITIVE, NumberKind.POSITIVE_AND_ZEROS}
    positive = positive or (vector and numbers is NumberKind.POSITIVE_VECTORS)
    if positive or _is_variance(node):
        flat = torch.rand(count, **tensor_options) + 0.5
    else:
        flat = torch.randn(count, **tensor_options)
        if not vector:
            flat /= math.sqrt(max(1, spec.shape[-1]))
    if spec.dtype.is_complex:
        flat = torch.complex(
            flat, torch.randn(count, **tensor_options) if not positive else flat.flip(0)
        )
    return flat


def _is_variance(node: Node) -> bool:
    """Whether the graph takes the square root of an input, perhaps plus a small number."""
    pending, visited_nodes = [node], set()
    while pending:
        here = pending.pop()
        for user in here.users:
            if user in visited_nodes:
                continue
            visited_nodes.add(user)
            name = _base_name(user)
            if name.strip("_") in _ROOTS or _takes_for_variance(user, here):
                return True
            if name in _CARRIERS and len(user.all_input_nodes) == 1:
                pending.append(user)
    return False


def _takes_for_variance(user: Node, node: Node) -> bool:
    """Whether a batch norm node takes its argument as the running variance."""
    arguments = getattr(getattr(user.target, "_schema", None), "arguments", ())
    names = [argument.name for argument in arguments]
    if not names and _base_name(user) == "batch_norm":
        names = ["input", "running_mean", "running_var"]
    taken = {**dict(zip(names, user.args, strict=False)), **user.kwargs}
    return taken.get("running_var") is node


def _base_name(node: Node) -> str:
    """`aten.sqrt.default` as `sqrt`."""
    parts = operator_name(node).split(".")
    return parts[1] if len(parts) > 1 else parts[0]


def _copy_as(value: Tensor, dtype: torch.dtype) -> Tensor:
    """A copy in another dtype with the same strides."""
    with as_traced():  # not under the caller's modes
        storage = value.untyped_storage()
        flat = torch.empty(0, dtype=value.dtype, device=value.device).set_(storage)
        copied = flat.to(dtype, copy=True)
        return copied.as_strided(value.shape, value.stride(), value.storage_offset())

"""Plants one fault in a program: where it fits, what it changes, whether `verify` catches it."""

from __future__ import annotations

import copy
import dataclasses
import math
import operator
from typing import TYPE_CHECKING, Any, Literal

import msgspec
import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from paritas.core.errors import UsageError
from paritas.core.execution.evidence import Evidence, WideDefault, run_quietly
from paritas.core.execution.item_evidence import ItemEvidence
from paritas.core.execution.observation import Observation, RunConditions, RunOptions
from paritas.core.execution.running import running_subject
from paritas.core.execution.saved_state import RandomState
from paritas.core.execution.subject_runs import SubjectLift, SubjectProgram
from paritas.core.execution.subjects import Inputs, VerifyConfig, inspect_subject
from paritas.core.judging.comparer import Comparer
from paritas.core.numerics import criterion
from paritas.core.numerics.automatic import (
    FEW_RUNS,
    LIFTED_SLACK_SCALED,
    blind_share,
    nonfinite_mismatch,
)
from paritas.core.numerics.bits import is_inexact
from paritas.core.numerics.criterion import UNIT_F64, Noise
from paritas.core.numerics.pooling import NO_NOISE
from paritas.core.operators.catalogue import operators_of
from paritas.core.results.items import CALL, Item
from paritas.core.torch_private.graphs import node_traits, placeholders, returned_values
from paritas.mutants import operator_faults, reduction_faults
from paritas.mutants.programs import CallPlace, FaultyCall

if TYPE_CHECKING:
    from paritas.core.results.findings import Verdict
    from paritas.mutants.programs import FaultRule, FlatProgram


# --- The kinds of faults --------------------------------------------------------------------------

# These are faults that happen in practice, in compilers, kernels and parallel plans. The numbers
# are fixed: results of different runs are compared by them.


@dataclasses.dataclass(frozen=True)
class Mutation:
    """One kind of fault. Its number, 1 to 42, never changes; `text` says what it does."""

    number: int
    name: str
    text: str


_KINDS = [
    Mutation(1, "mul_to_add", "adds where it should multiply"),
    Mutation(2, "add_to_sub", "subtracts where it should add"),
    Mutation(3, "sub_to_add", "adds where it should subtract"),
    Mutation(4, "dropped_addend", "leaves out a bias or a residual"),
    Mutation(5, "doubled_addend", "adds one addend twice"),
    Mutation(6, "scaled_by_percent", "a result is 1 % too large"),
    Mutation(7, "scaled_by_permille", "a result is 0.1 % too large"),
    Mutation(8, "missing_scale", "leaves out a constant factor"),
    Mutation(9, "dropped_epsilon", "leaves out the epsilon of a denominator"),
    Mutation(10, "larger_epsilon", "an epsilon is two or ten times too large"),
    Mutation(11, "wrong_dim", "a softmax or reduction runs along another axis"),
    Mutation(12, "mean_over_one_less", "a mean is divided by n - 1"),
    Mutation(13, "wrong_correction", "a variance uses the wrong correction"),
    Mutation(14, "rsqrt_to_sqrt", "multiplies by a root it should divide by"),
    Mutation(15, "wrong_activation", "applies another activation"),
    Mutation(16, "dropped_activation", "leaves out an activation"),
    Mutation(17, "other_gelu", "uses the other form of gelu (exact or tanh)"),
    Mutation(18, "transposed_operand", "a square operand is transposed"),
    Mutation(19, "short_contraction", "the last term of a sum is left out"),
    Mutation(20, "zero_row", "one row of a result is zero"),
    Mutation(21, "stale_column", "the last column holds the one before"),
    Mutation(22, "shifted_mask", "a causal mask is one place off"),
    Mutation(23, "shifted_slice", "a slice begins one place off"),
    Mutation(24, "swapped_operands", "two concatenated tensors are swapped"),
    Mutation(25, "flipped_kernel", "a convolution's kernel is mirrored"),
    Mutation(26, "max_to_average", "averages instead of taking the maximum"),
    Mutation(27, "internal_downcast", "computes in a narrower dtype inside"),
    Mutation(28, "stale_buffer", "a buffer keeps its old value"),
    Mutation(29, "dropped_write", "an in-place write is left out"),
    Mutation(30, "aliased_output", "an output overwrites an input"),
    Mutation(31, "output_dtype", "returns an output in another dtype"),
    Mutation(32, "dropped_all_reduce", "only one rank's share of a sum is seen"),
    Mutation(33, "double_all_reduce", "a sum over ranks is taken twice"),
    Mutation(34, "wrong_shard", "two ranks hold each other's shard"),
    Mutation(35, "bias_on_every_rank", "a bias is added on both of two ranks"),
    Mutation(36, "unreduced_gradient", "a gradient is one rank's, or scaled by 1/2"),
    Mutation(37, "permuted_chunks", "two ranks' chunks of a result are swapped"),
    Mutation(38, "equal_masks", "two ranks draw the same dropout mask"),
    Mutation(39, "mean_of_means", "a mean over ranks with unequal shares"),
    Mutation(40, "untied_gradient", "a shared weight's gradient misses one use"),
    Mutation(41, "saturated_integer", "an integer saturates instead of wrapping"),
    Mutation(42, "swallowed_nan", "a comparison drops a NaN"),
]
MUTATIONS: dict[str, Mutation] = {kind.name: kind for kind in _KINDS}


# --- Where a fault fits, and the program with it --------------------------------------------------

_FAULTS: dict[str, FaultRule] = {
    **operator_faults.ACTIVATION_FAULTS,
    **operator_faults.ARITHMETIC_FAULTS,
    **reduction_faults.CONTRACTION_FAULTS,
    **operator_faults.INDEXING_FAULTS,
    **operator_faults.PRECISION_FAULTS,
    **reduction_faults.RANK_FAULTS,
    **reduction_faults.REDUCTION_FAULTS,
    **operator_faults.SPECIAL_FAULTS,
    **operator_faults.STATE_FAULTS,
}

# Operators that change their argument's shape in place: a fault cannot write its result there.
_RESHAPES = operators_of("shapes changed in place")


@dataclasses.dataclass(frozen=True)
class FaultSite:
    """One place where one fault can be planted.

    Attributes:
        node: name of the call that goes wrong, where the program starts to be wrong.
        detail: which of several variants, if there are several.
    """

    node: str
    mutation: str
    detail: str = ""


def sites(program: FlatProgram) -> list[FaultSite]:
    """Every fault that fits the program, in the order of calls, then of fault numbers."""
    planted_faults = [(name, _FAULTS[name]) for name in MUTATIONS if name in _FAULTS]
    return [
        FaultSite(position.node.name, name, detail)
        for position in _call_places(program)
        for name, fault in planted_faults
        for detail in fault.where(position)
    ]


def plant(program: FlatProgram, site: FaultSite) -> GraphModule | None:
    """A copy of the program's module with the fault; None if it does not fit there."""
    fault = _FAULTS.get(site.mutation)
    if fault is None:
        raise UsageError(f"unknown fault {site.mutation!r}; use one of {', '.join(MUTATIONS)}")
    position = next((each for each in _call_places(program) if each.node.name == site.node), None)
    if position is None or site.detail not in fault.where(position):
        return None
    # Change the graph before making a module: generating its code takes the most time.
    graph = copy.deepcopy(program.module.graph)
    node = next(each for each in graph.nodes if each.name == site.node)
    node.target = FaultyCall(node.target, site.mutation, fault, site.detail, position)
    return GraphModule(program.module, graph)


def _call_places(program: FlatProgram) -> list[CallPlace]:
    """The operator calls of a program, and how they relate to its results and inputs."""
    ends = _ends(program)
    inputs = set(placeholders(program.module))
    results = dict(zip(returned_values(program.module), program.results, strict=True))
    call_places = []
    for node in program.calls:
        kind = node_traits(node)
        if kind is None or "out" in node.kwargs or (kind.mutates and kind.name in _RESHAPES):
            continue
        writes = {
            position: _written_result(value, results)
            for position, value in enumerate(node.args)
            if position in kind.mutates and isinstance(value, Node)
        }
        call_places.append(
            CallPlace(
                node=node,
                kind=kind,
                backward=node.name in program.backward,
                ends=ends.get(node, {}),
                writes=writes,
                donor=_donor(node, inputs) if node in ends else None,
            )
        )
    return call_places


def _ends(program: FlatProgram) -> dict[Node, dict[int | None, Item]]:
    """Calls whose value is a result of the program, possibly through views and tuples."""
    items_by_node: dict[Node, dict[int | None, Item]] = {}
    for node, item in zip(returned_values(program.module), program.results, strict=True):
        current: Any = node
        part: Any = None
        while isinstance(current, Node) and current.op == "call_function":
            items_by_node.setdefault(current, {}).setdefault(part, item)
            kind = node_traits(current)
            if current.target is operator.getitem:
                part = current.args[1]
            elif kind is None or not kind.view or part is not None:
                break
            current = current.args[0]
    return items_by_node


def _written_result(value: Node, results: dict[Node, Item]) -> Item | None:
    """The result that a written argument is, or is a view of."""
    waiting, visited_nodes = [value], set()
    while waiting:
        current = waiting.pop()
        if current in results:
            return results[current]
        visited_nodes.add(current)
        kind = node_traits(current)
        same = [current.args[0]] if kind is not None and (kind.view or 0 in kind.mutates) else []
        # A value written in place has the name of the last call that wrote to it.
        same += [user for user in current.users if _returns_written(user, current)]
        waiting += [node for node in same if isinstance(node, Node) and node not in visited_nodes]
    return None


def _returns_written(user: Node, written: Node) -> bool:
    kind = node_traits(user)
    return kind is not None and 0 in kind.mutates and user.args[0] is written


def _donor(node: Node, inputs: set[Node]) -> int | None:
    """An argument that is a program input with the shape and dtype of the result."""
    result = node.meta.get("val")
    if not isinstance(result, Tensor):
        return None
    for position, argument in enumerate(node.args):
        source = argument
        while isinstance(source, Node) and source.op == "call_function":
            kind = node_traits(source)
            if kind is None or kind.name != "detach":
                break
            source = source.args[0]
        if source in inputs and isinstance(argument, Node):
            traced = argument.meta.get("val")
            if isinstance(traced, Tensor) and traced.shape == result.shape:
                return position if traced.dtype == result.dtype else None
    return None


def exact_form(mutant: GraphModule) -> GraphModule:
    """The mutant with its fault in exact arithmetic, for a run in float64.

    Most faults stay the same, but a float64 run would undo a cast to a narrower dtype, for example.
    """
    faulty = [
        node.name
        for node in mutant.graph.nodes
        if isinstance(node.target, FaultyCall) and node.target.fault.exact is not None
    ]
    if not faulty:
        return mutant
    graph = copy.deepcopy(mutant.graph)
    for node in graph.nodes:
        if node.name in faulty:
            node.target = node.target.in_exact_arithmetic()
    return GraphModule(mutant, graph)


# --- The size of a fault in exact arithmetic, relative to the program's own noise -----------------

# Both programs run in float64, where rounding is far below any fault. The change is divided by the
# noise `d` of the program in its own dtype, measured like the judge does: from perturbed runs and
# the reference's own error. This shows, before any judge runs, whether the fault can be
# distinguished from rounding at all.

Band = Literal["clear", "moderate", "faint", "none"]

CLEAR, MODERATE = 8.0, 2.0
# An effect on few elements counts by its worst element, in proportion to the judge's limits: it
# raises an alarm at 12 times the noise in one element, or 2.5 times the noise in all of them.
WORST_SHARE = 5.0
# Smaller relative changes may be float64's own rounding.
NO_EFFECT = 1e-12


@dataclasses.dataclass(frozen=True)
class Effect:
    """What a fault changes.

    Attributes:
        relative: rms of the change over rms of the result, for the result where it is largest.
        over_noise: the change over the noise: the larger of its rms and a fifth of its worst
            element, for the result where that is largest; infinite if an exact property differs
            (integers, NaN positions, aliases, dtypes).
        band: "clear" above 8 times the noise, "moderate" above 2, "faint" below; "none" if nothing
            changes, so there is no fault.
        result: the result where it is largest; empty if nothing changes.
    """

    relative: float
    over_noise: float
    band: Band
    result: str = ""


NO_CHANGE = Effect(0.0, 0.0, "none")


@dataclasses.dataclass(frozen=True)
class _ItemNoise:
    """One floating-point result: its true value and its noise."""

    truth: Tensor
    noise: Noise
    blur: float  # the relative rounding error of float64 itself


@dataclasses.dataclass(frozen=True)
class ProgramNoise:
    """The noise of one program, measured once for all faults planted in it.

    Attributes:
        native: the run in the program's own dtype.
        base: the run in float64, or `native` if there is no wider form.
        items: its floating-point results.
        names: what each result of the flat program is.
    """

    program: FlatProgram
    evidence: Evidence[SubjectProgram]
    native: Observation
    base: Observation
    items: dict[Item, _ItemNoise]
    names: dict[Item, Item]


def program_noise(program: FlatProgram, seed: int = 0) -> ProgramNoise:
    """Measure a program: once in its own dtype, once in float64, three times perturbed.

    Mutants must be judged with the random numbers of the same `seed`.
    """
    subject = inspect_subject(program.module, "reference", "program")
    before = RandomState.now()
    torch.manual_seed(seed)
    rng = RandomState.now()
    conditions = RunConditions(gradients=False, seed=seed)
    inputs = Inputs(tuple(program.fresh_inputs()))
    try:
        with running_subject(subject, rng, conditions) as call:
            native = call(inputs)
        if native.error is not None:
            raise UsageError(f"the program cannot be run: {native.error}") from native.error
        evidence = Evidence(SubjectProgram(subject, inputs, rng, conditions), [native], seed)
        arbiter = evidence.arbiter()
        items = {
            item: _measure_item(evidence, item)
            for item, value in native.items()
            if is_inexact(value)
        }
    finally:
        before.restore()
    names = dict(zip(native.outputs, program.results, strict=True))
    base = native if arbiter is None else arbiter[0]
    return ProgramNoise(program, evidence, native, base, items, names)


def _measure_item(runs: Evidence[SubjectProgram], item: Item) -> _ItemNoise:
    """The noise of one item, as the native judgement measures it."""
    evidence = ItemEvidence(runs, item)
    reference, arbiter = runs.native[0].value(item), evidence.arbiter()
    own_noise = NO_NOISE if arbiter is None else criterion.own_noise(reference, arbiter)
    truth = reference if arbiter is None else arbiter
    unit = criterion.unit_roundoff(reference.dtype)
    noise = Noise(
        unit=unit,
        step=criterion.smallest_step(reference.dtype),
        own=own_noise,
        reference=None if arbiter is None else reference,
        spread=evidence.spread(runs.unit, FEW_RUNS),
        factor=1.0 if arbiter is not None else 2.0,
    )
    if noise.spread is None:
        coarsest = max(unit, runs.unit)  # a float32 result of bfloat16 values is as coarse
        noise = dataclasses.replace(noise, relative=blind_share(coarsest))
    size = criterion.rms(truth)
    blur = LIFTED_SLACK_SCALED * own_noise.whole * UNIT_F64 / runs.unit / size if size else 0.0
    return _ItemNoise(truth, noise, max(NO_EFFECT, blur))


def measure_effect(program: FlatProgram, mutant: GraphModule, noise: ProgramNoise) -> Effect:
    """How much `mutant`, a changed copy of the program, changes the results.

    It runs once in float64. If that shows nothing, it also runs in the program's own dtype, to see
    whether a dtype, an alias or an exception differs.

    Raises:
        UsageError: the noise belongs to another program, or only the float64 run fails.
    """
    if noise.program is not program:
        raise UsageError("the noise belongs to another program; call program_noise on this one")
    wide = noise.base is not noise.native
    before = RandomState.now()
    try:
        observation = _run_mutant(exact_form(mutant), noise, wide=wide)
        if observation.error is not None:
            native_observation = _run_mutant(mutant, noise, wide=False)
            if native_observation.error is not None:
                return _clear_effect("the call")
            raise UsageError(
                f"the planted fault does not run in float64: {observation.error}"
            ) from observation.error
        differences = _differences(noise, observation)
        worst = max(differences, key=lambda effect: effect.over_noise, default=NO_CHANGE)
        if worst.band != "none":
            largest = max(effect.relative for effect in differences)
            return dataclasses.replace(worst, relative=largest)
        return _form_effect(noise, _run_mutant(mutant, noise, wide=False))
    finally:
        before.restore()


def _run_mutant(mutant: GraphModule, noise: ProgramNoise, *, wide: bool) -> Observation:
    side = inspect_subject(mutant, "candidate", "mutant")
    program = dataclasses.replace(noise.evidence.program, subject=side)
    mode = noise.evidence.lift_mode() if wide else None
    return run_quietly(program, RunOptions(wide=wide, mode=mode), WideDefault())[0]


def _differences(noise: ProgramNoise, observation: Observation) -> list[Effect]:
    """The effects on values and aliases, without those that are only rounding."""
    effects = []
    for item in dict.fromkeys([*noise.base.outputs, *noise.base.after, *observation.after]):
        truth = noise.evidence.complete(noise.base, item)
        value = noise.evidence.complete(observation, item)
        item_noise = noise.items.get(item)
        name = noise.names.get(item, item).text
        if (
            item_noise is not None
            and isinstance(value, Tensor)
            and value.shape == item_noise.truth.shape
        ):
            effect = _value_effect(item_noise, value, name)
        else:
            effect = NO_CHANGE if _is_same(truth, value) else _clear_effect(name)
        if effect.band != "none":
            effects.append(effect)
    if observation.aliases != noise.base.aliases:
        effects.append(_clear_effect("memory"))
    return effects


def _value_effect(item: _ItemNoise, value: Tensor, name: str) -> Effect:
    mismatch = nonfinite_mismatch(item.truth, value)
    if mismatch is not None:
        spread = item.noise.spread
        # Where a perturbed run is not finite either, rounding decides.
        decided = mismatch if spread is None else mismatch & torch.isfinite(spread)
        if bool(decided.any()):
            return _clear_effect(name)
    change, size = criterion.rms_difference(value, item.truth), criterion.rms(item.truth)
    if change == 0:
        return NO_CHANGE
    relative = change / size if size else math.inf
    if relative < item.blur:
        return NO_CHANGE
    score = criterion.score(value, item.truth, item.noise).score
    over = max(score.rms_z, score.max_z / WORST_SHARE)
    # NaN must not count as faint.
    over = math.inf if math.isnan(over) else over
    return Effect(relative, over, band_of(over), name)


def band_of(over_noise: float) -> Band:
    """The band of an effect that is not zero."""
    if over_noise > CLEAR:
        return "clear"
    return "moderate" if over_noise > MODERATE else "faint"


def _form_effect(noise: ProgramNoise, observation: Observation) -> Effect:
    """Differences other than values: exceptions, shapes, dtypes, aliases."""
    native = noise.native
    if observation.error is not None:
        return _clear_effect("the call")
    if observation.aliases != native.aliases:
        return _clear_effect("memory")
    for item, value in native.outputs.items():
        other = observation.outputs.get(item)
        if not isinstance(value, Tensor) or not isinstance(other, Tensor):
            continue
        if (value.dtype, value.shape) != (other.dtype, other.shape):
            return _clear_effect(noise.names.get(item, item).text)
    return NO_CHANGE


def _clear_effect(name: str) -> Effect:
    return Effect(math.inf, math.inf, "clear", name)


def _is_same(left: Any, right: Any) -> bool:
    if isinstance(left, Tensor) and isinstance(right, Tensor):
        return left.shape == right.shape and bool(torch.equal(left, right.to(left.dtype)))
    return type(left) is type(right) and bool(left == right)


# --- Many mutants judged against one program, like `verify` does ----------------------------------

# The reference's arbiter and perturbed runs are most of the work. They run once and are shared.
# Each mutant then runs natively, and in float64.


def judge_mutant(mutant: GraphModule, noise: ProgramNoise, *, lift: bool = True) -> Verdict:
    """The verdict of `verify` on a changed copy of the program whose noise this is.

    There is no second call and no diagnosis; gradients are results of the program. Further
    measurements are cached in `noise`. Without `lift`, it is compared only natively.
    """
    evidence = noise.evidence
    candidate = inspect_subject(mutant, "candidate", "mutant")
    config = VerifyConfig(
        raise_on_mismatch=False, verify_gradients=False, verify_second_call=False, lift=lift
    )
    before = RandomState.now()
    try:
        sides = SubjectLift(evidence, candidate, lift=lift)
        (observation,) = sides.program.run(RunOptions())
        comparer = Comparer(sides, evidence.everything, config, 0, CALL)
        comparer.explainer.left = 0  # no diagnosis
        verdict = comparer.compare(noise.native, observation).verdict(strict=False)
        evidence.notes.weaker |= sides.notes.weaker
        notes = tuple(dict.fromkeys((*verdict.notes, *evidence.notes, *sides.notes)))
        return msgspec.structs.replace(verdict, notes=notes)
    finally:
        before.restore()

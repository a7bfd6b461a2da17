"""The reference of a task: what it is called with, what it computes, and what the task is worth."""

from __future__ import annotations

import copy
import dataclasses
import time
import weakref
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
import torch
from torch import nn

from paritas.core.errors import UsageError, in_one_line
from paritas.core.execution.computable import as_computable, is_number, stored_as
from paritas.core.execution.evidence import Demand, Evidence
from paritas.core.execution.item_evidence import ItemEvidence
from paritas.core.execution.observation import RunConditions, input_tensors
from paritas.core.execution.running import running_subject
from paritas.core.execution.saved_state import RandomState
from paritas.core.execution.subject_runs import SubjectProgram
from paritas.core.execution.subjects import Inputs, Subject, input_sets, inspect_subject
from paritas.core.judging.pairs import Pair, judge_pair
from paritas.core.numerics.metrics import bitwise_equal
from paritas.core.register import find_entry
from paritas.core.time_limit import UNLIMITED, TimeLimit
from paritas.core.torch_private.named_operators import sample_calls
from paritas.core.torch_private.operators import DispatchMode
from paritas.kernels.calling import AUTOCAST, CallWatch, modes_of
from paritas.kernels.comparing import encode_inputs, is_far_off
from paritas.kernels.messages import Rehearse, RehearsedCall, SetState, StateSet
from paritas.kernels.processes import CandidateEnded, CandidateProcess
from paritas.kernels.rows import CaseFamily, TaskRating, TrivialCandidate
from paritas.kernels.sides import INIT_INPUTS, INPUTS, Side
from paritas.kernels.weights import redraw_weights
from paritas.kernels.wire import encode

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from paritas.core.execution.observation import Observation, RunOptions
    from paritas.core.results.items import Item
    from paritas.core.workers.server import WorkerServer
    from paritas.kernels.cases import KernelCase
    from paritas.kernels.messages import SideName
    from paritas.kernels.rows import KernelRow

T = TypeVar("T")

_LONGEST_REASON = 160
# A reference that ends this many processes is not called again.
_MOST_ENDS = 8
# How long a case with other indices may take on the CPU.
_SECONDS_ON_CPU = 10.0
# An operator gets the samples of the first dtype that it takes.
_SAMPLED = (torch.float32, torch.int64, torch.bool)


class RefusedCase(Exception):  # noqa: N818  (the case is not asked)
    """The reference itself does not accept a case."""


class ReferenceEnded(RefusedCase):
    """The reference ends its process, breaks its device, or does not return.

    Attributes:
        is_timeout: it does not return.
    """

    def __init__(self, how: str, *, is_timeout: bool = False) -> None:
        super().__init__(how)
        self.is_timeout = is_timeout


@dataclasses.dataclass(frozen=True)
class ReferenceRun:
    """The reference on one case.

    Attributes:
        subject: the reference.
        native: what it computed.
        evidence: how far rounding moves it.
        demand: the perturbed runs so far; they serve all candidates.
        lazy: outputs that are conjugated or negated when they are read.
        written: inputs that it writes to, be it with the same values.
    """

    subject: Subject
    native: Observation
    evidence: Evidence[SubjectProgram]
    demand: Demand
    lazy: frozenset[str] = frozenset()
    written: frozenset[str] = frozenset()

    def renew(self) -> ReferenceRun:
        """The same run without the further runs so far: one of them was interrupted."""
        evidence = Evidence(self.evidence.program, [self.native], self.evidence.seed)
        return dataclasses.replace(self, evidence=evidence, demand=Demand(settles=False))

    @property
    def has_results(self) -> bool:
        """Whether there is anything to compare: not only tensors without elements."""
        output_values = self.native.outputs.values()
        return any(
            not isinstance(output_value, torch.Tensor) or output_value.numel()
            for output_value in output_values
        )


@dataclasses.dataclass(frozen=True)
class JudgedCase:
    """A case with what the reference computed on it.

    Attributes:
        case: the case.
        run: the reference's run.
        row: the result; None as long as it is not judged.
    """

    case: KernelCase
    run: ReferenceRun
    row: KernelRow | None = None


@dataclasses.dataclass(frozen=True)
class Rehearsed:
    """A call of the reference in a process of its own.

    Attributes:
        error: what it raised; empty if it returned.
        seconds: how long it took.
        lazy: outputs that are conjugated or negated when they are read.
        written: inputs that it writes to, be it with the same values.
    """

    error: str = ""
    seconds: float = 0.0
    lazy: frozenset[str] = frozenset()
    written: frozenset[str] = frozenset()


class Rehearsal:
    """The reference in a process of its own, where each call is made before it is made here.

    A reference that crashes or hangs ends that process. One that does so only now and then may
    still end ours.
    """

    def __init__(
        self, name: SideName, server: WorkerServer, *, device: str, seconds: float, limit: TimeLimit
    ) -> None:
        """`seconds` is the time limit of one call, `limit` that of all of them."""
        self._name, self._server, self._device = name, server, device
        self._seconds, self._limit = seconds, limit
        self._is_slow_on_cpu = False
        self._process: CandidateProcess | None = None
        self._made: tuple[int, str] | None = None
        self._weights = 0
        self._ends = 0

    def load(self) -> None:
        """Import the reference there.

        Raises:
            UsageError: importing it ends the process.
        """
        try:
            self._start()
        except CandidateEnded as ended:
            shown = self._name.shown
            raise UsageError(f"REFERENCE {shown!r} cannot be imported: {ended.how}") from None

    def construct(self, key: tuple[int, str], init: Any, seed: int) -> bool:
        """Make what is called in a case there, unless it is there already; False if it raises.

        Raises:
            ReferenceEnded: it cannot be made here.
        """
        if self._process is None or self._process.is_gone or self._made != key:
            self._made, self._weights = None, 0
            construction = self._ask_process(
                lambda process: process.construct(
                    init, seed, self._seconds, key[1], reads_state=False
                )
            )
            self._made = None if construction.error else key
        return self._made is not None

    def set_weights(self, number: int, state: Callable[[], dict[str, Tensor]]) -> None:
        """Set the parameters and buffers of the module there, unless they are there already.

        `number` is 0 for those of the construction.
        """
        if number != self._weights:
            order = SetState(state=encode(state()))
            self._ask_process(lambda process: process.ask(order, StateSet, self._seconds))
            self._weights = number

    def call(self, case: KernelCase, *, gradients: bool) -> Rehearsed:
        """Call the reference there.

        Raises:
            ReferenceEnded: it cannot be called here.
        """
        began = time.monotonic()
        answer = self._rehearse_case(case, self._device, self._seconds, gradients=gradients)
        if not answer.is_usable:
            self.end()
            self._ends += 1
            raise ReferenceEnded(f"the reference breaks its device: {answer.error}")
        return Rehearsed(
            error=answer.error,
            seconds=time.monotonic() - began,
            lazy=frozenset(answer.lazy),
            written=frozenset(answer.written),
        )

    def require_valid_indices(self, case: KernelCase) -> None:
        """Call the reference there on the CPU, which checks each index.

        On other devices, an index out of range is no exception: it ends the process.

        Raises:
            RefusedCase: it raises there, or takes too long.
        """
        slow = "whether its indices are valid takes too long to find out on the CPU"
        if self._is_slow_on_cpu:
            raise RefusedCase(slow)
        try:
            answer = self._rehearse_case(case, "cpu", _SECONDS_ON_CPU, gradients=False)
        except ReferenceEnded as ended:
            self._is_slow_on_cpu = ended.is_timeout
            raise RefusedCase(slow if ended.is_timeout else str(ended)) from None
        if answer.error:
            raise RefusedCase(answer.error[:_LONGEST_REASON])

    def _rehearse_case(
        self, case: KernelCase, device: str, seconds: float, *, gradients: bool
    ) -> RehearsedCall:
        order = Rehearse(
            inputs=encode_inputs(case.inputs), device=device, train=case.train, grad=gradients
        )
        return self._ask_process(lambda process: process.ask(order, RehearsedCall, seconds))

    def _ask_process(self, ask: Callable[[CandidateProcess], T]) -> T:
        if self._ends > _MOST_ENDS:
            raise ReferenceEnded(f"not called: the reference has ended {self._ends} processes")
        try:
            return ask(self._start())
        except CandidateEnded as ended:
            self.end()
            self._ends += 1
            is_timeout = ended.kind == "timed out"
            raise ReferenceEnded(
                f"the reference does not return: {ended.how}", is_timeout=is_timeout
            ) from None

    def _start(self) -> CandidateProcess:
        if self._process is None or self._process.is_gone:
            self.end()
            self._process = CandidateProcess(
                self._name,
                self._server,
                device=self._device,
                seconds=self._seconds,
                limit=self._limit,
                is_candidate=False,
            )
        return self._process

    def end(self) -> None:
        """End the process; the next call starts another."""
        self._made = None
        if self._process is not None:
            self._process.close()
            self._process = None


class KernelTask:
    """A reference with its inputs.

    Attributes:
        side: the reference.
        given: its inputs; several for an operator with samples.
        device: where everything runs.
    """

    def __init__(
        self,
        side: Side,
        make_inputs: Callable[[], Any] | None,
        *,
        device: str,
        seed: int,
        rehearsal: Rehearsal | None = None,
        limit: TimeLimit | None = None,
    ) -> None:
        """Without a rehearsal, a reference that crashes ends this process."""
        self.side, self.device, self.seed = side, device, seed
        self._rehearsal = rehearsal
        self._limit = limit or UNLIMITED
        # Inputs that the task itself has made: their indices are valid.
        self._own_inputs: list[weakref.ref[Inputs]] = []
        self._below_autocast: tuple[Inputs, Observation] | None = None
        self._make_inputs = make_inputs or getattr(side.home, INPUTS, None)
        self.init = self._init_inputs()
        self._subjects: dict[Any, Subject] = {}
        self._modules: dict[Any, nn.Module] = {}
        self._returns_memory = False
        self.given = self._make_inputs_of_task()

    def _init_inputs(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        make = getattr(self.side.home, INIT_INPUTS, None)
        if make is None or not self.side.is_module_class:
            return (), {}
        torch.manual_seed(self.seed)
        user = _call_user(make, INIT_INPUTS)
        if isinstance(user, dict):
            return (), user
        values = list(user)
        # KernelBench's newer tasks return [args, kwargs].
        if len(values) == 2 and isinstance(values[0], list) and isinstance(values[1], dict):  # noqa: PLR2004
            return tuple(values[0]), values[1]
        return tuple(values), {}

    def _make_inputs_of_task(self) -> list[Inputs]:
        if self._make_inputs is not None:
            return self._sets(self.seed)
        if self.side.name.is_operator:
            for dtype in _SAMPLED:
                calls = list(sample_calls(self.side.name.name, dtype, self.device))
                if calls:
                    return [Inputs(args, kwargs) for args, kwargs in calls]
            raise UsageError(
                f"torch has no sample inputs for {self.side.name.shown!r}: give a function that "
                "makes them with --inputs file.py:function"
            )
        raise UsageError(
            f"there are no inputs for {self.side.name.shown!r}: define {INPUTS}() in its file, or "
            "give a function with --inputs file.py:function"
        )

    def _sets(self, seed: int) -> list[Inputs]:
        torch.manual_seed(seed)
        assert self._make_inputs is not None  # noqa: S101  (for the type checker)
        user = _call_user(self._make_inputs, INPUTS)
        if isinstance(user, torch.Tensor):
            user = [user]
        sets = [input_set.map_leaves(self._move_leaf) for input_set in input_sets(user)]
        self._own_inputs += map(weakref.ref, sets)
        return sets

    def _move_leaf(self, leaf: Any) -> Any:
        return leaf.detach().to(self.device) if isinstance(leaf, torch.Tensor) else leaf

    def again(self, number: int) -> Callable[[int], Inputs] | None:
        """Makes one of the sets of inputs under another seed."""
        if self._make_inputs is None:
            return None

        def make(seed: int) -> Inputs:
            sets = self._sets(self.seed + 1000 * seed)
            return sets[min(number, len(sets) - 1)]

        return make

    @property
    def has_weights(self) -> bool:
        """Whether there are parameters or buffers that can be changed."""
        return any(tensor.is_floating_point() for tensor in self.state((0, "", 0, None)).values())

    @property
    def has_modes(self) -> bool:
        """Whether training and evaluation may differ; in the candidate, if not here."""
        return self.side.is_module_class

    # --- The modules ------------------------------------------------------------------------------

    @staticmethod
    def key(case: KernelCase) -> tuple[int, str, int, bool | None]:
        """What distinguishes the module of a case."""
        return case.construction, case.dtype, case.weights, case.train

    def state(self, key: tuple[int, str, int, bool | None]) -> dict[str, Tensor]:
        """Parameters and buffers of the reference by name."""
        if not self.side.is_module_class:
            return {}
        module = self._module(key)
        return {**dict(module.named_parameters()), **dict(module.named_buffers())}

    def _module(self, key: tuple[int, str, int, bool | None]) -> nn.Module:
        if key not in self._modules:
            construction, dtype, weights, train = key
            if weights or train is not None:
                module = copy.deepcopy(self._module((construction, dtype, 0, None)))
                if train is not None:
                    module.train(train)
                if weights:
                    redraw_weights(module, self.seed + weights)
            else:
                if self._rehearsal is not None:
                    self._rehearsal.construct(
                        (construction, dtype), self.init, self.seed + construction
                    )
                module = self._construct_module(construction, dtype)
            self._modules[key] = module
        return self._modules[key]

    def _construct_module(self, construction: int, dtype: str) -> nn.Module:
        args, kwargs = copy.deepcopy(self.init)
        try:
            module: nn.Module = self.side.construct(args, kwargs, self.seed + construction)
            module = module.to(self.device)
            return module.to(getattr(torch, dtype)) if dtype else module
        except Exception as error:
            what = f"the reference cannot be constructed: {in_one_line(error, _LONGEST_REASON)}"
            raise (RefusedCase if dtype else UsageError)(what) from error

    def subject(self, case: KernelCase) -> Subject:
        """The reference of a case."""
        key = self.key(case) if self.side.is_module_class else ()
        if key not in self._subjects:
            call = self._module(self.key(case)) if self.side.is_module_class else self.side.target
            self._subjects[key] = inspect_subject(call, "reference", "REFERENCE")
        return self._subjects[key]

    def accepts(self, case: KernelCase) -> bool:
        """Whether the reference returns something for a case."""
        try:
            if self._rehearsal is not None:
                return not self._rehearse(case, gradients=False).error
            self.run(case, gradients=False)
        except RefusedCase:
            return False
        return True

    def run(self, case: KernelCase, *, gradients: bool) -> ReferenceRun:
        """Call the reference.

        Raises:
            RefusedCase: it raises, draws random numbers, or returns nothing that can be compared.
            ReferenceEnded: it does not return.
            OutOfTime: the time limit was reached, or would be.
        """
        rehearsed = self._rehearse(case, gradients=gradients)
        self._limit.require(rehearsed.seconds)
        subject = self.subject(case)
        rng = RandomState.now()
        conditions = RunConditions(gradients=gradients, seed=self.seed)
        with running_subject(subject, rng, conditions) as call:
            native = call(case.inputs)
        error = native.error or native.gradient_error
        if error is not None:
            raise RefusedCase(in_one_line(error, _LONGEST_REASON)) from error
        if native.drew_random_numbers:
            raise RefusedCase("the reference draws random numbers")
        if not native.outputs:
            raise RefusedCase("the reference returns nothing")
        self._require_defined(subject, rng, case, native)
        if case.is_given or self._returns_memory:
            self._require_the_same_again(subject, rng, case, native)
        self._limit.require()
        program = _TimedProgram(subject, case.inputs, rng, conditions, 1, self._limit)
        evidence = Evidence(program, [native], self.seed)
        demand = Demand(settles=False)
        return ReferenceRun(subject, native, evidence, demand, rehearsed.lazy, rehearsed.written)

    def run_below_autocast(self, case: KernelCase) -> Observation:
        """What the reference computes on the given inputs below autocast; it is computed once.

        Raises:
            RefusedCase: it does not accept them there.
        """
        if self._below_autocast is None or self._below_autocast[0] is not case.inputs:
            with modes_of(AUTOCAST, self.device):
                native = self.run(case, gradients=False).native
            self._below_autocast = case.inputs, native
        return self._below_autocast[1]

    def run_nearby(self, case: KernelCase) -> Observation | None:
        """What the reference computes on inputs that are off by one rounding each, if it does."""
        generator = torch.Generator().manual_seed(self.seed)

        def perturb_leaf(leaf: Any) -> Any:
            if not isinstance(leaf, torch.Tensor) or not is_number(leaf.dtype):
                return leaf
            wide = as_computable(leaf.detach())
            signs = torch.randint(2, leaf.shape, generator=generator).to(wide) * 2 - 1
            return stored_as(wide * (1 + torch.finfo(leaf.dtype).eps * signs), leaf.dtype)

        near = dataclasses.replace(case, inputs=case.inputs.map_leaves(perturb_leaf))
        try:
            return self.run(near, gradients=False).native
        except RefusedCase:
            return None

    def _rehearse(self, case: KernelCase, *, gradients: bool) -> Rehearsed:
        self._limit.require()
        if self._rehearsal is None:
            return Rehearsed()
        key = self.key(case) if self.side.is_module_class else (0, "", 0, None)
        if not self._rehearsal.construct(key[:2], self.init, self.seed + case.construction):
            return Rehearsed()
        self._rehearsal.set_weights(
            key[2], lambda: {name: value.detach() for name, value in self.state(key).items()}
        )
        if self._may_have_wrong_indices(case):
            self._rehearsal.require_valid_indices(case)
        return self._rehearsal.call(case, gradients=gradients)

    def _require_the_same_again(
        self, subject: Subject, rng: RandomState, case: KernelCase, native: Observation
    ) -> None:
        """Refuse a reference that returns what is in memory, as `torch.empty` does."""
        conditions = RunConditions(gradients=False, seed=self.seed)
        with running_subject(subject, rng, conditions) as call, CallWatch(1):
            again = call(case.inputs)
        pairs = ((value, again.outputs.get(item)) for item, value in native.outputs.items())
        if self._returns_memory or any(is_far_off(*pair) for pair in pairs):
            self._returns_memory = True  # what else it returns is no more defined
            raise RefusedCase("the reference returns what is in uninitialized memory")

    def _may_have_wrong_indices(self, case: KernelCase) -> bool:
        """Whether there are integers that were changed, or that index what was made smaller."""
        tensors = dict(input_tensors(case.inputs))
        is_safe = torch.device(self.device).type == "cpu" or case.is_given
        if is_safe or not any(_is_integer(tensor.dtype) for tensor in tensors.values()):
            return False
        if any(own_input() is case.inputs for own_input in self._own_inputs):
            return False
        return not any(
            _has_same_indices(tensors, dict(input_tensors(given_inputs)))
            for given_inputs in self.given
        )

    def _require_defined(
        self, subject: Subject, rng: RandomState, case: KernelCase, native: Observation
    ) -> None:
        """Refuse a case in which integers are what the processor makes of numbers out of range."""
        outputs = (output for output in native.outputs.values() if isinstance(output, torch.Tensor))
        if not any(_is_integer(output.dtype) for output in outputs):
            return
        conditions = RunConditions(gradients=False, seed=self.seed)
        watch = _ConversionWatch()
        with running_subject(subject, rng, conditions) as call, watch:
            call(case.inputs)
        if watch.seen:
            raise RefusedCase(f"the reference converts {watch.seen}, which torch does not define")


@dataclasses.dataclass(frozen=True, eq=False)
class _TimedProgram(SubjectProgram):
    """A reference whose lifted and perturbed runs end at the time limit."""

    limit: TimeLimit = UNLIMITED

    def run(self, options: RunOptions) -> list[Observation]:
        self.limit.require()
        if options.mode is None:
            return super().run(options)
        with _TimeWatch(self.limit):
            return super().run(options)


def _has_same_indices(tensors: dict[str, Tensor], given_tensors: dict[str, Tensor]) -> bool:
    """Whether all shapes, and all integers, are the given ones."""
    return tensors.keys() == given_tensors.keys() and all(
        tensor.shape == given_tensors[path].shape
        and (not _is_integer(tensor.dtype) or bitwise_equal(tensor, given_tensors[path]))
        for path, tensor in tensors.items()
    )


def _is_integer(dtype: torch.dtype) -> bool:
    return not (dtype.is_floating_point or dtype.is_complex or dtype is torch.bool)


class _TimeWatch(DispatchMode):
    """Ends a run at the first operator after the time limit."""

    supports_higher_order_operators = True

    def __init__(self, limit: TimeLimit) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._limit = limit

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run the operator.

        Raises:
            OutOfTime: the time limit was reached.
        """
        self._limit.require()
        return func(*args, **(kwargs or {}))


class _ConversionWatch(DispatchMode):
    """Sees conversions of floating numbers to integers that cannot hold them."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen = ""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run the operator."""
        result = func(*args, **(kwargs or {}))
        target_dtype = (kwargs or {}).get("dtype")
        source: Any = args[0] if args else None
        if str(func).startswith("aten.copy_."):
            target_dtype, source = result.dtype, args[1]
        is_number = isinstance(source, torch.Tensor) and source.is_floating_point()
        if is_number and isinstance(target_dtype, torch.dtype) and _is_integer(target_dtype):
            limits = torch.iinfo(target_dtype)
            truncated = source.detach().double().trunc()
            # The largest integer of 64 bits is no float64; the next number is out of range.
            fits = (truncated >= limits.min) & (truncated < float(limits.max) + 1)
            if not bool(fits.all()):
                self.seen = f"{source.detach()[~fits].flatten()[0].item():.6g} to {target_dtype}"
        return result


def _call_user(function: Callable[[], Any], name: str) -> Any:
    try:
        return function()
    except Exception as error:
        raise UsageError(f"{name}() of the task raised {in_one_line(error, 300)}") from error


# --- What a task is worth: would a candidate that computes nothing pass? --------------------------


def rate_task(cases: Sequence[JudgedCase]) -> TaskRating:
    """Judge the trivial candidates on all cases, the given ones first."""
    finite = [
        case
        for case in cases
        if (case.case.family is not CaseFamily.NONFINITE or _returns_no_nan(case))
        and all(tensor.numel() for _, tensor in input_tensors(case.case.inputs))
    ]
    ordered = sorted(
        finite, key=lambda judged_case: judged_case.case.family is not CaseFamily.GIVEN
    )
    if not ordered:
        return TaskRating()
    first = ordered[0]
    trivial_candidates = [
        _judge_trivial(name, make, ordered, first) for name, make in TRIVIAL.items()
    ]
    return TaskRating(
        trivial=tuple(
            trivial_candidate
            for trivial_candidate in trivial_candidates
            if trivial_candidate is not None
        )
    )


def _returns_no_nan(judged: JudgedCase) -> bool:
    """Whether what goes in as NaN comes out as something else: a count, or whether it is NaN.

    NaN comes out of almost anything that it goes into, and out of the mean of nothing: that shows
    no more than that an input is used.
    """
    tensors = (x for x in judged.run.native.outputs.values() if isinstance(x, torch.Tensor))
    return not any(tensor.is_floating_point() or tensor.is_complex() for tensor in tensors)


def _judge_trivial(
    name: str, make: Any, cases: Sequence[JudgedCase], first: JudgedCase
) -> TrivialCandidate | None:
    """Try one on each case until one refutes it."""
    tried = passed = 0
    passes_given = True
    same_bits = True
    caught_by = ""
    for judged in cases:
        outcome = _passes(make, judged, first)
        if outcome is None:
            continue
        tried += 1
        passes, is_same = outcome
        same_bits &= is_same
        if passes:
            passed += 1
            continue
        caught_by = judged.case.name
        passes_given &= judged.case.family is not CaseFamily.GIVEN
        break
    if not tried:
        return None
    if name == "the input" and passed == tried and same_bits:
        # It is the function itself: the reference copies its input.
        return None
    return TrivialCandidate(
        name=name,
        given=passes_given and tried > 0,
        passed=passed,
        cases=tried,
        caught_by=caught_by,
    )


def _passes(make: Any, judged: JudgedCase, first: JudgedCase) -> tuple[bool, bool] | None:
    """Whether it passes a case, and with the same bits; None if it does not apply."""
    same_bits = True
    applied = False
    for item, value in judged.run.native.outputs.items():
        if not isinstance(value, torch.Tensor) or not value.numel():
            continue
        trivial_value = make(value, item, judged, first)
        if trivial_value is None:
            return None
        applied = True
        trivial_value = trivial_value.to(value.dtype).contiguous()
        if bitwise_equal(value, trivial_value):
            continue
        same_bits = False
        # The perturbed runs that judged the candidate serve here, too.
        evidence = ItemEvidence(judged.run.evidence, item, demand=judged.run.demand)
        findings, _ = judge_pair(Pair(item, value, trivial_value, evidence))
        if not all(finding.status.passes() for finding in findings):
            return False, False
    return (True, same_bits) if applied else None


def _zeros(value: Tensor, *_: Any) -> Tensor:
    return torch.zeros_like(value)


def _constant(value: Tensor, *_: Any) -> Tensor | None:
    if value.numel() == 1:  # one number is always a constant
        return None
    return value.reshape(-1)[:1].clone().expand(value.numel()).reshape(value.shape)


def _mean(value: Tensor, *_: Any) -> Tensor | None:
    if value.numel() == 1:
        return None
    wide = value.to(torch.complex128 if value.is_complex() else torch.float64)
    return torch.full_like(wide, wide.mean().item()).to(value.dtype)


def _input(value: Tensor, _: Item, judged: JudgedCase, __: JudgedCase) -> Tensor | None:
    for _path, tensor in input_tensors(judged.case.inputs):
        if tensor.shape == value.shape and tensor.dtype is value.dtype:
            return tensor.detach().clone()
    return None


def _first_output(
    value: Tensor, item: Item, judged: JudgedCase, first: JudgedCase
) -> Tensor | None:
    """The first output, where the inputs are others."""
    other = first.run.native.outputs.get(item)
    if judged is first or not isinstance(other, torch.Tensor) or other.shape != value.shape:
        return None
    ours, first_inputs = (
        dict(input_tensors(judged_case.case.inputs)) for judged_case in (judged, first)
    )
    same = ours.keys() == first_inputs.keys() and all(
        ours[path].numel() == first_inputs[path].numel()
        and _have_same_values(ours[path], first_inputs[path])
        for path in ours
    )
    return None if same else other


def _have_same_values(ours: Tensor, first_input: Tensor) -> bool:
    """Whether two inputs have the same values in the same order, whatever their dtypes."""
    left, right = (as_computable(input_tensor).reshape(-1) for input_tensor in (ours, first_input))
    return torch.equal(left, right.to(left.dtype))


TRIVIAL: dict[str, Any] = {
    "zeros": _zeros,
    "a constant": _constant,
    "the mean": _mean,
    "the input": _input,
    "the first case's output": _first_output,
}


# --- Planted faults -------------------------------------------------------------------------------

_MOST_FAULTS, _MOST_SECONDS = 60, 30.0


def plant_faults(
    rating: TaskRating, cases: Sequence[JudgedCase], seed: int, seconds: float
) -> TaskRating:
    """Plant faults in the reference, and count those that the given inputs show."""
    case = next(
        (judged_case for judged_case in cases if judged_case.case.family is CaseFamily.GIVEN), None
    )
    if case is None:
        return rating
    try:
        report = find_entry("power")(
            case.case.inputs,
            case.run.subject.call,
            faults=_MOST_FAULTS,
            seconds=min(_MOST_SECONDS, max(seconds, 0.0)),
            gradients=False,
            seed=seed,
        )
    except Exception as error:  # noqa: BLE001  (the rating says why there are none)
        note = f"no faults could be planted: {in_one_line(error, 160)}"
        return msgspec.structs.replace(rating, note=note)
    # A fault that changes nothing on these inputs is one that the task cannot show.
    planted = len(report.judged) + len(report.silent)
    caught = sum(judged_fault.is_caught() for judged_fault in report.judged)
    return msgspec.structs.replace(rating, planted=planted, caught=caught)

"""Compare the record of a candidate's call with what the reference did.

The comparison itself is the house's: bits, the lifted run, the native run against measured noise.
Here the candidate is in another process, so its lifted run is a call there, and its observation is
made from a record. What only a candidate that cheats would do has findings of its own.
"""

from __future__ import annotations

import functools
import importlib.util
import math
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import torch
from torch import Tensor, nn

from paritas.core.execution.computable import as_computable, is_number
from paritas.core.execution.isolation import copy_inputs
from paritas.core.execution.observation import Observation, input_tensors, same_value
from paritas.core.execution.subject_runs import SubjectLift
from paritas.core.execution.subjects import VerifyConfig, inspect_subject
from paritas.core.judging.comparer import CollectedFindings, Comparer
from paritas.core.judging.failures import Explainer
from paritas.core.judging.pairs import UNTYPED, Pair, Ruling, reconsider, settle_pair
from paritas.core.numerics.automatic import nonfinite_mismatch
from paritas.core.numerics.bits import dtype_name, is_inexact
from paritas.core.numerics.contents import ContainerKind, Opaque
from paritas.core.numerics.criterion import unit_roundoff
from paritas.core.operators.catalogue import operators_of
from paritas.core.results.findings import Aspect, Finding, Status, Verdict, mismatch
from paritas.core.results.items import CALL, Item, ItemKind, gradient, harness, in_order, output
from paritas.core.results.wording import list_first
from paritas.kernels.messages import Widening
from paritas.kernels.wire import WireError, decode, encode

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from paritas.core.execution.evidence import Evidence
    from paritas.core.execution.subject_runs import SubjectProgram
    from paritas.core.execution.subjects import Inputs, Subject
    from paritas.core.operators.definitions import Group
    from paritas.kernels.messages import CallRecord, Effects, Encoded
    from paritas.kernels.references import ReferenceRun

_FLOAT64_ONLY = "only the native run was made"


# --- The candidate, as the comparison sees it -----------------------------------------------------


def stand_in(state: Mapping[str, Tensor]) -> Subject:
    """A subject with the parameters and buffers of a candidate in another process."""
    root = nn.Module()
    for path, value in state.items():
        *folders, name = path.split(".")
        module = root
        for folder in folders:
            if not hasattr(module, folder):
                module.add_module(folder, nn.Module())
            module = getattr(module, folder)
        if value.requires_grad:
            module.register_parameter(name, nn.Parameter(value.detach()))
        else:
            module.register_buffer(name, value.detach())
    return inspect_subject(root, "candidate", "CANDIDATE")


def remote_error(described: tuple[str, str]) -> Exception:
    """An exception with the name and text of one that was raised in another process."""
    kind: type[Exception] = type(described[0], (Exception,), {})
    return kind(described[1])


def observation_of(
    record: CallRecord, reference: Observation, names: Mapping[str, str]
) -> Observation:
    """The observation of a call from its record, which may be forged.

    Raises:
        WireError: its values cannot be read.
    """
    try:
        return _read_record(record, reference, names)
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        raise WireError(f"{type(error).__name__}: {error}") from error


def _read_record(
    record: CallRecord, reference: Observation, names: Mapping[str, str]
) -> Observation:
    """Read it.

    Args:
        record: what the candidate's process sent.
        reference: what the reference did; its generators tell where ours would be.
        names: the candidate's name of a parameter -> the reference's.
    """
    observation = Observation(rng_before=reference.rng_before, process=dict(record.settings))
    if record.error is not None:
        observation.error = remote_error(record.error)
        return observation
    before = reference.rng_before
    drew = record.drew and before is not None
    observation.rng_after = (
        before.elsewhere(1) if drew and before is not None else reference.rng_after
    )
    if record.refused:
        return observation
    if record.values is None:
        raise WireError("a record without values")
    values = decode(record.values)
    observation.outputs = {output(path): _leaf(value) for path, value in values["outputs"].items()}
    observation.kinds = {
        path: ContainerKind(name, family, is_tensor)
        for path, (name, family, is_tensor) in record.kinds.items()
    }
    for path, facts in record.facts.items():
        item = output(path)
        observation.strides[item] = facts.strides
        observation.requires_grad[item] = facts.requires_grad
        if facts.is_inference:
            observation.inference.add(item)
    observation.aliases = frozenset(
        (_make_given_item(kind, name, names), output(path)) for kind, name, path in record.aliases
    )
    observation.after = {
        Item(ItemKind.INPUT_AFTER_CALL, path): _leaf(value)
        for path, value in values["after"].items()
    }
    observation.state = {
        Item(ItemKind.STATE_AFTER_CALL, names.get(name, name)): _leaf(value)
        for name, value in values["state"].items()
    }
    observation.gradients = {
        gradient(names.get(name, name)): value for name, value in values["gradients"].items()
    }
    if record.gradient_error is not None:
        observation.gradient_error = remote_error(record.gradient_error)
    return observation


def _make_given_item(kind: str, name: str, names: Mapping[str, str]) -> Item:
    return Item(ItemKind(kind), names.get(name, name) if kind == ItemKind.STATE.value else name)


def _leaf(value: Any) -> Any:
    is_opaque = isinstance(value, dict) and value.keys() == {"opaque"}
    return Opaque(None, str(value["opaque"])) if is_opaque else value


class RemoteLift(SubjectLift):
    """The lifted run of a candidate in another process."""

    def __init__(
        self,
        evidence: Evidence[SubjectProgram],
        candidate: Subject,
        ask: Callable[[Inputs, Widening], CallRecord | None],
        names: Mapping[str, str],
        extensions: Sequence[str],
        own_values: Sequence[str] = (),
    ) -> None:
        """Lift a candidate.

        Args:
            ask: calls the candidate with inputs in float64; it returns the record, or None.
            own_values: floating parameters and buffers that are not the reference's.
        """
        super().__init__(evidence, candidate)
        self._ask, self._names, self._extensions = ask, names, extensions
        self._own_values = own_values

    def _lift_candidate(self) -> list[Observation] | None:
        if self._extensions:
            used = ", ".join(self._extensions)
            self.notes.add_weaker(
                f"{_FLOAT64_ONLY}: the candidate runs code outside torch ({used})"
            )
            return None
        evidence = self.evidence
        wide = Widening(
            dtype=dtype_name(evidence.dtype),
            default=dtype_name(evidence.default),
            used=[dtype_name(dtype) for dtype in evidence.dtypes],
            precisions={
                item.name: dtype_name(output_value.dtype)
                for item, output_value in evidence.native[0].outputs.items()
                if isinstance(output_value, Tensor)
            },
        )
        record = self._ask(copy_inputs(evidence.program.inputs, widen=True), wide)
        if record is None:
            self.notes.add_weaker(f"{_FLOAT64_ONLY}: the candidate ends its process in float64")
            return None
        if record.foreign:
            used = ", ".join(record.foreign)
            self.notes.add_weaker(
                f"{_FLOAT64_ONLY}: the candidate runs code outside torch ({used})"
            )
            return None
        if record.uncompiled:
            self.notes.add_weaker(
                "in float64, what the candidate compiles with torch.compile ran in eager"
            )
        return self._judged_at(record)

    def _judged_at(self, record: CallRecord) -> list[Observation] | None:
        """What the candidate made before the call is rounded, in float64 too: a folded weight."""
        narrow = [name for name in record.narrow if name != "float32"]
        if narrow:
            self.notes.add_weaker(
                f"{_FLOAT64_ONLY}: the candidate computes with {narrow[0]} values of its own"
            )
            return None
        if self._own_values:
            names = list_first(list(self._own_values), 3)
            self._judge_at_float32({f"the candidate computed {names} before the call"})
        elif record.narrow:
            self._judge_at_float32({"the candidate computes with float32 values of its own"})
        return [observation_of(record, self.evidence.native[0], self._names)]


def compare_call(
    run: ReferenceRun,
    record: CallRecord,
    sides: RemoteLift,
    names: Mapping[str, str],
    config: VerifyConfig,
    *,
    explains: bool = True,
    nearby: Callable[[], Observation | None] | None = None,
) -> CollectedFindings:
    """Everything in which the candidate's call differs from the reference's.

    Args:
        explains: diagnose wrong values, which takes longer than judging them.
        nearby: if all values of an input are equal, calls the reference on inputs that are off by
            one rounding each.
    """
    observation = observation_of(record, run.native, names)
    if record.refused:
        collected = CollectedFindings(compared=1)
        for path, kind in record.refused.items():
            reason = f"a tensor of class {kind}, which may compute when it is read"
            advice = "return a plain torch.Tensor"
            collected.add(output(path), Aspect.STRUCTURE, Status.DIFFERENT, reason, advice)
        return collected
    lost = _replace_lost_nans(run, observation)
    comparer = Comparer(sides, run.demand, config, 0, CALL)
    if not explains:
        comparer.explainer = Explainer(left=0)
    collected = comparer.compare(run.native, observation)
    if lost:
        note = "in the candidate and in float64, not in the reference, which loses NaN"
        collected.notes.append(f"{lost} values are NaN or infinite {note}")
    if nearby is not None and not collected.passes:
        alike = _RoundingsAlike(run, nearby)
        collected.findings = reconsider(collected.findings, alike.rule)
    collected.findings = reconsider(collected.findings, _rule_on_far_off)
    collected.notes += [*run.evidence.notes, *sides.notes]
    collected.take(_memory_findings(run.native, observation))
    for paths, what in (
        (record.later, "changes after the call has returned"),
        (record.overwritten, "the result of an earlier call is overwritten by this one"),
        (record.shared, "is in the memory of the result of an earlier call"),
        (record.in_common, "is in memory that other processes may write to"),
        (
            [path for path in record.lazy if path not in run.lazy],
            "is conjugated or negated only when it is read: its memory holds other values",
        ),
    ):
        for path in paths:
            collected.compared += 1
            advice = "return a new tensor, and wait for it"
            collected.add(output(path), Aspect.ALIAS, Status.DIFFERENT, what, advice)
    for path in record.written:
        item = Item(ItemKind.INPUT_AFTER_CALL, path)
        if path not in run.written and item not in observation.after:
            collected.compared += 1
            reason = (
                "is written to during the call, and then restored: others may read it meanwhile"
            )
            collected.findings.append(mismatch(item, Aspect.VALUE, reason, "work on a copy"))
    return collected


def without_own_memory(
    record: CallRecord, names: Mapping[str, str]
) -> tuple[CallRecord, list[str]]:
    """A record without what it says about memory of the candidate's own, and the results there.

    Such a result is in the memory of the result of an earlier call, or is a parameter or buffer
    that only the candidate has. A later call writes to it again.
    """
    if record.error is not None or record.refused:
        return record, []
    state = ItemKind.STATE.value
    aliases = [alias for alias in record.aliases if alias[0] == state and alias[1] not in names]
    paths = [*record.overwritten, *record.shared, *(path for _, _, path in aliases)]
    others = [alias for alias in record.aliases if alias not in aliases]
    rest = msgspec.structs.replace(record, overwritten=[], shared=[], aliases=others)
    return rest, list(dict.fromkeys(paths))


# Rounding to bfloat16, the coarsest dtype that programs compute in, moves a number by 2^-9 of it. A
# result that is off by more than eight of these roundings is not a matter of precision.
_FAR_OFF = 2.0**-6


def _far_off(dtype: torch.dtype) -> float:
    """The limit for a result of this dtype; a result in float8 may round to another neighbour."""
    return max(_FAR_OFF, 2 * unit_roundoff(dtype)) if is_number(dtype) else _FAR_OFF


def _rule_on_far_off(finding: Finding) -> Ruling | None:
    """A candidate that is right in float64 only, by caching or by cheating, is `different`."""
    far = finding.metrics is not None and not finding.metrics.rel_l2 <= _FAR_OFF
    if finding.status is not Status.DEGRADED or not far:
        return None
    return Ruling(Status.DIFFERENT, f"right in float64 only: {finding.reason}")


def _replace_lost_nans(run: ReferenceRun, observation: Observation) -> int:
    """Take the reference's values where it loses a NaN of its inputs; return how many.

    Some vectorised kernels of torch do: where inputs are not finite, a candidate that is NaN or
    infinite as the reference is in float64 is right.
    """
    tensors = [tensor for _, tensor in input_tensors(run.evidence.program.inputs)]
    if all(_is_finite(tensor) for tensor in tensors if is_inexact(tensor)):
        return 0
    count = 0
    for item, value in observation.outputs.items():
        native = run.native.value(item)
        mismatch = _nonfinite_mismatch(native, value)
        arbiter = None if mismatch is None else run.evidence.arbiter()
        wide: Any = None if arbiter is None else arbiter[0].value(item)
        if mismatch is None or not is_inexact(wide) or wide.shape != value.shape:
            continue
        wide = wide.to(value.device)
        wrong = _nonfinite_mismatch(wide, value)
        lost = mismatch & ~wide.isfinite()
        lost = lost if wrong is None else lost & ~wrong
        if bool(lost.any()):
            count += int(lost.sum())
            observation.outputs[item] = torch.where(lost, native.to(value), value)
    return count


def _nonfinite_mismatch(reference: Any, candidate: Any) -> Tensor | None:
    """Where only one of two values is NaN or infinite; None if nowhere, or not comparable."""
    if not (is_inexact(reference) and is_inexact(candidate)) or reference.shape != candidate.shape:
        return None
    return nonfinite_mismatch(candidate, reference)


def _is_finite(tensor: Tensor) -> bool:
    return bool(as_computable(tensor).isfinite().all())


class _RoundingsAlike:
    """Values of a case in which all values of an input are equal.

    Roundings of a sum are taken to be independent of each other; those of equal numbers are equal,
    and add up. And what is exact for one way to compute a mean is not for another: `x - mean` is
    0, or what rounding leaves, which a norm divides by its small epsilon.
    """

    _MOST = 16  # roundings by which a result, or each input, may be off

    def __init__(self, run: ReferenceRun, nearby: Callable[[], Observation | None]) -> None:
        self._run = run
        self._nearby = functools.cache(nearby)

    def rule(self, finding: Finding) -> Ruling | None:
        value = self._run.native.value(finding.item)
        # A value that is wrong in float64, too, is not a matter of rounding.
        is_rounding = finding.status is Status.DEGRADED or (
            finding.status is Status.DIFFERENT and finding.native is not None and not finding.lifted
        )
        if not is_rounding or finding.metrics is None or not isinstance(value, Tensor):
            return None
        limit = min(self._MOST * unit_roundoff(value.dtype), _FAR_OFF / 2)
        if finding.status is Status.DEGRADED and finding.metrics.rel_l2 <= limit:
            reason = f"within {self._MOST} roundings, which are alike where all values are equal"
        elif finding.metrics.max_abs <= self._MOST * self._measure_noise_of(finding.item, value):
            reason = f"within {self._MOST} times what one rounding of the equal inputs changes"
        else:
            return None
        return Ruling(Status.EQUIVALENT, reason)

    def _measure_noise_of(self, item: Item, value: Tensor) -> float:
        """How far the reference itself moves the largest value."""
        near = self._nearby()
        other = None if near is None else near.value(item)
        if not isinstance(other, Tensor) or other.shape != value.shape or not value.numel():
            return 0.0
        ours, nearby_value = as_computable(value).double(), as_computable(other).double()
        distance = (nearby_value - ours).abs().max().item()
        return distance if math.isfinite(distance) else 0.0


def _memory_findings(reference: Observation, candidate: Observation) -> CollectedFindings:
    """Outputs that share memory, unlike the reference's; owning its memory is always right."""
    collected = CollectedFindings(compared=1)
    for other, item in in_order(candidate.aliases - reference.aliases):
        reason = f"shares memory with {other}, unlike in the reference"
        collected.add(item, Aspect.ALIAS, Status.DIFFERENT, reason, "return a new tensor")
    for item, strides in candidate.strides.items():
        reference_strides = reference.strides.get(item, ())
        value = candidate.outputs[item]
        if not value.numel():
            continue
        repeats = [n for n, step in enumerate(strides) if step == 0 and value.shape[n] > 1]
        if any(n >= len(reference_strides) or reference_strides[n] for n in repeats):
            reason = f"strides {list(strides)}: its elements share memory"
            collected.add(item, Aspect.ALIAS, Status.DIFFERENT, reason, "return a new tensor")
    return collected


def ended_verdict(how: str, *, timed_out: bool, log: str) -> Verdict:
    """The verdict of a call that did not return."""
    collected = CollectedFindings(compared=0 if timed_out else 1)
    last = log.strip().splitlines()[-1:] if log.strip() else []
    note = f"it printed last: {last[0][:200]}" if last else ""
    if timed_out:
        advice = "raise call_seconds if the kernel needs longer than that"
        collected.add(harness("candidate"), Aspect.HARNESS, Status.UNVERIFIED, how, advice)
    else:
        reason = f"the reference returns, the candidate does not: {how}"
        collected.add(CALL, Aspect.EXCEPTION, Status.DIFFERENT, reason, raised="Exit")
    if note:
        collected.notes.append(note)
    return collected.verdict(strict=False)


# --- Other callers --------------------------------------------------------------------------------


def is_of_compiler(error: tuple[str, str]) -> bool:
    """Whether torch's compiler could not call a candidate at all: that is not the candidate's."""
    return error[0] in {"Unsupported", "InternalTorchDynamoError", "BackendCompilerFailed"}


# Below autocast, a kernel may round to bfloat16 as the reference does, or not at all. This many
# times the error that the reference has there is not a matter of precision.
_TIMES_CAST = 8.0


def compare_below_autocast(
    native: Observation, cast: Observation, record: CallRecord, names: Mapping[str, str]
) -> CollectedFindings:
    """Compare a call below autocast with the reference's, there and without."""
    collected, candidate_run = CollectedFindings(), observation_of(record, native, names)
    if candidate_run.error is not None:
        collected.compared += 1
        reason = f"the reference returns, the candidate raises {type(candidate_run.error).__name__}"
        collected.add(
            CALL, Aspect.EXCEPTION, Status.DIFFERENT, f"{reason}: {candidate_run.error}"[:300]
        )
        return collected
    for item, value in native.outputs.items():
        candidate_value, other = candidate_run.outputs.get(item), cast.outputs.get(item)
        collected.compared += 1
        ruling = _rule_below_autocast(value, candidate_value, other)
        collected.findings.append(settle_pair(Pair(item, value, candidate_value), ruling))
    return collected


def _rule_below_autocast(value: Any, candidate_value: Any, cast: Any) -> Ruling:
    """A value of the candidate's against the reference's without autocast, and below it."""
    if same_value(candidate_value, cast) or same_value(candidate_value, value):
        reason = "the same bits as the reference, below autocast or without"
        return Ruling(Status.IDENTICAL, reason, UNTYPED)
    if not isinstance(value, Tensor) or not value.is_floating_point():
        decided = not same_value(cast, value)  # by rounding, in the reference too
        status = Status.UNSTABLE if decided else Status.DIFFERENT
        return Ruling(status, "another value below autocast", UNTYPED)
    if not isinstance(candidate_value, Tensor) or candidate_value.shape != value.shape:
        shape = (
            list(candidate_value.shape)
            if isinstance(candidate_value, Tensor)
            else type(candidate_value).__name__
        )
        reason = f"{shape} below autocast instead of {list(value.shape)}"
        return Ruling(Status.DIFFERENT, reason, UNTYPED | {"aspect": Aspect.STRUCTURE})
    cast_distance = relative_distance(value, cast) if isinstance(cast, Tensor) else 0.0
    distance = relative_distance(value, candidate_value)
    allowed = max(_far_off(value.dtype), _TIMES_CAST * cast_distance)
    status = Status.EQUIVALENT if distance <= allowed else Status.DIFFERENT
    reason = f"off by {distance:.3g} of its size below autocast, {allowed:.3g} allowed"
    return Ruling(status, reason, UNTYPED)


def is_far_off(reference: Any, candidate: Any) -> bool:
    """Whether a value is none that rounding, or the order of a sum, makes of another."""
    if not isinstance(reference, Tensor):
        return False
    if not isinstance(candidate, Tensor) or candidate.shape != reference.shape:
        return True
    return not relative_distance(reference, candidate) <= _far_off(reference.dtype)


def relative_distance(reference: Tensor, other: Tensor) -> float:
    """The relative L2 distance; infinity if one is finite where the other is not."""
    is_complex = reference.is_complex() or other.is_complex()
    left, right = (
        as_computable(tensor.detach()).to(
            reference.device, torch.complex128 if is_complex else torch.float64
        )
        for tensor in (reference, other)
    )
    finite = left.isfinite()
    if not torch.equal(finite, right.isfinite()):
        return float("inf")
    apart, size = float((left - right)[finite].norm()), float(left[finite].norm())
    return apart / size if size else apart


# --- What only a candidate that cheats would do ---------------------------------------------------


def outside_findings(
    effects: Effects, *, reference_file: str, own_file: str, temporary: str
) -> CollectedFindings:
    """Files that a call writes, and the reference's file if it is read."""
    collected = CollectedFindings()
    caches = _cache_folders(temporary)
    if reference_file != own_file and reference_file in effects.files:
        collected.notes.append("the candidate imports the reference's file")
        reference_file = ""
    for action, what in effects.outside:
        path = _resolve_path(what)
        is_reference = bool(reference_file) and _source(path) == reference_file != own_file
        if action == "reads" and is_reference:
            reason = "the candidate reads the reference's file"
        elif action in {"connects to", "looks at", "forks", "adds"} or (
            action in {"writes", "deletes", "renames"} and not path.startswith(caches)
        ):
            reason = f"the candidate {action} {what}"
        elif action == "reads" and _is_of_another_process(what, effects.pid):
            reason = f"the candidate reads {what}: what another process does or holds"
        else:
            continue
        collected.compared += 1
        item = Item(ItemKind.SETTING, "files")
        collected.add(item, Aspect.SETTING, Status.DIFFERENT, reason)
    for name in effects.beside:
        collected.compared += 1
        reason = "the candidate writes to memory beside this input"
        item = Item(ItemKind.INPUT_AFTER_CALL, name)
        collected.findings.append(mismatch(item, Aspect.VALUE, reason))
    if effects.threads:
        collected.notes.append(
            f"the candidate leaves {effects.threads} more Python thread(s) running"
        )
    return collected


def _is_of_another_process(path: str, own_pid: int) -> bool:
    match = re.match(r"/proc(?:/(\d+)|$)", path)
    return match is not None and match.group(1) != str(own_pid)


def _source(path: str) -> str:
    """The source of a compiled file of Python; the path itself if it is none."""
    try:
        return importlib.util.source_from_cache(path)
    except (ValueError, NotImplementedError):
        return path


def _resolve_path(path: str) -> str:
    try:
        return str(Path(path).resolve())
    except (OSError, ValueError, RuntimeError):
        return path


@functools.lru_cache(maxsize=8)
def _cache_folders(temporary: str) -> tuple[str, ...]:
    """Where compilers keep what they built."""
    home = Path("~").expanduser()
    named = (
        "TORCH_EXTENSIONS_DIR",
        "TRITON_CACHE_DIR",
        "TORCHINDUCTOR_CACHE_DIR",
        "CUDA_CACHE_PATH",
    )
    folders = [temporary, str(home / ".cache"), str(home / ".triton"), str(home / ".nv")]
    folders += [os.environ[name] for name in named if os.environ.get(name)]
    return (*(_resolve_path(folder) for folder in folders), *_DEVICES)


# Files of these names are devices. Others in this folder are memory that processes share.
_DEVICES = tuple(f"/dev/{name}" for name in ("null", "zero", "tty", "pts", "fd", "nvidia", "kfd"))


def calls_reference(record: CallRecord, reference: Sequence[tuple[str, str]]) -> CollectedFindings:
    """Whether the candidate's call ran the reference's own function."""
    collected = CollectedFindings()
    called_codes = set(record.code)
    if called_codes & set(reference):
        collected.compared += 1
        name = next(iter(called_codes & set(reference)))[1]
        reason = f"the candidate calls the reference ({name})"
        item = Item(ItemKind.SETTING, "code")
        collected.add(item, Aspect.SETTING, Status.DIFFERENT, reason)
    return collected


def forbidden_calls(record: CallRecord, forbidden: Sequence[str]) -> CollectedFindings:
    """Operators that the task forbids, seen through the dispatcher."""
    collected = CollectedFindings()
    for name in record.operators:
        parts = name.split(".")
        hit = [
            forbidden_name for forbidden_name in forbidden if _names_operator(forbidden_name, parts)
        ]
        if hit:
            collected.compared += 1
            reason = f"the candidate calls {name}, which --forbid {hit[0]} rules out"
            item = Item(ItemKind.SETTING, "operators")
            collected.add(item, Aspect.SETTING, Status.DIFFERENT, reason)
    return collected


def _names_operator(forbidden: str, parts: list[str]) -> bool:
    """Whether `torch.matmul` or `aten.mm` names the operator `aten.mm.default`."""
    forbidden_operator = (
        forbidden.removeprefix("torch.").removeprefix("ops.").removeprefix("nn.functional.")
    )
    base_name = parts[1].strip("_") if len(parts) > 1 else parts[0]
    if forbidden_operator in {".".join(parts), ".".join(parts[:2]), base_name}:
        return True
    return base_name in _decomposed(forbidden_operator.removeprefix("aten."))


def _decomposed(function: str) -> set[str]:
    """What a function of torch is by the time the dispatcher sees it."""
    operators = operators_of(*_DECOMPOSED[function]) if function in _DECOMPOSED else ()
    return {name.strip("_") for name in operators} | _ALSO_DECOMPOSED.get(function, set())


_DECOMPOSED: dict[str, tuple[Group, ...]] = {
    "matmul": ("products", "products added to a tensor"),
    "softmax": ("softmax",),
    "log_softmax": ("log softmax",),
    "layer_norm": ("layer norm",),
    "group_norm": ("group norm",),
    "batch_norm": ("batch norm", "functional batch norm"),
    "scaled_dot_product_attention": ("attention",),
    **dict.fromkeys(("conv1d", "conv2d", "conv3d", "conv_transpose2d"), ("convolution",)),
}
# `linear` is only products with a matrix. The last is of devices that torch does not know.
_ALSO_DECOMPOSED = {
    "matmul": {"linear", "matmul"},
    "linear": {"mm", "bmm", "addmm", "linear"},
    "scaled_dot_product_attention": {"scaled_dot_product_fused_attention_overrideable"},
}


def setting_findings(settings: Mapping[str, str], when: str) -> CollectedFindings:
    """What importing or constructing the candidate changes in the process."""
    collected = CollectedFindings()
    for name, how in settings.items():
        if name in _HARMLESS or "random state" in name:
            continue
        collected.compared += 1
        reason = f"{how} by {when}"
        advice = "it was restored; otherwise, everything that runs later would be affected"
        item = Item(ItemKind.SETTING, name)
        collected.add(item, Aspect.SETTING, Status.DIFFERENT, reason, advice)
    return collected


_HARMLESS = {"torch.backends.cudnn.benchmark", "torch.get_num_threads()"}


def encode_inputs(inputs: Inputs) -> Encoded:
    """The inputs of a case for the candidate's process."""
    return encode((list(inputs.args), inputs.kwargs))

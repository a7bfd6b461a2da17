"""Check every split that a configuration claims, and report the result of each."""

from __future__ import annotations

import dataclasses
import re
import warnings
from typing import TYPE_CHECKING

import msgspec
import torch

from paritas.core.errors import ParityWarning, UsageError, first_line
from paritas.core.execution.subjects import usable_device
from paritas.core.judging.failures import FailedSplit, remember_failed
from paritas.core.numerics.contents import leaves
from paritas.core.placement.placement import Recipe, device_of, on_device
from paritas.core.results.findings import Finding, Verdict, unverified
from paritas.core.results.items import Replicate
from paritas.core.results.wording import list_first
from paritas.sharding.operators.annotation import Annotation, Option
from paritas.sharding.operators.configuration import make_call
from paritas.sharding.operators.library import annotation_of_call
from paritas.sharding.operators.recipe_checks import (
    check_confirm,
    check_recipe,
    confirmation,
    drifting,
    failed_split,
    label_items,
)
from paritas.sharding.operators.resolving import resolve_operator
from paritas.sharding.operators.runner import Streams

if TYPE_CHECKING:
    from collections.abc import Mapping

    from paritas.core.operators.calls import OperatorCall
    from paritas.core.results.rank_backends import BackendName
    from paritas.sharding.operators.configuration import PartitionConfig

# The rule of a split comes from the annotation that the user gives, registers, or that the library
# has; failing that, from running the operator. An option without a rule, or one that its rule
# refuses, is `unverified`.


@dataclasses.dataclass(frozen=True)
class CheckSettings:
    """How each split is checked."""

    ranks: int = 2
    seed: int = 0
    strict: bool = False
    confirm: BackendName | None = None

    def check(self, call: OperatorCall, recipe: Recipe, ranks: int | None = None) -> Verdict:
        """Compare a split with the whole; with `confirm`, again on ranks that are processes."""
        ranks = self.ranks if ranks is None else ranks
        verdict = check_recipe(call, recipe, ranks, seed=self.seed, strict=self.strict)
        if self.confirm is None:
            return verdict
        real = confirmation(self.confirm, call, recipe, ranks, seed=self.seed, strict=self.strict)
        return Verdict.merge([verdict, real])


def verify_partition_options(config: PartitionConfig) -> bool:
    """Whether every option of a configuration was compared and is right, over two ranks.

    A `ParityWarning` reports what is not right. It also reports arguments that the rule of a right
    option leaves to each rank, such as running statistics. `check_partition` returns both as data.

    Raises:
        UsageError: the operator cannot be found, or the configuration is malformed.
    """
    verdict, drifting_names = _check_config(config, CheckSettings())
    if not verdict.passed:
        warnings.warn(f"{config.fsig}: {verdict}", ParityWarning, stacklevel=2)
    elif drifting_names:
        warnings.warn(
            f"{config.fsig}: outputs and gradients are right, but after the call each rank has its "
            f"own {', '.join(drifting_names)}; check_partition reports how far they are off",
            ParityWarning,
            stacklevel=2,
        )
    return verdict.passed


def check_partition(
    config: PartitionConfig,
    *,
    ranks: int = 2,
    seed: int = 0,
    strict: bool = False,
    annotation: str | Annotation | None = None,
    device: str | torch.device | None = None,
    confirm: BackendName | None = None,
) -> Verdict:
    """Split the operator as each option says, and compare it with the whole operator.

    Args:
        config: the operator, its arguments and the options.
        ranks: number of ranks, unless an option has its own `num`.
        seed: seed of the random tensors and of the check.
        strict: count `unstable` as a failure.
        annotation: the rule for this call; by default the registered one, the library's, or one
            found by running the operator.
        device: device to run on, such as `"cuda"`; by default the CPU, or the device of tensors
            that are given as values.
        confirm: "gloo" or "nccl" checks each option again on ranks that are real processes; NCCL
            needs `device="cuda"` and a GPU for each rank.

    Returns:
        One finding for each compared item; its path starts with its option. If a split is wrong,
        `shrink()` writes a script with the smallest shapes that still fail.

    Raises:
        UsageError: the operator cannot be found, or the configuration is malformed.
    """
    settings = CheckSettings(ranks, seed, strict, confirm)
    return _check_config(config, settings, annotation, device)[0]


def _check_config(
    config: PartitionConfig,
    settings: CheckSettings,
    annotation: str | Annotation | None = None,
    device: str | torch.device | None = None,
) -> tuple[Verdict, tuple[str, ...]]:
    """The verdict, and the arguments of right options of which each rank has its own value."""
    ranks, seed, strict = settings.ranks, settings.seed, settings.strict
    if isinstance(ranks, bool) or not isinstance(ranks, int) or ranks < 2:  # noqa: PLR2004
        raise UsageError(f"the number of ranks must be an integer of 2 or more, got {ranks!r}")
    config = config.as_used()
    function = resolve_operator(config.fsig, config.import_customized_func)
    call = make_call(config, function, seed=seed)
    if device is not None:
        call = on_device(call, usable_device(device, "device="))
    most = max([ranks, *(option.get("num", ranks) for option in config.parti_options)])
    check_confirm(settings.confirm, device_of(call), most)
    drawn = f"tensors drawn with seed {seed}"
    fault = _run_whole(call, config.noutputs)
    if fault is not None:
        return Verdict(findings=(fault,), strict=strict, notes=(drawn,)), ()
    if not config.parti_options:
        verdict = check_unsplit(call, config.noutputs, "parti_options is empty", settings)
        return msgspec.structs.replace(verdict, notes=(drawn, *verdict.notes)), ()
    rules = _Rules.of(call, annotation, ranks)
    parts = [_check_option(rules, dict(option), settings) for option in config.parti_options]
    verdict = Verdict.merge(part.verdict for part in parts)
    notes = tuple(dict.fromkeys((drawn, rules.note, *verdict.notes)))
    verdict = msgspec.structs.replace(verdict, strict=strict, notes=notes)
    remember_failed(verdict, [failed for part in parts for failed in part.wrong])
    return verdict, tuple(dict.fromkeys(name for part in parts for name in part.drifting))


# --- The whole operator ---------------------------------------------------------------------------


def _run_whole(call: OperatorCall, noutputs: int) -> Finding | None:
    """Run the operator once, so that a wrong call is reported once and not for each option."""
    copied = call.map_tensors(torch.clone)
    before = Streams.of(call)
    try:
        with torch.no_grad():
            torch.default_generator.manual_seed(call.seed)
            result = call.function(*copied.args, **copied.kwargs)
    except Exception as error:  # noqa: BLE001  (the operator's own; it becomes a finding)
        text = f"{type(error).__name__}: {first_line(error, 1000) or 'no message'}"
        return _call_fault(call, f"the operator itself fails: {text}", "fix args and kwargs")
    finally:
        before.restore()
    count = sum(isinstance(item, torch.Tensor) for _, item in leaves(result, "output"))
    if count != noutputs:
        reason = f"the operator returns {count} tensors, but noutputs is {noutputs}"
        return _call_fault(call, reason, "fix noutputs")
    return None


def _call_fault(call: OperatorCall, reason: str, advice: str) -> Finding:
    shapes = [
        f"{argument_place}: {tuple(value.shape)}"
        for argument_place, value in (*enumerate(call.args), *call.kwargs.items())
        if isinstance(value, torch.Tensor)
    ]
    reason = f"{reason} (tensors {', '.join(shapes) or 'none'})"
    return unverified(call.name, reason, advice)


def check_unsplit(call: OperatorCall, outputs: int, why: str, settings: CheckSettings) -> Verdict:
    """Compare an operator that cannot be split with itself: every rank runs the whole operator.

    Args:
        outputs: number of tensors that it returns.
        why: the reason why there is nothing to split.
    """
    recipe = Recipe((), (Replicate(),) * outputs, words=f"{call.name}: not split")
    verdict, ranks = settings.check(call, recipe), settings.ranks
    note = f"nothing to split: {why}; each of {ranks} ranks ran the whole operator for comparison"
    return msgspec.structs.replace(label_items(verdict, "not split"), notes=(*verdict.notes, note))


# --- Rules ----------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Rules:
    """The source of the recipes of one call: an annotation, discovered splits, or neither."""

    call: OperatorCall
    annotation: Annotation | None
    discovered: tuple[Recipe, ...]
    note: str

    @classmethod
    def of(
        cls, call: OperatorCall, given_annotation: str | Annotation | None, ranks: int
    ) -> _Rules:
        """Find the rule: given, registered, in the library, or found by running."""
        annotation = (
            Annotation.parse(given_annotation)
            if isinstance(given_annotation, str)
            else given_annotation
        )
        annotation = annotation or annotation_of_call(call)
        if annotation is not None:
            return cls(call, annotation, (), f"rule: {annotation.text}")
        from paritas.sharding.operators.discovery import discover_splits

        try:
            discovered_splits = discover_splits(call, ranks)
        except UsageError as error:
            note = f"no rule is known for {call.name}, and discovery failed: {error}"
            return cls(call, None, (), note)
        recipes = tuple(
            discovered_split.recipe
            for discovered_split in discovered_splits
            if discovered_split.backward is not False
        )
        note = f"rule: none known for {call.name}; running it found {len(recipes)} valid splits"
        return cls(call, None, recipes, note)

    def recipe(self, option: Option) -> Recipe:
        """The recipe of an option; a `UsageError` says why there is none."""
        if self.annotation is not None:
            return self.annotation.recipe(self.call, option)
        for recipe in self.discovered:
            if recipe.splits(option.idx, option.dim, len(self.call.args)):
                return recipe
        raise UsageError(
            f"no rule is known for {self.call.name}, and running it found no valid split here"
        )


def _unfrozen_recipe(rules: _Rules, option: Option) -> Recipe | None:
    """The recipe of an option that the annotation only freezes, as if it did not freeze it.

    A rule that freezes a dimension says that it must not be split, but not what would go wrong.
    This recipe can be run to find out: parts in, parts out.
    """
    if rules.annotation is None:
        return None
    signature = rules.annotation.signature
    tensors = (*signature.inputs, *signature.outputs)
    dims = tensors[option.idx].dims if option.idx < len(tensors) else None
    # Positions behind a `*` depend on the call; such annotations rarely freeze a dimension by name.
    if not dims or option.dim >= len(dims) or any(dim.is_rest for dim in dims):
        return None
    name = dims[option.dim].factors[0].name
    if not name.isidentifier():
        return None
    text = rules.annotation.text
    free = re.sub(rf"\b{name}\^", name, text)
    if free == text:
        return None
    try:
        return Annotation.parse(free).recipe(rules.call, option)
    except UsageError:
        return None


# --- Options --------------------------------------------------------------------------------------

_MOST_LISTED = 3


@dataclasses.dataclass(frozen=True)
class _OptionResult:
    """The result of one option.

    Attributes:
        wrong: what to remember of a wrong split.
        drifting: arguments of a right split of which each rank has its own value afterwards.
    """

    verdict: Verdict
    wrong: tuple[FailedSplit, ...] = ()
    drifting: tuple[str, ...] = ()


def _check_option(rules: _Rules, option: dict[str, int], settings: CheckSettings) -> _OptionResult:
    count = option.get("num", settings.ranks)
    requested_option = Option.of({**option, "num": count})
    try:
        recipe = rules.recipe(requested_option)
    except UsageError as error:
        unfrozen = _unfrozen_recipe(rules, requested_option)
        if unfrozen is None:
            return _OptionResult(_refuse_option(option, str(error)))
        tried = settings.check(rules.call, unfrozen, count)
        if not tried.passed:
            reason = f"{error}; split anyway, {_describe_failure(tried)}"
            return _OptionResult(_refuse_option(option, reason))
        note = f"{option} is right for this call, although {error}"
        named = _name_by_option(tried, option, unfrozen)
        return _OptionResult(msgspec.structs.replace(named, notes=(*tried.notes, note)))
    try:
        verdict = settings.check(rules.call, recipe, count)
    except UsageError as error:
        return _OptionResult(_refuse_option(option, str(error)))
    wrong = failed_split(
        verdict, rules.call, recipe, count, seed=settings.seed, annotation=rules.annotation
    )
    drifting_names = drifting(verdict, rules.call, recipe)
    return _OptionResult(_name_by_option(verdict, option, recipe), wrong, drifting_names)


def _describe_failure(verdict: Verdict) -> str:
    """What is wrong and what is right about a split that was tried although its rule refuses it."""
    worst, *others = verdict.failures
    right = [f.path for f in verdict.findings if f.status.passes(strict=verdict.strict)]
    reason = f" ({worst.reason})" if worst.reason else ""
    parts = [f"{worst.path} is {worst.status}{reason}"]
    if others:
        parts.append(f"also wrong: {list_first([f.path for f in others], _MOST_LISTED)}")
    if right:
        parts.append(f"right: {list_first(right, _MOST_LISTED)}")
    return "; ".join(parts)


def _name_by_option(verdict: Verdict, option: Mapping[str, int], recipe: Recipe) -> Verdict:
    """The verdict of one option, with each item under the name of the option."""
    named = label_items(verdict, f"{dict(option)}: {recipe.split_words}")
    if verdict.passed or verdict.failures:
        return named
    # An option that compared nothing must not pass because of the options beside it.
    silent = _refuse_option(option, "nothing was compared").findings
    return msgspec.structs.replace(named, findings=(*named.findings, *silent))


def _refuse_option(option: Mapping[str, int], reason: str) -> Verdict:
    advice = (
        "do not split this dimension, or register an annotation that splits it "
        "(paritas.partition.register)"
    )
    return Verdict(findings=(unverified(str(dict(option)), reason, advice),))

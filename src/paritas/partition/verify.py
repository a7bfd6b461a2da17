"""Check every split that a configuration claims, and say of each how it ended."""

from __future__ import annotations

import dataclasses
import re
import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING

import msgspec
import torch

from paritas.checks.failures import FailedSplit, remember_failed
from paritas.errors import ParityWarning, UsageError, first_line
from paritas.execution.subjects import usable_device
from paritas.numerics.contents import leaves
from paritas.partition.annotation import Annotation, Option
from paritas.partition.configuration.inputs import make_call
from paritas.partition.configuration.resolving import resolve_operator
from paritas.partition.recipe_checks import (
    check_confirm,
    check_confirmed,
    drifting,
    failed_split,
    labelled,
)
from paritas.partition.runner import Streams
from paritas.placement.recipes import OperatorCall, Recipe, device_of, on_device
from paritas.results.findings import Aspect, Finding, Status, Verdict
from paritas.results.placements import Replicate
from paritas.results.wording import enumerated

if TYPE_CHECKING:
    from paritas.partition.configuration.inputs import VerifyConfig
    from paritas.results.graph_reports import Confirm


# --- What becomes of a split that the operator's rule refuses, seen by doing it all the same ------

# A rule that freezes a dimension says that it must not be split, and not what would go wrong. The
# plain reading of such an option is that parts go in and parts come out; that can be run.

_MOST_TOLD = 3


def plain_recipe(annotation: Annotation, call: OperatorCall, option: Option) -> Recipe | None:
    """The recipe that the annotation would give if it did not freeze this; None if not for that."""
    signature = annotation.signature
    tensors = (*signature.inputs, *signature.outputs)
    dims = tensors[option.idx].dims if option.idx < len(tensors) else None
    # Behind a `*` the positions are those of the call; such an annotation freezes by name too
    # seldom to be worth a second way of counting.
    if not dims or option.dim >= len(dims) or any(dim.is_rest for dim in dims):
        return None
    name = dims[option.dim].factors[0].name
    if not name.isidentifier():
        return None
    free = re.sub(rf"\b{name}\^", name, annotation.text)
    if free == annotation.text:
        return None
    try:
        return Annotation.parse(free).recipe(call, option)
    except UsageError:
        return None


def describe_refused(verdict: Verdict) -> str:
    """What is wrong, and what is right, about a split that was tried all the same."""
    wrong = [finding.path for finding in verdict.failures]
    right = [f.path for f in verdict.findings if f.status.passes(strict=verdict.strict)]
    worst = verdict.failures[0]
    reason = f" ({worst.reason})" if worst.reason else ""
    parts = [f"{worst.path} is {worst.status}{reason}"]
    if len(wrong) > 1:
        parts.append(f"wrong too: {enumerated(wrong[1:], _MOST_TOLD)}")
    if right:
        parts.append(f"right: {enumerated(right, _MOST_TOLD)}")
    return "; ".join(parts)


# --- The check of a configuration -----------------------------------------------------------------

# The rule of a split comes from the annotation that the user gives, registered or the library has;
# failing that, from running the operator. An option without a rule, or that its rule refuses, is
# `unverified`: nothing is taken for right because nothing is known of it.


def verify_partition_options(config: VerifyConfig) -> bool:
    """Whether every option of a configuration was compared and is right, over two ranks.

    What is not right is told in a `ParityWarning`; so is what the rule of a right option leaves to
    each rank, such as running statistics. `check_partition` gives both as data.

    Raises:
        UsageError: the configuration names no operator that can be found, or is malformed.
    """
    verdict, own = _check_config(config)
    if not verdict.passed:
        warnings.warn(f"{config.fsig}: {verdict}", ParityWarning, stacklevel=2)
    elif own:
        warnings.warn(
            f"{config.fsig}: outputs and gradients are right, and after the call each rank has its "
            f"own {', '.join(own)}; check_partition says how far they are off",
            ParityWarning,
            stacklevel=2,
        )
    return verdict.passed


def check_partition(
    config: VerifyConfig,
    *,
    ranks: int = 2,
    seed: int = 0,
    strict: bool = False,
    annotation: str | Annotation | None = None,
    device: str | torch.device | None = None,
    confirm: Confirm | None = None,
) -> Verdict:
    """Split the operator as each option says, and compare with the operator that is not split.

    Args:
        config: the operator, its arguments and the options.
        ranks: over how many ranks it is split, unless an option says otherwise by `num`.
        seed: of the tensors that are drawn, and of the check.
        strict: count `unstable` as a failure.
        annotation: the rule for this call; otherwise what is registered, or in the library, or
            found by running.
        device: where it runs, for example `"cuda"`; otherwise on the host, or where tensors that
            are given as values are.
        confirm: "gloo" or "nccl" checks each option a second time, on ranks that are real
            processes; NCCL needs `device="cuda"` and a GPU for each rank.

    Returns:
        A finding for each thing compared, whose path begins with its option. Of a split that is
        wrong, `shrink()` writes a script on the smallest shapes.

    Raises:
        UsageError: the configuration names no operator that can be found, or is malformed.
    """
    return _check_config(
        config,
        ranks=ranks,
        seed=seed,
        strict=strict,
        annotation=annotation,
        device=device,
        confirm=confirm,
    )[0]


def _check_config(
    config: VerifyConfig,
    *,
    ranks: int = 2,
    seed: int = 0,
    strict: bool = False,
    annotation: str | Annotation | None = None,
    device: str | torch.device | None = None,
    confirm: Confirm | None = None,
) -> tuple[Verdict, tuple[str, ...]]:
    """The verdict, and the arguments of right options that each rank has its own of afterwards."""
    if isinstance(ranks, bool) or not isinstance(ranks, int) or ranks < 2:  # noqa: PLR2004
        raise UsageError(f"ranks must be a whole number from 2 on, not {ranks!r}")
    config = config.as_used()
    function = resolve_operator(config.fsig, config.import_customized_func)
    call = make_call(config, function, seed=seed)
    if device is not None:
        call = on_device(call, usable_device(device, "device="))
    most = max([ranks, *(option.get("num", ranks) for option in config.parti_options)])
    check_confirm(confirm, device_of(call), most)
    whole = _run_whole(call, config.noutputs)
    if whole.fault is not None:
        return Verdict(findings=(whole.fault,), strict=strict, notes=_notes(seed)), ()
    if not config.parti_options:
        why = "parti_options is empty"
        verdict = check_unsplit(
            call, len(whole.shapes), ranks, why, seed=seed, strict=strict, confirm=confirm
        )
        return msgspec.structs.replace(verdict, notes=(*_notes(seed), *verdict.notes)), ()
    rules = _Rules.of(call, annotation, ranks)
    parts = [
        _check_option(rules, dict(option), ranks=ranks, seed=seed, strict=strict, confirm=confirm)
        for option in config.parti_options
    ]
    verdict = Verdict.merge(part.verdict for part in parts)
    notes = tuple(dict.fromkeys((*_notes(seed), *rules.notes, *verdict.notes)))
    verdict = msgspec.structs.replace(verdict, strict=strict, notes=notes)
    remember_failed(verdict, [failed for part in parts for failed in part.wrong])
    return verdict, tuple(dict.fromkeys(name for part in parts for name in part.drifting))


def _notes(seed: int) -> tuple[str, ...]:
    return (f"tensors drawn with seed {seed}",)


# --- the operator, whole --------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Whole:
    """What the operator gives when it is not split, or why that is of no use."""

    shapes: tuple[tuple[int, ...], ...] = ()
    fault: Finding | None = None


def _run_whole(call: OperatorCall, noutputs: int) -> _Whole:
    """Run the operator once: a call that is wrong is told once, and not for each option."""
    args = [value.clone() if isinstance(value, torch.Tensor) else value for value in call.args]
    kwargs = {
        name: value.clone() if isinstance(value, torch.Tensor) else value
        for name, value in call.kwargs.items()
    }
    before = Streams.of(call)
    try:
        with torch.no_grad():
            torch.default_generator.manual_seed(call.seed)
            result = call.function(*args, **kwargs)
    except Exception as error:  # noqa: BLE001  (the operator's own; it becomes a finding)
        text = f"{type(error).__name__}: {first_line(error, 1000) or 'no message'}"
        return _Whole(fault=_fault(call, f"the operator itself fails, unsplit: {text}"))
    finally:
        before.restore()
    items = [item for _, item in leaves(result, "output")]
    shapes = tuple(tuple(item.shape) for item in items if isinstance(item, torch.Tensor))
    if len(shapes) != noutputs:
        reason = f"the operator gives {len(shapes)} tensors, and noutputs is {noutputs}"
        return _Whole(fault=_fault(call, reason, "correct noutputs"))
    return _Whole(shapes)


def _fault(call: OperatorCall, reason: str, advice: str = "correct args and kwargs") -> Finding:
    """The finding that the call itself is not one to split."""
    shapes = [
        f"{place}: {tuple(value.shape)}"
        for place, value in (*enumerate(call.args), *call.kwargs.items())
        if isinstance(value, torch.Tensor)
    ]
    return Finding(
        path=call.name,
        aspect=Aspect.HARNESS,
        status=Status.UNVERIFIED,
        reason=f"{reason} (tensors {', '.join(shapes) or 'none'})",
        advice=advice,
    )


def check_unsplit(
    call: OperatorCall,
    outputs: int,
    ranks: int,
    why: str,
    *,
    seed: int = 0,
    strict: bool = False,
    confirm: Confirm | None = None,
) -> Verdict:
    """Compare an operator of which nothing is split with itself: each rank runs all of it.

    Args:
        outputs: how many tensors it gives.
        why: there is nothing to split.
    """
    recipe = Recipe((), (Replicate(),) * outputs, words=f"{call.name}: not split")
    verdict = check_confirmed(call, recipe, ranks, seed=seed, strict=strict, confirm=confirm)
    compared = f"each of {ranks} ranks ran the whole operator, and that was compared"
    note = f"nothing to split: {why}; {compared}"
    return msgspec.structs.replace(labelled(verdict, "not split, "), notes=(*verdict.notes, note))


# --- rules ----------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Rules:
    """Where the recipes of one call come from: one of the two, or neither."""

    call: OperatorCall
    annotation: Annotation | None
    discovered: tuple[Recipe, ...]
    notes: tuple[str, ...]

    @classmethod
    def of(cls, call: OperatorCall, given: str | Annotation | None, ranks: int) -> _Rules:
        """Look for the rule: given, registered or in the library, found by running."""
        annotation = Annotation.parse(given) if isinstance(given, str) else given
        annotation = annotation or _known_annotation(call)
        if annotation is not None:
            return cls(call, annotation, (), (f"rule: {annotation.text}",))
        recipes, note = _discover(call, ranks)
        return cls(call, None, recipes, (note,))

    def recipe(self, option: Mapping[str, int]) -> Recipe:
        """The recipe of an option; `UsageError` says why there is none."""
        if self.annotation is not None:
            return self.annotation.recipe(self.call, Option.of(option))
        for recipe in self.discovered:
            if recipe.splits(option["idx"], option["dim"], len(self.call.args)):
                return recipe
        raise UsageError(
            f"no rule known for {self.call.name}, and running it shows no such split to be right"
        )

    def plain_recipe(self, option: Mapping[str, int]) -> Recipe | None:
        """The recipe of an option that the annotation only freezes."""
        if self.annotation is None:
            return None
        return plain_recipe(self.annotation, self.call, Option.of(option))


def _known_annotation(call: OperatorCall) -> Annotation | None:
    from paritas.partition.library import annotation_for

    # A decorated function is registered under the module it is in, and not under the name that an
    # import statement gave it.
    return annotation_for(call.name, call.args, call.kwargs) or annotation_for(
        call.function, call.args, call.kwargs
    )


def _discover(call: OperatorCall, ranks: int) -> tuple[tuple[Recipe, ...], str]:
    """Splits that running the operator shows to be right, and what to say about where from."""
    from paritas.partition.discovery import discover_splits

    try:
        found = discover_splits(call, ranks)
    except UsageError as error:
        return (), f"no rule known for {call.name}, and discovery gave up: {error}"
    recipes = tuple(one.recipe for one in found if one.backward is not False)
    return (
        recipes,
        f"rule: none known for {call.name}; running it shows {len(recipes)} splits to be right",
    )


# --- options --------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _OptionResult:
    """How one option ended.

    Attributes:
        wrong: what to remember of it.
        drifting: arguments that each rank has its own of after the call, though it is right.
    """

    verdict: Verdict
    wrong: tuple[FailedSplit, ...] = ()
    drifting: tuple[str, ...] = ()


def _check_option(
    rules: _Rules,
    option: dict[str, int],
    *,
    ranks: int,
    seed: int,
    strict: bool,
    confirm: Confirm | None,
) -> _OptionResult:
    """How one option ended."""
    count = option.get("num", ranks)
    asked = {**option, "num": count}

    def checked(recipe: Recipe) -> Verdict:
        return check_confirmed(rules.call, recipe, count, seed=seed, strict=strict, confirm=confirm)

    try:
        recipe = rules.recipe(asked)
    except UsageError as error:
        plain = rules.plain_recipe(asked)
        if plain is None:
            return _OptionResult(_refused(option, str(error)))
        tried = checked(plain)
        if not tried.passed:
            return _OptionResult(
                _refused(option, f"{error}; split there all the same, {describe_refused(tried)}")
            )
        note = f"{option} is right here, though {error}"
        named = _name_by_option(tried, option, plain)
        return _OptionResult(msgspec.structs.replace(named, notes=(*tried.notes, note)))
    try:
        verdict = checked(recipe)
    except UsageError as error:
        return _OptionResult(_refused(option, str(error)))
    wrong = failed_split(verdict, rules.call, recipe, count, seed=seed, annotation=rules.annotation)
    own = drifting(verdict, rules.call, recipe)
    return _OptionResult(_name_by_option(verdict, option, recipe), wrong, own)


def _name_by_option(verdict: Verdict, option: Mapping[str, int], recipe: Recipe) -> Verdict:
    """The verdict of one option, each of its items under the option's name."""
    named = labelled(verdict, f"{dict(option)}: {_split_by(recipe)}, ")
    if verdict.passed or verdict.failures:
        return named
    # Each option has to answer for itself: those beside it must not lend it their comparisons.
    silent = _refused(option, "nothing was compared").findings
    return msgspec.structs.replace(named, findings=(*named.findings, *silent))


def _refused(option: Mapping[str, int], reason: str) -> Verdict:
    finding = Finding(
        path=str(dict(option)),
        aspect=Aspect.HARNESS,
        status=Status.UNVERIFIED,
        reason=reason,
        advice="leave this dimension whole, or register an annotation that splits it "
        "(paritas.partition.register)",
    )
    return Verdict(findings=(finding,))


def _split_by(recipe: Recipe) -> str:
    """`split by c`, of what a recipe says about itself."""
    found = recipe.split_by
    return f"split by {found}" if found != recipe.words else found or "split"

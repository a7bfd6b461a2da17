"""The work of `paritas partition`: parse the arguments, check each split, show the table."""

from __future__ import annotations

import ast
import dataclasses
import math
import re
from typing import TYPE_CHECKING, Any

import msgspec
import torch
from rich.console import Group
from rich.text import Text

from paritas.core.errors import UsageError
from paritas.core.execution.subjects import usable_device
from paritas.core.judging.failures import remember_failed
from paritas.core.numerics.random_tensors import indices
from paritas.core.placement.placement import Recipe, first_split, on_device
from paritas.core.reporting.tables import STATUS_MARKS, Column, Mark, terminal_table
from paritas.core.reporting.terminal import (
    details,
    last_line,
    list_items,
    paragraph,
)
from paritas.core.results.findings import Finding, Status, Verdict, unverified
from paritas.core.results.items import ItemKind
from paritas.core.results.progress import Progress
from paritas.sharding.operators.annotation import Annotation, Option
from paritas.sharding.operators.configuration import (
    PartitionConfig,
    TensorInfo,
    make_call,
)
from paritas.sharding.operators.library import annotation_of_call, is_registered
from paritas.sharding.operators.recipe_checks import failed_split, label_items
from paritas.sharding.operators.verify import CheckSettings, check_unsplit

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from rich.console import RenderableType

    from paritas.core.judging.failures import FailedSplit
    from paritas.core.operators.calls import OperatorCall
    from paritas.sharding.operators.discovery import Discovered
    from paritas.sharding.options import PartitionOptions
    from paritas.sharding.rows import RuleProof


# --- Arguments on the command line ----------------------------------------------------------------

_SHAPE = re.compile(r"(?P<sizes>\d+(?:x\d+)*)(?::(?P<dtype>\w+)(?:<(?P<below>\d+))?)?")
_FORMS = "8x32, 8x32:int64<100, 2.5 or value=(8, 4)"


def operator_call(
    spec: str, function: Callable[..., Any], options: PartitionOptions
) -> OperatorCall:
    """The call that the command line describes.

    Raises:
        UsageError: an argument cannot be parsed.
    """
    args = [read_argument(text, "--arg", options.seed) for text in options.args]
    kwargs: dict[str, Any] = {}
    for text in options.kwargs:
        name, equals, value = text.partition("=")
        if not equals or not name.isidentifier():
            raise UsageError(f"--kwarg {text!r} is not of the form name=..., as in dim=1")
        info = read_argument(value, f"--kwarg {name}", options.seed, keyword=True)
        kwargs[name] = info if info.value_type == "shape" else info.value
    config = PartitionConfig(
        fsig=spec,
        args=args,
        kwargs=kwargs,
        noutputs=1,
        parti_options=[],
        non_grad_indices=list(options.without_gradient),
    )
    call = make_call(config, function, seed=options.seed)
    dtype = getattr(torch, options.dtype)
    typed = dataclasses.replace(
        call,
        args=tuple(map(_cast_argument, call.args, args, [dtype] * len(args))),
        kwargs={
            name: _cast_argument(value, kwargs[name], dtype) for name, value in call.kwargs.items()
        },
    )
    if options.device is None:
        return typed
    return on_device(typed, usable_device(options.device))


def _cast_argument(value: Any, info: Any, dtype: torch.dtype) -> Any:
    """Convert a floating tensor to the given dtype, unless it names its own."""
    if not isinstance(info, TensorInfo) or info.value_type == "value":
        return value
    if value.numel() == 0:
        raise UsageError(f"a tensor of shape {tuple(value.shape)} is empty: nothing to split")
    return value.to(dtype) if info.dtype is None and value.is_floating_point() else value


def read_argument(text: str, parameter: str, seed: int = 0, *, keyword: bool = False) -> TensorInfo:
    """Parse one argument.

    Args:
        text: the argument on the command line.
        parameter: which option this is, for messages.
        seed: of random indices.
        keyword: whether `16` is a number; otherwise it is the shape of a vector.
    """
    if text.startswith("value="):
        return TensorInfo("value", _parse_literal(text.removeprefix("value="), text, parameter))
    form = _SHAPE.fullmatch(text)
    if form is not None and not (keyword and text.isdecimal()):
        return _parse_tensor(form, text, parameter, seed)
    if keyword and re.fullmatch(r"[A-Za-z_]+", text) and text not in {"None", "True", "False"}:
        return TensorInfo("value", text)  # reduction=mean
    if text.startswith("torch."):
        torch_attribute = getattr(torch, text.removeprefix("torch."), None)
        if isinstance(torch_attribute, torch.dtype):
            return TensorInfo("value", torch_attribute)
    return TensorInfo("value", _parse_literal(text, text, parameter))


def _parse_literal(text: str, whole_text: str, parameter: str) -> Any:
    try:
        tree = ast.parse(text.strip(), mode="eval").body
        match tree:
            case ast.Call(func=ast.Name(id="slice"), args=list(ends), keywords=[]):
                return slice(*map(ast.literal_eval, ends))
        return ast.literal_eval(tree)
    except (ValueError, SyntaxError, TypeError):
        raise UsageError(f"{parameter} {whole_text!r} cannot be parsed: write {_FORMS}") from None


def _parse_tensor(form: re.Match[str], text: str, parameter: str, seed: int) -> TensorInfo:
    shape = tuple(map(int, form["sizes"].split("x")))
    if form["dtype"] is None:
        return TensorInfo("shape", shape)
    named = getattr(torch, form["dtype"], None)
    if not isinstance(named, torch.dtype):
        raise UsageError(f"{parameter} {text!r}: torch has no dtype {form['dtype']!r}")
    if form["below"] is None:
        return TensorInfo("shape", shape, dtype=named)
    below = int(form["below"])
    if below == 0 or named.is_floating_point or named.is_complex or named is torch.bool:
        raise UsageError(
            f"{parameter} {text!r}: '<{below}' needs an integer dtype and a bound of 1 or more"
        )

    def draw(shape: tuple[int, ...]) -> torch.Tensor:
        return indices(0, below)(shape, torch.Generator().manual_seed(seed)).to(named)

    return TensorInfo("shape", shape, dtype=named, generator=draw)


# --- Which splits are checked, and the check of each ----------------------------------------------

NO_SPLIT = "no dimension was found along which it can be split"


@dataclasses.dataclass(frozen=True)
class CheckedSplit:
    """One split and its verdict.

    Attributes:
        option: `idx,dim`, the first dimension that is split; empty if nothing is split.
        split_by: the identifier, or the dimensions.
        wrong: what to shrink if it failed.
    """

    option: str
    split_by: str
    verdict: Verdict
    wrong: tuple[FailedSplit, ...] = ()


@dataclasses.dataclass(frozen=True)
class CheckedOperator:
    """All splits of an operator.

    Attributes:
        rule: the annotation or annotations.
        source: where they come from.
        verdict: of all splits; its notes also name the rule.
        notes: the notes of the verdict other than the rule.
        proofs: of the splits, if they were asked for.
    """

    name: str
    rule: tuple[str, ...]
    source: str
    ranks: int
    rows: tuple[CheckedSplit, ...]
    verdict: Verdict
    notes: tuple[str, ...] = ()
    proofs: tuple[RuleProof, ...] = ()

    def certificates(self) -> dict[str, dict[str, Any]]:
        """The certificate of each proof, by a name for it."""
        return {
            f"{self.name}_{proof.split_by}": proof.certificate
            for proof in self.proofs
            if proof.certificate is not None
        }


def check(
    call: OperatorCall, options: PartitionOptions, tell: Callable[[str], None]
) -> CheckedOperator:
    """Check the declared splits, or those discovered by running the operator.

    Raises:
        UsageError: the unsplit operator fails, or an option cannot be parsed.
    """
    requested_options = [_read_option(text) for text in options.options]
    annotation, source = _find_declared_annotation(call, options)
    if annotation is not None:
        rule: tuple[str, ...] = (annotation.text,)
        chosen = _by_annotation(call, annotation, requested_options)
    else:
        tell(f"looking for splits of {call.name}")
        rule, chosen = _discover(call, options.ranks, requested_options)
    checked_splits = []
    for done, chosen_split in enumerate(chosen):
        tell(Progress(f"checking splits of {call.name}", done, len(chosen)))
        checked_splits.append(_check_split(call, chosen_split, annotation, options))
    rows = tuple(checked_splits)
    if not rows and annotation is not None:
        rows = (_check_unsplit(call, annotation, options),)
    proofs: tuple[RuleProof, ...] = ()
    if options.prove:
        tell(f"proving splits of {call.name}")
        proofs = _prove(call, annotation, rule, chosen, options)
    verdict = _make_unverified_verdict(call.name, f"nothing to check: {NO_SPLIT}")
    if rows:
        verdict = _with_proofs(Verdict.merge(row.verdict for row in rows), proofs)
    notes = (f"tensors drawn with seed {call.seed}", *verdict.notes)
    named = f"rule ({source}): {'; '.join(rule) or 'none'}"
    verdict = msgspec.structs.replace(verdict, strict=options.strict, notes=(named, *notes))
    remember_failed(verdict, [wrong for row in rows for wrong in row.wrong])
    return CheckedOperator(call.name, rule, source, options.ranks, rows, verdict, notes, proofs)


# --- which ----------------------------------------------------------------------------------------

# An option, and its recipe or the reason why it has none.
_Chosen = tuple[Option, Recipe | str]


def _find_declared_annotation(
    call: OperatorCall, options: PartitionOptions
) -> tuple[Annotation | None, str]:
    if options.annotation is not None:
        annotation = Annotation.parse(options.annotation)
        annotation.check(call)
        return annotation, "given"
    if options.discover:
        return None, "found by running"
    known_annotation = annotation_of_call(call)
    if known_annotation is None:
        return known_annotation, "found by running"
    names = [name for name in (call.name, call.function) if name]
    return known_annotation, "registered" if any(map(is_registered, names)) else "from the library"


def _by_annotation(
    call: OperatorCall, annotation: Annotation, options: list[Option]
) -> list[_Chosen]:
    chosen: list[_Chosen] = []
    for option in options or annotation.options(call):
        try:
            chosen.append((option, annotation.recipe(call, option)))
        except UsageError as error:
            chosen.append((option, str(error)))
    return chosen


def _discover(
    call: OperatorCall, ranks: int, options: list[Option]
) -> tuple[tuple[str, ...], list[_Chosen]]:
    from paritas.sharding.operators.discovery import discover_splits

    discovered_splits = discover_splits(dataclasses.replace(call, name=""), ranks)
    rule = tuple(
        dict.fromkeys(discovered_split.annotation for discovered_split in discovered_splits)
    )
    if not options:
        recipes = [
            discovered_split.recipe if len(rule) > 1 else _name_recipe(call, discovered_split)
            for discovered_split in discovered_splits
        ]
        pairs = [(Option(*first_split(recipe, call)), recipe) for recipe in recipes]
        return rule, sorted(pairs, key=lambda pair: (pair[0].idx, pair[0].dim))
    chosen: list[_Chosen] = []
    for option in options:
        fitting = [
            discovered_split.recipe
            for discovered_split in discovered_splits
            if discovered_split.recipe.splits(option.idx, option.dim, len(call.args))
        ]
        missing = f"running it found no valid split of this dimension over {ranks} ranks"
        chosen += [(option, recipe) for recipe in fitting] or [(option, missing)]
    return rule, chosen


def _name_recipe(call: OperatorCall, discovered: Discovered) -> Recipe:
    """The same recipe, named by its identifier in the annotation, which is shorter."""
    try:
        annotation = Annotation.parse(discovered.annotation)
        named = annotation.recipe(call, Option(*first_split(discovered.recipe, call)))
    except UsageError:  # the annotation language cannot express it
        return discovered.recipe
    return dataclasses.replace(discovered.recipe, words=named.words, identifier=named.identifier)


def _read_option(text: str) -> Option:
    form = re.fullmatch(r"\s*(\d+)\s*,\s*(\d+)\s*", text)
    if form is None:
        raise UsageError(f"--option {text!r} is not of the form idx,dim, as in '0,1'")
    return Option(int(form[1]), int(form[2]))


# --- the check ------------------------------------------------------------------------------------


def _check_split(
    call: OperatorCall, chosen: _Chosen, annotation: Annotation | None, options: PartitionOptions
) -> CheckedSplit:
    option, recipe = chosen
    label = f"{option.idx},{option.dim}"
    if isinstance(recipe, str):
        return CheckedSplit(label, "", _make_unverified_verdict(f"option {label}", recipe))
    split_by = recipe.identifier or recipe.words
    try:
        verdict = _settings(options).check(call, recipe)
    except UsageError as error:
        return CheckedSplit(
            label, split_by, _make_unverified_verdict(f"option {label}", str(error))
        )
    wrong = failed_split(
        verdict, call, recipe, options.ranks, seed=options.seed, annotation=annotation
    )
    return CheckedSplit(label, split_by, _label_verdict(verdict, f"option {label}"), wrong)


def _prove(
    call: OperatorCall,
    annotation: Annotation | None,
    rule: tuple[str, ...],
    chosen: list[_Chosen],
    options: PartitionOptions,
) -> tuple[RuleProof, ...]:
    """Decide each split; without an annotation, the one that discovery found."""
    from paritas.sharding.proofs.prove import Prover
    from paritas.sharding.rows import RuleProof

    if annotation is None and len(rule) == 1:
        annotation = Annotation.parse(rule[0])
    proofs = []
    prover = None
    for option, recipe in chosen:
        if isinstance(recipe, str):
            continue  # it is unverified already
        undecided = RuleProof(
            operator=call.name,
            rule="; ".join(rule),
            split_by=recipe.identifier or recipe.words,
            status="not decided",
            reason="no annotation says how it is split",
        )
        if annotation is not None:
            prover = prover or Prover(call, annotation, options.ranks, options.seed)
            try:
                undecided = prover.decide(option)
            except UsageError as error:
                undecided = msgspec.structs.replace(undecided, reason=str(error))
        proofs.append(undecided)
    return tuple(proofs)


def _with_proofs(verdict: Verdict, proofs: tuple[RuleProof, ...]) -> Verdict:
    """A proof passes; a counterexample is a difference; anything else is not verified."""
    findings = [
        proof_finding
        for proof_finding in (proof.finding() for proof in proofs)
        if proof_finding is not None
    ]
    notes = [f"split by {proof.split_by}: {proof.words}" for proof in proofs]
    return msgspec.structs.replace(
        verdict,
        findings=(*verdict.findings, *findings),
        notes=(*verdict.notes, *notes),
    )


def _check_unsplit(
    call: OperatorCall, annotation: Annotation, options: PartitionOptions
) -> CheckedSplit:
    """Check a rule that splits nothing: each rank runs the whole operator."""
    outputs, why = len(annotation.signature.outputs), "the rule splits no dimension"
    return CheckedSplit("", "nothing", check_unsplit(call, outputs, why, _settings(options)))


def _settings(options: PartitionOptions) -> CheckSettings:
    return CheckSettings(options.ranks, options.seed, options.strict, options.confirm)


def _label_verdict(verdict: Verdict, label: str) -> Verdict:
    labelled_verdict = label_items(verdict, label)
    if labelled_verdict.passed or labelled_verdict.failures:
        return labelled_verdict
    # Without a finding of its own, it would not show beside splits that were compared.
    silent = _make_unverified_verdict(label, "nothing was compared").findings
    return msgspec.structs.replace(labelled_verdict, findings=(*labelled_verdict.findings, *silent))


def _make_unverified_verdict(path: str, reason: str) -> Verdict:
    return Verdict(findings=(unverified(path, reason),))


# --- The splits for a terminal --------------------------------------------------------------------

SPLIT_LEGEND = (
    "option: argument, dimension\noff by: norm of the largest difference / norm of the reference"
)


def partition_report(checked: CheckedOperator, script: Sequence[str] = ()) -> Group:
    """The whole report; `script` describes the result of shrinking, line by line."""
    verdict = checked.verdict
    head = f"{checked.name} over {checked.ranks} ranks, rule {checked.source}:"
    parts: list[RenderableType] = [Text(head)]
    parts += [Text(f"  {text}") for text in checked.rule]
    parts.append(Text())
    if checked.rows:
        parts += [
            terminal_table(SPLIT_COLUMNS, checked.rows),
            Text(SPLIT_LEGEND, style="dim"),
            Text(),
        ]
    coverage = verdict.coverage
    parts += [
        *paragraph(details(verdict)),
        Text(f"coverage: {coverage.compared} compared, {len(coverage.skipped)} skipped"),
        *list_items("skipped", coverage.skipped),
        *list_items("note", checked.notes),
    ]
    if script:  # not wrapped: its paths are copied
        lines = [Text(line, no_wrap=True, overflow="ignore") for line in script]
        parts += [Text(), *lines, Text()]
    return Group(*parts, last_line(verdict))


def _forward(row: CheckedSplit) -> Mark:
    return _gravest(f for f in row.verdict.findings if f.item.kind is not ItemKind.GRADIENT)


def _backward(row: CheckedSplit) -> Mark:
    return _gravest(f for f in row.verdict.findings if f.item.kind is ItemKind.GRADIENT)


def _gravest(findings: Iterable[Finding]) -> Mark:
    """The gravest status, or a dash if nothing was compared."""
    statuses = [finding.status for finding in findings]
    if not statuses:
        return Mark("-")
    return STATUS_MARKS[max(statuses, key=lambda status: status.gravity)]


def _off_by(findings: tuple[Finding, ...]) -> str:
    """The largest relative difference; in words if no metrics were computed."""
    figures = [finding.metrics.rel_l2 for finding in findings if finding.metrics is not None]
    if figures:
        # NaN counts as the largest, which `max` does not guarantee.
        worst = next((figure for figure in figures if math.isnan(figure)), max(figures))
        return f"{worst:.1e}"
    statuses = {finding.status for finding in findings}
    if statuses <= {Status.IDENTICAL, Status.EQUIVALENT}:
        return "rounding" if Status.EQUIVALENT in statuses else "0"
    return "-"


SPLIT_COLUMNS: tuple[Column[CheckedSplit], ...] = (
    Column("option", lambda row: row.option, is_fixed=True),
    Column("split by", lambda row: row.split_by),
    Column("forward", _forward, is_fixed=True),
    Column("backward", _backward, is_fixed=True),
    Column("status", lambda row: STATUS_MARKS[row.verdict.status], is_fixed=True),
    Column("off by", lambda row: _off_by(row.verdict.findings), is_fixed=True),
)

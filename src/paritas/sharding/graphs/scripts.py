"""The script that reproduces a wrong split: the operator unsplit and on ranks, with torch alone."""

from __future__ import annotations

import dataclasses
import inspect
import operator
import re
import textwrap
from typing import TYPE_CHECKING, Any

import msgspec
import torch

from paritas.core.errors import UsageError
from paritas.core.placement.placement import Terms, bounds, name_of, split_values
from paritas.core.reporting.scripts import (
    NoScriptError,
    Script,
    ScriptValues,
    drawn_text,
    is_storable,
    literal,
    sequence_text,
    write,
)
from paritas.core.results.findings import Status
from paritas.core.results.items import ItemKind, Once, Partial, Replicate, Shard, after_call
from paritas.core.torch_private.global_state import quietly
from paritas.core.torch_private.operators import WIDE, tensors_in
from paritas.sharding.graphs.calls import CallValues, copy_values
from paritas.sharding.graphs.checking import offers, prepare_call
from paritas.sharding.graphs.operators import subject_of
from paritas.sharding.operators.runner import Streams

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path
    from types import ModuleType

    from paritas.core.operators.calls import OperatorCall, Place
    from paritas.core.placement.placement import Recipe
    from paritas.core.results.items import Role
    from paritas.sharding.graphs.rows import OperatorResult, OptionResult
    from paritas.sharding.graphs.verify import OperatorWork


# --- The operator as Python source ----------------------------------------------------------------

_OWN_MODULE = "paritas.sharding.operators.nnscaler_functions"


def function_text(
    name: str, function: Callable[..., Any], imports: tuple[str, ...] = ()
) -> tuple[list[str], str]:
    """Lines that set `compute` to the operator, and your module that they need, if any.

    Raises:
        NoScriptError: the function exists only in memory.
    """
    module, short = inspect.getmodule(function), getattr(function, "__name__", "")
    if module is not None and module.__name__ == _OWN_MODULE:
        return [*_source_lines(module, short), "", "", f"compute = {short}"], ""
    if name.startswith("torch.") and callable(_at(torch, name.split(".")[1:])):
        return [f"compute = {name}"], ""
    if short and getattr(operator, short, None) is function:
        return ["import operator", "", f"compute = operator.{short}"], ""
    plain = name.replace("::", ".").removeprefix("torch.ops.")
    if plain.startswith(("aten.", "prims.")) and all(map(str.isidentifier, plain.split("."))):
        overload = plain if plain.count(".") > 1 else f"{plain}.default"
        return [f"compute = torch.ops.{overload}"], ""
    if type(function).__name__ in {"OpOverload", "OpOverloadPacket"}:
        return _import_registered_operator(str(function), imports)
    qualified, home = getattr(function, "__qualname__", ""), getattr(module, "__name__", "")
    if home and home != "__main__" and _at(module, qualified.split(".")) is function:
        first = qualified.partition(".")[0]
        return [f"from {home} import {first}", "", f"compute = {qualified}"], home
    raise NoScriptError(f"{name} exists only in memory, so no script can import it")


def _at(owner: Any, parts: list[str]) -> Any:
    for part in parts:
        owner = getattr(owner, part, None)
    return owner


def _import_registered_operator(name: str, imports: tuple[str, ...]) -> tuple[list[str], str]:
    """An operator that a program registered with torch: the script imports that module."""
    if not imports:
        raise NoScriptError(f"{name} is registered by an unknown module; name it with --import")
    lines = [f"import {module}  # registers the operator" for module in imports]
    return [*lines, "", f"compute = torch.ops.{name}"], ", ".join(imports)


def _source_lines(module: ModuleType, name: str) -> list[str]:
    """The source of a function, and of everything it uses from its module."""
    needed: dict[str, str] = {}
    waiting = [name]
    while waiting:
        member_name = waiting.pop()
        value = getattr(module, member_name)
        if inspect.isfunction(value) and value.__module__ == module.__name__:
            needed[member_name] = textwrap.dedent(inspect.getsource(value)).rstrip()
            waiting += [
                used
                for used in value.__code__.co_names
                if hasattr(module, used) and used not in needed
            ]
        elif inspect.ismodule(value):
            needed[member_name] = _import_line(value, member_name)
        elif isinstance(value, type):
            needed[member_name] = f"{member_name} = ValueError"
        else:
            needed[member_name] = f"{member_name} = {literal(value)}"
    functions = [text for text in needed.values() if text.startswith("def ")]
    others = sorted(text for text in needed.values() if not text.startswith("def "))
    lines = [*others, *("\n\n" + text for text in reversed(functions))]
    return [line for text in lines for line in text.splitlines()]


def _import_line(module: ModuleType, name: str) -> str:
    parent, _, last = module.__name__.rpartition(".")
    line = f"from {parent} import {last}" if parent else f"import {last}"
    return line if name == last else f"{line} as {name}"


# --- The part that every script shares: run the operator unsplit and on ranks ---------------------

_WIDE = "".join(f"    {narrow}: {wide},\n" for narrow, wide in WIDE.items())
_RUN = f"\n\nWIDE = {{\n{_WIDE}}}\n"
_RUN += '''

def lifted(value, wide):
    """Convert an argument to float64 if `wide` is set."""
    if isinstance(value, (list, tuple)):
        return type(value)(lifted(item, wide) for item in value)
    if isinstance(value, torch.dtype):
        return WIDE.get(value, value) if wide else value
    if not isinstance(value, torch.Tensor) or not wide:
        return value
    return value.to(WIDE.get(value.dtype, value.dtype))


def same(parts, full):
    """All ranks should have the same result: where they disagree, the result is wrong."""
    first = parts[0]
    if not (first.is_floating_point() or first.is_complex()):
        return first ^ torch.stack([part != first for part in parts]).any(dim=0)
    if full:  # each rank returns the full gradient
        return first + sum(part - part.detach() for part in parts[1:])
    return sum(part * weight for part, weight in zip(parts, WEIGHTS))


def reduced(parts, reduction):
    """Each rank has one term of the result."""
    stacked = torch.stack(parts)
    kept = {"dtype": stacked.dtype} if reduction in ("sum", "prod") else {}
    return getattr(stacked, reduction)(dim=0, **kept)


def weighted(tensor, weight):
    """Scale the gradient: the weights add up to 1, so equal gradients stay as they are."""
    return tensor.detach() + weight * (tensor - tensor.detach())


def copied(value):
    """Copy an argument: the operator may write to it."""
    if isinstance(value, (list, tuple)):
        return type(value)(copied(item) for item in value)
    return value.clone() if isinstance(value, torch.Tensor) else value


def called(given):
    """Call the operator; returns its results, and its arguments after the call."""
    mine = {place: copied(value) for place, value in given.items()}
    args = [mine[place] for place in sorted(place for place in mine if isinstance(place, int))]
    named = {place: value for place, value in mine.items() if isinstance(place, str)}
    return flat(compute(*args, **named)), mine


def run_whole(given, full):
    """Run on one device."""
    results, mine = called(given)
    found = {f"output[{at}]": result for at, result in enumerate(results)}
    return found | {
        f"{'kwargs' if isinstance(place, str) else 'args'}[{place!r}] after the call": mine[place]
        for place in WRITTEN
    }


def run_split(given, full):
    """Run on ranks, one after the other."""
    pairs = [called(mine) for mine in rank_arguments(given)]
    return together([results for results, _ in pairs], [mine for _, mine in pairs], full)


def observed(run, asked, claimed, wide):
    """Results and gradients for one random cotangent."""
    found = {}
    for targets, full in ((asked, False), (claimed, True)):
        given = arguments(wide)
        leaves = [
            (place, at, leaf.requires_grad_())
            for place in asked
            for at, leaf in enumerate(flat(given[place]))
            if leaf.is_floating_point() or leaf.is_complex()
        ]
        outputs = run(given, full)
        found = {name: value.detach() for name, value in outputs.items()} | found
        live = {name: value for name, value in outputs.items() if value.requires_grad}
        if not live or not targets:
            continue
        random = torch.Generator().manual_seed(1)
        sent = [
            torch.randn(value.shape, generator=random, dtype=torch.float64).to(value.dtype)
            for value in live.values()
        ]
        chosen = [(place, at, leaf) for place, at, leaf in leaves if place in targets]
        grads = torch.autograd.grad(
            list(live.values()), [leaf for *_, leaf in chosen], sent, allow_unused=True
        )
        for (place, at, leaf), grad in zip(chosen, grads):
            found[f"gradient of {place!r}[{at}]"] = torch.zeros_like(leaf) if grad is None else grad
    return found


def loss(found):
    """The sum of all results."""
    return sum(
        value.double().sum().item()
        for name, value in found.items()
        if name.startswith("output") and value.is_floating_point()
    )


def main():
    wide = DTYPE is not None
    try:
        whole = observed(run_whole, ASKED, CLAIMED, wide)
        exact = whole if wide else observed(run_whole, ASKED, CLAIMED, True)
    except Exception as error:
        print(f"the unsplit operator itself fails: {type(error).__name__}: {error}")
        return 3
    try:
        split = observed(run_split, ASKED, CLAIMED, wide)
    except Exception as error:
        print(f"the ranks fail, but the unsplit operator does not: {type(error).__name__}: {error}")
        print("the fault is there")
        return 1
    print(f"loss on one device:   {loss(whole)!r}")
    print(f"loss on {RANKS} devices:   {loss(split)!r}")
    return judged(whole, split, exact, times=4, least=1e-9 if wide else None)
'''


# --- The text of a script -------------------------------------------------------------------------

# A script does not use paritas. It spells out what each rank receives and how the results are
# combined, so a reader can see which rule is wrong.


@dataclasses.dataclass(frozen=True)
class Facts:
    """One failure, with everything that its script contains.

    Attributes:
        operator: its name in the graph.
        written: arguments that the operator writes to.
        native: in the dtypes of the call; otherwise in float64, where rounding is negligible.
        drawn: draw new values; otherwise use those of the call.
        imports: your modules that register operators.
    """

    operator: str
    call: OperatorCall
    recipe: Recipe
    ranks: int
    heading: tuple[str, ...]
    written: tuple[Place, ...] = ()
    native: bool = False
    drawn: bool = True
    seed: int = 0
    imports: tuple[str, ...] = ()

    @property
    def values(self) -> dict[Place, Any]:
        """Arguments by position and by name."""
        return dict([*enumerate(self.call.args), *self.call.kwargs.items()])


def split_script(facts: Facts) -> Script:
    """The script of a failure; raises `NoScriptError` if it cannot be written as Python."""
    lines, module = function_text(facts.operator, facts.call.function, facts.imports)
    needs = ("", f"It imports {module}: run it where Python can find that.") if module else ()
    values = ScriptValues()
    parts = [
        "",
        *lines,
        "",
        f"RANKS = {facts.ranks}",
        f"DTYPE = {'None  # that of the arguments' if facts.native else 'torch.float64'}",
        f"ASKED = {_places_with_gradient(facts)!r}",
        f"CLAIMED = {_places_with_claimed_gradient(facts)!r}",
        "",
        "",
        *_write_arguments(facts, values),
        "",
        "",
        *_write_ranks(facts),
        "",
        "",
        *_write_together(facts),
    ]
    return Script(
        heading=(*facts.heading, *needs),
        imports=('sys.path.insert(0, "")',) if module else (),
        values=values.stored,
        function="\n".join(parts) + "\n",
        run=_RUN,
        sides=("on one device", f"on {facts.ranks} devices"),
    )


# --- the arguments of the operator ----------------------------------------------------------------


def _write_arguments(facts: Facts, values: ScriptValues) -> Iterator[str]:
    path_by_tensor_id: dict[int, str] = {}

    def text(value: Any, name: str, here: str = "") -> str:
        if isinstance(value, list | tuple):
            return sequence_text(value, (text(v, f"{name}[{at}]") for at, v in enumerate(value)))
        if not isinstance(value, torch.Tensor):
            return literal(value)
        if id(value) in path_by_tensor_id:  # the same tensor twice
            return f"{path_by_tensor_id[id(value)]}.clone()"
        if here:
            path_by_tensor_id[id(value)] = here
        return drawn_text(value) if facts.drawn else values.text(name, value.detach(), 0)

    argument_lines = [
        f"    given[{argument_place!r}] = "
        f"{text(value, name_of(argument_place), f'given[{argument_place!r}]')}"
        for argument_place, value in facts.values.items()
    ]
    yield "def arguments(wide):"
    yield '    """The operator\'s arguments, by position and by name."""'
    if facts.drawn:
        yield f"    generator = torch.Generator().manual_seed({facts.seed})"
    yield from values.loading.splitlines()
    yield "    given = {}"
    yield from argument_lines
    yield "    return {place: lifted(value, wide) for place, value in given.items()}"


def _places_with_gradient(facts: Facts) -> tuple[Place, ...]:
    return tuple(
        argument_place
        for argument_place, value in facts.values.items()
        if argument_place not in facts.call.without_gradient
        and any(tensor.is_floating_point() or tensor.is_complex() for tensor in tensors_in(value))
    )


def _places_with_claimed_gradient(facts: Facts) -> tuple[Place, ...]:
    """Those of them for which each rank claims to have the full gradient."""
    claimed_places = []
    for position in _places_with_gradient(facts):
        placement = facts.recipe.placement(position)
        if isinstance(placement, Replicate) and not placement.summed:
            claimed_places.append(position)
    return tuple(claimed_places)


# --- the arguments of each rank -------------------------------------------------------------------


def _write_ranks(facts: Facts) -> Iterator[str]:
    yield "def rank_arguments(given):"
    yield '    """The arguments of each rank."""'
    yield "    ranks = [dict(given) for _ in range(RANKS)]"
    for argument_place, placement in facts.recipe.inputs:
        value = facts.values[argument_place]
        if not tensors_in(value) or placement in (Replicate(), Replicate(own=True)):
            continue
        yield f"    # {name_of(argument_place)}: {_placement_words(placement)}"
        for rank in range(facts.ranks):
            part = _part_text(value, placement, f"given[{argument_place!r}]", rank, facts.ranks)
            yield f"    ranks[{rank}][{argument_place!r}] = {part}"
    yield from _write_numbers(facts)
    yield "    return ranks"


def _write_numbers(facts: Facts) -> Iterator[str]:
    """Arguments that change with the split, as each rank has them."""
    if facts.recipe.exchanges:
        raise NoScriptError("scripts do not support ranks that exchange data")
    places = [argument_place for argument_place, _ in facts.recipe.numbers]
    if not places:
        return
    # The drawn terms of partial arguments do not matter here.
    each = split_values(facts.values, facts.recipe, facts.ranks, Terms(facts.seed, lifted=False))
    for position in places:
        yield f"    # {name_of(position)} changes with the split"
        for rank, rank_values in enumerate(each):
            yield f"    ranks[{rank}][{position!r}] = {literal(rank_values[position])}"


def _placement_words(placement: Any) -> str:
    match placement:
        case Shard(dim=dim, unit=1, halo=(0, 0)):
            return f"split along dimension {dim}"
        case Shard(dim=dim, unit=unit, halo=halo):
            return f"split along dimension {dim}, in units of {unit}, with a halo of {halo}"
        case Replicate():
            return "replicated; each rank claims to have the full gradient"
        case Once():
            return "rank 0 has it, the others have zeros"
        case _:
            return f"each rank has one term of its {placement.reduction}"


def _part_text(value: Any, placement: Any, path: str, rank: int, ranks: int) -> str:
    if isinstance(value, list | tuple):
        items = (
            _part_text(element, placement, f"{path}[{at}]", rank, ranks)
            for at, element in enumerate(value)
        )
        return sequence_text(value, items)
    if not isinstance(value, torch.Tensor):
        return path
    match placement:
        case Shard(dim=dim, unit=unit, halo=(before, after)):
            axis = dim % max(value.dim(), 1)
            size = value.shape[axis]
            begin, end = bounds(size, unit, ranks, path)[rank]
            begin, end = max(0, begin - before), min(size, end + after)
            return f"{path}.narrow({axis}, {begin}, {end - begin})"
        case Replicate():
            return f"weighted({path}, {_rank_weights(ranks)[rank]})"
        case Once():
            return path if rank == 0 else f"torch.zeros_like({path})"
        case Partial(reduction="sum" | "avg"):
            by = 1 if placement.reduction == "sum" else ranks
            return f"{path} * {_rank_weights(ranks)[rank] * by}"
    raise NoScriptError(f"scripts do not support terms of a {placement.reduction}")


def _rank_weights(ranks: int) -> list[float]:
    """Distinct weights of both signs, with sum 1."""
    rest = [-0.5 if rank % 2 else 0.25 for rank in range(1, ranks)]
    return [1 - sum(rest), *rest]


# --- combining the results ------------------------------------------------------------------------


def _write_together(facts: Facts) -> Iterator[str]:
    yield "def together(results, written, full):"
    yield '    """The results of the ranks, combined as the rule says."""'
    yield f"    if any(len(result) != {len(facts.recipe.outputs)} for result in results):"
    expected = f"the rule has {len(facts.recipe.outputs)} results"
    yield f'        raise ValueError("{expected}, a rank returns " + str(len(results[0])))'
    yield "    found = {}"
    for at, combine in enumerate(facts.recipe.outputs):
        parts = f"[result[{at}] for result in results]"
        yield f"    found['output[{at}]'] = {_combine_text(combine, parts)}"
    rules = {
        argument_key: _written_rule(facts.recipe.placement(argument_key))
        for argument_key in facts.written
    }
    compared = {argument_key: rule for argument_key, rule in rules.items() if rule is not None}
    for argument_place, rule in compared.items():
        parts = f"[mine[{argument_place!r}] for mine in written]"
        written = after_call(name_of(argument_place)).text
        yield f"    found[{written!r}] = {_combine_text(rule, parts)}"
    yield "    return found"
    yield ""
    yield ""
    yield f"WEIGHTS = {_rank_weights(facts.ranks)}  # their sum is 1"
    yield f"WRITTEN = {tuple(compared)!r}"


_REDUCTIONS = {"sum": "sum", "avg": "mean", "product": "prod", "max": "amax", "min": "amin"}


def _combine_text(combine: Role, parts: str) -> str:
    match combine:
        case Shard(dim=dim):
            return f"torch.cat({parts}, dim={dim})"
        case Partial(reduction=reduction):
            return f"reduced({parts}, {_REDUCTIONS[reduction]!r})"
        case _:
            return f"same({parts}, full)"


def _written_rule(placement: Any) -> Role | None:
    match placement:
        case Shard(dim=dim, halo=(0, 0)):
            return Shard(dim)
        case Replicate(own=False):
            return Replicate()
    return None


# --- Each script is tried, and a note says if it does not show the failure ------------------------

SCRIPTS_FOLDER = "repro"
_PATIENCE = 120.0  # seconds
_MOST_BYTES = 64 << 20  # of arguments in a file next to the script


@dataclasses.dataclass(frozen=True)
class ScriptOutcome:
    """A script's path in the results folder, or a note why there is none or it shows nothing."""

    path: str = ""
    note: str = ""


def stem_of(number: int, operator: str) -> str:
    """A file name: `03_linear`, whatever the operator is called."""
    parts = operator.split(".")
    # The overload of `aten.mm.default` means nothing here.
    short = parts[1] if parts[0] in {"aten", "prims"} and len(parts) > 1 else parts[-1]
    return f"{number:02}_{re.sub(r'[^A-Za-z0-9_]+', '_', short)[:60] or 'operator'}"


def write_script(
    folder: Path, stem: str, facts: Facts, *, recorded: bool = False, degraded: bool = False
) -> ScriptOutcome:
    """Write a script that reproduces a failure, and run it once.

    The script draws its values if that shows the failure; otherwise the values of the check are in
    a file next to it.

    Args:
        recorded: the values come from a run, and cannot be replaced by drawn ones.
        degraded: only the run in the call's own dtype is wrong.
    """
    path = folder / SCRIPTS_FOLDER / f"{stem}.py"
    name = f"{SCRIPTS_FOLDER}/{path.name}"
    problem = ""
    for drawn, native in _script_variants(facts, recorded=recorded, degraded=degraded):
        script = split_script(dataclasses.replace(facts, native=native, drawn=drawn))
        written = write(script, path, _PATIENCE)
        if written.shows:
            return ScriptOutcome(name)
        problem = written.problem
    return ScriptOutcome(name, f"{name} does not reproduce the failure: {problem}")


def _script_variants(
    facts: Facts, *, recorded: bool, degraded: bool
) -> Iterator[tuple[bool, bool]]:
    """Whether to draw values and whether to run natively, the simplest variant first."""
    tensors = [tensor for value in facts.values.values() for tensor in tensors_in(value)]
    size = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    can_store = size <= _MOST_BYTES and all(is_storable(tensor.dtype) for tensor in tensors)
    if not (recorded and can_store):
        yield True, degraded
    if can_store:
        yield False, degraded
        yield False, not degraded


# --- From a failed operator of a graph to the script that shows it --------------------------------


def with_script(
    folder: Path,
    work: OperatorWork,
    result: OperatorResult,
    versions: Mapping[str, str],
    *,
    graph: int = 1,
) -> OperatorResult:
    """The result with its script, or with a note that says why it has none."""
    outcome = write_first_script(folder, work, result, versions, graph=graph)
    notes = (*result.notes, outcome.note) if outcome.note else result.notes
    return msgspec.structs.replace(result, script=outcome.path, notes=notes)


def write_first_script(
    folder: Path,
    work: OperatorWork,
    result: OperatorResult,
    versions: Mapping[str, str],
    *,
    graph: int = 1,
) -> ScriptOutcome:
    """Write a script for the first split of a failed operator that allows one.

    Args:
        graph: the number of the graph in the folder: scripts of the first have plain names.
    """
    outcome = ScriptOutcome(note="no standalone script: none of its splits is certainly wrong")
    stem = stem_of(work.number, result.operator)
    stem = stem if graph == 1 else f"graph{graph}_{stem}"
    recorded = work.values is not None
    for option in result.failures:
        degraded = option.status is Status.DEGRADED
        try:
            facts = _collect_facts(work, result, option, versions)
            outcome = write_script(folder, stem, facts, recorded=recorded, degraded=degraded)
            break
        except UsageError as error:
            outcome = ScriptOutcome(note=f"no standalone script: {error}")
    return outcome


def _collect_facts(
    work: OperatorWork, result: OperatorResult, option: OptionResult, versions: Mapping[str, str]
) -> Facts:
    """Set up the failing check again; raises `UsageError` if a script could not do the same."""
    confirmation = option.confirmation
    if confirmation is not None and confirmation.simulated.passes(strict=work.settings.strict):
        raise UsageError(
            f"it fails only on {confirmation.backend} ranks, and a script simulates its "
            "ranks; run the "
            "command again to see it"
        )
    proof = option.proof
    if proof is not None and proof.status == "refuted" and _passes_here(option):
        raise UsageError(f"these shapes are right; {proof.words}")
    # A script runs on the CPU.
    settings = dataclasses.replace(work.settings, device=None)
    subject, call, _ = prepare_call(
        subject_of(work.call, settings.imports), work.call, settings, work.values
    )
    if _draws(call):
        raise UsageError("it draws random numbers, and the check divided them among the ranks")
    return Facts(
        operator=work.call.operator,
        call=call,
        recipe=_find_recipe(subject.name, call, work, option),
        ranks=option.ranks,
        heading=_script_heading(result, option, versions),
        written=tuple(
            argument_place
            for argument_place in (*range(len(call.args)), *call.kwargs)
            if any(
                finding.item == after_call(name_of(argument_place))
                for finding in option.verdict.findings
            )
        ),
        seed=work.settings.seed,
        imports=work.settings.imports,
    )


def _passes_here(option: OptionResult) -> bool:
    """Whether only the proof fails, on other shapes."""
    findings = [
        finding for finding in option.verdict.findings if finding.item.kind is not ItemKind.HARNESS
    ]
    return all(finding.status.passes(strict=True) for finding in findings)


def _draws(call: OperatorCall) -> bool:
    call_values = copy_values(CallValues(call.args, call.kwargs))  # it may write to them
    before = Streams.of(call)
    try:
        with quietly(), torch.no_grad():
            call.function(*call_values.args, **call_values.kwargs)
        return before.moved_by(call)
    except Exception:  # noqa: BLE001  (the check has already reported it)
        return False
    finally:
        before.restore()


def _find_recipe(name: str, call: OperatorCall, work: OperatorWork, option: OptionResult) -> Recipe:
    offer = offers(name, call, work.call.annotation, work.settings, option.ranks)
    if offer.fault:
        raise UsageError(f"the annotation is invalid: {offer.fault}")
    identity = operator.attrgetter("idx", "dim", "split", "rule", "origin")
    for offered_option in offer.options:
        if identity(offered_option) == identity(option):
            return offered_option.recipe
    raise UsageError(f"{option.split} was not found again")


def _script_heading(
    result: OperatorResult, option: OptionResult, versions: Mapping[str, str]
) -> tuple[str, ...]:
    site = result.sites[0]
    more = len(result.sites) - 1
    others = f", and {more} more like it" if more else ""
    location = f" at {site.source}" if site.source else ""
    return (
        f"{result.operator}, {option.split} over {option.ranks} ranks, against the unsplit one.",
        "",
        *([f"Node:       {site.node}{location}{others}"] if site.node else []),
        *([f"Code:       {site.code.strip()}"] if site.code.strip() else []),
        f"Signature:  {result.signature}",
        f"Annotation: {option.rule} ({option.origin})",
        f"Verdict:    {option.status}: {option.reason}",
        f"Versions:   {', '.join(f'{name} {version}' for name, version in versions.items())}",
    )

"""What to record of a running program: steps, names, sides, phases and ranks."""

from __future__ import annotations

import difflib
import fnmatch
import itertools
import operator
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Literal, get_args

import msgspec

from paritas.core.errors import UsageError
from paritas.core.results.wording import read_span
from paritas.formats.files.records import Phase
from paritas.formats.foreign.ge_names import torch_names

if TYPE_CHECKING:
    from paritas.formats.files.records import Site

Mode = Literal["input", "output", "all"]
StepSpan = tuple[int, int]
Within = tuple[str, str, str]

_LISTED = ("layers", "ops", "ranks", "phases")
_BETWEEN = ", "
_NEAREST = 3
_LEAST_LIKENESS = 0.4


class Selection(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What to record. None, in any field, means everything.

    Attributes:
        mode: the sides of a call.
        steps: first and last of each span of steps, ascending.
        layers: names or globs of modules, nodes and parameters, or Ascend's names of operators
            (`Conv_1` is `convolution_1`); a module includes its content.
        ops: names or globs of operators and of module classes.
        ranks: the processes of a distributed run.
        every: every n-th step, from step 0.
    """

    mode: Mode = "all"
    steps: tuple[StepSpan, ...] | None = None
    layers: tuple[str, ...] | None = None
    ops: tuple[str, ...] | None = None
    ranks: tuple[int, ...] | None = None
    phases: tuple[Phase, ...] | None = None
    every: int = 1

    @classmethod
    def of(
        cls,
        *,
        mode: str = "all",
        steps: Any = None,
        layers: str | Iterable[str] | None = None,
        ops: str | Iterable[str] | None = None,
        ranks: int | Iterable[int] | None = None,
        phases: str | Iterable[str] | None = None,
        every: int = 1,
    ) -> Selection:
        """Make a selection from the user's arguments.

        Args:
            steps: numbers, ranges, or text such as `2-5` or `0|1|2-5|6`; ascending, each once.
        """
        check_one_of("mode", mode, get_args(Mode))
        if isinstance(every, bool) or not isinstance(every, int) or every < 1:
            raise UsageError(f"every must be a whole number, 1 or more, got {every!r}")
        selection = cls(
            mode=mode,  # type: ignore[arg-type]
            steps=None if steps is None else _parse_steps(steps),
            layers=_parse_patterns("layers", layers),
            ops=_parse_patterns("ops", ops),
            ranks=_parse_ranks(ranks),
            phases=_parse_phases(phases),
            every=every,
        )
        if selection.steps is not None:
            for span in selection.steps:
                # The first multiple of `every` in or after the span.
                if -(-span[0] // every) * every > span[1]:
                    raise UsageError(
                        f"steps: {_show_span(span)} is never recorded with every={every}, "
                        "which counts from step 0; select other steps, or every=1"
                    )
        return selection

    def wants_step(self, step: int) -> bool:
        """Whether anything is recorded in that step."""
        if step % self.every:
            return False
        return self.steps is None or any(first <= step <= last for first, last in self.steps)

    def wants_rank(self, rank: int) -> bool:
        """Whether anything is recorded by that process."""
        return self.ranks is None or rank in self.ranks

    @classmethod
    def from_header(cls, words: Mapping[str, str]) -> Selection:
        """Read a selection from the header of a dump; the inverse of `describe`."""
        unknown = [name for name in words if name not in cls.__struct_fields__]
        if unknown:
            raise UsageError(f"selection: {unknown[0]!r} is not a field of a selection")
        selection_fields: dict[str, Any] = dict(words)
        for name in _LISTED:
            if name in words:
                selection_fields[name] = words[name].split(_BETWEEN)
        try:
            if "ranks" in words:
                selection_fields["ranks"] = [int(rank) for rank in selection_fields["ranks"]]
            selection_fields["every"] = int(words.get("every", "1"))
        except ValueError as error:
            raise UsageError(f"selection: {error}") from error
        return cls.of(**selection_fields)

    def describe(self) -> dict[str, str]:
        """The selection as text, for a dump's header; without fields that select everything."""
        words: dict[str, str] = {}
        if self.mode != "all":
            words["mode"] = self.mode
        if self.steps is not None:
            words["steps"] = "|".join(_show_span(span) for span in self.steps)
        for name in _LISTED:
            field_items = getattr(self, name)
            if field_items is not None:
                words[name] = _BETWEEN.join(str(item) for item in field_items)
        if self.every != 1:
            words["every"] = str(self.every)
        return words


class SelectionFilter:
    """Filters by a selection, and remembers which parts of it matched nothing."""

    def __init__(self, selection: Selection) -> None:
        self.selection = selection
        self._layers = [
            _Pattern(text, (text.casefold(), *torch_names(text))) for text in selection.layers or ()
        ]
        self._ops = [_Pattern(text, (text,)) for text in selection.ops or ()]
        self._verdicts: dict[tuple[object, ...], bool] = {}
        self._names: dict[str, None] = {}
        self._operators: dict[str, None] = {}
        self._phases: set[str] = set()
        self._steps: list[int] = []
        self._passed = False

    def wants(self, site: Site, within: tuple[Within, ...] = ()) -> bool:
        """Whether to record a value at this site.

        Args:
            within: node, module and operator of each node that fused code computes there; selecting
                a module includes what was fused with other modules.
        """
        verdict = self.wants_name(site, within)
        self._phases.add(site.phase)
        selection = self.selection
        return (
            verdict
            and selection.mode in ("all", site.side)
            and (selection.phases is None or site.phase in selection.phases)
        )

    def wants_name(self, site: Site, within: tuple[Within, ...] = ()) -> bool:
        """Whether `layers` and `ops` select it, whatever its side and phase."""
        key = (site.name, site.module, site.op, site.nodes, within)
        verdict = self._verdicts.get(key)
        if verdict is None:
            verdict = self._verdicts[key] = self._judge(site, within)
        return verdict

    def unmet(self) -> list[str]:
        """The names and operators that have matched nothing so far."""
        return [pattern.text for pattern in (*self._layers, *self._ops) if not pattern.met]

    def saw_step(self, step: int) -> None:
        """Note that the program ran that step."""
        self._steps.append(step)

    def report_unmatched(self) -> list[str]:
        """A message for each part of the selection that matched nothing."""
        problems = list(self._missed_steps())
        if any(self.selection.wants_step(step) for step in self._steps):
            problems += _report_missed("layers", self._layers, self._names)
            problems += _report_missed("ops", self._ops, self._operators)
            if not problems and self._verdicts and not self._passed:
                problems.append(
                    "layers and ops: each pattern matched something, but no value matched both; "
                    "use only one of them"
                )
            if self._phases:
                ran = " and ".join(sorted(self._phases))
                problems += [
                    f"phases: {phase!r} did not run, only {ran}"
                    for phase in self.selection.phases or ()
                    if phase not in self._phases
                ]
        return problems

    def _missed_steps(self) -> Iterator[str]:
        for span in self.selection.steps or ():
            if not any(span[0] <= step <= span[1] for step in self._steps):
                last = max(self._steps, default=None)
                ran = "no step" if last is None else f"step{'s 0 to' if last else ''} {last}"
                yield f"steps: {_show_span(span)} did not run; the program ran {ran}"

    def _judge(self, site: Site, within: tuple[Within, ...]) -> bool:
        names = list(_names_of(site))
        operators = list(_operators_of(site.op))
        # Messages show the name without the overload, which is what people write.
        self._operators.update(dict.fromkeys(operators[:1]))
        for node, module, op in within:
            names += [node, *_ancestors(module)]
            others = list(_operators_of(op))
            operators += others
            self._operators.update(dict.fromkeys(others[:1]))
        self._names.update(dict.fromkeys(names))
        folded = [name.casefold() for name in names]
        # Every pattern must be tried, to report at the end which ones matched nothing.
        by_name = [pattern.meets(folded) for pattern in self._layers]
        by_operator = [pattern.meets(operators) for pattern in self._ops]
        verdict = (any(by_name) or not by_name) and (any(by_operator) or not by_operator)
        self._passed |= verdict
        return verdict


class _Pattern:
    """A name or glob, and whether it has matched anything."""

    def __init__(self, text: str, globs: tuple[str, ...]) -> None:
        """`globs` are its spellings; one of them must match."""
        self.text = text
        self.met = False
        self._globs = globs
        self._match = re.compile("|".join(map(fnmatch.translate, globs))).match

    def meets(self, names: Iterable[str]) -> bool:
        is_match = any(name in self._globs or self._match(name) for name in names)
        self.met |= is_match
        return is_match


def _names_of(site: Site) -> Iterator[str]:
    """All names by which a user may select a site."""
    yield site.name
    yield from site.nodes
    inside = [site.module]
    if site.level in {"module", "parameter"}:
        inside.append(site.name)
    for path in inside:
        yield from _ancestors(path)


def _ancestors(path: str) -> Iterator[str]:
    """A module and all modules that contain it."""
    while path:
        yield path
        path = path.rpartition(".")[0]


def _operators_of(op: str) -> Iterator[str]:
    """`aten.mm.default` is also `aten.mm` and `mm`; a class has only its name."""
    parts = op.split(".")
    if len(parts) >= 3:  # noqa: PLR2004  (namespace, name, overload)
        yield ".".join(parts[:-1])
        yield parts[-2]
    if op:
        yield op


def _report_missed(field: str, patterns: list[_Pattern], names: dict[str, None]) -> Iterator[str]:
    for pattern in patterns:
        if pattern.met:
            continue
        if not names:
            yield f"{field}: {pattern.text!r} matched nothing: the program ran nothing with a name"
            continue
        nearest = ", ".join(repr(name) for name in _nearest_names(pattern.text, list(names)))
        count = f"{len(names)} name{'s' if len(names) > 1 else ''}"
        yield f"{field}: {pattern.text!r} matched none of {count}; the most similar: {nearest}"


def _nearest_names(requested_name: str, names: list[str]) -> list[str]:
    """The most similar names, best first."""
    plain = requested_name.casefold()
    literal = re.sub(r"[*?]", "", plain)
    longest = max(re.split(r"[*?.\[\]]+", plain), key=len)

    def likeness(name: str) -> float:
        folded = name.casefold()
        contained = bool(longest) and longest in folded
        return difflib.SequenceMatcher(None, literal, folded).ratio() + contained

    ranked = sorted(names, key=likeness, reverse=True)
    close = [name for name in ranked if likeness(name) >= _LEAST_LIKENESS]
    return (close or ranked)[:_NEAREST]


def _parse_steps(steps: Any) -> tuple[StepSpan, ...]:
    items = [steps] if isinstance(steps, int | str | range) else steps
    if not isinstance(items, Iterable):
        raise UsageError(
            f"steps={steps!r} is not valid: use numbers, ranges such as '2-5', or a list of them"
        )
    spans = [span for item in items for span in _parse_step(item, steps)]
    if not spans:
        raise UsageError(f"steps={steps!r} selects nothing; omit it to record all steps")
    for (_, before), (after, _) in itertools.pairwise(spans):
        if after <= before:
            raise UsageError(
                f"steps={steps!r}: {after} comes after {before}; "
                "list steps in ascending order, each once"
            )
    return tuple(spans)


def _parse_step(item: Any, steps: Any) -> Iterator[StepSpan]:
    if isinstance(item, str):
        for part in item.split("|"):
            first, last = read_span(part.strip()) or (1, 0)
            if first > last:
                raise UsageError(
                    f"steps={steps!r}: {part!r} is not a step or range; write 3, 2-5 or 0|1|2-5|6"
                )
            yield first, last
        return
    if isinstance(item, range):
        if item.step == 1 and item.start >= 0 and item:
            yield item.start, item.stop - 1
            return
        for number in item:
            yield from _parse_step(number, steps)
        return
    try:
        number = operator.index(item)
    except TypeError:
        number = -1
    if number < 0 or isinstance(item, bool):
        raise UsageError(f"steps={steps!r}: {item!r} is not a step; steps are numbers from 0")
    yield number, number


def _list_given(name: str, option_value: Any) -> tuple[Any, ...]:
    """One item or several, as a tuple."""
    items = (option_value,) if isinstance(option_value, str | int) else tuple(option_value)
    if not items:
        raise UsageError(f"{name}={option_value!r} selects nothing; omit it to record all")
    return items


def _parse_patterns(name: str, option_value: str | Iterable[str] | None) -> tuple[str, ...] | None:
    if option_value is None:
        return None
    patterns = _list_given(name, option_value)
    for pattern in patterns:
        if not isinstance(pattern, str) or not pattern.strip():
            raise UsageError(
                f"{name}: {pattern!r} is not a name or glob; use text such as 'layers.0'"
            )
        if _BETWEEN in pattern:
            raise UsageError(
                f"{name}: {pattern!r} is one string for several names; use a list, "
                f"{pattern.split(_BETWEEN)!r}"
            )
    return patterns


def _parse_ranks(rank_option: int | Iterable[int] | None) -> tuple[int, ...] | None:
    if rank_option is None:
        return None
    ranks = _list_given("ranks", rank_option)
    for rank in ranks:
        if isinstance(rank, bool) or not isinstance(rank, int) or rank < 0:
            raise UsageError(f"ranks: {rank!r} is not a rank; ranks are numbers from 0")
    return ranks


def _parse_phases(phase_option: str | Iterable[str] | None) -> tuple[Phase, ...] | None:
    if phase_option is None:
        return None
    phases = _list_given("phases", phase_option)
    for phase in phases:
        check_one_of("phases", phase, get_args(Phase))
    return phases


def _show_span(span: StepSpan) -> str:
    first, last = span
    return str(first) if first == last else f"{first}-{last}"


def check_one_of(name: str, value: Any, supported: tuple[str, ...]) -> None:
    """Refuse a value of an option that is not one of the known ones."""
    if value not in supported:
        raise UsageError(f"{name}={value!r} is not supported: use one of {', '.join(supported)}")

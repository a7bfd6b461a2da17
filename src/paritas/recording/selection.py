"""What of a running program is recorded: which steps, places, sides and ranks."""

from __future__ import annotations

import difflib
import fnmatch
import itertools
import operator
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Literal, get_args

import msgspec

from paritas.errors import UsageError
from paritas.files.records import Phase

if TYPE_CHECKING:
    from paritas.files.records import Site

Mode = Literal["input", "output", "all"]
StepSpan = tuple[int, int]
Within = tuple[str, str, str]

_SPAN = re.compile(r"(\d+)(?:-(\d+))?")
_LISTED = ("layers", "ops", "ranks", "phases")
_BETWEEN = ", "
_NEAREST = 3
_LEAST_LIKENESS = 0.4


class Selection(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What was asked for. None, in any field, means everything.

    Attributes:
        mode: which sides of a call.
        steps: first and last of each span of steps, ascending.
        layers: names or globs of modules, nodes and parameters; a module brings all inside it.
        ops: names or globs of operators and of classes of modules.
        ranks: which processes of a distributed run.
        phases: forward, backward.
        every: each n-th step, counted from step 0.
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
        """Make a selection of what a user wrote.

        Args:
            steps: numbers, ranges, or text such as `2-5` or `0|1|2-5|6`; ascending, none twice.
        """
        if mode not in get_args(Mode):
            raise UsageError(f"mode={mode!r}: give one of {', '.join(get_args(Mode))}")
        if isinstance(every, bool) or not isinstance(every, int) or every < 1:
            raise UsageError(f"every={every!r}: give a whole number, 1 or more")
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
                # The first multiple of `every` that is not before the span.
                if -(-span[0] // every) * every > span[1]:
                    raise UsageError(
                        f"steps: {_show_span(span)} is never recorded with every={every}, "
                        "which counts from step 0; ask for other steps, or for every=1"
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
    def recorded(cls, words: Mapping[str, str]) -> Selection:
        """What the header of a dump says that was asked for; the reverse of `describe`.

        Raises:
            UsageError: these are not the words of a selection.
        """
        unknown = [name for name in words if name not in cls.__struct_fields__]
        if unknown:
            raise UsageError(f"selection: {unknown[0]!r} is not a part of a selection")
        given: dict[str, Any] = dict(words)
        for name in _LISTED:
            if name in words:
                given[name] = words[name].split(_BETWEEN)
        try:
            if "ranks" in words:
                given["ranks"] = [int(rank) for rank in given["ranks"]]
            given["every"] = int(words.get("every", "1"))
        except ValueError as error:
            raise UsageError(f"selection: {error}") from error
        return cls.of(**given)

    def describe(self) -> dict[str, str]:
        """What was asked for, in words; nothing of what was left open."""
        words: dict[str, str] = {}
        if self.mode != "all":
            words["mode"] = self.mode
        if self.steps is not None:
            words["steps"] = "|".join(_show_span(span) for span in self.steps)
        for name in _LISTED:
            given = getattr(self, name)
            if given is not None:
                words[name] = _BETWEEN.join(str(item) for item in given)
        if self.every != 1:
            words["every"] = str(self.every)
        return words


class Sieve:
    """Lets through what a selection wants, and remembers which of its parts met nothing."""

    def __init__(self, selection: Selection) -> None:
        self.selection = selection
        self._layers = [_Pattern(text.casefold(), text) for text in selection.layers or ()]
        self._ops = [_Pattern(text, text) for text in selection.ops or ()]
        self._verdicts: dict[tuple[object, ...], bool] = {}
        self._names: dict[str, None] = {}
        self._operators: dict[str, None] = {}
        self._phases: set[str] = set()
        self._steps: list[int] = []
        self._passed = False

    def wants(self, site: Site, within: tuple[Within, ...] = ()) -> bool:
        """Whether what is seen there is recorded.

        Args:
            within: node, module and operator of each node that fused code computes there: a module
                brings all inside it, also what was fused with something else.
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
        """Whether layers and operators let it through, whatever side and phase it is of."""
        key = (site.name, site.module, site.op, site.nodes, within)
        verdict = self._verdicts.get(key)
        if verdict is None:
            verdict = self._verdicts[key] = self._judge(site, within)
        return verdict

    def unmet(self) -> list[str]:
        """The names and operators that nothing had so far."""
        return [one.text for one in (*self._layers, *self._ops) if not one.met]

    def saw_step(self, step: int) -> None:
        """Say that the program went through that step."""
        self._steps.append(step)

    def unmatched(self) -> list[str]:
        """A message for each part of the selection that met nothing."""
        problems = list(self._missed_steps())
        if any(self.selection.wants_step(step) for step in self._steps):
            problems += _report_missed("layers", self._layers, self._names)
            problems += _report_missed("ops", self._ops, self._operators)
            if not problems and self._verdicts and not self._passed:
                problems.append(
                    "layers and ops: each pattern matched something, but nothing matched both; "
                    "give one of the two"
                )
            if self._phases:
                problems += [
                    f"phases: {phase!r} never came; the run had {_join_by_or(sorted(self._phases))}"
                    for phase in self.selection.phases or ()
                    if phase not in self._phases
                ]
        return problems

    def _missed_steps(self) -> Iterator[str]:
        for span in self.selection.steps or ():
            if not any(span[0] <= step <= span[1] for step in self._steps):
                last = max(self._steps, default=None)
                had = "none" if last is None else f"step{'s 0 to' if last else ''} {last}"
                yield f"steps: {_show_span(span)} never came; the run had {had}"

    def _judge(self, site: Site, within: tuple[Within, ...]) -> bool:
        names = list(_names_of(site))
        operators = list(_operators_of(site.op))
        # Of its names, the one without the overload is told: so people write it.
        self._operators.update(dict.fromkeys(operators[:1]))
        for node, module, op in within:
            names += [node, *_ancestors(module)]
            others = list(_operators_of(op))
            operators += others
            self._operators.update(dict.fromkeys(others[:1]))
        self._names.update(dict.fromkeys(names))
        folded = [name.casefold() for name in names]
        # Every pattern is asked: one that met nothing is to be told at the end.
        by_name = [pattern.meets(folded) for pattern in self._layers]
        by_operator = [pattern.meets(operators) for pattern in self._ops]
        verdict = (any(by_name) or not by_name) and (any(by_operator) or not by_operator)
        self._passed |= verdict
        return verdict


class _Pattern:
    """A name or glob, and whether it met anything yet."""

    def __init__(self, glob: str, text: str) -> None:
        self.text = text
        self.met = False
        self._glob = glob
        self._match = re.compile(fnmatch.translate(glob)).match

    def meets(self, names: Iterable[str]) -> bool:
        found = any(name == self._glob or self._match(name) for name in names)
        self.met |= found
        return found


def _names_of(site: Site) -> Iterator[str]:
    """Everything a user may call a site by."""
    yield site.name
    yield from site.nodes
    inside = [site.module]
    if site.level in {"module", "parameter"}:
        inside.append(site.name)
    for path in inside:
        yield from _ancestors(path)


def _ancestors(path: str) -> Iterator[str]:
    """A module and all that it lies in."""
    parts = path.split(".")
    for length in range(len(parts), 0, -1):
        ancestor = ".".join(parts[:length])
        if ancestor:
            yield ancestor


def _operators_of(op: str) -> Iterator[str]:
    """`aten.mm.default` goes by `aten.mm`, `mm` and its whole name; a class by its name."""
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
            yield f"{field}: {pattern.text!r} matched nothing: nothing came by that has a name"
            continue
        nearest = ", ".join(repr(name) for name in _nearest_names(pattern.text, list(names)))
        count = f"{len(names)} name{'s' if len(names) > 1 else ''}"
        yield f"{field}: {pattern.text!r} matched nothing of {count}; nearest: {nearest}"


def _nearest_names(wanted: str, names: list[str]) -> list[str]:
    """The names a pattern may have been meant for, the likeliest first."""
    plain = wanted.casefold()
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
        raise UsageError(f"steps={steps!r}: give numbers, ranges such as '2-5', or a list of them")
    spans = [span for item in items for span in _parse_step(item, steps)]
    if not spans:
        raise UsageError(f"steps={steps!r} holds no step; leave it out to record all of them")
    for (_, before), (after, _) in itertools.pairwise(spans):
        if after <= before:
            raise UsageError(
                f"steps={steps!r}: {after} comes after {before}; "
                "give steps in ascending order, each once"
            )
    return tuple(spans)


def _parse_step(item: Any, steps: Any) -> Iterator[StepSpan]:
    if isinstance(item, str):
        for part in item.split("|"):
            found = _SPAN.fullmatch(part.strip())
            first, last = (found[1], found[2] or found[1]) if found else ("1", "0")
            if int(first) > int(last):
                raise UsageError(
                    f"steps={steps!r}: {part!r} is no step or range; write 3, 2-5 or 0|1|2-5|6"
                )
            yield int(first), int(last)
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
        raise UsageError(f"steps={steps!r}: {item!r} is no step; steps are counted from 0")
    yield number, number


def _parse_patterns(name: str, given: str | Iterable[str] | None) -> tuple[str, ...] | None:
    if given is None:
        return None
    patterns = (given,) if isinstance(given, str) else tuple(given)
    if not patterns:
        raise UsageError(f"{name}={given!r} selects nothing; leave it out to record all")
    for pattern in patterns:
        if not isinstance(pattern, str) or not pattern.strip():
            raise UsageError(
                f"{name}: {pattern!r} is no name or glob; give text such as 'layers.0'"
            )
        if _BETWEEN in pattern:
            raise UsageError(
                f"{name}: {pattern!r} is one text for several names; give a list, "
                f"{pattern.split(_BETWEEN)!r}"
            )
    return patterns


def _parse_ranks(given: int | Iterable[int] | None) -> tuple[int, ...] | None:
    if given is None:
        return None
    ranks = (given,) if isinstance(given, int) else tuple(given)
    for rank in ranks:
        if isinstance(rank, bool) or not isinstance(rank, int) or rank < 0:
            raise UsageError(f"ranks: {rank!r} is no rank; give numbers from 0")
    if not ranks:
        raise UsageError(f"ranks={given!r} selects nothing; leave it out to record all")
    return ranks


def _parse_phases(given: str | Iterable[str] | None) -> tuple[Phase, ...] | None:
    if given is None:
        return None
    phases = (given,) if isinstance(given, str) else tuple(given)
    if not phases:
        raise UsageError(f"phases={given!r} selects nothing; leave it out to record both")
    for phase in phases:
        if phase not in get_args(Phase):
            raise UsageError(f"phases: {phase!r} is none; give {_join_by_or(get_args(Phase))}")
    return phases  # type: ignore[return-value]


def _show_span(span: StepSpan) -> str:
    first, last = span
    return str(first) if first == last else f"{first}-{last}"


def _join_by_or(words: Iterable[str]) -> str:
    return " or ".join(words)

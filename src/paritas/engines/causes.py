"""Why an engine's numbers differ: changed runs of the reference, one of which may give them.

What a deviation looks like says which changes come first, and which cannot be the cause. They are
tried on a few requests until the time is over. A change is a cause only if it gives the engine's
numbers one by one, to rounding. That its error has the right size is not enough.
"""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, Any

import msgspec
import torch

from paritas.engines import changed_models
from paritas.engines.changed_models import PRECISION
from paritas.engines.changed_weights import loaded_weights, stored_weights
from paritas.engines.changes import (
    Change,
    Family,
    added_tokens,
    cache_changes,
    number_of_experts,
    position_changes,
    prompt_changes,
    search_flips,
)
from paritas.engines.looks import Look, Reach, look_of, observations
from paritas.engines.records import (
    AS_RECORDED,
    CLAIMS,
    TOKENS,
    Readout,
    fitted_truncation,
    readouts,
)
from paritas.engines.rows import EngineCause

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from torch import Tensor

    from paritas.engines.changes import LogitsOf
    from paritas.engines.judging import Clock, Judged, RequestJudgements
    from paritas.engines.records import Request

# Hypotheses are tried on so many of the failing requests; the best are then confirmed on all.
_MOST_ALIKE = 2
_MOST_SAMPLED = 4
_MOST_CONFIRMED = 8
_MOST_CAUSES = 4
_MOST_FITTED = 3
# A hypothesis that leaves more than this share of the difference is not worth a closer look, and
# one that leaves more of what it should give number by number is no cause.
_CLOSE = 0.7
# One that leaves this or less is confirmed at once; others wait until all have been tried.
_CLEAR = 0.2
# A cause that leaves no more of another request than this explains most of it.
_MOSTLY = 0.3
# A hypothesis that does not explain a record to rounding is mentioned if it leaves no more than
# this, of the difference and of its pattern.
_MENTIONED = 0.15
# Hypotheses that leave up to this many times as much as the best are named beside it.
_ALIKE = 1.5
_FITTED = 1.25
# A number is fitted if a small step of it moves the values in this direction (a cosine), or if one
# of those to begin with leaves no more than this share.
_TOWARDS = 0.7
_BETTER = 0.9
_STEP = 1.01
_WIDEST = 100.0
# Numbers around the first guess, by their logarithms, and steps of Newton's method from the best.
_AROUND = 3
_LEAST_AROUND = 0.02
_NEWTON = 4
# An engine in a coarser dtype is off by about as much as the reference in that dtype.
_AS_COARSE = 3.0


@dataclasses.dataclass(frozen=True)
class Hypothesis:
    """A changed run, a changed readout, or both."""

    kind: str
    text: str
    change: Change | None = None
    readout: Readout = AS_RECORDED
    # A hypothesis with a fitted number must explain more than one without.
    doubt: float = 1.0

    @property
    def only_rounds(self) -> bool:
        """Whether it is the same function with less precision."""
        return self.change is not None and self.change.only_rounds


# A hypothesis with the share of the difference that it leaves.
Scored = tuple[float, Hypothesis]


class Search:
    """Looks for the causes of failing requests until its time is over.

    Attributes:
        tried: how many changed runs were tried.
        is_cut_short: the time was over before all were.
        observed: what the deviations look like, in words.
    """

    def __init__(
        self,
        judgements: RequestJudgements,
        older: dict[str, Any],
        clock: Clock,
        tell: Callable[[str], None],
    ) -> None:
        """Nothing is tried yet."""
        self.judgements, self.older, self.clock, self.tell = judgements, older, clock, tell
        self.tried = 0
        self.is_cut_short = False
        self.observed: list[str] = []
        self._confirmed_ones: list[tuple[EngineCause, Hypothesis]] = []

    def explain(self, failing: list[Request]) -> list[EngineCause]:
        """Look for what gives the records of the failing requests."""
        self.clock.start_steps()
        looks = [(request, look_of(self.judgements, request)) for request in failing]
        self.observed = observations(looks)
        unexplained, causes = looks, list[EngineCause]()
        while unexplained and len(causes) < _MOST_CAUSES and not self.is_cut_short:
            best = self._best(unexplained, pairs=not causes)
            if best is None:
                break
            cause, hypothesis = best
            unexplained = [
                request_look
                for request_look in unexplained
                if request_look[0].record.name not in cause.requests
            ]
            if cause.to_rounding:
                # A single decision, as about the last token of a nucleus, is no second cause.
                mostly = [
                    request_look
                    for request_look in unexplained
                    if self._left_by(hypothesis, request_look[0]) <= _MOSTLY
                ]
                unexplained = [
                    request_look for request_look in unexplained if request_look not in mostly
                ]
                names = tuple(request.record.name for request, _ in mostly)
                cause = msgspec.structs.replace(cause, mostly=names)
            causes.append(cause)
            if not cause.to_rounding:
                break
            self._confirmed_ones.append((cause, hypothesis))
        return causes

    def extend(self, causes: list[EngineCause], failing: list[Request]) -> list[EngineCause]:
        """The causes, with those of further requests that they explain."""
        self.clock.start_steps()
        extended = list(causes)
        for cause, hypothesis in self._confirmed_ones:
            names = cause.requests
            for batch in self.judgements.batches(failing):
                if not self.clock.allows_another():
                    break
                names += self._find_explained(hypothesis, batch)
            extended[extended.index(cause)] = msgspec.structs.replace(cause, requests=names)
            failing = [request for request in failing if request.record.name not in names]
        return extended

    def _goes_on(self) -> bool:
        if not self.is_cut_short and not self.clock.allows_another():
            self.is_cut_short = True
        return not self.is_cut_short

    # --- Trying ---

    def _best(
        self, failing: list[tuple[Request, Look]], *, pairs: bool
    ) -> tuple[EngineCause, Hypothesis] | None:
        """The hypothesis that explains most; until one explains the record.

        Pairs are far more than single changes: next to a known cause, one of them would sooner or
        later explain a request in which that cause met a decision within rounding.
        """
        sample = _sample(failing)
        chosen, everyone = [request for request, _ in sample], [request for request, _ in failing]
        scored: list[Scored] = []
        done: set[int] = set()
        # What rounding leaves; a hypothesis that leaves little more need not wait for others.
        clear = max(_CLEAR, 2 * self._rounding_share(chosen))
        for group in self._screen(sample, pairs=pairs):
            scored += [
                scored_hypothesis
                for scored_hypothesis in group
                if math.isfinite(scored_hypothesis[0])
            ]
            scored.sort(key=lambda scored_hypothesis: scored_hypothesis[0])
            good = [
                scored_hypothesis
                for scored_hypothesis in scored
                if scored_hypothesis[0] <= clear and id(scored_hypothesis[1]) not in done
            ]
            cause = self._confirm_cause(good[:_MOST_CONFIRMED], everyone, chosen, done)
            if cause is not None:
                return cause
        close = [
            scored_hypothesis
            for scored_hypothesis in scored
            if scored_hypothesis[0] <= _CLOSE and id(scored_hypothesis[1]) not in done
        ]
        rounding = [
            scored_hypothesis for scored_hypothesis in close if scored_hypothesis[1].only_rounds
        ]
        weak = [
            scored_hypothesis for scored_hypothesis in close if not scored_hypothesis[1].only_rounds
        ][:_MOST_CONFIRMED]
        cause = self._confirm_cause([*weak, *rounding], everyone, chosen, done)
        if cause is not None:
            return cause
        closest = self._closest(scored, chosen, everyone)
        if closest is None:
            self.observed += self._as_coarse_as(rounding, chosen)
        return closest

    def _screen(self, sample: list[tuple[Request, Look]], *, pairs: bool) -> Iterator[list[Scored]]:
        """Hypotheses with the share of the difference that they leave, in groups."""
        requests, looks = [request for request, _ in sample], [look for _, look in sample]
        unchanged_logits = self.judgements.logits(None, requests)
        yield [
            (
                self._remaining(unchanged_logits, hypothesis.readout, requests) * hypothesis.doubt,
                hypothesis,
            )
            for hypothesis in (
                *self._known_readouts(requests),
                *self._fit_readouts(unchanged_logits, requests),
            )
        ]
        at_end = any(look.reach is Reach.OUTPUT for look in looks)
        if at_end:
            yield self._try_added_tokens(requests, looks)
        everything: list[Change] = []
        for group in self._order_groups(self._changes(requests), looks):
            everything += [change for change in group if isinstance(change, Change)]
            yield list(self._scores(group, requests))
        if not at_end:
            yield self._try_added_tokens(requests, looks)
        yield self._flips(requests)
        # In float64 it is the reference itself: only the confirmation can tell.
        coarser = list(changed_models.coarser_dtypes(self.judgements.model))
        yield [(_CLOSE, Hypothesis(change.kind, change.text, change)) for change in coarser]
        if pairs:
            yield list(self._pairs(everything, requests))

    def _changes(self, sample: list[Request]) -> Iterator[list[Change | Family]]:
        judgements = self.judgements
        runner, model = judgements.runner, judgements.model
        yield list(changed_models.older_weights(runner, model, self.older))
        yield list(prompt_changes(runner, sample))
        yield list(position_changes(runner))
        yield list(changed_models.other_settings(model))
        yield list(changed_models.skipped_layers(model))
        yield list(changed_models.quantised_weights())
        yield list(stored_weights(model))
        yield list(cache_changes(runner, [*sample, *judgements.requests]))
        yield list(loaded_weights(model))

    @staticmethod
    def _order_groups(
        groups: Iterable[list[Change | Family]], looks: list[Look]
    ) -> list[list[Change | Family]]:
        """The groups, in parts that can make one of these looks; the likeliest parts first."""
        ranked: list[tuple[int, list[Change | Family]]] = []
        for group in groups:
            by_rank: dict[int, list[Change | Family]] = {}
            for change in group:
                ranks = [look.rank(change.reach) for look in looks if look.admits(change.reach)]
                if ranks:
                    by_rank.setdefault(min(ranks), []).append(change)
            ranked += by_rank.items()
        return [some for _, some in sorted(ranked, key=lambda pair: pair[0])]

    def _scores(self, group: list[Change | Family], sample: list[Request]) -> Iterator[Scored]:
        families = [group_member for group_member in group if isinstance(group_member, Family)]
        for member in group:
            if isinstance(member, Change):
                if not self._goes_on():
                    return
                yield self._score_change(member, sample)
        yield from self._fitted_families(families, sample)

    def _score_change(self, change: Change, sample: list[Request]) -> Scored:
        self.tell(f"trying hypothesis {self.tried + 1}: {change.text}")
        remaining = self._remaining(self._run(change, sample), AS_RECORDED, sample)
        return remaining, Hypothesis(change.kind, change.text, change)

    def _run(self, change: Change, sample: list[Request]) -> dict[int, Tensor]:
        self.tried += 1
        return self.judgements.logits(change, sample)

    # --- Hypotheses with a number that is fitted ---

    def _fitted_families(self, families: list[Family], sample: list[Request]) -> Iterator[Scored]:
        """Begin with a few numbers of each; go on where one of them points to the record."""
        promising: list[tuple[float, float, Family]] = []
        for family in families:
            points: list[Scored] = []
            toward, start = 0.0, family.own
            if not family.whole:
                if not self._goes_on():
                    return
                toward, start = self._direction(family, sample)
            for value in family.grid:
                if value == family.own or not self._goes_on():
                    continue
                points.append(self._score_change(family.make(value), sample))
            yield from points
            least = min((share for share, _ in points), default=math.inf)
            if least <= _BETTER:
                values = [value for value in family.grid if value != family.own]
                start = values[min(range(len(points)), key=lambda at: points[at][0])]
            if least <= _BETTER or toward >= _TOWARDS:
                promising.append((min(least, math.sqrt(max(0.0, 1 - toward**2))), start, family))
        promising.sort(key=lambda promising_entry: promising_entry[0])
        # Some have the same effect, as factors of two products in a row: all of them are named.
        alike = [
            promising_entry
            for promising_entry in promising
            if promising_entry[0] <= _ALIKE * promising[0][0]
        ]
        for _, start, family in (alike + promising[len(alike) : _MOST_FITTED])[:_MOST_CONFIRMED]:
            fitted = self._fit(family, start, sample)
            if fitted is not None:
                yield fitted

    def _direction(self, family: Family, sample: list[Request]) -> tuple[float, float]:
        """The cosine between the deviation and what a small step of the number does.

        The second value is where this leads to, if the numbers are linear in its logarithm.
        """
        logits = self._run(family.make(family.own * _STEP), sample)
        best = (0.0, family.own)
        for request in sample:
            number = self.judgements.numbers[id(request)]
            if number not in logits:
                continue
            engine, truth, moved = self._vectors(logits[number], AS_RECORDED, request)
            deviation, step = engine - truth, moved - truth
            size = float(deviation.norm() * step.norm())
            cosine = float(deviation @ step) / size if size else 0.0
            if abs(cosine) > abs(best[0]):
                best = (cosine, family.own * _step_to(deviation, step))
        return abs(best[0]), best[1]

    def _fit(self, family: Family, start: float, sample: list[Request]) -> Scored | None:
        """The number that leaves least, as a short one if that leaves as little."""
        scored_by_value: dict[float, Scored] = {}

        def score_value(value: float) -> float:
            value = float(round(value)) if family.whole else value
            if value not in scored_by_value:
                if not self._goes_on():
                    return math.inf
                scored_by_value[value] = self._score_change(family.make(value), sample)
            return scored_by_value[value][0]

        around = max(abs(math.log(start / family.own)), _LEAST_AROUND)
        points = [
            start * math.exp(around * step / _AROUND) for step in range(-_AROUND, _AROUND + 1)
        ]
        value = min(points, key=score_value)
        for _ in range(_NEWTON if not family.whole else 0):
            if not self._goes_on():
                break
            value = self._improve_value(family, value, sample)
            score_value(value)
        for digits in range(1, 5):
            score_value(float(f"{value:.{digits - 1}e}"))
        if not scored_by_value:
            return None
        least = min(share for share, _ in scored_by_value.values())
        short = [
            number for number in scored_by_value if scored_by_value[number][0] <= _ALIKE * least
        ]
        chosen = min(short, key=lambda number: (len(f"{number:.6g}"), scored_by_value[number][0]))
        share, hypothesis = scored_by_value[chosen]
        return share, dataclasses.replace(hypothesis, doubt=_FITTED)

    def _improve_value(self, family: Family, value: float, sample: list[Request]) -> float:
        """A step of Newton's method, by a difference, on the request that is fitted best."""
        here = self._run(family.make(value), sample)
        beside = self._run(family.make(value * _STEP), sample)
        numbers = {self.judgements.numbers[id(request)]: request for request in sample}
        shared_numbers = [number for number in here if number in beside]
        if not shared_numbers:
            return value
        number = min(
            shared_numbers,
            key=lambda request_number: self._remaining(
                here, AS_RECORDED, [numbers[request_number]]
            ),
        )
        engine, _, now = self._vectors(here[number], AS_RECORDED, numbers[number])
        _, _, then = self._vectors(beside[number], AS_RECORDED, numbers[number])
        if len(now) != len(then):
            return value
        return value * _step_to(engine - now, then - now)

    # --- Other ways to read the logits ---

    @staticmethod
    def _known_readouts(sample: list[Request]) -> list[Hypothesis]:
        samplings = [request.record.sampling for request in sample]
        readout_by_text = readouts(samplings, {request.record.logprobs_mode for request in sample})
        return [
            Hypothesis(kind, text, None, readout)
            for text, (kind, readout) in readout_by_text.items()
        ]

    def _fit_readouts(
        self, logits: dict[int, Tensor], sample: list[Request]
    ) -> Iterator[Hypothesis]:
        """Readouts with one number that is fitted to the records."""

        def rest(readout: Readout) -> float:
            return self._remaining(logits, readout, sample)

        warm = _fit(lambda x: rest(Readout(temperature=math.exp(x))), -3.0, 3.0)
        temperature = math.exp(warm)
        words = f"a temperature of {temperature:.3g} is applied"
        yield Hypothesis("temperature", words, None, Readout(temperature=temperature), _FITTED)
        many = _fit(lambda x: rest(Readout(padding=math.exp(x))), 0.0, 13.0)
        padding = math.exp(many)
        words = f"about {padding:.3g} unused entries of the vocabulary are counted"
        yield Hypothesis("normalisation", words, None, Readout(padding=padding), _FITTED)
        named = {self.judgements.numbers[id(request)]: request for request in sample}
        for words, readout in fitted_truncation(logits, named).items():
            yield Hypothesis("truncation", words, None, readout, _FITTED)

    # --- Tokens, experts and pairs ---

    def _try_added_tokens(self, sample: list[Request], looks: list[Look]) -> list[Scored]:
        """A token that a template adds: all of a small vocabulary are tried."""
        model = self.judgements.float32
        scoreds: list[Scored] = []
        for plan in added_tokens(self.judgements.runner, sample[0]):
            if not any(look.admits(plan.reach) for look in looks):
                continue
            least: tuple[float, int] = (math.inf, -1)
            for batch in plan.batches():
                if not self._goes_on():
                    break
                self.tried += 1
                for token, logits in plan.run(model, batch):
                    least = min(least, (self._measure_rest(logits, sample[0]), token))
            if least[0] <= _CLOSE:
                scoreds.append(self._score_change(plan.change(least[1]), sample))
        return scoreds

    def _measure_rest(self, logits: Tensor, request: Request) -> float:
        return self._remaining(
            {self.judgements.numbers[id(request)]: logits}, AS_RECORDED, [request]
        )

    def _flips(self, sample: list[Request]) -> list[Scored]:
        experts = number_of_experts(self.judgements.tokens.config)
        scoreds: list[Scored] = []
        for request in sample if experts else ():
            if not self._goes_on():
                break

            def rest_of(logits: LogitsOf, request: Request = request) -> float:
                if not self._goes_on():
                    return math.inf
                changed_logits = self._run(Change("routing", "", logits), [request])
                return self._remaining(changed_logits, AS_RECORDED, [request])

            self.tell(f"looking for other experts in {request.record.name}")
            change = search_flips(self.judgements.runner, experts, request, rest_of)
            if change is not None and change.logits is not None:
                hypothesis = Hypothesis("routing", change.text, change)
                scoreds.append((rest_of(change.logits), hypothesis))
        return scoreds

    def _pairs(self, changes: list[Change], sample: list[Request]) -> Iterator[Scored]:
        """A changed run together with a changed readout."""
        sample = sample[:1]
        others = self._known_readouts(sample)
        for change in changes:
            if not self._goes_on():
                return
            logits = self.judgements.logits(change, sample)
            if not logits:
                continue
            for other in others:
                remaining = self._remaining(logits, other.readout, sample)
                text = f"{change.text}; {other.text}"
                yield remaining, Hypothesis(change.kind, text, change, other.readout)

    # --- How much a hypothesis leaves ---

    def _vectors(
        self, logits: Tensor, readout: Readout, request: Request
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The engine's numbers, the reference's, and those of a changed run; known ones only."""
        number = self.judgements.numbers[id(request)]
        base, values = self.judgements.base[number], readout.values(logits, request)
        kinds = [kind for kind in request.values if kind not in CLAIMS]
        columns = [
            torch.cat([request.values[kind] for kind in kinds]),
            torch.cat([base.truth(number, kind) for kind in kinds]),
            torch.cat([values[kind].double().cpu() for kind in kinds]),
        ]
        finite_mask = torch.stack([column.isfinite() for column in columns]).all(dim=0)
        engine, truth, other = (column[finite_mask] for column in columns)
        return engine, truth, other

    def _remaining(
        self, logits: dict[int, Tensor], readout: Readout, sample: list[Request]
    ) -> float:
        """The share of the difference that a hypothesis leaves, of the request that it fits best.

        One request that it explains is enough to look closer. A request that it does not concern
        keeps its difference.
        """
        shares = [math.inf]
        for request in sample:
            number = self.judgements.numbers[id(request)]
            if number not in logits:
                continue
            base = self.judgements.base[number]
            before, after = 0.0, 0.0
            values = readout.values(logits[number], request)
            for kind, engine in request.values.items():
                if kind == TOKENS:
                    continue
                before += _squares(engine - base.truth(number, kind))
                after += _squares(engine - values[kind].double().cpu())
            shares.append(math.sqrt(after / before) if before else math.inf)
        return min(shares)

    def _left_by(self, hypothesis: Hypothesis, request: Request) -> float:
        """The share of one request's difference that a hypothesis leaves."""
        if not self._goes_on():
            return math.inf
        logits = self.judgements.logits(hypothesis.change, [request])
        return self._remaining(logits, hypothesis.readout, [request]) if logits else math.inf

    def _rounding_share(self, sample: list[Request]) -> float:
        """How much of the difference the reference's own rounding would be."""
        shares = []
        for request in sample:
            number = self.judgements.numbers[id(request)]
            base = self.judgements.base[number]
            native_squares, engine_squares = 0.0, 0.0
            for kind in request.values.keys() - CLAIMS:
                truth = base.truth(number, kind)
                native_squares += _squares(base.native(number, kind).double().cpu() - truth)
                engine_squares += _squares(request.values[kind] - truth)
            shares.append(math.sqrt(native_squares / engine_squares) if engine_squares else 0.0)
        return min(shares)

    def _closest(
        self, scored: list[Scored], sample: list[Request], failing: list[Request]
    ) -> tuple[EngineCause, Hypothesis] | None:
        """The hypothesis that leaves least, if it has the pattern of the numbers too.

        Engines draw their tokens, so their numbers are nearer to 0 than those of another model:
        whatever shrinks all numbers leaves less. The pattern is what a factor and an offset do not
        change.
        """
        for remaining, hypothesis in scored[:_MOST_CONFIRMED]:
            if remaining > _MENTIONED or hypothesis.only_rounds:
                continue
            logits = self.judgements.logits(hypothesis.change, sample)
            patterns = [
                _pattern_left(*self._vectors(logits[number], hypothesis.readout, request))
                for request in sample
                if (number := self.judgements.numbers[id(request)]) in logits
            ]
            if min(patterns, default=math.inf) <= _MENTIONED:
                closest = EngineCause(
                    kind=hypothesis.kind,
                    text=hypothesis.text,
                    requests=tuple(request.record.name for request in failing),
                    remaining=remaining,
                    to_rounding=False,
                )
                return closest, hypothesis
        return None

    # --- Confirming: all the evidence, on all requests ---

    def _confirm_cause(
        self,
        close: list[Scored],
        failing: list[Request],
        sample: list[Request],
        done: set[int],
    ) -> tuple[EngineCause, Hypothesis] | None:
        """The first of some hypotheses that gives records up to rounding, and its equals."""
        confirmed: list[tuple[float, Hypothesis, tuple[str, ...]]] = []
        for remaining, hypothesis in close:
            if confirmed and remaining > _ALIKE * confirmed[0][0]:
                break
            done.add(id(hypothesis))
            self.tell(f"confirming: {hypothesis.text}")
            names = self._find_explained(hypothesis, sample)
            if names:
                confirmed.append((remaining, hypothesis, names))
        if not confirmed:
            return None
        most = max(len(names) for _, _, names in confirmed)
        (remaining, chosen, names), *others = [
            explanation for explanation in confirmed if len(explanation[2]) == most
        ]
        rest = [request for request in failing if request not in sample]
        for batch in self.judgements.batches(rest):
            if not self._goes_on():
                break
            names += self._find_explained(chosen, batch)
        cause = EngineCause(
            kind=chosen.kind,
            text=chosen.text,
            requests=names,
            remaining=remaining,
            to_rounding=True,
            also=_others([equal_hypothesis for _, equal_hypothesis, _ in others], chosen),
        )
        return cause, chosen

    def _find_explained(self, hypothesis: Hypothesis, failing: list[Request]) -> tuple[str, ...]:
        """The failing requests that a hypothesis gives up to rounding, by all the evidence."""
        try:
            judged = self.judgements.run(hypothesis.change, hypothesis.readout, failing)
        except Exception:  # noqa: BLE001  (a hypothesis that cannot be run explains nothing)
            return ()
        numbers = {number for number, _ in judged.items}
        explained_names = []
        for request in failing:
            number = self.judgements.numbers[id(request)]
            kinds = [kind for kind in request.values if kind != TOKENS or len(request.values) == 1]
            if (
                number in numbers
                and self._reproduces(hypothesis, judged, request)
                and all(judged.explains(request, number, kind) for kind in kinds)
            ):
                explained_names.append(request.record.name)
        return tuple(explained_names)

    def _reproduces(self, hypothesis: Hypothesis, judged: Judged, request: Request) -> bool:
        """Whether most of the difference is there number by number.

        A run with much noise of its own, as one in a coarser dtype, is near to whatever is not
        further off than its noise, so that noise itself must be the engine's. Other changes are run
        without the rounding of the reference's dtype; the engine's own rounding remains.
        """
        if hypothesis.kind == PRECISION:
            engine, truth, run = self._collect_numbers(judged, request)
            return _squares(engine - run) <= _CLOSE**2 * _squares(engine - truth)
        if request.values.keys() <= CLAIMS:
            return True
        rounding = min(_ALIKE * self._rounding_share([request]), _BETTER)
        logits = self.judgements.logits(hypothesis.change, [request])
        return self._remaining(logits, hypothesis.readout, [request]) <= max(_CLOSE, rounding)

    def _as_coarse_as(self, rounding: list[Scored], failing: list[Request]) -> list[str]:
        """The coarser dtype whose rounding is as large as the differences, in words."""
        for _, hypothesis in rounding:
            if hypothesis.change is None or not self._goes_on():
                continue
            try:
                judged = self.judgements.run(hypothesis.change, hypothesis.readout, failing)
            except Exception:  # noqa: BLE001, S112  (what cannot be run is as large as nothing)
                continue
            pairs = [self._collect_numbers(judged, request) for request in failing]
            engine_errors = torch.cat([(engine - truth).abs() for engine, truth, _ in pairs])
            run_errors = torch.cat([(run - truth).abs() for _, truth, run in pairs])
            times = float(engine_errors.median()) / float(run_errors.median().clamp(min=1e-300))
            if 1 / _AS_COARSE <= times <= _AS_COARSE:
                words = f"the size of the differences is consistent with this: {hypothesis.text}"
                ratio = f"they are {times:.2g} times as large as it rounds"
                advice = "that does not give them one by one: pass the model in the engine's dtype"
                return [f"{words} ({ratio}); {advice} to tell"]
        return []

    def _collect_numbers(self, judged: Judged, request: Request) -> tuple[Tensor, Tensor, Tensor]:
        """The engine's numbers, the reference's, and those of a run; known ones only."""
        number = self.judgements.numbers[id(request)]
        base = self.judgements.base[number]
        kinds = [kind for kind in request.values if kind not in CLAIMS]
        columns = [
            torch.cat([request.values[kind] for kind in kinds]),
            torch.cat([base.truth(number, kind) for kind in kinds]),
            torch.cat([judged.native(number, kind).double().cpu() for kind in kinds]),
        ]
        finite_mask = torch.stack([column.isfinite() for column in columns]).all(dim=0)
        engine, truth, run = (column[finite_mask] for column in columns)
        return engine, truth, run


def _others(alike: list[Hypothesis], chosen: Hypothesis) -> tuple[str, ...]:
    """What else gives the same, without the chosen one in other words: with its number fitted."""

    def is_same(hypothesis: Hypothesis) -> bool:
        fits = (
            hypothesis.change is None
            and hypothesis.doubt > chosen.doubt
            and hypothesis.kind == chosen.kind
        )
        return fits or hypothesis.text == chosen.text

    return tuple(dict.fromkeys(hypothesis.text for hypothesis in alike if not is_same(hypothesis)))


def _sample(failing: list[tuple[Request, Look]]) -> list[tuple[Request, Look]]:
    """A few short requests of each look."""
    sampled: list[tuple[Request, Look]] = []
    by_length = sorted(failing, key=lambda request_look: len(request_look[0].ids))
    for reach in dict.fromkeys(look.reach for _, look in by_length):
        sampled += [request_look for request_look in by_length if request_look[1].reach == reach][
            :_MOST_ALIKE
        ]
    return sampled[:_MOST_SAMPLED]


def _squares(error: Tensor) -> float:
    """The sum of squares; an infinite error counts as a large one, an unknown one as none."""
    error = torch.where(error.isnan(), 0.0, error).clamp(-100, 100)
    return float(error.square().sum())


def _pattern_left(engine: Tensor, truth: Tensor, other: Tensor) -> float:
    """What a changed run leaves of the engine's numbers beside any factor and offset of it.

    It is a share of what the reference leaves in this way.
    """

    def residual(values: Tensor) -> float:
        centred, engine_centred = values - values.mean(), engine - engine.mean()
        power = float(centred @ centred)
        factor = float(centred @ engine_centred) / power if power else 0.0
        return float((engine_centred - factor * centred).norm())

    before = residual(truth) if len(engine) > 2 else 0.0  # noqa: PLR2004
    return residual(other) / before if before else math.inf


def _step_to(deviation: Tensor, step: Tensor) -> float:
    """The factor of a number that gives what is wanted, if one of `_STEP` gives this step."""
    power = float(step @ step)
    size = float(deviation @ step) / power * math.log(_STEP) if power else 0.0
    return math.exp(min(max(size, -math.log(_WIDEST)), math.log(_WIDEST)))


def _fit(function: Callable[[float], float], low: float, high: float) -> float:
    """The argument with the least value: a grid, then a golden section."""
    steps = 30
    grid = [low + (high - low) * step / steps for step in range(steps + 1)]
    best = min(range(len(grid)), key=lambda grid_index: function(grid[grid_index]))
    left, right = grid[max(best - 1, 0)], grid[min(best + 1, steps)]
    ratio = (math.sqrt(5) - 1) / 2
    for _ in range(30):
        a, b = right - ratio * (right - left), left + ratio * (right - left)
        left, right = (left, b) if function(a) < function(b) else (a, right)
    return (left + right) / 2

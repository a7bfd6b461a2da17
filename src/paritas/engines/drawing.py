"""Were the tokens drawn with the temperature that was asked for?

An engine may return right log probabilities and draw its tokens otherwise. One token shows nothing,
many do. The test is a betting one: the likelihood of the tokens at other temperatures, averaged,
over that at the temperature of the request. If the engine draws as it was asked to, this ratio
exceeds a million in less than one of a million records, however long they are and wherever they
were stopped.
"""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING

import torch

from paritas.engines.records import draws_of

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import Tensor

    from paritas.engines.records import Request

_CERTAIN = math.log(1e6)
# Temperatures as multiples of the one that was asked for. Nearer ones could be rounding.
_OTHERS = (0.02, 0.1, 0.25, 0.4, 0.55, 0.7, 0.8, 1.25, 1.5, 2.0, 3.0, 5.0)
_LEAST_APART = 0.2
_GREEDY = 0.05


@dataclasses.dataclass
class DrawnTokens:
    """The tokens of all requests with one temperature.

    Attributes:
        temperature: the one that was asked for.
        names: the requests.
        tokens: how many tokens were drawn.
    """

    temperature: float
    names: list[str] = dataclasses.field(default_factory=list)
    tokens: int = 0
    _likelihoods: dict[float, float] = dataclasses.field(default_factory=dict)

    @property
    def others(self) -> list[float]:
        """The other temperatures; 1, which an engine uses that is told of none, is among them."""
        temperatures = [factor * self.temperature for factor in _OTHERS]
        is_apart = abs(math.log(self.temperature)) > _LEAST_APART
        return [*temperatures, 1.0] if is_apart else temperatures

    def add(self, logits: Tensor, request: Request) -> None:
        """Count a request; row t of its logits predicts token t + 1."""
        scores, allowed, tokens = draws_of(logits, request)
        self.names.append(request.record.name)
        self.tokens += len(tokens)
        for heat in (self.temperature, *self.others):
            table = (scores / heat).masked_fill(~allowed, -math.inf).log_softmax(dim=-1)
            log_likelihood = float(table.gather(1, tokens[:, None]).sum())
            self._likelihoods[heat] = self._likelihoods.get(heat, 0.0) + log_likelihood

    @property
    def is_wrong(self) -> bool:
        """Whether the tokens show that another temperature was used."""
        if not self.names:
            return False
        ratios = [
            self._likelihoods[temperature] - self._likelihoods[self.temperature]
            for temperature in self.others
        ]
        total = float(torch.logsumexp(torch.tensor(ratios, dtype=torch.float64), dim=0))
        return total - math.log(len(ratios)) > _CERTAIN

    @property
    def sentence(self) -> str:
        """What was found."""
        best = max(self.others, key=lambda temperature: self._likelihoods[temperature])
        how = (
            "the best token was drawn almost always"
            if best <= _GREEDY * self.temperature
            else f"tokens were drawn as with a temperature of about {best:.2g}"
        )
        return (
            f"{how}, though the requests ask for a temperature of {self.temperature:g} "
            f"({self.tokens} tokens)"
        )


def drawn_by_temperature(
    requests: Iterable[Request], logits: dict[int, Tensor], numbers: dict[int, int]
) -> list[DrawnTokens]:
    """The drawn tokens of requests that are not greedy, by the temperature asked for."""
    tokens_by_heat: dict[float, DrawnTokens] = {}
    for request in requests:
        sampling = request.record.sampling
        if sampling.is_greedy or numbers[id(request)] not in logits:
            continue
        group = tokens_by_heat.setdefault(sampling.temperature, DrawnTokens(sampling.temperature))
        group.add(logits[numbers[id(request)]], request)
    return list(tokens_by_heat.values())

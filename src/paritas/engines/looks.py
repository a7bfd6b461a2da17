"""What a deviation looks like: which numbers of a request are right, and which are not.

That alone rules out much. The first token sees nothing but itself, so what happens between tokens
(positions, masks, queries and keys, a cache) cannot make its number wrong. What happens while
tokens are generated cannot make the prompt's numbers wrong.
"""

from __future__ import annotations

import dataclasses
import enum
from typing import TYPE_CHECKING

from paritas.core.results.wording import count_things

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paritas.engines.judging import RequestJudgements
    from paritas.engines.records import Request

# So few numbers of a prompt say nothing about the others.
_FEWEST = 3


class Reach(enum.IntEnum):
    """Which numbers a fault can make wrong, the fewest first."""

    OUTPUT = 0  # those of the generated tokens only
    LATER = 1  # not the first token's
    ALL = 2


@dataclasses.dataclass(frozen=True)
class Look:
    """One request's deviation.

    Attributes:
        reach: the least reach of a fault that makes these numbers wrong; None if the record does
            not have the numbers that show it.
        first: the first wrong number's place among the tokens; None if none is wrong by itself.
        wrong: how many numbers are wrong, of prompt and output.
        total: of how many.
        in_prompt: how many of the wrong ones are the prompt's.
    """

    reach: Reach | None
    first: int | None
    wrong: int
    total: int
    in_prompt: int

    def admits(self, reach: Reach) -> bool:
        """Whether a fault of this reach can make it."""
        return self.reach is None or reach >= self.reach

    def rank(self, reach: Reach) -> int:
        """Faults of the least reach that can make it come first."""
        return 0 if self.reach is None else int(reach) - int(self.reach)


def look_of(judgements: RequestJudgements, request: Request) -> Look:
    """What the deviation of a request looks like."""
    places = judgements.wrong_places(request)
    wrong = [token_index for token_index, is_wrong in places if is_wrong]
    of_prompt = [is_wrong for token_index, is_wrong in places if token_index < request.start]
    first = wrong[0] if wrong else None
    reach: Reach | None = None
    if wrong and len(of_prompt) >= _FEWEST:
        if not any(of_prompt):
            reach = Reach.OUTPUT
        elif 1 in request.given_prompt:
            reach = Reach.ALL if first == 1 else Reach.LATER
    return Look(reach, first, len(wrong), len(places), sum(of_prompt))


def observations(looks: Sequence[tuple[Request, Look]]) -> list[str]:
    """What was seen, in words that hold whatever the cause is."""
    deviating_looks = [(request, look) for request, look in looks if look.wrong]
    sentences = []
    of_output = [
        request_look for request_look in deviating_looks if request_look[1].reach is Reach.OUTPUT
    ]
    if of_output:
        sentences.append(
            f"the prompt's numbers are right to rounding and the output's are not in "
            f"{count_things(len(of_output), 'request')}: look first at what is added to the end of "
            "the prompt, at decoding, and at the cache"
        )
    later = [
        request_look for request_look in deviating_looks if request_look[1].reach is Reach.LATER
    ]
    if later:
        firsts = sorted({look.first for _, look in later if look.first is not None})
        at = f"token {firsts[0]}" if len(firsts) == 1 else f"tokens {firsts[0]} to {firsts[-1]}"
        sentences.append(
            f"the first numbers are right to rounding and later ones are not, from {at} on, in "
            f"{count_things(len(later), 'request')}: look first at what a token takes from others: "
            "positions, windows, masks, queries and keys, the cache"
        )
    everywhere = [
        request_look for request_look in deviating_looks if request_look[1].reach is Reach.ALL
    ]
    if everywhere:
        sentences.append(
            f"the number after the first token is wrong already in "
            f"{count_things(len(everywhere), 'request')}: no position, mask or cache decides it; "
            "look first at weights, norms, the beginning of the prompt, and how numbers are read "
            "out"
        )
    return sentences

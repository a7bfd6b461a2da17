"""Faults of a chosen size: one result scaled by so little that it moves a few times the noise.

The forty-two kinds are far above the noise of a float32 program, and far above it is easy. How the
rules do near the limit is told by these: a node is drawn, and 1 + delta such that the exact effect
is a drawn multiple of the noise.
"""

from __future__ import annotations

import dataclasses
import random
from typing import TYPE_CHECKING

from torch import nn

from paritas.mutants.planting import Effect, ProgramNoise, measure_effect
from paritas.mutants.scaling import ScaledProgram
from paritas.mutants.sites import Places

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch.fx import GraphModule

    from paritas.mutants.programs import FlatProgram

__all__ = ["GRADED", "Graded", "graded"]

GRADED = "scaled_slightly"
# Multiples of the noise that are aimed at: faint, moderate, clear.
LEAST, MOST = 1.0, 16.0
# What is tried first. The effect of a small factor is linear, so that two more tries hit the aim.
FIRST, TRIES = 1e-3, 3
NEAR = 1.5


@dataclasses.dataclass(frozen=True)
class Graded:
    """A fault with its size.

    Attributes:
        node: whose result is scaled.
        delta: by 1 + this.
        effect: what comes of it.
        mutant: the wrong program, until the next one is asked for.
    """

    node: str
    delta: float
    effect: Effect
    mutant: GraphModule


def graded(program: FlatProgram, noise: ProgramNoise, count: int, seed: str) -> Iterator[Graded]:
    """At most so many; fewer where a node's effect cannot be brought near its aim."""
    draw = random.Random(seed)
    names = Places(program, nn.Module()).scalable()
    for name in draw.sample(names, min(count, len(names))):
        aim = LEAST * (MOST / LEAST) ** draw.random()
        found = _brought_near(program, noise, name, aim)
        if found is not None:
            yield found


def _brought_near(
    program: FlatProgram, noise: ProgramNoise, name: str, aim: float
) -> Graded | None:
    scaled, delta = ScaledProgram(program, name), FIRST
    for _ in range(TRIES):
        mutant = scaled.scale_call(delta)
        effect = measure_effect(program, mutant, noise)
        if aim / NEAR < effect.over_noise < aim * NEAR:
            return Graded(name, delta, effect, mutant)
        if not 0 < effect.over_noise < float("inf"):
            return None
        delta *= aim / effect.over_noise
    return None

"""A node, or a few operators, that run alone, and another program's value for their result.

They run on that program's own values for what they read, natively and in float64, so a value is
wrong here only if it was computed wrongly here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from paritas.core.execution.evidence import Evidence
from paritas.core.execution.item_evidence import NO_LIFT, ItemEvidence
from paritas.core.execution.program import VALUE
from paritas.core.judging.failures import call_context
from paritas.core.judging.pairs import Pair

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from paritas.core.diagnosis.case import Context
    from paritas.core.execution.item_evidence import GivenLift
    from paritas.core.execution.node_runs import NodeCall
    from paritas.core.execution.program import ValueProgram
    from paritas.core.results.items import Item


def pair_alone(
    item: Item,
    program: ValueProgram,
    candidate_value: Tensor | None,
    seed: int,
    context: Callable[[], Context | None] | None = None,
    *,
    lifted: GivenLift = NO_LIFT,
) -> Pair | None:
    """What a program that runs alone gives, and another program's value for it, to be judged.

    Args:
        item: what they are, as findings name it.
        program: runs alone on the other program's values.
        candidate_value: the other program's; None stands for zeros, as in gradients.
        seed: of the perturbations.
        context: of the diagnosis.
        lifted: the other program's value in float64, if it can be computed.

    Returns:
        None if it cannot be run alone.
    """
    runs = Evidence(program, seed=seed)
    expected = runs.native[0].outputs.get(VALUE)
    if not isinstance(expected, torch.Tensor):
        return None
    value = torch.zeros_like(expected) if candidate_value is None else candidate_value
    evidence = ItemEvidence(runs, VALUE, lifted=lifted)
    return Pair(item, expected.detach(), value.detach(), evidence, context)


def describe_call(call: NodeCall, *, lifted_agrees: bool | None) -> Context:
    """The context of a value that a node computed.

    Args:
        lifted_agrees: whether the fault vanishes in float64, if that is known.
    """
    is_method = call.node.op == "call_method"
    return call_context(
        call.node.target, *call.operands(), lifted_agrees=lifted_agrees, is_method=is_method
    )

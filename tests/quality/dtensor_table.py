"""A table of DTensor's rules for common operators: `docs/dtensor_rules.md`."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

from paritas.core.errors import UsageError
from paritas.core.results.findings import Status
from paritas.sharding.plans.dtensor import DTensorClaim, examine_dtensor

if TYPE_CHECKING:
    import contextlib
    from collections.abc import Callable, Iterable

    from torch import Tensor


# --- Common operators with example arguments ------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Example:
    """An operator with example arguments."""

    name: str
    op: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any] = dataclasses.field(default_factory=dict)
    within: Callable[[], contextlib.AbstractContextManager[Any]] | None = None


def examples() -> list[Example]:
    """All examples: 2 to 8 elements per dimension, random numbers of seed 0."""
    make = _Maker()
    return [
        *_elementwise(make),
        *_products(make),
        *_reductions(make),
        *_normalising(make),
        *_shaping(make),
        *_indexing(make),
        *_losses(make),
        *_convolutions(make),
    ]


class _Maker:
    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(0)

    def randn(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator)

    def positive(self, *shape: int) -> Tensor:
        return torch.rand(shape, generator=self.generator) + 0.5

    def indices(self, most: int, *shape: int) -> Tensor:
        return torch.randint(most, shape, generator=self.generator)


def _elementwise(make: _Maker) -> list[Example]:
    one: list[Callable[..., Any]] = [
        torch.relu,
        torch.neg,
        torch.abs,
        torch.exp,
        torch.tanh,
        torch.sigmoid,
        torch.clone,
        F.gelu,
        F.silu,
    ]
    positive: list[Callable[..., Any]] = [torch.log, torch.sqrt, torch.rsqrt]
    two: list[Callable[..., Any]] = [torch.add, torch.sub, torch.mul, torch.maximum]
    mask = make.randn(4, 6) > 0
    made = [Example(op.__name__, op, (make.randn(4, 6),)) for op in one]
    made += [Example(op.__name__, op, (make.positive(4, 6),)) for op in positive]
    made += [Example(op.__name__, op, (make.randn(4, 6), make.randn(4, 6))) for op in two]
    made += [
        Example("div", torch.div, (make.randn(4, 6), make.positive(4, 6))),
        Example("add (broadcast)", torch.add, (make.randn(4, 6), make.randn(6))),
        Example("where", torch.where, (mask, make.randn(4, 6), make.randn(4, 6))),
        Example("masked_fill", torch.masked_fill, (make.randn(4, 6), mask, 0.5)),
        Example("clamp", torch.clamp, (make.randn(4, 6), -0.5, 0.5)),
        Example("pow", torch.pow, (make.randn(4, 6), 2)),
    ]
    return made


def _products(make: _Maker) -> list[Example]:
    def attend(heads: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(heads, heads, heads)

    return [
        Example("mm", torch.mm, (make.randn(4, 6), make.randn(6, 8))),
        Example("bmm", torch.bmm, (make.randn(2, 4, 6), make.randn(2, 6, 4))),
        Example("matmul (3d, 2d)", torch.matmul, (make.randn(2, 4, 6), make.randn(6, 4))),
        Example("addmm", torch.addmm, (make.randn(8), make.randn(4, 6), make.randn(6, 8))),
        Example("linear", F.linear, (make.randn(4, 6), make.randn(8, 6))),
        Example("linear with bias", F.linear, (make.randn(4, 6), make.randn(8, 6), make.randn(8))),
        Example("dot", torch.dot, (make.randn(8), make.randn(8))),
        Example("scaled_dot_product_attention (of itself)", attend, (make.randn(2, 2, 4, 6),)),
    ]


def _reductions(make: _Maker) -> list[Example]:
    return [
        Example("sum", torch.sum, (make.randn(4, 6),)),
        Example("sum (dim)", torch.sum, (make.randn(4, 6), 1)),
        Example("mean", torch.mean, (make.randn(4, 6),)),
        Example("mean (dim, uneven)", torch.mean, (make.randn(4, 5), 1)),
        Example("amax", torch.amax, (make.randn(4, 6), 1)),
        Example("amin", torch.amin, (make.randn(4, 6), 1)),
        Example("max (dim)", torch.max, (make.randn(4, 6), 1)),
        Example("argmax", torch.argmax, (make.randn(4, 6), 1)),
        Example("prod", torch.prod, (make.randn(4, 6), 1)),
        Example("var", torch.var, (make.randn(4, 6), 1)),
        Example("logsumexp", torch.logsumexp, (make.randn(4, 6), 1)),
        Example("linalg.vector_norm", torch.linalg.vector_norm, (make.randn(4, 6),)),
        Example("cumsum", torch.cumsum, (make.randn(4, 6), 1)),
        Example("cumprod", torch.cumprod, (make.randn(4, 6), 1)),
    ]


def _normalising(make: _Maker) -> list[Example]:
    scale, shift = make.positive(6), make.randn(6)
    return [
        Example("softmax", F.softmax, (make.randn(4, 6), -1)),
        Example("log_softmax", F.log_softmax, (make.randn(4, 6), -1)),
        Example("layer_norm", F.layer_norm, (make.randn(4, 6), (6,), scale, shift)),
        Example("rms_norm", F.rms_norm, (make.randn(4, 6), (6,), scale)),
        Example("group_norm", F.group_norm, (make.randn(4, 6, 4), 2)),
        Example("normalize", F.normalize, (make.randn(4, 6),)),
    ]


def _shaping(make: _Maker) -> list[Example]:
    def cat(left: Tensor, right: Tensor) -> Tensor:
        return torch.cat([left, right], 1)

    def stack(left: Tensor, right: Tensor) -> Tensor:
        return torch.stack([left, right], 1)

    def chunk(whole: Tensor) -> tuple[Tensor, ...]:
        return torch.chunk(whole, 2, 1)

    def cut(whole: Tensor) -> Tensor:
        return whole[:, 1:3]

    return [
        Example("view", torch.Tensor.view, (make.randn(4, 6), 24)),
        Example("view (split a dimension)", torch.Tensor.view, (make.randn(8, 4), (2, 4, 4))),
        Example("transpose", torch.transpose, (make.randn(4, 6), 0, 1)),
        Example("permute", torch.permute, (make.randn(2, 4, 6), (2, 0, 1))),
        Example("unsqueeze", torch.unsqueeze, (make.randn(4, 6), 1)),
        Example("expand", torch.Tensor.expand, (make.randn(4, 1), 4, 6)),
        Example("flip", torch.flip, (make.randn(4, 6), (1,))),
        Example("roll", torch.roll, (make.randn(4, 6), 1, 1)),
        Example("sort", torch.sort, (make.randn(4, 6), 1)),
        Example("topk", torch.topk, (make.randn(4, 6), 2)),
        Example("tril", torch.tril, (make.randn(4, 6),)),
        Example("pad", F.pad, (make.randn(4, 6), (1, 1))),
        Example("repeat", torch.Tensor.repeat, (make.randn(4, 6), 2, 1)),
        Example("cat", cat, (make.randn(4, 6), make.randn(4, 6))),
        Example("stack", stack, (make.randn(4, 6), make.randn(4, 6))),
        Example("chunk", chunk, (make.randn(4, 6),)),
        Example("slice", cut, (make.randn(4, 6),)),
        Example("unbind", torch.unbind, (make.randn(4, 6),)),
    ]


def _indexing(make: _Maker) -> list[Example]:
    index = make.indices(6, 4, 4)
    return [
        Example("embedding", F.embedding, (make.indices(8, 4, 2), make.randn(8, 6))),
        Example("gather", torch.gather, (make.randn(4, 6), 1, index)),
        Example("index_select", torch.index_select, (make.randn(4, 6), 1, make.indices(6, 4))),
        Example("scatter_add", torch.scatter_add, (make.randn(4, 6), 1, index, make.randn(4, 4))),
    ]


def _losses(make: _Maker) -> list[Example]:
    from torch.distributed.tensor.parallel import loss_parallel

    logits, target = make.randn(4, 6), make.indices(6, 4)
    ignored = target.clone()
    ignored[0] = -100
    weight = make.positive(6)

    def weighted(logits: Tensor, target: Tensor, weight: Tensor) -> Tensor:
        return F.cross_entropy(logits, target, weight.detach())  # it has no gradient

    both = (logits, target)
    return [
        Example("mse_loss", F.mse_loss, (make.randn(4, 6), make.randn(4, 6))),
        Example("cross_entropy", F.cross_entropy, both),
        Example("cross_entropy (ignore_index)", F.cross_entropy, (logits, ignored)),
        Example("cross_entropy (weight)", weighted, (logits, target, weight)),
        Example("cross_entropy in loss_parallel", F.cross_entropy, both, within=loss_parallel),
        Example("log_softmax in loss_parallel", F.log_softmax, (logits, -1), within=loss_parallel),
    ]


def _convolutions(make: _Maker) -> list[Example]:
    image = make.randn(2, 4, 8, 8)
    return [
        Example("conv1d", F.conv1d, (make.randn(2, 4, 8), make.randn(4, 4, 3)), {"padding": 1}),
        Example("conv2d", F.conv2d, (image, make.randn(4, 4, 3, 3))),
        Example("avg_pool2d", F.avg_pool2d, (image, 2)),
        Example("max_pool2d", F.max_pool2d, (image, 2)),
    ]


# --- The table ------------------------------------------------------------------------------------

# How many wrong claims of one operator are listed.
_SHOWN = 8


@dataclasses.dataclass(frozen=True)
class RuleRow:
    """The results for one operator.

    Attributes:
        claims: one for each placement of the arguments.
        failure: why the operator could not be examined.
    """

    name: str
    claims: tuple[DTensorClaim, ...] = ()
    failure: str = ""

    def count(self, outcome: str) -> int:
        """Number of placements with this outcome."""
        return sum(claim.outcome == outcome for claim in self.claims)

    @property
    def wrong(self) -> list[DTensorClaim]:
        """The false claims."""
        bad = {Status.DIFFERENT, Status.DEGRADED}
        return [c for c in self.claims if c.verdict is not None and c.verdict.status in bad]

    @property
    def right(self) -> int:
        """Number of true claims."""
        return sum(claim.verdict is not None and claim.verdict.passed for claim in self.claims)


def examine_example(example: Example, ranks: int = 2, seed: int = 0) -> RuleRow:
    """Check all that DTensor claims about one operator."""
    try:
        claims = examine_dtensor(
            example.op,
            example.args,
            example.kwargs,
            ranks=ranks,
            seed=seed,
            within=example.within,
        )
        return RuleRow(example.name, tuple(claims))
    except UsageError as error:
        return RuleRow(example.name, failure=str(error))


def make_table(rows: Iterable[RuleRow]) -> str:
    """A Markdown table with a row per operator, and below it the first wrong claims of each."""
    lines = [
        "| operator | ways | claimed | right | wrong | moved first | refused |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    details: list[str] = []
    for row in rows:
        if row.failure:
            lines.append(f"| {row.name} | not examined: {row.failure} | | | | | |")
            continue
        wrong = row.wrong
        figures = (
            len(row.claims),
            row.count("claimed"),
            row.right,
            f"**{len(wrong)}**" if wrong else 0,
            row.count("redistributed"),
            row.count("refused"),
        )
        lines.append(f"| `{row.name}` | " + " | ".join(map(str, figures)) + " |")
        shown = wrong[:_SHOWN]
        details += [f"- `{row.name}`: `{claim.words}`: {_first_failure(claim)}" for claim in shown]
        if len(wrong) > len(shown):
            details.append(f"- `{row.name}`: and {len(wrong) - len(shown)} more")
    return "\n".join([*lines, "", *(details or ["No claim was found wrong."])]) + "\n"


def _first_failure(claim: DTensorClaim) -> str:
    if claim.verdict is None or not claim.verdict.failures:
        return ""
    finding = claim.verdict.failures[0]
    item = finding.item.in_graph("")
    more = len(claim.verdict.failures) - 1
    return f"{item}: {finding.reason}" + (f" (and {more} more)" if more else "")

"""Reports of graphs for the tests of their files: ordinary, failing, empty and hostile ones."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import msgspec
import torch

from paritas.core.numerics.metrics import pair_metrics
from paritas.core.results.findings import Aspect, Coverage, Finding, Score, Status, Verdict
from paritas.core.results.items import Item
from paritas.sharding.graphs.rows import (
    CallOutcome,
    CallSite,
    GraphReport,
    OperatorResult,
    OptionResult,
    RuleOrigin,
)

if TYPE_CHECKING:
    from paritas.core.results.items import Metrics

HOSTILE = '</script><script>document.title="owned"</script><b onclick="x()">=1+1'

_OFF = "in float64, where rounding is negligible, it is off by 1.3 times the typical value"
_LINEAR = "torch.nn.functional.linear"
_MATMUL = "linear(f32[2, 8, 16], f32[32, 16])"


def sites(node: str, line: int, code: str, module: str, layers: int = 1) -> tuple[CallSite, ...]:
    """The same call in each of so many layers."""
    return tuple(
        CallSite(
            position=line + 100 * layer,
            node=node if layers == 1 else f"{node}_{layer}",
            source=f"models/block.py:{line}",
            code=code,
            module=module.format(layer=layer),
        )
        for layer in range(layers)
    )


def finding(path: str, status: Status, reason: str = "") -> Finding:
    """One compared tensor, with figures where it is wrong."""
    wrong = status is Status.DIFFERENT
    return Finding(
        item=Item(name=path),
        aspect=Aspect.VALUE,
        status=status,
        reason=reason,
        dtype="float32",
        shape=(2, 8, 32),
        lifted=_score() if wrong else None,
        metrics=_metrics() if wrong else None,
    )


def _score() -> Score:
    return Score(max_z=4.2e9, max_limit=12.0, rms_z=1e9, rms_limit=2.5, noise="rounding in float64")


def _metrics() -> Metrics:
    return pair_metrics(torch.full((4,), 2.0), torch.ones(4))


def option(
    place: tuple[int, int],
    name: str,
    rule: str,
    *,
    status: Status = Status.EQUIVALENT,
    origin: RuleOrigin = "library",
    ranks: int = 2,
    losses: tuple[float | None, float | None] = (12.25, 12.250001),
) -> OptionResult:
    """One split, with the findings that its status asks for."""
    wrong = not status.passes()
    return OptionResult(
        idx=place[0],
        dim=place[1],
        split=f"split by {name}",
        identifier=name,
        rule=rule,
        origin=origin,
        ranks=ranks,
        status=status,
        reason=f"output: {_OFF}" if wrong else "",
        loss_whole=losses[0],
        loss_split=losses[1],
        gradients="1 of 2 gradients different" if wrong else "2 gradients equivalent",
        verdict=Verdict(
            findings=(
                finding("output", status, _OFF if wrong else ""),
                finding("gradient of args[0]", Status.IDENTICAL),
                finding("gradient of args[1]", status, _OFF if wrong else ""),
            ),
            coverage=Coverage(compared=3),
        ),
        seconds=0.004,
    )


def operator(
    name: str,
    signature: str,
    where: tuple[CallSite, ...],
    outcome: CallOutcome = CallOutcome.VERIFIED,
    **more: object,
) -> OperatorResult:
    """An operator under a key of its own."""
    key = f"{name} {signature} {where[0].node}"
    return msgspec.convert(
        {"key": key, "operator": name, "signature": signature, "outcome": outcome, "sites": where}
        | more,
        OperatorResult,
        from_attributes=True,
    )


def transformer() -> GraphReport:
    """Two layers: one wrong rule, one operator of somebody's own, and what has nothing to split."""
    right, wrong = "* k+, n k+ -> * n", "* k, n k -> * n"
    softmax = "* n^ -> * n^"
    operators = (
        operator(
            "torch.nn.functional.embedding",
            "embedding(i64[2, 8], f32[512, 16])",
            sites("embedding", 12, "x = self.embed(tokens)", ""),
            options=[
                option((0, 0), "*0", "*, n^ e -> * e", losses=(3.5, 3.5)),
                option((1, 1), "e", "*, n^ e -> * e", status=Status.IDENTICAL, losses=(3.5, 3.5)),
            ],
            notes=["indices are drawn within the 512 rows"],
        ),
        operator(
            _LINEAR,
            _MATMUL,
            sites("linear_up", 30, "h = self.up(x)", "layers.{layer}.mlp.up", 2),
            options=[
                option((0, 0), "*0", right, status=Status.IDENTICAL),
                option((0, 1), "*1", right, status=Status.IDENTICAL),
                option((0, 2), "k", right),
                option((1, 0), "n", right, status=Status.IDENTICAL),
            ],
            seconds=0.02,
        ),
        operator(
            "torch.nn.functional.softmax",
            "softmax(f32[2, 4, 8, 8], dim=-1)",
            sites("softmax", 21, "p = softmax(s, dim=-1)", "layers.{layer}.attention", 2),
            options=[option((0, axis), f"*{axis}", softmax) for axis in range(3)],
        ),
        operator(
            _LINEAR,
            "linear(f32[2, 8, 32], f32[16, 32])",
            sites(
                "linear_down", 31, "return self.down(gelu(h)) * self.scale", "layers.{layer}.mlp", 2
            ),
            CallOutcome.FAILED,
            reason="1 of 3 splits is different",
            options=[
                option((0, 0), "*0", wrong, origin="declared"),
                option(
                    (0, 2),
                    "k",
                    wrong,
                    origin="declared",
                    status=Status.DIFFERENT,
                    losses=(12.25, 25.75),
                ),
                option((1, 0), "n", wrong, origin="declared"),
            ],
            script="repro/01_linear.py",
            seconds=0.03,
        ),
        operator(
            "my_ops.rotate",
            "rotate(f32[2, 8, 4, 4], f32[8, 4])",
            sites("rotate", 18, "q = rotate(q, self.angles)", "layers.{layer}.attention", 2),
            CallOutcome.UNSUPPORTED,
            reason="my_ops.rotate is not an operator of torch: name its module with --import",
        ),
        operator(
            "operator.getitem",
            "getitem((f32[2, 8, 4], f32[2, 8, 4]), 0)",
            sites("getitem", 17, "q, k, v = self.qkv(x)", "layers.{layer}.attention", 6),
            CallOutcome.NOTHING,
            reason="unpacks a tuple",
        ),
        operator(
            "torch.sum",
            "sum(f32[3])",
            sites("sum", 40, "return x.sum()", ""),
            CallOutcome.NOTHING,
            reason="no dimension can be divided by 2",
        ),
    )
    return report(operators)


def report(operators: tuple[OperatorResult, ...], **more: object) -> GraphReport:
    """All of the calls, and none missing, unless it is said."""
    given = {
        "graph": "runs/graphs/transformer_block.ckp",
        "kind": "nnscaler",
        "settings": {"options": "declared", "ranks": "2", "cap": "none", "seed": "0"},
        "versions": {"paritas": "0.1.0", "torch": "2.13.0"},
        "operators": operators,
        "calls": sum(len(one.sites) for one in operators),
        "seconds": 1.234,
    }
    return msgspec.convert(given | more, GraphReport, from_attributes=True)


def passing() -> GraphReport:
    """What is right and what has nothing to check."""
    right = {CallOutcome.VERIFIED, CallOutcome.NOTHING}
    return report(tuple(one for one in transformer().operators if one.outcome in right))


def unsupported() -> GraphReport:
    """Nothing is wrong, but not everything was checked."""
    return report(
        tuple(one for one in transformer().operators if one.outcome != CallOutcome.FAILED)
    )


def interrupted() -> GraphReport:
    """Stopped after two operators of many."""
    return report(
        transformer().operators[:2], ended=False, calls=17, resumed=1, notes=["stopped by Ctrl-C"]
    )


def empty() -> GraphReport:
    """A graph without calls."""
    return report(())


def hostile() -> GraphReport:
    """Every text is out to be run by a browser or a spreadsheet."""
    where = CallSite(position=0, node=HOSTILE, source=HOSTILE, code=HOSTILE, module=HOSTILE)
    bad = option((0, 1), HOSTILE, HOSTILE, status=Status.DIFFERENT, losses=(math.nan, math.inf))
    bad = msgspec.structs.replace(
        bad,
        reason=HOSTILE,
        gradients=HOSTILE,
        verdict=Verdict(
            findings=(finding(HOSTILE, Status.DIFFERENT, HOSTILE),), coverage=Coverage(compared=1)
        ),
    )
    one = OperatorResult(
        key=HOSTILE,
        operator=HOSTILE,
        signature=HOSTILE,
        sites=(where,),
        outcome=CallOutcome.FAILED,
        reason=HOSTILE,
        options=(bad,),
        notes=(HOSTILE,),
        script=HOSTILE,
    )
    return report(
        (one,),
        graph=HOSTILE,
        kind=HOSTILE,
        settings={HOSTILE: HOSTILE},
        versions={HOSTILE: HOSTILE},
        notes=[HOSTILE],
    )


def wide(count: int = 300, every: int = 50) -> GraphReport:
    """Many operators, of which so many are wrong: each fiftieth."""
    some = transformer().operators
    operators = []
    for place in range(count):
        base = some[3] if place % every == 7 % every else some[(1, 2, 6)[place % 3]]
        operators.append(
            msgspec.structs.replace(
                base,
                key=f"{base.key} {place}",
                sites=tuple(
                    msgspec.structs.replace(site, node=f"{site.node}_{place}")
                    for site in base.sites
                ),
            )
        )
    return report(tuple(operators), graph="large.pt2", kind="torch.export")

"""16 planted faults must be found and 8 benign rewrites must stay quiet, at every scale and dtype.

Where the lifted run applies, nothing is missed and nothing alarms. The native run alone is held to
the best rule that others have been measured by: all 16 in float32, 6 in bfloat16, no alarm.

The usual run has one small block and not 8, of the columns after the first a part, natively
every second fault and rewrite, and no diagnoses; PARITAS_WHOLE_CORPUS=1 asks for all of it.
"""

from __future__ import annotations

import functools
import os
from typing import TYPE_CHECKING

import pytest
import torch

from paritas import Status, Verdict, VerifyConfig, verify
from quality.transformer import SMALL, Sizes, Transformer, token_ids
from quality.transformer_variants import BENIGN, FAULTS

if TYPE_CHECKING:
    from collections.abc import Sequence

WHOLE = bool(os.environ.get("PARITAS_WHOLE_CORPUS"))
pytestmark = [] if WHOLE else [pytest.mark.usefixtures("undiagnosed")]
SIZES = SMALL if WHOLE else Sizes(width=32, layers=1, context=16, vocabulary=128)
COLUMNS = {
    "float32": (torch.float32, 1.0),
    "float32 times 1e-4": (torch.float32, 1e-4),
    "float32 times 1e3": (torch.float32, 1e3),
    "bfloat16": (torch.bfloat16, 1.0),
}
# What the native run finds in bfloat16; the others hide in the rounding of the residual stream.
SEEN_NATIVELY_IN_BFLOAT16 = {
    "swap_two_tokens",
    "pos_slice_off_by_1",
    "one_elem_plus_1std",
    "causal_off_by_1",
    "dropout_p001_left_on",
    "zero_last_token_row",
}


def in_columns(names: Sequence[str]) -> list[tuple[str, str]]:
    """Each in each column; in the usual run a third of them in bfloat16, and a sixth scaled."""
    each = {"float32": 1, "bfloat16": 3}
    return [
        (column, name)
        for column in COLUMNS
        for name in names[:: 1 if WHOLE else each.get(column, 6)]
    ]


@functools.cache
def reference(column: str) -> Transformer:
    dtype, scale = COLUMNS[column]
    model = Transformer(SIZES, dtype=dtype, out_scale=scale).eval()
    return model.requires_grad_(requires_grad=False)


def verdict_on(column: str, candidate: torch.nn.Module, *, lift: bool) -> Verdict:
    config = VerifyConfig(raise_on_mismatch=False, lift=lift)
    return verify([token_ids(SIZES)], reference(column), candidate, config)


@pytest.mark.one_in(2)
@pytest.mark.parametrize(("column", "fault"), in_columns([*FAULTS]))
def test_fault_is_found(column: str, fault: str) -> None:
    verdict = verdict_on(column, FAULTS[fault](reference(column)), lift=True)
    assert verdict.status is Status.DIFFERENT


@pytest.mark.one_in(2)
@pytest.mark.parametrize(("column", "rewrite"), in_columns([*BENIGN]))
def test_benign_rewrite_stays_quiet(column: str, rewrite: str) -> None:
    verdict = verdict_on(column, BENIGN[rewrite](reference(column)), lift=True)
    assert verdict.status in {Status.IDENTICAL, Status.EQUIVALENT}, str(verdict)


@pytest.mark.parametrize("column", COLUMNS if WHOLE else ["bfloat16"])
def test_native_run_alone_is_no_worse_than_the_best_known_rule(column: str) -> None:
    wanted = sorted(SEEN_NATIVELY_IN_BFLOAT16 if column == "bfloat16" else FAULTS)
    if not WHOLE:
        wanted = wanted[::2]
    candidates = {name: FAULTS[name](reference(column)) for name in wanted}
    missed = [n for n, m in candidates.items() if verdict_on(column, m, lift=False)]
    assert not missed


@pytest.mark.parametrize(("column", "rewrite"), in_columns([*BENIGN])[:: 1 if WHOLE else 2])
def test_native_run_alone_stays_quiet(column: str, rewrite: str) -> None:
    verdict = verdict_on(column, BENIGN[rewrite](reference(column)), lift=False)
    assert verdict.passed, str(verdict)


@pytest.mark.parametrize("fault", ["ln_eps_1e-6", "attn_scale_1head_2pct", "gelu_tanh"])
def test_gradients_show_a_fault_as_well(fault: str) -> None:
    model = Transformer(SIZES).eval()
    verdict = verify(
        [token_ids(SIZES)], model, FAULTS[fault](model), VerifyConfig(raise_on_mismatch=False)
    )
    gradients = [f for f in verdict.findings if f.path.startswith("gradient of")]
    assert len(gradients) == len(list(model.parameters()))
    assert any(f.status is Status.DIFFERENT for f in gradients)


@pytest.mark.parametrize("rewrite", ["matmul_splitk", "fused_sdpa_vs_math_softmax"])
def test_gradients_of_a_benign_rewrite_stay_quiet(rewrite: str) -> None:
    model = Transformer(SIZES).eval()
    verdict = verify(
        [token_ids(SIZES)], model, BENIGN[rewrite](model), VerifyConfig(raise_on_mismatch=False)
    )
    assert verdict.passed, str(verdict)

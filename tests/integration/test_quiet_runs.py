"""What torch logs of runs of ours stays out of the user's terminal; the rest does not."""

from __future__ import annotations

import textwrap

import pytest

import processes

WIDE_REFUSED = """
    lib = torch.library.Library("quiet_lab", "DEF")
    lib.define("twice(Tensor x) -> Tensor")
    lib.impl("twice", lambda x: x * 2, "CPU")

    def shape(x):
        torch._check(x.dtype is not torch.float64, lambda: "expected float32")
        return torch.empty_like(x)

    lib.impl("twice", shape, "Meta")

    def model(x):
        return torch.ops.quiet_lab.twice(x).softmax(-1).exp().sum(-1)
"""
WARNS_WIDE = """
    def model(x):
        if x.dtype is torch.float64:
            warnings.warn("only in float64", UserWarning)
        return x.softmax(-1).exp().sum(-1)
"""
WARNS_ALWAYS = """
    def model(x):
        warnings.warn("in every run", UserWarning)
        return x.softmax(-1).exp().sum(-1)
"""
BREAKS = """
    def model(x):
        return x[: int((x > 9).sum()) + 8].softmax(-1).exp().sum(-1)
"""
VERIFY = """
    def candidate(x):
        return model(x.flip(-1))

    compiled = torch.compile(candidate, backend="eager")
    asked = paritas.VerifyConfig(raise_on_mismatch=False)
    torch.manual_seed(0)
    verdict = paritas.verify([torch.randn(64, 64)], model, compiled, asked)
    print(verdict.status, *verdict.notes, sep="; ")
"""


def verified(model: str) -> tuple[str, str]:
    parts = ["import warnings, torch, paritas", textwrap.dedent(model), textwrap.dedent(VERIFY)]
    done = processes.run("-c", "\n".join(parts))
    assert done.returncode == 0, done.stderr
    return done.stdout, done.stderr


@pytest.mark.parametrize("model", [WIDE_REFUSED, WARNS_WIDE])
def test_a_run_of_ours_that_torch_complains_of_leaves_the_terminal_clean(model):
    out, err = verified(model)
    assert err == ""
    assert out.startswith("equivalent")


def test_a_candidate_that_cannot_be_compiled_in_float64_was_compiled_all_the_same():
    out, _ = verified(WIDE_REFUSED)
    assert out == "equivalent; only the native run was made: nothing was compiled in float64\n"


def test_what_the_users_own_runs_warn_of_and_log_is_shown():
    _, err = verified(WARNS_ALWAYS)
    assert err.count("UserWarning: in every run") >= 1
    _, err = verified(BREAKS)
    assert err.count("Graph break from `Tensor.item()`") == 1

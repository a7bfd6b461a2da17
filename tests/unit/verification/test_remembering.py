"""What a verdict is about is kept as long as the verdict is, and goes without a word."""

from __future__ import annotations

import processes

CODE = """
import torch
import processes
import paritas

asked = paritas.VerifyConfig(raise_on_mismatch=False)
model = torch.nn.Linear(2, 2)
# What is kept holds these functions, whose globals hold the verdict.
verdict = paritas.verify([torch.ones(2)], lambda x: model(x), lambda x: model(x) + 1, asked)
assert not verdict
"""


def test_a_failing_verdict_that_lives_until_the_exit_says_nothing_there():
    done = processes.run("-c", CODE)
    assert (done.returncode, done.stderr) == (0, "")

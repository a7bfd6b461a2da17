"""What a verdict is about is kept as long as the verdict is, and goes without a word."""

from __future__ import annotations

import os
import subprocess
import sys

CODE = """
import torch
import paritas

asked = paritas.VerifyConfig(raise_on_mismatch=False)
model = torch.nn.Linear(2, 2)
# What is kept holds these functions, whose globals hold the verdict.
verdict = paritas.verify([torch.ones(2)], lambda x: model(x), lambda x: model(x) + 1, asked)
assert not verdict
"""


def test_a_failing_verdict_that_lives_until_the_exit_says_nothing_there():
    done = subprocess.run(
        [sys.executable, "-c", CODE], capture_output=True, text=True, check=False, env=os.environ
    )
    assert (done.returncode, done.stderr) == (0, "")

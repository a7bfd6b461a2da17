"""`paritas run` under torchrun: two ranks with gloo on the CPU, DDP included."""

from __future__ import annotations

import re
import signal
from pathlib import Path

import pytest

import processes
from integration.run_scripts import NET, verdict_in, write
from paritas.core.results.findings import Status
from paritas.core.results.wording import headline


@pytest.fixture(autouse=True)
def _folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("RANK", "WORLD_SIZE", "PARITAS_GUARD"):
        monkeypatch.delenv(name, raising=False)


TOLD = ("--json", "verdict.json")
RANKS = f"""{NET}
import os
import time
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
rank = dist.get_rank()
wrong = f"--faulty={{rank}}" in sys.argv
step = torch.compile(DistributedDataParallel(model), backend=faulty if wrong else "aot_eager")
for _ in range(2):
    step(torch.randn(32, 8)).square().mean().backward()
dist.barrier()
if f"--kill={{rank}}" in sys.argv:
    # Not before the other has left the group: gloo would take it down as well.
    while not os.path.exists("left"):
        time.sleep(0.01)
    os.kill(os.getpid(), 9)
dist.destroy_process_group()
open("left", "w").close()
"""


def forked(*arguments):
    write("ranks.py", RANKS)
    ranks = processes.run_ranks("-m", "paritas", "run", *TOLD, "ranks.py", *arguments)
    return [rank.returncode for rank in ranks], "".join(rank.stderr for rank in ranks)


def torchrun(*arguments):
    write("ranks.py", RANKS)
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    command = ("-m", "paritas", "run", *TOLD, "ranks.py", *arguments)
    done = processes.run(*launcher, *command, environment=processes.launching(Path.cwd()))
    return done.returncode, done.stderr


@pytest.mark.slow
def test_two_ranks_give_one_report():
    codes, stderr = forked()
    assert codes == [0, 0], stderr
    verdict = verdict_in("verdict.json")
    assert verdict.passed
    ranks = {finding.path[: len("rank 0")] for finding in verdict.findings}
    assert ranks == {"rank 0", "rank 1"}
    lines = stderr.splitlines()
    assert sum("paritas run ─" in line for line in lines) == 1
    assert sum(line.startswith("rank 1: identical: ") for line in lines) == 1
    assert headline(verdict) in lines


@pytest.mark.slow
def test_a_fault_on_one_rank_is_told_by_the_first():
    code, stderr = torchrun("--faulty=1")
    assert code == 1, stderr
    verdict = verdict_in("verdict.json")
    assert verdict.status is Status.DIFFERENT
    assert {finding.path[: len("rank 0")] for finding in verdict.failures} == {"rank 1"}
    assert any(
        "rank 1: graph 0: node relu: different (value)" in line for line in stderr.splitlines()
    )
    codes = re.findall(r"rank +: (\d) .*\n +exitcode +: (-?\d+)", stderr)
    assert dict(codes) == {"0": "1", "1": "1"}


@pytest.mark.slow
def test_a_rank_that_was_killed_is_unverified():
    codes, stderr = forked("--kill=1")
    assert codes == [3, -signal.SIGKILL], stderr
    verdict = verdict_in("verdict.json")
    assert [finding.path for finding in verdict.failures][-1] == "rank 1"
    assert not verdict.passed
    assert "it sent no report in time: it was killed, or is still running" in stderr

"""`paritas run` under torchrun: two ranks with gloo on the CPU, DDP included."""

from __future__ import annotations

import re
import socket
import sys

import pytest

from integration.run_scripts import NET, start, verdict_in, write
from paritas.numerics.findings import Status
from paritas.numerics.wording import headline


@pytest.fixture(autouse=True)
def _folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("RANK", "WORLD_SIZE", "PARITAS_GUARD"):
        monkeypatch.delenv(name, raising=False)


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


# As a launcher starts them, but out of one process that has imported torch for both.
FORKED = """
import os, signal, sys
import torch
import paritas, paritas.cli.run_ending
from paritas.cli import main

signal.alarm(600)
# What they would both import, and compile for the first time.
guarded = torch.compile(torch.nn.Linear(2, 2), backend=paritas.guard("aot_eager"))
guarded(torch.ones(1, 2)).sum().backward()
torch.compiler.reset()
children = []
for rank in range(2):
    child = os.fork()
    if child == 0:
        os.environ.update(RANK=str(rank), WORLD_SIZE="2")
        main(sys.argv[1:], prog_name="paritas")
    children.append(child)
codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
sys.exit(max(codes, key=abs))
"""


def forked():
    write("ranks.py", RANKS)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    run = ("run", "--json", "verdict.json", "ranks.py")
    process = start(sys.executable, "-c", FORKED, *run, environment=address)
    _, stderr = process.communicate(timeout=600)
    return process.returncode, stderr


def torchrun(*arguments):
    write("ranks.py", RANKS)
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    run = ("-m", "paritas", "run", "--json", "verdict.json", "ranks.py")
    process = start(sys.executable, *launcher, *run, *arguments)
    _, stderr = process.communicate(timeout=600)
    return process.returncode, stderr


@pytest.mark.slow
def test_two_ranks_give_one_report():
    code, stderr = forked()
    assert code == 0, stderr
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
    code, stderr = torchrun("--kill=1")
    assert code != 0
    verdict = verdict_in("verdict.json")
    assert [finding.path for finding in verdict.failures][-1] == "rank 1"
    assert not verdict.passed
    assert "it handed in no report in time: it was killed, or is still running" in stderr

"""Processes forked from a program under capture or guard: they end, and write nothing of ours."""

from __future__ import annotations

import torch

import processes
from paritas.formats.dumps.reading import Dump

# Forked in a process of its own: the tests' may have threads. An alarm ends what waits for ever.
PROGRAM = """
import os
import signal
import sys

import torch
from torch import nn
from torch.utils.data import DataLoader

import paritas

signal.alarm(550)
torch.set_num_threads(1)
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 4), nn.Tanh()).requires_grad_(False)


def forked(work):
    child = os.fork()
    if child == 0:
        signal.alarm(500)
        code = 1
        try:
            work()
            code = 0
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


class Rows:
    def __len__(self):
        return 4

    def __getitem__(self, number):
        return torch.full((4,), float(number)).cos()


def loaded():
    return DataLoader(Rows(), batch_size=2, num_workers=1, multiprocessing_context="fork")


def verified():
    paritas.verify([torch.ones(2, 4)], model, model)


verified()
print("fork after use:", forked(verified))
with paritas.capture("dump", level="op"):
    model(torch.ones(2, 4))
    print("fork in a capture:", forked(lambda: model(torch.ones(2, 4))))
    for batch in loaded():
        model(batch)
for room in (0, 4096):
    with paritas.capture(f"dump{room}", level="op", queue_bytes=room) as capture:

        def more_than_may_wait():
            for number in range(20):
                model(torch.full((64, 4), float(number)))
            capture.__exit__(None, None, None)

        model(torch.ones(2, 4))
        print(f"fork with {room} bytes of room:", forked(more_than_may_wait))
        model(torch.ones(2, 4))
guarded = paritas.guard("eager")
compiled = torch.compile(model, backend=guarded)
for batch in loaded():
    compiled(batch)
print("fork under guard:", forked(lambda: compiled(torch.ones(2, 4))))
print("guard:", guarded.verdict().status.value)
"""


def test_forks_end_and_leave_one_dump_of_the_parent_alone(tmp_path):
    (tmp_path / "program.py").write_text(PROGRAM, encoding="utf-8")
    done = processes.run("program.py", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "fork after use: 0",
        "fork in a capture: 0",
        "fork with 0 bytes of room: 0",
        "fork with 4096 bytes of room: 0",
        "fork under guard: 0",
        "guard: identical",
    ]
    # The parent's own calls, of which one is for each batch of the first.
    for name, calls in {"dump": 3, "dump0": 2, "dump4096": 2}.items():
        dump = Dump.open(tmp_path / name)
        assert dump.problems == []
        assert dump.header(0).closed
        made = [r for r in dump.records() if "tanh" in r.site.name and r.site.side == "output"]
        assert len(made) == calls
        assert all(isinstance(dump.read(record), torch.Tensor) for record in made)

"""Sweep the plans that models of transformers ship, each at a small size on two simulated ranks.

    python benchmarks/plans/shipped.py OUT.jsonl [--plan hf|hf-ep] [--only NAME ...]

Every class runs in its own forked process with a time limit; classes that OUT has are skipped.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import time
import warnings
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import transformers
from transformers.models.auto import modeling_auto

from paritas.core.targets import build_target
from paritas.sharding.plans.verify import verify_parallel

LIMIT = 240.0
MAPPINGS = ("MODEL_FOR_CAUSAL_LM_MAPPING", "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING")


def classes(plan: str) -> list[str]:
    """Model classes whose configuration has a plan."""
    field = "base_model_ep_plan" if plan == "hf-ep" else "base_model_tp_plan"
    found: dict[str, None] = {}
    for mapping in MAPPINGS:
        table = getattr(modeling_auto, mapping)
        for config in list(table):
            with contextlib.suppress(Exception):
                made = table[config]
                for cls in made if isinstance(made, tuple) else (made,):
                    parts = [config, *getattr(config, "sub_configs", {}).values()]
                    if any(getattr(part, field, None) for part in parts):
                        found[cls.__name__] = None
    return list(found)


def check(name: str, plan: str, steps: int) -> dict[str, object]:
    """One verdict as a row."""
    torch.manual_seed(0)
    model, inputs = build_target(f"hf:{name}")
    verdict = verify_parallel(model, plan, inputs, {"tp": 2}, steps=steps, timeout=LIMIT)
    first = verdict.failures[0] if verdict.failures else None
    row: dict[str, object] = {
        "status": str(verdict.status.value),
        "compared": verdict.coverage.compared,
        "notes": list(verdict.notes),
    }
    if first is not None:
        row["first"] = first.path
        row["reason"] = first.reason
        row["origin"] = None if first.origin is None else first.origin.name
        row["diagnosis"] = None if first.diagnosis is None else first.diagnosis.sentence
        row["failures"] = [finding.path for finding in verdict.failures][:40]
    return row


def work(name: str, plan: str, steps: int, pipe: object) -> None:
    warnings.simplefilter("ignore")
    began = time.process_time()
    try:
        row = check(name, plan, steps)
    except Exception as error:  # noqa: BLE001  (a row of the table)
        row = {"status": "error", "reason": f"{type(error).__name__}: {error}"[:600]}
    row["cpu_s"] = round(time.process_time() - began, 1)
    pipe.send(row)  # type: ignore[attr-defined]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--plan", default="hf")
    parser.add_argument("--steps", type=int, default=1)
    parser.add_argument("--only", nargs="*")
    given = parser.parse_args()
    done = set()
    if given.out.exists():
        done = {json.loads(line)["name"] for line in given.out.read_text().splitlines()}
    fork = multiprocessing.get_context("fork")
    for name in given.only or classes(given.plan):
        if name in done:
            continue
        ours, theirs = fork.Pipe()
        process = fork.Process(target=work, args=(name, given.plan, given.steps, theirs))
        process.start()
        theirs.close()
        row: dict[str, object] = {"status": "timeout"}
        with contextlib.suppress(EOFError):
            if ours.poll(LIMIT):
                row = ours.recv()
        process.kill()
        process.join()
        row = {"name": name, "plan": given.plan, "transformers": transformers.__version__, **row}
        with given.out.open("a") as file:
            file.write(json.dumps(row) + "\n")
        print(name, row["status"], row.get("first", ""), row.get("reason", ""), flush=True)


if __name__ == "__main__":
    main()

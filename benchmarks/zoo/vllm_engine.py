"""vLLM as the engine: right configurations that must pass, and faults that must be named.

    python -m benchmarks.zoo.vllm_engine OUT.jsonl right
    python -m benchmarks.zoo.vllm_engine OUT.jsonl right --limit 40 --dtype float32
    python -m benchmarks.zoo.vllm_engine OUT.jsonl faults --seeds 0 1
    python -m benchmarks.zoo.vllm_engine OUT.jsonl summary

It runs in the environment of `make test-engines` (`.venv-engines`). The cases are those of
`tests/quality/vllm_cases.py`, which are served and judged in batches; the folder OUT.served gets
their checkpoints and what vLLM returned. Rows that OUT has already are not run again: delete a line
to judge its case again, and its file in OUT.served to serve it again.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import time
import warnings
from pathlib import Path

from benchmarks.lab.journals import read_rows
from benchmarks.zoo import engines  # it also makes `quality` importable

import paritas
from quality import vllm_cases

# Served by one process of vLLM, which takes long to start, and then judged.
BATCH = 36


def cases(asked):
    """The cases that are asked for."""
    if asked.what == "right":
        return [*vllm_cases.right_cases(asked.limit, asked.dtype), *vllm_cases.ADAPTERS]
    return [
        dataclasses.replace(case, seed=seed, name=f"{case.name}/{seed}")
        for seed in asked.seeds
        for case in filter(vllm_cases.can_be_served, vllm_cases.FAULTS)
    ]


def judged(folder, what, case):
    """One row."""
    began = time.process_time()
    row = {"what": what, "name": f"{case.dtype} {case.name}", "kind": case.kind}
    try:
        report = paritas.check_engine(
            vllm_cases.reference(folder, case),
            vllm_cases.records(folder, case),
            older=vllm_cases.older_weights(folder, case),
        )
    except Exception as error:  # noqa: BLE001  (a crash is a row)
        return {**row, "error": f"{type(error).__name__}: {str(error)[-300:]}"}
    statuses = [one.status.value for one in report.rows]
    seconds = time.process_time() - began
    return {**row, **engines.figures(report), "requests": statuses, "cpu_s": seconds}


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("what", choices=["right", "faults", "summary"])
    parser.add_argument("--limit", type=int, default=102)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--seeds", type=int, nargs="*", default=[0])
    asked = parser.parse_args()
    warnings.simplefilter("ignore")
    known = read_rows(asked.out)
    if asked.what == "summary":
        engines.summary(known)
        return
    done = {row["name"] for row in known}
    left = [one for one in cases(asked) if f"{one.dtype} {one.name}" not in done]
    folder = asked.out.with_suffix(".served")
    for first in range(0, len(left), BATCH):
        batch = left[first : first + BATCH]
        vllm_cases.serve(folder, batch, check=False)
        for case in batch:
            with asked.out.open("a") as out:
                out.write(json.dumps(judged(folder, asked.what, case)) + "\n")


if __name__ == "__main__":
    main()

"""vLLM as the engine: right configurations that must pass, and faults that must be named.

    python -m benchmarks.zoo.vllm_engine OUT.jsonl right --limit 100
    python -m benchmarks.zoo.vllm_engine OUT.jsonl right --limit 40 --dtype float32
    python -m benchmarks.zoo.vllm_engine OUT.jsonl faults --seeds 0 1
    python -m benchmarks.zoo.vllm_engine OUT.jsonl summary

It runs in the environment of `make test-engines` (`.venv-engines`). The cases are those of
`tests/quality/vllm_cases.py`; the folder OUT.served gets their checkpoints and what vLLM returned.
Rows that OUT has already are not run again.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import pickle
import shutil
import subprocess
import sys
import time
import warnings
from pathlib import Path

from benchmarks.zoo import engines  # it also makes `quality` importable

import paritas
from quality import vllm_cases


def cases(asked):
    """The cases that are asked for."""
    if asked.what == "right":
        return vllm_cases.right_cases(asked.limit, asked.dtype)
    return [
        dataclasses.replace(case, seed=seed, name=f"{case.name}/{seed}")
        for seed in asked.seeds
        for case in vllm_cases.FAULTS
    ]


def judged(folder, what, number, case):
    """One row."""
    began = time.process_time()
    row = {"what": what, "name": f"{case.dtype} {case.name}", "kind": case.kind}
    made = folder / "records" / f"{number}.pickle"
    if not made.exists():
        error = made.with_suffix(".error")
        return {**row, "error": error.read_text()[-300:] if error.exists() else "not served"}
    try:
        report = paritas.check_engine(
            vllm_cases.reference(folder, case),
            pickle.loads(made.read_bytes()),  # noqa: S301  (our own)
            older=vllm_cases.older_weights(folder, case),
        )
    except Exception as error:  # noqa: BLE001  (a crash is a row)
        return {**row, "error": f"{type(error).__name__}: {str(error)[:200]}"}
    statuses = [one.status.value for one in report.rows]
    seconds = time.process_time() - began
    return {**row, **engines.figures(report), "requests": statuses, "cpu_s": seconds}


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("what", choices=["right", "faults", "summary"])
    parser.add_argument("--limit", type=int, default=100)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--seeds", type=int, nargs="*", default=[0])
    asked = parser.parse_args()
    warnings.simplefilter("ignore")
    lines = asked.out.read_text().split("\n") if asked.out.exists() else []
    known = [json.loads(line) for line in lines if line]
    if asked.what == "summary":
        engines.summary(known)
        return
    done = {row["name"] for row in known}
    left = [one for one in cases(asked) if f"{one.dtype} {one.name}" not in done]
    folder = asked.out.with_suffix(".served") / f"{asked.what} {asked.dtype}"
    shutil.rmtree(folder / "records", ignore_errors=True)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "cases").write_bytes(pickle.dumps(left))
    program = Path(vllm_cases.__file__).with_name("vllm_serving.py")
    subprocess.run([sys.executable, program, folder / "cases", folder], check=False)
    for number, case in enumerate(left):
        with asked.out.open("a") as out:
            out.write(json.dumps(judged(folder, asked.what, number, case)) + "\n")


if __name__ == "__main__":
    main()

"""One run of one model: builds it, asks `paritas.verify`, computes the truth, prints a JSON row."""

from __future__ import annotations

import json
import sys
import time
import traceback

import torch

_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


def build(target, *, train):
    torch.manual_seed(0)
    if target.startswith("zoo:"):
        from benchmarks.zoo import others

        model, args = getattr(others, target.removeprefix("zoo:"))()
        return model, tuple(args), {}
    from paritas.targets import build_target

    model, inputs = build_target(target, train=train)
    return model, inputs.args, inputs.kwargs


def run(job):
    """The row of one job: target, dtype, train, gradients, device, mode."""
    from benchmarks.zoo import truth

    import paritas

    row = dict(job)
    started = time.perf_counter()
    autocast = torch.bfloat16 if job["dtype"] == "autocast" else None
    dtype = None if autocast else _DTYPES[job["dtype"]]
    try:
        model, args, kwargs = build(job["target"], train=job["train"])
    except paritas.UsageError as error:
        return {**row, "stage": "not built", "reason": str(error)}
    model = model.train(job["train"]).to(device=job["device"], dtype=dtype)
    args, kwargs = (truth.move(one, dtype, job["device"]) for one in (args, kwargs))
    row["parameters"] = sum(one.numel() for one in model.parameters())

    def compile_it(one):
        torch.compiler.reset()
        return torch.compile(one, mode=job["mode"])

    config = paritas.VerifyConfig(
        raise_on_mismatch=False, verify_gradients=None if job["gradients"] else False
    )
    with torch.autocast(job["device"], dtype=autocast, enabled=autocast is not None):
        verdict = paritas.verify(paritas.Inputs(args, kwargs), model, compile_it(model), config)
    row |= {
        "stage": "verified",
        "status": str(verdict.status),
        "seconds": time.perf_counter() - started,
    }
    row["findings"] = [
        {"path": one.path, "status": str(one.status), "reason": one.reason}
        for one in verdict.findings
        if str(one.status) not in {"identical", "equivalent"}
    ][:12]
    try:
        rows = truth.measure(
            model, args, kwargs, compile_it, gradients=job["gradients"], autocast=autocast
        )
        row |= {"truth": truth.decide(rows), "worst": rows[:8]}
    except Exception as error:  # noqa: BLE001 - the row says that there is no truth
        row |= {"truth": "unknown", "reason": f"{type(error).__name__}: {error!s:.300}"}
    return row


if __name__ == "__main__":
    asked = json.loads(sys.argv[1])
    try:
        found = run(asked)
    except Exception:  # noqa: BLE001 - a crash is a row
        found = {**asked, "stage": "crashed", "reason": traceback.format_exc()[-1500:]}
    print("ROW " + json.dumps(found, default=str))

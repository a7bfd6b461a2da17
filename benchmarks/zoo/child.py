"""One run of one model: build it, call `paritas.verify`, compute the truth, and give the row."""

from __future__ import annotations

import copy
import time

import torch

_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
_MOST_PARAMETERS = 30_000_000


def build(target, *, train, seed):
    torch.manual_seed(seed)
    if target.startswith("zoo:"):
        from benchmarks.zoo import others

        model, args = getattr(others, target.removeprefix("zoo:"))()
        return model, tuple(args), {}
    from paritas.core.targets import build_target

    model, inputs = build_target(target, train=train)
    return model, inputs.args, inputs.kwargs


class UnusableError(Exception):
    """A job that has nothing to verify; its argument is what its row says."""


def prepare(job, row):
    """The model of a job and its arguments, as the job asks for them; `row` notes its size.

    Raises:
        UnusableError: the model is not built, is too large, or does not run as it is.
    """
    from benchmarks.zoo import truth

    import paritas

    autocast = torch.bfloat16 if job["dtype"] == "autocast" else None
    dtype = None if autocast else _DTYPES[job["dtype"]]
    try:
        model, args, kwargs = build(job["target"], train=job["train"], seed=job["seed"])
    except paritas.UsageError as error:
        raise UnusableError({"stage": "not built", "reason": str(error)}) from error
    row["parameters"] = sum(one.numel() for one in model.parameters())
    if row["parameters"] > _MOST_PARAMETERS:
        raise UnusableError({"stage": "too large"})
    model = model.train(job["train"]).to(device=job["device"], dtype=dtype)
    args, kwargs = (truth.move(one, dtype, job["device"]) for one in (args, kwargs))
    try:
        with torch.no_grad(), torch.autocast(job["device"], autocast, autocast is not None):
            copy.deepcopy(model)(*truth.move(args), **truth.move(kwargs))
    except Exception as error:  # eager does not take this dtype or device
        reason = f"{type(error).__name__}: {error!s:.300}"
        raise UnusableError({"stage": "eager fails", "reason": reason}) from error
    return model, args, kwargs


def run(job):
    """The row of one job: target, dtype, train, gradients, device, mode, tf32, seed."""
    from benchmarks.zoo import truth

    import paritas

    row = dict(job)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = job["tf32"]
    started = time.perf_counter()
    autocast = torch.bfloat16 if job["dtype"] == "autocast" else None
    try:
        model, args, kwargs = prepare(job, row)
    except UnusableError as error:
        return {**row, **error.args[0]}

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
        if str(one.status) not in {"identical", "equivalent"} or one.reason
    ][:12]
    row["notes"] = list(verdict.notes)[:6]
    try:
        rows = truth.measure(
            model, args, kwargs, compile_it, gradients=job["gradients"], autocast=autocast
        )
        row |= {"truth": truth.decide(rows), "worst": rows[:8]}
    except Exception as error:  # noqa: BLE001 - the row says that there is no truth
        row |= {"truth": "unknown", "reason": f"{type(error).__name__}: {error!s:.300}"}
    return row

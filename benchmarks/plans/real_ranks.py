"""Plans that transformers ships, run by transformers alone on two gloo processes.

    python benchmarks/plans/real_ranks.py [--plan hf|hf-ep] NAME ...

paritas only builds a small model and its inputs. The model is saved, and each rank loads it with
`from_pretrained(..., distributed_config=...)`, as a user would. A line says whether it runs and
gives the values of one device, and which gradients differ between the ranks. It tells a fault of a
plan from a fault of ours.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from torch import multiprocessing

LIMIT = 240.0
NEAR = 1e-3


def whole(tensor: Any) -> torch.Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def result(output: Any) -> torch.Tensor:
    loss = getattr(output, "loss", None)
    return whole(output[0] if loss is None else loss).double()


def size(tensor: torch.Tensor) -> float:
    return float(tensor.detach().square().sum())


def as_rank(rank: int, folder: str, name: str, plan: str) -> None:
    """One rank; what it sees goes to a file."""
    import transformers
    from transformers.distributed.configuration_utils import DistributedConfig
    from transformers.integrations import accelerate

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    # `from_pretrained` asks for the package, but needs nothing of it here.
    accelerate.is_accelerate_available = lambda *_: True
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2")
    seen: dict[str, Any] = {"stage": "loading"}
    try:
        store = f"file://{folder}/store"
        torch.distributed.init_process_group("gloo", store, rank=rank, world_size=2)
        sizes = DistributedConfig(tp_size=2, ep_size=2 if plan == "hf-ep" else None)
        cls = getattr(transformers, name)
        model = cls.from_pretrained(folder, distributed_config=sizes, dtype=torch.float32)
        args, kwargs = torch.load(f"{folder}/inputs.pt", weights_only=False)
        seen["stage"] = "forward"
        seen["size"] = size(result(model.eval()(*args, **kwargs)))
        seen["stage"] = "backward"
        result(model.train()(*args, **kwargs)).square().sum().backward()
        seen["stage"] = "done"
        seen["gradients"] = {
            path: size(whole(one.grad).double())
            for path, one in model.named_parameters()
            if one.grad is not None
        }
    except Exception as error:  # noqa: BLE001  (a row of the table)
        seen["error"] = f"{type(error).__name__}: {error!s:.160}"
    Path(folder, f"seen{rank}.json").write_text(json.dumps(seen))
    time.sleep(2)  # a rank that leaves at once makes the other fail in another way
    os._exit(0)


def near(left: float, right: float) -> bool:
    return abs(left - right) <= NEAR * max(abs(left), abs(right))


def check(name: str, plan: str) -> str:
    from paritas.core.targets import build_target

    torch.manual_seed(0)
    model, inputs = build_target(f"hf:{name}")
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        torch.save((tuple(inputs.args), dict(inputs.kwargs)), f"{folder}/inputs.pt")
        expected = size(result(model.eval()(*inputs.args, **inputs.kwargs)))
        spawn = multiprocessing.get_context("spawn")
        ranks = [
            spawn.Process(target=as_rank, args=(rank, folder, name, plan)) for rank in range(2)
        ]
        for rank in ranks:
            rank.start()
        for rank in ranks:
            rank.join(LIMIT)
            rank.kill()
        files = [Path(folder, f"seen{rank}.json") for rank in range(2)]
        if not all(file.exists() for file in files):
            return "no answer"
        first, second = (json.loads(file.read_text()) for file in files)
    if "error" in first or "error" in second:
        failed = first if "error" in first else second
        return f"raises in {failed['stage']}: {failed['error']}"
    if not near(first["size"], expected):
        return f"another result: {first['size']:.6g} instead of {expected:.6g}"
    gradients = first["gradients"]
    apart = [path for path in gradients if not near(gradients[path], second["gradients"][path])]
    return f"gradients differ between the ranks: {', '.join(apart[:4])}" if apart else "runs"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("names", nargs="+")
    parser.add_argument("--plan", default="hf")
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    for name in given.names:
        print(f"{name}, {given.plan}: {check(name, given.plan)}", flush=True)


if __name__ == "__main__":
    main()

"""Dumps in msprobe's form, written by hand: what its release 26.2.0 leaves for such programs."""

import json
from pathlib import Path

import torch

FRAMES = [
    "File /opt/site-packages/torch/nn/modules/linear.py, line 134, in forward, \n return F.linear(",
    "File /app/net.py, line 18, in forward, \n h = self.lin(x)",
    "File /app/train.py, line 5, in <module>, \n net(x)",
]


def scalar(kind: str, value: object) -> dict:
    return {"type": kind, "value": value}


def tensor(values: torch.Tensor, *, grad: bool = False, file: str = "", **figures: object) -> dict:
    """A leaf with the four figures of msprobe; given ones replace them."""
    leaf = {"type": "torch.Tensor", "dtype": str(values.dtype), "shape": list(values.shape)}
    if values.numel() and values.is_floating_point():
        leaf |= {"Max": values.max().item(), "Min": values.min().item()}
        leaf |= {"Mean": values.mean().item(), "Norm": values.norm().item()}
    elif values.numel():
        leaf |= {"Max": values.max().item(), "Min": values.min().item(), "Mean": None, "Norm": None}
    else:
        leaf |= dict.fromkeys(("Max", "Min", "Mean", "Norm"))
    leaf |= {"requires_grad": grad} | figures
    return leaf | ({"data_name": file} if file else {})


def write_process(
    folder: Path,
    data: dict,
    *,
    construct: dict | None = None,
    stack: dict | None = None,
    files: dict[str, torch.Tensor] | None = None,
    main: str = "dump.json",
) -> Path:
    folder.mkdir(parents=True)
    told = {"task": "tensor" if files else "statistics", "level": "mix", "framework": "pytorch"}
    told |= {"dump_data_dir": "/elsewhere/dump_tensor_data" if files else None, "data": data}
    (folder / main).write_text(json.dumps(told, indent=1))
    if construct is not None:
        (folder / "construct.json").write_text(json.dumps(construct, indent=1))
    if stack is not None:
        (folder / "stack.json").write_text(json.dumps(stack, indent=1))
    for name, values in (files or {}).items():
        (folder / "dump_tensor_data").mkdir(exist_ok=True)
        torch.save(values, folder / "dump_tensor_data" / name)
    return folder


def linear_program(folder: Path) -> dict[str, torch.Tensor]:
    """One linear layer inside a block, forward and backward, with its tensors in files."""
    torch.manual_seed(3)
    kept = {
        "x": torch.randn(2, 4),
        "weight": torch.randn(3, 4),
        "y": torch.randn(2, 3),
        "gy": torch.randn(2, 3),
        "gx": torch.randn(2, 4),
        "gw": torch.randn(3, 4),
    }
    files: dict[str, torch.Tensor] = {}

    def at(key: str, name: str, *, grad: bool = False) -> dict:
        files[f"{name}.pt"] = kept[key]
        return tensor(kept[key], grad=grad, file=f"{name}.pt")

    function, layer, block = "Functional.linear.0", "Module.a.lin.Linear", "Module.a.Block"
    data = {
        f"{function}.forward": {
            "input_args": [
                at("x", f"{function}.forward.input.0", grad=True),
                at("weight", f"{function}.forward.input.1", grad=True),
                None,
            ],
            "input_kwargs": {},
            "output": [at("y", f"{function}.forward.output.0", grad=True)],
        },
        f"{layer}.forward.0": {
            "input_args": [at("x", f"{layer}.forward.0.input.0", grad=True)],
            "input_kwargs": {"scale": scalar("float", 2.0)},
            "output": [at("y", f"{layer}.forward.0.output.0", grad=True)],
            "parameters": {"weight": at("weight", f"{layer}.forward.0.parameters.weight")},
        },
        f"{block}.forward.0": {
            "input_args": [scalar("int", 7), at("x", f"{block}.forward.0.input.1", grad=True)],
            "input_kwargs": {},
            "output": [{"logits": at("y", f"{block}.forward.0.output.0.logits", grad=True)}],
        },
        f"{function}.backward": {
            "input": [at("gy", f"{function}.backward.input.0")],
            "output": [None, at("gx", f"{function}.backward.output.1")],
        },
        f"{layer}.parameters_grad.4": {"weight": [at("gw", f"{layer}.parameters_grad.4.weight")]},
        f"{layer}.backward.0": {
            "input": [at("gy", f"{layer}.backward.0.input.0")],
            "output": [at("gx", f"{layer}.backward.0.output.0")],
        },
        f"{block}.backward.0": {
            "input": [at("gy", f"{block}.backward.0.input.0")],
            "output": [at("gx", f"{block}.backward.0.output.0")],
        },
    }
    construct = {
        f"{function}.forward": f"{layer}.forward.0",
        f"{block}.forward.0": None,
        f"{layer}.forward.0": f"{block}.forward.0",
        # It is the backward call of another layer that was at work last.
        f"{function}.backward": "Module.z.ReLU.backward.0",
        f"{layer}.backward.0": f"{block}.backward.0",
        f"{block}.backward.0": None,
    }
    stack = {"0": [[f"{function}.forward", f"{layer}.forward.0"], FRAMES]}
    write_process(folder, data, construct=construct, stack=stack, files=files)
    return kept

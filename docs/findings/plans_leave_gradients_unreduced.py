"""Tensor-parallel plans of Apertus and Qwen3-VL-MoE do not reduce gradients (transformers 5.22)."""

import copy
import sys
import tempfile

import torch
import transformers
from torch import distributed, multiprocessing
from torch.distributed.device_mesh import init_device_mesh
from transformers.distributed.tensor_parallel import apply_tensor_parallelism

SIZES = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "vocab_size": 64}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
FOUND = {"Apertus": "mlp.act_fn.alpha_p", "Qwen3VLMoeText": "self_attn.q_norm.weight"}
SIZES |= {"moe_intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 2}


def main(rank, store):
    distributed.init_process_group("gloo", f"file://{store}", rank=rank, world_size=2)
    torch.manual_seed(0)
    wrong = False
    for name, part in FOUND.items():
        config = getattr(transformers, f"{name}Config")(**SIZES)
        whole = getattr(transformers, f"{name}Model")(config)
        split = apply_tensor_parallelism(copy.deepcopy(whole), init_device_mesh("cpu", (2,)))
        for model in (whole, split):
            model(input_ids=torch.arange(12).view(2, 6)).last_hidden_state.square().sum().backward()
        right, found = (m.get_parameter(f"layers.0.{part}").grad.float() for m in (whole, split))
        off = ((found - right).norm() / right.norm()).item()
        wrong |= off > 1e-2
        print(f"rank {rank}: the gradient of {name} {part} is off by {off:.2f}")
    sys.exit(wrong)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        context = multiprocessing.spawn(main, (f"{folder}/store",), 2, join=False)
        sys.exit(any(process.join() or process.exitcode for process in context.processes))

"""Tensor-parallel plans of Llama 4, Doge and Granite SWA raise in training (transformers 5.22)."""

import sys
import tempfile

import torch
import transformers
from torch import distributed, multiprocessing
from torch.distributed.device_mesh import init_device_mesh
from transformers.distributed.tensor_parallel import apply_tensor_parallelism

SIZES = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "vocab_size": 64}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
SIZES |= {"intermediate_size_mlp": 32, "num_local_experts": 2, "pad_token_id": 0}


def main(rank, store):
    distributed.init_process_group("gloo", f"file://{store}", rank=rank, world_size=2)
    failed = False
    for name, config in (("Llama4", "Llama4Text"), ("Doge", "Doge"), ("GraniteSWA", "GraniteSWA")):
        model = getattr(transformers, f"{name}ForCausalLM")
        model = model(getattr(transformers, f"{config}Config")(**SIZES))
        tokens = torch.arange(12).view(2, 6)
        model(input_ids=tokens).logits.sum().backward()  # on one device it trains
        apply_tensor_parallelism(model, init_device_mesh("cpu", (2,)))
        model.tie_weights()
        try:
            model(input_ids=tokens).logits.sum().backward()
        except RuntimeError as error:
            failed = True
            print(f"rank {rank}: {name}: {error!s:.90}")
    sys.exit(failed)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        context = multiprocessing.spawn(main, (f"{folder}/store",), 2, join=False)
        sys.exit(any(process.join() or process.exitcode for process in context.processes))

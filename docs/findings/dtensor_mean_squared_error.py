"""DTensor: the gradient of mse_loss of sharded tensors is twice too large (torch 2.13.0)."""

import sys
import tempfile

import torch
from torch import distributed, multiprocessing
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn import functional as F


def main(rank, store):
    distributed.init_process_group("gloo", f"file://{store}", rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    torch.manual_seed(0)
    x, target = torch.randn(4, 3, requires_grad=True), torch.randn(4, 3)
    whole = F.mse_loss(x, target)
    whole.backward()
    split = distribute_tensor(x.detach(), mesh, [Shard(0)]).requires_grad_()
    loss = F.mse_loss(split, distribute_tensor(target, mesh, [Shard(0)]))
    loss.backward()
    value, gradient = loss.full_tensor().item(), split.grad.full_tensor()
    ratio = (gradient / x.grad).mean().item()
    if rank == 0:
        print(f"loss {value:.6f}, whole {whole.item():.6f}")
        print(f"gradient: {ratio:.3f} times what it should be")
    distributed.destroy_process_group()
    sys.exit(abs(ratio - 1) > 1e-3)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        context = multiprocessing.spawn(main, (f"{folder}/store",), 2, join=False)
        for process in context.processes:
            process.join()
    sys.exit(any(process.exitcode for process in context.processes))

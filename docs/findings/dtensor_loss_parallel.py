"""DTensor: under loss_parallel() log_softmax has no derivative of its own (torch 2.13.0)."""

import sys
import tempfile

import torch
from torch import distributed, multiprocessing
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.parallel import loss_parallel


def main(rank, store):
    distributed.init_process_group("gloo", f"file://{store}", rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    torch.manual_seed(0)
    x, factor = torch.randn(2, 4, requires_grad=True), torch.randn(2, 4)
    (x.log_softmax(1) * factor).sum().backward()
    split = distribute_tensor(x.detach(), mesh, [Shard(1)]).requires_grad_()
    with loss_parallel():
        y = split.log_softmax(1)
        (y * distribute_tensor(factor, mesh, [Shard(1)])).sum().backward()
    gradient = split.grad.full_tensor()
    value = torch.allclose(y.full_tensor(), x.log_softmax(1), atol=1e-5)
    wrong = not torch.allclose(gradient, x.grad, atol=1e-4)
    if rank == 0:
        print(f"value right: {value}; gradient off by {(gradient - x.grad).abs().max().item():.3g}")
        print(f"the gradient is what came in: {torch.equal(gradient, factor)}")
    distributed.destroy_process_group()
    sys.exit(wrong)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        context = multiprocessing.spawn(main, (f"{folder}/store",), 2, join=False)
        for process in context.processes:
            process.join()
    sys.exit(any(process.exitcode for process in context.processes))

"""References for the corpus of kernels, each with its inputs: `name` and `name_inputs`."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def _randn(*shape: int) -> Tensor:
    return torch.randn(*shape)


def add(a: Tensor, b: Tensor) -> Tensor:
    return a + b


def add_inputs() -> list[Tensor]:
    return [_randn(6, 17), _randn(6, 17)]


def integer_add(a: Tensor, b: Tensor) -> Tensor:
    return a + b


def integer_add_inputs() -> list[Tensor]:
    return [torch.randint(0, 90, (6, 20)), torch.randint(0, 90, (6, 20))]


def relu(x: Tensor) -> Tensor:
    return torch.relu(x)


def relu_inputs() -> list[Tensor]:
    return [torch.rand(4, 37)]


def pair(x: Tensor) -> tuple[Tensor, Tensor]:
    return torch.relu(x), torch.relu(x)


def pair_inputs() -> list[Tensor]:
    return [_randn(5, 21)]


def gelu(x: Tensor) -> Tensor:
    return F.gelu(x)


def gelu_inputs() -> list[Tensor]:
    return [_randn(5, 33)]


def sigmoid(x: Tensor) -> Tensor:
    return torch.sigmoid(x)


def sigmoid_inputs() -> list[Tensor]:
    return [_randn(5, 29)]


def softmax(x: Tensor) -> Tensor:
    return torch.softmax(x, -1)


def softmax_inputs() -> list[Tensor]:
    return [_randn(6, 33)]


def log_softmax(x: Tensor) -> Tensor:
    return torch.log_softmax(x, -1)


def log_softmax_inputs() -> list[Tensor]:
    return [_randn(6, 32)]


def layer_norm(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.layer_norm(x, (x.shape[-1],), w, b)


def layer_norm_inputs() -> list[Tensor]:
    return [_randn(5, 24), _randn(24), _randn(24)]


def rms_norm(x: Tensor, w: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * w


def rms_norm_inputs() -> list[Tensor]:
    return [_randn(7, 40), _randn(40)]


def group_norm(x: Tensor) -> Tensor:
    return F.group_norm(x, 2)


def group_norm_inputs() -> list[Tensor]:
    return [_randn(3, 4, 7)]


def matmul(a: Tensor, b: Tensor) -> Tensor:
    return a @ b


def matmul_inputs() -> list[Tensor]:
    return [_randn(20, 48), _randn(48, 12)]


def bmm(a: Tensor, b: Tensor) -> Tensor:
    return torch.bmm(a, b)


def bmm_inputs() -> list[Tensor]:
    return [_randn(3, 5, 16), _randn(3, 16, 6)]


def triu_matmul(a: Tensor, b: Tensor) -> Tensor:
    return torch.triu(a @ b)


def triu_matmul_inputs() -> list[Tensor]:
    return [torch.triu(_randn(18, 18)), torch.triu(_randn(18, 18))]


def max_pool(x: Tensor) -> Tensor:
    return F.max_pool2d(x, 2)


def max_pool_inputs() -> list[Tensor]:
    return [_randn(2, 3, 8, 8)]


def avg_pool(x: Tensor) -> Tensor:
    return F.avg_pool1d(x, 3, stride=1, padding=1)


def avg_pool_inputs() -> list[Tensor]:
    return [_randn(2, 3, 19)]


def cumsum(x: Tensor) -> Tensor:
    return torch.cumsum(x, -1)


def cumsum_inputs() -> list[Tensor]:
    return [_randn(4, 50)]


def total(x: Tensor) -> Tensor:
    return x.sum(-1)


def total_inputs() -> list[Tensor]:
    return [_randn(9, 64)]


def mean(x: Tensor) -> Tensor:
    return x.mean(0)


def mean_inputs() -> list[Tensor]:
    return [_randn(32, 11)]


def variance(x: Tensor) -> Tensor:
    return x.var(-1)


def variance_inputs() -> list[Tensor]:
    return [_randn(8, 48)]


def argmax(x: Tensor) -> Tensor:
    return x.argmax(-1)


def argmax_inputs() -> list[Tensor]:
    return [_randn(7, 21)]


def topk(x: Tensor) -> tuple[Tensor, Tensor]:
    values, indices = x.topk(3, -1)
    return values, indices


def topk_inputs() -> list[Tensor]:
    return [_randn(5, 26)]


def sort(x: Tensor) -> Tensor:
    return x.sort(-1).values


def sort_inputs() -> list[Tensor]:
    return [_randn(4, 30)]


def embedding(indices: Tensor, weight: Tensor) -> Tensor:
    return F.embedding(indices, weight)


def embedding_inputs() -> list[Tensor]:
    return [torch.randint(0, 40, (4, 9)), _randn(40, 8)]


def gather(x: Tensor, indices: Tensor) -> Tensor:
    return x.gather(1, indices)


def gather_inputs() -> list[Tensor]:
    return [_randn(5, 12), torch.randint(0, 12, (5, 6))]


def masked_fill(x: Tensor, mask: Tensor) -> Tensor:
    return x.masked_fill(mask, -1.5)


def masked_fill_inputs() -> list[Tensor]:
    return [_randn(6, 14), torch.rand(6, 14) > 0.5]


def cross_entropy(x: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(x, target)


def cross_entropy_inputs() -> list[Tensor]:
    return [_randn(12, 10), torch.randint(0, 10, (12,))]


def mse(a: Tensor, b: Tensor) -> Tensor:
    return F.mse_loss(a, b)


def mse_inputs() -> list[Tensor]:
    return [_randn(8, 15), _randn(8, 15)]


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def attention_inputs() -> list[Tensor]:
    return [_randn(1, 2, 9, 8), _randn(1, 2, 9, 8), _randn(1, 2, 9, 8)]


def transpose(x: Tensor) -> Tensor:
    return x.mT.contiguous()


def transpose_inputs() -> list[Tensor]:
    return [_randn(13, 22)]


def clamp(x: Tensor) -> Tensor:
    return x.clamp(-0.5, 0.75)


def clamp_inputs() -> list[Tensor]:
    return [_randn(4, 31)]


def index_add(x: Tensor, indices: Tensor, values: Tensor) -> Tensor:
    return x.index_add(0, indices, values)


def index_add_inputs() -> list[Tensor]:
    return [_randn(10, 6), torch.randint(0, 10, (14,)), _randn(14, 6)]


def lerp(a: Tensor, b: Tensor, weight: float) -> Tensor:
    return a + weight * (b - a)


def lerp_inputs() -> list[object]:
    return [_randn(5, 18), _randn(5, 18), 0.3]


class Linear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(14, 9)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x)


def Linear_inputs() -> list[Tensor]:  # noqa: N802
    return [_randn(6, 14)]


class ConvNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(4)
        with torch.no_grad():
            self.norm.running_mean.normal_()
            self.norm.running_var.uniform_(0.5, 2.0)
        self.eval()

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.norm(self.conv(x)))


def ConvNorm_inputs() -> list[Tensor]:  # noqa: N802
    return [_randn(2, 3, 6, 6)]


class Norm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(10)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x)


def Norm_inputs() -> list[Tensor]:  # noqa: N802
    return [_randn(12, 10)]


# --- Tasks that show nothing ----------------------------------------------------------------------


def centred_single(x: Tensor) -> Tensor:
    return x.mean(-1, keepdim=True) - x.mean(-1, keepdim=True).mean(-1, keepdim=True)


def centred_single_inputs() -> list[Tensor]:
    return [_randn(8, 5)]


def softmax_of_one(x: Tensor) -> Tensor:
    return torch.softmax(x.sum(-1, keepdim=True), -1)


def softmax_of_one_inputs() -> list[Tensor]:
    return [_randn(8, 5)]


def saturated(x: Tensor) -> Tensor:
    return torch.sigmoid(x.abs() + 200)


def saturated_inputs() -> list[Tensor]:
    return [_randn(8, 5)]

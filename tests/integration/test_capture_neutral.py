"""Recording changes nothing: results, gradients and random draws are bit for bit the same."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn.modules import module as module_hooks

from integration.captures import Dumped, one_thread, tokens, transformer
from paritas.core.numerics.contents import leaves
from paritas.core.torch_private import watching
from paritas.recording.capture import capture


class Convolutional(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(4)
        self.act = nn.ReLU(inplace=True)
        self.pool = nn.MaxPool2d(2)
        self.head = nn.Linear(4, 2)

    def forward(self, x):
        x = self.pool(self.act(self.norm(self.conv(x))))
        x[:, 0].mul_(2)  # a view of what came, written to
        return self.head(x.mean((2, 3)))


class Fanned(nn.Module):
    """One value is used often, so its gradient is a sum whose order must stay."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.branches = nn.ModuleList(nn.Linear(6, 6) for _ in range(5))

    def forward(self, x):
        h = self.first(x)
        parts = h.split(2, dim=-1)
        return sum(branch(h) for branch in self.branches) + torch.cat(parts[::-1], -1).tanh()


def lstm():
    return nn.LSTM(3, 4, num_layers=2, dropout=0.5), torch.ones(5, 2, 3)


def encoder():
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.2, batch_first=True)
    return nn.TransformerEncoder(layer, 2), torch.rand(2, 5, 8)


PROGRAMS = {
    "transformer": lambda: (transformer(dropout=0.3, tied=True), tokens()),
    "convolution": lambda: (Convolutional(), torch.rand(2, 3, 8, 8)),
    "fanned": lambda: (Fanned(), torch.rand(7, 6)),
    "lstm": lstm,
    "encoder": encoder,
    "embedding bag": lambda: (nn.EmbeddingBag(11, 4, mode="max"), tokens()),
    "attention": lambda: (nn.MultiheadAttention(8, 2, dropout=0.1), torch.rand(3, 2, 8)),
}


def run(model, x, mode):
    torch.manual_seed(1)
    args = (x, x, x) if isinstance(model, nn.MultiheadAttention) else (x,)
    with mode():
        result = model(*args)
        tensors = [leaf for _, leaf in leaves(result) if isinstance(leaf, torch.Tensor)]
    if tensors[0].requires_grad:
        sum(t.square().sum() for t in tensors if t.is_floating_point()).backward()
    gradients = [p.grad for p in model.parameters()]
    return [*tensors, *gradients, *model.buffers(), torch.get_rng_state()]


@pytest.mark.one_in(3)
@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("level", ["module", "both"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_computes_the_same_bits_while_recorded(tmp_path, name, level, mode):
    torch.manual_seed(0)
    model, x = PROGRAMS[name]()
    twin = copy.deepcopy(model)
    with one_thread():
        expected = run(model, x.clone(), mode)
        with capture(tmp_path / "d", level=level):
            found = run(twin, x.clone(), mode)
    for mine, theirs in zip(expected, found, strict=True):
        assert (mine is None) == (theirs is None)
        if mine is not None:
            assert mine.dtype == theirs.dtype
            assert mine.stride() == theirs.stride()
            assert torch.equal(mine, theirs)


@pytest.mark.parametrize("level", ["module", "op", "both"])
def test_recording_leaves_no_trace(tmp_path, level):
    plain, depth = nn.Module.__call__, watching.mode_depth()
    model = transformer()
    with capture(tmp_path / "d", level=level):
        model(tokens())["logits"].sum().backward()
    assert nn.Module.__call__ is plain
    assert watching.mode_depth() == depth
    assert not module_hooks._global_forward_hooks
    assert not module_hooks._global_forward_pre_hooks
    for parameter in model.parameters():
        assert not parameter._backward_hooks
        assert not parameter._post_accumulate_grad_hooks
    for module in model.modules():
        assert not module._forward_hooks
        assert not module._forward_pre_hooks


def test_recording_leaves_no_trace_of_a_program_that_failed(tmp_path):
    plain, depth = nn.Module.__call__, watching.mode_depth()
    model = transformer()
    with pytest.raises(RuntimeError), capture(tmp_path / "d", level="both"):
        model(torch.ones(2, 2))
    assert nn.Module.__call__ is plain
    assert watching.mode_depth() == depth
    assert not any(p._post_accumulate_grad_hooks for p in model.parameters())


def test_a_recorded_tensor_is_not_kept_alive(tmp_path):
    import gc
    import weakref

    model = nn.Sequential(nn.Linear(2, 2), nn.Tanh())
    with capture(tmp_path / "d"):
        y = model(torch.ones(2))
        y.sum().backward()
        gone, gone_model = weakref.ref(y), weakref.ref(model)
        del y, model
        gc.collect()
        assert gone() is None
        assert gone_model() is None
        nn.Identity()(torch.ones(1))
    assert len(Dumped(tmp_path / "d").records) > 5

"""verify(by="blocks"): faults in blocks and between them, and models that are hard to cut."""

from __future__ import annotations

import copy
import functools

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import paritas
from paritas import VerifyConfig
from paritas.core.errors import UsageError
from paritas.core.execution import fitting
from paritas.core.results.findings import Status
from spying import Spy

QUIET = VerifyConfig(raise_on_mismatch=False)
# For faults that outputs show: it takes half of the time.
FORWARD = VerifyConfig(raise_on_mismatch=False, verify_gradients=False)
TOKENS = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6], [2, 7, 1, 8, 2, 8, 1, 8]])


class Norm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(width) + 0.5)
        self.eps = 1e-5

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps) * self.weight


class Experts(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.route = nn.Linear(width, 2)
        self.experts = nn.ModuleList(nn.Linear(width, width) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shares = self.route(x).softmax(-1)
        return sum(shares[..., i : i + 1] * one(x) for i, one in enumerate(self.experts))


class Layer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = Norm(width)
        self.q, self.k, self.v = (nn.Linear(width, width, bias=False) for _ in range(3))
        self.experts = Experts(width)
        self.register_buffer("scale", torch.ones(1))

    def forward(self, x, mask=None, rope=None):
        y = self.norm(x)
        q, k = rotated(self.q(y), *rope), rotated(self.k(y), *rope)
        weights = (q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5 + mask).softmax(-1)
        x = x + self.scale * (weights @ self.v(y))
        return x + functional.gelu(self.experts(x))


def rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    one, two = x.chunk(2, -1)
    return torch.cat([one * cos - two * sin, two * cos + one * sin], -1)


class Model(nn.Module):
    order = (0, 1, 2)
    diagonal = 1

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, width)
        self.layers = nn.ModuleList(Layer(width) for _ in range(3))
        self.norm = Norm(width)
        self.head = nn.Linear(width, 10, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        length = tokens.shape[1]
        mask = torch.full((length, length), -torch.inf, dtype=x.dtype).triu(self.diagonal)
        angles = torch.arange(length)[:, None] / 10 ** torch.arange(0, 1, 2 / x.shape[-1])
        rope = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        for number in self.order:
            x = self.join(x, self.layers[number](x, mask=mask, rope=rope))
        return self.head(self.norm(x))

    def join(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x + y / 2


@functools.cache
def model() -> Model:
    torch.manual_seed(0)
    return Model()


def candidate(**overridden) -> Model:
    made = copy.deepcopy(model())
    made.__class__ = type("Candidate", (Model,), overridden)
    return made


def by_blocks(reference, other, inputs=(TOKENS,), config=QUIET, **options):
    return paritas.verify(list(inputs), reference, other, config, **{"by": "blocks", **options})


def failing(verdict) -> set[str]:
    return {finding.item.graph for finding in verdict.failures}


def spoil_norm(made):
    made.layers[1].norm.eps = 2e-5


def spoil_expert(made):
    made.layers[1].experts.experts[0].weight.data = made.layers[1].experts.experts[1].weight.data


def spoil_buffer(made):
    made.layers[1].scale.fill_(1.001)


def spoil_rope(made):
    layer = made.layers[1]
    layer.forward = lambda x, mask, rope: type(layer).forward(layer, x, mask, rope[::-1])


def spoil_residual(made):
    layer = made.layers[1]
    layer.forward = lambda x, mask, rope: type(layer).forward(layer, x, mask, rope) - x


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    "spoil", [spoil_norm, spoil_expert, spoil_buffer, spoil_rope, spoil_residual]
)
def test_a_fault_in_one_block_is_found_in_that_block(spoil, undiagnosed):
    made = candidate()
    spoil(made)
    verdict = by_blocks(model(), made, config=FORWARD)
    assert verdict.status is Status.DIFFERENT
    assert failing(verdict) - {""} == {"layers.1"}


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    "overridden",
    [
        {"order": (0, 2, 1)},
        {"diagonal": 2},
        {"join": lambda _, x, y: y / 2},
        {"join": lambda _, x, y: x + y / 2 * 1.0001},
        {"order": (0, 1)},
        {"order": (0, 1, 2, 2)},
    ],
    ids=["layer order", "mask", "residual", "scale", "layer dropped", "layer repeated"],
)
def test_a_fault_between_blocks_is_found_between_them(overridden, undiagnosed):
    verdict = by_blocks(model(), candidate(**overridden), config=FORWARD)
    assert verdict.status is Status.DIFFERENT
    assert "between blocks" in failing(verdict)
    assert not any(name.startswith("layers.") for name in failing(verdict))


def test_a_weight_that_blocks_no_longer_share_is_found_in_the_whole(undiagnosed):
    shared = copy.deepcopy(model())
    shared.layers[2].q.weight = shared.layers[0].q.weight
    made = copy.deepcopy(shared)
    assert by_blocks(shared, made).status is Status.IDENTICAL
    made.layers[2].q.weight = nn.Parameter(made.layers[0].q.weight.detach().clone())
    verdict = by_blocks(shared, made)
    assert verdict.status is Status.DIFFERENT
    assert failing(verdict) == {""}


def test_benign_rewrites_in_blocks_and_between_them_pass():
    def join(_, x, y):
        return torch.add(x.clone(), y, alpha=0.5)

    def forward(self, x):
        wide = x.double()
        scaled = wide / (wide.square().mean(-1, keepdim=True) + self.eps).sqrt()
        return (scaled * self.weight).to(x.dtype)

    made = candidate(join=join)
    for one in made.layers:
        one.norm.__class__ = type("OtherNorm", (Norm,), {"forward": forward})
    verdict = by_blocks(model(), made)
    assert verdict.status is Status.EQUIVALENT
    assert verdict.notes[0] == (
        "checked by blocks: 3 blocks (layers.0, layers.1, layers.2), what lies between them, and "
        "the whole model natively"
    )


def test_every_parameter_and_every_input_of_a_block_is_compared():
    verdict = by_blocks(model(), copy.deepcopy(model()))
    compared = {finding.item.text for finding in verdict.findings}
    for name, _ in model().named_parameters():
        block, _, inner = name.partition(".")[2].partition(".")
        alone = f"layers.{block}: gradient of {inner}"
        between = f"between blocks: gradient of {name}"
        assert (alone if name.startswith("layers.") else between) in compared
        assert f"gradient of {name}" in compared
    assert "layers.0: gradient of input[0]" in compared
    assert "between blocks: gradient of result of layers.2" in compared


def test_the_blocks_of_a_compiled_model_are_compiled_once():
    spy = Spy()

    def backend(graph, example_inputs):
        spy.note("compiled")
        return graph.forward

    made = torch.compile(copy.deepcopy(model()), backend=backend)
    verdict = by_blocks(model(), made)
    assert verdict.status is Status.IDENTICAL
    assert any("cannot be entered" in note for note in verdict.notes)
    assert len(spy.notes()) == 3  # the whole, one for all layers, what lies between them
    assert by_blocks(model(), made).passed
    assert len(spy.notes()) == 3


def test_a_stack_of_blocks_can_still_be_compiled_as_a_whole_afterwards():
    # Between its blocks there is nothing to compile, which Dynamo would remember of its code.
    graphs = []

    def other_backend(graph, example_inputs):
        graphs.append(graph)
        return graph.forward

    class Stack(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(2))

        def forward(self, x):
            for layer in self.layers:
                x = layer(x)
            return x

    x = torch.randn(2, 8)
    stack = Stack()
    made = torch.compile(copy.deepcopy(stack), backend="eager")
    assert by_blocks(stack, made, [x]).passed
    torch.compile(Stack(), backend=other_backend)(x)
    assert len(graphs) == 1, "not one for each layer"


def test_a_backend_that_spoils_one_operator_is_found_in_each_block(undiagnosed):
    def backend(graph, example_inputs):
        for node in graph.graph.nodes:
            if node.target is torch.nn.functional.gelu:
                node.target = torch.nn.functional.silu
        graph.recompile()
        return graph.forward

    made = torch.compile(copy.deepcopy(model()), backend=backend)
    verdict = by_blocks(model(), made, config=FORWARD)
    assert {"layers.0", "layers.1", "layers.2", ""} == failing(verdict)


class Dropped(Layer):
    def forward(self, x, mask=None, rope=None):
        return functional.dropout(super().forward(x, mask, rope), 0.2, self.training)


def test_dropout_inside_of_blocks_and_after_them(undiagnosed):
    made = candidate(join=lambda _, x, y: functional.dropout(x + y, 0.1))
    for one in made.layers:
        one.__class__ = Dropped
    assert by_blocks(made, copy.deepcopy(made)).status is Status.IDENTICAL
    other = copy.deepcopy(made)
    other.layers[2].norm.eps = 1e-3
    assert failing(by_blocks(made, other, config=FORWARD)) == {"layers.2", ""}


class Convolved(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.relu(self.norm(self.conv(x)))


class Recurring(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stages = nn.Sequential(Convolved(), Convolved())
        self.last = Convolved()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.last(self.stages(x)))


def test_buffers_of_blocks_that_are_called_twice(undiagnosed):
    torch.manual_seed(0)
    net, x = Recurring(), torch.randn(2, 4, 6, 6)
    options = {"inputs": [x], "blocks": ["stages.*", "last"]}
    verdict = by_blocks(net, copy.deepcopy(net), **options)
    assert verdict.status is Status.IDENTICAL
    assert "last (call 2)" in {finding.item.graph for finding in verdict.findings}
    wrong = copy.deepcopy(net)
    wrong.stages[1].norm.momentum = 0.2
    assert failing(by_blocks(net, wrong, **options)) == {"stages.1", ""}


class Biased(nn.Module):
    """Adds a bias that the first block computes, uses itself and hands on."""

    def __init__(self, *, has_bias: bool) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.bias = nn.Embedding(3, 4) if has_bias else None

    def forward(self, x, bias=None):
        bias = self.bias.weight if bias is None else bias
        bias = bias * 2 if self.bias is not None else bias
        return x + (self.inner(x) + bias).softmax(-1), bias


class HandsOnBias(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Biased(has_bias=number == 0) for number in range(3))

    def forward(self, x):
        bias = None
        for layer in self.layers:
            x, bias = layer(x, bias)
        return x


def test_gradients_of_a_value_that_a_block_both_uses_and_hands_on(undiagnosed):
    torch.manual_seed(0)
    net, x = HandsOnBias(), torch.randn(3, 4)
    assert by_blocks(net, copy.deepcopy(net), [x]).status is Status.IDENTICAL
    wrong = copy.deepcopy(net)
    with torch.no_grad():
        wrong.layers[0].bias.weight.mul_(1.01)
    assert failing(by_blocks(net, wrong, [x])) == {"layers.0", ""}


class Crossed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.own, self.other = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x, memory, *, scale):
        return x + torch.tanh(self.own(x) * self.other(memory)) * scale[0]


class SharesMemory(nn.Module):
    """Gives all of its layers what it computes between them."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.scale = nn.Parameter(torch.rand(4)), nn.Parameter(torch.rand(4))
        self.layers = nn.ModuleList(Crossed() for _ in range(3))

    def remember(self, x):
        return (x * self.weight).tanh()

    def forward(self, x):
        memory, scale = self.remember(x), (self.scale.exp(),)
        for layer in self.layers:
            x = layer(x, memory, scale=scale)
        return x


def test_gradients_of_what_several_blocks_get(undiagnosed):
    torch.manual_seed(0)
    net, x = SharesMemory(), torch.randn(3, 4)
    assert by_blocks(net, copy.deepcopy(net), [x]).status is Status.IDENTICAL
    wrong = copy.deepcopy(net)
    wrong.__class__ = type("Wrong", (SharesMemory,), {"remember": remember_detached})
    verdict = by_blocks(net, wrong, [x])
    assert failing(verdict) == {"between blocks", ""}


def remember_detached(net, x):
    return (x * net.weight.detach()).tanh()


class Shifted(nn.Module):
    """Adds its shift row by row, so that the gradient of the shift is a long sum in bfloat16."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(2))
        self.shift, self.head = nn.Parameter(torch.zeros(8)), nn.Linear(8, 8)

    def move(self, x):
        return torch.cat([row + self.shift for row in x.split(1)])

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.head(self.move(x))


def test_a_gradient_that_is_summed_more_accurately_between_blocks(undiagnosed):
    torch.manual_seed(0)
    net, x = Shifted().bfloat16(), torch.randn(512, 8).bfloat16()
    better, wrong = copy.deepcopy(net), copy.deepcopy(net)
    better.__class__ = type("Better", (Shifted,), {"move": lambda net, x: x + net.shift})
    assert by_blocks(net, better, [x]).status is Status.EQUIVALENT
    wrong.__class__ = type("Wrong", (Shifted,), {"move": lambda net, x: x + net.shift.detach()})
    assert failing(by_blocks(net, wrong, [x])) == {"between blocks", ""}


class Caching(nn.Module):
    def __init__(self, writes: bool) -> None:
        super().__init__()
        self.inner, self.writes = nn.Linear(4, 4), writes

    def forward(self, x, cache):
        if self.writes:
            cache.append(self.inner(x))
        return x + self.inner(x)


class Cached(nn.Module):
    def __init__(self, *writes: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Caching(one) for one in writes)

    def forward(self, x):
        cache = []
        for one in self.layers:
            x = one(x, cache)
        return x, cache


def test_a_block_that_writes_to_its_arguments_is_checked_with_the_rest():
    net, x = Cached(False, True, False), torch.randn(2, 4)
    verdict = by_blocks(net, copy.deepcopy(net), [x])
    assert verdict.status is Status.IDENTICAL
    assert (
        "1 module checked with what lies between the blocks: layers.1: it writes to its argument "
        "input[1][0]"
    ) in verdict.notes
    net = Cached(True, True)
    verdict = by_blocks(net, copy.deepcopy(net), [x])
    assert verdict.status is Status.UNVERIFIED
    assert "the model cannot be cut at its blocks" in str(verdict)


class Wrapped(nn.Module):
    def __init__(self, *, keeps: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.GELU()) for _ in range(2))
        self.keeps = keeps

    def forward(self, x):
        with torch.autocast("cpu", torch.bfloat16):
            for one in self.layers:
                x = checkpoint(one, x, use_reentrant=False) if self.keeps else one(x)
                x += 0.5
        return functional.linear(x.float(), self.layers[0][0].weight)


@pytest.mark.parametrize("keeps", [False, True])
def test_autocast_checkpointing_writes_and_reads_of_a_block_between_blocks(keeps):
    net = Wrapped(keeps=keeps)
    verdict = by_blocks(net, copy.deepcopy(net), [torch.randn(3, 4, requires_grad=True)])
    assert verdict.status is Status.IDENTICAL
    assert any("layers.0: the model reads" in note for note in verdict.notes)


def test_a_parameter_that_a_call_changes_is_reported():
    class Normalized(Layer):
        def forward(self, x, mask=None, rope=None):
            with torch.no_grad():
                self.q.weight.mul_(1.5)
            return super().forward(x, mask, rope)

    made = copy.deepcopy(model())
    made.layers[0].__class__ = Normalized
    verdict = by_blocks(made, copy.deepcopy(made))
    assert not verdict.passed
    assert "a call changes this parameter" in str(verdict)


def test_a_block_that_is_wrong_from_its_second_call_on_is_found(undiagnosed):
    # What a call leaves behind, a generator's state, is nothing that a check can put back.
    def calls():
        yield 1.0
        while True:
            yield 1.001

    made = candidate()
    layer, scales = made.layers[1], calls()
    layer.forward = lambda *args, **given: Layer.forward(layer, *args, **given) * next(scales)
    verdict = by_blocks(model(), made, config=FORWARD)
    assert verdict.status is Status.DIFFERENT
    assert "layers.1" in failing(verdict)


def test_a_reference_that_does_not_repeat_its_results_is_unverified(undiagnosed):
    made = copy.deepcopy(model())
    # The first two calls are inside of the model, and alone.
    layer, scales = made.layers[1], iter([1.0, 1.0, *[2.0] * 100])
    layer.forward = lambda *args, **given: Layer.forward(layer, *args, **given) * next(scales)
    verdict = by_blocks(made, copy.deepcopy(model()), config=FORWARD)
    assert verdict.status is Status.UNVERIFIED
    assert "when run once more at the end" in str(verdict)


def test_models_without_blocks_and_with_other_blocks_are_refused():
    with pytest.raises(UsageError, match="found no repeated modules"):
        by_blocks(nn.Linear(2, 2), nn.Linear(2, 2), [torch.ones(1, 2)])
    fewer = copy.deepcopy(model())
    del fewer.layers[2]
    with pytest.raises(UsageError, match=r"the candidate has no module layers\.2"):
        by_blocks(model(), fewer)
    with pytest.raises(UsageError, match="cannot be combined"):
        by_blocks(model(), model(), by="whole", blocks=["layers.*"])


# --- Memory ---------------------------------------------------------------------------------------


def test_the_blocks_are_checked_where_the_whole_does_not_fit(monkeypatch):
    monkeypatch.setattr(fitting, "free_bytes", lambda _: 1 << 16)
    verdict = paritas.verify([TOKENS], model(), copy.deepcopy(model()), QUIET)
    assert verdict.status is Status.IDENTICAL
    assert verdict.notes[0].startswith(
        "checked by blocks because of memory: the whole model needs about "
    )
    # Without blocks, an estimate is no reason to refuse.
    flat = nn.Linear(100, 100)
    assert paritas.verify([torch.ones(1, 100)], flat, copy.deepcopy(flat), QUIET).passed


def exhausted(x):
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has ...")


def test_an_exhausted_memory_is_reported_with_what_was_needed_and_free(monkeypatch):
    monkeypatch.setattr(fitting, "free_bytes", lambda _: 1 << 30)
    verdict = paritas.verify([torch.ones(2)], torch.relu, exhausted, QUIET)
    assert verdict.status is Status.UNVERIFIED
    assert str(verdict).splitlines()[1:3] == [
        "  memory: unverified (harness)",
        (
            "    there is not enough memory to check this: the whole model: 2.15 GB more were "
            "needed, 1.07 GB were free on cpu; by blocks: by='blocks' found no repeated modules in "
            "the reference; name its blocks, as in blocks=['layers.*']"
        ),
    ]


def test_blocks_are_tried_after_the_memory_is_exhausted(monkeypatch):
    from paritas.verification import verify as verifying

    def too_large(*_):
        raise torch.OutOfMemoryError("Tried to allocate 20.00 MiB.")

    monkeypatch.setattr(verifying, "_verify_whole", too_large)
    verdict = paritas.verify([TOKENS], model(), copy.deepcopy(model()), QUIET)
    assert verdict.status is Status.IDENTICAL
    assert "the whole model: 21 MB more were needed" in verdict.notes[0]

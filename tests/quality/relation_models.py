"""A small decoder and a small recurrent model with a cache, and the faults they can have.

Both take the arguments that models of transformers take. `fault` names what is wrong; every place
that can be wrong asks `self.has(...)`.
"""

from __future__ import annotations

import copy
import os
from typing import Any

import torch
from torch import nn

VOCABULARY, WIDTH, HEADS, ROWS = 23, 16, 2, 3
# Decoding token by token takes as long as there are tokens.
TOKENS = 11 if os.environ.get("PARITAS_WHOLE_CORPUS") else 8
SIZE = WIDTH // HEADS


class Cache:
    """Keys and values of each layer, or states."""

    def __init__(self, fault: str = "") -> None:
        self.layers: dict[int, tuple[torch.Tensor, ...]] = {}
        self.fault = fault

    def crop(self, tokens: int) -> None:
        """Remove the last tokens; `tokens` is negative."""
        for layer, parts in self.layers.items():
            if self.fault == "crop leaves the last layer" and layer == len(self.layers) - 1:
                continue
            count = tokens + 1 if self.fault == "crop removes one too few" else tokens
            keys = parts[0] if self.fault == "crop leaves the keys" else parts[0][:, :, :count]
            if self.fault == "crop removes the first":
                keys, values = parts[0][:, :, -count:], parts[1][:, :, -count:]
            else:
                values = parts[1][:, :, :count]
                if self.fault == "crop leaves the keys":
                    values = torch.cat([values, parts[1][:, :, count:] * 0], dim=2)
            self.layers[layer] = (keys, values)

    def reorder_cache(self, order: torch.Tensor) -> None:
        """Put the rows into another order."""
        if self.fault == "reorder does nothing":
            return
        for layer, parts in self.layers.items():
            if self.fault == "reorder leaves the last layer" and layer == len(self.layers) - 1:
                continue
            chosen = [part[order] for part in parts]
            if self.fault == "reorder leaves the values":
                chosen[-1] = parts[-1]
            self.layers[layer] = tuple(chosen)

    def __deepcopy__(self, memo: dict[int, Any]) -> Cache:
        if self.fault == "a copied cache is the same cache":
            return self
        made = Cache(self.fault)
        made.layers = {layer: copy.deepcopy(parts, memo) for layer, parts in self.layers.items()}
        return made


class Faulty(nn.Module):
    """A module that can be asked for its fault."""

    fault = ""

    def has(self, fault: str) -> bool:
        """Whether this is its fault."""
        return self.fault == fault


def rotated(x: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """Rotary positions; x is [batch, heads, tokens, size]."""
    half = x.shape[-1] // 2
    speeds = 0.5 ** torch.arange(half, dtype=x.dtype)
    angles = places[:, None, :, None].to(x.dtype) * speeds
    a, b = x[..., :half], x[..., half:]
    return torch.cat(
        [a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()], dim=-1
    )


class Attention(Faulty):
    """Causal attention over the cache and the new tokens."""

    def __init__(self, layer: int, window: int = 0) -> None:
        super().__init__()
        self.layer, self.window = layer, window
        self.query, self.key = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.value, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def heads(self, x: torch.Tensor) -> torch.Tensor:
        """[batch, tokens, width] as [batch, heads, tokens, size]."""
        return x.unflatten(-1, (HEADS, SIZE)).transpose(1, 2)

    def forward(
        self, x: torch.Tensor, places: torch.Tensor, mask: torch.Tensor | None, cache: Cache | None
    ) -> torch.Tensor:
        """Attend."""
        q = rotated(self.heads(self.query(x)), places)
        k, v = rotated(self.heads(self.key(x)), places), self.heads(self.value(x))
        known = None if cache is None else cache.layers.get(self.layer)
        past = 0
        if known is not None:
            old_k, old_v = known
            past = old_k.shape[2]
            if self.has("cached keys rotated twice"):
                old_k = rotated(old_k, torch.arange(past)[None])
            if self.has("first cached token forgotten"):
                old_k = torch.cat([old_k[:, :, :1] * 0, old_k[:, :, 1:]], dim=2)
            if self.has("last cached value overwritten"):
                old_v = torch.cat([old_v[:, :, :-1], v[:, :, :1]], dim=2)
            if self.has("cached rows mixed up"):
                old_k = old_k[:1].expand_as(old_k)
            if self.has("cached values in half precision"):
                old_v = old_v.half().to(v.dtype) + 1e-3 * old_v.sign()
            k, v = torch.cat([old_k, k], dim=2), torch.cat([old_v, v], dim=2)
        if cache is not None:
            cache.layers[self.layer] = (k, v)
        y = self._attend(q, k, v, past, mask)
        if self.has("cached output scaled") and past:
            y = y * 1.001
        return self.out(y.transpose(1, 2).flatten(2))

    def _attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, past: int, mask: Any
    ) -> torch.Tensor:
        new, total = q.shape[2], k.shape[2]
        first = past
        if self.has("mask of a chunk not moved") and past and new > 1:
            first = 0
        if self.has("mask of a chunk one too far") and past and new > 1:
            first = past + 1
        if self.has("sees one later token"):
            first = past + 1
        rows = torch.arange(new)[:, None] + first
        columns = torch.arange(total)[None]
        allowed = columns <= rows
        if self.has("a chunk sees all of itself") and past:
            allowed = torch.ones_like(allowed)
        if self.window:
            wide = self.window + (1 if self.has("window one wider with a cache") and past else 0)
            allowed = allowed & (columns > rows - wide)
        allowed = allowed[None, None].expand(q.shape[0], 1, -1, -1)
        if mask is not None and not self.has("padding attended"):
            seen = mask[:, None, None, :].bool()
            if self.has("padding attended with a cache") and past:
                seen = torch.ones_like(seen)
            if self.has("mask of the first row for all"):
                seen = seen[:1].expand_as(seen)
            if self.has("mask not extended") and past:
                seen = torch.cat([seen[..., -new:], seen[..., :-new]], dim=-1)
            allowed = allowed & seen
        scale = SIZE**-0.5
        if self.has("other scale with a cache") and past:
            scale = WIDTH**-0.5
        scores = (q @ k.transpose(-1, -2)) * scale
        # A row that sees nothing, as of padding, sees everything.
        allowed = allowed | ~allowed.any(dim=-1, keepdim=True)
        return scores.masked_fill(~allowed, -torch.inf).softmax(dim=-1) @ v


class Recurrence(Faulty):
    """A short convolution and a decaying state."""

    KERNEL = 3

    def __init__(self, layer: int) -> None:
        super().__init__()
        self.layer = layer
        self.gate, self.inner, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.taps = nn.Parameter(torch.randn(self.KERNEL, WIDTH) / 2)

    def forward(
        self, x: torch.Tensor, places: torch.Tensor, mask: torch.Tensor | None, cache: Cache | None
    ) -> torch.Tensor:
        """Run the recurrence from the state in the cache."""
        known = None if cache is None else cache.layers.get(self.layer)
        if known is not None and self.has("padding of a later chunk enters the state"):
            mask = None
        leaks = self.has("padding enters the state") or self.has("padding enters the convolution")
        leaks = leaks or (self.has("mask of a single row ignored") and len(x) == 1)
        if mask is not None and not leaks:
            x = x * mask[:, -x.shape[1] :, None].to(x.dtype)
        before = x.new_zeros(x.shape[0], self.KERNEL - 1, WIDTH)
        state = x.new_zeros(x.shape[0], WIDTH)
        several = x.shape[1] > 1
        if known is not None:
            lost_state = self.has("state not carried") or (
                self.has("state not carried into a chunk") and several
            )
            before = before if self.has("convolution not carried") else known[0]
            state = state if lost_state else known[1]
            if self.has("convolution one step late"):
                before = torch.cat([before[:, 1:], before[:, -1:]], dim=1)
            if self.has("state of another row"):
                state = state.roll(1, dims=0)
        padded = torch.cat([before, x], dim=1)
        smooth = sum(padded[:, n : n + x.shape[1]] * self.taps[n] for n in range(self.KERNEL))
        decay, inner = torch.sigmoid(self.gate(smooth)), torch.tanh(self.inner(smooth))
        if mask is not None and not self.has("padding enters the state"):
            inner = inner * mask[:, -x.shape[1] :, None].to(x.dtype)
        found = []
        for at in range(x.shape[1]):
            state = decay[:, at] * state + inner[:, at]
            if self.has("decay applied twice with a cache") and known is not None:
                state = decay[:, at] * state
            found.append(state)
        kept = found[0] if self.has("state of the first token kept") else state
        if cache is not None:
            end = -(self.KERNEL - 1)
            cache.layers[self.layer] = (padded[:, end:], kept)
        return self.out(torch.stack(found, dim=1))


class Block(Faulty):
    """A mixer and a feed-forward part, with residuals."""

    def __init__(self, mixer: nn.Module) -> None:
        super().__init__()
        self.norm, self.mixer = nn.LayerNorm(WIDTH), mixer
        wide = 2 * WIDTH
        self.mlp = nn.Sequential(nn.Linear(WIDTH, wide), nn.GELU(), nn.Linear(wide, WIDTH))

    def forward(self, x: torch.Tensor, *rest: Any) -> torch.Tensor:
        """Add both."""
        if self.has("normalised over the sequence"):
            x = x - 0.01 * x.mean(dim=1, keepdim=True)
        if self.has("normalised over the batch"):
            x = x - 1e-5 * x.mean(dim=0, keepdim=True)
        if self.has("rows compete"):
            x = x / (1 + 1e-4 * x.abs().amax(dim=0, keepdim=True))
        x = x + self.mixer(self.norm(x), *rest)
        return x + self.mlp(x)


class Decoder(Faulty):
    """The whole model; `kind` is attention, window, absolute (positions) or recurrent."""

    def __init__(self, kind: str = "attention", seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.kind = kind
        self.embed = nn.Embedding(VOCABULARY, WIDTH, padding_idx=0)
        make = {
            "attention": Attention,
            "absolute": Attention,
            "window": lambda layer: Attention(layer, 4),
            "recurrent": Recurrence,
        }[kind]
        self.layers = nn.ModuleList(Block(make(layer)) for layer in range(2))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.places = nn.Embedding(2 * TOKENS, WIDTH) if kind == "absolute" else None
        self.kept: Any = None
        self.longest = 0

    def forward(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        past_key_values: Cache | None = None,
        use_cache: bool = False,
        logits_to_keep: int = 0,
    ) -> dict[str, Any]:
        """Logits and the cache."""
        cache = past_key_values
        if cache is None and use_cache:
            cache = Cache(self.fault)
        if self.has("cache of the last call used") and cache is not None:
            cache = self.kept = self.kept or cache
        places = self._places(input_ids, position_ids, attention_mask, cache)
        x = self.embed(input_ids)
        if self.has("remembers its longest call"):
            self.longest = max(self.longest, input_ids.shape[1])
            x = x * (1 + 1e-3 * self.longest)
        if self.places is not None:
            x = x + self.places(places)
        if self.has("padding token changes others") and attention_mask is not None:
            x = x + 0.01 * (1 - attention_mask[:, -x.shape[1] :, None]).sum(dim=1, keepdim=True)
        for layer in self.layers:
            x = layer(x, places, attention_mask, cache)
        kept = slice(-logits_to_keep, None) if logits_to_keep else slice(None)
        if self.has("keeps the first positions") and logits_to_keep:
            kept = slice(0, logits_to_keep)
        if self.has("keeps one position earlier") and logits_to_keep:
            x = x.roll(1, dims=1)
        logits = self.head(x[:, kept])
        if self.has("kept positions scaled") and logits_to_keep:
            logits = logits * 1.0001
        return {"logits": logits, "past_key_values": cache}

    def _places(
        self, ids: torch.Tensor, given: torch.Tensor | None, mask: Any, cache: Cache | None
    ) -> torch.Tensor:
        past = 0
        if cache is not None and cache.layers and self.kind != "recurrent":
            past = cache.layers[0][0].shape[2]
        if self.has("positions start again") and past:
            past = 0
        if self.has("positions one too far") and past:
            past += 1
        if self.has("positions of the first row") and given is not None:
            return given[:1].expand(len(ids), -1)
        if given is not None and not self.has("given positions ignored"):
            return given
        if self.has("position of a chunk repeated") and past and ids.shape[1] > 1:
            return torch.full((1, ids.shape[1]), past).expand(len(ids), -1)
        return (torch.arange(ids.shape[1]) + past).expand(len(ids), -1)


def plant(model: Faulty, fault: str, module: str) -> nn.Module:
    """Give a module of the model a fault; an empty path is the model itself."""
    found = model.get_submodule(module)
    assert isinstance(found, Faulty)
    found.fault = fault
    return model.eval()


def tokens(seed: int = 0) -> dict[str, torch.Tensor]:
    """Inputs: no row has the padding token 0."""
    random = torch.Generator().manual_seed(seed)
    return {"input_ids": torch.randint(1, VOCABULARY, (ROWS, TOKENS), generator=random)}


# --- Training -------------------------------------------------------------------------------------


class Step(Faulty):
    """A layer of a network that is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.calls = 0
        self.mean: torch.Tensor | None = None
        self.register_buffer("seen", torch.zeros(()), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Run the layer."""
        y = self.linear(x)
        if self.has("counts its calls"):
            self.calls += 1
            y = y * (1 + 0.01 * self.calls)
        if self.has("stays in training mode") and self.training:
            y = y * 1.1
        y = torch.tanh(y)
        if self.training and self.has("remembers a mean"):
            self.mean = y.detach().mean(dim=(0, 1))
        if self.mean is not None:
            y = y - 0.1 * self.mean
        if self.has("buffer that is not saved"):
            y = y * (1 + self.seen)
            if self.training:
                self.seen = self.seen + 0.1
        if self.has("weights rows by their place"):
            y = y * torch.linspace(1, 1.1, len(y), dtype=y.dtype)[:, None, None]
        if self.has("carries over from row to row"):
            y = y + 0.01 * y.cumsum(dim=0)
        if self.has("draws from its own generator"):
            if self.calls == 0:
                self.generator = torch.Generator().manual_seed(3)
            self.calls += 1
            kept = torch.rand(y.shape, generator=self.generator) > 0.1 * (self.calls % 2)
            y = y * kept
        return x + y

    def train(self, mode: bool = True) -> Step:
        """Switch the mode."""
        if self.has("stays in training mode"):
            mode = mode or self.calls > 0
            self.calls = int(mode)
        return super().train(mode)


class Trained(Faulty):
    """A network on tokens with a loss of its own, like one of transformers."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Step() for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight

    def forward(
        self,
        input_ids: torch.Tensor,
        labels: torch.Tensor | None = None,
        num_items_in_batch: torch.Tensor | None = None,
    ) -> dict[str, Any]:
        """Logits, and the loss if there are labels."""
        x = self.embed(input_ids)
        for layer in self.layers:
            x = layer(x)
        logits = self.head(x)
        if labels is None:
            return {"logits": logits}
        losses = nn.functional.cross_entropy(
            logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction="none"
        )
        own = (labels[:, 1:] != -100).sum()
        count = own if num_items_in_batch is None else num_items_in_batch
        if self.has("count ignored"):
            count = own
        if self.has("divided twice") and num_items_in_batch is not None:
            count = count * own
        if self.has("padding counted"):
            count = labels[:, 1:].numel() if num_items_in_batch is None else count
        loss = losses.sum() / count
        if self.has("averaged over rows"):
            rows = losses.view(len(input_ids), -1).sum(dim=1)
            loss = (rows / (labels[:, 1:] != -100).sum(dim=1)).mean()
        return {"loss": loss, "logits": logits}

    def load_state_dict(self, state: Any, *rest: Any, **more: Any) -> Any:
        """Load."""
        state, weight = dict(state), "layers.1.linear.weight"
        if self.has("loads one weight not"):
            state[weight] = self.get_parameter(weight).detach()
        if self.has("loads weights transposed"):
            state[weight] = state[weight].T
        done = super().load_state_dict(state, *rest, **more)
        if self.has("tie lost when loaded"):
            self.head.weight = nn.Parameter(self.head.weight.detach().clone())
        if self.has("loaded in half precision"):
            with torch.no_grad():
                for one in self.parameters():
                    one.copy_(one.half())
        return done

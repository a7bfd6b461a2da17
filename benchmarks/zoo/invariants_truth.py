"""What is true of one model's relations, computed by hand in float64; nothing of paritas is used.

Each function gives two tensors that must agree. A model in float64 may still cast to float32
inside, so that two right ways differ by 1e-7; a fault is as large as it is.
"""

from __future__ import annotations

import copy
import inspect
import math

import torch
from benchmarks.zoo.truth import grouped_products, move

# Relative to the rms of the plain call: less is no fault, more is one; a person decides between.
NO_FAULT, FAULT = 1e-6, 1e-5
_VALUES = ("logits", "prediction_logits", "last_hidden_state")


class Hand:
    """A model on token ids in float64, called as its documentation says."""

    def __init__(self, model, kwargs):
        self.model = copy.deepcopy(model).double().eval()
        kwargs = move(dict(kwargs), torch.float64)
        self.name = next((n for n in ("decoder_input_ids", "input_ids") if n in kwargs), None)
        self.ids = kwargs.pop(self.name)
        prefix = "decoder_" if self.name.startswith("decoder") else ""
        self.mask, self.places = f"{prefix}attention_mask", f"{prefix}position_ids"
        if not prefix:
            kwargs = {}
        kwargs.pop(self.mask, None)
        kwargs.pop("labels", None)
        self.rest = kwargs
        names = inspect.signature(self.model.forward).parameters
        inner = getattr(self.model, "base_model", None)
        if inner is not None:
            names = {*names, *inspect.signature(inner.forward).parameters}
        self.takes = names
        self.state = next(
            (n for n in ("past_key_values", "cache_params", "state") if n in names), ""
        )

    def values(self, output):
        """The value for each token."""
        for name in _VALUES:
            if name in output:
                return output[name]
        return output[0]

    def call(self, ids, rows=None, **more):
        """One call."""
        rest = self.rest
        if rows is not None:
            rest = {
                k: v[rows]
                if isinstance(v, torch.Tensor) and v.shape[:1] == self.ids.shape[:1]
                else v
                for k, v in rest.items()
            }
        more = {"use_cache": False, **more}
        return self.model(**{self.name: ids}, **copy.deepcopy(rest), **more)

    def plain(self):
        """All tokens at once."""
        return self.values(self.call(self.ids))

    def chunks(self, sizes):
        """In chunks, with a cache."""
        found, cache, start = [], None, 0
        total = self.ids.shape[1]
        while start < total:
            size = sizes[min(len(found), len(sizes) - 1)]
            given = {} if cache is None else {self.state: cache}
            out = self.call(self.ids[:, start : start + size], use_cache=True, **given)
            cache = out.get(self.state, cache)
            found.append(self.values(out))
            start += size
        return torch.cat(found, dim=1)

    def paddings(self):
        """Padding on the left is only promised by a model that takes positions."""
        return [(0, 3), (3, 0)] if self.places in self.takes else [(0, 3)]

    def padded(self, left, right):
        """With padding."""
        rows, total = self.ids.shape
        pad = torch.zeros((rows, 1), dtype=self.ids.dtype)
        ids = torch.cat([pad.expand(-1, left), self.ids, pad.expand(-1, right)], 1)
        mask = torch.zeros_like(ids)
        mask[:, left : left + total] = 1
        more = {self.mask: mask}
        if left:
            places = (mask.cumsum(1) - 1).clamp(min=0)
            try:
                out = self.call(ids, **more, **{self.places: places})
            except TypeError:
                out = self.call(ids, **more)
        else:
            out = self.call(ids, **more)
        return self.values(out)[:, left : left + total]

    def alone(self):
        """Each row alone."""
        rows = range(len(self.ids))
        parts = [self.call(self.ids[r : r + 1], slice(r, r + 1)) for r in rows]
        return torch.cat([self.values(one) for one in parts])

    def later_changed(self):
        """Other tokens in the second half."""
        half = self.ids.shape[1] // 2
        ids = self.ids.clone()
        ids[:, half:] = self.ids.flip(1).roll(1, 0)[:, half:]
        return self.values(self.call(ids))[:, :half]

    def cropped(self):
        """Tokens run and taken back."""
        half = self.ids.shape[1] // 2
        out = self.call(self.ids[:, :half], use_cache=True)
        first, cache = self.values(out), out[self.state]
        others = self.ids.flip(1).roll(1, 0)[:, half : half + 3]
        cache = self.call(others, use_cache=True, **{self.state: cache}).get(self.state, cache)
        cache.crop(-3)
        out = self.call(self.ids[:, half:], use_cache=True, **{self.state: cache})
        return torch.cat([first, self.values(out)], 1)

    def reused(self):
        """A copied prefix."""
        half = self.ids.shape[1] // 2
        out = self.call(self.ids[:, :half], use_cache=True)
        first, cache = self.values(out), out[self.state]
        kept = copy.deepcopy(cache)
        others = self.ids.flip(1).roll(1, 0)[:, half : half + 3]
        self.call(others, use_cache=True, **{self.state: cache})
        out = self.call(self.ids[:, half:], use_cache=True, **{self.state: kept})
        return torch.cat([first, self.values(out)], 1)

    def reordered(self):
        """Swapped rows."""
        half = self.ids.shape[1] // 2
        out = self.call(self.ids[:, :half], use_cache=True)
        first, cache = self.values(out), out[self.state]
        order = torch.arange(len(self.ids)).flip(0)
        cache.reorder_cache(order)
        out = self.call(self.ids[order, half:], order, use_cache=True, **{self.state: cache})
        return torch.cat([first, self.values(out)[order]], 1)

    def static(self):
        """In a static cache."""
        import transformers

        config = self.model.config.get_text_config(decoder=True)
        cache = transformers.StaticCache(config=config, max_cache_len=self.ids.shape[1] + 4)
        found = []
        half = self.ids.shape[1] // 2
        for part in (self.ids[:, :half], *self.ids[:, half:].split(1, dim=1)):
            out = self.call(part, use_cache=True, **{self.state: cache})
            found.append(self.values(out))
        return torch.cat(found, 1)

    def attention(self, name):
        """By another implementation."""
        before = self.model.config._attn_implementation  # noqa: SLF001
        self.model.set_attn_implementation(name)
        try:
            return self.plain()
        finally:
            self.model.set_attn_implementation(before)

    def kept(self):
        """The last positions."""
        return self.values(self.call(self.ids, logits_to_keep=3))

    def packed(self):
        """All rows in one."""
        rows, total = self.ids.shape
        places = torch.arange(total).repeat(rows)[None]
        out = self.values(self.call(self.ids.reshape(1, -1), **{self.places: places}))
        return out.reshape(rows, total, -1)


def differences(model, kwargs):
    """Relation -> the largest difference of its ways, relative to the rms; or what was raised."""
    hand = Hand(model, kwargs)
    with torch.no_grad(), grouped_products():
        plain = hand.plain()
        half, total = plain.shape[1] // 2, plain.shape[1]
        ways = {
            "cached-decoding": lambda: (hand.chunks([1]), hand.chunks([half, 1])),
            "chunked-prefill": lambda: (
                hand.chunks([3]),
                hand.chunks([7]),
                hand.chunks([2, 5, 1, 4]),
            ),
            "padding": lambda: tuple(hand.padded(*one) for one in hand.paddings()),
            "row-independence": lambda: (hand.alone(),),
            "causality": lambda: (hand.later_changed(),),
            "cache-crop": lambda: (hand.cropped(),),
            "cache-reorder": lambda: (hand.reordered(),),
            "prefix-reuse": lambda: (hand.reused(),),
            "cache-kinds": lambda: (hand.static(),),
            "attention": lambda: (hand.attention("eager"), hand.attention("sdpa")),
            "logits-to-keep": lambda: (hand.kept(),),
            "packing": lambda: (hand.packed(),),
        }
        scale = plain.square().mean().sqrt()
        found = {}
        for name, way in ways.items():
            try:
                worst = 0.0
                for value in way():
                    place = (
                        slice(total - 3, None)
                        if name == "logits-to-keep"
                        else slice(0, value.shape[1])
                    )
                    error = float((value - plain[:, place]).abs().max() / scale)
                    worst = math.nan if math.isnan(error) else max(error, worst)
                found[name] = worst if math.isfinite(worst) else "not finite"
            except Exception as error:  # noqa: BLE001  (a model that cannot do this by hand)
                found[name] = f"{type(error).__name__}: {str(error)[:80]}"
    return found

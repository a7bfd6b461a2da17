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

    def counts_from_zero(self):
        """Padding on the left is promised by a model that takes positions from 0, or has none."""
        if self.places not in self.takes:
            names = self.model.config.to_dict()
            return not any("position" in name or "rope" in name for name in names)
        places = torch.arange(self.ids.shape[1]).expand_as(self.ids)
        try:
            given = self.values(self.call(self.ids, **{self.places: places}))
        except Exception:  # noqa: BLE001  (positions of another form)
            return False
        return torch.equal(given, self.plain())

    def paddings(self):
        """All ways of padding."""
        yield self.padded(0, 3)
        yield self.padded(0, 3, self.ids.flip(1)[:, :3])
        if self.counts_from_zero():
            yield self.padded(3, 0, self.ids.flip(1)[:, :3])
            yield self.padded(3, 0)
            if self.state and self.call(self.ids, use_cache=True).get(self.state) is not None:
                yield self.padded_and_continued([3 + self.ids.shape[1] // 2, 1])
                yield self.padded_and_continued([2, 4])

    def pads(self, count):
        """Columns of padding."""
        configs = (self.model.config, self.model.config.get_text_config(decoder=True))
        known = [getattr(one, "pad_token_id", None) for one in configs]
        token = next((one for one in known if isinstance(one, int) and one >= 0), 0)
        return torch.full((len(self.ids), count), token, dtype=self.ids.dtype)

    def places_of(self, mask):
        """Positions, if there are any."""
        places = (mask.cumsum(1) - 1).clamp(min=0)
        return {self.places: places} if self.places in self.takes else {}

    def padded(self, left, right, words=None):
        """With padding; of usual tokens, if there are any."""
        total = self.ids.shape[1]
        pads = (self.pads(3) if words is None else words).split([left, right], 1)
        ids = torch.cat([pads[0], self.ids, pads[1]], 1)
        mask = torch.zeros_like(ids)
        mask[:, left : left + total] = 1
        more = {self.mask: mask}
        if left:
            more |= self.places_of(mask)
        return self.values(self.call(ids, **more))[:, left : left + total]

    def padded_and_continued(self, sizes):
        """With padding on the left, in chunks; a model with a state gets the mask of the chunk."""
        ids = torch.cat([self.pads(3), self.ids], 1)
        mask = torch.ones_like(ids)
        mask[:, :3] = 0
        places = self.places_of(mask)
        found, cache, start = [], None, 0
        while start < ids.shape[1]:
            stop = start + sizes[min(len(found), len(sizes) - 1)]
            given = {} if cache is None else {self.state: cache}
            if self.state == "past_key_values":
                given[self.mask] = mask[:, :stop]
            elif stop - start > 1:
                given[self.mask] = mask[:, start:stop]
            given |= {name: one[:, start:stop] for name, one in places.items()}
            out = self.call(ids[:, start:stop], use_cache=True, **given)
            cache = out.get(self.state, cache)
            found.append(self.values(out))
            start = stop
        return torch.cat(found, 1)[:, 3:]

    def alone(self):
        """Each row alone."""
        rows = range(len(self.ids))
        parts = [self.call(self.ids[r : r + 1], slice(r, r + 1)) for r in rows]
        return torch.cat([self.values(one) for one in parts])

    def later_changed(self, cut):
        """Other tokens from a place on."""
        ids = self.ids.clone()
        ids[:, cut:] = self.ids.flip(1).roll(1, 0)[:, cut:]
        return self.values(self.call(ids))[:, :cut]

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
        found = [first]
        for place in range(half, self.ids.shape[1]):
            ids = self.ids[order, place : place + 1]
            out = self.call(ids, order, use_cache=True, **{self.state: cache})
            found.append(self.values(out)[order])
            cache = out.get(self.state, cache)
        return torch.cat(found, 1)

    def static(self):
        """In a static cache."""
        import transformers

        if not self.model._can_compile_fullgraph:  # noqa: SLF001  (the flag that promises it)
            raise NotImplementedError("its class does not support static caches")
        config = self.model.config.get_text_config(decoder=True)
        cache = transformers.StaticCache(config=config, max_cache_len=self.ids.shape[1] + 4)
        found = []
        half = self.ids.shape[1] // 2
        for part in (self.ids[:, :half], *self.ids[:, half:].split(1, dim=1)):
            out = self.call(part, use_cache=True, **{self.state: cache})
            found.append(self.values(out))
        return torch.cat(found, 1)

    def generated(self, left=0, **how):
        """What `generate` gives, with its own defaults set aside."""
        import transformers

        start = getattr(self.model.config, "decoder_start_token_id", None)
        ids = self.ids[:, :6].clone()
        more = dict(copy.deepcopy(self.rest))
        if self.rest:
            ids[:, 0] = 0 if start is None else start
        else:
            more["attention_mask"] = torch.ones_like(ids)
        if left:
            pads = self.pads(left)
            ids = torch.cat([pads, ids], 1)
            more["attention_mask"] = torch.cat([torch.zeros_like(pads), more["attention_mask"]], 1)
        settings = transformers.GenerationConfig(
            max_new_tokens=4,
            do_sample=False,
            pad_token_id=int(self.pads(1)[0, 0]),
            bos_token_id=start,
            decoder_start_token_id=start,
            return_dict_in_generate=True,
            **how,
        )
        self.model.generation_config = transformers.GenerationConfig()
        return self.model.generate(**{self.name: ids}, **more, generation_config=settings)

    def greedy(self):
        """The logits of greedy generation, with a cache and without, and padded."""
        how = {"output_logits": True}
        without = self.generated(use_cache=False, **how)
        ways = [self.generated(use_cache=True, **how)]
        if not self.rest and self.counts_from_zero():
            ways.append(self.generated(3, use_cache=True, **how))
        for one in ways:
            for left, right in zip(without.logits, one.logits, strict=True):
                yield left[:, None], right[:, None]

    def beams(self):
        """The scores of beam search, with a cache and without."""
        how = {"num_beams": 3, "output_scores": True}
        found = [self.generated(use_cache=one, **how).sequences_scores for one in (False, True)]
        yield tuple(one[:, None] for one in found)

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
            "padding": hand.paddings,
            "row-independence": lambda: (hand.alone(),),
            "causality": lambda: map(hand.later_changed, (1, half, total - 1)),
            "cache-crop": lambda: (hand.cropped(),),
            "cache-reorder": lambda: (hand.reordered(),),
            "prefix-reuse": lambda: (hand.reused(),),
            "cache-kinds": lambda: (hand.static(),),
            "attention": lambda: (hand.attention("eager"), hand.attention("sdpa")),
            "logits-to-keep": lambda: (hand.kept(),),
            "packing": lambda: (hand.packed(),),
            "greedy-generation": hand.greedy,
            "beam-search": hand.beams,
        }
        scale = plain.square().mean().sqrt()
        found = {}
        for name, way in ways.items():
            try:
                worst = 0.0
                for value in way():
                    if isinstance(value, tuple):
                        expected, value = value  # noqa: PLW2901
                    elif name == "logits-to-keep":
                        expected = plain[:, total - 3 :]
                    else:
                        expected = plain[:, : value.shape[1]]
                    error = float((value - expected).abs().max() / scale)
                    worst = math.nan if math.isnan(error) else max(error, worst)
                found[name] = worst if math.isfinite(worst) else "not finite"
            except Exception as error:  # noqa: BLE001  (a model that cannot do this by hand)
                found[name] = f"{type(error).__name__}: {str(error)[:80]}"
    return found

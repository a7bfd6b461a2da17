"""A simulated serving engine: its own code for the model of `served_model`, and its faults.

It serves from raw weights with a paged cache, chunked prefill and decoding token by token, and
rounds elsewhere than the model does. `fault` names what it does wrong.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from quality.served_model import ACTIVATIONS, ServedModel, speeds

FLOAT8 = torch.float8_e4m3fn


class SmallEngine:
    """Serves requests one by one; caches of prefixes are shared."""

    def __init__(
        self,
        model: ServedModel,
        fault: str = "",
        *,
        kernels: str = "",
        chunk: int = 5,
        seed: int = 0,
    ) -> None:
        """`kernels` are the ways in which it rounds other than the model."""
        self.config = model.config
        self.weights = {name: value.detach().clone() for name, value in model.state_dict().items()}
        self.dtype = model.lm_head.weight.dtype
        self.fault, self.kernels, self.chunk = fault, set(kernels.split()), chunk
        self.random = torch.Generator().manual_seed(seed)
        self.pages: dict[int, list[Any]] = {}
        self.prefill_with: SmallEngine | None = None  # an engine with other weights
        self.speeds = speeds(model.config).float()
        if fault == "rope scaling ignored":
            self.speeds = self.speeds * model.config.rope_parameters["factor"]
        if fault == "rope base of another model":
            size = model.config.hidden_size // model.config.num_attention_heads
            scale = model.config.rope_parameters.get("factor", 1.0)
            self.speeds = 1e4 ** (-torch.arange(0, size, 2) / size) / scale
        if fault == "weights in float8":
            self._round_weights(8)
        if fault == "weights in int4":
            self._round_weights(4)

    def _round_weights(self, bits: int) -> None:
        for name, weight in self.weights.items():
            if weight.dim() < 2 or "embed" in name or "lm_head" in name:
                continue
            wide = weight.float()
            if bits == 8:
                scale = wide.abs().amax() / torch.finfo(FLOAT8).max
                wide = (wide / scale).to(FLOAT8).float() * scale
            else:
                groups = wide.unflatten(-1, (-1, 16 if wide.shape[-1] % 32 else 32))
                groups = wide if wide.shape[-1] % 32 else groups
                scale = groups.abs().amax(-1, keepdim=True) / 7
                groups = (groups / scale).round().clamp(-8, 7) * scale
                wide = groups.reshape(weight.shape)
            self.weights[name] = wide.to(weight.dtype)

    # --- Kernels ---

    def product(self, x: torch.Tensor, name: str) -> torch.Tensor:
        """A product; split over two ranks, its partial sums are rounded."""
        weight = self.weights[f"{name}.weight"]
        bias = self.weights.get(f"{name}.bias")
        return self._multiply(x, weight, bias)

    def _multiply(self, x: torch.Tensor, weight: torch.Tensor, bias: Any = None) -> torch.Tensor:
        if "ranks" in self.kernels:
            half = x.shape[-1] // 2
            found = x[..., :half] @ weight[:, :half].T + x[..., half:] @ weight[:, half:].T
        elif "float32" in self.kernels:
            found = (x.float() @ weight.float().T).to(x.dtype)
        elif "parts" in self.kernels:
            parts = zip(x.float().split(8, -1), weight.float().split(8, 1), strict=True)
            found = sum(a @ b.T for a, b in parts).to(x.dtype)
        else:
            found = x @ weight.T
        return found if bias is None else found + bias

    def norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        """A norm; fused, it rounds once."""
        weight, wide = self.weights[f"{name}.weight"], x.float()
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.config.rms_norm_eps)
        if "fused" in self.kernels:
            return (wide * scale * weight.float()).to(x.dtype)
        return weight * (wide * scale).to(x.dtype)

    def rotate(self, x: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        """Rotary positions; x is [tokens, heads, size]."""
        angles = places[:, None, None].float() * self.speeds
        cos, sin = angles.cos(), angles.sin()
        wide = x.float() if "fused" in self.kernels else x
        if "fused" not in self.kernels:
            cos, sin = cos.to(x.dtype), sin.to(x.dtype)
        a, b = wide.chunk(2, dim=-1)
        return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1).to(x.dtype)

    def attend(self, q: Any, k: Any, v: Any, seen: Any) -> torch.Tensor:
        """Attention over all tokens in the cache; online, in blocks of keys."""
        groups = self.config.num_attention_heads // self.config.num_key_value_heads
        k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
        q, k, v = (one.transpose(0, 1) for one in (q, k, v))
        scale = (2 if self.fault == "attention too strong" else 1) / math.sqrt(q.shape[-1])
        if "online" not in self.kernels:
            scores = (q @ k.mT * scale).masked_fill(~seen, -1e30).float()
            return (scores.softmax(-1).to(v.dtype) @ v).transpose(0, 1).flatten(1)
        top = torch.full((*q.shape[:2], 1), -1e30)
        total, found = torch.zeros_like(top), torch.zeros(q.shape)
        for start in range(0, k.shape[1], 4):
            part = slice(start, start + 4)
            scores = (q.float() @ k[:, part].float().mT * scale).masked_fill(~seen[:, part], -1e30)
            higher = torch.maximum(top, scores.amax(-1, keepdim=True))
            weights, shrink = (scores - higher).exp(), (top - higher).exp()
            weights = torch.where(seen[:, part], weights, 0.0)
            total = total * shrink + weights.sum(-1, keepdim=True)
            found = found * shrink + weights.to(v.dtype).float() @ v[:, part].float()
            top = higher
        return (found / total).to(v.dtype).transpose(0, 1).flatten(1)

    def experts(self, x: torch.Tensor, name: str, places: torch.Tensor) -> torch.Tensor:
        """The gated products of the chosen experts."""
        act = ACTIVATIONS[self.config.hidden_act]

        def one(value: Any, up: Any, down: Any) -> torch.Tensor:
            a, b = self._multiply(value, up).chunk(2, dim=-1)
            if "fused" in self.kernels:
                return self._multiply((act(a.float()) * b.float()).to(x.dtype), down)
            return self._multiply(act(a) * b, down)

        up, down = self.weights[f"{name}.gate_up"], self.weights[f"{name}.down"]
        if not self.config.num_experts:
            return one(x, up, down)
        scores = self._multiply(x, self.weights[f"{name}.router.weight"]).float()
        scores = scores.softmax(-1)
        weights, chosen = scores.sort(dim=-1, descending=True, stable=True)
        count = self.config.num_experts_per_tok
        if self.fault == "an expert chosen otherwise" and name == "layers.2.mlp":
            turned = places == 14
            for part in (weights, chosen):
                part[turned, count - 1] = part[turned, count]
        weights, chosen = weights[:, :count], chosen[:, :count]
        if self.fault != "weights of experts not normalised":
            weights = weights / weights.sum(-1, keepdim=True)
        found = torch.zeros_like(x)
        for place in range(count):
            for row in range(len(x)):
                expert = int(chosen[row, place])
                part = one(x[row : row + 1], up[expert], down[expert])
                found[row] += weights[row, place].to(x.dtype) * part[0]
        return found

    # --- The model ---

    def step(self, ids: list[int], first: int, pages: list[Any], shift: int = 0) -> torch.Tensor:
        """Run tokens from position `first` on, after what is in the pages; their logits."""
        x = self.weights["embed_tokens.weight"][torch.tensor(ids)]
        places = torch.arange(first, first + len(ids)) + shift
        size = self.config.hidden_size // self.config.num_attention_heads
        for layer, kind in enumerate(self.config.layer_types):
            if self.fault == "second layer skipped" and layer == 1:
                continue
            at = f"layers.{layer}."
            y = self.norm(x, f"{at}input_layernorm")
            q, k, v = (
                self.product(y, f"{at}self_attn.{name}_proj").unflatten(-1, (-1, size))
                for name in "qkv"
            )
            k = self.rotate(k, places)
            old_k, old_v = pages[layer]
            if self.fault == "cache in float8":
                old_k, old_v = (one.to(FLOAT8).to(self.dtype) for one in (old_k, old_v))
            if self.fault == "cache in float8, read at once":
                k, v = (one.to(FLOAT8).to(self.dtype) for one in (k, v))
            pages[layer] = torch.cat([old_k, k]), torch.cat([old_v, v])
            rows = torch.arange(len(old_k), len(old_k) + len(ids))[:, None]
            columns = torch.arange(len(old_k) + len(ids))[None]
            seen = columns <= rows
            if kind == "sliding_attention" and self.fault != "sliding window ignored":
                seen = seen & (columns > rows - (self.config.sliding_window or 10**6))
            if self.fault == "first page not seen" and len(ids) == 1:
                seen = seen & (columns >= 4)
            q = self.rotate(q, places)
            x = x + self.product(self.attend(q, *pages[layer], seen), f"{at}self_attn.o_proj")
            x = x + self.experts(self.norm(x, f"{at}post_attention_layernorm"), f"{at}mlp", places)
        x = self.norm(x, "norm")
        if "head" in self.kernels:
            logits = x.float() @ self.weights["lm_head.weight"].float().T
        else:
            logits = self.product(x, "lm_head").float()
        cap = self.config.final_logit_softcapping
        if cap is not None and self.fault != "cap of logits ignored":
            logits = cap * torch.tanh(logits / cap)
        return logits

    def _empty(self) -> list[Any]:
        size = self.config.hidden_size // self.config.num_attention_heads
        shape = (0, self.config.num_key_value_heads, size)
        return [(torch.zeros(shape, dtype=self.dtype),) * 2 for _ in self.config.layer_types]

    def _prompt(self, prompt: list[int]) -> list[int]:
        bos = self.config.bos_token_id
        if self.fault == "BOS added twice":
            return [bos, *prompt]
        if self.fault == "BOS left out":
            return prompt[1:] if prompt[0] == bos else prompt
        if self.fault == "another BOS":
            return [self.config.eos_token_id, *prompt[1:]]
        if self.fault == "prompt truncated":
            return prompt[-9:]
        return prompt

    def _prefill(self, prompt: list[int], pages: list[Any], done: int) -> torch.Tensor:
        logits = torch.empty(0)
        while done < len(prompt):
            ids = prompt[done : done + self.chunk]
            shift = -done if self.fault == "positions of chunks start again" else 0
            logits = self.step(ids, done, pages, shift)
            done += len(ids)
        return logits[-1]

    def serve(
        self,
        prompt: list[int],
        count: int,
        sampling: dict[str, float],
        mode: str = "raw",
        top: int = 0,
    ) -> dict[str, Any]:
        """Generate some tokens; returns a record."""
        own, pages, done = self._prompt(prompt), self._empty(), 0
        if self.fault == "page of another request" and self.pages:
            pages = [(k[:4].clone(), v[:4].clone()) for k, v in self.pages[0]]
            done = 4
        row = (self.prefill_with or self)._prefill(own, pages, done)
        self.pages.setdefault(0, [(k.clone(), v.clone()) for k, v in pages])
        if self.fault == "cache of the first request" and self.pages[0] is not pages:
            pages = [(k.clone(), v.clone()) for k, v in self.pages[0]]
        if self.fault == "cache lost":
            pages = self._empty()
        output: list[int] = []
        rows: list[torch.Tensor] = []
        shift = 1 if self.fault == "positions of decoding one too far" else 0
        for step in range(count):
            rows.append(row)
            output.append(self._draw(row, output, own, sampling))
            if step + 1 < count:
                row = self.step([output[-1]], len(own) + step, pages, shift)[-1]
        return self._record(prompt, output, rows, sampling, mode, top)

    # --- Sampling ---

    def _processed(self, row: Any, output: Any, prompt: Any, sampling: dict[str, float]) -> Any:
        penalty = sampling.get("repetition_penalty", 1.0)
        row = row.clone()
        for token in {*prompt, *output}:
            row[token] = row[token] / penalty if row[token] > 0 else row[token] * penalty
        row = row / (sampling.get("temperature", 1.0) or 1.0)
        keep = int(sampling.get("top_k", 0))
        if keep > 0:
            row[row < row.sort(descending=True).values[keep - 1]] = -torch.inf
        nucleus = sampling.get("top_p", 1.0)
        if nucleus < 1:
            ordered, order = row.sort(descending=True)
            mass = ordered.softmax(0)
            row[order[(mass.cumsum(0) - mass) >= nucleus]] = -torch.inf
        return row

    def _draw(self, row: Any, output: Any, prompt: Any, sampling: dict[str, float]) -> int:
        processed = self._processed(row, output, prompt, sampling)
        if sampling.get("temperature", 1.0) == 0 and self.fault != "greedy requests are drawn":
            return int(processed.argmax())
        if self.fault == "truncation not applied":
            processed = row
        chances = processed.softmax(0)
        return int(torch.multinomial(chances, 1, generator=self.random))

    def _record(
        self, prompt: Any, output: Any, rows: Any, sampling: Any, mode: str, top: int
    ) -> dict[str, Any]:
        tables = []
        for place, row in enumerate(rows):
            used = row
            fault = self.fault
            if (mode == "processed") != (fault in {"processed", "not processed"}):
                used = self._processed(row, output[:place], prompt, sampling)
            if fault == "temperature applied":
                used = row / sampling["temperature"]
            if fault == "a default temperature applied":
                used = row / 0.6
            if fault == "normalised over the nucleus":
                used = self._processed(row, [], [], {"top_p": sampling["top_p"]})
            if fault == "normalised over another nucleus":
                used = self._processed(row, [], [], {"top_p": 0.5})
            if fault == "unused entries counted":
                used = torch.cat([row, torch.zeros(35)])
            tables.append(row if fault == "logits returned" else used.log_softmax(0))
        chosen = [float(table[token]) for table, token in zip(tables, output, strict=True)]
        if self.fault == "shifted by one":
            chosen = [*chosen[1:], chosen[0]]
        record = {
            "prompt": prompt,
            "output": output,
            "logprobs": [-9999.0 if one == -math.inf else one for one in chosen],
            "sampling": sampling,
            "logprobs_mode": mode,
        }
        if top:
            best = [table[: self.config.vocab_size].topk(top) for table in tables]
            record["top_logprobs"] = [
                {int(i): float(v) for v, i in zip(*one, strict=True) if v > -math.inf}
                for one in best
            ]
        return record

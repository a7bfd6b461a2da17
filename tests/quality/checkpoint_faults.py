"""Faulty checkpoints and settings, as an engine might serve them in float32.

A fault is made in a copy of a small model of transformers. The copy generates token by token with a
cache and other kernels than the reference, as an engine does, so that it rounds elsewhere. Each
fault says which words its cause must have; no other cause may be named.

`KNOWN` are the faults by which the hypotheses of `check_engine` were written, `HELD_OUT` those that
were written down before and looked at only afterwards. `benchmarks/zoo/checkpoints.py` counts for
both how many causes are right, false, misleading and missing.
"""

from __future__ import annotations

import copy
import dataclasses
import difflib
import math
import re
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from quality.vllm_cases import BOS, RANK, new_model

if TYPE_CHECKING:
    from collections.abc import Callable

TOKENS = 10
LENGTHS = (9, 23, 41)
WARM = {"temperature": 0.8}
OLDER = "step 100"
_SIZE = 97
_WIDE = {
    "hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4,
    "num_key_value_heads": 2,
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Fault:
    """What is wrong, and what may be said about it.

    Attributes:
        name: in words.
        right: matches the text of the right cause; empty if none can be known.
        model: one of `vllm_cases.MODELS`.
        change: changes the weights of the engine's copy.
        settings: changes its configuration.
        prompt: changes what the engine is given.
        draw: the temperature with which it draws, if it is not that of the request.
        sampling: the parameters of the request.
        lengths: of the prompts.
        tokens: the number of tokens that are generated for each.
        adapted: the reference is an older model with an adapter merged, and the older one is given.
        tied: the head of the reference has the weights of its embeddings.
        wide: the model has twice the width, and four heads.
    """

    name: str
    right: str = ""
    model: str = "llama"
    change: Callable[[Any], None] | None = None
    settings: dict[str, Any] = dataclasses.field(default_factory=dict)
    prompt: Callable[[list[int]], list[int]] | None = None
    draw: float | None = None
    sampling: dict[str, Any] = dataclasses.field(default_factory=lambda: dict(WARM))
    lengths: tuple[int, ...] = LENGTHS
    tokens: int = TOKENS
    adapted: bool = False
    tied: bool = False
    wide: bool = False


# --- The engine -----------------------------------------------------------------------------------


def prompts(lengths: tuple[int, ...], seed: int = 0) -> list[list[int]]:
    """Token ids, the first of which is BOS."""
    random = torch.Generator().manual_seed(seed)
    return [
        [BOS, *torch.randint(3, _SIZE, (length - 1,), generator=random).tolist()]
        for length in lengths
    ]


def served(fault: Fault, seed: int = 0) -> tuple[Any, list[dict[str, Any]], dict[str, Any]]:
    """The reference, what the engine returned, and older weights."""
    base = new_model(fault.model, seed, **(_WIDE if fault.wide else {}))
    if fault.tied:
        base.lm_head.weight = base.model.embed_tokens.weight
        base.config.tie_word_embeddings = True
    reference, older = base, {}
    if fault.adapted:
        reference = copy.deepcopy(base)
        add_adapter(reference)
        older = {OLDER: base}
    engine = copy.deepcopy(reference)
    if fault.settings:
        config = copy.deepcopy(engine.config)
        for name, value in fault.settings.items():
            setattr(config, name, value)
        engine = type(engine)(config).eval()
        engine.load_state_dict(reference.state_dict())
    if fault.change is not None:
        with torch.no_grad():
            fault.change(engine)
    reference.set_attn_implementation("eager")
    engine.set_attn_implementation("sdpa")
    random = torch.Generator().manual_seed(seed)
    found = [_answer(engine, fault, one, random) for one in prompts(fault.lengths, seed)]
    return reference, found, older


def _answer(
    engine: Any, fault: Fault, prompt: list[int], random: torch.Generator
) -> dict[str, Any]:
    sent = fault.prompt(prompt) if fault.prompt is not None else prompt
    output: list[int] = []
    numbers: list[float] = []
    tables: list[dict[int, float]] = []
    with torch.no_grad():
        first = engine(input_ids=torch.tensor([sent]), use_cache=True)
        rows, cache = first.logits[0].float().log_softmax(-1), first.past_key_values
        row = rows[-1]
        for _ in range(fault.tokens):
            heat = fault.sampling.get("temperature", 1.0) if fault.draw is None else fault.draw
            chances = (row / heat).softmax(-1) if heat else None
            token = int(row.argmax()) if chances is None else int(
                torch.multinomial(chances, 1, generator=random)
            )  # fmt: skip
            output.append(token)
            numbers.append(float(row[token]))
            best = row.topk(5)
            tables.append(dict(zip(best.indices.tolist(), best.values.tolist(), strict=True)))
            step = engine(input_ids=torch.tensor([[token]]), past_key_values=cache, use_cache=True)
            row, cache = step.logits[0, -1].float().log_softmax(-1), step.past_key_values
    of_prompt: list[float | None] = [None for _ in prompt]
    same = difflib.SequenceMatcher(a=prompt, b=sent, autojunk=False).get_matching_blocks()
    for ours, theirs, size in same:
        for place in range(size):
            if ours + place and theirs + place:
                of_prompt[ours + place] = float(rows[theirs + place - 1, prompt[ours + place]])
    return {
        "prompt": prompt, "output": output, "logprobs": numbers, "prompt_logprobs": of_prompt,
        "top_logprobs": tables, "sampling": fault.sampling,
    }  # fmt: skip


# --- Changes of weights ---------------------------------------------------------------------------


def _linears(model: Any) -> list[nn.Linear]:
    return [
        one
        for path, one in model.named_modules()
        if isinstance(one, nn.Linear) and "lm_head" not in path
    ]


def _all_weights(rounding: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Any], None]:
    def change(model: Any) -> None:
        for one in _linears(model):
            one.weight.copy_(rounding(one.weight))

    return change


def _every_parameter(rounding: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Any], None]:
    def change(model: Any) -> None:
        for one in model.parameters():
            one.copy_(rounding(one))

    return change


def _to(dtype: torch.dtype) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda one: one.to(dtype).to(one.dtype)


def _cut(one: torch.Tensor) -> torch.Tensor:
    """The upper 16 bits of float32, as a bfloat16 that is cut off in place of rounded."""
    return (one.view(torch.int32) & -65536).view(torch.float32)


def _int8(size: int) -> Callable[[torch.Tensor], torch.Tensor]:
    def rounded(one: torch.Tensor) -> torch.Tensor:
        groups = one.unflatten(-1, (-1, size))
        scale = groups.abs().amax(-1, keepdim=True) / 127
        return ((groups / scale).round() * scale).reshape(one.shape)

    return rounded


def _scaled(path: str, factor: float) -> Callable[[Any], None]:
    return lambda model: model.get_submodule(path).weight.mul_(factor)


def _permuted(path: str, order: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Any], None]:
    def change(model: Any) -> None:
        one = model.get_submodule(path).weight
        one.copy_(order(one.clone()))

    return change


def _both(*changes: Callable[[Any], None]) -> Callable[[Any], None]:
    def change(model: Any) -> None:
        for one in changes:
            one(model)

    return change


def _in_all_layers(change: Callable[[Any], None]) -> Callable[[Any], None]:
    def all_of(model: Any) -> None:
        for layer in model.model.layers:
            change(layer)

    return all_of


def _interleaved(layer: Any) -> None:
    """Halves of each head's channels taken for neighbours, as in the format of GPT-J."""
    size = layer.self_attn.head_dim
    for name in ("q_proj", "k_proj"):
        one = getattr(layer.self_attn, name).weight
        heads = one.clone().unflatten(0, (-1, 2, size // 2))
        one.copy_(heads.transpose(1, 2).reshape(one.shape))


def _swap_heads(one: torch.Tensor) -> torch.Tensor:
    return one.unflatten(0, (2, -1)).flip(0).reshape(one.shape)


def _swap_two_heads(one: torch.Tensor) -> torch.Tensor:
    return one.unflatten(0, (4, -1))[[0, 3, 2, 1]].reshape(one.shape)


def _swap_layers(model: Any) -> None:
    first, second = (copy.deepcopy(one.state_dict()) for one in model.model.layers[:2])
    model.model.layers[0].load_state_dict(second)
    model.model.layers[1].load_state_dict(first)


def _swap_gate(layer: Any) -> None:
    gate, up = layer.mlp.gate_proj.weight, layer.mlp.up_proj.weight
    kept = gate.clone()
    gate.copy_(up)
    up.copy_(kept)


def _swap_norms(layer: Any) -> None:
    first, second = layer.self_attn.q_norm.weight, layer.self_attn.k_norm.weight
    kept = first.clone()
    first.copy_(second)
    second.copy_(kept)


def _no_qk_norms(layer: Any) -> None:
    layer.self_attn.q_norm = layer.self_attn.k_norm = nn.Identity()


def _unit_qk_norms(layer: Any) -> None:
    layer.self_attn.q_norm.weight.fill_(1.0)
    layer.self_attn.k_norm.weight.fill_(1.0)


def add_adapter(model: Any, scale: float = 1.0) -> None:
    """Merge an adapter of low rank."""
    random = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for one in _linears(model):
            down = torch.randn(RANK, one.in_features, generator=random) / one.in_features**0.5
            up = torch.randn(one.out_features, RANK, generator=random) * 0.3 / RANK**0.5
            one.weight.add_(scale * (up @ down))


def _untie(model: Any) -> None:
    head = torch.randn(model.lm_head.weight.shape, generator=torch.Generator().manual_seed(5))
    model.lm_head.weight = nn.Parameter(head * 0.25)


def _tie(model: Any) -> None:
    model.lm_head.weight.copy_(model.model.embed_tokens.weight)


def _rope(theta: float) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": "default", "rope_theta": theta}}


def _rounded_head(dtype: torch.dtype) -> Callable[[Any], None]:
    def change(model: Any) -> None:
        head = model.lm_head
        own = head.weight.to(dtype)
        head.forward = lambda x: nn.functional.linear(x.to(dtype), own).float()

    return change


_Q0, _GATE = "model.layers.0.self_attn.q_proj", "model.layers.1.mlp.gate_proj"
_IMPOSSIBLE = ""  # nothing in the reference tells what it was

KNOWN = [
    Fault("epsilon of norms 1e-3", r"rms_norm_eps is 0\.001\b", settings={"rms_norm_eps": 1e-3}),
    Fault("a projection times 1.02", r"layers\.0\.self_attn\.o_proj .*1\.02\b",
          change=_scaled("model.layers.0.self_attn.o_proj", 1.02)),
    Fault("int8 in groups of 64", r"int8 in groups of 64", "qwen2", wide=True,
          change=_all_weights(_int8(64))),
    Fault("int8 in groups of 32", r"int8 in groups of 32", change=_all_weights(_int8(32))),
    Fault("head in bfloat16", r"head .*bfloat16", change=_rounded_head(torch.bfloat16)),
    Fault("weights of the head in bfloat16", r"head .*bfloat16",
          change=lambda m: m.lm_head.weight.copy_(_to(torch.bfloat16)(m.lm_head.weight))),
    Fault("rolled embeddings", r"embed.* (shifted|rolled|one)",
          change=_permuted("model.embed_tokens", lambda w: w.roll(1, 0))),
    Fault("untied head", _IMPOSSIBLE, tied=True, change=_untie),
    Fault("tied head", r"head .*embedding", change=_tie),
    Fault("interleaved heads of q and k", r"interleaved",
          change=_in_all_layers(_interleaved)),
    Fault("rope theta 2e5", r"rope_theta is 2e\+05", settings=_rope(2e5)),
    Fault("rope theta 5e5", r"rope_theta is (5e\+05|500000)", settings=_rope(5e5)),
    Fault("adapter merged twice", rf"since {OLDER} is applied (twice|2\b)", adapted=True,
          change=add_adapter),
    Fault("adapter not merged", rf"weights are those of {OLDER}", adapted=True,
          change=lambda m: add_adapter(m, -1.0)),
    Fault("window one longer", r"sliding_window is 17 in place of 16", "mistral",
          settings={"sliding_window": 17}),
    Fault("window one shorter", r"sliding_window is 15 in place of 16", "mistral",
          settings={"sliding_window": 15}),
    Fault("window ignored", r"sliding_window is None|sliding window", "mistral",
          settings={"sliding_window": None}),
    Fault("heads of q swapped", r"layers\.0\.self_attn\.q_proj.* heads 0 and 1",
          change=_permuted(_Q0, _swap_heads)),
    Fault("two of four heads of q swapped", r"layers\.1\.self_attn\.q_proj.* heads 1 and 3",
          wide=True, change=_permuted("model.layers.1.self_attn.q_proj", _swap_two_heads)),
    Fault("heads of v swapped in one layer", r"layers\.1\.self_attn\.v_proj.* heads 0 and 1",
          "qwen2", change=_permuted("model.layers.1.self_attn.v_proj", _swap_heads)),
    Fault("layers swapped", r"layers\.0 and .*layers\.1 .*(swapped|exchanged)",
          change=_swap_layers),
    Fault("gate and up swapped", r"gate_proj and .*up_proj.*(swapped|exchanged)",
          change=_in_all_layers(_swap_gate)),
    Fault("halves of the gate's rows swapped", r"layers\.1\.mlp\.gate_proj.* halves",
          change=_permuted(_GATE, _swap_heads)),
    Fault("q and k norms swapped", r"q_norm and .*k_norm.*(swapped|exchanged)", "qwen3",
          change=_in_all_layers(_swap_norms)),
    Fault("q and k norms left out", r"q_norm and .*k_norm.* left out", "qwen3",
          change=_in_all_layers(_no_qk_norms)),
    Fault("a token appended", r"token 55 is added to the end", prompt=lambda p: [*p, 55]),
    Fault("weights cut to bfloat16", r"weights are cut .*bfloat16", change=_every_parameter(_cut)),
    Fault("weights in bfloat16", r"weights are (stored|rounded) .*bfloat16",
          change=_every_parameter(_to(torch.bfloat16))),
    Fault("temperature ignored in drawing", r"drawn .* temperature", draw=1.0,
          sampling={"temperature": 0.3}, lengths=(9,) * 6, tokens=24),
    Fault("second layer left out", r"model\.layers\.1 is left out",
          change=lambda m: m.model.layers.__delitem__(1)),
    Fault("BOS twice", r"BOS token \(1\) is added in front", prompt=lambda p: [BOS, *p]),
]  # fmt: skip


# --- Held out: written down before the hypotheses, looked at afterwards ---------------------------


def _attention_scale(layer: Any) -> None:
    layer.self_attn.scaling = layer.self_attn.scaling * math.sqrt(2)


def _no_bias(layer: Any) -> None:
    for name in ("q_proj", "k_proj", "v_proj"):
        getattr(layer.self_attn, name).bias.zero_()


def _float16_between_layers(model: Any) -> None:
    for layer in model.model.layers:
        layer.register_forward_hook(lambda _m, _a, out: out.bfloat16().float())


def _noise(model: Any) -> None:
    random = torch.Generator().manual_seed(3)
    for one in model.parameters():
        one.add_(0.01 * one.std() * torch.randn(one.shape, generator=random))


def _swap_experts(model: Any) -> None:
    for layer in model.model.layers:
        for one in layer.mlp.experts.parameters():
            one.copy_(one[[1, 0, *range(2, len(one))]].clone())


def _zero_half(one: torch.Tensor) -> torch.Tensor:
    one[len(one) // 2 :] = 0
    return one


HELD_OUT = [
    Fault("v_proj times 0.97", r"layers\.1\.self_attn\.v_proj .*0\.97\b",
          change=_scaled("model.layers.1.self_attn.v_proj", 0.97)),
    Fault("all down_proj times 1.1", r"down_proj.*1\.1\b",
          change=_both(_scaled("model.layers.0.mlp.down_proj", 1.1),
                       _scaled("model.layers.1.mlp.down_proj", 1.1))),
    Fault("head times 1.3", r"(lm_head.*1\.3\b|temperature of 0\.769)",
          change=_scaled("lm_head", 1.3)),
    Fault("attention 1.41 times too strong", r"attention scores are 1\.414|q_proj",
          change=_in_all_layers(_attention_scale)),
    Fault("final norm without its weight", r"model\.norm",
          change=lambda m: m.model.norm.weight.fill_(1.0)),
    Fault("final norm left out", r"model\.norm",
          change=lambda m: setattr(m.model, "norm", nn.Identity())),
    Fault("biases left out", r"bias", "qwen2", change=_in_all_layers(_no_bias)),
    Fault("weights of q and k norms left out", r"q_norm", "qwen3",
          change=_in_all_layers(_unit_qk_norms)),
    Fault("columns of o_proj in swapped halves", r"layers\.0\.self_attn\.o_proj",
          change=_permuted("model.layers.0.self_attn.o_proj",
                           lambda w: w.unflatten(1, (2, -1)).flip(1).reshape(w.shape))),
    Fault("a row of the embeddings is zero", _IMPOSSIBLE,
          change=lambda m: m.model.embed_tokens.weight[20:40].zero_()),
    Fault("half of a projection is zero", r"layers\.0\.mlp\.up_proj",
          change=_permuted("model.layers.0.mlp.up_proj", _zero_half)),
    Fault("weights in float16", r"weights are (stored|rounded) .*float16",
          change=_every_parameter(_to(torch.float16))),
    Fault("projections in bfloat16, the rest in float32", r"bfloat16",
          change=_all_weights(_to(torch.bfloat16))),
    Fault("weights in float8 (e5m2)", r"e5m2", change=_all_weights(_to(torch.float8_e5m2))),
    Fault("int8 in groups of 16", r"int8 in groups of 16", change=_all_weights(_int8(16))),
    Fault("a token inserted after BOS", r"token 44 is (added|inserted)",
          prompt=lambda p: [p[0], 44, *p[1:]]),
    Fault("two tokens appended", r"tokens? 55.* 66|55, 66", prompt=lambda p: [*p, 55, 66]),
    Fault("prompt's middle token dropped", _IMPOSSIBLE,
          prompt=lambda p: [*p[: len(p) // 2], *p[len(p) // 2 + 1 :]]),
    Fault("temperature applied twice in drawing", r"drawn .* temperature", draw=0.25,
          sampling={"temperature": 0.5}, lengths=(9,) * 12, tokens=32),
    Fault("greedy in place of drawn", r"drawn .* temperature|best token", draw=0.0,
          sampling={"temperature": 1.0}, lengths=(9,) * 3, tokens=16),
    Fault("gelu for silu", r"hidden_act is gelu", settings={"hidden_act": "gelu"}),
    Fault("first layer run twice", r"layers\.1 has the weights of .*layers\.0",
          change=lambda m: m.model.layers[1].load_state_dict(m.model.layers[0].state_dict())),
    Fault("window of half the size", r"sliding_window is 8 in place of 16", "mistral",
          settings={"sliding_window": 8}),
    Fault("rows of the head rolled", r"lm_head",
          change=_permuted("lm_head", lambda w: w.roll(1, 0))),
    Fault("one percent of noise in all weights", _IMPOSSIBLE, change=_noise),
    Fault("hidden states in bfloat16 between layers", _IMPOSSIBLE,
          change=_float16_between_layers),
    Fault("adapter with half its weight", rf"since {OLDER} is applied 0\.5\b", adapted=True,
          change=lambda m: add_adapter(m, -0.5)),
    Fault("q_proj transposed", r"layers\.0\.self_attn\.q_proj.* transposed",
          change=_permuted(_Q0, lambda w: w.T.clone())),
    Fault("experts swapped", r"expert", "qwen3 moe", change=_swap_experts),
    Fault("rope theta 1.2e4", r"rope_theta is 1\.2e\+04", settings=_rope(1.2e4)),
    Fault("epsilon of norms 1e-2", r"rms_norm_eps is 0\.01\b", "qwen3",
          settings={"rms_norm_eps": 1e-2}),
]  # fmt: skip


# --- Counting -------------------------------------------------------------------------------------


def grade(fault: Fault, report: Any) -> str:
    """Whether the causes are right, false, misleading or missing; `not detected` for a pass.

    A cause names all changes that give the same numbers; the right one must be among them.
    """
    if report.exit_code == 0:
        return "not detected"

    def is_right(cause: Any) -> bool:
        texts = (cause.text, *cause.also)
        return bool(fault.right) and any(re.search(fault.right, one) for one in texts)

    if not all(is_right(one) for one in report.causes if one.to_rounding):
        return "false"
    if not report.causes:
        return "missing"
    return "right" if all(map(is_right, report.causes)) else "misleading"

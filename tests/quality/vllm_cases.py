"""What is served by vLLM: small random checkpoints, right configurations, and faulty ones.

A case is data, so that one process can serve many of them (`vllm_serving`) while others judge.
"""

from __future__ import annotations

import copy
import dataclasses
import hashlib
import json
import math
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

BOS, OTHER_BOS = 1, 2
TOKENS = 10
RANK = 8
SMALL = {
    "vocab_size": 97, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32,
    "max_position_embeddings": 256, "tie_word_embeddings": False,
    "bos_token_id": BOS, "eos_token_id": OTHER_BOS, "pad_token_id": 0,
}  # fmt: skip
LINEAR = {"rope_type": "linear", "rope_theta": 5e5, "factor": 4.0}
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0, "original_max_position_embeddings": 64,
}  # fmt: skip
YARN = {
    "rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64,
}  # fmt: skip
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
# Class of transformers and settings, by name.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", {}),
    "llama, linear rope": ("LlamaForCausalLM", {"rope_parameters": LINEAR}),
    "llama, scaled rope": ("LlamaForCausalLM", {"rope_parameters": LLAMA3}),
    "qwen2": ("Qwen2ForCausalLM", {"num_key_value_heads": 2}),
    "qwen3": ("Qwen3ForCausalLM", {}),
    "qwen3, yarn": ("Qwen3ForCausalLM", {"rope_parameters": YARN}),
    "mistral": ("MistralForCausalLM", {"sliding_window": 16}),
    "gemma2": ("Gemma2ForCausalLM", {
        "sliding_window": 16, "query_pre_attn_scalar": 32, "final_logit_softcapping": 3.0,
        "tie_word_embeddings": True,
    }),
    "qwen3 moe": ("Qwen3MoeForCausalLM", {**EXPERTS, "norm_topk_prob": True}),
    "mixtral": ("MixtralForCausalLM", {"num_local_experts": 4, "sliding_window": None}),
    "olmo2": ("Olmo2ForCausalLM", {}),
    "granite": ("GraniteForCausalLM", {"logits_scaling": 2.0, "embedding_multiplier": 3.0}),
    "phi3": ("Phi3ForCausalLM", {}),
    "starcoder2": ("Starcoder2ForCausalLM", {}),
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Case:
    """A configuration of the engine, and some requests to it.

    Attributes:
        name: for reports.
        model: one of `MODELS`.
        dtype: of the reference and, unless `engine` says otherwise, of the engine.
        engine: arguments of `vllm.LLM`. With `enable_lora`, the reference has an adapter merged.
        sampling: the sampling parameters.
        mode: what the log probabilities are said to be.
        lengths: of the prompts. Those of 40 tokens and more begin with the same 36.
        prompt_logprobs: whether those of the prompt are asked for; vLLM then reads no prefix cache.
        fault: what is done wrong besides; empty for nothing.
        kind: the cause that must be named; empty for a right configuration, or if none is known.
        draw: which prompts are drawn.
    """

    name: str
    model: str = "llama"
    dtype: str = "bfloat16"
    seed: int = 0
    engine: dict[str, Any] = dataclasses.field(default_factory=dict)
    sampling: dict[str, Any] = dataclasses.field(default_factory=lambda: {"temperature": 0.8})
    mode: str = "raw"
    lengths: tuple[int, ...] = (9, 23, 41)
    prompt_logprobs: bool = True
    fault: str = ""
    kind: str = ""
    draw: int = 0

    @property
    def prompts(self) -> list[list[int]]:
        """Token ids, the first of which is BOS."""
        random = torch.Generator().manual_seed(1000 * self.seed + self.draw)
        size = SMALL["vocab_size"]
        shared = torch.randint(3, size, (36,), generator=random).tolist()
        found = []
        for length in self.lengths:
            own = torch.randint(3, size, (length,), generator=random).tolist()
            found.append([BOS, *shared, *own[:-37]] if length >= 40 else [BOS, *own[:-1]])
        return found

    @property
    def has_adapter(self) -> bool:
        """Whether the model that should be served is a base with an adapter."""
        return bool(self.engine.get("enable_lora"))

    @property
    def older_seed(self) -> int:
        """The seed of the weights before the last update."""
        return self.seed + 1000

    @property
    def file(self) -> str:
        """The name of its file of records: another one for every other case."""
        return hashlib.sha256(repr(self).encode()).hexdigest()[:16]


PROCESSED = {"logprobs_mode": "processed_logprobs"}
MIXED = {"temperature": 0.7, "top_k": 8}
PLAIN = {"rope_type": "default", "rope_theta": 5e5}
SERVED_ALONE = {"max_num_seqs": 1, "enable_prefix_caching": True, "block_size": 32}
# For CPUs, vLLM 0.32 has no log probabilities of prompts beside adapters: it raises.
ADAPTED = {"enable_lora": True, "max_lora_rank": 8}
# It stands for a checkpoint with older weights, which the folder of a run has.
DRAFT = "older weights"
BY_NGRAMS = {
    "speculative_config": {
        "method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3,
        "prompt_lookup_min": 1,
    },
}  # fmt: skip
BY_DRAFTS = {
    "speculative_config": {"method": "draft_model", "model": DRAFT, "num_speculative_tokens": 3}
}

FAULTS = [
    Case("temperature applied", engine=PROCESSED, kind="temperature"),
    Case("normalised over the nucleus", "qwen2", engine=PROCESSED,
         sampling={"top_p": 0.8}, kind="truncation"),
    Case("normalised over the best eight", "qwen3", engine=PROCESSED,
         sampling={"top_k": 8}, kind="truncation"),
    Case("processed", engine=PROCESSED, sampling=MIXED, kind="normalisation"),
    Case("raw", "qwen2", sampling=MIXED, mode="processed", kind="normalisation"),
    Case("logits returned", engine={"logprobs_mode": "raw_logits"}, kind="normalisation"),
    Case("penalties applied", "qwen3", engine=PROCESSED,
         sampling={"repetition_penalty": 1.3}, kind="penalties"),
    Case("shifted by one", fault="shifted by one", kind="shift"),
    Case("BOS added twice", fault="BOS added twice", kind="prompt"),
    Case("BOS left out", "qwen2", fault="BOS left out", kind="prompt"),
    Case("another BOS", fault="another BOS", kind="prompt"),
    Case("rope base of another model", "llama, linear rope", kind="positions",
         engine={"hf_overrides": {"rope_parameters": {**LINEAR, "rope_theta": 1e4}}}),
    Case("rope scaling ignored", "llama, linear rope", kind="positions",
         engine={"hf_overrides": {"rope_parameters": PLAIN}}),
    Case("rope scaling of Llama 3 ignored", "llama, scaled rope", kind="positions",
         engine={"hf_overrides": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}}),
    Case("positions of decoding one too far", fault="positions of decoding one too far",
         kind="positions", engine={"max_num_seqs": 1}),
    Case("sliding window ignored", "mistral", kind="settings",
         engine={"hf_overrides": {"sliding_window": None}}),
    Case("cap of logits ignored", "gemma2", kind="settings",
         engine={"hf_overrides": {"final_logit_softcapping": None}}),
    Case("weights of experts not normalised", "qwen3 moe", kind="settings",
         engine={"hf_overrides": {"norm_topk_prob": False}}),
    Case("stale weights", fault="stale weights", kind="stale weights"),
    Case("one stale layer", "qwen3", fault="one stale layer", kind="stale weights"),
    Case("prefix cache outlives the weights", fault="prefix cache outlives the weights",
         engine=SERVED_ALONE, lengths=(41, 45, 50), prompt_logprobs=False, kind="stale weights"),
    Case("adapter not applied", fault="adapter not applied", engine=ADAPTED,
         prompt_logprobs=False, kind="stale weights"),
    Case("adapter updated under the same id", "qwen2", fault="adapter updated under the same id",
         engine=ADAPTED, prompt_logprobs=False, kind="stale weights"),
    Case("prefix cache outlives the adapter", fault="prefix cache outlives the adapter",
         engine=SERVED_ALONE | ADAPTED, lengths=(41, 45, 50), prompt_logprobs=False,
         kind="stale weights"),
    Case("drafts not verified", fault="drafts not verified", engine=BY_DRAFTS,
         sampling={"temperature": 0}, kind="sampling"),
    Case("prefix of another request", "qwen2", fault="prefix of another request",
         engine=SERVED_ALONE, lengths=(38, 39, 37), prompt_logprobs=False, kind="cache"),
    Case("cache in float8", "qwen3", fault="cache in float8", lengths=(23, 41, 60),
         kind="quantised cache"),
    Case("cache in vLLM's float8", "llama", engine={"kv_cache_dtype": "fp8"}, lengths=(23, 41, 60),
         kind="quantised cache"),
    Case("cache in vLLM's float8 (e5m2)", "qwen2", engine={"kv_cache_dtype": "fp8_e5m2"},
         lengths=(23, 41, 60), kind="quantised cache"),
    Case("weights in int8", dtype="float32", fault="weights in int8", kind="quantised weights"),
    Case("weights in int4", "qwen2", fault="weights in int4", kind="quantised weights"),
    Case("products in int8", "qwen3", fault="products in int8", kind="quantised weights"),
    # Its rounding is not the reference's: no run gives it one by one.
    Case("a coarser dtype", dtype="float32", engine={"dtype": "bfloat16"}, kind=""),
]  # fmt: skip


def can_be_served(case: Case) -> bool:
    """Whether vLLM can do it on this processor: its caches in float8 need AVX-512."""
    if "kv_cache_dtype" not in case.engine:
        return True
    return "avx512" in Path("/proc/cpuinfo").read_text()


# --- Right configurations -------------------------------------------------------------------------

ENGINES: list[dict[str, Any]] = [
    {},
    {"enable_prefix_caching": False},
    {"enable_chunked_prefill": True, "max_num_batched_tokens": 32, "block_size": 32},
    SERVED_ALONE,
    BY_NGRAMS,
    BY_DRAFTS,
]
SAMPLINGS: dict[str, list[dict[str, Any]]] = {
    "raw": [{"temperature": 0}, {"temperature": 0.8}, {"temperature": 1.0, "top_k": 10}],
    "processed": [
        {"temperature": 0.9, "top_p": 0.9},
        {"temperature": 0.7, "top_k": 12, "min_p": 0.02, "repetition_penalty": 1.2},
        {"temperature": 0.6, "frequency_penalty": 0.5, "presence_penalty": 0.3},
    ],
}
LENGTHS = [(9, 23, 41), (33, 45, 62), (12, 40, 71)]


def right_cases(count: int, dtype: str = "bfloat16") -> list[Case]:
    """Right configurations: models, settings of the engine, parameters and prompts in turn.

    Three at a time are served by one engine.
    """
    found = []
    for number in range(count):
        group, place = divmod(number, 3)
        turn = group // len(MODELS)
        model = list(MODELS)[group % len(MODELS)]
        engine = dict(ENGINES[(group + 2 * turn) % len(ENGINES)])
        mode = "processed" if (group // 2 + turn) % 2 else "raw"
        if mode == "processed":
            engine |= PROCESSED
        sampling = SAMPLINGS[mode][place]
        if "speculative_config" in engine:
            # For CPUs, vLLM 0.32 samples beside drafts with a temperature, top_k and top_p from
            # memory that nobody wrote.
            sampling = {"temperature": 0}
        case = Case(
            f"{number}: {model}, {engine}, {sampling}", model, dtype,
            seed=turn, engine=engine, sampling=sampling, mode=mode, draw=number,
            lengths=LENGTHS[(number + group) % 3],
            prompt_logprobs=not engine.get("enable_prefix_caching"),
        )  # fmt: skip
        found.append(case)
    return found


# Adapters that are served beside their base, while the reference has them merged.
ADAPTERS = [
    Case(
        f"adapter of {model}, {sampling}",
        model,
        engine=ADAPTED,
        sampling=sampling,
        prompt_logprobs=False,
    )
    for model in ("llama", "qwen2", "mistral")
    for sampling in SAMPLINGS["raw"]
]


# --- Records --------------------------------------------------------------------------------------


def serve(folder: Path, cases: list[Case], *, check: bool = True) -> None:
    """Let vLLM serve cases in a process of its own; those that the folder has already are not."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "cases").write_bytes(pickle.dumps(cases))
    program = Path(__file__).with_name("vllm_serving.py")
    subprocess.run([sys.executable, program, folder / "cases", folder], check=check)


def records(folder: Path, case: Case) -> list[Any]:
    """What vLLM returned for a case.

    Raises:
        RuntimeError: it was not served; the message says why.
    """
    made = folder / "records" / f"{case.file}.pickle"
    if made.exists():
        return list(pickle.loads(made.read_bytes()))
    error = made.with_suffix(".error")
    raise RuntimeError(error.read_text() if error.exists() else "not served")


# --- Checkpoints ----------------------------------------------------------------------------------


def new_model(name: str, seed: int, **more: Any) -> Any:
    """A model with random weights, in float32; its attention depends on places and tokens."""
    import transformers

    kind, settings = MODELS[name]
    cls = getattr(transformers, kind)
    model = cls(cls.config_class(**{**SMALL, **settings, **more})).eval()
    random = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for path, weight in model.named_parameters():
            values = torch.randn(weight.shape, generator=random)
            if weight.dim() == 1:
                is_norm = "norm" in path and path.endswith("weight")
                # Norms of Gemma are stored as the distance from 1.
                base = 0.0 if "gemma" in name or not is_norm else 1.0
                weight.copy_(base + 0.2 * values)
                continue
            wide = 2.0 if any(one in path for one in ("q_proj", "k_proj", "lm_head")) else 1.0
            fan = 1 if "embed_tokens" in path else weight.shape[-1]
            weight.copy_(values * wide / math.sqrt(fan))
        if "gemma" in name:  # its embeddings are multiplied by the root of its width
            model.get_input_embeddings().weight.div_(8)
    return model


def saved(folder: Path, name: str, seed: int, dtype: str, change: str = "") -> Path:
    """The folder of a checkpoint, which is written if it is missing."""
    path = folder / f"{name}-{seed}-{dtype}-{change}".replace(" ", "_").replace(",", "")
    if not path.exists():
        model = new_model(name, seed).to(getattr(torch, dtype))
        if change == "one stale layer":
            old = new_model(name, seed + 1000).to(getattr(torch, dtype))
            model.model.layers[1].load_state_dict(old.model.layers[1].state_dict())
        if change.startswith("weights in int"):
            _round_weights(model, int(change[-1]))
        if change == "products in int8":
            _quantise_for_engine(model)
        if change.startswith("adapter"):
            _merge_adapter(model, int(change.partition(" ")[2]))
        model.save_pretrained(path)
    return path


def _round_weights(model: Any, bits: int) -> None:
    """Round the weights of linear layers, without the head, to integers with a scale a row."""
    largest = 2 ** (bits - 1) - 1
    with torch.no_grad():
        for path, one in model.named_modules():
            if isinstance(one, torch.nn.Linear) and "lm_head" not in path:
                wide = one.weight.float()
                groups = wide.unflatten(-1, (-1, 32)) if bits == 4 else wide
                scale = groups.abs().amax(-1, keepdim=True) / largest
                rounded = (groups / scale).round().clamp(-largest - 1, largest) * scale
                one.weight.copy_(rounded.reshape(wide.shape).to(one.weight.dtype))


def _quantise_for_engine(model: Any) -> None:
    """Store int8 with a scale a row, as compressed-tensors does; inputs are quantised by token."""
    numbers = {"num_bits": 8, "type": "int", "symmetric": True}
    weights = {**numbers, "strategy": "channel", "dynamic": False}
    inputs = {**numbers, "strategy": "token", "dynamic": True}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    model.config.quantization_config = {
        "quant_method": "compressed-tensors", "format": "int-quantized",
        "config_groups": {"group_0": group}, "ignore": ["lm_head"],
    }  # fmt: skip
    for path, one in model.named_modules():
        if isinstance(one, torch.nn.Linear) and "lm_head" not in path:
            wide = one.weight.detach().float()
            scale = wide.abs().amax(-1, keepdim=True) / 127
            rounded = (wide / scale).round().clamp(-127, 127).to(torch.int8)
            one.weight = torch.nn.Parameter(rounded, requires_grad=False)
            one.register_buffer("weight_scale", scale)


def _adapter(model: Any, seed: int) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """The two factors of each layer's adapter, by the path of the layer."""
    random = torch.Generator().manual_seed(seed + 7)
    found = {}
    for path, one in model.named_modules():
        if isinstance(one, torch.nn.Linear) and "lm_head" not in path:
            down = torch.randn(RANK, one.in_features, generator=random) / one.in_features**0.5
            up = torch.randn(one.out_features, RANK, generator=random) * 0.3 / RANK**0.5
            found[path] = down, up
    return found


def _merge_adapter(model: Any, seed: int) -> None:
    with torch.no_grad():
        for path, pair in _adapter(model, seed).items():
            weight = model.get_submodule(path).weight
            down, up = (one.to(weight.dtype).double() for one in pair)
            weight.copy_(weight.double() + up @ down)


def saved_adapter(folder: Path, case: Case, seed: int) -> Path:
    """The folder of an adapter of the case's base, as PEFT writes it."""
    from safetensors.torch import save_file

    path = folder / f"adapter-{case.model}-{case.seed}-{seed}-{case.dtype}".replace(" ", "_")
    if not path.exists():
        pairs = _adapter(new_model(case.model, case.seed), seed)
        path.mkdir()
        weights = {
            f"base_model.model.{layer}.lora_{letter}.weight": one.to(getattr(torch, case.dtype))
            for layer, pair in pairs.items()
            for letter, one in zip("AB", pair, strict=True)
        }
        save_file(weights, path / "adapter_model.safetensors")
        names = sorted({layer.rpartition(".")[2] for layer in pairs})
        about = {
            "peft_type": "LORA", "task_type": "CAUSAL_LM", "bias": "none", "r": RANK,
            "lora_alpha": RANK, "target_modules": names,
        }  # fmt: skip
        (path / "adapter_config.json").write_text(json.dumps(about))
    return path


def reference(folder: Path, case: Case, *, older: bool = False) -> Any:
    """The model that should be served, or the one before the last update."""
    import transformers

    seed = case.older_seed if older else case.seed
    path = saved(folder, case.model, seed, case.dtype)
    if case.has_adapter:  # the adapter is updated, its base is not
        path = saved(folder, case.model, case.seed, case.dtype, f"adapter {seed}")
    if case.fault == "adapter not applied" and older:
        path = saved(folder, case.model, case.seed, case.dtype)
    cls = getattr(transformers, MODELS[case.model][0])
    return cls.from_pretrained(path, dtype=getattr(torch, case.dtype)).eval()


def served_checkpoint(folder: Path, case: Case) -> Path:
    """What the engine loads."""
    if case.fault == "stale weights":
        return saved(folder, case.model, case.older_seed, case.dtype)
    if case.fault.startswith(("one stale layer", "weights in int", "products in int")):
        return saved(folder, case.model, case.seed, case.dtype, case.fault)
    if case.fault == "prefix cache outlives the weights":
        saved(folder, case.model, case.seed, case.dtype)  # what it is updated to
        return saved(folder, case.model, case.older_seed, case.dtype)
    return saved(folder, case.model, case.seed, case.dtype)


def sent(case: Case) -> list[list[int]]:
    """The prompts as the engine gets them."""
    prompts = copy.deepcopy(case.prompts)
    if case.fault == "BOS added twice":
        return [[BOS, *one] for one in prompts]
    if case.fault == "BOS left out":
        return [one[1:] for one in prompts]
    if case.fault == "another BOS":
        return [[OTHER_BOS, *one[1:]] for one in prompts]
    return prompts


def older_weights(folder: Path, case: Case) -> dict[str, Any]:
    """Earlier weights, for the faults that are about them."""
    if case.kind != "stale weights":
        return {}
    return {"step 100": reference(folder, case, older=True)}

"""Serve cases by vLLM and write the records: a program of its own, for `make test-engines`.

    python vllm_serving.py CASES.pickle FOLDER

vLLM changes torch and the environment of its process, and is noisy; tests read what it returned
from FOLDER/records.
"""

from __future__ import annotations

import gc
import importlib
import os
import pickle
import platform
import shutil
import sys
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any

os.environ.update(
    HF_HUB_OFFLINE="1",
    OMP_NUM_THREADS="1",
    VLLM_CPU_KVCACHE_SPACE="1",
    VLLM_CPU_OMP_THREADS_BIND="nobind",
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    VLLM_NO_USAGE_STATS="1",
    VLLM_LOGGING_LEVEL="ERROR",
)
sys.path.insert(0, str(Path(__file__).parent.parent))

import msgspec
import torch
import vllm
from vllm import _custom_ops
from vllm.lora.request import LoRARequest
from vllm.model_executor.models import registry
from vllm.v1.core import kv_cache_utils
from vllm.v1.sample import rejection_sampler

from paritas.engines.records import EngineRecord, read_records
from quality.vllm_cases import (
    BOS,
    DRAFT,
    TOKENS,
    Case,
    saved,
    saved_adapter,
    sent,
    served_checkpoint,
)

if TYPE_CHECKING:
    from collections.abc import Callable

# Most of what the process of each engine would import again.
for name in ("vllm.entrypoints.llm", "vllm.v1.engine.core_client", "vllm.v1.worker.cpu_worker"):
    importlib.import_module(name)

# A class of model that is new to vLLM is looked at in a process of its own, which imports it all.
registry._run_in_subprocess = lambda look: look()


def start(folder: Path, case: Case) -> Any:
    """An engine in this process."""
    given: dict[str, Any] = {
        "model": str(served_checkpoint(folder, case)),
        "dtype": case.dtype,
        "seed": case.seed,
        "skip_tokenizer_init": True,
        "enforce_eager": True,
        "max_model_len": 256,
        "num_gpu_blocks_override": 64,
        "disable_log_stats": True,
        **case.engine,
    }
    drafts = given.get("speculative_config", {})
    if drafts.get("model") == DRAFT:
        older = str(saved(folder, case.model, case.older_seed, case.dtype))
        given["speculative_config"] = {**drafts, "model": older}
    if given["dtype"] == "bfloat16" and not can_bfloat16():
        given["compilation_config"] = {"custom_ops": ["none", *(f"-{one}" for one in GELUS)]}
        WideAttention().install()
    return vllm.LLM(**given)


def answers(llm: Any, case: Case, adapter: Any = None) -> list[dict[str, Any]]:
    """What it returns for the prompts of a case, with the request."""
    params = vllm.SamplingParams(
        max_tokens=TOKENS, ignore_eos=True, detokenize=False, logprobs=5,
        prompt_logprobs=0 if case.prompt_logprobs else None, **case.sampling,
    )  # fmt: skip
    given: list[Any] = [{"prompt_token_ids": ids} for ids in sent(case)]
    found = llm.generate(given, params, use_tqdm=False, lora_request=adapter)
    return [{"request": params, "response": one, "logprobs_mode": case.mode} for one in found]


def records(llm: Any, case: Case, folder: Path) -> list[EngineRecord]:
    """The records of a case, as its trainer would write them."""
    if case.fault == "prefix cache outlives the weights":
        answers(llm, case)
        new = saved(folder, case.model, case.seed, case.dtype)
        llm.collective_rpc("reload_weights", kwargs={"weights_path": str(new)})
    if case.fault in BROKEN:
        BROKEN[case.fault](llm)
    adapter = updated_adapter(llm, case, folder) if case.has_adapter else None
    found = read_records(answers(llm, case, adapter), None)
    return [_as_written(one, case, prompt) for one, prompt in zip(found, case.prompts, strict=True)]


def updated_adapter(llm: Any, case: Case, folder: Path) -> LoRARequest | None:
    """The adapter that the requests ask for, after what was served before."""
    if case.fault == "adapter not applied":
        return None
    new, old = (saved_adapter(folder, case, one) for one in (case.seed, case.older_seed))
    if case.fault == "adapter updated under the same id":
        answers(llm, case, LoRARequest("adapter", 1, str(old)))
    if case.fault == "prefix cache outlives the adapter":  # which is loaded again from its folder
        latest = folder / "latest adapter"
        shutil.copytree(old, latest, dirs_exist_ok=True)
        answers(llm, case, LoRARequest("adapter", 1, str(latest)))
        shutil.copytree(new, latest, dirs_exist_ok=True)
        return LoRARequest("adapter", 1, str(latest), load_inplace=True)
    return LoRARequest("adapter", 1, str(new))


def _as_written(record: EngineRecord, case: Case, prompt: list[int]) -> EngineRecord:
    if case.fault == "shifted by one":
        moved = (*record.logprobs[1:], None)
        return msgspec.structs.replace(record, logprobs=moved, top_logprobs=(), prompt_logprobs=())
    if tuple(prompt) != record.prompt:  # a trainer that knows the prompt that it meant
        return msgspec.structs.replace(record, prompt=tuple(prompt), prompt_logprobs=())
    return record


# --- Processors without bfloat16 ------------------------------------------------------------------

# On Arm, vLLM takes its own kernels for these even where it is told to take none.
GELUS = ("gelu", "gelu_tanh", "gelu_and_mul")


def can_bfloat16() -> bool:
    """Whether vLLM's kernels for bfloat16 run here; on an Arm processor without it they crash."""
    if platform.machine() != "aarch64":
        return True
    return " bf16" in Path("/proc/cpuinfo").read_text()


class WideAttention:
    """vLLM's attention on bfloat16 values, by its kernels for float32.

    Tokens are written to caches of float32, with the values of bfloat16, in the places that vLLM
    chooses; the result is rounded. Norms, rotations and activations are left to torch.
    """

    def __init__(self) -> None:
        self.caches: dict[tuple[int, Any], Any] = {}
        self.plan = _custom_ops.cpu_attn_get_scheduler_metadata
        self.write = _custom_ops.cpu_attn_reshape_and_cache
        self.attend = _custom_ops.cpu_attention_with_kv_cache

    def install(self) -> None:
        """Take the place of vLLM's functions, once."""
        if isinstance(getattr(self.write, "__self__", None), WideAttention):
            return
        _custom_ops.cpu_attn_get_scheduler_metadata = self.planned
        _custom_ops.cpu_attn_reshape_and_cache = self.written
        _custom_ops.cpu_attention_with_kv_cache = self.attended

    def wide(self, keys: Any) -> Any:
        """The caches of keys and values that stand for those of a layer."""
        place = keys.data_ptr(), keys.shape
        if place not in self.caches:
            blocks, heads, size, width = keys.shape
            self.caches[place] = torch.zeros(blocks, heads, 2 * size, width).chunk(2, dim=2)
        return self.caches[place]

    def planned(self, *args: Any, **kwargs: Any) -> Any:
        """How work is shared out."""
        kwargs = {key: _widened(one) for key, one in kwargs.items()}
        return self.plan(*map(_widened, args), **kwargs)

    def written(self, key: Any, value: Any, keys: Any, values: Any, *args: Any, **how: Any) -> None:
        """Tokens are put into the cache."""
        if key.dtype != torch.bfloat16:
            self.write(key, value, keys, values, *args, **how)
        else:
            self.write(key.float(), value.float(), *self.wide(keys), *args, **how)

    def attended(self, **how: Any) -> None:
        """Attention over the cache."""
        output = how["output"]
        if output.dtype != torch.bfloat16:
            self.attend(**how)
            return
        keys, values = self.wide(how["key_cache"])
        found = torch.empty_like(output, dtype=torch.float32)
        how |= {"query": how["query"].float(), "key_cache": keys, "value_cache": values}
        self.attend(**how | {"output": found})
        output.copy_(found)


def _widened(value: Any) -> Any:
    return torch.float32 if value is torch.bfloat16 else value


# --- Faults in the engine's own code --------------------------------------------------------------


def _move_positions(model: Any) -> None:
    """Steps of one token are run one position too far."""
    forward = model.forward

    def moved(input_ids: Any, positions: Any, *args: Any, **kwargs: Any) -> Any:
        far = positions + 1 if positions.numel() == 1 else positions
        return forward(input_ids, far, *args, **kwargs)

    model.forward = moved


def _round_cache() -> None:
    """Tokens are rounded to float8 when they are put into the cache.

    vLLM's own `kv_cache_dtype="fp8"` does so, but not on every processor.
    """
    own = _custom_ops.cpu_attn_reshape_and_cache

    def rounded(key: Any, value: Any, *args: Any, **kwargs: Any) -> None:
        key, value = (one.to(torch.float8_e4m3fn).to(one.dtype) for one in (key, value))
        own(key, value, *args, **kwargs)

    _custom_ops.cpu_attn_reshape_and_cache = rounded


def _hash_without_tokens() -> None:
    """Blocks of a cache are found by their place alone, as if all hashes collided."""
    own = kv_cache_utils.hash_block_tokens

    def colliding(function: Any, parent: Any, tokens: Any, keys: Any = None) -> Any:
        return own(function, parent, [BOS] * len(tokens), keys)

    kv_cache_utils.hash_block_tokens = colliding


def _accept_drafts() -> None:
    """Tokens of the draft model are taken, whatever the model itself would draw."""
    own = rejection_sampler.rejection_sample

    def accepted(drafts: Any, *args: Any, **kwargs: Any) -> Any:
        *before, logits, bonus, sampling = args
        sure = torch.full_like(logits, -torch.inf).scatter(1, drafts[:, None].long(), 0.0)
        return own(drafts, *before, sure, bonus, sampling, **kwargs)

    rejection_sampler.rejection_sample = accepted


BROKEN: dict[str, Callable[[Any], object]] = {
    "positions of decoding one too far": lambda llm: llm.apply_model(_move_positions),
    "drafts not verified": lambda _: _accept_drafts(),
    "cache in float8": lambda _: _round_cache(),
    "prefix of another request": lambda _: _hash_without_tokens(),
}


# --- The program ----------------------------------------------------------------------------------


def serve_group(folder: Path, group: list[Case]) -> None:
    """Serve the cases of one engine."""
    llm = None
    for case in group:
        out = folder / "records" / case.file
        out.with_suffix(".error").unlink(missing_ok=True)
        try:
            llm = llm or start(folder, case)
            found = pickle.dumps(records(llm, case, folder))
            out.with_suffix(".pickle").write_bytes(found)
        except Exception:  # noqa: BLE001  (a case that raises is one case)
            out.with_suffix(".error").write_text(traceback.format_exc())


def serve(folder: Path, cases: list[Case]) -> None:
    """Serve all cases, each engine in a process; a case that fails leaves a file `.error`."""
    (folder / "records").mkdir(exist_ok=True)
    groups: dict[str, list[Case]] = {}
    for case in cases:
        if not (folder / "records" / f"{case.file}.pickle").exists():
            key = f"{served_checkpoint(folder, case)} {case.dtype} {case.engine} {case.fault}"
            groups.setdefault(key, []).append(case)
    gc.freeze()  # vLLM collects garbage often, and what is imported is none
    for group in groups.values():
        child = os.fork()
        if child == 0:
            serve_group(folder, group)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        for case in group if status else ():
            error = f"the engine ended with {os.waitstatus_to_exitcode(status)}"
            (folder / "records" / f"{case.file}.error").write_text(error)


if __name__ == "__main__":
    serve(Path(sys.argv[2]), pickle.loads(Path(sys.argv[1]).read_bytes()))

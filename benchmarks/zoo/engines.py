"""Engines: right ones that must pass, and faulty ones whose fault must be named.

    python -m benchmarks.zoo.engines OUT.jsonl right --limit 100
    python -m benchmarks.zoo.engines OUT.jsonl faults --seeds 0 1 2
    python -m benchmarks.zoo.engines OUT.jsonl summary

The right engines are `generate` of small random models of transformers in bfloat16, with several
caches, attention implementations, batches and sampling parameters, and the simulated engine of
`tests/quality` with several kernels. The faults are those of the simulated engine. Rows that OUT
has already are not run again.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import sys
import time
import warnings
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = os.environ["TRANSFORMERS_OFFLINE"] = "1"
sys.path.insert(0, str(Path(__file__).parent.parent.parent / "tests"))

import torch
from benchmarks.lab.journals import read_rows

import paritas
from quality import test_engines
from quality.served_model import served
from quality.small_engine import SmallEngine

CLASSES = [
    "Llama",
    "Qwen2",
    "Qwen3",
    "Mistral",
    "Gemma2",
    "Gemma3",
    "Mixtral",
    "GPT2",
    "GPTNeoX",
    "OPT",
    "Phi3",
    "Olmo2",
    "Cohere",
    "Granite",
    "StableLm",
    "Starcoder2",
    "Qwen3Moe",
    "Falcon",
    "Bloom",
    "Mamba",
]
SAMPLINGS = [
    {"temperature": 0},
    {"temperature": 0.8},
    {"temperature": 0.9, "top_p": 0.9},
    {"temperature": 1.0, "top_k": 10},
]
# How `generate` is called: its cache, the attention implementation, and padding in front.
WAYS = [
    ("dynamic", "sdpa", 0),
    ("dynamic", "eager", 0),
    ("static", "sdpa", 0),
    ("dynamic", "sdpa", 3),
]
TOKENS = 12


def model_of(name):
    """A small random model in bfloat16."""
    from paritas.core.targets import build_target

    ending = {"GPT2": "LMHeadModel"}.get(name, "ForCausalLM")
    torch.manual_seed(0)
    model, _ = build_target(f"hf:{name}{ending}")
    return model.eval().bfloat16()


def generated(model, way, sampling, seed):
    """What `generate` returns for three prompts in one batch, as records."""
    cache, attention, left = way
    torch.manual_seed(seed)
    if getattr(model, "_supports_sdpa", False) and attention != "sdpa":
        model.set_attn_implementation(attention)
    size = model.config.get_text_config().vocab_size
    prompts = torch.randint(3, size, (3, 9))
    pad = torch.zeros((3, left), dtype=torch.int64)
    ids = torch.cat([pad, prompts], 1)
    mask = torch.cat([pad, torch.ones_like(prompts)], 1)
    model.generation_config = type(model.generation_config)()
    more = {"cache_implementation": cache} if cache == "static" else {}
    if sampling["temperature"]:
        more |= {"do_sample": True, "top_k": 0, **sampling}
    out = model.generate(
        input_ids=ids, attention_mask=mask, max_new_tokens=TOKENS, min_new_tokens=TOKENS,
        pad_token_id=0, return_dict_in_generate=True, output_logits=True, **more,
    )  # fmt: skip
    tables = torch.stack(out.logits, 1).float().log_softmax(-1)
    tokens = out.sequences[:, ids.shape[1] :]
    best = tables.topk(3)
    return [
        {
            "prompt": prompts[row].tolist(),
            "output": tokens[row].tolist(),
            "logprobs": tables[row].gather(1, tokens[row][:, None])[:, 0].tolist(),
            "top_logprobs": [
                dict(zip(i.tolist(), v.tolist(), strict=True))
                for v, i in zip(best.values[row], best.indices[row], strict=True)
            ],
            "sampling": sampling,
        }
        for row in range(3)
    ]


def right(name):
    """The report of one right configuration, by its name."""
    kind, *rest = name.split("/")
    if kind == "simulated":
        seed, kernels, sampling = int(rest[0]), rest[1], SAMPLINGS[int(rest[2])]
        model = served(seed, num_experts=6 if seed % 3 == 2 else 0)
        engine = SmallEngine(model, kernels=kernels, chunk=3 + seed % 5)
        return paritas.check_engine(model, test_engines.returned(engine, sampling, seed=seed))
    model = model_of(kind)
    records = generated(model, WAYS[int(rest[0])], SAMPLINGS[int(rest[1])], 17)
    if getattr(model, "_supports_sdpa", False):
        model.set_attn_implementation("eager" if int(rest[0]) != 1 else "sdpa")
    return paritas.check_engine(model, records)


def right_names():
    """All right configurations, those of transformers and the simulated ones in turn."""
    pairs = [(way, (place + way) % len(SAMPLINGS)) for place, way in enumerate([0, 1, 2, 3])]
    theirs = [
        f"{name}/{way}/{(sampling + number) % len(SAMPLINGS)}"
        for way, sampling in pairs
        for number, name in enumerate(CLASSES)
    ]
    kernels = [one for one in test_engines.KERNELS if one]
    ours = [f"simulated/{seed}/{kernels[seed % len(kernels)]}/{seed % 4}" for seed in range(40)]
    mixed = itertools.zip_longest(theirs, ours)
    return [one for pair in mixed for one in pair if one is not None]


def faults(seeds):
    """All faults with all seeds."""
    return [f"{fault[0]}/{seed}" for seed in seeds for fault in test_engines.FAULTS]


def fault(name):
    """The report about one faulty engine, and the kind that must be named."""
    text, seed = name.split("/")
    _, kind, sampling, settings = next(one for one in test_engines.FAULTS if one[0] == text)
    model, engine, older = test_engines.faulty(text, settings, int(seed))
    top = 0 if text == "shifted by one" else 3
    records = test_engines.returned(engine, sampling, top=top, seed=int(seed))
    return paritas.check_engine(model, records, older=older), kind


def run(what, name):
    """One row."""
    began = time.process_time()
    row = {"what": what, "name": name}
    try:
        report, kind = (right(name), "") if what == "right" else fault(name)
    except Exception as error:  # noqa: BLE001  (a crash is a row)
        return {**row, "error": f"{type(error).__name__}: {str(error)[:200]}"}
    return {**row, **figures(report), "kind": kind, "cpu_s": time.process_time() - began}


def figures(report):
    """What a row keeps of a report."""
    causes = [(one.kind, one.text, one.to_rounding) for one in report.causes]
    worst = [one.native.excess for one in report.verdict.findings if one.native is not None]
    return {
        "status": report.verdict.status.value,
        "named": [one[0] for one in causes if one[2]],
        "causes": causes,
        "worst": max(worst, default=0.0),
    }


def summary(rows):
    """The counts, and what is not as it should be."""
    good = [row for row in rows if row["what"] == "right" and "error" not in row]
    alarms = [row for row in good if row["status"] in ("different", "degraded", "unverified")]
    print(f"right: {len(good)} configurations, {len(alarms)} alarms; worst", end=" ")
    print(f"{max((row['worst'] for row in good if row not in alarms), default=0):.2f} of the limit")
    bad = [row for row in rows if row["what"] == "faults" and "error" not in row]
    found = [row for row in bad if row["status"] in ("different", "degraded")]
    named = [row for row in found if row["named"] and set(row["named"]) == {row["kind"]}]
    print(f"faults: {len(bad)}, found {len(found)}, named {len(named)}")
    for row in rows:
        if "error" in row or row in alarms or (row in bad and row not in named):
            print(" ", row["name"], row.get("error", row.get("status")), row.get("causes", ""))


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("what", choices=["right", "faults", "summary"])
    parser.add_argument("--limit", type=int)
    parser.add_argument("--seeds", type=int, nargs="*", default=[0, 1, 2])
    asked = parser.parse_args()
    warnings.simplefilter("ignore")
    known = read_rows(asked.out)
    if asked.what == "summary":
        summary(known)
        return
    done = {(row["what"], row["name"]) for row in known}
    names = right_names() if asked.what == "right" else faults(asked.seeds)
    for name in names[: asked.limit]:
        if (asked.what, name) not in done:
            with asked.out.open("a") as out:
                out.write(json.dumps(run(asked.what, name)) + "\n")


if __name__ == "__main__":
    main()

"""The zoo by blocks: is each verdict that of the whole, and is a fault found at its block?

    python -m benchmarks.zoo.by_blocks OUT.jsonl --lists transformers timm --limit 120 30
    python -m benchmarks.zoo.by_blocks OUT.jsonl --dtypes float32 bfloat16 --devices cpu cuda \
        --backends aot_eager inductor --jobs 12 --seconds 500
    python -m benchmarks.zoo.by_blocks OUT.jsonl --faults --limit 60 10
    python -m benchmarks.zoo.by_blocks OUT.jsonl --summary --json benchmarks/zoo/by_blocks.json

Each class, dtype, device and backend is a forked process and one row: the compiled model is checked
with gradients as a whole and by blocks. For an alarm of either, `truth.py` measures the compiled
model without any code of paritas. With `--faults`, one block of the candidate gets a fault
(`block_faults.py`) that changes what the block computes, and the row says whether the check by
blocks fails, and at which blocks. Rows are written as they come, so that `--seconds`, a limit for
everything, loses only what is under way; rows that OUT has are not run again.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import copy
import functools
import gc
import importlib
import itertools
import json
import os
import random
import signal
import statistics
import time
import traceback
from pathlib import Path

for _threads in ("OMP_NUM_THREADS", "TORCHINDUCTOR_COMPILE_THREADS"):
    os.environ.setdefault(_threads, "1")  # one thread for each process

import torch  # noqa: E402 - the environment comes first
from benchmarks.lab.journals import read_rows  # noqa: E402
from benchmarks.zoo import run as zoo  # noqa: E402
from benchmarks.zoo.reordered import copy_reordered  # noqa: E402

_PREFIXES = {"transformers": "hf", "timm": "timm", "torchvision": "torchvision"}
# These come first, the others in random order.
_MOST_USED = {
    "transformers": """
    LlamaForCausalLM Qwen2ForCausalLM Qwen3ForCausalLM MistralForCausalLM GemmaForCausalLM
    Gemma2ForCausalLM Gemma3ForCausalLM GPT2LMHeadModel BertModel BertForMaskedLM RobertaModel
    DistilBertModel T5ForConditionalGeneration T5EncoderModel BartForConditionalGeneration
    ViTModel CLIPModel WhisperForConditionalGeneration MixtralForCausalLM Qwen3MoeForCausalLM
    DeepseekV2ForCausalLM DeepseekV3ForCausalLM PhiForCausalLM Phi3ForCausalLM OPTForCausalLM
    FalconForCausalLM BloomForCausalLM MambaForCausalLM Mamba2ForCausalLM GPTNeoXForCausalLM
    GPTJForCausalLM ElectraModel AlbertModel DebertaV2Model XLMRobertaModel Wav2Vec2Model
    HubertModel SwinModel Dinov2Model ConvNextModel SiglipModel BlipModel
    LlavaForConditionalGeneration Qwen2VLForConditionalGeneration GptOssForCausalLM
    OlmoForCausalLM Olmo2ForCausalLM StableLmForCausalLM CohereForCausalLM GraniteForCausalLM
    SmolLM3ForCausalLM MPNetModel LongformerModel BigBirdModel PegasusForConditionalGeneration
    MarianMTModel MBartModel BeitModel DeiTModel SegformerModel DetrModel
    """,
    "timm": """
    resnet18 resnet50 vit_tiny_patch16_224 convnext_atto efficientnet_b0 mobilenetv3_small_050
    swin_tiny_patch4_window7_224 regnety_002 mixer_s32_224 densenet121 deit_tiny_patch16_224
    """,
}
_VERDICTS = ("identical", "equivalent", "unstable", "degraded", "different", "unverified")
_FAILING = ("degraded", "different", "unverified")


# --- One row --------------------------------------------------------------------------------------


class OutOfTimeError(BaseException):
    """A check took too long; no handler of `Exception` on its way must stop it."""


def run_job(job):
    """The row of one job: target, dtype, device, backend, seed, each, faults."""
    from benchmarks.zoo import child

    torch.set_num_threads(1)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    row = dict(job)
    try:
        with limit_time(job["each"]):
            model, args, kwargs = child.prepare({**job, "train": False}, row)
    except child.UnusableError as error:
        return {**row, **error.args[0]}
    except OutOfTimeError:
        return {**row, "stage": "too slow", "reason": "it was not built in time"}
    subject = model.eval(), args, kwargs
    return plant_and_check(job, row, *subject) if job["faults"] else check_both(job, row, *subject)


def check_both(job, row, model, args, kwargs):
    """Add the two verdicts to a row, and the truth if one of them is an alarm."""
    compile_model = functools.partial(make_candidate, job["backend"])
    row["stage"] = "checked"
    for by in ("whole", "blocks"):
        row[by] = check(by, model, compile_model(model), args, kwargs, job["each"])
        gc.collect()
    row["agree"] = agree(row["whole"]["status"], row["blocks"]["status"])
    if {row["whole"]["status"], row["blocks"]["status"]} & {"different", "degraded"}:
        row |= measure_truth(model, args, kwargs, compile_model, job["each"])
    return row


def make_candidate(backend, model):
    """The model compiled by a backend, or one of two copies of it that are not compiled."""
    torch.compiler.reset()
    copies = {"copy": copy.deepcopy, "reordered": copy_reordered}
    return copies[backend](model) if backend in copies else torch.compile(model, backend=backend)


def check(by, reference, candidate, args, kwargs, seconds):
    """The status of a check, what it takes, and enough of it to judge it by hand."""
    import paritas

    torch.manual_seed(0)
    began = time.perf_counter()
    try:
        with limit_time(seconds):
            verdict = paritas.verify(
                paritas.Inputs(args, kwargs), reference, candidate,
                paritas.VerifyConfig(raise_on_mismatch=False), by=by,
            )  # fmt: skip
        checked = describe(verdict)
    except OutOfTimeError:
        where = f"more than {seconds} s"
        checked = {"status": "too slow", "reason": where}
    except paritas.UsageError as error:
        no_blocks = "found no repeated modules" in str(error)
        checked = {"status": "no blocks" if no_blocks else "refused", "reason": str(error)[:400]}
    except Exception:  # noqa: BLE001 - a crash is a part of the row
        checked = {"status": "crashed", "reason": traceback.format_exc()[-1500:]}
    return {**checked, "seconds": round(time.perf_counter() - began, 2)}


def describe(verdict):
    """A verdict as a part of a row."""
    # The pieces of a check by blocks are the graphs of its findings.
    pieces = dict.fromkeys(finding.item.graph.partition(": ")[0] for finding in verdict.findings)
    failing = collections.Counter(
        finding.item.graph.partition(": ")[0] for finding in verdict.failures
    )
    return {
        "status": verdict.status.value, "compared": verdict.coverage.compared,
        "pieces": [piece for piece in pieces if piece], "failing": dict(failing),
        "failures": [[f.path, f.status.value, f.reason[:300]] for f in verdict.failures[:3]],
        "notes": [note[:300] for note in verdict.notes[:6]],
        "skipped": [text[:200] for text in verdict.coverage.skipped[:4]],
    }  # fmt: skip


def agree(whole, blocks):
    """Whether two verdicts say the same; None if one of them is no verdict."""
    if not {whole, blocks} <= set(_VERDICTS):
        return None
    same = {
        "identical": "passes",
        "equivalent": "passes",
        "degraded": "wrong",
        "different": "wrong",
    }
    return same.get(whole, whole) == same.get(blocks, blocks)


def measure_truth(model, args, kwargs, compile_model, seconds):
    """What a measurement without paritas says of the compiled model."""
    from benchmarks.zoo import truth

    try:
        with limit_time(seconds):
            rows = truth.measure(model, args, kwargs, compile_model, gradients=True)
    except (Exception, OutOfTimeError) as error:  # noqa: BLE001 - the row says that there is none
        return {"truth": "unknown", "reason": f"{type(error).__name__}: {error!s:.300}"}
    return {"truth": truth.decide(rows), "worst": rows[:4]}


def plant_and_check(job, row, model, args, kwargs):
    """Add to a row what a check by blocks says of a candidate with a fault in one block."""
    from benchmarks.zoo.block_faults import plant_fault

    candidate = copy.deepcopy(model)
    with limit_time(job["each"]):
        fault = plant_fault(model, candidate, args, kwargs, f"{job['seed']} {job['target']}")
    if fault is None:
        return {**row, "stage": "no fault", "reason": "no fault changes one of its blocks"}
    row |= {"stage": "planted", "fault": fault}
    candidate = make_candidate(job["backend"], candidate)
    row["blocks"] = check("blocks", model, candidate, args, kwargs, job["each"])
    failing = row["blocks"].get("failing", {})
    # A block that is called several times has a piece for each call.
    names = {piece.partition(" (call")[0] for piece in failing}
    row["is_cut"] = fault["block"] in {
        piece.partition(" (call")[0] for piece in row["blocks"].get("pieces", ())
    }
    row["fails"] = row["blocks"]["status"] in _FAILING
    row["at_block"] = fault["block"] in names
    row["elsewhere"] = sorted(names - {fault["block"], ""})
    return row


@contextlib.contextmanager
def limit_time(seconds):
    """Raise `OutOfTimeError` once so many seconds have passed."""

    def stop(*_):
        raise OutOfTimeError

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


# --- All rows -------------------------------------------------------------------------------------


def list_targets(name, limit):
    """The targets of a list: the most used, then the others in random order."""
    prefix = _PREFIXES[name]
    used = [f"{prefix}:{one}" for one in _MOST_USED.get(name, "").split()]
    others = [target for target in zoo.targets(name) if target not in used]
    random.Random(0).shuffle(others)
    return [*used, *others][:limit]


def list_jobs(asked):
    """All jobs that were asked for, the classes of all lists in turn."""
    limits = asked.limit * len(asked.lists) if len(asked.limit) == 1 else asked.limit
    lists = [list_targets(*pair) for pair in zip(asked.lists, limits, strict=True)]
    targets = asked.targets or [
        target for group in itertools.zip_longest(*lists) for target in group if target is not None
    ]
    for target in targets:
        for device, backend, dtype, seed in itertools.product(
            asked.devices, asked.backends, asked.dtypes, asked.seeds
        ):
            yield {
                "target": target, "half": zoo.half(target), "dtype": dtype, "device": device,
                "backend": backend, "seed": seed, "each": asked.each, "faults": asked.faults,
            }  # fmt: skip


def key(row):
    """What a row is the only one of."""
    named = ("target", "dtype", "device", "backend", "seed", "faults")
    return tuple(row[name] for name in named)


def leave_missing(todo, write):
    """The jobs whose library can be imported; each that cannot is one row."""
    missing = {}
    for library, prefix in _PREFIXES.items():
        with contextlib.suppress(StopIteration):
            job = next(job for job in todo if job["target"].startswith(f"{prefix}:"))
            try:
                importlib.import_module(library)
            except Exception as error:  # noqa: BLE001 - libraries fail in many ways
                missing[prefix] = f"{type(error).__name__}: {error!s:.300}"
                write({**job, "stage": "library missing", "reason": missing[prefix]})
    return [job for job in todo if job["target"].partition(":")[0] not in missing]


def main():
    asked = parse_arguments()
    rows = read_rows(asked.out)
    if not asked.summary:
        existing = {key(row) for row in rows}
        todo = [job for job in list_jobs(asked) if key(job) not in existing]
        with asked.out.open("a") as out:

            def write(row):
                rows.append(row)
                out.write(json.dumps(row, default=str) + "\n")
                out.flush()
                print(describe_row(row), flush=True)

            zoo.import_once()
            limits = argparse.Namespace(
                workers=asked.jobs, minutes=asked.seconds / 60, grace=0, gigabytes=asked.gigabytes,
                seconds=3 * asked.each + 60,
            )  # fmt: skip
            zoo.run_all(leave_missing(todo, write), limits, write, run_job)
    table = tally(rows)
    print_tally(table)
    if asked.json:
        asked.json.write_text(json.dumps(table, indent=1) + "\n")


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--lists", nargs="+", default=["transformers", "timm"], choices=_PREFIXES)
    parser.add_argument("--targets", nargs="+", help="these instead of those of the lists")
    parser.add_argument(
        "--limit", nargs="+", type=int, default=[None], help="classes of all lists, or of each"
    )
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--devices", nargs="+", default=["cpu"])
    parser.add_argument(
        "--backends", nargs="+", default=["aot_eager"], help="of torch.compile; copy or reordered"
    )
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--faults", action="store_true", help="plant a fault in one block")
    parser.add_argument("--jobs", type=int, default=1, help="processes at a time")
    parser.add_argument("--seconds", type=float, default=36000, help="in all; what runs is ended")
    parser.add_argument("--each", type=int, default=120, help="seconds for one check")
    parser.add_argument("--gigabytes", type=int, default=12)
    parser.add_argument("--summary", action="store_true")
    parser.add_argument("--json", type=Path, help="where to write the table")
    asked = parser.parse_args()
    if len(asked.limit) not in {1, len(asked.lists)}:
        parser.error("--limit takes one number, or one for each list")
    return asked


# --- The table ------------------------------------------------------------------------------------


def describe_row(row):
    """One line about a row."""
    about = [row["target"], row["dtype"], row["device"], row["backend"], row["stage"]]
    if row["stage"] == "checked":
        ways = ("whole", "blocks")
        about += [f"{by} {row[by]['status']} ({row[by]['seconds']} s)" for by in ways]
        about.append("DISAGREE" if row["agree"] is False else "")
        about.append(f"truth {row['truth']}" if "truth" in row else "")
    if row["stage"] == "planted":
        about += [row["fault"]["kind"], row["fault"]["block"], row["blocks"]["status"]]
        if row["blocks"]["status"] in _VERDICTS:
            about.append("at the block" if row["at_block"] else "NOT AT THE BLOCK")
            about.append("" if row["is_cut"] else "which is not cut")
        about.append(f"ALSO {row['elsewhere']}" if row["elsewhere"] else "")
    return " ".join(filter(None, about))


def tally(rows):
    """One entry for each library, device, backend and dtype; one for planted faults."""
    groups = collections.defaultdict(list)
    for row in rows:
        library = row["target"].partition(":")[0]
        groups[library, row["device"], row["backend"], row["dtype"], row["faults"]].append(row)
    table = []
    for names, group in sorted(groups.items()):
        about = dict(zip(("library", "device", "backend", "dtype"), names, strict=False))
        counts = collections.Counter(row["stage"] for row in group)
        figures = tally_faults(group) if names[-1] else tally_checks(group)
        others = {stage: n for stage, n in counts.items() if stage not in {"checked", "planted"}}
        table.append({**about, "faults": names[-1], **figures, "not_checked": others})
    return table


def tally_checks(group):
    """How the verdicts of both ways go together."""
    checked = [row for row in group if row["stage"] == "checked"]
    pairs = collections.Counter(
        f"{row['whole']['status']} / {row['blocks']['status']}" for row in checked
    )
    both = [row for row in checked if row["agree"] is not None]
    seconds = {
        by: statistics.median(row[by]["seconds"] for row in both) if both else None
        for by in ("whole", "blocks")
    }
    return {
        "classes": len(both), "agree": sum(row["agree"] for row in both),
        "whole_and_blocks": dict(pairs.most_common()), "median_seconds": seconds,
        "with_cut_blocks": sum(set(row["blocks"]["pieces"]) > {"between blocks"} for row in both),
        "disagreements": [
            {
                "target": row["target"], "whole": row["whole"]["status"],
                "blocks": row["blocks"]["status"], "truth": row.get("truth"),
                "first": (row["blocks"]["failures"] or row["whole"]["failures"] or [""])[0],
            }
            for row in both
            if not row["agree"]
        ],
    }  # fmt: skip


def tally_faults(group):
    """How many planted faults were found, and where."""
    planted = [row for row in group if row["stage"] == "planted"]
    judged = [row for row in planted if row["blocks"]["status"] in _VERDICTS]
    cut = [row for row in judged if row["is_cut"]]
    kinds = collections.defaultdict(lambda: [0, 0])
    for row in judged:
        kinds[row["fault"]["kind"]][0] += row["fails"]
        kinds[row["fault"]["kind"]][1] += 1
    return {
        "planted": len(judged), "found": sum(row["fails"] for row in judged),
        "in_cut_blocks": len(cut), "found_at_the_block": sum(row["at_block"] for row in cut),
        "another_block_named": sum(bool(row["elsewhere"]) for row in cut),
        "found_by_kind": {kind: f"{n} of {total}" for kind, (n, total) in sorted(kinds.items())},
        "without_verdict": dict(
            collections.Counter(row["blocks"]["status"] for row in planted if row not in judged)
        ),
        "missed": [
            {name: row[name] for name in ("target", "fault", "is_cut", "elsewhere")}
            | {"status": row["blocks"]["status"]}
            for row in judged
            if not row["fails"] or (row["is_cut"] and (not row["at_block"] or row["elsewhere"]))
        ],
    }  # fmt: skip


def print_tally(table):
    for group in table:
        print(*(group[name] for name in ("library", "device", "backend", "dtype")), end=": ")
        if group["faults"]:
            print(f"{group['found']} of {group['planted']} faults found; in blocks that are cut, "
                  f"{group['found_at_the_block']} of {group['in_cut_blocks']} at the block, "
                  f"{group['another_block_named']} also at others")  # fmt: skip
            print(f"  {group['found_by_kind']}; without a verdict: {group['without_verdict']}")
            shown = group["missed"]
        else:
            print(f"{group['agree']} of {group['classes']} agree, {group['with_cut_blocks']} with "
                  f"blocks that are cut; median seconds {group['median_seconds']}")  # fmt: skip
            print(f"  whole / blocks: {group['whole_and_blocks']}")
            shown = group["disagreements"]
        print(f"  not checked: {group['not_checked'] or 'none'}")
        for row in shown:
            print(f"    {row}")


if __name__ == "__main__":
    main()

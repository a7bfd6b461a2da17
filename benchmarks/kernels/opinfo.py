"""Operators of torch's own test database, as sides of the kernel judge.

`reference_NAME` calls an operator on a few of its samples; `candidate_NAME` is the same, compiled
by Inductor. One call takes several samples, so that one compilation serves them all. NAME is the
entry's full name with dots as double underscores. Nothing here is exported by name: see
`__getattr__`.
"""

from __future__ import annotations

import itertools
import warnings

import torch

from paritas import Inputs
from paritas.core.torch_private.named_operators import operator_database

SAMPLES, LOOKED_AT, LARGEST = 3, 120, 4096


def _full_name(entry):
    variant = entry.variant_test_name
    return (f"{entry.name}.{variant}" if variant else entry.name).replace(".", "__")


# Read at once: candidates are forked from a process that has imported this module.
ENTRIES = {_full_name(entry): entry for entry in operator_database()}


def __getattr__(name):
    kind, _, full = name.partition("_")
    if kind not in {"reference", "candidate"} or full not in ENTRIES:
        raise AttributeError(name)
    operator = ENTRIES[full].op
    return _compiled(operator) if kind == "candidate" else _eager(operator)


def _eager(operator):
    def reference(*samples):
        return [operator(one["input"], *one["args"], **one["kwargs"]) for one in samples]

    return reference


def _compiled(operator):
    def candidate(*samples):
        return [operator(one["input"], *one["args"], **one["kwargs"]) for one in samples]

    return torch.compile(candidate)


def samples_of(full, dtype, device):
    """A few samples of an entry as one set of inputs: the first, the last, and one between."""
    found = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        all_of_them = ENTRIES[full].sample_inputs(device, dtype, requires_grad=False)
        for sample in itertools.islice(all_of_them, LOOKED_AT):
            one = {
                "input": sample.input,
                "args": list(sample.args),
                "kwargs": dict(sample.kwargs),
            }
            if _size(one) <= LARGEST and not _is_draw(one):
                found.append(one)
    found = [one for one in found if _size(one)] or found
    chosen = sorted({0, len(found) // 2, len(found) - 1}) if found else []
    return Inputs(tuple(found[n] for n in chosen[:SAMPLES]))


def _size(value):
    if isinstance(value, torch.Tensor):
        return value.numel()
    parts = value.values() if isinstance(value, dict) else value
    return sum(map(_size, parts)) if isinstance(value, dict | list | tuple) else 0


def _is_draw(sample):
    return "generator" in sample["kwargs"] or bool(sample["kwargs"].get("training"))

"""Faults for building: embeddings, indices, layout, pooling."""

from __future__ import annotations

from typing import Any

from benchmarks.places.calls import Call, Catalogue, fits
from torch.nn import functional

FAULTS = Catalogue()


@FAULTS.fault("embedding", kinds=["shift", "wrong index"], loose=["permutation", "copy"])
def next_row_of_the_table(call: Call) -> Any:
    """The index is one too large."""
    places = [0, 1] if call.get(0).is_floating_point() else [1, 0]
    table, indices = (call.args[place] for place in places)
    return call.instead(table[(indices + 1) % len(table)])


@FAULTS.fault("roll flip permute transpose", kinds=["sign"], loose=[])
def one_value_negated_on_the_way(call: Call) -> Any:
    """A copy that negates what it copies."""
    return call.instead(-call.result())


@FAULTS.fault(
    "split chunk unbind", kinds=["stale", "copy", "wrong index"], loose=["permutation", "shift"]
)
def first_part_twice(call: Call) -> Any:
    """The second part is the first one."""
    parts = call.run()
    fits(len(parts) > 1 and parts[0].shape == parts[1].shape and parts[0].is_floating_point())
    return (parts[0], parts[0].clone(), *parts[2:])


@FAULTS.fault("conv2d conv1d convolution", kinds=["border", "padding", "wrong argument"])
def padding_repeats_the_border(call: Call) -> Any:
    """The border is padded with the nearest values instead of zeros."""
    value, padding = call.tensor(0, "input"), call.get(4, "padding")
    if isinstance(padding, int):
        padding = [padding] * (value.dim() - 2)
    fits(call.name != "convolution" or not call.args[6])
    fits(padding and not isinstance(padding, str) and any(padding))
    sides = [side for size in reversed(padding) for side in (size, size)]
    wider = functional.pad(value, sides, mode="replicate")
    return call.put(0, wider, "input").put(4, [0] * len(padding), "padding").run()


@FAULTS.fault(
    "max_pool2d avg_pool2d adaptive_avg_pool2d",
    kinds=["shift", "wrong index"],
    loose=["permutation"],
)
def pooled_one_further(call: Call) -> Any:
    """The windows begin one too late."""
    return call.put(0, call.tensor(0).roll(-1, -1)).run()


@FAULTS.fault("cat", kinds=["permutation", "swapped operands", "shift"])
def concatenated_in_the_other_order(call: Call) -> Any:
    """b, a."""
    parts = call.get(0, "tensors")
    fits(len(parts) == 2 and parts[0].shape == parts[1].shape)
    return call.put(0, [parts[1], parts[0]], "tensors").run()


@FAULTS.fault("getitem", kinds=["shift", "wrong index"], loose=["wrong argument"])
def slice_off_by_one(call: Call) -> Any:
    """The slice begins and ends one later."""
    value, index = call.tensor(0), call.args[1]
    index = index if isinstance(index, tuple) else (index,)
    fits(any(isinstance(one, slice) and one != slice(None) for one in index))
    axis = next(i for i, one in enumerate(index) if isinstance(one, slice) and one != slice(None))
    if Ellipsis in index[:axis]:
        axis -= sum(one is not None for one in index)
    return value.roll(-1, axis)[index]


@FAULTS.fault("slice select narrow", kinds=["shift", "wrong index"], loose=["wrong argument"])
def begins_one_later(call: Call) -> Any:
    """A start that is one too large."""
    value, dim = call.tensor(0), call.get(1, "dim", default=0)
    fits(value.size(dim) > 1)
    return call.put(0, value.roll(-1, dim)).run()


@FAULTS.fault("gather index_select", kinds=["shift", "wrong index", "permutation"], loose=["copy"])
def index_shifted(call: Call) -> Any:
    """The index before."""
    value, dim, index = call.tensor(0), call.get(1, "dim"), call.get(2, "index")
    return call.put(2, (index - 1) % value.size(dim), "index").run()


@FAULTS.fault("embedding", kinds=["zeros"], loose=["mask", "wrong argument"])
def first_token_taken_for_padding(call: Call) -> Any:
    """Rows of the smallest index are zero."""
    table, indices = call.args[:2]
    if not table.is_floating_point():
        table, indices = indices, table
    return call.instead(call.result() * (indices != indices.min()).unsqueeze(-1))


@FAULTS.fault("split chunk unbind", kinds=["permutation", "swapped operands", "wrong index"])
def parts_exchanged(call: Call) -> Any:
    """The first two results are exchanged."""
    parts = call.run()
    fits(len(parts) > 1 and parts[0].shape == parts[1].shape and parts[0].is_floating_point())
    return (parts[1], parts[0], *parts[2:])


@FAULTS.fault("topk sort", kinds=["other function"], loose=["shift", "permutation"])
def selected_by_magnitude(call: Call) -> Any:
    """The values in the order of their absolute values."""
    value = call.tensor(0)
    fits(bool((value < 0).any()))
    positions = call.put(0, value.abs()).run()[1]
    dim = call.get(2 if call.name == "topk" else 1, "dim", default=-1)
    return (value.gather(dim, positions), positions)


@FAULTS.fault("argmax", kinds=["tie-breaking"], loose=["other function"])
def last_of_equal_maxima(call: Call) -> Any:
    """Ties go to the last one."""
    value, dim = call.get(0), call.get(1, "dim")
    fits(isinstance(dim, int))
    return value.size(dim) - 1 - value.flip(dim).argmax(dim)


@FAULTS.fault("avg_pool2d", kinds=["wrong argument"], loose=["border", "axis scale"])
def padding_counted_or_not(call: Call) -> Any:
    """The other value of count_include_pad."""
    return call.put(5, not call.get(5, "count_include_pad", default=True),
                    "count_include_pad").run()  # fmt: skip


@FAULTS.fault("interpolate", kinds=["wrong argument"])
def corners_aligned(call: Call) -> Any:
    """The other value of align_corners."""
    fits(call.get(3, "mode", default="nearest") == "bilinear")
    return call.put(4, not call.get(4, "align_corners", default=False), "align_corners").run()


@FAULTS.fault(
    "cross_entropy nll_loss",
    kinds=["mask", "scale", "wrong factor"],
    loose=["off by one reduction", "wrong argument"],
)
def ignored_targets_counted(call: Call) -> Any:
    """The mean is divided by all targets."""
    target = call.get(1, "target")
    share = (target != call.get(5, "ignore_index", default=-100)).double().mean()
    return call.instead(call.result() * share)

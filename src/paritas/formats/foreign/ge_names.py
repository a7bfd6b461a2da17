"""Names of operators in Ascend's graph engine, for the nodes of torch's graphs."""

from __future__ import annotations

import builtins
import re

# By GE's type, the names of torch's nodes after decomposition. GE numbers the operators of a type
# as torch numbers its nodes: `Conv_1` is `convolution_1`.
_TORCH_NAMES: dict[str, tuple[str, ...]] = {
    "Add": ("add",),
    "AddN": ("add",),
    "AddV2": ("add",),
    "AvgPool": ("avg_pool2d", "_adaptive_avg_pool2d"),
    "AvgPoolV2": ("avg_pool2d",),
    "BatchMatMul": ("bmm", "baddbmm"),
    "BatchMatMulV2": ("bmm", "baddbmm"),
    "BatchNorm": ("_native_batch_norm_legit", "_native_batch_norm_legit_no_training", "var_mean"),
    "BroadcastTo": ("expand",),
    "Cast": ("convert_element_type", "_to_copy"),
    "ConcatD": ("cat",),
    "ConcatV2": ("cat",),
    "Conv": ("convolution",),
    "Conv2D": ("convolution",),
    "Conv2DTranspose": ("convolution",),
    "Conv3D": ("convolution",),
    "DepthwiseConv2D": ("convolution",),
    "Div": ("div",),
    "FlashAttentionScore": ("_scaled_dot_product_flash_attention",),
    "GatherV2": ("embedding", "index_select", "index"),
    "Gemm": ("addmm", "mm"),
    "LayerNorm": ("native_layer_norm", "var_mean"),
    "LayerNormV3": ("native_layer_norm", "var_mean"),
    "MatMul": ("mm", "addmm"),
    "MatMulV2": ("mm", "addmm"),
    "MatMulV3": ("mm", "addmm"),
    "MaxPool": ("max_pool2d_with_indices", "_low_memory_max_pool_with_offsets"),
    "Maximum": ("maximum",),
    "Minimum": ("minimum",),
    "Mul": ("mul",),
    "Muls": ("mul",),
    "Neg": ("neg",),
    "Pow": ("pow",),
    "RealDiv": ("div",),
    "ReduceMax": ("amax", "max"),
    "ReduceMean": ("mean",),
    "ReduceMeanD": ("mean",),
    "ReduceSum": ("sum",),
    "ReduceSumD": ("sum",),
    "Reshape": ("view", "_unsafe_view", "reshape"),
    "Select": ("where",),
    "SelectV2": ("where",),
    "Softmax": ("_softmax", "softmax"),
    "SoftmaxV2": ("_softmax", "softmax"),
    "Sub": ("sub",),
    "Transpose": ("permute", "transpose", "t"),
    "TransposeD": ("permute", "transpose", "t"),
    "Unsqueeze": ("unsqueeze",),
}
_NAME = re.compile(r"(?P<type>[A-Za-z0-9]+?)(?P<number>_\d+)?")


def torch_names(name: str) -> tuple[str, ...]:
    """The nodes of torch that an operator of GE may be, such as `Conv_1`; none if unknown.

    GE's spelling is required: `Select` is `where`, and `select` is torch's own.
    """
    match = _NAME.fullmatch(name)
    if match is None:
        return ()
    return tuple(
        _number_stem(stem, match["number"]) for stem in _TORCH_NAMES.get(match["type"], ())
    )


def _number_stem(stem: str, number: str | None) -> str:
    """A name in torch's graphs, which number from 1 where Python has a builtin of that name."""
    node_number = int(number[1:]) if number else 0
    node_number += hasattr(builtins, stem)
    return f"{stem}_{node_number}" if node_number else stem

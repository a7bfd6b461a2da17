"""The fusion passes of Ascend's compiler by their names, and what each of them means here.

Ascend's compiler rewrites graphs (`GraphFusion`) and puts operators into one kernel that keeps
their values in the unified buffer (`UBFusion`). Inductor does both otherwise, so a pass of Ascend's
means the setting of Inductor that does its work, or nothing where Inductor has no such fusion.
"""

from __future__ import annotations

import difflib
import re
from typing import NamedTuple

__all__ = ["PASSES", "AscendPass", "is_ascend_name", "nearest_pass"]


class AscendPass(NamedTuple):
    """One pass.

    Attributes:
        section: of the switch file, where Ascend's compiler has it.
        does: what is fused, in words.
        here: names of either section that do it here; none where nothing does.
    """

    section: str
    does: str
    here: tuple[str, ...] = ()


_GRAPH, _KERNEL = "GraphFusion", "UBFusion"
_BATCH_NORM = ("efficient_conv_bn_eval_fx_passes", "efficient_conv_bn_eval_pass")
_ELEMENTWISE = ("loop_fusion", "horizontal_fusion", "inlining")

PASSES: dict[str, AscendPass] = {
    "ConvBatchnormFusionPass": AscendPass(
        _GRAPH, "batch norm folded into a convolution", _BATCH_NORM
    ),
    "HostBNFusionPass": AscendPass(_GRAPH, "batch norm for inference", _BATCH_NORM),
    "BatchNormBnInferFusionPass": AscendPass(_GRAPH, "batch norm for inference", _BATCH_NORM),
    "BatchNormPreprocessFusionPass": AscendPass(_GRAPH, "batch norm for inference", _BATCH_NORM),
    "MatMulBiasAddFusionPass": AscendPass(
        _GRAPH, "a product and the addition of its bias", ("pattern_matcher",)
    ),
    "SoftmaxFusionPass": AscendPass(_GRAPH, "the parts of a softmax", ("pattern_matcher",)),
    "MulSquareFusionPass": AscendPass(_GRAPH, "a product of squares", ("pattern_matcher",)),
    "AABiasaddConvFusion": AscendPass(_GRAPH, "a convolution and the addition of its bias"),
    "PadConv2dFusionPass": AscendPass(_GRAPH, "padding taken into a convolution"),
    "ConvToFullyConnectionFusionPass": AscendPass(_GRAPH, "a convolution made a product"),
    "PoolingFusionPass": AscendPass(_GRAPH, "pooling made a convolution"),
    "ConvConcatFusionPass": AscendPass(
        _GRAPH, "convolutions that write into what joins them", ("pointwise_cat",)
    ),
    "SplitConvConcatFusionPass": AscendPass(
        _GRAPH, "convolutions between a split and what joins them", ("pointwise_cat",)
    ),
    "ZConcatv2dFusionPass": AscendPass(_GRAPH, "joins of joins", ("pointwise_cat",)),
    "ZConcatExt2FusionPass": AscendPass(_GRAPH, "joins of many tensors", ("pointwise_cat",)),
    "ConstToAttrStridedSliceV2Fusion": AscendPass(
        _GRAPH, "constants written into a slice", ("joint_graph_constant_folding",)
    ),
    "TfMergeSubFusionPass": AscendPass(_GRAPH, "subtractions merged, of TensorFlow"),
    "RequantFusionPass": AscendPass(_GRAPH, "dequantising before quantising"),
    "V100RequantFusionPass": AscendPass(_GRAPH, "dequantising before quantising"),
    "V200RequantFusionPass": AscendPass(_GRAPH, "dequantising before quantising"),
    "NotRequantFusionPass": AscendPass(_GRAPH, "dequantising before quantising"),
    "AutomaticUbFusion": AscendPass(_KERNEL, "whatever fits into one kernel", _ELEMENTWISE),
    "TbeEltwiseFusionPass": AscendPass(_KERNEL, "elementwise operators", _ELEMENTWISE),
    "TbeEltwiseCastFusionPass": AscendPass(_KERNEL, "elementwise and casts", _ELEMENTWISE),
    "TbeEltwiseQuantFusionPass": AscendPass(_KERNEL, "elementwise and quantising", _ELEMENTWISE),
    "TbeReduceElemwiseFusionPass": AscendPass(
        _KERNEL, "a reduction and elementwise operators", ("loop_fusion", "inlining")
    ),
    "TbePool2dQuantFusionPass": AscendPass(
        _KERNEL, "pooling and quantising", ("loop_fusion", "inlining")
    ),
    "TbeFullyconnectionElemwiseDequantFusionPass": AscendPass(
        _KERNEL, "a product and elementwise operators", ("epilogue_fusion",)
    ),
    "TbeConvDequantVaddReluQuantFusionPass": AscendPass(
        _KERNEL, "a convolution, dequantising, add, relu, quantising", ("epilogue_fusion",)
    ),
    "TbeConvDequantVaddReluFusionPass": AscendPass(
        _KERNEL, "a convolution, dequantising, add, relu", ("epilogue_fusion",)
    ),
    "TbeConvDequantQuantFusionPass": AscendPass(
        _KERNEL, "a convolution, dequantising, quantising", ("epilogue_fusion",)
    ),
    "TbeDepthwiseConvDequantFusionPass": AscendPass(
        _KERNEL, "a depthwise convolution and dequantising", ("epilogue_fusion",)
    ),
    "TbeConv2DAddMulQuantPass": AscendPass(
        _KERNEL, "a convolution, add, mul, quantising", ("epilogue_fusion",)
    ),
    "TbeCommonRules0FusionPass": AscendPass(
        _KERNEL, "a convolution and what follows it", ("epilogue_fusion",)
    ),
    "TbeCommonRules2FusionPass": AscendPass(
        _KERNEL, "a convolution and what follows it", ("epilogue_fusion",)
    ),
    "FusionVirtualOpSetSwitch": AscendPass(_KERNEL, "joins and splits without a copy"),
}


def is_ascend_name(name: str) -> bool:
    """Whether a name is written as Ascend's are; Inductor's have no capitals."""
    return re.fullmatch(r"[A-Z][a-z0-9]*(?:[A-Z][A-Za-z0-9]*)+", name) is not None


def nearest_pass(name: str) -> str:
    """The known pass that is most like a name."""
    return difflib.get_close_matches(name, PASSES, n=1, cutoff=0.0)[0]

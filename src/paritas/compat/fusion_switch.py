"""The switch file of torchair, which turns fusion off, taken for Inductor."""

from __future__ import annotations

import dataclasses
import difflib
import json
import os
import re
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from paritas._torch import inductor
from paritas.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


# --- The fusion passes of Ascend's compiler -------------------------------------------------------

# Ascend's compiler rewrites graphs (`GraphFusion`) and puts operators into one kernel that keeps
# their values in the unified buffer (`UBFusion`). Inductor does both otherwise, so a pass of
# Ascend's means the setting of Inductor that does its work, or nothing where Inductor has no such
# fusion.


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


# --- The switch file ------------------------------------------------------------------------------

EXAMPLE = '{"Switch": {"GraphFusion": {"ALL": "off"}, "UBFusion": {"ALL": "off"}}}'
GRAPH, KERNEL = "GraphFusion", "UBFusion"
ALL = "ALL"
_MOST_NEAR = 3


@dataclasses.dataclass(frozen=True)
class FusionSwitch:
    """What is on and off.

    Attributes:
        graph: rewriting of graphs, by the names of passes and settings, or `ALL`.
        kernel: fusion of operations into kernels, likewise.
        notes: what became of names of Ascend's passes.
    """

    graph: dict[str, bool] = dataclasses.field(default_factory=dict)
    kernel: dict[str, bool] = dataclasses.field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def inductor_options(self) -> dict[str, Any]:
        """The settings of Inductor that do it; what is on is left as it is set."""
        return {
            **inductor.graph_options(_names_off(self.graph, inductor.graph_names())),
            **inductor.kernel_options(_names_off(self.kernel, inductor.kernel_names())),
        }

    def describe(self) -> str:
        """In words: `GraphFusion: ALL off; UBFusion: ALL off, epilogue_fusion on`."""
        sections = ((GRAPH, self.graph), (KERNEL, self.kernel))
        return "; ".join(
            f"{section}: "
            + ", ".join(f"{name} {'on' if is_on else 'off'}" for name, is_on in entries.items())
            for section, entries in sections
            if entries
        )


def load_switch(path: str | os.PathLike[str]) -> FusionSwitch:
    """Read a switch file; what is in it and not understood is an error.

    Names of Ascend's passes are taken for what does their work here. One that is not known switches
    nothing: a warning says so, with the nearest that is.
    """
    file = Path(path)
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(
            f"the fusion switch file {file} cannot be read: {error.strerror}"
        ) from error
    except ValueError as error:
        raise UsageError(
            f"the fusion switch file {file} is no JSON: {error}; give, for example, {EXAMPLE}"
        ) from error
    sections = content.get("Switch") if isinstance(content, dict) else None
    if not isinstance(sections, dict) or not sections or len(content) > 1:
        raise UsageError(
            f"the fusion switch file {file} holds {_shorten(content)}; give, for example, {EXAMPLE}"
        )
    known: dict[str, Callable[[], tuple[str, ...]]] = {
        GRAPH: inductor.graph_names,
        KERNEL: inductor.kernel_names,
    }
    for section in sections:
        if section not in known:
            raise UsageError(
                f"{file}: unknown section {section!r}; "
                f"known are {_names_by_likeness(section, [*known])}"
            )
    names = {section: ask() for section, ask in known.items()}
    read = {name: _read_entries(file, name, sections.get(name, {}), names[name]) for name in names}
    notes = tuple(_translate(file, read, names))
    return FusionSwitch(graph=read[GRAPH], kernel=read[KERNEL], notes=notes)


def _translate(
    file: Path, read: dict[str, dict[str, bool]], known: dict[str, tuple[str, ...]]
) -> Iterator[str]:
    """Put in the place of Ascend's names what does their work here; in words, what that is."""
    meant: dict[str, dict[str, bool]] = {section: {} for section in read}
    for section, entries in read.items():
        for name in [name for name in entries if name not in (ALL, *known[section])]:
            is_on = entries.pop(name)
            told = f"{section}: {name} {'on' if is_on else 'off'}"
            found = PASSES.get(name)
            if found is None:
                near = nearest_pass(name)
                note = (
                    f"{told} switches nothing: paritas does not know that pass; the nearest known "
                    f"one is {near} ({PASSES[near].does})"
                )
                warnings.warn(f"{file}: {note}", stacklevel=4)
                yield note
                continue
            places = [(where, one) for one in found.here for where in known if one in known[where]]
            for where, one in places:
                # What two passes of Ascend's do is off as soon as one of them is.
                meant[where][one] = is_on and meant[where].get(one, True)
            here = ", ".join(one for _, one in places) or "nothing"
            yield f"{told} means {here} in Inductor ({found.does})"
    for section, entries in read.items():
        read[section] = {**meant[section], **entries}


def _read_entries(
    file: Path, section: str, entries: Any, known: tuple[str, ...]
) -> dict[str, bool]:
    if not isinstance(entries, dict):
        raise UsageError(f"{file}: {section} is {_shorten(entries)}; give names with on or off")
    for name, value in entries.items():
        if name != ALL and name not in known and not is_ascend_name(name):
            names = _names_by_likeness(name, [ALL, *known])
            raise UsageError(f"{file}: {section} has no {name!r}; known are {names}")
        if value not in ("on", "off"):
            raise UsageError(f'{file}: {section}, {name}: {_shorten(value)}; give "on" or "off"')
    return {name: value == "on" for name, value in entries.items()}


def _names_off(entries: dict[str, bool], known: tuple[str, ...]) -> set[str]:
    """The names that are off; one of its own says more than `ALL`, wherever it stands."""
    everything = entries.get(ALL, True)
    return {name for name in known if not entries.get(name, everything)}


def _names_by_likeness(name: str, known: list[str]) -> str:
    near = difflib.get_close_matches(name, known, n=_MOST_NEAR, cutoff=0.4)
    return ", ".join([*near, *(other for other in known if other not in near)])


def _shorten(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= len(EXAMPLE) else f"{text[: len(EXAMPLE)]}..."

"""torchair's switch file, which turns fusion off, applied to Inductor."""

from __future__ import annotations

import dataclasses
import difflib
import json
import re
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from paritas.core.errors import UsageError
from paritas.core.torch_private import inductor

if TYPE_CHECKING:
    import os
    from collections.abc import Iterator


# --- The fusion passes of Ascend's compiler -------------------------------------------------------

# Ascend's compiler rewrites graphs (`GraphFusion`) and fuses operators into kernels that keep
# their values in the unified buffer (`UBFusion`). Inductor does both in its own way, so a pass of
# Ascend's maps to the Inductor settings that do its work, or to nothing.


class AscendPass(NamedTuple):
    """One pass.

    Attributes:
        section: of the switch file.
        does: what is fused, in words.
        here: the names, of either section, that do it in Inductor.
    """

    section: str
    does: str
    here: tuple[str, ...] = ()


GRAPH, KERNEL = "GraphFusion", "UBFusion"
_BATCH_NORM = ("efficient_conv_bn_eval_fx_passes", "efficient_conv_bn_eval_pass")
_ELEMENTWISE = ("loop_fusion", "horizontal_fusion", "inlining")
_LOOPS = ("loop_fusion", "inlining")
_PATTERNS, _CAT, _EPILOGUE = ("pattern_matcher",), ("pointwise_cat",), ("epilogue_fusion",)

PASSES: dict[str, AscendPass] = {
    "ConvBatchnormFusionPass": AscendPass(
        GRAPH, "batch norm folded into a convolution", _BATCH_NORM
    ),
    "HostBNFusionPass": AscendPass(GRAPH, "batch norm for inference", _BATCH_NORM),
    "BatchNormBnInferFusionPass": AscendPass(GRAPH, "batch norm for inference", _BATCH_NORM),
    "BatchNormPreprocessFusionPass": AscendPass(GRAPH, "batch norm for inference", _BATCH_NORM),
    "MatMulBiasAddFusionPass": AscendPass(GRAPH, "a matrix product and its bias", _PATTERNS),
    "SoftmaxFusionPass": AscendPass(GRAPH, "the parts of a softmax", _PATTERNS),
    "MulSquareFusionPass": AscendPass(GRAPH, "a product of squares", _PATTERNS),
    "AABiasaddConvFusion": AscendPass(GRAPH, "a convolution and its bias"),
    "PadConv2dFusionPass": AscendPass(GRAPH, "padding merged into a convolution"),
    "ConvToFullyConnectionFusionPass": AscendPass(
        GRAPH, "a convolution turned into a matrix product"
    ),
    "PoolingFusionPass": AscendPass(GRAPH, "pooling turned into a convolution"),
    "ConvConcatFusionPass": AscendPass(GRAPH, "convolutions that write into a concatenation", _CAT),
    "SplitConvConcatFusionPass": AscendPass(
        GRAPH, "convolutions between a split and a concatenation", _CAT
    ),
    "ZConcatv2dFusionPass": AscendPass(GRAPH, "nested concatenations", _CAT),
    "ZConcatExt2FusionPass": AscendPass(GRAPH, "concatenation of many tensors", _CAT),
    "ConstToAttrStridedSliceV2Fusion": AscendPass(
        GRAPH, "constants inlined into a slice", ("joint_graph_constant_folding",)
    ),
    "TfMergeSubFusionPass": AscendPass(GRAPH, "TensorFlow subtractions merged"),
    "RequantFusionPass": AscendPass(GRAPH, "dequantising before quantising"),
    "V100RequantFusionPass": AscendPass(GRAPH, "dequantising before quantising"),
    "V200RequantFusionPass": AscendPass(GRAPH, "dequantising before quantising"),
    "NotRequantFusionPass": AscendPass(GRAPH, "dequantising before quantising"),
    "AutomaticUbFusion": AscendPass(KERNEL, "whatever fits into one kernel", _ELEMENTWISE),
    "TbeEltwiseFusionPass": AscendPass(KERNEL, "elementwise operators", _ELEMENTWISE),
    "TbeEltwiseCastFusionPass": AscendPass(KERNEL, "elementwise and casts", _ELEMENTWISE),
    "TbeEltwiseQuantFusionPass": AscendPass(KERNEL, "elementwise and quantising", _ELEMENTWISE),
    "TbeReduceElemwiseFusionPass": AscendPass(
        KERNEL, "a reduction and elementwise operators", _LOOPS
    ),
    "TbePool2dQuantFusionPass": AscendPass(KERNEL, "pooling and quantising", _LOOPS),
    "TbeFullyconnectionElemwiseDequantFusionPass": AscendPass(
        KERNEL, "a matrix product and elementwise operators", _EPILOGUE
    ),
    "TbeConvDequantVaddReluQuantFusionPass": AscendPass(
        KERNEL, "a convolution, dequantising, add, relu, quantising", _EPILOGUE
    ),
    "TbeConvDequantVaddReluFusionPass": AscendPass(
        KERNEL, "a convolution, dequantising, add, relu", _EPILOGUE
    ),
    "TbeConvDequantQuantFusionPass": AscendPass(
        KERNEL, "a convolution, dequantising, quantising", _EPILOGUE
    ),
    "TbeDepthwiseConvDequantFusionPass": AscendPass(
        KERNEL, "a depthwise convolution and dequantising", _EPILOGUE
    ),
    "TbeConv2DAddMulQuantPass": AscendPass(
        KERNEL, "a convolution, add, mul, quantising", _EPILOGUE
    ),
    "TbeCommonRules0FusionPass": AscendPass(KERNEL, "a convolution and what follows it", _EPILOGUE),
    "TbeCommonRules2FusionPass": AscendPass(KERNEL, "a convolution and what follows it", _EPILOGUE),
    "FusionVirtualOpSetSwitch": AscendPass(KERNEL, "concatenation and split without a copy"),
}


def is_ascend_name(name: str) -> bool:
    """Whether a name is spelt like Ascend's; Inductor's have no capitals."""
    return re.fullmatch(r"[A-Z][a-z0-9]*(?:[A-Z][A-Za-z0-9]*)+", name) is not None


# --- The switch file ------------------------------------------------------------------------------

EXAMPLE = '{"Switch": {"GraphFusion": {"ALL": "off"}, "UBFusion": {"ALL": "off"}}}'
ALL = "ALL"
_MOST_NEAR = 3


@dataclasses.dataclass(frozen=True)
class FusionSwitch:
    """What is on and off.

    Attributes:
        graph: graph rewriting, by the names of passes and settings, or `ALL`.
        kernel: fusion into kernels, by the names of settings, or `ALL`.
        notes: how names of Ascend's passes were interpreted.
    """

    graph: dict[str, bool] = dataclasses.field(default_factory=dict)
    kernel: dict[str, bool] = dataclasses.field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def inductor_options(self) -> dict[str, Any]:
        """The Inductor settings that turn things off; what is on keeps its setting."""
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
    """Read a switch file; unknown contents are an error.

    Names of Ascend's passes map to the Inductor settings that do their work. An unknown pass
    switches nothing and causes a warning.
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
            f"the fusion switch file {file} is not JSON: {error}; give, for example, {EXAMPLE}"
        ) from error
    sections = content.get("Switch") if isinstance(content, dict) else None
    if not isinstance(sections, dict) or not sections or len(content) > 1:
        raise UsageError(
            f"the fusion switch file {file} contains {_shorten(content)}; give, for example, "
            f"{EXAMPLE}"
        )
    for section in sections:
        if section not in (GRAPH, KERNEL):
            raise UsageError(
                f"{file}: unknown section {section!r}; "
                f"the sections are {_names_by_likeness(section, [GRAPH, KERNEL])}"
            )
    names = {GRAPH: inductor.graph_names(), KERNEL: inductor.kernel_names()}
    read = {name: _read_entries(file, name, sections.get(name, {}), names[name]) for name in names}
    notes = tuple(_translate(file, read, names))
    return FusionSwitch(graph=read[GRAPH], kernel=read[KERNEL], notes=notes)


def _translate(
    file: Path, read: dict[str, dict[str, bool]], pass_names: dict[str, tuple[str, ...]]
) -> Iterator[str]:
    """Replace Ascend's names in `read` by Inductor's; yields a note for each."""
    meant: dict[str, dict[str, bool]] = {section: {} for section in read}
    for section, entries in read.items():
        for name in [name for name in entries if name not in (ALL, *pass_names[section])]:
            is_on = entries.pop(name)
            switch = f"{section}: {name} {'on' if is_on else 'off'}"
            fusion_pass = PASSES.get(name)
            if fusion_pass is None:
                near = difflib.get_close_matches(name, PASSES, n=1, cutoff=0.0)[0]
                note = (
                    f"{switch} has no effect: paritas does not know this pass; the closest known "
                    f"one is {near} ({PASSES[near].does})"
                )
                warnings.warn(f"{file}: {note}", stacklevel=4)
                yield note
                continue
            places = [
                (where, inductor_pass)
                for inductor_pass in fusion_pass.here
                for where in pass_names
                if inductor_pass in pass_names[where]
            ]
            for where, pass_name in places:
                # What two passes of Ascend's do is off if one of them is.
                meant[where][pass_name] = is_on and meant[where].get(pass_name, True)
            here = ", ".join(inductor_pass for _, inductor_pass in places) or "nothing"
            yield f"{switch} means {here} in Inductor ({fusion_pass.does})"
    for section, entries in read.items():
        read[section] = {**meant[section], **entries}


def _read_entries(
    file: Path, section: str, entries: Any, pass_names: tuple[str, ...]
) -> dict[str, bool]:
    if not isinstance(entries, dict):
        raise UsageError(f"{file}: {section} is {_shorten(entries)}; give names with on or off")
    for name, value in entries.items():
        if name != ALL and name not in pass_names and not is_ascend_name(name):
            names = _names_by_likeness(name, [ALL, *pass_names])
            raise UsageError(f"{file}: {section} has no {name!r}; the names are {names}")
        if value not in ("on", "off"):
            raise UsageError(f'{file}: {section}, {name}: {_shorten(value)}; give "on" or "off"')
    return {name: value == "on" for name, value in entries.items()}


def _names_off(entries: dict[str, bool], pass_names: tuple[str, ...]) -> set[str]:
    """The names that are off; the entry of a name overrides `ALL`."""
    everything = entries.get(ALL, True)
    return {name for name in pass_names if not entries.get(name, everything)}


def _names_by_likeness(name: str, pass_names: list[str]) -> str:
    near = difflib.get_close_matches(name, pass_names, n=_MOST_NEAR, cutoff=0.4)
    return ", ".join([*near, *(other for other in pass_names if other not in near)])


def _shorten(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= len(EXAMPLE) else f"{text[: len(EXAMPLE)]}..."

"""The configurations of nnScaler's document on partition options, run as written but for imports.

Each ends as the document expects, and what is not right beside that is named. The document itself
is compared with what is here where it lies beside this repository.
"""

from __future__ import annotations

import dataclasses
import os
import re
from pathlib import Path

import pytest

from paritas import ParityWarning, Status
from paritas.partition import (
    IRObject,
    TensorInfo,
    VerifyConfig,
    check_partition,
    verify_partition_options,
)

DOCUMENTS = Path(__file__).parents[3] / "shared" / "seeds"


def shape(*sizes: int) -> TensorInfo:
    return TensorInfo("shape", sizes)


def functional(name: str) -> str:
    return f"from torch.nn.functional import {name}"


def conv2d(*shapes: TensorInfo, dim: int, groups: int) -> VerifyConfig:
    return VerifyConfig(
        fsig="torch.conv2d",
        args=list(shapes),
        kwargs={"stride": 1, "padding": 0, "dilation": 1, "groups": groups},
        parti_options=[{"idx": 0, "dim": dim}],
        noutputs=1,
        import_customized_func=functional("conv2d"),
    )


def transposed(name: str, *shapes: TensorInfo, dim: int, groups: int) -> VerifyConfig:
    rest = {"stride": 1, "padding": 0, "output_padding": 0, "dilation": 1}
    return VerifyConfig(
        fsig=f"torch.{name}",
        args=list(shapes),
        kwargs={**rest, "groups": groups},
        parti_options=[{"idx": 0, "dim": dim}],
        noutputs=1,
        import_customized_func=functional(name),
    )


def conv1d(*shapes: TensorInfo, groups: int, imports: str) -> VerifyConfig:
    return VerifyConfig(
        fsig="torch.conv1d",
        args=list(shapes),
        kwargs={"stride": 1, "padding": 0, "dilation": 1, "groups": groups},
        parti_options=[{"idx": 0, "dim": 1}],
        noutputs=1,
        import_customized_func=imports,
    )


def dropout(tensor: TensorInfo, p: float, dims: list[int]) -> VerifyConfig:
    return VerifyConfig(
        fsig="torch.nn.functional.dropout",
        args=[tensor],
        kwargs={"p": p, "training": False, "inplace": False},
        parti_options=[{"idx": 0, "dim": dim} for dim in dims],
        noutputs=1,
        import_customized_func=functional("dropout"),
    )


WHERE = VerifyConfig(
    fsig="torch.where",
    args=[shape(1, 1, 9, 9), shape(1, 12, 9, 9), shape(1)],
    kwargs={},
    noutputs=1,
    parti_options=[{"idx": 1, "dim": 1}],
)
VIEW = VerifyConfig(
    fsig="torch.Tensor.view",
    args=[shape(1, 9, 768)],
    kwargs={"size": (-1, 768)},
    noutputs=1,
    parti_options=[{"idx": 0, "dim": 2}],
)
EMBEDDING = VerifyConfig(
    fsig="nnscaler.runtime.function.embedding",
    args=[shape(1, 9), shape(50257, 768)],
    kwargs={"padding_idx": None, "start": 0, "stop": 50257},
    parti_options=[{"idx": 1, "dim": 1}],
    noutputs=1,
    import_customized_func=functional("embedding"),
)
SIZE = IRObject("size_9388", value=9, is_constant=True)
FULLSLICE = VerifyConfig(
    fsig="nnscaler.runtime.function.fullslice",
    args=[
        shape(1, 1, 1024, 1024),
        TensorInfo("value", slice(None, None, None)),
        TensorInfo("value", slice(None, None, None)),
        TensorInfo("value", slice(IRObject("sub391", value=0, is_constant=True), SIZE, None)),
        TensorInfo("value", slice(None, SIZE, None)),
    ],
    kwargs={},
    noutputs=1,
    parti_options=[],
)
BATCH_NORM = VerifyConfig(
    fsig="nnscaler.graph.function.wrapnn.wrap_batchnorm2d_func",
    args=[shape(32, 64, 8, 8), shape(64), shape(64), shape(64), shape(64), shape(1)],
    kwargs={"momentum": 0.1, "training": True, "track_running_stats": True, "eps": 1e-05},
    noutputs=1,
    parti_options=[{"idx": 0, "dim": 0}, {"idx": 0, "dim": 1}],
    non_grad_indices=[3, 4, 5],
)
ADDMM = VerifyConfig(
    fsig="torch.addmm",
    args=[shape(2, 3), shape(2, 3), shape(3, 3)],
    kwargs={},
    parti_options=[{"idx": 0, "dim": 0}, {"idx": 1, "dim": 0}],
    noutputs=1,
    import_customized_func="from torch import addmm",
)
INSTANCE_NORM = VerifyConfig(
    fsig="nnscaler.graph.function.wrapnn.wrap_instancenorm2d_func",
    args=[shape(32, 64, 8, 8), shape(64), shape(64), shape(64), shape(64)],
    kwargs={"training": True, "momentum": 0.1, "eps": 1e-05},
    noutputs=1,
    parti_options=[{"idx": 0, "dim": 0}],
    non_grad_indices=[3, 4],
)

# In the order of the document. A group of channels is an operator by itself, so that splitting the
# channels by groups is right; input channels of one group are terms of a sum.
RIGHT: dict[str, VerifyConfig] = {
    "conv2d of one image, by groups": conv2d(
        shape(8, 32, 32), shape(16, 4, 3, 3), shape(16), dim=0, groups=2
    ),
    "dropout of four dims": dropout(shape(1, 512, 4, 4), 0.5, [1, 2, 3]),
    "where, by what the mask is broadcast along": WHERE,
    "view, by a dim that stays": VIEW,
    "embedding, by columns": EMBEDDING,
    "dropout of three dims": dropout(shape(1, 9, 768), 0.1, [2]),
    "conv2d of one image, 8192 channels": conv2d(
        shape(8192, 4, 4), shape(8192, 512, 3, 3), shape(8192), dim=0, groups=16
    ),
    "conv2d of four images, by groups": conv2d(
        shape(4, 8, 32, 32), shape(16, 4, 3, 3), shape(16), dim=1, groups=2
    ),
    "conv2d, 8192 channels": conv2d(
        shape(1, 8192, 4, 4), shape(8192, 512, 3, 3), shape(8192), dim=1, groups=16
    ),
    "conv_transpose2d of one image, 8192 channels": transposed(
        "conv_transpose2d", shape(8192, 4, 4), shape(8192, 512, 3, 3), dim=0, groups=16
    ),
    "conv_transpose2d of one image, a sum": transposed(
        "conv_transpose2d", shape(512, 4, 4), shape(512, 512, 3, 3), dim=0, groups=1
    ),
    "conv_transpose2d, 8192 channels": transposed(
        "conv_transpose2d", shape(1, 8192, 4, 4), shape(8192, 512, 3, 3), dim=1, groups=16
    ),
    "conv_transpose2d, a sum": transposed(
        "conv_transpose2d", shape(1, 512, 4, 4), shape(512, 512, 3, 3), dim=1, groups=1
    ),
    "conv1d, a sum": conv1d(shape(1, 512, 400), shape(128, 512, 3), groups=1, imports=""),
    "conv1d, by groups": conv1d(
        shape(1, 8192, 400), shape(128, 512, 3), groups=16, imports=functional("conv1d")
    ),
    "conv_transpose1d, by groups": transposed(
        "conv_transpose1d", shape(1, 512, 100), shape(512, 256, 3), dim=1, groups=8
    ),
    "conv_transpose1d, a sum": transposed(
        "conv_transpose1d", shape(1, 512, 100), shape(512, 256, 3), dim=1, groups=1
    ),
    "batch norm, by samples and by channels": BATCH_NORM,
    "addmm, by rows": ADDMM,
    "instance norm, by samples": INSTANCE_NORM,
}
ALL = {**RIGHT, "fullslice, which has no options": FULLSLICE}
DRIFTS = "instance norm, by samples"
LARGE = {name for name in RIGHT if "8192" in name} | {"embedding, by columns"}
WHOLE = bool(os.environ.get("PARITAS_WHOLE_CORPUS"))
# The rules of the large ones are those of small ones, some of which the document does not have.
ASKED = [name for name in RIGHT if WHOLE or name not in LARGE]
SMALL = {
    name: transposed("conv_transpose2d", image, shape(32, 4, 3, 3), dim=dim, groups=16)
    for name, image, dim in (
        ("conv_transpose2d of one image, by groups", shape(32, 4, 4), 0),
        ("conv_transpose2d, by groups", shape(1, 32, 4, 4), 1),
    )
} | {
    "a small embedding, by columns": dataclasses.replace(
        EMBEDDING,
        args=[shape(1, 9), shape(61, 8)],
        kwargs={"padding_idx": None, "start": 0, "stop": 61},
    )
}


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.slow] if name in LARGE else [])
        for name in (*ASKED, *SMALL)
    ],
)
def test_an_option_that_is_right_is_found_right(name):
    config = (RIGHT | SMALL)[name]
    verdict = check_partition(config)
    assert verdict.passed, str(verdict)
    for option in config.parti_options:
        compared = [f for f in verdict.findings if f.path.startswith(f"{option}: split by ")]
        assert [f for f in compared if "output" in f.path]
        assert [f for f in compared if "gradient" in f.path]


# Convolutions and the large ones are asked by `check_partition` above: it is the same check.
@pytest.mark.parametrize(
    "name", [name for name in ALL if name not in {*LARGE, DRIFTS} and "conv" not in name]
)
def test_the_answer_of_each_is_true_without_a_warning(name):
    assert verify_partition_options(ALL[name]) is True


def test_nothing_to_split_is_a_success_that_says_so():
    verdict = check_partition(FULLSLICE)
    assert verdict.passed
    assert verdict.exit_code == 0
    assert [finding.path for finding in verdict.findings] == [
        "not split, output",
        "not split, gradient of args[0]",
    ]
    assert verdict.findings[0].shape == (1, 1, 9, 9)
    assert verdict.notes[-1] == (
        "nothing to split: parti_options is empty; each of 2 ranks ran the whole operator "
        "for comparison"
    )


def test_batch_norm_is_right_by_channels_and_by_samples_whose_statistics_are_exchanged():
    verdict = check_partition(BATCH_NORM)
    assert verdict.notes[1] == (
        "rule: a b c^ d^, b, b, b, b, ? -> a b c^ d^ ; process_group=ranks(a)"
    )
    # Outputs, the three buffers that the operator writes to, gradients of what has one.
    for label in ("{'idx': 0, 'dim': 0}: split by a", "{'idx': 0, 'dim': 1}: split by b"):
        assert [f.path for f in verdict.findings if f.path.startswith(label)] == [
            f"{label}, output",
            *(f"{label}, args[{place}] after the call" for place in (3, 4, 5)),
            *(f"{label}, gradient of args[{place}]" for place in (0, 1, 2)),
        ]


@pytest.mark.parametrize("group", [None, (0, 1)])
def test_the_process_group_of_batch_norm_is_accepted(group):
    kwargs = {**BATCH_NORM.kwargs, "process_group": group}
    assert verify_partition_options(dataclasses.replace(BATCH_NORM, kwargs=kwargs)) is True


def test_batch_norm_whose_rule_has_no_exchange_is_different_by_samples(undiagnosed):
    verdict = check_partition(BATCH_NORM, annotation="n c h^ w^, c, c, c, c, 1 -> n c h^ w^")
    wrong = {finding.path for finding in verdict.failures}
    label = "{'idx': 0, 'dim': 0}: split by n"
    assert verdict.status is Status.DIFFERENT
    assert wrong == {
        f"{label}, output",
        *(f"{label}, args[{place}] after the call" for place in (3, 4)),
        *(f"{label}, gradient of args[{place}]" for place in (0, 1)),
    }


def test_instance_norm_by_samples_is_right_and_leaves_each_rank_running_statistics_of_its_own():
    told = "each rank has its own args\\[3\\] \\(running_mean\\), args\\[4\\] \\(running_var\\)"
    with pytest.warns(ParityWarning, match=told):
        assert verify_partition_options(INSTANCE_NORM) is True
    verdict = check_partition(INSTANCE_NORM)
    label = "{'idx': 0, 'dim': 0}: split by a"
    assert [finding.path for finding in verdict.findings] == [
        f"{label}, output",
        *(f"{label}, gradient of args[{place}]" for place in (0, 1, 2)),
    ]
    assert verdict.coverage.skipped == tuple(
        f"{label}, args[{place}] after the call: the rule leaves it to each rank"
        for place in (3, 4)
    )
    assert [note.partition(": ")[0] for note in verdict.notes[2:]] == [
        "args[3] (running_mean) drifts",
        "args[4] (running_var) drifts",
    ]


def test_instance_norm_without_running_statistics_is_right_by_samples():
    none = TensorInfo("value", None)
    config = dataclasses.replace(INSTANCE_NORM, args=[*INSTANCE_NORM.args[:3], none, none])
    verdict = check_partition(config)
    assert verdict.passed, str(verdict)


def test_the_document_says_what_is_run_here():
    documents = [*DOCUMENTS.glob("*.txt")]
    texts = [text for text in map(Path.read_text, documents) if "class VerifyConfig:" in text]
    written = [
        block
        for text in texts
        for block in re.findall(r"^\w+ = (VerifyConfig\(.*?^\))", text, re.MULTILINE | re.DOTALL)
    ]
    if not written:
        pytest.skip("nnScaler's document is not beside this repository")
    names = {"VerifyConfig": VerifyConfig, "TensorInfo": TensorInfo, "IRObject": IRObject}
    configs = [eval(block, dict(names)) for block in written]
    here = list(ALL.values())
    missing = [config for config in configs if config not in here]
    assert not missing
    assert len(configs) == len(here)

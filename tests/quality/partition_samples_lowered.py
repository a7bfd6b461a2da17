"""Calls of operators that exported and decomposed graphs have, for the library of annotations."""

from __future__ import annotations

from quality.partition_samples import Sample, between, call, normal, signs, still, whole


def lowered() -> dict[str, list[Sample]]:
    scores, targets = normal(6, 5), whole(0, 5, 6)
    picture = normal(6, 4, 3, 5)
    ids = whole(0, 4, 3)
    samples = {
        "cross_entropy_loss": [
            call(scores, targets),
            call(scores, targets, None, 2),
            still(call(scores, targets, between(0.5, 2.0, 5), 0), 2),
            call(normal(6, 5, 12), whole(0, 5, 6, 12), None, 1, -100, 0.1),
        ],
        "native_dropout": [call(normal(6, 4), 0.5, False)],
        "_native_batch_norm_legit_no_training": [
            still(
                call(picture, normal(4), normal(4), normal(4), between(0.5, 2.0, 4), 0.1, 1e-5),
                3,
                4,
            )
        ],
        "native_group_norm": [call(picture, normal(4), normal(4), 6, 4, 15, 2, 1e-5)],
        "index": [
            call(normal(6, 4, 8), [None, ids]),
            call(normal(4, 6, 4), [ids, None, whole(0, 4, 2, 3)]),
            call(normal(6, 4, 4, 8), [None, ids, whole(0, 4, 2, 3)]),
        ],
    }
    for name in ("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss"):
        samples[f"aten.{name}"] = [
            call(normal(6, 12), normal(6, 12)),
            call(normal(6, 4), normal(6, 4), 2),
            call(normal(6, 4), normal(6, 4), 0),
        ]
    samples["aten.soft_margin_loss"] = [still(call(normal(6, 4), signs(6, 4), 2), 1)]
    for count, kinds in ((1, "nearest linear"), (2, "nearest bilinear bicubic"), (3, "trilinear")):
        line = normal(6, 4, *[3] * count)
        for kind in kinds.split():
            how = () if kind == "nearest" else (False,)
            samples[f"upsample_{kind}{count}d"] = [call(line, [6] * count, *how)]
    samples["upsample_nearest3d"] = [call(normal(6, 4, 3, 3, 3), [6, 6, 6])]
    return samples

"""More calls for the library of annotations: views, indices, losses, pooling, attention."""

from __future__ import annotations

import math

import torch

from quality.partition_samples import (
    Sample,
    between,
    call,
    definite,
    mask,
    normal,
    signs,
    still,
    whole,
)


def shapes() -> dict[str, list[Sample]]:
    views = [
        call(normal(6, 4), (-1, 2)),
        call(normal(1, 6, 12), (-1, 12)),
        call(normal(2, 12, 6), (2, 6, 2, 6)),
        call(normal(6, 4), (12, 2)),
    ]
    spread = [call(normal(6, 4), -1, 2), call(normal(2, 12, 6), 2, 6, 2, 6)]
    samples = {name: list(views) for name in ["view", "reshape", "_unsafe_view", "view_copy"]}
    samples["flatten"] = [
        call(normal(6, 4, 3)),
        call(normal(2, 6, 4), 1),
        call(normal(2, 6, 4), 0, 1),
    ]
    samples["ravel"] = [call(normal(6, 4))]
    samples["unflatten"] = [call(normal(2, 12), 1, (6, 2)), call(normal(12, 5), 0, (-1, 2))]
    samples["torch.Tensor.view"] = [*views, *spread]
    samples["torch.Tensor.reshape"] = [*views, *spread]
    samples["permute"] = [call(normal(2, 6, 4), (2, 0, 1))]
    samples["torch.Tensor.permute"] = [call(normal(2, 6, 4), 2, 0, 1), *samples["permute"]]
    for name in ["transpose", "swapaxes", "swapdims", "movedim", "moveaxis"]:
        samples[name] = [call(normal(2, 6, 4), 0, -1)]
    samples["t"] = [call(normal(6, 4))]
    samples["adjoint"] = [call(normal(2, 6, 4))]
    samples["unsqueeze"] = [call(normal(6, 4), 1), call(normal(6, 4), -1)]
    samples["squeeze"] = [call(normal(6, 1, 4), 1), call(normal(6, 1, 4), -1), call(normal(6, 1))]
    for name in ["expand", "broadcast_to"]:
        samples[name] = [call(normal(6, 1), (6, 4)), call(normal(6, 1), (2, -1, 4))]
    samples["torch.Tensor.expand"] = [call(normal(6, 1), 2, 6, 4), *samples["expand"]]
    samples["repeat"] = [call(normal(6, 4), (1, 2)), call(normal(6, 4), (2, 1, 1))]
    samples["torch.Tensor.repeat"] = [call(normal(6, 4), 1, 2)]
    samples["tile"] = [call(normal(6, 4), (1, 2))]
    samples["repeat_interleave"] = [call(normal(6, 4), 3, 0), call(normal(6, 4), 2, dim=1)]
    samples["pixel_shuffle"] = [call(normal(2, 12, 6, 4), 2)]
    samples["pixel_unshuffle"] = [call(normal(2, 3, 12, 4), 2)]
    return samples


def slicing() -> dict[str, list[Sample]]:
    pair = [normal(6, 4), normal(6, 3)]
    samples = {name: [call(pair, 1), call([normal(2, 6), normal(4, 6)])] for name in
               ["cat", "concat", "concatenate"]}  # fmt: skip
    samples["stack"] = [call([normal(6, 4), normal(6, 4)], 1), call([normal(6), normal(6)])]
    samples["hstack"] = [call(pair)]
    samples["chunk"] = [call(normal(6, 5), 2, 1), call(normal(6, 4), 3)]
    samples["split"] = [call(normal(6, 5), 2, 1)]
    samples["torch.split"] = [call(normal(6, 5), [2, 3], 1), *samples["split"]]
    samples["split_with_sizes"] = [call(normal(6, 5), [2, 3], 1)]
    samples["tensor_split"] = [call(normal(6, 5), 2, 1), call(normal(6, 5), [1, 3], 1)]
    samples["unbind"] = [call(normal(3, 6, 4)), call(normal(6, 2), 1)]
    samples["select"] = [call(normal(6, 4, 3), 1, 2)]
    samples["narrow"] = [call(normal(6, 5), 1, 1, 3)]
    samples["slice"] = [call(normal(6, 5), 1, 1, 4)]
    samples["diff"] = [call(normal(6, 5)), call(normal(6, 5), 1, 0)]
    samples["torch.Tensor.unfold"] = [call(normal(6, 5), 1, 3, 1)]
    samples["aten.unfold"] = samples["torch.Tensor.unfold"]
    samples["flip"] = [call(normal(6, 4, 3), (1,)), call(normal(6, 4), [0, 1])]
    samples["roll"] = [call(normal(6, 4), 1, 1), call(normal(6, 4, 3), (1, 2), (0, 2))]
    samples["aten.roll"] = [call(normal(6, 4), [1], [1])]
    samples["rot90"] = [call(normal(6, 4, 3), 1, [1, 2])]
    for name in ["triu", "tril"]:
        samples[name] = [call(normal(6, 4, 3)), call(normal(6, 4, 3), 1)]
    samples["diagonal"] = [call(normal(4, 3, 6)), call(normal(6, 4, 3), 0, 1, 2)]
    samples["pad"] = [call(normal(4, 6, 3), (1, 2)), call(normal(4, 6, 3), (0, 0, 1, 1), value=2.0),
                      call(normal(4, 6, 3), (1, 1), mode="reflect")]  # fmt: skip
    samples["constant_pad_nd"] = [call(normal(4, 6, 3), [1, 2], 0.5)]
    for name in ["fft", "ifft", "rfft", "hfft", "irfft"]:
        samples[name] = [call(normal(6, 4)), call(normal(4, 6), dim=0)]
    samples["cross"] = [call(normal(6, 3), normal(6, 3))]
    for name in ["inv", "inverse", "cholesky", "det", "logdet", "matrix_exp"]:
        samples[name] = [call(definite(6, 3, 3))]
    return samples


def indexing() -> dict[str, list[Sample]]:
    ids, table = whole(0, 5, 4, 6), normal(5, 6)
    weights = normal(4, 6)
    at = torch.tensor([2, 0, 3, 1, 4, 3])
    return {
        "embedding": [call(ids, table), call(ids, table, padding_idx=1),
                      call(ids, table, scale_grad_by_freq=True)],
        "aten.embedding": [call(table, ids)],
        "torch.embedding": [call(table, ids)],
        "embedding_bag": [call(ids, table),
                          call(ids, table, mode="sum", per_sample_weights=weights),
                          call(ids, table, mode="max"), call(ids, table, padding_idx=1)],
        "gather": [call(normal(6, 5), 1, whole(0, 5, 6, 4)),
                   call(normal(5, 6), 0, whole(0, 5, 4, 3))],
        "take_along_dim": [call(normal(6, 5), whole(0, 5, 6, 4), 1)],
        "scatter": [call(normal(6, 5), 1, torch.argsort(normal(6, 5), 1)[:, :3], normal(6, 3))],
        "scatter_add": [call(normal(6, 5), 1, whole(0, 5, 6, 4), normal(6, 4))],
        "index_select": [call(normal(4, 5), 1, at), call(normal(5, 4), 0, at)],
        "index_add": [call(normal(4, 5), 1, at, normal(4, 6)),
                      call(normal(5, 4), 0, at, normal(6, 4), alpha=2.0)],
        "index_copy": [call(normal(4, 5), 1, at[:3], normal(4, 3))],
        "index_fill": [call(normal(4, 5), 1, at[:3], 1.5)],
        "take": [call(normal(4, 5), whole(0, 20, 6, 2))],
        "bucketize": [call(normal(6, 4), torch.arange(4).double())],
        "isin": [call(whole(0, 9, 6, 4), torch.tensor([1, 2, 3]))],
        "searchsorted": [call(torch.arange(4).double(), normal(6, 4)),
                         call(normal(6, 5).sort(1).values, normal(6, 4))],
    }  # fmt: skip


def losses() -> dict[str, list[Sample]]:
    ways = [{"reduction": way} for way in ("none", "sum", "mean")]
    samples: dict[str, list[Sample]] = {}
    for name in ["mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss"]:
        samples[name] = [call(normal(6, 12), normal(6, 12), **way) for way in ways]
    samples["poisson_nll_loss"] = [call(normal(6, 12), between(0, 3, 6, 12), **way) for way in ways]
    for name in ["soft_margin_loss", "hinge_embedding_loss"]:
        samples[name] = [still(call(normal(6, 12), signs(6, 12), **way), 1) for way in ways]
    chances = between(0.1, 0.9, 6, 12)
    samples["binary_cross_entropy"] = [
        still(call(chances, between(0, 1, 6, 12), between(0.5, 2, 12), **way), 2) for way in ways
    ]
    samples["binary_cross_entropy_with_logits"] = [
        still(
            call(
                normal(6, 12),
                between(0, 1, 6, 12),
                between(0.5, 2, 6, 1),
                pos_weight=between(1, 2, 12),
                **way,
            ),
            2,
            "pos_weight",
        )
        for way in ways
    ]
    logs, shares = normal(6, 12).log_softmax(1), normal(6, 12).softmax(1)
    samples["kl_div"] = [
        call(logs, shares, reduction=way) for way in ("none", "sum", "batchmean", "mean")
    ]
    samples["gaussian_nll_loss"] = [
        call(normal(6, 12), normal(6, 12), between(0.5, 2, 6, 12), **way) for way in ways
    ]
    samples["margin_ranking_loss"] = [call(normal(6), normal(6), signs(6), **way) for way in ways]
    samples["cosine_embedding_loss"] = [
        call(normal(6, 4), normal(6, 4), signs(6), **way) for way in ways
    ]
    samples["triplet_margin_loss"] = [
        call(normal(6, 4), normal(6, 4), normal(6, 4), **way) for way in ways
    ]
    samples["multi_margin_loss"] = [
        still(call(normal(6, 4), whole(0, 4, 6), weight=between(0.5, 2, 4), **way), "weight")
        for way in ways
    ]
    labels = torch.stack([torch.tensor([2, 0, -1, 1])] * 6)
    samples["multilabel_margin_loss"] = [call(normal(6, 4), labels, **way) for way in ways]
    samples["multilabel_soft_margin_loss"] = [
        call(normal(6, 4), mask(6, 4).double(), **way) for way in ways
    ]
    lengths = torch.tensor([8, 7, 6, 8, 8, 5]), torch.tensor([3, 2, 3, 1, 2, 3])
    samples["ctc_loss"] = [
        call(normal(8, 6, 5).log_softmax(2), whole(1, 5, 6, 3), *lengths, **way) for way in ways
    ]
    samples["nll_loss"] = _classified(ways)
    samples["cross_entropy"] = [
        *samples["nll_loss"],
        *(
            call(normal(6, 4, 12), normal(6, 4, 12).softmax(1), between(0.5, 2, 4), **way)
            for way in ways
        ),
        call(normal(6, 4), whole(0, 4, 6), label_smoothing=0.2),
    ]
    return samples


def _classified(ways: list[dict[str, str]]) -> list[Sample]:
    holes = torch.tensor([0, 3, -100, 1, -100, 2])
    samples = []
    for way in ways:
        samples += [
            call(normal(6, 4), whole(0, 4, 6), **way),
            call(normal(6, 4, 12), whole(0, 4, 6, 12), **way),
            call(normal(6, 4), holes, **way),
            still(call(normal(6, 4), whole(0, 4, 6), between(0.5, 2, 4), **way), 2),
            call(normal(6, 4), whole(0, 4, 6), ignore_index=2, **way),
        ]
    return samples


def pooling() -> dict[str, list[Sample]]:
    samples: dict[str, list[Sample]] = {}
    for count in (1, 2, 3):
        x = normal(2, 6, *(12, 6, 4)[:count])
        samples[f"max_pool{count}d"] = [call(x, 2), call(x, 3, 2, 1), call(x[0], 2)]
        full = f"torch.nn.functional.max_pool{count}d"
        samples[full] = [*samples[f"max_pool{count}d"], call(x, 2, return_indices=True)]
        samples[f"avg_pool{count}d"] = [call(x, 2), call(x, 3, 2, 1)]
        samples[f"lp_pool{count}d"] = [call(x, 2.0, 2)]
        samples[f"adaptive_avg_pool{count}d"] = [call(x, 2), call(x[0], 3)]
        samples[f"adaptive_max_pool{count}d"] = [call(x, 2)]
    picture = normal(2, 6, 12, 4)
    samples["aten.max_pool2d"] = [call(picture, [2, 2], []), call(picture, [2])]
    samples["max_pool2d_with_indices"] = [call(picture, [2, 2])]
    samples["interpolate"] = [
        call(picture, scale_factor=2),
        call(picture, size=(5, 7), mode="bilinear", align_corners=False),
        call(picture, scale_factor=(1.0, 2.0)),
    ]
    samples["grid_sample"] = [
        call(normal(2, 6, 4, 5), between(-1, 1, 2, 3, 6, 2), align_corners=False)
    ]
    samples["unfold"] = [call(picture, 2), call(picture[0], (3, 2), padding=1)]
    samples["fold"] = [call(normal(2, 12, 15), (4, 6), 2), call(normal(2, 4, 15), (4, 6), 2)]
    return samples


def attention() -> dict[str, list[Sample]]:
    query, key, value = normal(2, 3, 6, 4), normal(2, 3, 5, 4), normal(2, 3, 5, 6)
    return {
        "scaled_dot_product_attention": [
            call(query, key, value),
            call(query, key, value, normal(6, 5)),
            call(query, key, value, attn_mask=mask(2, 1, 6, 5) | (torch.arange(5) == 0)),
            call(query, key, value, is_causal=True),
            call(normal(2, 12, 6, 4), normal(2, 6, 5, 4), normal(2, 6, 5, 3), enable_gqa=True),
            call(normal(2, 6, 3, 4), normal(2, 1, 5, 4), normal(2, 1, 5, 3), enable_gqa=True),
            call(normal(6, 4), normal(5, 4), normal(5, 6), scale=1 / math.pi),
        ]
    }


def nnscaler() -> dict[str, list[Sample]]:
    ids, table = whole(0, 7, 2, 6), normal(7, 4)
    ids[0, :3] = torch.tensor([6, 0, 3])
    vectors = (normal(6), normal(6), normal(6), between(0.5, 2, 6))
    images = normal(4, 6, 3, 2)
    return {
        "nnscaler.runtime.function.embedding": [
            call(ids, table, padding_idx=None, start=0, stop=7),
            call(ids, table, 3, 0, 7),
        ],
        "identity": [call(normal(6, 4))],
        "nndropout": [call(normal(6, 4), 0.3)],
        "nnscaler.runtime.function.index_select": [call(normal(4, 5), ids[0] % 5, 1)],
        "fullslice": [
            call(normal(6, 4, 9), slice(None), slice(1, 3)),
            call(normal(6, 4, 9), None, 2),
        ],
        "nnscaler.runtime.function.layer_norm": [call(normal(2, 4, 6), normal(6), normal(6), (6,))],
        "wrap_batchnorm2d_func": [
            still(call(images, *vectors, torch.zeros(1), training=training), 3, 4, 5)
            for training in (True, False)
        ],
        "wrap_instancenorm2d_func": [
            still(call(images, *vectors), 3, 4),
            call(images, *vectors[:2], None, None),
        ],
    }

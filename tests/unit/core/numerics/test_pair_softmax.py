"""The divergence of two softmaxes, against its definition in 80 digits."""

from __future__ import annotations

import decimal

import pytest
import torch

from paritas.core.numerics.pair_figures import pair_figures
from unit.core.numerics.noisy_pairs import approx, noisy, use_tiny_blocks


@pytest.fixture
def _tiny_blocks(monkeypatch):
    use_tiny_blocks(monkeypatch)


def divergence(reference, candidate):
    """Of two softmaxes by definition, in 80 digits."""
    with decimal.localcontext() as context:
        context.prec = 80
        r, c = ([decimal.Decimal(x) for x in side.tolist()] for side in (reference, candidate))
        p, q = ([x.exp() for x in side] for side in (r, c))
        log_ratio = (sum(p) / sum(q)).ln()
        weighted = (w * (x - y - log_ratio) for w, x, y in zip(p, r, c, strict=True))
        return float(sum(weighted) / sum(p))


@pytest.mark.usefixtures("_tiny_blocks")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("noise", [1e-7, 1e-5, 1e-3, 0.01, 0.1, 1.0, 20.0, 300.0])
@pytest.mark.parametrize("scale", [0.01, 1.0, 30.0])
def test_divergence_is_right_over_all_sizes_of_differences(dtype, noise, scale):
    reference, candidate = noisy(60, noise, scale=scale, dtype=dtype)
    found, expected = pair_figures(reference, candidate), divergence(reference, candidate)
    loose = 2e-5 if dtype is torch.float32 else 1e-8
    far = 1e-14 if noise * scale > 5 else 0.0  # then it is a difference of two logarithms after all
    assert found.kl_divergence == approx(expected, rel=loose, absolute=far)


@pytest.mark.usefixtures("_tiny_blocks")
def test_divergence_where_one_element_takes_it_all():
    reference = torch.linspace(-900, 0, 50, dtype=torch.float64)
    for place in (0, 25, 49):
        candidate = reference.clone()
        candidate[place] = 1500.0
        expected = divergence(reference, candidate)
        for pair in ((reference, candidate), (reference.flip(0), candidate.flip(0))):
            assert pair_figures(*pair).kl_divergence == approx(expected, absolute=1e-12)
        expected = divergence(candidate, reference)
        assert pair_figures(candidate, reference).kl_divergence == approx(expected, absolute=1e-12)


def test_a_shift_has_no_divergence():
    reference, _ = noisy(200, dtype=torch.float64)
    assert pair_figures(reference, reference + 0.125).kl_divergence < 1e-15


def test_divergence_of_large_tensors_with_small_weights():
    # Most weights are so small that products with them would be subnormal.
    reference, candidate = noisy(noise=1e-4, scale=25.0)
    r, c = (side.double().log_softmax(0) for side in (reference, candidate))
    expected = torch.nn.functional.kl_div(c, r, reduction="sum", log_target=True).item()
    assert pair_figures(reference, candidate).kl_divergence == approx(expected, rel=1e-4)

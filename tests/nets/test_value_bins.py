"""Values to bins and back: every spacing, label and mean, against its definition."""

from __future__ import annotations

import math
from itertools import product

import pytest
import torch

from loxodon.nets import ValueBins

SETTINGS = list(product(("symlog", "linear"), ("two_hot", "hl_gauss"), ("bins", "values")))


@pytest.mark.parametrize(("spacing", "labels", "mean_of"), SETTINGS)
def test_values_survive_encoding_and_stay_within_the_range(spacing: str, labels: str, mean_of: str) -> None:
    bins = ValueBins(
        num_bins=65, low=-100.0, high=50.0, spacing=spacing, labels=labels, mean_of=mean_of, unit=0.5
    )
    y = torch.tensor([[-30.0, -3.0, -0.01], [0.0, 0.2, 20.0]])
    probs = bins.encode(y)
    assert probs.shape == (2, 3, 65)
    assert (probs >= 0).all()
    torch.testing.assert_close(probs.sum(-1), torch.ones(2, 3))
    torch.testing.assert_close(bins.decode(probs.log()), y, rtol=1e-3, atol=1e-3)
    ends = bins.decode(bins.encode(torch.tensor([-1e9, 1e9])).log())
    if labels == "two_hot":
        torch.testing.assert_close(ends, torch.tensor([-100.0, 50.0]))


def test_two_hot_labels_by_hand() -> None:
    linear = ValueBins(num_bins=5, low=-2.0, high=2.0, spacing="linear")
    assert linear.encode(torch.tensor([0.25])).tolist() == [[0.0, 0.0, 0.75, 0.25, 0.0]]
    symlog = ValueBins(num_bins=3, low=-(math.e - 1), high=math.e - 1)  # the centers are -1, 0, 1 in z
    z = 0.3
    torch.testing.assert_close(
        symlog.encode(torch.tensor(math.exp(z) - 1)), torch.tensor([0.0, 1 - z, z]), rtol=0, atol=1e-6
    )


def test_gaussian_labels_are_the_mass_of_each_bin() -> None:
    bins = ValueBins(num_bins=7, low=-3.0, high=3.0, spacing="linear", labels="hl_gauss", sigma=0.75)
    normal, edges = torch.distributions.Normal(0.4, 0.75), torch.arange(-3.5, 4.0)
    mass = normal.cdf(edges).diff()
    torch.testing.assert_close(bins.encode(torch.tensor(0.4)), mass / mass.sum())


@pytest.mark.parametrize(("mean_of", "expected"), [("values", 50.0), ("bins", math.sqrt(101.0) - 1.0)])
def test_an_even_chance_of_0_and_100(mean_of: str, expected: float) -> None:
    bins = ValueBins(num_bins=3, low=-100.0, high=100.0, mean_of=mean_of)
    mean = bins.decode(torch.tensor([0.0, 0.5, 0.5]).log())
    assert mean.item() == pytest.approx(expected, rel=1e-5)


def test_values_are_exact_under_autocast() -> None:
    bins, logits = ValueBins(low=-1000.0, high=1000.0), torch.randn(50, 4, ValueBins().num_bins)
    exact = bins.decode(logits)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(bins.decode(logits), exact)
        assert bins.decode(logits.bfloat16()).dtype == torch.float32


def test_cross_entropy_is_that_of_torch() -> None:
    torch.manual_seed(0)
    bins, logits, labels = ValueBins(num_bins=6), torch.randn(3, 4, 6), torch.rand(3, 1, 6).softmax(-1)
    expected = -(labels * logits.log_softmax(-1)).sum(-1)
    torch.testing.assert_close(bins.cross_entropy(logits, labels), expected)


@pytest.mark.parametrize(
    "wrong", [{"spacing": "log"}, {"labels": "x"}, {"mean_of": "x"}, {"num_bins": 1}, {"low": 1e6}]
)
def test_impossible_bins_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"ValueBins.*Fix: bind"):
        ValueBins(**wrong)  # type: ignore[arg-type]

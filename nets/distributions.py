"""Policy distributions: they interpret an actor head's output, and sample, score and differentiate it."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import gin
import torch
from torch import Tensor
from torch.nn import functional as F

if TYPE_CHECKING:
    from typing_extensions import Self


class PolicyDistribution(ABC):
    """A distribution over actions with any leading shape.

    `params` is (..., P); actions are (..., A): one-hot floats for discrete spaces (for several factors, their
    one-hots side by side), numbers for continuous ones (in [-1, 1], if `is_bounded`).
    """

    is_discrete: ClassVar[bool]
    is_bounded: ClassVar[bool] = True  # False: samples may lie outside of [-1, 1]; the agent clips them
    has_gradient: ClassVar[bool] = True  # True if gradients pass through samples

    def __init__(self, params: Tensor) -> None:
        # A logit of -inf, as some heads mask actions, would give NaN in sums.
        self.params = params.float().clamp(min=_NO_ACTION) if self.is_discrete else params.float()

    def masked(self, allowed: Tensor) -> PolicyDistribution:
        """The same distribution with probability exactly 0 where allowed (..., A) bool is False.

        Raises: ValueError for a continuous distribution.
        """
        raise ValueError(
            f"{type(self).__name__} cannot mask single actions; only discrete policies can. Fix: remove "
            "action_mask_key for Box action spaces."
        )

    @staticmethod
    @abstractmethod
    def num_params(action_dim: int) -> int:
        """Number of parameters P for an action of width A."""

    @abstractmethod
    def sample(self) -> Tensor:
        """Draw actions, (..., A) float32, with gradients if the distribution supports them."""

    @abstractmethod
    def mode(self) -> Tensor:
        """The greedy action, (..., A) float32."""

    def act(self, sample: bool) -> Tensor:
        """Actions for the environment: int64 (...,) or (..., K) if discrete, else (..., A) float32."""
        action = self.sample() if sample else self.mode()
        return action.argmax(-1) if self.is_discrete else action

    @abstractmethod
    def log_prob(self, action: Tensor) -> Tensor:
        """Log-probability of actions, (..., A) -> (..., 1), summed over action dimensions."""

    @abstractmethod
    def entropy(self) -> Tensor:
        """Entropy in nats, (..., 1); an estimate if no closed form exists."""

    @abstractmethod
    def kl(self, other: Self) -> Tensor:
        """Kullback-Leibler divergence of `other` from this one, E_self[log(self / other)], (..., 1).

        It is an estimate if no closed form exists.
        """


_NO_ACTION = -1e9  # logit of padding and forbidden actions; their probability is exactly zero
_NEVER = torch.finfo(torch.float32).tiny  # smallest ringing time; avoids 0 / 0


class _Discrete(PolicyDistribution):
    """One or several choices among finitely many actions."""

    is_discrete = True
    _log_probs: Tensor | None = None
    _probs: Tensor | None = None

    @property
    def log_probs(self) -> Tensor:
        """Logarithms of the probabilities, (..., A), or (..., K, M) for K factors."""
        if self._log_probs is None:  # torch.compile cannot trace the lock of functools.cached_property
            with _gradient_of(self.params):
                self._log_probs = self._logarithms()
        return self._log_probs

    @abstractmethod
    def _logarithms(self) -> Tensor:
        """Compute `log_probs`."""

    @property
    def probs(self) -> Tensor:
        """Probabilities in the shape of `log_probs`; zero for the padding of smaller factors."""
        if self._probs is None:
            with _gradient_of(self.params):
                self._probs = self.log_probs.exp()
        return self._probs


class Categorical(_Discrete):
    """Softmax over A logits without clamping, so that every probability in (0, 1) can be reached."""

    def _logarithms(self) -> Tensor:
        return F.log_softmax(self.params, dim=-1)

    @staticmethod
    def num_params(action_dim: int) -> int:
        return action_dim

    def masked(self, allowed: Tensor) -> PolicyDistribution:
        return type(self)(self.params.masked_fill(~allowed, _NO_ACTION))

    def act(self, sample: bool) -> Tensor:
        if not sample:
            return self.params.argmax(-1)
        # An exponential race: the first of A clocks with rates p rings at index i with probability p_i.
        return (self.probs / torch.empty_like(self.params).exponential_().clamp_min(_NEVER)).argmax(-1)

    def sample(self) -> Tensor:
        return F.one_hot(self.act(sample=True), self.params.shape[-1]).float()

    def mode(self) -> Tensor:
        return F.one_hot(self.act(sample=False), self.params.shape[-1]).float()

    def log_prob(self, action: Tensor) -> Tensor:
        return (self.log_probs * action).sum(-1, keepdim=True)

    def entropy(self) -> Tensor:
        return -(self.probs * self.log_probs).sum(-1, keepdim=True)

    def kl(self, other: Self) -> Tensor:
        log_ratio = torch.where(self.probs > 0.0, self.log_probs - other.log_probs, 0.0)
        return (self.probs * log_ratio).sum(-1, keepdim=True)


class MultiCategorical(_Discrete):
    """K independent softmaxes, one for each factor of an action.

    Samples carry gradients by the straight-through Gumbel-softmax estimator: their value is one-hot, and
    their gradient is that of softmax((log p + Gumbel noise) / temperature).

    Source: Jang et al. 2017, arXiv:1611.01144; Maddison et al. 2017, arXiv:1611.00712.

    Args:
        params: (..., A) logits of all factors, side by side.
        nvec: number of actions of each factor; A is their sum.
        temperature: above 0; low temperatures have less bias and more variance.
    """

    def __init__(self, params: Tensor, nvec: Sequence[int], temperature: float = 1.0) -> None:
        super().__init__(params)
        self.nvec, self.temperature = tuple(nvec), temperature

    @staticmethod
    def num_params(action_dim: int) -> int:
        return action_dim

    def _logarithms(self) -> Tensor:
        return F.log_softmax(self._by_factor(self.params, _NO_ACTION), dim=-1)

    def _by_factor(self, side_by_side: Tensor, fill: float) -> Tensor:
        """(..., A) -> (..., K, M)."""
        most = max(self.nvec)
        if min(self.nvec) == most:
            return torch.unflatten(side_by_side, -1, (len(self.nvec), most))
        parts = torch.split(side_by_side, list(self.nvec), dim=-1)
        return torch.stack([F.pad(part, (0, most - part.shape[-1]), value=fill) for part in parts], dim=-2)

    def _side_by_side(self, by_factor: Tensor) -> Tensor:
        """(..., K, M) -> (..., A)."""
        if min(self.nvec) == max(self.nvec):
            return by_factor.flatten(-2)
        return torch.cat([by_factor[..., k, :n] for k, n in enumerate(self.nvec)], dim=-1)

    def masked(self, allowed: Tensor) -> PolicyDistribution:
        return MultiCategorical(self.params.masked_fill(~allowed, _NO_ACTION), self.nvec, self.temperature)

    def act(self, sample: bool) -> Tensor:
        if not sample:
            return self.log_probs.argmax(-1)
        clocks = torch.empty_like(self.log_probs).exponential_().clamp_min(_NEVER)
        return (self.probs / clocks).argmax(-1)

    def sample(self) -> Tensor:
        if not (torch.is_grad_enabled() and self.log_probs.requires_grad):
            return self._one_hot(self.act(sample=True))
        clocks = torch.empty_like(self.log_probs).exponential_().clamp_min(_NEVER)
        noisy = self.log_probs - clocks.log()
        soft = self._side_by_side(F.softmax(noisy / self.temperature, dim=-1))
        return self._one_hot(noisy.argmax(-1)) + (soft - soft.detach())

    def mode(self) -> Tensor:
        return self._one_hot(self.act(sample=False))

    def _one_hot(self, indices: Tensor) -> Tensor:
        return self._side_by_side(F.one_hot(indices, max(self.nvec)).float())

    def log_prob(self, action: Tensor) -> Tensor:
        return (self.log_probs * self._by_factor(action, 0.0)).sum((-2, -1))[..., None]

    def entropy(self) -> Tensor:
        return -(self.probs * self.log_probs).sum((-2, -1))[..., None]

    def kl(self, other: Self) -> Tensor:
        return (self.probs * (self.log_probs - other.log_probs)).sum((-2, -1))[..., None]


class Bernoulli(MultiCategorical):
    """K independent bits, each with one parameter: the logit of the value 1.

    Actions have the form of a MultiCategorical with K factors of two. The log-probability of an action is the
    sum over its bits (AMAGO uses their mean).

    Args:
        params: (..., K) logits.
        temperature: see MultiCategorical.
    """

    def __init__(self, params: Tensor, temperature: float = 1.0) -> None:
        super().__init__(params, (2,) * params.shape[-1], temperature)

    @staticmethod
    def num_params(action_dim: int) -> int:
        return action_dim // 2

    def _logarithms(self) -> Tensor:
        return torch.stack([F.logsigmoid(-self.params), F.logsigmoid(self.params)], dim=-1)

    def masked(self, allowed: Tensor) -> PolicyDistribution:
        zero, one = self._by_factor(allowed, 0.0).unbind(-1)
        ruled_in = torch.where(one, -_NO_ACTION, _NO_ACTION)
        return Bernoulli(torch.where(zero & one, self.params, ruled_in), self.temperature)


class DistributionType(Protocol):
    """A function from parameters to a distribution: a class of distributions, or a MultiCategoricalType."""

    is_discrete: bool

    def __call__(self, params: Tensor, /) -> PolicyDistribution:
        """Make a distribution over (..., A) from params (..., P)."""

    def num_params(self, action_dim: int, /) -> int:
        """Number of parameters P for an action of width A."""


@gin.configurable(denylist=["nvec"])
class MultiCategoricalType:
    """Makes MultiCategorical distributions of one action space.

    Args:
        nvec: number of actions of each factor.
        temperature: temperature of the gradients through samples, see MultiCategorical.
    Raises: ValueError for a temperature that is not above 0.
    """

    def __init__(self, nvec: Sequence[int], *, temperature: float = 1.0) -> None:
        if not temperature > 0:
            raise ValueError(
                f"MultiCategoricalType.temperature is {temperature}, but must be above 0. Fix: bind "
                "MultiCategoricalType.temperature, usually to 1.0."
            )
        self.nvec, self.temperature, self.is_discrete = tuple(nvec), temperature, True

    def __call__(self, params: Tensor) -> MultiCategorical:
        """Make the distribution from logits (..., sum(nvec))."""
        return MultiCategorical(params, self.nvec, self.temperature)

    def num_params(self, action_dim: int) -> int:
        """Number of parameters P for an action of width A."""
        return action_dim


MAX_ABS_ACTION = 0.999  # at the bounds, stored actions have no finite pre-image, or no density


class TanhGaussian(PolicyDistribution):
    """A Gaussian squashed by tanh, with its standard deviation kept between e^-5 and e^2.

    Source: Haarnoja et al. 2018, arXiv:1801.01290, appendix C.
    """

    is_discrete = False
    LOG_STD_MIN, LOG_STD_MAX = -5.0, 2.0

    def __init__(self, params: Tensor) -> None:
        super().__init__(params)
        self.loc, raw_std = self.params.chunk(2, dim=-1)
        self.log_std = _between(raw_std, self.LOG_STD_MIN, self.LOG_STD_MAX)

    @staticmethod
    def num_params(action_dim: int) -> int:
        return 2 * action_dim

    def sample(self) -> Tensor:
        return torch.tanh(self.loc + self.log_std.exp() * torch.randn_like(self.loc))

    def mode(self) -> Tensor:
        return torch.tanh(self.loc)

    def log_prob(self, action: Tensor) -> Tensor:
        pre_tanh = torch.atanh(action.clamp(-MAX_ABS_ACTION, MAX_ABS_ACTION))
        gaussian = _log_prob_of_normal(pre_tanh, self.loc, self.log_std)
        return (gaussian - _log_slope_of_tanh(pre_tanh)).sum(-1, keepdim=True)

    def entropy(self) -> Tensor:
        """Entropy of the Gaussian before tanh, plus the mean log slope of tanh, estimated by one sample."""
        drawn = torch.addcmul(self.loc, self.log_std.exp(), torch.randn_like(self.loc))
        return (_entropy_of_normal(self.log_std) + _log_slope_of_tanh(drawn)).sum(-1, keepdim=True)

    def kl(self, other: Self) -> Tensor:
        """Divergence of the Gaussians before tanh, which is the same because tanh is a bijection."""
        return _kl_of_normals(self.loc, self.log_std, other.loc, other.log_std)


class Gaussian(PolicyDistribution):
    """A Gaussian with independent dimensions over all real actions; the agent clips samples.

    `params` (..., 2A) contains the mean, then the logarithm of the standard deviation.
    """

    is_discrete = False
    is_bounded = False
    LOG_STD_MIN, LOG_STD_MAX = -20.0, 2.0

    def __init__(self, params: Tensor) -> None:
        super().__init__(params)
        self.loc, log_std = self.params.chunk(2, dim=-1)
        self.log_std = log_std.clamp(self.LOG_STD_MIN, self.LOG_STD_MAX)

    @staticmethod
    def num_params(action_dim: int) -> int:
        return 2 * action_dim

    def sample(self) -> Tensor:
        return torch.addcmul(self.loc, self.log_std.exp(), torch.randn_like(self.loc))

    def mode(self) -> Tensor:
        return self.loc

    def log_prob(self, action: Tensor) -> Tensor:
        return _log_prob_of_normal(action, self.loc, self.log_std).sum(-1, keepdim=True)

    def entropy(self) -> Tensor:
        return _entropy_of_normal(self.log_std).sum(-1, keepdim=True)

    def kl(self, other: Self) -> Tensor:
        return _kl_of_normals(self.loc, self.log_std, other.loc, other.log_std)


class Beta(PolicyDistribution):
    """A Beta distribution with one mode per dimension, stretched from [0, 1] to [-1, 1].

    Both concentrations are 1 + softplus of `params` (..., 2A), so that densities vanish at the bounds.

    Source: Chou et al. 2017, "Improving stochastic policy gradients with the Beta distribution".
    """

    is_discrete = False

    def __init__(self, params: Tensor) -> None:
        super().__init__(params)
        one, other = (1.0 + 1e-4 + F.softplus(self.params)).chunk(2, dim=-1)
        self.unit = torch.distributions.Beta(one, other, validate_args=False)

    @staticmethod
    def num_params(action_dim: int) -> int:
        return 2 * action_dim

    def sample(self) -> Tensor:
        action: Tensor = 2.0 * self.unit.rsample() - 1.0
        return action

    def mode(self) -> Tensor:
        action: Tensor = 2.0 * self.unit.mode - 1.0
        return action

    def log_prob(self, action: Tensor) -> Tensor:
        inside = 0.5 * (action.clamp(-MAX_ABS_ACTION, MAX_ABS_ACTION) + 1.0)
        log_probs: Tensor = self.unit.log_prob(inside) - math.log(2.0)  # type: ignore[no-untyped-call]
        return log_probs.sum(-1, keepdim=True)

    def entropy(self) -> Tensor:
        entropies: Tensor = self.unit.entropy() + math.log(2.0)  # type: ignore[no-untyped-call]
        return entropies.sum(-1, keepdim=True)

    def kl(self, other: Self) -> Tensor:
        divergence: Tensor = torch.distributions.kl_divergence(self.unit, other.unit)
        return divergence.sum(-1, keepdim=True)


class GaussianMixture(PolicyDistribution):
    """A mixture of five Gaussians with independent dimensions, squashed by tanh.

    `params` (..., 5 (1 + 2A)) contain, per component, the logit of its weight, its means, and inputs of its
    standard deviations, which lie between e^-5 and e^2. Samples carry no gradient, because the choice of a
    component has none. The entropy is estimated by one weighted sample of every component, with the right
    gradient, including that of the weights. Divergences are estimated by a single sample. The greedy action
    is the center of the component at which the density of the mixture, before tanh, is largest.
    """

    is_discrete = False
    has_gradient = False
    NUM_COMPONENTS = 5

    def __init__(self, params: Tensor) -> None:
        super().__init__(params)
        by_component = torch.unflatten(self.params, -1, (self.NUM_COMPONENTS, -1))
        self.log_weights = F.log_softmax(by_component[..., 0], dim=-1)  # (..., M)
        self.loc, raw_std = by_component[..., 1:].chunk(2, dim=-1)  # (..., M, A)
        self.log_std = _between(raw_std, TanhGaussian.LOG_STD_MIN, TanhGaussian.LOG_STD_MAX)

    @classmethod
    def num_params(cls, action_dim: int) -> int:
        return cls.NUM_COMPONENTS * (1 + 2 * action_dim)

    @torch.no_grad()
    def sample(self) -> Tensor:
        chosen = Categorical(self.log_weights).sample()[..., None]
        loc, std = (chosen * self.loc).sum(-2), (chosen * self.log_std.exp()).sum(-2)
        return torch.tanh(torch.addcmul(loc, std, torch.randn_like(loc)))

    def mode(self) -> Tensor:
        densest = self._log_density(self.loc).argmax(-1)[..., None, None]
        return torch.tanh(self.loc.take_along_dim(densest, dim=-2).squeeze(-2))

    def log_prob(self, action: Tensor) -> Tensor:
        pre_tanh = torch.atanh(action.clamp(-MAX_ABS_ACTION, MAX_ABS_ACTION))[..., None, :]
        return self._log_density(pre_tanh) - _log_slope_of_tanh(pre_tanh).sum(-1)

    def _log_density(self, pre_tanh: Tensor) -> Tensor:
        """Log density of the mixture before tanh, (..., K, A) -> (..., K)."""
        loc, log_std = self.loc[..., None, :, :], self.log_std[..., None, :, :]
        parts = _log_prob_of_normal(pre_tanh[..., None, :], loc, log_std).sum(-1)
        return torch.logsumexp(self.log_weights[..., None, :] + parts, dim=-1)

    def entropy(self) -> Tensor:
        drawn = torch.addcmul(self.loc, self.log_std.exp(), torch.randn_like(self.loc))
        surprise = _log_slope_of_tanh(drawn).sum(-1) - self._log_density(drawn)
        return (self.log_weights.exp() * surprise).sum(-1, keepdim=True)

    def kl(self, other: Self) -> Tensor:
        action = self.sample()
        return self.log_prob(action) - other.log_prob(action)


def _gradient_of(params: Tensor) -> AbstractContextManager[Any]:
    """Enable gradients for a cached result, even if it is first computed inside torch.no_grad()."""
    return torch.set_grad_enabled(torch.is_grad_enabled() or params.requires_grad)


def _between(raw: Tensor, low: float, high: float) -> Tensor:
    """Map all real numbers smoothly to (low, high)."""
    return low + 0.5 * (high - low) * (torch.tanh(raw) + 1.0)


def _log_slope_of_tanh(x: Tensor) -> Tensor:
    """Compute log(1 - tanh(x)^2) in a form that stays finite for large |x|."""
    return 2.0 * (math.log(2.0) - x - F.softplus(-2.0 * x))


def _log_prob_of_normal(x: Tensor, loc: Tensor, log_std: Tensor) -> Tensor:
    """Elementwise log-density."""
    z = (x - loc) * (-log_std).exp()
    return -0.5 * z.square() - log_std - 0.5 * math.log(2.0 * math.pi)


def _entropy_of_normal(log_std: Tensor) -> Tensor:
    """Elementwise entropy."""
    return log_std + 0.5 * math.log(2.0 * math.pi * math.e)


def _kl_of_normals(loc: Tensor, log_std: Tensor, other_loc: Tensor, other_log_std: Tensor) -> Tensor:
    """Divergence (..., 1), summed over independent dimensions; arguments are (..., A)."""
    log_ratio = log_std - other_log_std
    z = (loc - other_loc) * (-other_log_std).exp()
    return (0.5 * ((2.0 * log_ratio).exp() + z.square() - 1.0) - log_ratio).sum(-1, keepdim=True)

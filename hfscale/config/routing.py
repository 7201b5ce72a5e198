"""The user's choices for routing and balance: :class:`RoutingConfig`."""

import math
from dataclasses import dataclass

from ..errors import ConfigError, check_choice, check_number, check_switch
from .declared import Spelled

ROUTERS = ("model", "switch", "gshard", "noisy_topk")
"""Rules that choose experts: the model's own router, or one of the papers' on its logits."""

SCORES = ("softmax", "sigmoid")

_OWN_CAPACITY = {"switch": 1.25, "gshard": 1.0}


@dataclass(frozen=True)
class RoutingConfig(Spelled):
    """The router of mixtures of experts, and the losses that balance experts.

    Every default leaves the model as it is: ``RoutingConfig()`` only counts, for :func:`hfscale.expert_load`.

    The losses are added to ``model(**batch).loss`` and, in its gradients, to that of :func:`hfscale.train_step`, which
    returns the mean over tokens alone, whatever ``config.output_router_logits`` says. Without ``labels`` they are left
    out. They are defined per sequence, over tokens that the attention mask does not mark as padding, so that value and
    gradient do not depend on how a step is divided over data ranks, microbatches, tensor ranks and stages.
    Transformers' own auxiliary loss differs: it is added once per rank and microbatch, and takes all layers for one, so
    that at balance it is ``k`` (experts per token), where this one is 1 per layer. A coefficient ``c`` there, for ``L``
    layers, is about ``balance_loss=c * k / L``.

    Attributes:
        router: ``"model"``: the model's own. ``"switch"``: the best expert, with its probability (Fedus et al. 2021).
            ``"gshard"``: the best two, the second at random with twice its score as probability (Lepikhin et al. 2020).
            ``"noisy_topk"``: as many as the model's, the best after noise on the logits (Shazeer et al. 2017), whose
            size is given, not learned: a checkpoint has no weights for it.
        capacity_factor: room for each sequence's tokens at an expert, in multiples of an even share, ``k * tokens /
            experts``; tokens beyond it are dropped. ``None``: 1.25 for ``switch``, 1 for ``gshard``, no limit
            otherwise. ``math.inf`` is no limit.
        balance_loss: coefficient of the load-balancing loss (Fedus et al. 2021), in each sequence (DeepSeek-AI 2024,
            V3), summed over layers.
        balance_scores: scores of that loss: ``"softmax"`` or ``"sigmoid"`` of the logits, normalized; ``None``: as in
            the router's own code.
        z_loss: coefficient of the router z-loss (Zoph et al. 2022, ST-MoE), summed over layers.
        bias_update_rate: after every :func:`hfscale.train_step` in training, move the bias that the router adds to each
            expert's score for the choice alone by this much towards balance (Wang et al. 2024).
        noise_std: standard deviation of the noise of ``noisy_topk``, on the logits; ``None``: ``1 / experts`` (Riquelme
            et al. 2021, V-MoE).
        force_balanced: spread tokens round-robin, whatever the router says: for benchmarks.

    Raises:
        ConfigError: a value is unknown or impossible.
    """

    router: str = "model"
    capacity_factor: float | None = None
    balance_loss: float = 0.0
    balance_scores: str | None = None
    z_loss: float = 0.0
    bias_update_rate: float = 0.0
    noise_std: float | None = None
    force_balanced: bool = False

    def __post_init__(self) -> None:
        check_choice("router", self.router, ROUTERS)
        if self.balance_scores is not None:
            check_choice("balance_scores", self.balance_scores, SCORES)
        for name in ("balance_loss", "z_loss", "bias_update_rate"):
            check_number(name, getattr(self, name), least=0)
        if self.noise_std is not None:
            check_number("noise_std", self.noise_std, least=0)
            if self.router != "noisy_topk":
                raise ConfigError(
                    f"noise_std={self.noise_std} needs router='noisy_topk': set that too, or leave it out"
                )
        if self.capacity_factor is not None:
            check_number("capacity_factor", self.capacity_factor, above=0, infinite=True)
        check_switch("force_balanced", self.force_balanced)

    @property
    def capacity(self) -> float | None:
        """The capacity factor; ``None`` for no limit."""
        chosen = (
            _OWN_CAPACITY.get(self.router) if self.capacity_factor is None else self.capacity_factor
        )
        return None if chosen is None or math.isinf(chosen) else chosen

    @property
    def has_loss(self) -> bool:
        """Return whether an auxiliary loss is added to the loss."""
        return bool(self.balance_loss or self.z_loss)

    @property
    def needs_logits(self) -> bool:
        """Return whether the router's logits are read."""
        return self.router != "model" or self.has_loss

    @property
    def needs_tokens(self) -> bool:
        """Return whether routing depends on the sequence and position of a row, or on padding."""
        return self.needs_logits or self.capacity is not None or bool(self.bias_update_rate)

    @property
    def draws(self) -> bool:
        """Return whether routes are random in training."""
        return self.router in ("gshard", "noisy_topk")

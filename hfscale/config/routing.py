"""Define the user's options for routing and load balancing: :class:`RoutingConfig`."""

import math
from dataclasses import dataclass

from ..errors import ConfigError, check_choice, check_number, check_switch
from .declared import Spelled

ROUTERS = ("model", "switch", "gshard", "noisy_topk")
"""Rules that choose experts: the model's own router, or a router from a paper applied to the model's router logits."""

SCORES = ("softmax", "sigmoid")

_OWN_CAPACITY = {"switch": 1.25, "gshard": 1.0}


@dataclass(frozen=True)
class RoutingConfig(Spelled):
    """Options of the router of MoE layers, and of the losses that balance experts.

    With all defaults the model computes as before: ``RoutingConfig()`` only counts tokens for
    :func:`hfscale.expert_load`.

    The losses are added to ``model(**batch).loss``. :func:`hfscale.train_step` adds their gradients, but returns the
    mean loss over tokens without them. ``config.output_router_logits`` does not matter. Without ``labels`` the losses
    are omitted. They are defined per sequence, over tokens that are not padding by the attention mask, so value and
    gradient do not depend on how a step is divided over data ranks, microbatches, tensor ranks and stages.

    transformers' auxiliary loss differs from ``balance_loss``: it is added once per rank and microbatch, and treats
    all layers like one layer. If experts are balanced, it is ``k`` (experts per token) in total, while hfscale's loss
    is 1 per layer. A coefficient ``c`` of transformers' loss corresponds to about ``balance_loss=c * k / L`` for ``L``
    layers.

    Attributes:
        router: ``"model"``: the model's own router. ``"switch"``: the best expert, weighted by its probability (Fedus
            et al. 2021). ``"gshard"``: the best two experts; the second is used with a probability of twice its score
            (Lepikhin et al. 2020). ``"noisy_topk"``: the best experts after noise is added to the logits, as many as
            the model's router chooses (Shazeer et al. 2017). The size of the noise is given and not learned, since
            checkpoints have no weights for it.
        capacity_factor: the most tokens of a sequence that an expert accepts, as a multiple of the mean over experts,
            ``k * tokens / experts`` with ``k`` experts per token; further tokens are dropped. ``None``: 1.25 for
            ``switch``, 1 for ``gshard``, no limit otherwise. ``math.inf``: no limit.
        balance_loss: coefficient of the load-balancing loss (Fedus et al. 2021), computed per sequence (DeepSeek-AI
            2024, V3), summed over layers.
        balance_scores: scores in the load-balancing loss: ``"softmax"`` or normalized ``"sigmoid"`` of the logits;
            ``None``: the function that the router's own code uses.
        z_loss: coefficient of the router z-loss (Zoph et al. 2022, ST-MoE), summed over layers.
        bias_update_rate: step size of the bias that the router adds to each expert's score only for choosing experts.
            After every :func:`hfscale.train_step` in training, the bias moves by this much towards balanced loads
            (Wang et al. 2024).
        noise_std: standard deviation of the noise that ``noisy_topk`` adds to the logits; ``None``: ``1 / experts``
            (Riquelme et al. 2021, V-MoE).
        force_balanced: assign tokens to experts round-robin and ignore the router's choice, for benchmarks.

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
                    f"noise_std={self.noise_std} needs router='noisy_topk', got router={self.router!r}: set "
                    "router='noisy_topk', or leave noise_std out"
                )
        if self.capacity_factor is not None:
            check_number("capacity_factor", self.capacity_factor, above=0, infinite=True)
        check_switch("force_balanced", self.force_balanced)

    @property
    def capacity(self) -> float | None:
        """The capacity factor that is used: the given one, or the router's default; ``None`` if there is no limit."""
        chosen = (
            _OWN_CAPACITY.get(self.router) if self.capacity_factor is None else self.capacity_factor
        )
        return None if chosen is None or math.isinf(chosen) else chosen

    @property
    def has_loss(self) -> bool:
        """Return whether these options add a loss (load balancing or z-loss) to the model's loss."""
        return bool(self.balance_loss or self.z_loss)

    @property
    def needs_logits(self) -> bool:
        """Return whether these options need the router's logits: for hfscale's own routers, and for losses."""
        return self.router != "model" or self.has_loss

    @property
    def needs_tokens(self) -> bool:
        """Return whether these options need to know of each token which sequence it is in, at which position, and
        whether it is padding.
        """
        return self.needs_logits or self.capacity is not None or bool(self.bias_update_rate)

    @property
    def draws(self) -> bool:
        """Return whether the router chooses experts by random numbers in training."""
        return self.router in ("gshard", "noisy_topk")

"""What to do with the learning rate when the global batch changes: two rules of thumb, stated as what they are."""

from dataclasses import dataclass

from ...errors import ConfigError


@dataclass(frozen=True)
class Rule:
    """One rule.

    Attributes:
        name: of it.
        learning_rate: that it gives.
        says: where it is from, and what for.
    """

    name: str
    learning_rate: float
    says: str


def learning_rates(learning_rate: float, tokens: float, new_tokens: float) -> tuple[Rule, Rule]:
    """What a learning rate that was right for ``tokens`` a step becomes for ``new_tokens``.

    Raises:
        ConfigError: one of them is not positive.
    """
    if min(learning_rate, tokens, new_tokens) <= 0:
        raise ConfigError(
            f"a learning rate of {learning_rate:g} for {tokens:,.0f} and {new_tokens:,.0f} tokens cannot be: "
            "use positive numbers"
        )
    times = new_tokens / tokens
    return (
        Rule(
            "square root",
            learning_rate * times**0.5,
            "Granziol et al. 2022, derived for Adam and its kin, while the batch is smaller than the gradient's noise",
        ),
        Rule(
            "linear",
            learning_rate * times,
            "Goyal et al. 2017, measured with SGD on ImageNet and a warm-up, up to a batch of 8 thousand pictures",
        ),
    )

"""Draws in which a prompt or a prefix is trained in place of adapters: pure.

They are drawn by themselves, so that a seed's other draws are those they were before.
"""

from random import Random
from typing import Any

from .draw import PROMPTS, Draw


def choose_prompt(random: Random, draw: Draw) -> Draw:
    """The same draw, or now and then one with a prompt, without what a prompt refuses."""
    if random.random() > 0.06 or draw.routing is not None:
        return draw
    return draw.change(
        peft=_prompt(random, draw),
        peft_later=True,
        peft_fresh=False,
        frozen=(),
        positions=False,
        packed=False,
        label_smoothing=0.0,
        user_loss=False,
        between=tuple(name for name in draw.between if name in ("eval", "save", "deepcopy")),
    )


def _prompt(random: Random, draw: Draw) -> dict[str, Any]:
    kind = random.choice(PROMPTS)
    drawn: dict[str, Any] = {
        "prompt": kind,
        "num_virtual_tokens": random.choice((1, 2, 3, 5, 8)),
        "task_type": "CAUSAL_LM",
    }
    # PEFT copies rows into float32, whatever their type.
    if kind == "PromptTuningConfig" and draw.dtype != "float64" and random.random() < 0.6:
        drawn["prompt_tuning_init"] = "SAMPLE_VOCAB"
    if kind == "PromptEncoderConfig":
        drawn["encoder_hidden_size"] = random.choice((8, 12))
    if kind == "PrefixTuningConfig" and random.random() < 0.5:
        drawn.update(prefix_projection=True, encoder_hidden_size=12)
    return drawn

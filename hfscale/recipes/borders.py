"""Whether a family of models keeps packed examples apart, tried on a tiny clone."""

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig

from hfscale.families.clone import VOCABULARY, tiny_clone

from .packing import Example, packed_rows
from .schema import RecipeError

_LENGTHS = (1, 6, 1, 4)
_TOLERANCE = 1e-4
"""Relative, in float32. What crosses a border changes the logits of these weights by far more."""


def check_borders(config: PreTrainedConfig) -> None:
    """Run a packed row, and its examples one by one, through a tiny model of the same family.

    Raises:
        RecipeError: the logits differ. transformers makes the mask of a packed row from its positions, which some
            families do not give it (gpt_oss, falcon), and recurrent layers carry their state over a border.
    """
    try:
        difference = _difference(config)
    except Exception as error:  # whatever a model does that is given positions it does not take, or is not to be shrunk
        raise _refused(config, f"{type(error).__name__}: {error}") from error
    if not difference <= _TOLERANCE:
        raise _refused(config, f"logits of a packed row differ from those of its examples by {difference:.1e}")


def _difference(config: PreTrainedConfig) -> float:
    """Between the logits of a packed row and those of its examples, relative to the largest."""
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(tiny_clone(config), dtype=torch.float32).eval()
        for parameter in model.parameters():  # fresh weights are so small that layers hardly change the stream
            parameter.add_(0.1 * torch.randn_like(parameter))
        examples = [torch.randint(3, VOCABULARY, (length,)).tolist() for length in _LENGTHS]
        packed = packed_rows([Example(ids, ids) for ids in examples], sum(_LENGTHS))
        row, positions = (torch.from_numpy(packed[name][0]).long()[None] for name in ("input_ids", "position_ids"))
        found = model(input_ids=row, position_ids=positions, use_cache=False).logits
        expected = torch.cat([model(input_ids=torch.tensor([ids]), use_cache=False).logits for ids in examples], dim=1)
    return float((found - expected).abs().max() / expected.abs().max())


def _refused(config: PreTrainedConfig, found: str) -> RecipeError:
    return RecipeError(
        f"data.packing=true puts several examples into one row, and models of type {config.model_type} do not keep "
        f"them apart, as far as a tiny one shows ({found}): use data.packing=false"
    )

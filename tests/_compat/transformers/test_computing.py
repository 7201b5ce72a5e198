"""What ``computing.py`` and ``packed_rows.py`` rely on: attention functions, masks, and what stays wide."""

import inspect
from typing import Any

import pytest
import torch

from ..relied_on import relying

MASKS = "transformers.masking_utils"
relies_on = relying("transformers/computing.py")
of_both = relying("transformers/computing.py", "transformers/packed_rows.py")


def cache_of(function: Any) -> str:
    """The name of the argument with earlier keys and values."""
    names = inspect.signature(inspect.unwrap(function)).parameters
    return "cache" if "cache" in names else "past_key_values"


@relies_on(f"{MASKS}._preprocess_mask_arguments")
@of_both(f"{MASKS}.find_packed_sequence_indices")
def test_mask_arguments_are_prepared_by_one_function(
    config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The functions that make masks call ``_preprocess_mask_arguments`` of their module, which returns first whether to
    leave, then the mask, for one of four dims at once; and it calls ``find_packed_sequence_indices``.
    """
    from transformers import masking_utils

    seen = []
    prepared = masking_utils._preprocess_mask_arguments

    def unless_made(config: Any, embeds: Any, mask: Any, *args: Any, **kwargs: Any) -> Any:
        if mask != "made":
            return prepared(config, embeds, mask, *args, **kwargs)
        ready = torch.empty(1, 1, 1, 1, device="meta")
        leaves, left, *rest = prepared(config, embeds, ready, *args, **kwargs)
        assert left is ready
        return leaves, mask, *rest

    monkeypatch.setattr(masking_utils, "_preprocess_mask_arguments", unless_made)
    monkeypatch.setattr(masking_utils, "find_packed_sequence_indices", seen.append)
    config._attn_implementation = "eager"
    given = {"config": config, "inputs_embeds": torch.ones(1, 3, 8)}
    name = cache_of(masking_utils.create_causal_mask)
    given |= {name: None, "position_ids": torch.arange(3)[None]}
    made = masking_utils.create_causal_mask(attention_mask="made", **given)
    assert made == "made"
    assert not seen
    assert masking_utils.create_causal_mask(attention_mask=None, **given).shape == (1, 1, 3, 3)
    assert len(seen) == 1


@of_both(f"{MASKS}.ALL_MASK_ATTENTION_FUNCTIONS")
@relying("transformers/packed_rows.py")(
    f"{MASKS}.sdpa_mask:skip", f"{MASKS}.packed_sequence_mask_function"
)
def test_mask_functions_are_looked_up_as_they_are_called(
    config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A mask is made by ``ALL_MASK_ATTENTION_FUNCTIONS[name]`` of the module, called by name with ``batch_size``,
    ``q_length``, ``kv_length`` and ``mask_function``; arguments that end in ``skip`` let it make none.
    """
    from transformers import masking_utils

    calls = []
    stock = masking_utils.ALL_MASK_ATTENTION_FUNCTIONS
    config._attn_implementation = "sdpa"

    class Noted:
        def __getitem__(self, name: str) -> Any:
            def made(**given: Any) -> Any:
                calls.append(given)
                skips = {key: False for key in given if key.endswith("skip")}
                assert skips
                return stock[name](**{**given, **skips})

            return made

        def __getattr__(self, name: str) -> Any:
            return getattr(stock, name)

    monkeypatch.setattr(masking_utils, "ALL_MASK_ATTENTION_FUNCTIONS", Noted())
    name = cache_of(masking_utils.create_causal_mask)
    given = {"config": config, "inputs_embeds": torch.ones(1, 3, 8), "position_ids": None}
    mask = masking_utils.create_causal_mask(attention_mask=None, **{name: None}, **given)
    assert mask.shape == (1, 1, 3, 3)
    (call,) = calls
    assert {"batch_size", "q_length", "kv_length", "mask_function"} <= call.keys()
    assert call["mask_function"] is masking_utils.causal_mask_function
    apart = masking_utils.packed_sequence_mask_function(torch.tensor([[0, 0, 1]]))
    assert bool(apart(0, 0, 1, 0))
    assert not bool(apart(0, 0, 2, 0))


@relies_on("torch.nn.attention.flex_attention.create_mask")
def test_mask_functions_are_vectorized() -> None:
    """``create_mask`` calls a function of one position that reads tensors at its indices, for all positions at once."""
    from torch.nn.attention.flex_attention import create_mask

    keys = torch.tensor([True, False, True])

    def sees(example: Any, head: Any, query: Any, key: Any) -> Any:
        return keys[key] & (key <= query)

    found = create_mask(sees, 2, 1, 2, 3, device="cpu")
    assert torch.equal(found, (keys & torch.ones(2, 3).tril().bool()).expand(2, 1, -1, -1))


@relies_on("transformers.PreTrainedModel._keep_in_fp32_modules_strict")
def test_a_model_names_what_stays_in_32_bits(config: Any) -> None:
    """A model of 16 bits keeps the parameters of ``_keep_in_fp32_modules_strict`` in 32: patterns of names with ``*``,
    or ``None`` or an empty set.
    """
    from transformers import LlamaForCausalLM

    class Wide(LlamaForCausalLM):
        _keep_in_fp32_modules_strict = ("self_attn.q*",)

    model = Wide(config)
    assert set(model._keep_in_fp32_modules_strict) == {"self_attn.q*"}
    assert not LlamaForCausalLM(config)._keep_in_fp32_modules_strict

"""What other libraries have renamed, each in the release that is installed: our own code goes by either name.

Nothing of hfscale is imported before a test runs: it may fail as a whole, where the tests beside this one say why.
"""

import inspect
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

CACHES = ("cache", "layer_past", "past_key_value", "past_key_values")


@pytest.mark.parametrize("name", [*CACHES, "whatever_it_is_called_next"])
def test_a_cache_is_emptied_whatever_its_name(name: str) -> None:
    """_compat/transformers/computing.py."""
    from transformers import DynamicCache

    from hfscale._compat.transformers.computing import without_cache

    args, kwargs = without_cache(
        (DynamicCache(),), {name: DynamicCache(), "use_cache": True, "position_ids": 1}
    )
    assert args == (None,)
    assert kwargs == {name: None, "use_cache": False, "position_ids": 1}


@pytest.mark.parametrize("recompute", ["full", ["self_attn"], 2])
def test_recomputation_leaves_the_cache_alone(recompute: Any) -> None:
    """In a plain loop, in which configs leave it on."""
    from transformers import AutoModelForCausalLM

    import hfscale
    from hfscale import MemoryConfig

    from ..tiny_models import tiny

    ids = torch.randint(3, 60, (2, 9))
    mask = torch.ones_like(ids)
    mask[0, 6:] = 0
    torch.manual_seed(0)
    stock: Any = AutoModelForCausalLM.from_config(tiny("llama")).train()
    batch = {"input_ids": ids, "labels": ids, "attention_mask": mask}
    stock(**batch).loss.backward()
    expected = {name: parameter.grad.clone() for name, parameter in stock.named_parameters()}
    stock.zero_grad()
    model = hfscale.parallelize(stock, memory=MemoryConfig(recompute=recompute)).train()
    model(**batch, use_cache=True).loss.backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name])


def test_windows_are_counted_from_where_a_document_begins() -> None:
    """_compat/transformers/packed_rows.py; transformers 5.24 has another name for the function that did both."""
    from transformers import masking_utils

    from hfscale._compat.transformers.packed_rows import keep_documents_apart

    if not hasattr(masking_utils, "remap_positions_for_packed_sequence"):
        pytest.skip("this transformers counts from where a row begins")

    positions = torch.tensor([[0, 1, 2, 0, 1, 2, 3]])
    documents = torch.tensor([[0, 0, 0, 1, 1, 1, 1]])
    chunks = keep_documents_apart(
        lambda _, __, query, key: query // 2 == key // 2, positions, documents
    )
    row = torch.zeros(1, 1, dtype=torch.long)
    tokens = torch.arange(7)
    seen = chunks(row, row, tokens[:, None], tokens[None])
    assert (
        seen.int().tolist()
        == torch.block_diag(*(torch.ones(n, n) for n in (2, 1, 2, 2))).int().tolist()
    )


def test_gloo_is_made_with_what_torch_gives() -> None:
    """_compat/torch_gloo.py; torch 2.14 names one more argument."""
    from hfscale._compat.torch_gloo import _OfOneDevice

    store = dist.HashStore()
    made = _OfOneDevice(store, 0, 1, timeout=timedelta(seconds=5), enable_reconfigure=False)
    assert made.size() == 1
    assert "enable_reconfigure" in inspect.signature(_OfOneDevice.__init__).parameters

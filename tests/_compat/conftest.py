"""A process group of one rank, in this process, as long as a test runs."""

from collections.abc import Iterator
from typing import Any

import pytest


@pytest.fixture
def world_of_one() -> Iterator[None]:
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def config() -> Any:
    """Describe a model that builds in milliseconds."""
    from transformers import LlamaConfig

    return LlamaConfig(
        vocab_size=17,
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        bos_token_id=1,
        eos_token_id=2,
    )


@pytest.fixture
def mixture() -> Any:
    """Describe a mixture of experts of that size."""
    from transformers import MixtralConfig

    return MixtralConfig(
        vocab_size=17,
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        num_local_experts=2,
    )

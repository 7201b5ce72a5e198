"""Hooks that people hang on modules and parameters do what they do in one process, or are refused."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

import hfscale
from hfscale import ConfigError, ParallelConfig
from hfscale.testing import RankPool
from hfscale.testing.differences import difference
from hfscale.testing.parity import ragged_batch

from ...sweeps import cases
from ...tiny_models import tiny

Pools = Callable[[int], RankPool]


def steer(model: Any) -> None:
    """As one steers a model: something is added to what modules return, before and in the layers."""
    inner = model.get_submodule("model")
    for module in (inner.embed_tokens, *inner.layers, inner.norm):
        module.register_forward_hook(_shifted)
    inner.layers[1].register_forward_pre_hook(lambda _, given: (given[0] * 1.5, *given[1:]))


def _shifted(_: nn.Module, given: Any, output: Any) -> Any:
    return (output[0] + 0.1, *output[1:]) if isinstance(output, tuple) else output + 0.1


def scale_gradients(model: Any) -> None:
    for name, parameter in model.named_parameters():
        if "norm" in name or "q_proj" in name:
            parameter.register_hook(lambda grad: grad * 3)


def batch() -> dict[str, Tensor]:
    return ragged_batch(torch.Generator().manual_seed(0), 67, 4, 9, False)


def run(
    path: str, layout: dict[str, Any], change: Callable[[Any], None]
) -> dict[str, Tensor] | str:
    model = hfscale.from_pretrained(
        path, parallel=ParallelConfig(**layout), dtype=torch.float64
    ).train()
    change(model)
    given = batch()
    rank = hfscale.batch_rank(model)
    world = hfscale.batch_world(model)
    try:
        hfscale.train_step(model, {name: value.chunk(world)[rank] for name, value in given.items()})
    except ConfigError as error:
        return str(error)
    torch.optim.SGD(model.parameters(), lr=0.5).step()
    return {name: tensor.clone() for name, tensor in hfscale.stream_weights(model, ranks="all")}


LAYOUTS = [
    {"tp_size": 2},
    {"dp_shard_size": 2},
    {"pp_size": 2},
    {"pp_size": 2, "pipeline_schedule": "zbv"},
]


@pytest.mark.parametrize("change", [steer, scale_gradients])
@pytest.mark.parametrize("layout", cases(LAYOUTS, daily=LAYOUTS[1:3]))
def test_hooks(
    pools: Pools, layout: dict[str, Any], change: Callable[[Any], None], tmp_path: Path
) -> None:
    torch.manual_seed(0)
    stock = AutoModelForCausalLM.from_config(
        tiny("llama", num_hidden_layers=4), dtype=torch.float64
    )
    stock.save_pretrained(tmp_path)
    change(stock)
    given = batch()
    labels = nn.functional.pad(given["labels"], (0, 1), value=-100)[:, 1:]
    logits = stock(input_ids=given["input_ids"], attention_mask=given["attention_mask"]).logits
    nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()).backward()
    torch.optim.SGD(stock.parameters(), lr=0.5).step()
    for found in pools(2).run(run, str(tmp_path), layout, change):
        if change is scale_gradients and "dp_shard_size" in layout:
            assert "would never run" in found
        else:
            assert all(
                difference(found[name], value) < 1e-10 for name, value in stock.state_dict().items()
            )

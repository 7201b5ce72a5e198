"""Parameters of several types under the data axes: each keeps its own, and every gradient is one process's."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaForCausalLM

import hfscale
from hfscale import ParallelConfig
from hfscale.testing import RankPool
from hfscale.train.runtime import local_tensor, runtime_of
from tests.tiny_models import needs, tiny

from ...families import config_of

Pools = Callable[[int], RankPool]
LAYOUTS: dict[str, dict[str, Any]] = {
    "shard2": {"dp_shard_size": 2},
    "replicate2": {"dp_replicate_size": 2},
    "tp2-shard2": {"tp_size": 2, "dp_shard_size": 2},
    "pp2-shard2": {"pp_size": 2, "dp_shard_size": 2, "num_microbatches": 2},
    "replicate2-shard2": {"dp_replicate_size": 2, "dp_shard_size": 2},
}
IDS = torch.arange(48).reshape(8, 6) % 61


class _Scale(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, size, dtype=torch.float32))

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden * self.weight.to(hidden.dtype)


class _ScaledNorm(nn.Module):
    """Holds a parameter of the model's type and one of float32 itself, and one of float32 in a module within."""

    def __init__(self, norm: Any) -> None:
        super().__init__()
        self.weight = norm.weight
        self.variance_epsilon = norm.variance_epsilon
        self.bias = nn.Parameter(torch.linspace(-0.1, 0.1, len(self.weight), dtype=torch.float32))
        self.scale = _Scale(len(self.weight))

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = hidden * torch.rsqrt(hidden.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return self.scale(self.weight * hidden + self.bias.to(hidden.dtype))


class MixedLlama(LlamaForCausalLM):
    """With norms that hold two types."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        for layer in self.model.layers:
            layer.post_attention_layernorm = _ScaledNorm(layer.post_attention_layernorm)


def _model() -> MixedLlama:
    torch.manual_seed(0)
    model = MixedLlama._from_config(tiny("llama"), dtype=torch.float64).train()
    for layer in model.model.layers:  # the Auto classes build in one default type
        norm: Any = layer.post_attention_layernorm
        norm.bias.data, norm.scale.weight.data = (
            norm.bias.data.float(),
            norm.scale.weight.data.float(),
        )
    return model


def trained(sizes: dict[str, Any], expected: tuple[float, dict[str, Tensor]]) -> dict[str, float]:
    """The largest error of each parameter's gradient, relative to its largest entry; of the loss."""
    model = hfscale.parallelize(_model(), ParallelConfig(**sizes))
    world = hfscale.batch_world(model)
    rows = IDS[hfscale.batch_rank(model) :: world]
    loss, gradients = expected
    errors = {
        "loss": abs(float(hfscale.train_step(model, {"input_ids": rows, "labels": rows})) - loss)
    }
    runtime = runtime_of(model)
    for planned, parameter in runtime.parameters():
        assert parameter.dtype == gradients[planned.name].dtype == parameter.grad.dtype, (
            planned.name
        )  # type: ignore[union-attr]
        wanted = planned.take(gradients[planned.name], runtime.mesh.ranks)
        error = (local_tensor(parameter.grad) - wanted).abs()  # type: ignore[arg-type]
        errors[planned.name] = float(error.max() / wanted.abs().max()) if error.numel() else 0.0
    return errors


def _reference() -> tuple[float, dict[str, Tensor]]:
    model = _model()
    loss = model(input_ids=IDS, labels=IDS).loss
    loss.backward()
    return float(loss.detach()), {
        name: p.grad for name, p in model.named_parameters() if p.grad is not None
    }


@pytest.mark.parametrize("layout", LAYOUTS)
def test_two_types_in_one_layer(pools: Pools, layout: str) -> None:
    sizes = LAYOUTS[layout]
    world = ParallelConfig(**sizes).total_size
    for errors in pools(world).run(trained, sizes, _reference()):
        assert {name: error for name, error in errors.items() if error > 1e-6} == {}


def _mixed_step(name: str) -> tuple[float, str]:
    model = hfscale.from_config(
        config_of(name), parallel=ParallelConfig(dp_shard_size=2), mixed_precision="bf16"
    )
    loss = hfscale.train_step(model, {"input_ids": IDS, "labels": IDS})
    return float(loss), str(next(p.grad.dtype for p in model.parameters() if p.grad is not None))


@needs("inkling2_text")
def test_layers_that_widen_inside_train_in_mixed_precision(pools: Pools) -> None:
    """The wrapper casts what a layer is given; these go on in 32 bits, and multiply by weights in 16."""
    alone = hfscale.from_config(config_of("inkling2_text"))
    wanted = float(hfscale.train_step(alone, {"input_ids": IDS, "labels": IDS}))
    for loss, dtype in pools(2).run(_mixed_step, "inkling2_text"):
        assert loss == pytest.approx(wanted, rel=0.02)
        assert dtype == "torch.float32"

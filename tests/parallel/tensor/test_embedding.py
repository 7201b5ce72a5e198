"""Embeddings cut along the vocabulary whose stock class computes on what it has looked up."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

import hfscale
from hfscale import ParallelConfig
from hfscale.models.precision import keep_float64
from hfscale.testing import Case, RankPool, measure_parity
from hfscale.train.runtime import runtime_of
from tests.tiny_models import tiny

Pools = Callable[[int], RankPool]


class NormedEmbedding(nn.Embedding):
    """As Inkling's: what is looked up is normed, with weights of the norm's own."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.embed_norm = nn.RMSNorm(self.embedding_dim)

    def forward(self, input: Tensor) -> Tensor:
        return self.embed_norm(super().forward(input)) + 0.125


def _model(path: str, adapted: bool) -> Any:
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(tiny("llama"), dtype=torch.float64)
    model.model.embed_tokens = NormedEmbedding(67, 32, dtype=torch.float64)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    if adapted:
        model = peft.PeftModel.from_pretrained(model, path, is_trainable=True)
    return model


def worst_gradient(path: str, layout: dict[str, Any], adapted: bool) -> dict[str, float]:
    """Name of a parameter -> the difference of its gradient between the layout and one process, relative."""
    expected = _model(path, adapted)
    ids = torch.arange(26).view(2, 13) * 2
    with keep_float64():
        expected(input_ids=ids, labels=ids).loss.backward()
    model = hfscale.parallelize(_model(path, False), ParallelConfig(**layout))
    if adapted:
        model = hfscale.get_peft_model(model, path)
    with keep_float64():
        hfscale.train_step(model, {"input_ids": ids, "labels": ids})
    runtime = runtime_of(model)
    wanted = {
        name.removeprefix("base_model.model."): p.grad for name, p in expected.named_parameters()
    }
    named = {id(p): name.removeprefix("base_model.model.") for name, p in model.named_parameters()}
    found = {}
    for planned, parameter in runtime.parameters():
        whole = wanted[named[id(parameter)]]
        assert (whole is None) == (parameter.grad is None), planned.name
        if whole is not None:
            share = planned.take(whole, runtime.mesh.ranks)
            found[planned.name] = float((share - parameter.grad).abs().max() / whole.abs().max())
    return found


@pytest.mark.parametrize("adapted", [False, True])
@pytest.mark.parametrize("sequence", [False, True])
def test_what_follows_the_lookup_sees_whole_rows(
    pools: Pools, tmp_path: Path, sequence: bool, adapted: bool
) -> None:
    if adapted:
        config = peft.LoraConfig(target_modules=["embed_tokens", "q_proj"], init_lora_weights=False)
        model = peft.get_peft_model(copy.deepcopy(_model("", False)), config)
        model.save_pretrained(tmp_path, save_embedding_layers=False)
    layout = {"tp_size": 2, "sequence_parallel": sequence}
    for found in pools(2).run(worst_gradient, str(tmp_path), layout, adapted):
        assert max(found.values()) < 1e-10, max(found, key=lambda name: found[name])
        assert adapted or "model.embed_tokens.embed_norm.weight" in found


def test_ranks_that_hold_the_same_are_compared(pools: Pools) -> None:
    """A difference too small for any tolerance is one between replicas."""
    parity = measure_parity(Case(tiny("llama")), ParallelConfig(tp_size=2), pools(2))
    assert parity.replicas == 0.0
    parity.replicas = 1e-17
    assert parity.worst() == float("inf")

"""What the host writes into loaded parameters is what stock writes, whatever the layout."""

import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    FunnelForMaskedLM,
    LlamaForCausalLM,
    LlamaModel,
)
from transformers.models.youtu import YoutuForCausalLM

import hfscale
from hfscale.checkpoint.overwrites import find_overwrites
from hfscale.errors import CheckpointError
from hfscale.models.clone import tiny_clone
from hfscale.train.runtime import local_tensor, runtime_of
from tests.tiny_models import tiny

VOCABULARY = 67
LAYOUTS = {
    "tp2": {"tp_size": 2},
    "dp_shard2": {"dp_shard_size": 2},
    "pp2": {"pp_size": 2, "pipeline_schedule": "1f1b", "stage_layers": [1, 1]},
}


class _WritingModel(LlamaModel):
    """Initializes past the host's functions: in place, by another tensor, and in a child."""

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if hasattr(module, "scratch"):
            module.scratch.fill_(1.0)
            if isinstance(module, nn.Linear):
                module.weight.data[1::3] = 2.0
            elif hasattr(module, "down_proj"):
                module.down_proj.weight.data.view(-1)[5:900] = torch.arange(895.0)
                module.down_proj.weight.data[:, -1].zero_()
            else:
                module.weight.data = torch.full_like(module.weight.data, 3.0)


class _RandomModel(LlamaModel):
    """Draws anew what was loaded."""

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear) and hasattr(module, "scratch"):
            module.weight.data.normal_()


class _ComputingModel(LlamaModel):
    """Makes something of the values that it finds."""

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear) and hasattr(module, "scratch"):
            module.weight.data.mul_(2.0)


class WritingLlama(LlamaForCausalLM):
    """The stock head on :class:`_WritingModel`."""

    kind: type[LlamaModel] = _WritingModel

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.model = self.kind(config)
        # The host skips modules of foreign classes that have nothing to initialize.
        for layer in self.model.layers:
            for module in (layer.self_attn.q_proj, layer.mlp, layer.input_layernorm):
                module.register_buffer("scratch", torch.zeros(2), persistent=False)
        self.post_init()


class RandomLlama(WritingLlama):
    """The stock head on :class:`_RandomModel`."""

    kind = _RandomModel


class ComputingLlama(WritingLlama):
    """The stock head on :class:`_ComputingModel`."""

    kind = _ComputingModel


@pytest.fixture(scope="module")
def youtu() -> Any:
    return tiny_clone(
        AutoConfig.for_model("youtu"), layers=2, vocab_size=VOCABULARY, pad_token_id=None
    )


def _saved(model: nn.Module, pad: int | None, directory: str) -> str:
    """A checkpoint none of whose entries is zero."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter))
    model.config.pad_token_id = pad
    model.save_pretrained(directory)
    return directory


def differing(
    directory: str, layout: hfscale.ParallelConfig, auto_class: Any, **kwargs: Any
) -> list[str]:
    """Parameters and buffers of this rank that are not stock's."""
    stock = auto_class.from_pretrained(directory)
    model = hfscale.from_pretrained(directory, parallel=layout, auto_class=auto_class, **kwargs)
    runtime = runtime_of(model)
    found = [
        planned.name
        for planned, parameter in runtime.parameters()
        if not torch.equal(
            local_tensor(parameter),
            planned.take(stock.get_parameter(planned.name), runtime.mesh.ranks),
        )
    ]
    buffers = dict(stock.named_buffers())
    return found + [
        name for name, buffer in model.named_buffers() if not torch.equal(buffer, buffers[name])
    ]


@pytest.mark.daily("last-pp2", "first half-tp2")
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    "pad", [1, VOCABULARY // 2 + 3, VOCABULARY - 1], ids=["first half", "second half", "last"]
)
def test_the_padding_row_of_a_whole_embedding(
    youtu: Any, pools: Any, pad: int, layout: str
) -> None:
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as directory:
        _saved(YoutuForCausalLM(youtu), pad, directory)
        stock = YoutuForCausalLM.from_pretrained(directory)
        assert stock.model.embed_tokens.weight[pad].abs().max() == 0, (
            "stock zeroes no row: this tests nothing"
        )
        assert stock.model.embed_tokens.weight.abs().sum(1).count_nonzero() == VOCABULARY - 1
        found = pools(2).run(
            differing, directory, hfscale.ParallelConfig(**LAYOUTS[layout]), AutoModelForCausalLM
        )
    assert found == [[], []]


def test_a_row_written_by_another_module_than_holds_it(pools: Any) -> None:
    config = tiny_clone(AutoConfig.for_model("funnel"), vocab_size=VOCABULARY, pad_token_id=None)
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as directory:
        _saved(FunnelForMaskedLM(config), 40, directory)
        for layout in ({"dp_shard_size": 2}, {"dp_replicate_size": 2}):
            assert pools(2).run(
                differing, directory, hfscale.ParallelConfig(**layout), FunnelForMaskedLM
            ) == [[], []]


@pytest.mark.parametrize("layout", ["one process", *LAYOUTS])
def test_writes_of_every_kind(pools: Any, tmp_path: Path, layout: str) -> None:
    torch.manual_seed(0)
    directory = _saved(WritingLlama(tiny("llama")), None, str(tmp_path))
    if layout == "one process":
        found = [differing(directory, hfscale.ParallelConfig(), WritingLlama)]
    else:
        found = pools(2).run(
            differing, directory, hfscale.ParallelConfig(**LAYOUTS[layout]), WritingLlama
        )
    assert not any(found)


def test_what_is_drawn_is_the_same_on_every_rank() -> None:
    found = []
    for _ in range(2):
        with torch.device("meta"):
            model = RandomLlama(tiny("llama"))
        found.append(find_overwrites(model, set(model.state_dict())))
        torch.randn(1)
    one, other = found
    assert len(one) == 2
    assert all(torch.equal(drawn.values, other[name].values) for name, drawn in one.items())


def test_what_depends_on_the_loaded_values_is_refused(tmp_path: Path) -> None:
    directory = _saved(ComputingLlama(tiny("llama")), None, str(tmp_path))
    with pytest.raises(CheckpointError, match=r"q_proj.weight from the loaded ones"):
        hfscale.from_pretrained(directory, auto_class=ComputingLlama)


def test_most_models_write_nothing() -> None:
    with torch.device("meta"):
        model = LlamaForCausalLM(tiny("llama", pad_token_id=3))
    assert find_overwrites(model, set(model.state_dict())) == {}

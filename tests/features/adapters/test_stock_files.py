"""Adapters that stock PEFT has saved, with copies and embeddings in them, compute what they compute there."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

import hfscale
from hfscale import CheckpointError, ParallelConfig
from hfscale.testing import RankPool

from ...tiny_models import tiny

Pools = Callable[[int], RankPool]
TOKENS = 72  # 67 before
IDS = torch.arange(24).view(2, 12)
BOTH = ["embed_tokens", "lm_head"]
SAVED = {
    "both": (BOTH, ["q_proj"], TOKENS),
    "embedding": (["embed_tokens"], ["q_proj"], TOKENS),
    "head": (["lm_head"], ["q_proj"], TOKENS),
    "of the same size": (BOTH, ["q_proj"], 67),
    "head, and the embedding adapted": (["lm_head"], ["q_proj", "embed_tokens"], TOKENS),
    "none": (None, ["q_proj"], TOKENS),
}


def saved_by_stock(base: str, adapter: Path, kind: str) -> Tensor:
    """Train an adapter in stock PEFT, save it with embeddings, and return its logits when loaded."""
    saved, targets, tokens = SAVED[kind]

    def resized() -> Any:
        model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
        model.resize_token_embeddings(tokens, mean_resizing=False)
        return model

    config = peft.LoraConfig(
        r=4, target_modules=targets, modules_to_save=saved, task_type="CAUSAL_LM"
    )
    trained: Any = peft.get_peft_model(resized(), config)
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in trained.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter), alpha=0.1)
    trained.save_pretrained(adapter, save_embedding_layers=True)
    again = peft.PeftModel.from_pretrained(resized(), adapter).eval()
    with torch.no_grad():
        logits: Tensor = again(input_ids=IDS).logits
    return logits


def logits_of(base: str, adapters: dict[str, str], layout: dict[str, int]) -> dict[str, Tensor]:
    found = {}
    for kind, adapter in adapters.items():
        tokens = SAVED[kind][2]
        more = {} if tokens == 67 else {"resize_token_embeddings": tokens}
        model = hfscale.from_pretrained(
            base,
            parallel=ParallelConfig(**layout),
            dtype=torch.float32,
            peft_config=adapter,
            **more,
        )
        with torch.no_grad():
            found[kind] = torch.as_tensor(model(input_ids=IDS).logits)
    return found


@pytest.mark.filterwarnings("ignore:.*save_embedding_layers")
@pytest.mark.filterwarnings("ignore:Model has .tie_word_embeddings=True")
@pytest.mark.parametrize("tied", [False, True])
def test_copies_and_embeddings(tied: bool, pools: Pools, tmp_path: Path) -> None:
    base = str(tmp_path / "base")
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(tiny("llama", tie_word_embeddings=tied)).save_pretrained(base)
    adapters = {kind: str(tmp_path / kind.replace(" ", "_")) for kind in SAVED}
    expected = {
        kind: saved_by_stock(base, Path(adapter), kind) for kind, adapter in adapters.items()
    }
    for found in (
        logits_of(base, adapters, {}),
        *pools(2).run(logits_of, base, adapters, {"tp_size": 2}),
    ):
        for kind, logits in found.items():
            torch.testing.assert_close(logits, expected[kind], rtol=0, atol=2e-5, msg=kind)


@pytest.mark.filterwarnings("ignore:.*save_embedding_layers")
def test_two_tensors_of_one_parameter(tmp_path: Path) -> None:
    base = str(tmp_path / "base")
    adapter = tmp_path / "adapter"
    AutoModelForCausalLM.from_config(tiny("llama")).save_pretrained(base)
    saved_by_stock(base, adapter, "both")
    file = adapter / "adapter_model.safetensors"
    tensors = load_file(file)
    tensors["base_model.model.lm_head.modules_to_save.weight"] += 1
    save_file(tensors, file)
    with pytest.raises(
        CheckpointError,
        match=r"lm_head\.weight and .*modules_to_save\.weight belong to the same parameter",
    ):
        hfscale.from_pretrained(base, peft_config=str(adapter), resize_token_embeddings=TOKENS)

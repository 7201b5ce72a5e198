"""What the tests of quantized bases share: small checkpoints whose rows are whole blocks, and their stock models."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    BitsAndBytesConfig,
    GPT2Config,
    Phi3Config,
    PreTrainedConfig,
)

import hfscale
from hfscale import ParallelConfig
from hfscale.features.quantization.quantized_modules import dequantized
from hfscale.train.runtime import Runtime, runtime_of
from hfscale.train.runtime.parameter_names import owner_of

from ...tiny_models import tiny

Layout = dict[str, Any]
_WIDE: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "vocab_size": 67,
    "num_hidden_layers": 2,
}


def wide(family: str, **changes: Any) -> PreTrainedConfig:
    """A config whose projections align with their shards in halves, and in quarters but for keys and values."""
    if family == "gpt2":
        return GPT2Config(
            **{"n_embd": 256, "n_layer": 2, "n_head": 4, "vocab_size": 67, "n_positions": 64},
            **{
                "resid_pdrop": 0.0,
                "embd_pdrop": 0.0,
                "attn_pdrop": 0.0,
                "bos_token_id": 1,
                "eos_token_id": 2,
            },
            **changes,
        )
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    if family == "phi3":
        tokens = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
        still = {"resid_pdrop": 0.0, "embd_pdrop": 0.0}
        return Phi3Config(**{**_WIDE, **heads, **tokens, **still, **changes})
    return tiny(family, **{**_WIDE, **heads, **changes})


def save(config: PreTrainedConfig, path: Path, dtype: torch.dtype = torch.float32) -> str:
    """A checkpoint with random weights."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    for parameter in model.parameters():  # biases too, so that adding one twice shows
        nn.init.normal_(parameter, std=0.05)
    model.save_pretrained(path)
    return str(path)


def four_bits(kind: str = "nf4", double: bool = False, **changes: Any) -> BitsAndBytesConfig:
    """Computes in float32 unless told otherwise."""
    chosen = {"bnb_4bit_compute_dtype": torch.float32, **changes}
    return BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type=kind, bnb_4bit_use_double_quant=double, **chosen
    )


def stock(path: str, config: BitsAndBytesConfig, dtype: torch.dtype = torch.float32) -> Any:
    """The host's own model, trained like ours: without the layout that some processors have for evaluation."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, quantization_config=config)
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False
    return model


def load(path: str, layout: Layout, config: BitsAndBytesConfig, **kwargs: Any) -> Any:
    """Ours."""
    kwargs = {"dtype": torch.float32, **kwargs}
    return hfscale.from_pretrained(
        path, parallel=ParallelConfig(**layout), quantization_config=config, **kwargs
    )


def local_share(runtime: Runtime, name: str, whole: Tensor) -> Tensor:
    """What of a whole weight this rank has over the tensor, expert and pipeline axes, ``[out, in]``."""
    assert runtime.plan.quantized is not None
    turned = name in runtime.plan.quantized.transposed
    planned = runtime.plan.by_name[name]
    share = planned.take(whole.T if turned else whole, runtime.mesh.ranks, axes=("ep", "tp"))
    return share.T if turned else share


def compare_weights(
    path: str, layout: Layout, config: BitsAndBytesConfig
) -> dict[str, tuple[bool, bool, float]]:
    """By weight: whether the plan says it is equal, whether it is, and the worst difference over the largest value."""
    runtime = runtime_of(load(path, layout, config))
    reference = stock(path, config)
    found = {}
    assert runtime.plan.quantized is not None
    for name in runtime.plan.quantized.weights:
        if not runtime.is_local(name):
            continue
        module, attribute = owner_of(runtime.model, name)
        # Bitsandbytes compiles what reads odd rows: 12 s on a new machine.
        with torch.compiler.set_stance("force_eager"):
            ours = dequantized(module, attribute)
            whole = dequantized(reference.get_submodule(name.removesuffix(".weight")))
        expected = local_share(runtime, name, whole)
        error = (ours - expected).abs().max() / expected.abs().max()
        planned = runtime.plan.by_name[name]
        found[name] = (
            runtime.plan.quantized.aligned(planned),
            torch.equal(ours, expected),
            error.item(),
        )
    return found


def tokens(batch: int = 2, length: int = 12) -> Tensor:
    """The same on every rank."""
    return torch.randint(3, 60, (batch, length), generator=torch.Generator().manual_seed(7))


def through(model: Any, width: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """Logits, and the gradient at the input, of one pass over the same embedded tokens."""
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(2, 12, width, generator=generator).to(dtype).requires_grad_()
    logits = model(inputs_embeds=x).logits
    towards = torch.randn(logits.shape, generator=generator).to(logits.dtype)
    logits.backward(towards)
    assert x.grad is not None
    return logits.detach(), x.grad


def leaves(model: nn.Module) -> dict[str, nn.Module]:
    """Modules of bitsandbytes by name."""
    return {
        name: m
        for name, m in model.named_modules()
        if type(m).__name__ in ("Linear4bit", "Linear8bitLt")
    }

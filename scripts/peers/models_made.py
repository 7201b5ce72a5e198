"""Models of the hub's ids, made here: the class by the words of the id, a tiny config, random weights."""

import re
from typing import Any

import torch
import transformers
from transformers import AutoConfig, PreTrainedModel

from hfscale.extras.pictures.picture_configs import CHANGES, with_pictures
from hfscale.models.clone import merged, tiny_clone

# Ids that name no class -> their class, with changes to a tiny config of it.
NAMED: dict[str, tuple[str, dict[str, Any]]] = {
    r"opt-(125m|350m|tokenizer)": ("OPTForCausalLM", {"num_hidden_layers": 12}),
    r"gpt2": ("GPT2LMHeadModel", {}),
    r"bloomz": ("BloomForCausalLM", {}),
    r"[-_]t5|flan-t5": ("T5ForConditionalGeneration", {}),
    r"Mixtral": ("MixtralForCausalLM", {}),
    r"tiny-qwen3-moe": ("Qwen3MoeForCausalLM", {}),
    r"dummy-qwen2|Qwen2(\.5)?-0": ("Qwen2ForCausalLM", {}),
    r"Qwen3-4B": ("Qwen3ForCausalLM", {}),
    r"smol_llama|TinyLlama": ("LlamaForCausalLM", {}),
    r"falcon-mamba": ("FalconMambaForCausalLM", {}),
    r"resnet": ("ResNetForImageClassification", {}),
    r"clip-text": ("CLIPTextModel", {}),
    r"gemma4-E2B": ("Gemma4ForConditionalGeneration", {}),
}
_CLASS = re.compile(r"[A-Z][A-Za-z0-9_]*?(?:For[A-Z][A-Za-z]+|LMHeadModel|Model)(?![a-z])")
# TRL's own are in bfloat16; those of one name with Hugging Face's stayed in float32, as PEFT's tolerances ask.
_HALF = re.compile(r"trl-.*/tiny-(?!random-)")
_OTHERS = re.compile(r"lora|gptq|awq|AQLM|non-existing|PeftModel|Remote", re.IGNORECASE)


def class_of(name: str) -> tuple[type[PreTrainedModel], dict[str, Any]] | None:
    """Return the class that the hub's id ``name`` says, with changes to its tiny config; None if none is known."""
    short = name.rpartition("/")[2]
    if _OTHERS.search(short):
        return None
    said = _CLASS.search(short)
    known = next((value for words, value in NAMED.items() if re.search(words, short)), None)
    if said is not None and hasattr(transformers, said.group()):
        return getattr(transformers, said.group()), {}
    if known is not None:
        return getattr(transformers, known[0]), known[1]
    return None


def make_model(name: str, tokenizer: Any) -> PreTrainedModel | None:
    """Return a tiny model of the hub's id ``name``, the same in every process; None if it is no plain model."""
    found = class_of(name)
    if found is None:
        return None
    kind, changes = found
    config = tiny_config(kind.config_class.model_type, tokenizer, **changes)
    config.num_labels = 2 if "Classification" in kind.__name__ else config.num_labels
    if kind.__name__.endswith("ForSequenceClassification") and name.startswith("trl-"):
        config.num_labels = 1  # a reward
    torch.manual_seed(0)
    model = kind(config)
    return model.to(torch.bfloat16) if _HALF.match(name) else model


def tiny_config(family: str, tokenizer: Any, **changes: Any) -> Any:
    """Return a config of ``family`` for the tokenizer's vocabulary."""
    plain = AutoConfig.for_model(family)
    small = (
        with_pictures(family)
        if "vision_config" in plain.to_dict()
        else tiny_clone(plain, **CHANGES.get(family, {}))
    )
    sizes = {"vocab_size": len(tokenizer), "max_position_embeddings": 512, "n_positions": 512}
    tokens = {
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    config = type(small)(
        **merged(_without_type(small.to_dict()), _known(plain, {**sizes, **tokens, **changes}))
    )
    for nested in {
        id(config): config,
        id(config.get_text_config()): config.get_text_config(),
    }.values():
        for field, value in {**sizes, **tokens}.items():
            if hasattr(nested, field):
                setattr(nested, field, value)
        if hasattr(nested, "initializer_range"):
            nested.initializer_range = 0.2
    return config


def _known(config: Any, fields: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if hasattr(config, name)}


def _without_type(fields: dict[str, Any]) -> dict[str, Any]:
    return {
        name: value
        for name, value in fields.items()
        if name not in ("model_type", "transformers_version")
    }

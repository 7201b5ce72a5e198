"""Tokenizers of the hub's ids, made here: byte pairs of the standard library's text, and a family's special tokens."""

import re
from importlib.util import find_spec
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

SUBWORDS = 900
"""Entries of a vocabulary before special tokens: enough for words, few enough for models of a few kilobytes."""

# What an id's words say -> the chat template (a file's name in TRL's package); the first that fits is taken.
TEMPLATES = {
    r"Qwen2_5_VL": "qwen2_5_vl",
    r"Qwen2VL": "qwen2_5_vl",
    r"Qwen3VL": "qwen3_vl",
    r"Qwen3_5Moe.*3\.6": "qwen3_6",
    r"Qwen3_5.*NoThink": "qwen3_5_nothink",
    r"Qwen3_5": "qwen3_5_think",
    r"Qwen3.*2507": "qwen3_instruct_2507",
    r"(?i)qwen3": "qwen3",
    r"(?i)qwen2": "qwen2_5",
    r"Llama.*3\.2": "llama3_2",
    r"Llama.*3\.1": "llama3_1",
    r"Llama.*-3": "llama3",
    r"GptOss": "gptoss",
    r"Glm4Moe": "glm4moe",
    r"Cohere2": "cohere2",
    r"Cohere": "cohere",
    r"DeepseekV3.*0528": "deepseek_r1_distill",
    r"DeepseekV3": "deepseekv3",
    r"Gemma4": "gemma4",
    r"Gemma3": "gemma3",
    r"Gemma": "gemma",
    r"Lfm2.*2\.5": "lfm2_2_5",
    r"Lfm2": "lfm2",
    r"Nemotron.*ultra": "nemotron_3_ultra",
    r"Nemotron.*super": "nemotron_3_super",
    r"Nemotron": "nemotron_3_nano",
    r"Phi3.*3\.5": "phi3_5",
    r"Phi3": "phi3",
    r"Idefics3": "idefics3",
    r"SmolVLM": "smolvlm",
    r"LlavaNext": "llava_next",
    r"Llava": "llava_next",
}
_BAR = "\uff5c"  # that of DeepSeek's special tokens, a wide one
_DEEPSEEK = f"<{_BAR}{{}}▁of▁sentence{_BAR}>"
# By the template's first letters: the tokens that begin a text, end it, and fill a batch up.
ROLES = {
    "qwen": (None, "<|im_end|>", "<|endoftext|>"),
    "lfm2": ("<|startoftext|>", "<|im_end|>", "<|pad|>"),
    "nemotron": ("<s>", "<|im_end|>", "<unk>"),
    "llama3": ("<|begin_of_text|>", "<|eot_id|>", None),
    "gptoss": ("<|startoftext|>", "<|return|>", "<|endoftext|>"),
    "gemma": ("<bos>", "<eos>", "<pad>"),
    "glm4moe": (None, "<|endoftext|>", "<|endoftext|>"),
    "cohere": ("<BOS_TOKEN>", "<|END_OF_TURN_TOKEN|>", "<PAD>"),
    "deepseek": (_DEEPSEEK.format("begin"), _DEEPSEEK.format("end"), _DEEPSEEK.format("end")),
    "phi3": ("<s>", "<|endoftext|>", "<|endoftext|>"),
    "": ("<s>", "</s>", "<pad>"),
}
PICTURES = (
    "<image>",
    "<|image_pad|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|video_pad|>",
    "<image_soft_token>",
)
_SPECIAL = re.compile(
    rf"<\|[^|<>\s]+\|>|<{_BAR}[^{_BAR}]+{_BAR}>|</?(?:think|tool_call|tool_response|start_of_turn|end_of_turn)>"
)


def template_of(name: str) -> str | None:
    """Return the name of the chat template of the hub's id ``name``, or None."""
    return next((template for words, template in TEMPLATES.items() if re.search(words, name)), None)


def make_tokenizer(name: str) -> Any:
    """Return a fast tokenizer for the hub's id ``name``, the same in every process."""
    template = template_of(name)
    text = _read_template(template) if template is not None else None
    first, last, fill = next(
        roles for start, roles in ROLES.items() if (template or "").startswith(start)
    )
    found = dict.fromkeys(_SPECIAL.findall(text or ""))
    # First in the vocabulary: some families have a table of positions that must hold the padding token's id.
    special = [
        token for token in (fill, first, last, "<unk>", "<mask>", *PICTURES) if token is not None
    ]
    tokenizer = _trained(tuple(dict.fromkeys((*special, *found))))
    if template is None or first is not None:
        start = first or "<s>"
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{start} $A",
            pair=f"{start} $A $B",
            special_tokens=[(start, tokenizer.token_to_id(start))],
        )
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=first,
        eos_token=last,
        pad_token=fill,
        unk_token="<unk>",
        mask_token="<mask>",
    )
    fast.chat_template = text
    fast.model_max_length = 4096
    return fast


def _trained(special: tuple[str, ...]) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    size = len(special) + SUBWORDS
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=list(special),
        initial_alphabet=alphabet,
        show_progress=False,
    )
    tokenizer.train_from_iterator((text for _, text in sorted(topics.items())), trainer)
    return tokenizer


def _read_template(name: str) -> str | None:
    found = find_spec("trl")
    if found is None or found.origin is None:
        return None
    return (Path(found.origin).parent / "chat_templates" / f"{name}.jinja").read_text()

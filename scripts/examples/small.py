"""Small models and data for the examples, made on the spot; nothing is downloaded.

A run of your own has the id of a model on the Hub where an example calls ``small.llama()``, and a data set of
🤗 datasets where it calls ``small.conversations()`` and the like.
"""

import os
import time
from pathlib import Path
from typing import Any

import torch
import transformers
from datasets import Dataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    CLIPVisionConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaProcessor,
    PreTrainedTokenizerFast,
)

LEGS = {"spider": 8, "bee": 6, "cat": 4, "horse": 4, "owl": 2, "duck": 2, "fish": 0, "snake": 0}
HOMES = {
    "spider": "web",
    "bee": "hive",
    "cat": "house",
    "horse": "stable",
    "owl": "tree",
    "duck": "pond",
}
COLOURS = {
    "red": (1.0, -1.0, -1.0),
    "green": (-1.0, 1.0, -1.0),
    "blue": (-1.0, -1.0, 1.0),
    "white": (1.0, 1.0, 1.0),
}

CHAT_TEMPLATE = """\
{%- for message in messages -%}
{{- '<' + message.role + '>' -}}
{%- if message.role == 'assistant' -%}
{%- generation -%}{{- message.content + eos_token -}}{%- endgeneration -%}
{%- elif message.content is string -%}{{- message.content -}}
{%- else -%}{%- for part in message.content -%}{{- '<image>' if part.type == 'image' else part.text -}}{%- endfor -%}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<assistant>' -}}{%- endif -%}
"""


def questions() -> list[tuple[str, str, str]]:
    """Questions, each with its answer and a wrong one."""
    made = [
        (f"How many legs has a {name}?", f"A {name} has {legs} legs.", legs + 1)
        for name, legs in LEGS.items()
    ]
    rows = [
        (asked, answer, f"{answer.rpartition(' has')[0]} has {wrong} legs.")
        for asked, answer, wrong in made
    ]
    rows += [
        (f"Where does a {name} live?", f"It lives in a {home}.", "It lives here.")
        for name, home in HOMES.items()
    ]
    sums = [(a, b) for a in range(10) for b in range(10)]
    rows += [
        (f"What is {a} plus {b}?", f"{a} plus {b} is {a + b}.", f"{a} plus {b} is {a + b + 1}.")
        for a, b in sums
    ]
    return rows


def conversations() -> Dataset:
    """Rows for supervised fine-tuning: ``messages``."""
    return Dataset.from_list(
        [{"messages": _turns(asked, answer)} for asked, answer, _ in questions()]
    )


def preferences() -> Dataset:
    """Rows for DPO and reward models: ``prompt``, ``chosen``, ``rejected``."""
    rows = [
        (*_turns(asked, answer), {"role": "assistant", "content": wrong})
        for asked, answer, wrong in questions()
    ]
    return Dataset.from_list(
        [{"prompt": [asked], "chosen": [good], "rejected": [bad]} for asked, good, bad in rows]
    )


def prompts() -> Dataset:
    """Rows for GRPO: ``prompt``."""
    return Dataset.from_list(
        [{"prompt": [_turns(asked, answer)[0]]} for asked, answer, _ in questions()]
    )


def _turns(asked: str, answer: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": asked}, {"role": "assistant", "content": answer}]


def tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level tokenizer of 400 tokens, trained on :func:`questions`."""
    whole = Tokenizer(models.BPE())
    whole.pre_tokenizer, whole.decoder = (
        pre_tokenizers.ByteLevel(add_prefix_space=False),
        decoders.ByteLevel(),
    )
    special = ["<pad>", "<end>", "<user>", "<assistant>", "<image>"]
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    whole.train_from_iterator((f"{asked} {answer}" for asked, answer, _ in questions()), trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=whole, pad_token="<pad>", eos_token="<end>", chat_template=CHAT_TEMPLATE
    )


def llama_config(**changes: Any) -> LlamaConfig:
    """A Llama of 0.7 million parameters."""
    sizes = {
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 4,
        "vocab_size": 512,
    }
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    ends = {"bos_token_id": None, "eos_token_id": 1, "pad_token_id": 0}
    return LlamaConfig(**{**sizes, **heads, **ends, **changes})


def llama() -> str:
    """Write a small Llama with its tokenizer, and return the directory: in place of "meta-llama/Llama-3.1-8B"."""
    return _written("llama", lambda: AutoModelForCausalLM.from_config(llama_config()), tokenizer())


def llava() -> str:
    """Write a small LLaVA with its processor, and return the directory: in place of "llava-hf/llava-1.5-7b-hf"."""
    layers = {"num_hidden_layers": 2, "num_attention_heads": 4}
    vision = CLIPVisionConfig(
        hidden_size=64, intermediate_size=128, image_size=16, patch_size=8, **layers
    )
    words = tokenizer()
    image = words.convert_tokens_to_ids("<image>")
    config = LlavaConfig(
        vision_config=vision,
        text_config=llama_config(),
        image_token_index=image,
        image_seq_length=4,
        vision_feature_layer=-1,
    )
    sides = {"height": 16, "width": 16}
    pictures = (
        getattr(transformers, "LlavaImageProcessorPil", None) or transformers.LlavaImageProcessor
    )
    processor = LlavaProcessor(
        image_processor=pictures(
            size=sides, crop_size=sides, do_resize=False, do_convert_rgb=False
        ),
        tokenizer=words,
        patch_size=8,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=CHAT_TEMPLATE,
    )
    return _written("llava", lambda: AutoModelForImageTextToText.from_config(config), processor)


def _written(name: str, build: Any, processor: Any) -> str:
    """Let the first rank write a model with random weights, and the others wait for it."""
    path = Path("runs/examples/start") / name
    if os.environ.get("RANK", "0") == "0" and not path.is_dir():
        unfinished = path.with_name(f"{name}-unfinished")
        torch.manual_seed(0)
        build().save_pretrained(unfinished)
        processor.save_pretrained(unfinished)
        unfinished.rename(path)
    while not path.is_dir():
        time.sleep(0.1)
    return str(path)

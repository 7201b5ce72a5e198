"""Models, tokenizer and rows of the draws: made once, in one directory."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset, IterableDataset
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    PreTrainedTokenizerFast,
)

VOCABULARY = 67
_SMALL: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCABULARY,
    "bos_token_id": None,
    "eos_token_id": 1,
    "pad_token_id": 0,
    "attention_dropout": 0.0,
}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "head_dim": 8}
_STILL = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "hidden_dropout_prob": 0.0}
_GPT2 = {
    "n_embd": 32,
    "n_layer": 4,
    "n_head": 4,
    "n_positions": 64,
    "vocab_size": VOCABULARY,
    "eos_token_id": 1,
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", _SMALL),
    "tied": ("qwen2", {**_SMALL, "tie_word_embeddings": True}),
    "gpt2": ("gpt2", {**_GPT2, **_STILL, "bos_token_id": 1, "pad_token_id": 0}),
    "mixture": ("qwen3_moe", {**_SMALL, **_EXPERTS, "norm_topk_prob": True}),
    "balanced": (
        "qwen3_moe",
        {**_SMALL, **_EXPERTS, "output_router_logits": True, "router_aux_loss_coef": 0.05},
    ),
    "wide": (
        "llama",
        {**_SMALL, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2},
    ),
    "classifier": ("llama", {**_SMALL, "num_labels": 3}),
    "regression": ("llama", {**_SMALL, "num_labels": 1}),
}
CLASSIFIERS = ("classifier", "regression")
MIXTURES = ("mixture", "balanced")
_CHAT = """{% for message in messages %}{% if message.role == 'user' %}q {{ message.content }} \
{% else %}a {% generation %}{{ message.content }} end{% endgeneration %} {% endif %}{% endfor %}"""


def make_model(name: str, path: Path) -> None:
    """Write a checkpoint, a tokenizer and an adapter whose factors are not zero."""
    from peft import LoraConfig, get_peft_model

    kind, fields = MODELS[name]
    torch.manual_seed(0)
    auto = AutoModelForSequenceClassification if name in CLASSIFIERS else AutoModelForCausalLM
    model = auto.from_config(AutoConfig.for_model(kind, **fields), dtype=torch.float32)
    model.save_pretrained(path)
    tokenizer().save_pretrained(path)
    if name not in (*MIXTURES, *CLASSIFIERS):
        lora = LoraConfig(
            r=4, target_modules="all-linear", task_type="CAUSAL_LM", init_lora_weights=False
        )
        get_peft_model(model, lora).save_pretrained(str(path / "adapter"))


def tokenizer() -> PreTrainedTokenizerFast:
    """One token for a word."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = ["pad", "end", "unknown", "q", "a", *(f"w{number}" for number in range(62))]
    whole = Tokenizer(
        models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="unknown")
    )
    whole.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=whole,
        pad_token="pad",
        eos_token="end",
        unk_token="unknown",
        chat_template=_CHAT,
    )


class Rows(Dataset[dict[str, Any]]):
    """Rows of ids of different lengths."""

    def __init__(self, rows: list[dict[str, Any]]) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self.rows[index]


class Stream(IterableDataset[dict[str, Any]]):
    """The same, one after the other."""

    def __init__(self, rows: list[dict[str, Any]]) -> None:
        self.rows = rows

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return iter(self.rows)


def rows_of(data: str, count: int, seed: int) -> list[dict[str, Any]]:
    """Rows of a kind (:class:`.draw.Draw`)."""
    generator = torch.Generator().manual_seed(seed)

    def ids(low: int, high: int) -> list[int]:
        length = int(torch.randint(low, high, (1,), generator=generator))
        return torch.randint(5, VOCABULARY, (length,), generator=generator).tolist()

    def words(low: int = 2, high: int = 8) -> str:
        return " ".join(f"w{number - 5}" for number in ids(low, high))

    made: list[dict[str, Any]] = []
    for index in range(count):
        if data in ("masked", "plain", "class", "number"):
            row: dict[str, Any] = {"input_ids": ids(4, 12)}
            if data == "masked":
                without = int(
                    torch.randint(0, len(row["input_ids"]) - 2, (1,), generator=generator)
                )
                row["labels"] = [-100] * without + row["input_ids"][without:]
            elif data == "class":
                row["labels"] = index % 3
            elif data == "number":
                row["labels"] = (index % 7) / 3
        elif data == "text":
            row = {"text": words(4, 14)}
        elif data == "chat":
            turns = (
                {"role": role, "content": words()}
                for role in ("user", "assistant", "user", "assistant")
            )
            row = {"messages": list(turns)[: 2 + 2 * (index % 2)]}
        else:
            row = {"prompt": words() + ("" if data == "prompt" else " ")}
            names = {"pair": ("chosen", "rejected"), "prompt": ()}.get(data, ("completion",))
            row |= {name: words() for name in names}
            if data == "label":
                row["label"] = bool(index % 2)
        made.append(row)
    return made


def collate(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """Padded on the right."""

    def pad(values: list[Any], value: int) -> torch.Tensor:
        rows = [torch.as_tensor(each) for each in values]
        return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=value)

    made = {
        "input_ids": pad([row["input_ids"] for row in rows], 0),
        "attention_mask": pad([[1] * len(row["input_ids"]) for row in rows], 0),
    }
    labels = [row.get("labels", row["input_ids"]) for row in rows]
    made["labels"] = torch.tensor(labels) if not isinstance(labels[0], list) else pad(labels, -100)
    return made

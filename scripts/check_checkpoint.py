"""Check what a run has written, a checkpoint or an adapter or both, in a plain process that cannot import hfscale.

    python scripts/check_checkpoint.py runs/demo-llama-stdlib

The validation loss, computed anew by stock transformers (and PEFT) from what is on disk, must equal the one that the
run measured last, and so must the accuracy of a model that scores or classifies; another writes a few lines of Python.
"""

import argparse
import io
import json
import math
import sys
import warnings
from importlib.abc import MetaPathFinder
from pathlib import Path
from typing import Any


class NoHfscale(MetaPathFinder):
    """Refuses every import of hfscale, installed or not."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        if name.partition(".")[0] == "hfscale":
            raise ImportError("hfscale is kept out of this process on purpose")


sys.meta_path.insert(0, NoHfscale())

import torch  # noqa: E402
import yaml  # noqa: E402
from datasets import load_from_disk  # noqa: E402
from torch.nn.functional import cross_entropy, logsigmoid  # noqa: E402
from torch.nn.utils.rnn import pad_sequence  # noqa: E402
from transformers import (  # noqa: E402
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForSequenceClassification,
    AutoProcessor,
    AutoTokenizer,
    BitsAndBytesConfig,
)

IGNORED = -100
_FILES = {"adapter": "adapter_config.json", "checkpoint": "config.json"}


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Check a run's checkpoint or adapter without hfscale."
    )
    parser.add_argument(
        "run", type=Path, help="the directory of a run, such as runs/demo-llama-stdlib"
    )
    parser.add_argument(
        "--tolerance", type=float, default=1e-4, help="relative; bfloat16 runs need about 1e-2"
    )
    parser.add_argument("--prompt", default="import os\n\ndef")
    parser.add_argument("--new-tokens", type=int, default=48)
    arguments = parser.parse_args()
    run = arguments.run
    metrics = arguments.run / "metrics.jsonl"
    found = [part for part, file in _FILES.items() if (run / part / file).is_file()]
    if not metrics.is_file() or not found:
        sys.exit(
            f"{run} has no finished run (metrics.jsonl, and checkpoint/ or adapter/): train it first"
        )

    records = [json.loads(line) for line in metrics.read_text().splitlines()]
    trained = [record["validation_loss"] for record in records if "validation_loss" in record][-1]
    merged = [
        record["merged_validation_loss"] for record in records if "merged_validation_loss" in record
    ]
    data = load_from_disk(str(run / "data" / "validation")).with_format("torch")
    recipe = yaml.safe_load((run / "recipe.yaml").read_text())["data"]
    scored = recipe["format"] in ("pairs", "classes")
    pictured = recipe["images_column"] is not None
    kind = AutoModelForSequenceClassification if scored else AutoModelForCausalLM
    kind = AutoModelForImageTextToText if pictured else kind
    for part in found:
        expected = merged[-1] if part == "checkpoint" and merged else trained
        model = (
            load_adapter(run, kind) if part == "adapter" else kind.from_pretrained(run / part)
        ).eval()
        if pictured:
            loss = loss_of_pictures(model, AutoProcessor.from_pretrained(run / part), data)
            compare(model, run / part, loss, expected, arguments.tolerance)
            continue
        if not scored:
            compare(model, run / part, validation_loss(model, data), expected, arguments.tolerance)
            continue
        loss, accuracy = scores(model, data)
        compare(model, run / part, loss, expected, arguments.tolerance)
        print(f"  accuracy {accuracy:.1%} of {len(data)}")
        while_training = [
            record["validation_accuracy"] for record in records if "validation_accuracy" in record
        ][-1]
        if abs(accuracy - while_training) > 1.5 / len(data):  # a score may round to the other side
            sys.exit(
                f"it was {while_training:.1%} while training: this is not the model that was trained"
            )
    if pictured:
        show_answers(model, AutoProcessor.from_pretrained(run / found[-1]), data)
    elif not scored:
        show_writing(model, run / found[-1], arguments)
    if "hfscale" in sys.modules:
        sys.exit("hfscale was imported after all")


def show_writing(model: Any, path: Path, arguments: Any) -> None:
    print("  it writes:\n")
    tokenizer = AutoTokenizer.from_pretrained(path)
    for line in write(model, tokenizer, arguments.prompt, arguments.new_tokens).splitlines():
        print(f"    {line}")


@torch.no_grad()
def loss_of_pictures(model: Any, processor: Any, data: Any) -> float:
    """The mean loss per label of conversations with pictures, one at a time."""
    loss = 0.0
    labels = 0
    for row in data:
        batch = processor(text=[row["text"]], images=pictures_of(row), return_tensors="pt")
        counted = int((row["labels"][1:] != IGNORED).sum())
        loss += float(model(**batch, labels=row["labels"][None].long()).loss) * counted
        labels += counted
    return loss / labels


def pictures_of(row: Any) -> Any:
    from PIL import Image

    return (
        [[Image.open(io.BytesIO(image)).convert("RGB") for image in row["images"]]]
        if row["images"]
        else None
    )


@torch.no_grad()
def show_answers(model: Any, processor: Any, data: Any, number: int = 4) -> None:
    print("  it answers:\n")
    for row in data.select(range(number)):
        batch = processor(text=[row["prompt"]], images=pictures_of(row), return_tensors="pt")
        said = model.generate(**batch, max_new_tokens=24, do_sample=False)[
            0, batch["input_ids"].shape[1] :
        ]
        print(
            f"    {row['question']} {processor.decode(said, skip_special_tokens=True).strip()} ({row['answer']})"
        )


def load_adapter(run: Path, kind: Any) -> Any:
    """The adapter of a run around its base, by PEFT, in the types that the recipe says."""
    from peft import PeftModel

    # PEFT 0.21 asks by a name that transformers 5.23 has deprecated.
    warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning)
    recipe = yaml.safe_load((run / "recipe.yaml").read_text())
    quantization = recipe["quantization"]
    head = {}
    if kind is AutoModelForSequenceClassification:
        padding = AutoTokenizer.from_pretrained(run / "adapter").pad_token_id
        head = {"num_labels": len(recipe["data"]["classes"]) or 1, "pad_token_id": padding}
    base = kind.from_pretrained(
        recipe["base"],
        dtype=recipe["training"]["dtype"],
        **head,
        **({"quantization_config": BitsAndBytesConfig(**quantization)} if quantization else {}),
    )
    for module in base.modules():
        # bitsandbytes packs weights anew for evaluation on some processors, and multiplies with less precision then.
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False
    return PeftModel.from_pretrained(base, str(run / "adapter"))


def compare(model: Any, path: Path, measured: float, trained: float, tolerance: float) -> None:
    """Print both losses; end where they are not the same."""
    difference = abs(measured - trained) / abs(trained)
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    around = (
        f"{type(model).__module__}.{type(model).__name__} around " if inner is not model else ""
    )
    print(f"{around}{type(inner).__module__}.{type(inner).__name__} from {path}, without hfscale")
    print(
        f"  validation loss {measured:.6f}, while training {trained:.6f}: relative difference {difference:.1e}"
    )
    if "SequenceClassification" not in type(inner).__name__:
        print(f"  perplexity {math.exp(measured):.2f}")
    if not difference <= tolerance:
        sys.exit(f"they differ by more than {tolerance:g}: this is not the model that was trained")


@torch.no_grad()
def scores(model: Any, data: Any) -> tuple[float, float]:
    """Of pairs, the mean of ``-log sigmoid(chosen - rejected)`` and the share that is in order; of texts with a class,
    the mean cross entropy and the share that is right. One text at a time.
    """
    losses = []
    right = []
    for row in data:
        if "chosen" in row:
            chosen, rejected = (
                model(input_ids=row[name][None]).logits[0, 0] for name in ("chosen", "rejected")
            )
            losses.append(-logsigmoid(chosen - rejected))
            right.append(bool(chosen > rejected))
        else:
            logits = model(input_ids=row["input_ids"][None]).logits
            losses.append(cross_entropy(logits, row["label"][None]))
            right.append(bool(logits.argmax() == row["label"]))
    return float(torch.stack(losses).mean()), sum(right) / len(right)


@torch.no_grad()
def validation_loss(model: Any, data: Any, size: int = 8) -> float:
    """The mean loss per label."""
    loss = 0.0
    labels = 0
    # A router cannot tell the padding of packed rows, which have no mask: they are as long as the run had them.
    length = max(map(len, data["input_ids"])) if "position_ids" in data.column_names else 0
    for start in range(0, len(data), size):
        batch = padded(data[start : start + size], length)
        counted = int((batch["labels"][:, 1:] != IGNORED).sum())
        loss += float(model(**batch, use_cache=False).loss) * counted
        labels += counted
    return loss / labels


def padded(columns: dict[str, Any], length: int) -> dict[str, torch.Tensor]:
    """Rows as one batch, filled up on the right to the longest or to ``length``; without labels every token is one."""
    batch = {}
    for name, values in columns.items():
        filler = IGNORED if name == "labels" else 0
        column = pad_sequence(list(values), batch_first=True, padding_value=filler)
        batch[name] = torch.nn.functional.pad(
            column, (0, max(length - column.shape[1], 0)), value=filler
        )
    return {"labels": batch["input_ids"], **batch}


@torch.no_grad()
def write(model: Any, tokenizer: Any, prompt: str, new_tokens: int) -> str:
    """``prompt`` and its most likely continuation."""
    tokens = tokenizer(prompt, return_tensors="pt", return_token_type_ids=False)
    written = model.generate(
        **tokens, max_new_tokens=new_tokens, do_sample=False, repetition_penalty=1.1
    )
    return str(tokenizer.decode(written[0], skip_special_tokens=True))


if __name__ == "__main__":
    main()

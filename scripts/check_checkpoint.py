"""Check a run's checkpoint in a plain process that cannot import hfscale.

    python scripts/check_checkpoint.py runs/demo-llama-stdlib

The validation loss, computed anew by stock transformers from what is on disk, must equal the one that the run measured
last; then the model writes a few lines of Python.
"""

import argparse
import json
import sys
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
from common.rows import IGNORED, Rows  # noqa: E402
from datasets import load_from_disk  # noqa: E402
from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: E402


def main() -> None:
    parser = argparse.ArgumentParser(description="Check a run's checkpoint without hfscale.")
    parser.add_argument("run", type=Path, help="the directory of a run, such as runs/demo-llama-stdlib")
    parser.add_argument("--tolerance", type=float, default=1e-4, help="relative; bfloat16 runs need about 1e-2")
    parser.add_argument("--prompt", default="import os\n\ndef")
    parser.add_argument("--new-tokens", type=int, default=48)
    arguments = parser.parse_args()
    metrics = arguments.run / "metrics.jsonl"
    if not metrics.is_file() or not (arguments.run / "checkpoint" / "config.json").is_file():
        sys.exit(f"{arguments.run} has no finished run (metrics.jsonl and checkpoint/): train it first")

    model = AutoModelForCausalLM.from_pretrained(arguments.run / "checkpoint").eval()
    tokenizer = AutoTokenizer.from_pretrained(arguments.run / "checkpoint")
    measured = validation_loss(model, load_from_disk(str(arguments.run / "data" / "validation")).with_format("torch"))
    records = [json.loads(line) for line in metrics.read_text().splitlines()]
    trained = [record["validation_loss"] for record in records if "validation_loss" in record][-1]
    difference = abs(measured - trained) / abs(trained)
    print(f"{type(model).__module__}.{type(model).__name__} from {arguments.run / 'checkpoint'}, without hfscale")
    print(f"  validation loss {measured:.6f}, while training {trained:.6f}: relative difference {difference:.1e}")
    if not difference <= arguments.tolerance:
        sys.exit(f"they differ by more than {arguments.tolerance:g}: this is not the model that was trained")
    print("  it writes:\n")
    for line in write(model, tokenizer, arguments.prompt, arguments.new_tokens).splitlines():
        print(f"    {line}")
    if "hfscale" in sys.modules:
        sys.exit("hfscale was imported after all")


@torch.no_grad()
def validation_loss(model: Any, data: Any, size: int = 8) -> float:
    """The mean loss per label."""
    rows, total = Rows(data), 0.0
    for start in range(0, len(rows), size):
        batch = rows.batch(list(range(start, min(start + size, len(rows)))))
        labels = int((batch["labels"][:, 1:] != IGNORED).sum())
        total += float(model(**batch, use_cache=False).loss) * labels
    return total / int(rows.labels.sum())


@torch.no_grad()
def write(model: Any, tokenizer: Any, prompt: str, new_tokens: int) -> str:
    """``prompt`` and its most likely continuation."""
    tokens = tokenizer(prompt, return_tensors="pt", return_token_type_ids=False)
    written = model.generate(**tokens, max_new_tokens=new_tokens, do_sample=False, repetition_penalty=1.1)
    return str(tokenizer.decode(written[0], skip_special_tokens=True))


if __name__ == "__main__":
    main()

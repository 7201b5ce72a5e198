"""Peak memory of loading what other trainers wrote, per rank and per form.

    python scripts/bench/sources.py [--out scripts/bench/results/sources.json] [--only gguf]

One model is written in every form that hfscale reads by slices, and loaded over two ranks as ``loading.py`` does: fresh
processes, their peak resident memory over what they had after imports. The goal is a peak of at most 1.15 x (the rank's
own shard + the largest tensor), as for safetensors.
"""

import argparse
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import loading
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from hfscale.testing import RankPool
from tests.arrivals import groups_of_trainer, write_partitions, write_shards
from tests.gguf_files import write_gguf

LAYOUTS = {"tp2": {"tp_size": 2}, "dp_shard2": {"dp_shard_size": 2}}
CONFIG = LlamaConfig(
    hidden_size=1024,
    intermediate_size=2816,
    num_hidden_layers=8,
    num_attention_heads=16,
    num_key_value_heads=8,
    head_dim=64,
    vocab_size=32000,
)
GOAL = 1.15
RANKS = 2


def plain(start: str, out: Path) -> None:
    Path(out).symlink_to(start)


def binary(start: str, out: Path) -> None:
    out.mkdir()
    model = AutoModelForCausalLM.from_pretrained(start)
    model.config.save_pretrained(out)
    torch.save(model.state_dict(), out / "pytorch_model.bin")


def shards(kind: str) -> Callable[[str, Path], None]:
    def write(start: str, out: Path) -> None:
        with RankPool(RANKS) as pool:
            pool.run(write_shards, start, str(out), kind)

    return write


def partitions(stage: int) -> Callable[[str, Path], None]:
    def write(start: str, out: Path) -> None:
        groups = groups_of_trainer(start)
        model = AutoModelForCausalLM.from_pretrained(start)
        named = dict(model.named_parameters())
        optimizer = torch.optim.AdamW([{"params": [named[n] for n in group]} for group in groups])
        for parameter in named.values():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        file = out.with_suffix(".pt")
        torch.save(optimizer.state_dict(), file)
        write_partitions(start, str(file), str(out), groups, stage)

    return write


def blocks(kind: Any) -> Callable[[str, Path], None]:
    def write(start: str, out: Path) -> None:
        out.mkdir()
        write_gguf(out / "m.gguf", CONFIG, kind)

    return write


FORMS: dict[str, Callable[[str, Path], None]] = {
    "safetensors": plain,
    "pytorch_model.bin": binary,
    "torch DCP": shards("state dict"),
    "Accelerate's FSDP2": shards("accelerate"),
    "Accelerate's full state dict": shards("full"),
    "transformers' slices": shards("slices"),
    "ZeRO 2": partitions(2),
    "ZeRO 3": partitions(3),
    "GGUF F16": blocks(gguf.GGMLQuantizationType.F16),
    "GGUF Q8_0": blocks(gguf.GGMLQuantizationType.Q8_0),
    "GGUF Q4_K": blocks(gguf.GGMLQuantizationType.Q4_K),
}


def main() -> None:
    """Write the model in each form, load it, print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--only", default="")
    arguments = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as directory:
        start = f"{directory}/start"
        model = AutoModelForCausalLM.from_config(CONFIG, dtype=torch.float32)
        model.save_pretrained(start)
        largest = max(parameter.numel() * 4 for parameter in model.parameters())
        del model
        for form, write in FORMS.items():
            if arguments.only.lower() not in form.lower():
                continue
            out = Path(directory, "out")
            write(start, out)
            has_config = any((out / name).exists() for name in ("config.json", "m.gguf"))
            base = "" if has_config else start
            for name, layout in LAYOUTS.items():
                found = loading.measure("hfscale", str(out), layout, base)
                about = {"form": form, "layout": name}
                rows.append(loading.shown(about, found, largest))
            shutil.rmtree(out) if not out.is_symlink() else out.unlink()
    loading.write_report(arguments.out, rows, largest, GOAL)


if __name__ == "__main__":
    main()

"""Fill in the README's table of what is supported; its numbers are those of the generated tables in docs/.

python scripts/support_table.py [--check]

docs/families.md and docs/adapters.md count, docs/families.md also by part; the tests' versions are those of
constraints-oldest.txt, constraints.txt and constraints-newest.txt.
"""

import argparse
import re
from pathlib import Path

from hfscale.config.schedules import schedule_names

ROOT = Path(__file__).parents[1]
BEGIN = "<!-- written by scripts/support_table.py from the tables in docs/ -->"
END = "<!-- end -->"

TABLE = """
| | today |
|---|---|
| tensor parallel | {tensor} of {families} causal-LM families, {classes} other classes; blocks, vocabulary, loss |
| sequence parallel | {sequence} of those families, {sequence_classes} of those classes; any sequence length |
| pipeline stages | {stages} families; {schedules} schedules (zero bubble, DualPipeV, PipeDream, ...) and CSV files |
| experts | {mixtures} MoE families: {expert_data} shard experts over data ranks, {expert_tensor} over tensor ranks |
| data | FSDP2 and HSDP, any causal LM, with every other axis; accumulation, clipping, recomputation, dropout |
| context parallel | {context} families ({handing} pass recurrent states, {whole} gather); all-gather, ring, Ulysses |
| other classes | vision-language, reward models, classifiers: [docs/other-classes.md](docs/other-classes.md) |
| unlisted families | hfscale infers a blueprint and uses it only if proved: [docs/inference.md](docs/inference.md) |
| adapters (PEFT) | 26 types, several at once; LoRA on all linear layers of {lora} of {lora_all} families |
| 4-bit and 8-bit weights | bitsandbytes in every layout, experts too; reads or keeps FP8, MXFP4, INT4, NVFP4 |
| optimizers | HF Trainer's names, 8-bit, Adafactor, Muon; equal to one process in every layout |
| precision | float32, bfloat16, `mixed_precision="bf16"`, `"fp16"`, `"fp8"`, scaled over all ranks; Liger's kernels |
| memory | recomputation: full, selective, elementwise, every n-th layer, by name, to a budget; tiling; offload; 8-bit |
| checkpoints | reads safetensors, `pytorch_model.bin`; load and resume in any layout; MTP layers train |
| Accelerate | `hfscale.Accelerator`: prepare, accumulate, clip, gather for metrics, save and load state |
| `transformers.Trainer`, TRL | in every layout; SFT, DPO, GRPO with vLLM, ...: [docs/trainer.md](docs/trainer.md) |
| tested with | {versions}, Python 3.11/3.13, on CPUs |
"""


def _pins(file: str) -> dict[str, str]:
    """Package -> version of three that a file pins."""
    pattern = r"(?m)^(torch|transformers|accelerate)==(\S+)"
    return dict(re.findall(pattern, (ROOT / file).read_text()))


def counts() -> dict[str, str]:
    """What the generated pages say."""
    families = (ROOT / "docs" / "families.md").read_text()
    before, _, rest = families.partition("\n## Mixtures of experts\n")
    experts, _, others = rest.partition("\n## Sequences cut over context ranks\n")
    others = rest.partition("\n## Other classes\n")[2]
    adapters = (ROOT / "docs" / "adapters.md").read_text()
    lanes = [_pins(f"constraints{lane}.txt") for lane in ("-oldest", "", "-newest")]
    versions = {name: "/".join(dict.fromkeys(pins[name] for pins in lanes)) for name in lanes[1]}
    found = {
        "tensor": _first(r"^(\d+) equal, .* of \d+;", before),
        "families": _first(r"^\d+ equal, .* of (\d+);", before),
        "sequence": _first(r"^with the sequence cut (\d+) equal", before),
        "stages": _first(r"^in stages (\d+) equal", before),
        "expert_data": _first(r"^data ranks: (\d+) equal", experts),
        "expert_tensor": _first(r"^tensor ranks: (\d+) equal", experts),
        "classes": _first(r"^(\d+) equal", others),
        "sequence_classes": _first(r"^with the sequence cut (\d+) equal", others),
        "lora": _first(r"^(\d+) equal, .* of \d+;", adapters),
        "lora_all": _first(r"^\d+ equal, .* of (\d+);", adapters),
        "schedules": str(len(schedule_names())),
        "versions": ", ".join(f"{name} {pins}" for name, pins in versions.items()),
    }
    sequences = families.partition("\n## Sequences cut over context ranks\n")[2].partition("\n## ")[
        0
    ]
    found["context"] = _first(r"^gather: (\d+) equal", sequences)
    for name, words in (("whole", "on whole sequences"), ("handing", "with states handed on")):
        found[name] = str(len(re.findall(rf"(?m)^\| \S+ \| equal .*{words}", sequences)))
    refused = _first(r"^data ranks: \d+ equal, (\d+) refused", experts)
    return {**found, "mixtures": str(int(found["expert_data"]) + int(refused))}


def _first(pattern: str, text: str) -> str:
    match = re.search(pattern, text, re.MULTILINE)
    if match is None:
        raise SystemExit(
            f"nothing in docs/ matches {pattern!r}: has a generated page changed its words?"
        )
    return match[1]


def filled(readme: str) -> str:
    """The README with a current table."""
    before, found, rest = readme.partition(BEGIN)
    _, ended, after = rest.partition(END)
    if not found or not ended:
        raise SystemExit(f"README.md needs the lines {BEGIN} and {END}")
    return f"{before}{BEGIN}\n{TABLE.format(**counts())}\n{END}{after}"


def main() -> int:
    """Write it, or compare."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--check", action="store_true", help="write nothing; exit with 1 where it is not current"
    )
    arguments = parser.parse_args()
    path = ROOT / "README.md"
    text = path.read_text()
    if arguments.check:
        return int(filled(text) != text)
    path.write_text(filled(text))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

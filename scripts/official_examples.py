"""Run official example scripts of transformers and TRL, stock and with hfscale's lines, and write a page for each.

    python scripts/official_examples.py [--transformers CHECKOUT] [--only WORD]

TRL's scripts are those of the installed package. Those of transformers are in its repository alone: without a checkout
they are left out. Nothing of either is kept here but the lines that change. Models and data are small and made here
(scripts/examples/small.py); nothing is downloaded, so that the library evaluate, which reads its metrics from the Hub,
is replaced by a function that computes the same accuracy.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.append(str(ROOT / "scripts" / "examples"))
STEPS = 4
EVALUATE = '''"""Stands for the library, whose metrics are downloaded."""


class Accuracy:
    def compute(self, predictions, references):
        return {"accuracy": float((predictions == references).mean())}


def load(*names, **options):
    return Accuracy()
'''
_TRAIN = (
    f"--max_steps {STEPS} --save_steps {STEPS} --learning_rate 1e-3 --logging_steps 1 --report_to none "
    "--use_cpu --logging_nan_inf_filter false"
)


@dataclass(frozen=True)
class Example:
    """One script: what changes in it, and how it is run here."""

    page: str
    title: str
    url: str
    changes: tuple[tuple[str, str], ...]  # a line of the script, and what stands in its place
    asked: str  # its arguments, as on the page
    here: str  # and those that replace them here
    # And how many batches a step has.
    layouts: tuple[tuple[str, int], ...] = (
        ("TP_SIZE", 1),
        ("DP_SHARD_SIZE", 2),
    )
    notes: tuple[str, ...] = field(default=())

    @property
    def file(self) -> str:
        """The script's name."""
        return self.url.rpartition("/")[2]


_TRL = "https://github.com/huggingface/trl/blob/main/trl/scripts/"
_HF = "https://github.com/huggingface/transformers/blob/main/examples/pytorch/"
_TRAINER = (
    ("import transformers\n", "import hfscale\nimport transformers\n"),
    ("    trainer = Trainer(\n", "    trainer = hfscale.Trainer(\n"),
)
_WHOLE = (
    "Every process loads the whole model, and `hfscale.Trainer` shards it there. If it does not fit in one process's\n"
    "  memory, let each rank read only its shards: instead of `AutoModelFor...from_pretrained(` write\n"
    "  `hfscale.from_pretrained(` with `parallel=hfscale.ParallelConfig()`, without `from_tf`."
)
_PATH = (
    "The script passes a model's path to the trainer, so each rank reads only its shards of the weights: "
    "large models\n  need no other change."
)
EXAMPLES = [
    Example(
        page="script-run-clm.md",
        title="run_clm.py: causal language modeling with transformers",
        url=f"{_HF}language-modeling/run_clm.py",
        changes=_TRAINER,
        asked="--model_name_or_path meta-llama/Llama-3.2-1B --dataset_name Salesforce/wikitext "
        "--dataset_config_name wikitext-2-raw-v1 --do_train --do_eval --output_dir out",
        here="--model_name_or_path model --train_file texts.txt --do_train --do_eval --block_size 32",
        notes=(_WHOLE,),
    ),
    Example(
        page="script-run-glue.md",
        title="run_glue.py: sequence classification with transformers",
        url=f"{_HF}text-classification/run_glue.py",
        changes=_TRAINER,
        asked="--model_name_or_path google-bert/bert-base-cased --task_name mrpc --do_train --do_eval "
        "--max_seq_length 128 --learning_rate 2e-5 --num_train_epochs 3 --output_dir out",
        here="--model_name_or_path model --train_file pairs.json --validation_file pairs.json --do_train --do_eval "
        "--max_seq_length 32",
        notes=(_WHOLE,),
    ),
    Example(
        page="script-trl-sft.md",
        title="sft.py: supervised fine-tuning with TRL",
        url=f"{_TRL}sft.py",
        changes=(
            (
                "    from trl import SFTTrainer, get_dataset, get_peft_config, get_quantization_config\n",
                "    from hfscale.trl import SFTTrainer\n"
                "    from trl import get_dataset, get_peft_config, get_quantization_config\n",
            ),
        ),
        asked="--model_name_or_path Qwen/Qwen3-8B --dataset_name trl-lib/Capybara --output_dir out",
        here="--model_name_or_path model --dataset_name conversations --dtype float32 --bf16 false "
        "--max_length 64 --assistant_only_loss",
        notes=(_PATH, "`--use_peft --lora_r 32` and `--load_in_4bit` work in every layout too."),
    ),
    Example(
        page="script-trl-dpo.md",
        title="dpo.py: direct preference optimization with TRL",
        url=f"{_TRL}dpo.py",
        changes=(
            (
                "    from trl import DPOTrainer, get_dataset, get_peft_config, get_quantization_config\n",
                "    from hfscale.trl import DPOTrainer\n"
                "    from trl import get_dataset, get_peft_config, get_quantization_config\n",
            ),
        ),
        asked="--model_name_or_path Qwen/Qwen3-8B --dataset_name trl-lib/ultrafeedback_binarized --output_dir out",
        here="--model_name_or_path model --dataset_name preferences --dtype float32 --bf16 false --max_length 64",
        notes=(_PATH,),
    ),
]


def source(example: Example, checkout: Path | None) -> Path | None:
    """Where the stock script is."""
    if example.url.startswith(_TRL):
        import trl

        return Path(trl.__file__).parent / "scripts" / example.file
    return checkout / "examples" / "pytorch" / example.url.removeprefix(_HF) if checkout else None


def changed(text: str, example: Example) -> str:
    """The script with hfscale's lines."""
    for old, new in example.changes:
        if text.count(old) != 1:
            raise SystemExit(
                f"{example.file}: {text.count(old)} lines are {old.strip()!r}, one was expected"
            )
        text = text.replace(old, new)
    return text


def prepare(directory: Path) -> None:
    """Write the model and the data that the scripts read."""
    import small
    import torch
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(small.llama_config()).save_pretrained(directory / "model")
    small.tokenizer().save_pretrained(directory / "model")
    (directory / "evaluate.py").write_text(EVALUATE)
    for name in ("conversations", "preferences"):
        (directory / name).mkdir()
        getattr(small, name)().to_json(directory / name / "train.jsonl")
    asked = small.questions()
    pairs = [
        (question, text, label) for question, *both in asked for label, text in enumerate(both)
    ]
    rows = (
        json.dumps({"sentence1": first, "sentence2": second, "label": label})
        for first, second, label in pairs
    )
    (directory / "pairs.json").write_text("\n".join(rows))
    (directory / "texts.txt").write_text(
        "".join(f"{question} {answer}\n" for question, answer, _ in asked * 4)
    )


def log(
    directory: Path, script: str, arguments: str, layout: str = "", batches: int = 1
) -> list[dict[str, float]]:
    """Run a script, on two processes where a layout is given, and return what the trainer logged."""
    name = script.removesuffix(".py")
    place = directory / name
    place.mkdir(exist_ok=True)
    given = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": f"{ROOT}{os.pathsep}{directory}",
        "HF_HUB_OFFLINE": "1",
    }
    given["HF_DATASETS_CACHE"] = str(place / "cache")
    line = [sys.executable]
    if layout:
        given[f"PARALLELISM_CONFIG_{layout}"] = "2"
        line += ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    rows = (
        f"--per_device_train_batch_size {8 // batches} --per_device_eval_batch_size {8 // batches}"
    )
    said = f"{arguments} {_TRAIN} {rows} --output_dir {name}/out"
    run = subprocess.run(
        [*line, script, *said.split()], cwd=directory, env=given, capture_output=True, text=True
    )
    if run.returncode:
        raise SystemExit(f"{script}: {run.stderr[-4000:]}")
    state = json.loads((place / "out" / f"checkpoint-{STEPS}" / "trainer_state.json").read_text())
    history = [row for row in state["log_history"] if "loss" in row]
    results = place / "out" / "eval_results.json"
    if results.exists():
        found = json.loads(results.read_text())
        history.append({"loss": found["eval_loss"], "accuracy": found["eval_accuracy"]})
    return history


def table(columns: dict[str, list[dict[str, float]]]) -> str:
    """Losses and norms by step, a column for each run."""
    lines = ["| step | " + " | ".join(columns) + " |", "|---|" + "---|" * len(columns)]
    for number, rows in enumerate(zip(*columns.values(), strict=True), 1):
        evaluated = "accuracy" in rows[0]
        second = "accuracy" if evaluated else "grad_norm"
        cells = [f"{row['loss']:.5f}, {row[second]:.5f}" for row in rows]
        lines.append(
            f"| {'evaluation: loss, accuracy' if evaluated else number} | "
            + " | ".join(cells)
            + " |"
        )
    return "\n".join(lines)


def difference(example: Example) -> str:
    """The changed lines as a diff."""
    lines = []
    for old, new in example.changes:
        before = old.splitlines()
        after = new.splitlines()
        lines += [f"-{line}" for line in before if line not in after]
        lines += [(" " if line in before else "+") + line for line in after]
    return "\n".join(lines)


def page(example: Example, columns: dict[str, list[dict[str, float]]]) -> str:
    """The whole page."""
    added = sum(line.startswith("+") for line in difference(example).splitlines())
    notes = "".join(f"- {note}\n" for note in example.notes)
    copy = f"python -c 'import trl.scripts.{example.file[:-3]} as script; print(script.__file__)'"
    where = f"    cp $({copy}) .\n" if example.url.startswith(_TRL) else ""
    rows = {"TP_SIZE": "8 rows, the same on both ranks", "DP_SHARD_SIZE": "4 rows on each rank"}
    layouts = " and\n".join(
        f"`PARALLELISM_CONFIG_{name}=2` ({rows[name]})" for name, _ in example.layouts
    )
    return f"""# {example.title}

[{example.file}]({example.url}), with {added} line{"s" if added > 1 else ""} changed:

```diff
{difference(example)}
```

The layout is read from the environment; on 8 GPUs:

{where}    export PARALLELISM_CONFIG_TP_SIZE=2 PARALLELISM_CONFIG_DP_SHARD_SIZE=4
    accelerate launch --multi_gpu --num_processes 8 {example.file} {example.asked}

## The numbers

These are the first training steps of a small Llama in float32 on CPUs: the official script in one process with batches
of 8 rows, and the same script with hfscale's lines on two processes, with
{layouts}. Losses and gradient norms:

{table(columns)}

`scripts/official_examples.py` runs both scripts and writes this table.

## What to know

{notes}- All arguments of the official script work, except `--deepspeed` and `--fsdp`, which raise an error: choose
  a layout of hfscale instead ([migrating.md](migrating.md)).
- [trainer.md](trainer.md) lists which results of hfscale's trainers equal stock Trainer in one process, and explains
  how to use your own loss.
"""


def main() -> None:
    """Run every example, and write its page."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--transformers", type=Path, metavar="CHECKOUT", help="a clone of transformers' repository"
    )
    parser.add_argument("--only", default="", metavar="WORD", help="pages whose name has this word")
    given = parser.parse_args()
    for example in EXAMPLES:
        script = source(example, given.transformers)
        if script is None or given.only not in example.page:
            continue
        text = script.read_text()
        with tempfile.TemporaryDirectory() as directory:
            place = Path(directory)
            prepare(place)
            (place / "stock.py").write_text(text)
            columns = {"stock, one process": log(place, "stock.py", example.here)}
            for layout, batches in example.layouts:
                name = layout.lower().removesuffix("_size")
                (place / f"{name}.py").write_text(changed(text, example))
                columns[f"{name}2"] = log(place, f"{name}.py", example.here, layout, batches)
        (ROOT / "docs" / example.page).write_text(page(example, columns))
        print(example.page, flush=True)


if __name__ == "__main__":
    main()

#!/bin/sh
# One would expect: a Trainer with optim="schedule_free_adamw", whose optimizer it switches to evaluation for
# evaluate(), saves the weights that it evaluates: the average, which is the model that schedule-free training is for.
# What happens: only an evaluation switches, and nothing does before a save. A checkpoint has the averaged weights if
# the Trainer happened to evaluate at that step; otherwise it has the points at which gradients are taken, which stay in
# the model after train() as well. evaluate() then changes the weights, so save_model() writes other weights after it.
# Versions: torch 2.14.1, transformers 5.24.0, accelerate 1.15.0, schedulefree 1.4.1; CPU.
# Seen: which weights the files have, and the loss that the Trainer tells beside that of its own checkpoint.
# PYTHON=... uses an environment that has these packages; otherwise they are installed in a temporary one.
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python=${PYTHON:-}
if [ -z "$python" ]; then
    python3 -m venv "$work/venv"
    python="$work/venv/bin/python"
    "$python" -m pip install --quiet torch==2.14.1 transformers==5.24.0 accelerate==1.15.0 schedulefree==1.4.1
fi
export OMP_NUM_THREADS=1
cat > "$work/script.py" <<'END'
import sys
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

IDS = torch.randint(3, 60, (64, 16), generator=torch.Generator().manual_seed(0)).tolist()
ROWS = [{"input_ids": row, "labels": row} for row in IDS]


def weights(model):
    return torch.cat([parameter.detach().flatten().clone() for parameter in model.parameters()])


def run(directory, evaluates):
    """Train; return whether a checkpoint, the model, and its save after evaluate() have the averaged weights."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    model = LlamaForCausalLM(LlamaConfig(num_attention_heads=4, num_key_value_heads=4, **sizes))
    arguments = TrainingArguments(
        str(directory), optim="schedule_free_adamw", lr_scheduler_type="constant", learning_rate=1e-2, max_steps=20,
        per_device_train_batch_size=8, save_steps=20, eval_strategy="steps" if evaluates else "no", eval_steps=20,
        use_cpu=True, report_to=[], disable_tqdm=True,
    )
    trainer = Trainer(model, arguments, train_dataset=ROWS, eval_dataset=ROWS)
    trainer.train()
    files = {"checkpoint": directory / "checkpoint-20", "save after train()": directory / "saved"}
    trainer.save_model(str(files["save after train()"]))
    told = trainer.evaluate()["eval_loss"]
    average = weights(model)
    files["save after evaluate()"] = directory / "evaluated"
    trainer.save_model(str(files["save after evaluate()"]))
    loaded = {name: LlamaForCausalLM.from_pretrained(place) for name, place in files.items()}
    again = Trainer(loaded["checkpoint"], arguments, eval_dataset=ROWS).evaluate()["eval_loss"]
    return told, again, {name: torch.equal(weights(each), average) for name, each in loaded.items()}


as_told = True
for evaluates in (False, True):
    told, again, averaged = run(Path(sys.argv[1], str(evaluates)), evaluates)
    print(f"evaluates at step 20: {evaluates}; evaluate() tells {told:.4f}, its checkpoint has {again:.4f};")
    print("    averaged weights:", ", ".join(f"{name} {holds}" for name, holds in averaged.items()))
    wanted = [evaluates, evaluates, True]
    as_told = as_told and list(averaged.values()) == wanted and (abs(told - again) < 1e-5) == evaluates
sys.exit(0 if as_told else 1)
END
"$python" "$work/script.py" "$work/runs" > "$work/out" 2> "$work/errors" || { cat "$work/out" "$work/errors"; exit 1; }
grep -e "^evaluates" -e "averaged weights" "$work/out"

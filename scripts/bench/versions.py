"""Time the steps of two checkouts of hfscale side by side: did a change make anything slower?

    python scripts/bench/versions.py BEFORE AFTER [--rounds 30] [--out scripts/bench/results/versions.json]

BEFORE and AFTER are working trees (``git worktree add``). Each serves its steps from two rank processes of one thread;
in every round each case trains one step (forward, backward, clipping, AdamW) in one tree and then in the other, so that
both see the same machine; which goes first alternates. A ratio is the median of the rounds' ratios, AFTER over BEFORE.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import IO, Any

LLAMA = {
    "hidden_size": 512,
    "intermediate_size": 1376,
    "num_hidden_layers": 4,
    "num_attention_heads": 16,
}
MIXTURE = {
    **LLAMA,
    "hidden_size": 256,
    "num_attention_heads": 8,
    "moe_intermediate_size": 256,
    "num_experts": 8,
}
# By the benchmark whose layout it is: model, layout, adapter, rows of a rank.
CASES: dict[str, tuple[str, dict[str, Any], bool, int]] = {
    "tensor_parallel: tp2": ("dense", {"tp_size": 2}, False, 4),
    "tensor_parallel: tp2, sequence": (
        "dense",
        {"tp_size": 2, "sequence_parallel": True},
        False,
        4,
    ),
    "tensor_parallel: one process": ("dense", {}, False, 4),
    "stages: 1f1b": ("dense", {"pp_size": 2, "num_microbatches": 8}, False, 8),
    "stages: zbv": (
        "dense",
        {"pp_size": 2, "num_microbatches": 8, "pipeline_schedule": "zbv"},
        False,
        8,
    ),
    "experts: ep2 over data ranks": ("mixture", {"dp_shard_size": 2, "ep_size": 2}, False, 4),
    "experts: ep2 over tensor ranks": ("mixture", {"tp_size": 2, "ep_size": 2}, False, 4),
    "finetune: LoRA, tp2": ("dense", {"tp_size": 2}, True, 4),
    "finetune: LoRA, dp_shard2": ("dense", {"dp_shard_size": 2}, True, 2),
}
_state: dict[str, Any] = {}


def build(case: str, directory: str) -> None:
    """Load one case's model into this rank."""
    import torch
    from peft import LoraConfig

    import hfscale

    model_of, layout, adapted, rows = CASES[case]
    torch.set_num_threads(1)
    adapter = {"peft_config": LoraConfig(r=16, target_modules="all-linear")} if adapted else {}
    parallel = hfscale.ParallelConfig(**layout)
    model = hfscale.from_pretrained(
        f"{directory}/{model_of}", parallel=parallel, dtype=torch.float32, **adapter
    )
    optimizer = torch.optim.AdamW(
        [p for p in model.parameters() if p.requires_grad], lr=1e-4, fused=True
    )
    ids = torch.randint(0, 8000, (rows, 256), generator=torch.Generator().manual_seed(0))
    _state["case"] = (model.train(), optimizer, {"input_ids": ids, "labels": ids})


def step() -> float:
    """Seconds of one step."""
    import hfscale

    model, optimizer, batch = _state["case"]
    start = time.perf_counter()
    hfscale.train_step(model, batch)
    hfscale.clip_grad_norm_(model, 1.0)
    optimizer.step()
    optimizer.zero_grad()
    return time.perf_counter() - start


def serve(directory: str) -> None:
    """Answer a line of standard input, ``build NAME`` or ``step``, by a line: the seconds of the slowest rank."""
    from hfscale.testing import RankPool

    pools: dict[int, RankPool] = {}
    world = 0
    for line in sys.stdin:
        verb, _, case = line.strip().partition(" ")
        if verb == "build":
            layout = CASES[case][1]
            world = 2 if layout else 1
            if world not in pools:
                pools[world] = RankPool(world, timeout=600)
            pools[world].run(build, case, directory)
            print("built", flush=True)
        else:
            print(max(pools[world].run(step)), flush=True)
    for pool in pools.values():
        pool.close()


class Tree:
    """One checkout, in processes of its own."""

    def __init__(self, root: Path, directory: str):
        environment = {**os.environ, "PYTHONPATH": str(root.resolve()), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, __file__, "--serve", directory]
        # What libraries print goes to standard error; answers alone come back.
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )

    def ask(self, line: str) -> str:
        """Send a line and wait for its answer."""
        pipe: IO[str] | None = self._process.stdin
        assert pipe is not None
        assert self._process.stdout is not None
        pipe.write(line + "\n")
        pipe.flush()
        answer = self._process.stdout.readline()
        if not answer:
            raise SystemExit("a checkout's ranks ended; what they said stands above")
        return answer.strip()

    def close(self) -> None:
        """End its ranks."""
        self._process.communicate()


def save_models(directory: str) -> None:
    """What every case loads."""
    from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3MoeConfig

    dense = LlamaConfig(num_key_value_heads=8, vocab_size=8192, **LLAMA)
    mixture = Qwen3MoeConfig(
        num_key_value_heads=4, head_dim=32, num_experts_per_tok=2, vocab_size=8192, **MIXTURE
    )
    for name, config in (("dense", dense), ("mixture", mixture)):
        AutoModelForCausalLM.from_config(config).save_pretrained(f"{directory}/{name}")


def compare(before: Tree, after: Tree, case: str, rounds: int) -> dict[str, Any]:
    """Interleaved steps of one case."""
    trees = (before, after)
    for tree in trees:
        tree.ask(f"build {case}")
    seconds: tuple[list[float], list[float]] = ([], [])
    for index in range(rounds + 3):
        for which in (0, 1) if index % 2 else (1, 0):
            taken = float(trees[which].ask("step"))
            if index >= 3:  # warm-up
                seconds[which].append(taken)
    ratios = sorted(after / before for before, after in zip(*seconds, strict=True))
    quarter = len(ratios) // 4
    return {
        "case": case,
        "seconds before, after": [round(statistics.median(values), 4) for values in seconds],
        "after / before": round(statistics.median(ratios), 3),
        "middle half of the ratios": [round(ratios[quarter], 3), round(ratios[-quarter - 1], 3)],
    }


def main() -> None:
    """Run every case, print and write the report."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("trees", nargs="*", type=Path, metavar="BEFORE AFTER")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--only", nargs="*", help="cases whose name holds one of these words")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        serve(arguments.serve)
        return
    if len(arguments.trees) != 2:
        parser.error("two working trees are compared: BEFORE AFTER")
    import torch
    import transformers
    from report import write_report

    results = []
    with tempfile.TemporaryDirectory() as directory:
        save_models(directory)
        before, after = (Tree(root, directory) for root in arguments.trees)
        for case in CASES:
            if not arguments.only or any(word in case for word in arguments.only):
                results.append(compare(before, after, case, arguments.rounds))
                print(results[-1], flush=True)
        before.close()
        after.close()
    write_report(arguments.out, results, torch, transformers)


if __name__ == "__main__":
    main()

"""Weights streamed to a real vLLM: its log-probabilities are the trainer's, in every layout. ``make test-vllm``."""

import json
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3MoeConfig

import hfscale
from hfscale import ParallelConfig
from hfscale.testing import RankPool

from . import vllm_server

COLOCATED = "tests.engines.colocated"  # imports what only vLLM's environment has

PYTHON = os.environ.get("VLLM_PYTHON")
pytestmark = pytest.mark.skipif(
    PYTHON is None, reason="VLLM_PYTHON names no Python that has vLLM: make test-vllm"
)
Pools = Callable[[int], RankPool]
IDS = [3, 14, 15, 9, 26, 5, 35, 8, 9, 7, 9, 3]
SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "vocab_size": 64,
    "num_attention_heads": 4,
}
SIZES |= {
    "num_key_value_heads": 2,
    "head_dim": 32,
    "intermediate_size": 96,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
FOR_CPUS = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "OMP_NUM_THREADS": "1",
}
FOR_CPUS |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "HF_HUB_OFFLINE": "1"}
MIXTURE = {"moe_intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 2}
CONFIGS = {"llama": LlamaConfig(**SIZES), "qwen3_moe": Qwen3MoeConfig(**SIZES, **MIXTURE)}
LAYOUTS: dict[str, dict[str, int]] = {
    "tp2": {"tp_size": 2},
    "pp2": {"pp_size": 2},
    "dp_shard2": {"dp_shard_size": 2},
    "tp2-pp2": {"tp_size": 2, "pp_size": 2},
    "cp2": {"cp_size": 2},
    "ep2": {"ep_size": 2},
}
CASES = [
    ("llama", layout, lora)
    for layout in ("tp2", "pp2", "dp_shard2", "tp2-pp2", "cp2")
    for lora in (False, True)
]
CASES += [("qwen3_moe", layout, False) for layout in ("ep2", "tp2", "pp2")]


class Engine:
    """A running vLLM."""

    def __init__(self, directory: Path) -> None:
        self.process = subprocess.Popen(
            [str(PYTHON), vllm_server.__file__, str(directory)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, **FOR_CPUS},
            text=True,
        )

    def scores(self, weights: Path | None = None) -> torch.Tensor:
        """Return the log-probabilities of the text, after new weights are loaded."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        print(
            json.dumps({"ids": IDS, "weights": str(weights or "")}),
            file=self.process.stdin,
            flush=True,
        )
        return torch.tensor(json.loads(self.process.stdout.readline()))

    def close(self) -> None:
        """End it."""
        self.process.kill()
        self.process.communicate()


@pytest.fixture(scope="module")
def engines(
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Callable[[str], tuple[Path, Engine]]]:
    started: dict[str, tuple[Path, Engine]] = {}

    def engine(family: str) -> tuple[Path, Engine]:
        if family not in started:
            directory = tmp_path_factory.mktemp(family)
            torch.manual_seed(0)
            AutoModelForCausalLM.from_config(CONFIGS[family], dtype=torch.float32).save_pretrained(
                directory
            )
            started[family] = directory, Engine(directory)
        return started[family]

    yield engine
    for _, each in started.values():
        each.close()


def train_and_stream(directory: Path, layout: dict[str, int], lora: bool, out: Path) -> list[float]:
    """Take two large steps, stream the weights to a file, and return the log-probabilities of the text."""
    asked = (
        LoraConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
        if lora
        else None
    )
    parallel = ParallelConfig(**layout)
    model = hfscale.from_pretrained(
        directory, parallel=parallel, peft_config=asked, dtype=torch.float32
    ).train()
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.5)
    ids = torch.tensor([IDS] * 2)
    for _ in range(2):
        hfscale.train_step(model, {"input_ids": ids, "labels": ids})
        optimizer.step()
        optimizer.zero_grad()
    streamed = {
        name: tensor.clone() for name, tensor in hfscale.stream_weights(model, merge_adapters=lora)
    }
    if streamed:
        save_file(streamed, out)
    scores = hfscale.token_scores(model.eval(), {"input_ids": ids[:1], "labels": ids[:1]})
    return [float(each) for each in scores.log_probs[0]]


def test_trl_generates_where_it_trains(tmp_path: Path) -> None:
    """Each step's completions were sampled after a sync: had it failed, the engine would score them otherwise."""
    command = [str(PYTHON), "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    environment = {**os.environ, **FOR_CPUS, "PYTHONPATH": str(Path(hfscale.__file__).parents[1])}
    subprocess.run([*command, "-m", COLOCATED, str(tmp_path)], env=environment, check=True)
    for name, rows in json.loads((tmp_path / "logs.json").read_text()).items():
        steps = [row for row in rows if "loss" in row]
        assert len(steps) == 3
        for row in steps:
            assert row["sampling/sampling_logp_difference/max"] < 2e-5, (name, row)


@pytest.mark.parametrize(("family", "layout", "lora"), CASES)
def test_the_engine_scores_as_the_trainer(
    engines: Callable[[str], tuple[Path, Engine]],
    pools: Pools,
    tmp_path: Path,
    family: str,
    layout: str,
    lora: bool,
) -> None:
    directory, engine = engines(family)
    before = engine.scores()
    sizes = LAYOUTS[layout]
    out = tmp_path / "model.safetensors"
    scores = pools(ParallelConfig(**sizes).total_size).run(
        train_and_stream, directory, sizes, lora, out
    )[0]
    # vLLM 0.32 reloads mixtures wrongly on CPUs, also the weights that it has.
    if family == "qwen3_moe":
        shutil.copyfile(directory / "config.json", tmp_path / "config.json")
        another = Engine(tmp_path)
        after = another.scores()
        another.close()
    else:
        after = engine.scores(out)
    wanted = torch.tensor(scores[: len(after)])
    assert (after - wanted).abs().max() < 2e-5, (after, wanted)
    assert (after - before).abs().max() > 1e-3  # the weights are new ones

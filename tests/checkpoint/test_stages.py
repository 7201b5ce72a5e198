"""Weights into pipeline stages: every rank reads, builds and holds its stages' only (traps T9, T24)."""

import gc
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, DeepseekV3Config, PreTrainedConfig, Qwen3MoeConfig

import hfscale
from hfscale import CheckpointError, ParallelConfig
from hfscale.distributed.files.reader import SafetensorsFile
from hfscale.testing import RankPool
from hfscale.train.runtime import runtime_of
from hfscale.train.runtime.shards import local_tensor

from ..sweeps import cases
from ..tensor_memory import follow_memory
from ..tiny_models import tiny

Pools = Callable[[int], RankPool]
Layout = dict[str, Any]
PP2: Layout = {"pp_size": 2, "stage_layers": (1, 3)}
INTERLEAVED: Layout = {"pp_size": 2, "pipeline_schedule": "interleaved1f1b"}
LAYOUTS = {
    "pp2": PP2,
    "interleaved": INTERLEAVED,
    "zbv": {"pp_size": 2, "pipeline_schedule": "zbv"},
    "pp2-tp2": {"pp_size": 2, "tp_size": 2},
    "pp2-shard2": {"pp_size": 2, "dp_shard_size": 2},
}
FAMILIES = [("llama", False), ("qwen3", True), ("gpt2", True), ("deepseek_v3", False)]
FAMILIES_CUT = cases(
    [(*family, layout) for family in FAMILIES for layout in LAYOUTS],
    daily=[*((*FAMILIES[2], layout) for layout in LAYOUTS), *((*family, "pp2") for family in FAMILIES),
           ("qwen3", True, "pp2-shard2"), ("deepseek_v3", False, "zbv")],
)  # fmt: skip
EMBEDDINGS = [("llama", "model.embed_tokens"), ("gpt2", "transformer.wte")]


def four_layers(family: str, tied: bool) -> PreTrainedConfig:
    return tiny(
        family,
        tie_word_embeddings=tied,
        **{"n_layer" if family == "gpt2" else "num_hidden_layers": 4},
    )


def experts(family: str) -> PreTrainedConfig:
    """Checkpoints keep one matrix per expert, models one for all; ``deepseek_v3`` has a buffer in every router."""
    sizes: dict[str, Any] = {
        "hidden_size": 32,
        "intermediate_size": 50,
        "moe_intermediate_size": 16,
        "vocab_size": 67,
    }
    sizes |= {
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "num_experts_per_tok": 2,
    }
    if family == "qwen3_moe":
        return Qwen3MoeConfig(**sizes, num_experts=4, head_dim=8)
    heads = {
        "q_lora_rank": None,
        "kv_lora_rank": 8,
        "qk_rope_head_dim": 4,
        "qk_nope_head_dim": 8,
        "v_head_dim": 8,
    }
    return DeepseekV3Config(
        **sizes, **heads, n_routed_experts=4, n_group=1, topk_group=1, first_k_dense_replace=1
    )


def shares(model: Any) -> dict[str, tuple[dict[str, int], Tensor]]:
    """What this rank holds, by owned name."""
    runtime = runtime_of(model)
    return {
        p.name: (runtime.mesh.ranks, local_tensor(t.detach()).clone())
        for p, t in runtime.parameters()
    }


# Reading


def bytes_read(path: str, layout: Layout) -> tuple[int, int]:
    """This pipeline rank, and what it read."""
    total = 0
    original = SafetensorsFile.read

    def read(self: SafetensorsFile, offset: int, buffer: Tensor) -> None:
        nonlocal total
        total += buffer.numel() * buffer.element_size()
        original(self, offset, buffer)

    SafetensorsFile.read = read  # type: ignore[method-assign]
    try:
        model = hfscale.from_pretrained(path, parallel=ParallelConfig(**layout))
    finally:
        SafetensorsFile.read = original  # type: ignore[method-assign]
    return runtime_of(model).mesh.ranks["pp"], total


@pytest.mark.daily("True-pp2-shard2", "True-interleaved")
@pytest.mark.parametrize(
    ("layout", "first"),
    [(PP2, (0,)), (INTERLEAVED, (0, 2)), ({**PP2, "dp_shard_size": 2}, (0,))],
    ids=["pp2", "interleaved", "pp2-shard2"],
)
@pytest.mark.parametrize("tied", [False, True])
def test_a_rank_reads_its_stages_only(
    pools: Pools, tmp_path: Path, tied: bool, layout: Layout, first: tuple[int, ...]
) -> None:
    config = tiny(
        "llama", num_hidden_layers=4, vocab_size=68, intermediate_size=64, tie_word_embeddings=tied
    )
    stock = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    stock.save_pretrained(tmp_path)
    sizes = {name: parameter.numel() * 4 for name, parameter in stock.named_parameters()}
    around = [sizes["model.embed_tokens.weight"], sizes["model.norm.weight"]]
    around[1] += around[0] if tied else sizes["lm_head.weight"]
    for name, size in sizes.items():
        if ".layers." in name:
            around[int(name.split(".")[2]) not in first] += size
    for rank, read in pools(ParallelConfig(**layout).total_size).run(
        bytes_read, str(tmp_path), layout
    ):
        assert read == around[rank] // layout.get("dp_shard_size", 1)


def built(build: str, path: str, layout: Layout) -> dict[str, int]:
    """Bytes that building a model took at most, what was left, and what the rank's own parameters are."""
    config = four_layers("llama", tied=False)
    gc.collect()
    with follow_memory() as memory:
        if build == "parallelize":
            torch.manual_seed(0)
            whole = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
            model = hfscale.parallelize(whole, ParallelConfig(**layout))
            del whole
        elif build == "from_config":
            model = hfscale.from_config(
                config, parallel=ParallelConfig(**layout), dtype=torch.float32
            )
        else:
            model = hfscale.from_pretrained(path, parallel=ParallelConfig(**layout))
        gc.collect()
        time.sleep(0.1)  # gloo's threads let go of a finished collective's message a moment later
    return {
        "live": memory.live,
        "peak": memory.peak,
        "own": sum(p.untyped_storage().nbytes() for p in model.parameters()),
        "planned": sum(p.numel() for name, p in model.named_parameters()) * 4,
        "layer": max(
            sum(p.numel() * 4 for p in layer.parameters()) for layer in model.model.layers
        ),
    }


@pytest.mark.daily("from_pretrained-pp2", "parallelize-interleaved", "from_config-pp2")
@pytest.mark.parametrize("layout", ["pp2", "interleaved"])
@pytest.mark.parametrize("build", ["from_pretrained", "from_config", "parallelize"])
def test_other_stages_take_no_memory(pools: Pools, tmp_path: Path, build: str, layout: str) -> None:
    stock = AutoModelForCausalLM.from_config(four_layers("llama", tied=False), dtype=torch.float32)
    stock.save_pretrained(tmp_path)
    whole = sum(p.numel() * 4 for p in stock.parameters())
    found = pools(2).run(built, build, str(tmp_path), LAYOUTS[layout])
    assert sum(rank["planned"] for rank in found) == whole
    slack = 2048  # rotary tables, the state of a generator
    for rank in found:
        assert rank["own"] == rank["planned"]
        assert rank["live"] <= rank["own"] + slack
        if build == "from_pretrained":
            assert rank["peak"] <= rank["own"] + slack
        if build == "from_config":
            # One unit at a time, whole.
            assert rank["peak"] <= rank["own"] + rank["layer"] + 3 * slack


# Random weights


def initialized(
    family: str, tied: bool, layout: Layout, out: str, seed: int
) -> tuple[list[str], list[str], bool]:
    """Save a fresh model; which units its initialization put into memory, what the rank holds, the mode."""
    units: list[str] = []
    original = torch.nn.Module.to_empty
    config = experts(family) if family == "deepseek_v3" else four_layers(family, tied)
    with torch.device("meta"):
        names = [name for name, _ in AutoModelForCausalLM.from_config(config).named_modules()]

    def to_empty(self: Any, *, device: Any, recurse: bool = True) -> Any:
        if device == "cpu" and recurse:
            units.append(f"{type(self).__name__} {sum(p.numel() for p in self.parameters())}")
        return original(self, device=device, recurse=recurse)

    torch.nn.Module.to_empty = to_empty  # type: ignore[method-assign]
    try:
        model = hfscale.from_config(
            config, parallel=ParallelConfig(**layout), seed=seed, dtype=torch.float32
        )
    finally:
        torch.nn.Module.to_empty = original  # type: ignore[method-assign]
    hfscale.save_pretrained(model, out)
    held = [
        name
        for name in names
        if runtime_of(model).is_local(name) and name.rpartition(".")[2].isdigit()
    ]
    return [unit for unit in units if "Layer " in unit or "Block " in unit], held, model.training


@pytest.mark.daily("gpt2-True-pp2-tp2", "deepseek_v3-False-zbv")
@pytest.mark.parametrize(("family", "tied", "layout"), FAMILIES_CUT)
def test_random_weights_do_not_depend_on_stages(
    pools: Pools, tmp_path: Path, family: str, tied: bool, layout: str
) -> None:
    parallel = LAYOUTS[layout]
    if family == "deepseek_v3" and "tp_size" in parallel:
        pytest.skip("no blueprint")
    initialized(family, tied, {}, str(tmp_path / "one"), 3)
    one = load_file(tmp_path / "one" / "model.safetensors")
    world = ParallelConfig(**parallel).total_size
    for units, held, training in pools(world).run(
        initialized, family, tied, parallel, str(tmp_path / "out"), 3
    ):
        assert training
        assert len(units) == len(held) < 4
    out = load_file(tmp_path / "out" / "model.safetensors")
    assert one.keys() == out.keys()
    assert ("lm_head.weight" in one) != tied
    assert all(torch.equal(one[name], out[name]) for name in one)


# Checkpoints that do not hold what the model has, or under other names


def loaded(path: str, layout: Layout) -> tuple[dict[str, tuple[dict[str, int], Tensor]], list[str]]:
    """This rank's shares, and what the host said about keys."""
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("transformers")
    logger.addHandler(handler)
    try:
        model = hfscale.from_pretrained(path, parallel=ParallelConfig(**layout), seed=9)
    finally:
        logger.removeHandler(handler)
    return shares(model), [
        message for message in said if "UNEXPECTED" in message or "MISSING" in message
    ]


def assert_shares_equal_one_process(pool: RankPool, path: Path, layout: Layout) -> list[list[str]]:
    whole, _ = loaded(str(path), {})
    seen: set[str] = set()
    messages = []
    plan = hfscale.plan(path, ParallelConfig(**layout))
    for found, said in pool.run(loaded, str(path), layout):
        for name, (ranks, share) in found.items():
            assert torch.equal(share, plan.by_name[name].take(whole[name][1], ranks)), name
        assert found.keys() == plan.local_names(ranks["pp"]).keys()
        seen |= found.keys()
        messages.append(said)
    assert seen == whole.keys()
    return messages


@contextmanager
def stored(directory: Path) -> Iterator[dict[str, Tensor]]:
    """The tensors of a checkpoint, to be changed."""
    tensors = load_file(directory / "model.safetensors")
    yield tensors
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})


@pytest.mark.daily("pp2-tp2")
@pytest.mark.parametrize("layout", ["interleaved", "pp2-tp2", "pp2-shard2"])
def test_missing_weights_are_what_one_process_makes(
    pools: Pools, tmp_path: Path, layout: str
) -> None:
    """A base model's checkpoint: no prefix, no head; and two matrices are lost, of the first and the last layer."""
    stock = AutoModelForCausalLM.from_config(four_layers("llama", tied=False), dtype=torch.float32)
    stock.model.save_pretrained(tmp_path)
    with stored(tmp_path) as tensors:
        for name in ("layers.0.mlp.up_proj.weight", "layers.3.self_attn.o_proj.weight"):
            del tensors[name]
    pool = pools(ParallelConfig(**LAYOUTS[layout]).total_size)
    messages = assert_shares_equal_one_process(pool, tmp_path, LAYOUTS[layout])
    first, *_, last = messages
    assert "0.mlp.up_proj" in first[0]
    assert "lm_head" not in first[0]
    assert "0.mlp.up_proj" not in last[0]
    assert "lm_head" in last[0]


@pytest.mark.daily("llama-model.embed_tokens-pp2-embedding", "llama-model.embed_tokens-pp2-both")
@pytest.mark.parametrize(
    "names", ["embedding", "head", "both", "neither", "embedding without prefix"]
)
@pytest.mark.parametrize(
    ("family", "embedding", "layout"),
    cases(
        [(*named, layout) for named in EMBEDDINGS for layout in ("pp2", "pp2-tp2")],
        daily=[(*EMBEDDINGS[0], "pp2"), (*EMBEDDINGS[1], "pp2-tp2")],
    ),
)
def test_a_tied_tensor_reaches_both_ends(
    pools: Pools, tmp_path: Path, family: str, embedding: str, names: str, layout: str
) -> None:
    AutoModelForCausalLM.from_config(
        four_layers(family, tied=True), dtype=torch.float32
    ).save_pretrained(tmp_path)
    with stored(tmp_path) as tensors:
        weight = tensors.pop(f"{embedding}.weight")
        if names in ("embedding", "both"):
            tensors[f"{embedding}.weight"] = weight
        if names in ("head", "both"):
            tensors["lm_head.weight"] = weight.clone()
        if names == "embedding without prefix":
            tensors[f"{embedding.partition('.')[2]}.weight"] = weight
    pool = pools(ParallelConfig(**LAYOUTS[layout]).total_size)
    assert_shares_equal_one_process(pool, tmp_path, LAYOUTS[layout])


def refused(path: str, layout: Layout) -> str:
    with pytest.raises(CheckpointError) as caught:
        hfscale.from_pretrained(path, parallel=ParallelConfig(**layout))
    return str(caught.value)


def test_a_tied_tensor_of_two_values_is_refused(pools: Pools, tmp_path: Path) -> None:
    """The host unties such a model; stages that each took one of the two would train neither."""
    AutoModelForCausalLM.from_config(four_layers("llama", tied=True)).save_pretrained(tmp_path)
    with stored(tmp_path) as tensors:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] + 1
    for message in (refused(str(tmp_path), {}), *pools(2).run(refused, str(tmp_path), PP2)):
        assert "differ in the checkpoint" in message
        assert "tie_word_embeddings" in message


@pytest.mark.daily("pp2-shard2-qwen3_moe")
@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3"])
@pytest.mark.parametrize("layout", ["zbv", "pp2-shard2"])
def test_weights_that_the_host_fuses(
    pools: Pools, tmp_path: Path, family: str, layout: str
) -> None:
    stock = AutoModelForCausalLM.from_config(experts(family), dtype=torch.float32)
    stock.save_pretrained(tmp_path)
    pool = pools(ParallelConfig(**LAYOUTS[layout]).total_size)
    for said in assert_shares_equal_one_process(pool, tmp_path, LAYOUTS[layout]):
        assert not said  # nothing of another stage's is called unexpected
    for rank, read in pool.run(bytes_read, str(tmp_path), LAYOUTS[layout]):
        assert read < 0.75 * sum(t.numel() * 4 for t in stock.state_dict().values()), rank

"""Weights that stay as their checkpoint stores them, under adapters: what adapters over the plain values compute."""

from collections.abc import Callable
from dataclasses import replace
from math import prod
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from peft import LoraConfig
from safetensors.torch import load_file
from torch import Tensor
from transformers import FineGrainedFP8Config, Mxfp4Config

import hfscale
from hfscale import CheckpointError, ConfigError, ParallelConfig
from hfscale.cli import main
from hfscale.distributed.files import dequantized
from hfscale.distributed.ops.quantized_weights import encodings_of
from hfscale.extras.as_stored.kept import KeptPlan
from hfscale.extras.as_stored.rows import StoredEncoding
from hfscale.features.quantization.plan import holds_4_bits
from hfscale.features.quantization.quantized_modules import is_quantized
from hfscale.plan.quantized import QuantizedPlan
from hfscale.recipes.run import quantization_of
from hfscale.recipes.schema import FinetuneRecipe
from hfscale.testing import RankPool
from hfscale.train.runtime import runtime_of
from hfscale.train.runtime.parameter_names import owner_of
from hfscale.train.runtime.shards import local_tensor

from ...checkpoint.test_host_forms import write_int8
from ...mixtures import EAGER
from ...stored_weights import CONFIGS, WRITTEN, Written, fp8, write, write_pairs
from ...sweeps import cases
from ...tensor_memory import follow_memory

# PEFT's, of experts.
pytestmark = pytest.mark.filterwarnings("ignore:The following .*_pattern keys")

Pools = Callable[[int], RankPool]
Layout = dict[str, Any]
Pair = tuple[str, str]
PAIRS: list[Pair] = [
    *(("llama", form) for form in ("fp8", "fp8 per tensor", "int4", "nvfp4")),
    *(("qwen3_moe", form) for form in ("fp8", "int4")),
    *(("deepseek_v3", form) for form in ("fp8", "int4 experts")),
    *(("glm4_moe", form) for form in ("fp8", "float8")),
    ("minimax_m2", "fp8"),
    ("gpt_oss", "mxfp4"),
]
ON_RANKS = [
    pair
    for pair in PAIRS
    if pair[1] not in ("fp8 per tensor", "nvfp4") and pair != ("glm4_moe", "fp8")
]
UNEVEN = [("llama", "fp8"), ("llama", "int4"), ("qwen3_moe", "fp8"), ("gpt_oss", "mxfp4")]
IN_STAGES = [("llama", "int4"), ("qwen3_moe", "fp8"), ("gpt_oss", "mxfp4")]
LAYOUTS: dict[str, Layout] = {
    "one": {},
    "tp2": {"tp_size": 2},
    "sp2": {"tp_size": 2, "sequence_parallel": True},
    "ep2": {"ep_size": 2, "dp_shard_size": 2},
    "pp2": {"pp_size": 2, "num_microbatches": 2},
    "replicate2": {"dp_replicate_size": 2},
    "shard2": {"dp_shard_size": 2},
    "cp2": {"cp_size": 2},
    "tp2-shard2": {"tp_size": 2, "dp_shard_size": 2},
    "shard3": {"dp_shard_size": 3},  # rows of 16 in thirds, and a rank without experts
    "ep2-tp2": {"ep_size": 2, "tp_size": 2},
    "ep2-shard4": {"ep_size": 2, "dp_shard_size": 4},
    "tp2-pp2": {"tp_size": 2, "pp_size": 2, "num_microbatches": 2},
    "pp2-shard2": {"pp_size": 2, "dp_shard_size": 2, "num_microbatches": 2},
    "cp2-shard2": {"cp_size": 2, "dp_shard_size": 2},
}
MISALIGNED = 1.05
"""Blocks that ranks share are held by each: at most so much more than its share of the stored bytes, on these sizes."""


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> dict[Pair, Path]:
    return write_pairs(PAIRS, tmp_path_factory.mktemp)


@pytest.fixture(scope="module")
def packed(written: dict[Pair, Path]) -> dict[Pair, Any]:
    return {pair: adapted(path, pair[0], {}, packed=True) for pair, path in written.items()}


def lora(family: str) -> LoraConfig:
    """Around every linear, and the experts."""
    experts = (
        {}
        if family == "llama"
        else {"target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]}
    )
    return LoraConfig(r=3, target_modules="all-linear", **experts)


def adapted(path: Path, family: str, layout: Layout, packed: bool, **kwargs: Any) -> Any:
    given = {
        "dtype": torch.float64,
        "peft_config": lora(family),
        **({} if family == "llama" else EAGER),
        **kwargs,
    }
    asked = {"quantization_config": "as_stored"} if packed else {}
    return hfscale.from_pretrained(
        path / "stored", parallel=ParallelConfig(**layout), **given, **asked
    ).train()


def batch(model: Any) -> dict[str, Tensor]:
    ids = torch.randint(3, 30, (12, 8), generator=torch.Generator().manual_seed(7))
    ids = ids[hfscale.batch_rank(model) :: hfscale.batch_world(model)]
    return {"input_ids": ids, "labels": ids}


def two_steps(model: Any) -> list[dict[str, Tensor]]:
    """Losses and norms; gradients and weights of adapters after each of two steps."""
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1.0)
    found = []
    for _ in range(2):
        values = {"loss": hfscale.train_step(model, batch(model)).detach().clone()}
        values["norm"] = torch.as_tensor(hfscale.clip_grad_norm_(model, 1e9))
        held = [
            (planned.name, p) for planned, p in runtime_of(model).parameters() if p.requires_grad
        ]
        assert all(p.grad is not None for _, p in held)
        values |= {
            f"gradient of {name}": local_tensor(p.grad).clone()
            for name, p in held
            if p.grad is not None
        }
        optimizer.step()
        found.append({**values, **{name: local_tensor(p.detach()).clone() for name, p in held}})
        optimizer.zero_grad()
    return found


def held_bytes(model: Any) -> tuple[int, float]:
    """Bytes of the packed weights of this rank, and its share of all their values."""
    runtime = runtime_of(model)
    assert runtime.plan.quantized is not None
    held = 0
    here = 0
    everything = 0
    for name in runtime.plan.quantized.weights:
        planned = runtime.plan.by_name[name]
        everything += prod(planned.shape)
        if runtime.is_local(name):
            module, attribute = owner_of(runtime.model, name)
            assert is_quantized(module, attribute)
            assert not module._parameters[attribute].requires_grad  # type: ignore[union-attr]
            held += local_tensor(module._parameters[attribute]).nbytes  # type: ignore[arg-type]
            here += prod(planned.local_shape(runtime.mesh.ranks))
    return held, here / everything


def compared(paths: dict[Pair, Path], layout: Layout) -> dict[Pair, tuple[float, str, int, float]]:
    """By checkpoint: the worst difference between adapters over packed and over plain weights, its name, and bytes."""
    result = {}
    for pair, path in paths.items():
        plain = two_steps(adapted(path, pair[0], layout, packed=False))
        model = adapted(path, pair[0], layout, packed=True)
        held = held_bytes(model)
        packed = two_steps(model)
        worst = 0.0, ""
        for ours, theirs in zip(packed, plain, strict=True):
            assert ours.keys() == theirs.keys()
            for name, value in theirs.items():
                apart = (
                    (ours[name] - value).abs().max() / value.abs().max().clamp(min=1e-9)
                    if value.numel()
                    else 0.0
                )
                worst = max(worst, (float(apart), name))
        result[pair] = *worst, *held
    return result


def stored_bytes(path: Path) -> int:
    """Bytes of the tensors that are stored quantized."""
    stored, plain = (load_file(path / name / "model.safetensors") for name in ("stored", "plain"))
    beside = ("weight_shape", "input_scale")
    kept = (
        key
        for key, tensor in stored.items()
        if key not in plain or plain[key].dtype != tensor.dtype
    )
    return sum(stored[key].nbytes for key in kept if not key.endswith(beside))


@pytest.mark.daily("pp2")
@pytest.mark.parametrize(
    "layout", cases(LAYOUTS, daily=("one", "tp2", "pp2", "shard3", "ep2-shard4"))
)
def test_adapters_learn_what_they_learn_over_plain_values(
    pools: Pools, written: dict[Pair, Path], layout: str
) -> None:
    """Loss, gradients, norm, and weights after two steps; and each rank holds its share of the stored bytes."""
    size = ParallelConfig(**LAYOUTS[layout]).total_size
    paths = written
    if size > 1:
        chosen = {"shard3": UNEVEN, "pp2": IN_STAGES}.get(layout, ON_RANKS)
        paths = {pair: written[pair] for pair in chosen if "ep" not in layout or pair[0] != "llama"}
    arguments = paths, LAYOUTS[layout]
    every = [compared(*arguments)] if size == 1 else pools(size).run(compared, *arguments)
    for pair in paths:
        most = max(rank[pair][3] for rank in every)  # data ranks hold rows of one length
        for rank in every:
            worst, name, held, _ = rank[pair]
            assert worst < 1e-10, (pair, name)
            assert held <= MISALIGNED * most * stored_bytes(paths[pair]), pair


# In 16 bits


def in_sixteen_bits(
    paths: dict[Pair, Path], layout: Layout, kwargs: dict[str, Any]
) -> list[tuple[Pair, str]]:
    """What differs at all between adapters over packed and over plain weights."""
    different = []
    for pair, path in paths.items():
        plain, packed = (
            two_steps(adapted(path, pair[0], layout, packed=each, **kwargs))
            for each in (False, True)
        )
        for ours, theirs in zip(packed, plain, strict=True):
            different += [
                (pair, name) for name, value in theirs.items() if not torch.equal(ours[name], value)
            ]
    return different


@pytest.mark.daily("autocast")
@pytest.mark.parametrize(
    ("layout", "kwargs"),
    [
        ("one", {"dtype": torch.bfloat16}),
        ("one", {"dtype": torch.float32, "mixed_precision": "bf16"}),
        ("shard2", {"dtype": torch.float32, "mixed_precision": "bf16"}),
        ("ep2", {"dtype": torch.bfloat16}),
    ],
    ids=["bf16", "autocast", "fsdp-bf16", "ep2"],
)
def test_bit_by_bit_in_sixteen_bits(
    pools: Pools, written: dict[Pair, Path], layout: str, kwargs: dict[str, Any]
) -> None:
    """Of experts, where both go through the same products: over expert ranks."""
    families = {"llama"} if layout != "ep2" else {"qwen3_moe", "gpt_oss"}
    arguments = (
        {p: path for p, path in written.items() if p[0] in families},
        LAYOUTS[layout],
        kwargs,
    )
    for found in (
        [in_sixteen_bits(*arguments)]
        if layout == "one"
        else pools(2).run(in_sixteen_bits, *arguments)
    ):
        assert not found


# Life of an adapter


def lived(
    path: Path, family: str, layout: Layout, packed: bool, out: Path
) -> tuple[dict[str, Tensor], float]:
    """Merged weights of this rank, and a third loss; leaves a state, an adapter and a merged checkpoint in ``out``."""
    model = adapted(path, family, layout, packed)
    two_steps(model)
    hfscale.save_state(model, out / "state")
    hfscale.save_pretrained(model, out / "adapter")
    loss = float(hfscale.train_step(model, batch(model)))
    if packed:
        with pytest.raises(
            ConfigError,
            match=r"held as stored \((fp8|mxfp4)\) would round .* dtype=torch.bfloat16",
        ):
            hfscale.merge_and_unload(model)
    merged = hfscale.merge_and_unload(model, **({"dtype": torch.float64} if packed else {}))
    assert not [name for name, p in merged.named_parameters() if p.dtype != torch.float64]
    if packed:
        hfscale.save_pretrained(merged, out / "merged", quantization="as_stored")
    held = {
        planned.name: local_tensor(p.detach()).clone()
        for planned, p in runtime_of(merged).parameters()
    }
    return held, loss


def both_lives(paths: dict[Pair, Path], layout: Layout, out: Path) -> None:
    for (family, form), path in paths.items():
        place = out / family
        (plain, first), (packed, second) = (
            lived(path, family, layout, each, place / ("packed" if each else "plain"))
            for each in (False, True)
        )
        assert abs(first - second) < 1e-10, (family, form)
        assert plain.keys() == packed.keys()
        for name, value in plain.items():
            torch.testing.assert_close(packed[name], value, rtol=0, atol=1e-10, msg=name)


def resumed(paths: dict[Pair, Path], layout: Layout, out: Path) -> None:
    """States and adapters of one layout go on in another, over packed and over plain weights."""
    for (family, _), path in paths.items():
        losses = []
        for packed in (False, True):
            place = out / family / ("packed" if packed else "plain")
            model = adapted(path, family, layout, packed)
            hfscale.load_state(model, place / "state")
            losses.append(float(hfscale.train_step(model, batch(model))))
            model = adapted(path, family, layout, packed, peft_config=str(place / "adapter"))
            losses.append(float(hfscale.train_step(model, batch(model))))
        assert max(losses) - min(losses) < 1e-10, family


@pytest.mark.parametrize(
    ("family", "form"),
    cases([("qwen3_moe", "fp8"), ("gpt_oss", "mxfp4")], daily=[("gpt_oss", "mxfp4")]),
)
def test_merged_saved_and_resumed(
    pools: Pools, written: dict[Pair, Path], tmp_path: Path, family: str, form: str
) -> None:
    paths = {(family, form): written[family, form]}
    pools(2).run(both_lives, paths, LAYOUTS["ep2"], tmp_path)
    pools(2).run(resumed, paths, LAYOUTS["tp2"], tmp_path)
    merged = load_file(tmp_path / family / "packed/merged/model.safetensors")
    stored = load_file(written[family, form] / "stored/model.safetensors")
    assert {name: t.dtype for name, t in merged.items()} == {
        name: t.dtype for name, t in stored.items()
    }


# What it takes


def peak(path: Path, family: str, layout: Layout, packed: bool) -> int:
    entries = dequantized._ENTRIES
    dequantized._ENTRIES = 1 << 12
    try:
        with follow_memory() as memory:
            adapted(path, family, layout, packed, dtype=torch.bfloat16)
        return memory.peak
    finally:
        dequantized._ENTRIES = entries


@pytest.mark.daily("pair0")
@pytest.mark.parametrize("pair", [("llama", "fp8"), ("gpt_oss", "mxfp4")])
def test_loading_takes_less_than_a_plain_load(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, pair: Pair
) -> None:
    monkeypatch.setenv("HF_DEACTIVATE_ASYNC_LOAD", "1")  # threads would not be followed
    small = CONFIGS[pair[0]]
    config = type(small)(**{**small.to_dict(), "hidden_size": 256, "intermediate_size": 768})
    write(config, WRITTEN[pair[1]], tmp_path / "stored", tmp_path / "plain")
    plain, packed = (peak(tmp_path, pair[0], {}, each) for each in (False, True))
    stored = stored_bytes(tmp_path)
    values = sum(t.numel() for t in load_file(tmp_path / "plain/model.safetensors").values())
    assert packed <= plain - 0.8 * (2 * values - stored) + 300_000


def test_a_plan_counts_the_stored_bytes(written: dict[Pair, Path], packed: dict[Pair, Any]) -> None:
    # Whose config does not tell.
    told = {pair: path for pair, path in written.items() if pair[1] != "int4 experts"}
    for pair, path in told.items():
        config = lora(pair[0])
        plan = hfscale.plan(
            path / "stored",
            quantization_config="as_stored",
            peft_config=config,
            dtype=torch.bfloat16,
        )
        plain = hfscale.plan(path / "stored", peft_config=config, dtype=torch.bfloat16)
        assert plan.quantized is not None
        assert runtime_of(packed[pair]).plan.quantized == plan.quantized  # by the config alone
        estimates = [hfscale.memory_estimate(each, tokens=16).weights for each in (plan, plain)]
        entries = sum(prod(plan.by_name[name].shape) for name in plan.quantized.weights)
        assert estimates[1] - estimates[0] == pytest.approx(
            2 * entries - stored_bytes(path), rel=0.05
        )
        assert "in the bytes of their checkpoint" in str(plan)


def test_it_unpacks_where_the_bytes_are(packed: dict[Pair, Any]) -> None:
    """No table or index stays on the CPU; several equal shards are unpacked at once."""
    for model in packed.values():
        for module in model.modules():
            for name, encoding in encodings_of(module).items():
                assert isinstance(encoding, StoredEncoding)
                rows = module._parameters[name]
                ((_, blocks),) = encoding.shards
                matrices, height, width = encoding.shape
                twice = replace(encoding, shape=(matrices, 2 * height, width), dim=1, shards=tuple(
                    ((height * rank, height * (rank + 1)), blocks) for rank in range(2)
                ))  # fmt: skip
                assert rows is not None
                found = twice.decode(torch.cat((rows, rows)))
                once = encoding.decode(rows)
                assert torch.equal(found, torch.cat((once, once), 1))
                away = twice.decode(torch.empty(twice.row_shape, dtype=torch.uint8, device="meta"))
                assert (away.device.type, away.shape) == ("meta", found.shape)


# What is asked for, and what cannot be


def test_recipes_and_commands_ask_for_it(
    written: dict[Pair, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert (
        quantization_of(FinetuneRecipe(base="model", quantization={"as_stored": True}))
        == "as_stored"
    )
    command = ["plan", str(written["qwen3_moe", "fp8"] / "stored"), "--quantize", "as_stored"]
    assert main([*command, "--lora"]) == 0
    assert (
        "quantized: 12 weights in the bytes of their checkpoint (fp8, 1.01 bytes of a value)"
        in capsys.readouterr().out
    )
    assert main(command) != 0
    assert "keeps 12 weights in fp8, which do not train" in capsys.readouterr().err


def test_the_host_s_own_configs_ask_for_it(written: dict[Pair, Path]) -> None:
    for pair, asked in (
        (("llama", "fp8"), FineGrainedFP8Config()),
        (("gpt_oss", "mxfp4"), Mxfp4Config()),
    ):
        given: dict[str, Any] = {"peft_config": lora(pair[0]), "quantization_config": asked}
        assert (
            runtime_of(hfscale.from_pretrained(written[pair] / "stored", **given)).plan.quantized
            is not None
        )
    with pytest.raises(
        ConfigError,
        match=r"FineGrainedFP8Config\(\) is for a checkpoint stored in the format fp8, .* not quantized",
    ):
        hfscale.plan(written["llama", "fp8"] / "plain", quantization_config=FineGrainedFP8Config())
    with pytest.raises(
        ConfigError,
        match=r"'as_stored' is for a checkpoint stored in the format fp8, .* not quantized: leave quantization",
    ):
        hfscale.plan(written["llama", "fp8"] / "plain", quantization_config="as_stored")
    with pytest.raises(
        ConfigError,
        match=r"FineGrainedFP8Config\(\) is for .* fp8, but this checkpoint is in mxfp4",
    ):
        hfscale.plan(
            written["gpt_oss", "mxfp4"] / "stored", quantization_config=FineGrainedFP8Config()
        )
    with pytest.raises(
        ConfigError, match="quantization_config='stored' is not one that hfscale can shard"
    ):
        hfscale.plan(written["gpt_oss", "mxfp4"] / "stored", quantization_config="stored")


def test_it_needs_adapters(written: dict[Pair, Path]) -> None:
    path = written["llama", "fp8"] / "stored"
    for call in (hfscale.from_pretrained, hfscale.plan):
        with pytest.raises(
            ConfigError, match=r"keeps 14 weights in fp8, which do not train: add adapters"
        ):
            call(path, quantization_config="as_stored")
    config = LoraConfig(r=3, target_modules=["v_proj"], modules_to_save=["q_proj"])
    with pytest.raises(
        ConfigError,
        match=r"q_proj.weight is held as stored \(fp8\) and gets no gradients: adapt it instead",
    ):
        hfscale.from_pretrained(path, quantization_config="as_stored", peft_config=config)
    config = LoraConfig(r=3, target_modules=["v_proj"], use_dora=True)
    with pytest.raises(ConfigError, match="use_dora=True"):
        hfscale.plan(
            written["gpt_oss", "mxfp4"] / "stored",
            quantization_config="as_stored",
            peft_config=config,
        )
    with pytest.raises(
        ConfigError, match="mixed_precision='fp8' cannot be used with quantization_config"
    ):
        hfscale.plan(
            path, quantization_config="as_stored", peft_config=lora("llama"), mixed_precision="fp8"
        )


def test_what_files_say_counts(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A head that is stored quantized is read as plain values, and what is stored plain stays plain."""

    def chosen(name: str) -> bool:
        return name.endswith(("k_proj.weight", "lm_head.weight"))

    way = Written(WRITTEN["fp8"].description, fp8((16, 32)), chosen)
    write(CONFIGS["llama"], way, tmp_path / "stored", tmp_path / "plain")
    model = adapted(tmp_path, "llama", {}, packed=True)
    assert (
        "1 quantized weights of the checkpoint cannot stay quantized and are dequantized (lm_head.weight"
        in caplog.text
    )
    quantized = runtime_of(model).plan.quantized
    assert quantized is not None
    assert quantized.weights == tuple(
        f"model.layers.{layer}.self_attn.k_proj.weight" for layer in range(2)
    )
    plain, packed = (
        two_steps(adapted(tmp_path, "llama", {}, packed=each)) for each in (False, True)
    )
    assert all(torch.equal(packed[1][name], value) for name, value in plain[1].items())
    way = Written(WRITTEN["fp8"].description, fp8((16, 32)), lambda name: name == "lm_head.weight")
    write(CONFIGS["llama"], way, tmp_path / "head", tmp_path / "head_plain")
    with pytest.raises(
        CheckpointError, match="but the 1 quantized weights of this checkpoint are others"
    ):
        hfscale.from_pretrained(
            tmp_path / "head", quantization_config="as_stored", peft_config=lora("llama")
        )


def test_bytes_in_bitsandbytes_8_bits_under_adapters(tmp_path: Path) -> None:
    write_int8(tmp_path)
    stored = str(tmp_path / "stored")
    lora = LoraConfig(target_modules="all-linear", init_lora_weights=False)
    batch = {"input_ids": torch.arange(12).view(2, 6), "labels": torch.arange(12).view(2, 6)}
    options = {"dtype": torch.float32, "peft_config": lora}
    plain = hfscale.from_pretrained(stored, **options)
    kept = hfscale.from_pretrained(stored, quantization_config="as_stored", **options)
    assert hfscale.train_step(kept, batch) == hfscale.train_step(plain, batch)
    whole = hfscale.from_pretrained(stored)
    with pytest.raises(ConfigError, match="the checkpoint is in llm_int8"):
        hfscale.save_pretrained(whole, tmp_path / "out", quantization="as_stored")


def test_weights_as_stored_need_no_bitsandbytes() -> None:
    kept = KeptPlan(4, "mxfp4", False, ("a.weight",), bytes_per_value=0.53)
    four_bits = QuantizedPlan(4, "nf4", False, ("a.weight",))
    for quantized, expected in ((kept, False), (four_bits, True), (None, False)):
        assert holds_4_bits(SimpleNamespace(plan=SimpleNamespace(quantized=quantized))) is expected

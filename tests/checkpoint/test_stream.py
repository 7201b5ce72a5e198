"""Weights streamed out of a run are those that it saves, and the model stays as it is."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    BitsAndBytesConfig,
    FineGrainedFP8Config,
)
from transformers.quantizers.auto import AutoHfQuantizer
from transformers.quantizers.quantizer_finegrained_fp8 import FineGrainedFP8HfQuantizer

import hfscale
from hfscale import ConfigError, ParallelConfig
from hfscale.extras.pictures.picture_configs import with_pictures
from hfscale.testing import RankPool

from ..mixtures import qwen3_moe
from ..tiny_models import tiny
from .state_runs import LAYOUTS, build

Pools = Callable[[int], RankPool]


def streamed(model: Any, **options: Any) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for name, tensor in hfscale.stream_weights(model, **options):
        assert name not in found
        found[name] = tensor.clone()
    return found


def plain(kind: str, layout: str, directory: str, ranks: Any) -> dict[str, Tensor]:
    model = build(kind, layout, 0, torch.float32)
    hfscale.save_pretrained(model, directory)
    return streamed(model, ranks=ranks)


@pytest.mark.daily("tied-pp2-all", "ragged-pp2-tp2-ranks2", "mixture-ep2-ranks3")
@pytest.mark.parametrize(
    ("kind", "layout", "ranks"),
    [
        ("tied", "pp2", "all"),
        ("ragged", "tp2-shard2", (0,)),
        ("ragged", "pp2-tp2", (1, 3)),
        ("mixture", "ep2", (1,)),
        ("tied", "one", (0,)),
    ],
)
def test_as_saved(pools: Pools, tmp_path: Path, kind: str, layout: str, ranks: Any) -> None:
    world = ParallelConfig(**LAYOUTS[layout]).total_size
    arguments = (kind, layout, str(tmp_path), ranks)
    found = pools(world).run(plain, *arguments) if world > 1 else [plain(*arguments)]
    saved = load_file(tmp_path / "model.safetensors")
    for rank, tensors in enumerate(found):
        if ranks != "all" and rank not in ranks:
            assert not tensors
            continue
        assert tensors.keys() == saved.keys()
        assert all(torch.equal(tensors[name], saved[name]) for name in saved)


class Engine:
    """What vLLM's models have: weights by a checkpoint's names, a few at a time."""

    def __init__(self, files: Path) -> None:
        self._expected, self.loaded = load_file(files), set[str]()

    def load_weights(self, weights: list[tuple[str, Tensor]]) -> None:
        for name, tensor in weights:
            expected = self._expected[name]
            assert (tensor.shape, tensor.dtype, tensor.device.type) == (
                expected.shape,
                expected.dtype,
                "cpu",
            ), name
            torch.testing.assert_close(tensor, expected)
            self.loaded.add(name)

    def collective_rpc(self, method: str, kwargs: dict[str, Any]) -> None:
        assert method == "reload_weights"
        self.load_weights(kwargs["weights_iterator"])

    @property
    def whole(self) -> bool:
        return self.loaded == self._expected.keys()


def filled(path: str, adapter: str | None, layout: dict[str, int], files: str) -> bool:
    """The function of the guide fills an engine on rank 0."""
    page = (Path(__file__).parents[2] / "docs" / "grpo.md").read_text()
    found = {"hfscale": hfscale}
    exec(
        next(
            block
            for block in re.findall(r"(?ms)^```python\n(.*?)^```", page)
            if "def fill" in block
        ),
        found,
    )
    model = hfscale.from_pretrained(
        path, parallel=ParallelConfig(**layout), peft_config=adapter, dtype=torch.float32
    )
    engine = Engine(Path(files))
    found["fill"](engine if dist.get_rank() == 0 else None, model)  # type: ignore[operator]
    return engine.whole


@pytest.mark.parametrize(
    ("kind", "layout", "adapted"),
    [
        ("llama", {"tp_size": 2}, True),
        ("qwen3_moe", {"tp_size": 2}, False),
        ("qwen3_moe", {"ep_size": 2}, False),
    ],
)
def test_an_engine_is_filled_with_what_stock_code_saves(
    pools: Pools, tmp_path: Path, kind: str, layout: dict[str, int], adapted: bool
) -> None:
    torch.manual_seed(0)
    stock: Any = AutoModelForCausalLM.from_config(
        qwen3_moe(num_hidden_layers=2) if kind == "qwen3_moe" else tiny(kind), dtype=torch.float32
    )
    stock.save_pretrained(tmp_path / "base")
    if adapted:
        config = LoraConfig(
            r=4, target_modules="all-linear", init_lora_weights=False, task_type="CAUSAL_LM"
        )
        with_adapter: Any = get_peft_model(stock, config)
        with_adapter.save_pretrained(tmp_path / "adapter")
        with_adapter.merge_and_unload().save_pretrained(tmp_path / "merged")
    adapter = str(tmp_path / "adapter") if adapted else None
    files = tmp_path / ("merged" if adapted else "base") / "model.safetensors"
    found = pools(2).run(filled, str(tmp_path / "base"), adapter, layout, str(files))
    assert found == [True, False]


ADAPTERS: dict[str, dict[str, Any]] = {
    "lora": {"target_modules": "all-linear", "lora_alpha": 16},
    "dora": {"target_modules": ["q_proj", "o_proj", "down_proj"], "use_dora": True},
    "copy": {"target_modules": ["v_proj"], "modules_to_save": ["lm_head"]},
}


def adapted(
    path: str, kind: str, layout: str, directory: str
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    config = LoraConfig(r=4, init_lora_weights=False, **ADAPTERS[kind])
    model = hfscale.from_pretrained(
        path, parallel=ParallelConfig(**LAYOUTS[layout]), peft_config=config
    )
    hfscale.save_pretrained(model, directory)
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    merged = streamed(model, ranks="all", merge_adapters=True)
    again = streamed(model, ranks="all", merge_adapters=True)
    assert all(torch.equal(merged[name], again[name]) for name in merged)
    assert all(torch.equal(before[name], parameter) for name, parameter in model.named_parameters())
    return merged, streamed(model)


@pytest.mark.daily("dora-pp2")
@pytest.mark.parametrize(
    ("kind", "layout"),
    [("lora", "tp2"), ("dora", "pp2"), ("copy", "shard2"), ("lora", "tp2-shard2")],
)
def test_adapters(pools: Pools, tmp_path: Path, kind: str, layout: str) -> None:
    """Merged as stock PEFT merges them, bit by bit; or beside the weights, as PEFT saves them."""
    torch.manual_seed(0)
    stock = AutoModelForCausalLM.from_config(tiny("llama", tie_word_embeddings=False))
    stock.save_pretrained(tmp_path / "base")
    pool = pools(ParallelConfig(**LAYOUTS[layout]).total_size)
    found = pool.run(adapted, str(tmp_path / "base"), kind, layout, str(tmp_path / "adapter"))
    expected: Any = PeftModel.from_pretrained(stock, tmp_path / "adapter").merge_and_unload()
    weights = dict(expected.named_parameters())
    base = load_file(tmp_path / "base/model.safetensors")
    adapter = load_file(tmp_path / "adapter/adapter_model.safetensors")
    assert found[0][1].keys() == base.keys() | adapter.keys()
    for name, tensor in found[0][1].items():
        assert torch.equal(tensor, (base | adapter)[name]), name
    for merged, _ in found:
        assert merged.keys() == weights.keys()
        for name, weight in weights.items():
            assert torch.equal(merged[name], weight), name


EXPERTS = {
    "target_modules": ["q_proj"],
    "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
}
ALONE: dict[str, dict[str, Any]] = {
    **ADAPTERS,
    "biases": {"target_modules": ["q_proj"], "bias": "all"},
}


def alone(path: str, adapter: str, layout: str, ranks: Any, four_bits: bool) -> dict[str, Tensor]:
    options: dict[str, Any] = (
        {"quantization_config": BitsAndBytesConfig(load_in_4bit=True)} if four_bits else {}
    )
    parallel = ParallelConfig(**LAYOUTS[layout])
    model = hfscale.from_pretrained(
        path, parallel=parallel, peft_config=adapter, dtype=torch.float32, **options
    )
    return streamed(model, ranks=ranks, adapters_only=True)


@pytest.mark.daily("four bits-tp2-ranks7", "experts-ep2-tp2-all")
@pytest.mark.parametrize(
    ("kind", "layout", "ranks"),
    [
        ("lora", "one", "all"),
        ("lora", "tp2", (1,)),
        ("biases", "pp2", (0,)),
        ("dora", "shard2", "all"),
        ("copy", "pp2-tp2", (0, 3)),
        ("experts", "ep2", (1,)),
        ("experts", "ep2-tp2", "all"),
        ("four bits", "tp2", (0,)),
    ],
)
def test_the_adapter_alone_is_the_file_that_stock_peft_writes(
    pools: Pools, tmp_path: Path, kind: str, layout: str, ranks: Any
) -> None:
    torch.manual_seed(0)
    config = (
        qwen3_moe()
        if kind == "experts"
        else tiny("llama", attention_bias=True, tie_word_embeddings=False)
    )
    stock: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    stock.save_pretrained(tmp_path / "base")
    targets = {"experts": EXPERTS, "four bits": ADAPTERS["lora"]} | ALONE
    lora = LoraConfig(r=3, init_lora_weights=False, **targets[kind])
    get_peft_model(stock, lora).save_pretrained(tmp_path / "adapter")
    world = ParallelConfig(**LAYOUTS[layout]).total_size
    arguments = (
        str(tmp_path / "base"),
        str(tmp_path / "adapter"),
        layout,
        ranks,
        kind == "four bits",
    )
    found = pools(world).run(alone, *arguments) if world > 1 else [alone(*arguments)]
    expected = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    for rank, tensors in enumerate(found):
        assert tensors.keys() == (expected.keys() if ranks == "all" or rank in ranks else set())
        assert all(torch.equal(tensor, expected[name]) for name, tensor in tensors.items())


def test_refusals() -> None:
    model = hfscale.from_config(tiny("llama"))
    with pytest.raises(ConfigError, match="adapters_only=True needs a model with adapters"):
        hfscale.stream_weights(model, adapters_only=True)
    with pytest.raises(ConfigError, match="some of the ranks 0 to 0, got"):
        hfscale.stream_weights(model, ranks=(0, 1))


def test_what_the_host_cannot_hold_in_eight_bits_is_refused() -> None:
    # Its two mixtures have experts of different widths, and the host makes both of one.
    config = with_pictures("ernie4_5_vl_moe")
    model = hfscale.from_config(config, auto_class=AutoModelForImageTextToText)
    with pytest.raises(
        ConfigError, match=r"cannot hold Ernie4_5_VLMoe.* leave quantization_config out"
    ):
        hfscale.stream_weights(
            model, quantization_config=FineGrainedFP8Config(weight_block_size=(8, 8))
        )


def encoded(
    kind: str, layout: str, directory: str, block: int, dtype: torch.dtype = torch.float32
) -> dict[str, Tensor] | str:
    model = build(kind, layout, 0, dtype)
    hfscale.save_pretrained(model, directory)
    try:
        return streamed(
            model, quantization_config=FineGrainedFP8Config(weight_block_size=(block, block))
        )
    except ConfigError as error:
        return str(error)


@pytest.mark.daily("mixture-ep2-dtype1")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("kind", "layout", "dtype"),
    [
        ("rows", "tp2", torch.float32),
        ("mixture", "ep2", torch.float32),
        ("mixture", "pp2", torch.float32),
        ("rows", "shard2", torch.bfloat16),
    ],
)
def test_in_eight_bits_as_the_host_makes_them(
    pools: Pools,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    layout: str,
    dtype: torch.dtype,
) -> None:
    found = pools(2).run(encoded, kind, layout, str(tmp_path / "saved"), 8, dtype)[0]
    assert isinstance(found, dict)
    # It wants a GPU.
    monkeypatch.setattr(FineGrainedFP8HfQuantizer, "validate_environment", lambda *_, **__: None)
    config = FineGrainedFP8Config(weight_block_size=(8, 8))
    AutoModelForCausalLM.from_pretrained(
        tmp_path / "saved", quantization_config=config
    ).save_pretrained(tmp_path / "8")
    theirs = load_file(tmp_path / "8" / "model.safetensors")
    # The host keeps the scales of experts together, as in its module; engines read those of each, as of its weight.
    for name in [name for name in theirs if name.endswith("experts.gate_up_proj_scale_inv")]:
        gate, up = theirs.pop(name).chunk(2, dim=1)
        down = theirs.pop(name.replace("gate_up", "down"))
        for number in range(len(gate)):
            for which, scales in (("gate", gate), ("up", up), ("down", down)):
                key = name.replace(
                    "gate_up_proj_scale_inv", f"{number}.{which}_proj.weight_scale_inv"
                )
                theirs[key] = scales[number]
    assert found.keys() == theirs.keys()
    assert any(tensor.dtype == torch.float8_e4m3fn for tensor in found.values())
    assert all(tensor.dtype == theirs[name].dtype for name, tensor in found.items())
    first = "model.layers.0.self_attn.q_proj.weight"
    whole = load_file(tmp_path / "saved" / "model.safetensors")[first]
    encode = AutoHfQuantizer.from_config(config, pre_quantized=False).get_quantize_ops().convert
    once, twice = (
        encode({first: each})[first].float()
        for each in (whole, whole.to(torch.float8_e4m3fn).float())
    )
    assert torch.equal(found[first].float(), once)
    if torch.equal(theirs[first].float(), twice):
        pytest.skip(
            "this transformers rounds weights to 8 bits twice: before it scales them, and after"
        )
    for name, tensor in found.items():
        assert torch.equal(tensor.float(), theirs[name].float()), name


def test_merged_in_eight_bits() -> None:
    options = {"quantization_config": FineGrainedFP8Config(weight_block_size=(8, 8))}
    model = hfscale.get_peft_model(
        build("rows", "one", 0, torch.float32), LoraConfig(target_modules=["q_proj"], r=2)
    )
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.fill_(0.01)
    found = streamed(model, merge_adapters=True, **options)
    expected = streamed(hfscale.merge_and_unload(model), **options)
    assert found.keys() == expected.keys()
    assert found["model.layers.0.self_attn.q_proj.weight"].dtype == torch.float8_e4m3fn
    assert all(
        torch.equal(tensor.float(), expected[name].float()) for name, tensor in found.items()
    )


def test_parts_of_blocks_are_refused_on_every_rank(pools: Pools, tmp_path: Path) -> None:
    for message in pools(2).run(encoded, "ragged", "tp2", str(tmp_path), 8):
        assert (
            "gate_proj.weight of shape (10, 64) cannot be divided into blocks of weight_block_size"
            in message
        )
    model = build("tied", "one", 0, torch.float32)
    with pytest.raises(
        ConfigError,
        match=r"quantization_config must be a transformers.FineGrainedFP8Config, got dict",
    ):
        hfscale.stream_weights(model, quantization_config={"load_in_8bit": True})

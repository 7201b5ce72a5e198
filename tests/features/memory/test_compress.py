"""What layers keep in 8 bits: an error that is stated, signs and masks that are exact, and bytes that are a formula."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from peft import LoraConfig
from torch import Tensor

import hfscale
from hfscale import MemoryConfig, ParallelConfig, PlanError
from hfscale._compat.transformers.computing import enable_checkpointing
from hfscale.features.memory.kept_activations import KeptActivations
from hfscale.features.memory.stored import Compressed, OnHost, Stored, compress, decompress
from hfscale.testing import RankPool
from hfscale.testing.parity import ragged_batch
from hfscale.train.runtime import runtime_of
from hfscale.train.runtime.shards import local_tensor

from ...mixtures import qwen3_moe
from ...sweeps import pairs
from ...tiny_models import tiny
from .test_recompute import LAYOUTS

Pools = Callable[[int], RankPool]
WAYS: dict[str, dict[str, Any]] = {
    "alone": {},
    "on the host": {"offload_activations": "64"},
    "recomputed": {"recompute": "full"},
    "every second": {"recompute": 2},
    "scores": {"recompute": "selective"},
    "modules": {"recompute": ["mlp", "input_layernorm"]},
    "parameters": {"offload_parameters": True},
}
ERROR = 0.03
"""Of the gradient's norm; half the distance of two neighbouring codes is 0.7% of a block's largest entry at most."""


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(3, 5, 67), (256,), (1,)])
def test_an_entry_is_off_by_a_part_of_the_largest_of_its_block(
    dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    found = Compressed(x, Stored).read()
    assert (found.shape, found.dtype) == (x.shape, x.dtype)
    blocks = torch.nn.functional.pad(x.flatten(), (0, -x.numel() % 256)).view(-1, 256)
    apart = torch.nn.functional.pad((found - x).flatten(), (0, -x.numel() % 256)).view(-1, 256)
    rounding = 2 * torch.finfo(dtype).eps
    assert (apart.abs().amax(1) <= (0.0079 + rounding) * blocks.abs().amax(1)).all()


def test_signs_and_masks_are_exact() -> None:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(4096, generator=generator) * 10.0 ** torch.randint(
        -30, 3, (4096,), generator=generator
    )
    x = x.masked_fill(torch.rand(4096, generator=generator) < 0.3, 0.0)
    found = decompress(*compress(x), torch.float32)
    assert torch.equal(found.sign(), x.sign())
    assert torch.equal(found.relu() > 0, x.relu() > 0)
    mask = (torch.rand(5000, generator=generator) < 0.9) / 0.9
    assert torch.equal(decompress(*compress(mask), torch.float32), mask)
    kept = Compressed(x, OnHost)
    kept.fetch()
    assert torch.equal(kept.read(), found)
    assert kept.size == Compressed(x, Stored).size == 4096 + 4 * 16


def stepped(
    layout: dict[str, Any], way: dict[str, Any], compress: bool, config: Any, lora: bool
) -> list[Any]:
    """The loss of a step, and the gradients."""
    asked = {**way, "compress_activations": "64"} if compress else way
    torch.manual_seed(3)
    model = hfscale.from_config(
        config,
        parallel=ParallelConfig(**layout),
        memory=MemoryConfig(**asked),
        dtype=torch.float32,
        attn_implementation="eager",
        peft_config=LoraConfig(r=3, target_modules="all-linear") if lora else None,
    ).train()
    generator = torch.Generator().manual_seed(1)
    batches = [ragged_batch(generator, 67, 2, 24, False) for _ in range(4)]
    loss = hfscale.train_step(
        model, batches[hfscale.batch_rank(model) :: hfscale.batch_world(model)]
    )
    part = runtime_of(model).part(KeptActivations)
    assert (part is not None and part.stored > 0) == compress
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    return [loss, *(local_tensor(gradient).clone() for gradient in gradients)]


@pytest.mark.daily("sequence-recomputed", "1f1b-every second")
@pytest.mark.parametrize(
    ("layout", "way"),
    [
        case
        for case in pairs(
            LAYOUTS,
            WAYS,
            daily=[
                *(
                    (layout, "alone")
                    for layout in (
                        "one",
                        "regather",
                        "zbv",
                        "shard2",
                        "ep2",
                        "cp2",
                        "lora, sequence",
                    )
                ),
                *(("sequence", way) for way in ("on the host", "recomputed", "scores")),
                *(("1f1b", way) for way in ("every second", "modules")),
                ("replicate2", "parameters"),
            ],
        )
        if not (
            case.values[0].startswith("ep2")
            and case.values[1] in ("recomputed", "every second", "modules")
        )
        and case.values not in (("cp2", "scores"), ("regather", "modules"))
        and (
            case.values[1] != "parameters"
            or ParallelConfig(**LAYOUTS[case.values[0]]).data_world > 1
        )
    ],
)
def test_gradients_are_rounded_and_losses_are_not(pools: Pools, layout: str, way: str) -> None:
    parallel = ParallelConfig(**LAYOUTS[layout])
    mixture = layout.startswith("ep2")
    heads = {
        "num_hidden_layers": 4,
        "hidden_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    config = qwen3_moe(num_hidden_layers=3) if mixture else tiny("llama", **heads)
    case = LAYOUTS[layout], WAYS[way]
    run = (
        pools(parallel.total_size).run if parallel.total_size > 1 else lambda f, *given: [f(*given)]
    )
    plain, rounded = (
        run(stepped, *case, compress, config, "lora" in layout) for compress in (False, True)
    )
    apart = whole = 0.0
    for wanted, found in zip(plain, rounded, strict=True):
        assert torch.equal(wanted[0], found[0])
        assert len(wanted) == len(found)
        for a, b in zip(wanted[1:], found[1:], strict=True):
            apart = apart + float((a - b).pow(2).sum())
            whole = whole + float(a.pow(2).sum())
    assert 0 < (apart / whole) ** 0.5 < ERROR


@pytest.mark.parametrize("precision", ["no", "bf16", "fp8"])
def test_masks_of_attention_stay_as_they_are(precision: str) -> None:
    """Padding gives attention's own kernel a mask with infinities, which has no scale; and fp8 goes with it."""
    found = []
    for asked in (None, MemoryConfig(compress_activations="64")):
        torch.manual_seed(3)
        config = tiny("llama", hidden_size=64, intermediate_size=96)
        model = hfscale.from_config(
            config, mixed_precision=precision, memory=asked, attn_implementation="sdpa"
        ).train()
        loss = hfscale.train_step(
            model, ragged_batch(torch.Generator().manual_seed(1), 67, 2, 24, False)
        )
        found.append([loss, *(parameter.grad for parameter in model.parameters())])
    assert torch.equal(found[0][0], found[1][0])
    apart, whole = (
        sum(float(each.pow(2).sum()) for each in parts)
        for parts in (
            [a - b for a, b in zip(found[0][1:], found[1][1:], strict=True)],
            found[0][1:],
        )
    )
    assert 0 < (apart / whole) ** 0.5 < (0.1 if precision == "fp8" else ERROR)


def kept(layout: dict[str, Any], lora: bool) -> tuple[float, float]:
    """What is saved by 8 bits, as it is counted and as it is estimated."""
    config = tiny(
        "llama",
        hidden_size=128,
        intermediate_size=256,
        num_attention_heads=2,
        num_key_value_heads=2,
    )
    estimated = []
    for asked in (None, MemoryConfig(compress_activations="64")):
        peft = LoraConfig(r=4, target_modules="all-linear") if lora else None
        model = hfscale.from_config(
            config,
            parallel=ParallelConfig(**layout),
            memory=asked,
            dtype=torch.float32,
            peft_config=peft,
        ).train()
        estimated.append(hfscale.memory_estimate(model, tokens=4 * 64).activations)
    ids = torch.randint(3, 60, (4, 64), generator=torch.Generator().manual_seed(0))
    hfscale.train_step(model, {"input_ids": ids, "labels": ids})
    counted = hfscale.metrics(model)
    return counted["activation_bytes"] - counted["compressed_activation_bytes"], estimated[
        0
    ] - estimated[1]


@pytest.mark.daily("cp2-lora", "sequence-full", "one-lora")
@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
@pytest.mark.parametrize("layout", ["one", "tp2", "sequence", "cp2"])
def test_bytes_are_the_estimates(pools: Pools, layout: str, lora: bool) -> None:
    parallel = ParallelConfig(**LAYOUTS[layout])
    run = pools(2).run if parallel.total_size > 1 else lambda f, *given: [f(*given)]
    for counted, estimated in run(kept, LAYOUTS[layout], lora):
        assert counted == pytest.approx(estimated, rel=0.03)


def test_a_weight_is_not_rounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Autocast keeps weights in another type, of which only the shape tells."""
    model = hfscale.from_config(
        tiny("llama"),
        memory=MemoryConfig(compress_activations="64"),
        mixed_precision="bf16",
        dtype=torch.float32,
    ).train()
    seen = list[Tensor]()

    def noted(tensor: Tensor) -> tuple[Tensor, Tensor]:
        seen.append(tensor.flatten())
        return compress(tensor)

    monkeypatch.setattr("hfscale.features.memory.stored.compress", noted)
    # As many tokens as the hidden size: their inputs look like weights.
    ids = torch.arange(3, 35)[None]
    hfscale.train_step(model, {"input_ids": ids, "labels": ids})
    weights = [
        weight.detach().to(torch.bfloat16).flatten() for weight in model.model.layers.parameters()
    ]
    assert any(len(tensor) == 32 * 32 for tensor in seen)
    for tensor in seen:
        assert not any(
            len(tensor) == len(weight) and torch.equal(tensor, weight) for weight in weights
        )


def test_what_does_not_fit_is_refused() -> None:
    memory = MemoryConfig(compress_activations=True, recompute="full")
    with pytest.raises(
        PlanError,
        match="may send tokens to other experts than in the forward pass: use recompute='none', ",
    ):
        hfscale.plan(qwen3_moe(), memory=memory)
    switched = hfscale.from_config(
        qwen3_moe(), memory=MemoryConfig(compress_activations=True)
    ).train()
    enable_checkpointing(switched)
    ids = torch.arange(8)[None]
    with pytest.raises(
        hfscale.ConfigError, match="may send tokens to other experts than before: call"
    ):
        hfscale.train_step(switched, {"input_ids": ids, "labels": ids})
    with pytest.raises(
        hfscale.ConfigError, match="compress_activations=3 is invalid: use True, False, or a size"
    ):
        MemoryConfig(compress_activations=3)  # type: ignore[arg-type]
    assert "in 8 bits: what layers keep for the backward pass, in tensors of 65,536" in str(
        hfscale.plan(tiny("llama"), memory=memory)
    )

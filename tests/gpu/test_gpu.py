"""One process on one GPU: `make test-gpu` runs this with whatever torch and transformers the machine has."""

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F
from transformers import AutoModelForCausalLM

import hfscale
from hfscale import ParallelConfig
from hfscale.distributed.ops.head_cross_entropy import LinearRows, head_cross_entropy
from hfscale.distributed.ops.vocab_cross_entropy import VocabularySlice
from hfscale.features.fp8.scaled_matmul import Float8Groups, Float8Products

from ..mixtures import qwen3_moe
from ..tiny_models import tiny

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]
IDS = torch.randint(3, 67, (4, 12), generator=torch.Generator().manual_seed(1))
BATCH = {"input_ids": IDS, "labels": IDS}


def stock(path: Path, family: str, dtype: torch.dtype) -> Any:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(tiny(family), dtype=dtype)
    model.save_pretrained(path)
    return model.cuda().train()


def train(model: Any, ours: bool, steps: int = 3) -> tuple[list[float], list[float]]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    norms = []
    for _ in range(steps):
        if ours:
            loss = hfscale.train_step(model, BATCH)
            norm = hfscale.clip_grad_norm_(model, 1.0)
        else:
            loss = model(input_ids=IDS.cuda(), labels=IDS.cuda()).loss
            loss.backward()
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        losses.append(loss.item())
        norms.append(norm.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses, norms


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ["llama", "gpt2", "qwen3"])
def test_training_equals_stock(tmp_path: Path, family: str, dtype: torch.dtype) -> None:
    expected = train(stock(tmp_path / "in", family, dtype), ours=False)
    model = hfscale.from_pretrained(
        str(tmp_path / "in"), parallel=ParallelConfig(), dtype=dtype
    ).train()
    assert next(model.parameters()).is_cuda
    tolerance = 1e-4 if dtype == torch.float32 else 2e-2
    assert train(model, ours=True)[0] == pytest.approx(expected[0], rel=tolerance)
    hfscale.save_pretrained(model, tmp_path / "out")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=dtype)
    for name, value in again.state_dict().items():
        assert torch.equal(value, model.state_dict()[name].cpu()), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_mixture_equals_stock(tmp_path: Path, dtype: torch.dtype) -> None:
    """Through hfscale's own grouped products, and torch's where it has them."""
    torch.manual_seed(0)
    original = AutoModelForCausalLM.from_config(qwen3_moe(), dtype=dtype)
    original.save_pretrained(tmp_path)
    expected = train(original.cuda().train(), ours=False)
    model = hfscale.from_pretrained(
        str(tmp_path), dtype=dtype, routing=hfscale.RoutingConfig()
    ).train()
    tolerance = 1e-4 if dtype == torch.float32 else 2e-2
    assert train(model, ours=True)[0] == pytest.approx(expected[0], rel=tolerance)
    routes = IDS.numel() * model.config.num_experts_per_tok
    assert [sum(layer.tokens) for layer in hfscale.expert_load(model).layers] == [routes] * 2


def test_float64_parity(tmp_path: Path) -> None:
    expected = train(stock(tmp_path, "llama", torch.float64), ours=False)
    found = train(hfscale.from_pretrained(str(tmp_path), dtype=torch.float64).train(), ours=True)
    assert found[0] == pytest.approx(expected[0], rel=1e-6)
    assert found[1] == pytest.approx(expected[1], rel=1e-6)


def test_mixed_precision() -> None:
    model = hfscale.from_config(tiny("llama"), mixed_precision="bf16", dtype=torch.float32)
    seen = []
    model.model.layers[0].mlp.up_proj.register_forward_hook(
        lambda m, a, output: seen.append(output.dtype)
    )
    losses, _ = train(model, ours=True, steps=20)
    assert set(seen) == {torch.bfloat16}
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert losses[-1] < losses[0]


def test_generation_equals_stock(tmp_path: Path) -> None:
    model = stock(tmp_path, "llama", torch.float32).eval()
    expected = model.generate(IDS[:1].cuda(), do_sample=False, max_new_tokens=8, pad_token_id=0)
    ours = hfscale.from_pretrained(str(tmp_path), dtype=torch.float32)
    assert torch.equal(
        ours.generate(IDS[:1].cuda(), do_sample=False, max_new_tokens=8, pad_token_id=0), expected
    )


def peak(loss: Any, rows: int, vocabulary: int, dtype: torch.dtype) -> tuple[float, int]:
    """Value, and bytes above its inputs, of head and loss, forward and backward."""
    gc.collect()
    torch.cuda.empty_cache()
    generator = torch.Generator("cuda").manual_seed(0)
    torch.manual_seed(0)
    head = torch.nn.Linear(1024, vocabulary, bias=False, device="cuda", dtype=dtype)
    hidden = torch.randn(
        rows, 1024, device="cuda", dtype=dtype, generator=generator
    ).requires_grad_()
    targets = torch.randint(0, vocabulary, (rows,), device="cuda", generator=generator)
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    value = loss(hidden, head, targets)
    value.backward()
    return value.item(), torch.cuda.max_memory_allocated() - before


def test_peak_memory_of_the_loss() -> None:
    """Stock keeps logits, the same in float32, their log-softmax and two gradients; ours works on a chunk of rows."""
    rows = 8192
    vocabulary = 32000
    logits_bytes = rows * vocabulary * 2

    def theirs(hidden: torch.Tensor, head: torch.nn.Linear, targets: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(head(hidden).float(), targets)

    def ours(hidden: torch.Tensor, head: torch.nn.Linear, targets: torch.Tensor) -> torch.Tensor:
        vocab = VocabularySlice(0, vocabulary, vocabulary)
        return head_cross_entropy(
            hidden, targets, LinearRows(head.weight, None, None, True, True), vocabulary=vocab
        )

    expected, stock_bytes = peak(theirs, rows, vocabulary, torch.bfloat16)
    found, our_bytes = peak(ours, rows, vocabulary, torch.bfloat16)
    print(
        f"head and loss, bf16 logits of {logits_bytes / 2**20:.0f} MiB: stock {stock_bytes / 2**20:.0f} MiB, ",
        end="",
    )
    print(f"hfscale {our_bytes / 2**20:.0f} MiB")
    assert found == pytest.approx(expected, rel=1e-3)
    # A quarter of the logits twice (in bf16, in float32 as they are summed) and the weight's gradient in float32.
    assert our_bytes < 2 * logits_bytes
    assert stock_bytes > 2 * our_bytes


def adapted(model: Any) -> Any:
    """Stock PEFT around a stock model, with factors that change something."""
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(
        model, peft.LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
    )
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter) * 0.05)
    return model


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_adapters_equal_stock(tmp_path: Path, dtype: torch.dtype) -> None:
    model = adapted(stock(tmp_path / "in", "llama", dtype))
    model.save_pretrained(tmp_path / "adapter")
    expected = train(model, ours=False)
    ours = hfscale.from_pretrained(
        str(tmp_path / "in"), dtype=dtype, peft_config=str(tmp_path / "adapter")
    ).train()
    tolerance = 1e-4 if dtype == torch.float32 else 2e-2
    assert train(ours, ours=True)[0] == pytest.approx(expected[0], rel=tolerance)


def test_adapters_over_4_bits_equal_stock(tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes")
    from transformers import BitsAndBytesConfig

    config = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16
    )
    torch.manual_seed(0)
    wide = tiny("llama", hidden_size=128, intermediate_size=256)
    AutoModelForCausalLM.from_config(wide, dtype=torch.bfloat16).save_pretrained(tmp_path / "in")
    kwargs = {"dtype": torch.bfloat16, "quantization_config": config}
    model = adapted(
        AutoModelForCausalLM.from_pretrained(tmp_path / "in", device_map={"": 0}, **kwargs)
    ).train()
    model.save_pretrained(tmp_path / "adapter")
    expected = train(model, ours=False)
    ours = hfscale.from_pretrained(
        str(tmp_path / "in"), peft_config=str(tmp_path / "adapter"), **kwargs
    ).train()
    assert all(parameter.is_cuda for parameter in ours.parameters())
    assert train(ours, ours=True)[0] == pytest.approx(expected[0], rel=2e-2)


@pytest.mark.parametrize(
    "name",
    ["adamw_torch_fused", "adafactor", "adamw_8bit", "paged_adamw_8bit", "lion_8bit", "muon"],
)
def test_optimizers_step(tmp_path: Path, name: str) -> None:
    if "bit" in name:
        pytest.importorskip("bitsandbytes")
    stock(tmp_path, "llama", torch.float32)
    model = hfscale.from_pretrained(str(tmp_path), dtype=torch.float32).train()
    optimizer = hfscale.create_optimizer(model, name, lr=1e-3)
    losses = []
    for _ in range(4):
        losses.append(hfscale.train_step(model, BATCH).item())
        optimizer.step()
        optimizer.zero_grad()
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_products_in_8_bits(tmp_path: Path, recipe: str) -> None:
    """Torch's kernels give what is emulated on CPUs; losses stay near those of bfloat16."""
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("no products in 8 bits")
    torch.manual_seed(0)
    x = torch.randn(24, 64).bfloat16()
    weight = torch.randn(40, 64).bfloat16()
    grad = torch.randn(24, 40).bfloat16()
    for here, there in zip(
        products(recipe, x, weight, grad),
        products(recipe, x.cuda(), weight.cuda(), grad.cuda()),
        strict=True,
    ):
        torch.testing.assert_close(there.cpu(), here, rtol=0.02, atol=0.05)
    AutoModelForCausalLM.from_config(tiny("llama", intermediate_size=48)).save_pretrained(tmp_path)
    losses = [
        train(
            hfscale.from_pretrained(str(tmp_path), dtype=torch.float32, **asked).train(), ours=True
        )[0]
        for asked in (
            {"mixed_precision": "bf16"},
            {"mixed_precision": "fp8", "float8": hfscale.Float8Config(recipe)},
        )
    ]
    assert losses[1] == pytest.approx(losses[0], rel=2e-2)
    assert losses[1] != losses[0]


def products(
    recipe: str, x: torch.Tensor, weight: torch.Tensor, grad: torch.Tensor
) -> list[torch.Tensor]:
    """Output, gradient of the input, gradient of the weight."""
    made = Float8Products(Float8Groups(), recipe == "rowwise")
    return [
        made.output(x, weight, None),
        made.to_input(grad, weight),
        made.to_weight(grad, x, False),
    ]

"""Levers of memory and precision on a GPU compute what the CPU computes, and loops of other libraries what they did."""

from pathlib import Path
from typing import Any

import accelerate
import pytest
import torch
import transformers
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, TrainingArguments

import hfscale
from hfscale import MemoryConfig, ParallelConfig
from hfscale.extras.pictures.picture_configs import with_pictures
from hfscale.extras.pictures.picture_parity import PictureCase
from hfscale.optim.stock import write_rounded
from hfscale.parallel.context.kernels import ScoreBlock, ScoreKernel, kernel_for, padded_width
from hfscale.testing import assert_layout_equal

from ..mixtures import qwen3_moe
from ..tiny_models import tiny
from .test_gpu import BATCH, IDS

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
Found = dict[str, Tensor]
MEMORY: dict[str, MemoryConfig] = {
    "offload_activations": MemoryConfig(offload_activations=True),
    "compress_activations": MemoryConfig(compress_activations=True),
    "offload_optimizer": MemoryConfig(offload_optimizer=True),
    "recompute": MemoryConfig(recompute=["self_attn"]),
    "elementwise": MemoryConfig(recompute="elementwise"),
    "tiles": MemoryConfig(recompute="full", tile_tokens=4),
}


def trained(optimizer: str = "adamw_torch", **given: Any) -> Found:
    """Losses, norms and the weights after three steps, on the device that hfscale takes."""
    torch.manual_seed(0)
    model = hfscale.from_config(tiny("llama"), **{"dtype": torch.float32, **given}).train()
    made = hfscale.create_optimizer(model, optimizer, lr=1e-3)
    found: Found = {}
    for step in range(3):
        found[f"loss {step}"] = hfscale.train_step(model, [BATCH, BATCH]).cpu()
        found[f"norm {step}"] = hfscale.clip_grad_norm_(model, 1.0).cpu()
        made.step()
        made.zero_grad()
    return found | {name: weight.cpu() for name, weight in model.state_dict().items()}


def on_cpu(monkeypatch: pytest.MonkeyPatch, **given: Any) -> Found:
    with monkeypatch.context() as within:
        within.setenv("ACCELERATE_USE_CPU", "1")
        return trained(**given)


def assert_close(found: Found, expected: Found, tolerance: float) -> None:
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=tolerance, atol=tolerance, msg=name)


@pytest.mark.parametrize("lever", MEMORY)
def test_memory_is_saved_and_nothing_else(lever: str) -> None:
    assert_close(
        trained(memory=MEMORY[lever]), trained(), 2e-3 if lever == "compress_activations" else 1e-5
    )


@pytest.mark.parametrize("optimizer", ["adamw_torch", "adafactor", "muon", "sgd"])
def test_optimizers_equal_those_on_the_cpu(monkeypatch: pytest.MonkeyPatch, optimizer: str) -> None:
    assert_close(trained(optimizer), on_cpu(monkeypatch, optimizer=optimizer), 1e-4)


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_mixed_precision_is_near_to_single(precision: str) -> None:
    """Scaled, and unscaled by a factor that lies where the gradients do."""
    found = trained("sgd", mixed_precision=precision)
    expected = trained("sgd")
    for name in (name for name in expected if "loss" in name or "norm" in name):
        torch.testing.assert_close(
            found[name], expected[name], rtol=0.02, atol=0.02, check_dtype=False
        )


def test_dropout_in_what_is_recomputed() -> None:
    """The mask of a named module that is called by keyword is drawn again as it was."""
    gradients = []
    for memory in (MemoryConfig(), MemoryConfig(recompute=["self_attn"])):
        torch.manual_seed(0)
        model = hfscale.from_config(
            tiny("llama", attention_dropout=0.5), memory=memory, dtype=torch.float32
        ).train()
        torch.manual_seed(1)
        hfscale.train_step(model, BATCH)
        gradients.append({name: p.grad.cpu() for name, p in model.named_parameters()})
    assert_close(gradients[1], gradients[0], 1e-5)


@pytest.mark.parametrize("shape", [(7,), (33, 65), (4, 3, 5)])
def test_stochastic_rounding_is_that_of_the_cpu(shape: tuple[int, ...]) -> None:
    wide = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    sizes = list(shape)
    strides = torch.empty(shape).stride()
    rounded = []
    for device in ("cpu", DEVICE):
        places = [
            torch.arange(size, device=device) * stride
            for size, stride in zip(sizes, strides, strict=True)
        ]
        share = torch.empty(shape, dtype=torch.bfloat16, device=device)
        write_rounded(share, wide.to(device), places, key=1234567)
        rounded.append(share.cpu())
    assert torch.equal(*rounded)


def test_a_state_saved_behind_the_steps_is_of_its_step(tmp_path: Path) -> None:
    model = hfscale.from_config(tiny("llama"), dtype=torch.float32).train()
    optimizer = hfscale.create_optimizer(model, "adamw_torch", lr=1e-2)
    hfscale.train_step(model, BATCH)
    optimizer.step()
    then = {name: weight.clone() for name, weight in model.state_dict().items()}
    hfscale.save_state(model, tmp_path / "state", optimizer=optimizer, asynchronous=True)
    for _ in range(3):
        hfscale.train_step(model, BATCH)
        optimizer.step()
    hfscale.wait_for_saves()
    hfscale.load_state(model, tmp_path / "state", optimizer=optimizer)
    for name, weight in model.state_dict().items():
        assert torch.equal(weight, then[name]), name


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("width", [64, 60, 256, 512])
def test_the_kernel_of_a_pair_takes_its_width_and_mask(width: int, masked: bool) -> None:
    generator = torch.Generator().manual_seed(3)

    def draw(heads: int) -> Tensor:
        return torch.randn(2, heads, 64, width, generator=generator).to(DEVICE, torch.bfloat16)

    q = draw(8)
    k = draw(2)
    v = draw(2)
    grad = draw(8)
    added = padded_width(width, q.device) - width
    hidden = torch.ones(2, 1, 64, 64, device=DEVICE).tril(0).triu(-8) == 0
    bias = (
        torch.zeros((), device=DEVICE, dtype=q.dtype).masked_fill(hidden, float("-inf"))
        if masked
        else None
    )
    block = ScoreBlock(causal=not masked, bias=bias)
    padded = [nn.functional.pad(x, (0, added)) for x in (q, k, v)]
    chosen = kernel_for(padded[0], 0.125, None, 0.0)
    plain = ScoreKernel(0.125)
    found = chosen.forward(*padded, block)
    wanted = plain.forward(q, k, v, block)
    torch.testing.assert_close(found[0][..., :width], wanted[0], rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(found[1].float(), wanted[1].float(), rtol=1e-3, atol=2e-2)
    gradients = chosen.backward(nn.functional.pad(grad, (0, added)), *padded, *found, block)
    for one, other in zip(gradients, plain.backward(grad, q, k, v, *wanted, block), strict=True):
        torch.testing.assert_close(one[..., :width], other, rtol=5e-2, atol=6e-2)


@pytest.mark.parametrize("option", ["plain", "recompute", "fp8"])
def test_compiled_layers(option: str) -> None:
    """By inductor, for this device."""
    given: dict[str, Any] = {"memory": MEMORY["recompute"]} if option == "recompute" else {}
    config = tiny("llama")
    if option == "fp8":
        given = {"mixed_precision": "fp8"}
        config = tiny("llama", hidden_size=64, intermediate_size=128)
    found = []
    for compiled in (False, True):
        torch.manual_seed(0)
        model = hfscale.from_config(config, dtype=torch.float32, compile=compiled, **given).train()
        losses = [hfscale.train_step(model, BATCH).item()]
        norm = hfscale.clip_grad_norm_(model, 1.0).item()
        found.append([*losses, norm])
    assert found[1] == pytest.approx(found[0], rel=2e-2 if option == "fp8" else 1e-3)


@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
def test_distillation_is_that_of_the_cpu(monkeypatch: pytest.MonkeyPatch, beta: float) -> None:
    def distilled() -> Found:
        torch.manual_seed(0)
        student, taught = (
            hfscale.from_config(tiny("llama"), dtype=torch.float32) for _ in range(2)
        )
        loss = hfscale.train_step(
            student.train(), BATCH, teacher=hfscale.Teacher(taught, student, beta=beta)
        )
        return {"loss": loss.cpu()} | {
            name: each.grad.cpu() for name, each in student.named_parameters()
        }  # type: ignore[union-attr]

    with monkeypatch.context() as within:
        within.setenv("ACCELERATE_USE_CPU", "1")
        expected = distilled()
    assert_close(distilled(), expected, 1e-4)


def test_own_routes_are_replayed_bit_by_bit() -> None:
    torch.manual_seed(0)
    model = hfscale.from_config(qwen3_moe(), dtype=torch.bfloat16).train()
    with torch.no_grad(), hfscale.record_routes(model) as routes:
        hfscale.token_scores(model, BATCH)
    losses = [hfscale.train_step(model, BATCH, **given) for given in ({}, {"routes": routes})]
    assert torch.equal(*losses)


@pytest.mark.parametrize("family", ["llava", "qwen2_vl"])
def test_pictures_beside_text(family: str) -> None:
    # Beside the stock model on the CPU: rotary tables are in float32, whose sines differ between devices.
    assert_layout_equal(PictureCase(with_pictures(family)), ParallelConfig(), None, tolerance=1e-6)


@pytest.mark.parametrize("own", ["Trainer", "Accelerator"])
def test_loops_of_other_libraries_log_what_they_did(own: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(tiny("llama"), dtype=torch.float32).save_pretrained(
        tmp_path / "start"
    )
    found = []
    for library in (None, hfscale):
        reader: Any = AutoModelForCausalLM if library is None else hfscale
        model = reader.from_pretrained(str(tmp_path / "start"), dtype=torch.float32)
        if own == "Trainer":
            kind: Any = transformers.Trainer if library is None else hfscale.Trainer
            args = TrainingArguments(
                str(tmp_path / "out"), max_steps=3, logging_steps=1, report_to=[], disable_tqdm=True,
                save_strategy="no", per_device_train_batch_size=2,
            )  # fmt: skip
            trainer = kind(
                model, args, train_dataset=[{"input_ids": row, "labels": row} for row in IDS]
            )
            trainer.train()
            found.append([row["loss"] for row in trainer.state.log_history if "loss" in row])
            continue
        accelerator = (accelerate if library is None else hfscale).Accelerator()
        made = torch.optim.AdamW(model.parameters(), lr=1e-3)
        model, made = accelerator.prepare(model.train(), made)
        losses = []
        for _ in range(3):
            loss = model(
                **{name: value.to(accelerator.device) for name, value in BATCH.items()}
            ).loss
            accelerator.backward(loss)
            made.step()
            made.zero_grad()
            losses.append(loss.item())
        found.append(losses)
    assert found[1] == pytest.approx(found[0], rel=1e-3)


@pytest.mark.parametrize("option", ["mixture", "lora", "qlora", "fp8"])
def test_waits_do_not_grow_with_microbatches(
    option: str, recwarn: pytest.WarningsRecorder, tmp_path: Path
) -> None:
    """A mixture looks once a pass; the rest nowhere between the first microbatch and the last."""
    peft = pytest.importorskip("peft")
    given: dict[str, Any] = {"dtype": torch.bfloat16}
    if "lora" in option:
        given["peft_config"] = peft.LoraConfig(target_modules=["q_proj"])
    if option == "qlora":
        pytest.importorskip("bitsandbytes")
        given["quantization_config"] = transformers.BitsAndBytesConfig(load_in_4bit=True)
    if option == "fp8" and torch.cuda.get_device_capability() >= (8, 9):
        given["mixed_precision"] = "fp8"
    config = (
        qwen3_moe() if option == "mixture" else tiny("llama", hidden_size=64, intermediate_size=128)
    )
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(tmp_path)
    model = hfscale.from_pretrained(str(tmp_path), **given).train()
    waits = []
    hfscale.train_step(model, BATCH)
    for passes in (2, 6):
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("warn")
        recwarn.clear()
        try:
            hfscale.train_step(model, [BATCH] * passes)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        waits.append(sum("synchronizing" in str(each.message) for each in recwarn))
    layers = config.num_hidden_layers if option == "mixture" else 0
    assert waits[1] - waits[0] <= 4 * layers

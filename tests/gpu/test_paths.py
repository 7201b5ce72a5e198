"""Paths that only a GPU takes: its grouped products, LLM.int8, flash attention, states on it, and waits of the host."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.attention import varlen
from transformers import AttentionInterface, AutoModelForCausalLM
from transformers.masking_utils import AttentionMaskInterface

import hfscale
from hfscale.parallel.context.kernels import FlashOnCuda, ScoreBlock, ScoreKernel

from ..mixtures import qwen3_moe
from ..tiny_models import tiny
from .test_gpu import BATCH, adapted, train

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]


def saved(path: Path, config: Any, dtype: torch.dtype) -> str:
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=dtype).save_pretrained(path)
    return str(path)


@pytest.mark.parametrize("rank", [1, 4, 8])
def test_factors_of_experts_of_any_rank(tmp_path: Path, rank: int) -> None:
    """Rows of a factor's product are 2 to 16 bytes; the kernel takes multiples of 16."""
    peft = pytest.importorskip("peft")
    path = saved(tmp_path, qwen3_moe(num_experts=16), torch.bfloat16)  # some of them get no token
    targets = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    config = peft.LoraConfig(r=rank, target_modules=["q_proj"], target_parameters=targets)
    model = hfscale.from_pretrained(path, dtype=torch.bfloat16, peft_config=config).train()
    losses, _ = train(model, ours=True, steps=10)
    assert losses[-1] < losses[0]


def test_adapters_over_8_bits_equal_stock(tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes")
    from transformers import BitsAndBytesConfig

    path = saved(
        tmp_path / "in", tiny("llama", hidden_size=128, intermediate_size=256), torch.float16
    )
    kwargs = {"dtype": torch.bfloat16, "quantization_config": BitsAndBytesConfig(load_in_8bit=True)}
    model = adapted(
        AutoModelForCausalLM.from_pretrained(path, device_map={"": 0}, **kwargs)
    ).train()
    model.save_pretrained(tmp_path / "adapter")
    expected = train(model, ours=False)
    ours = hfscale.from_pretrained(path, peft_config=str(tmp_path / "adapter"), **kwargs).train()
    assert train(ours, ours=True)[0] == pytest.approx(expected[0], rel=2e-2)


def test_a_run_on_the_cpu_leaves_the_gpu_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("bitsandbytes")
    from transformers import BitsAndBytesConfig

    monkeypatch.setenv("ACCELERATE_USE_CPU", "1")
    path = saved(tmp_path, tiny("llama"), torch.bfloat16)
    before = torch.cuda.memory_allocated()
    model = hfscale.from_pretrained(path, quantization_config=BitsAndBytesConfig(load_in_4bit=True))
    assert not any(parameter.is_cuda for parameter in model.parameters())
    assert torch.cuda.memory_allocated() == before


@pytest.mark.parametrize("name", ["adamw_torch", "adamw_torch_fused", "paged_adamw_8bit"])
def test_resuming_is_going_on(tmp_path: Path, name: str) -> None:
    if "bit" in name:
        pytest.importorskip("bitsandbytes")
    path = saved(tmp_path / "in", tiny("llama"), torch.float32)
    ends = []
    for interrupted in (False, True):
        model = hfscale.from_pretrained(path, dtype=torch.float32).train()
        optimizer = hfscale.create_optimizer(model, name, lr=1e-3)
        for step in range(4):
            if interrupted and step == 2:
                hfscale.save_state(model, tmp_path / "state", optimizer=optimizer)
                model = hfscale.from_pretrained(path, dtype=torch.float32).train()
                optimizer = hfscale.create_optimizer(model, name, lr=1e-3)
                hfscale.load_state(model, tmp_path / "state", optimizer=optimizer)
            hfscale.train_step(model, BATCH)
            optimizer.step()
            optimizer.zero_grad()
        ends.append({key: value.clone() for key, value in model.state_dict().items()})
    for key, value in ends[0].items():
        torch.testing.assert_close(ends[1][key], value, rtol=1e-5, atol=1e-6)


def varlen_flash(
    module: Any, query: Any, key: Any, value: Any, mask: Any, **given: Any
) -> tuple[Any, None]:
    """Attend within documents by torch's own flash kernel, which needs no other package."""
    kernel = varlen.varlen_attn
    borders = given["cu_seq_lens_q"]
    groups = query.shape[1] // key.shape[1]
    q, k, v = (
        x.transpose(1, 2).flatten(0, 1)
        for x in (query, *(x.repeat_interleave(groups, 1) for x in (key, value)))
    )
    longest = int(given["max_length_q"])
    attended = kernel(q, k, v, borders, borders, longest, longest, window_size=(-1, 0))
    return attended.unflatten(0, (len(query), -1)), None


@pytest.mark.parametrize("attention", ["flash_attention_2", "varlen_flash"])
@pytest.mark.parametrize("rows", [1, 2])
def test_packed_rows_under_flash_attention(tmp_path: Path, rows: int, attention: str) -> None:
    if attention == "flash_attention_2":
        pytest.importorskip("flash_attn")
    AttentionInterface.register("varlen_flash", varlen_flash)
    AttentionMaskInterface.register("varlen_flash", lambda *_, **__: None)
    path = saved(tmp_path, tiny("llama"), torch.bfloat16)
    positions = torch.cat([torch.arange(5), torch.arange(7)]).expand(rows, -1)
    batch = {name: value[:rows] for name, value in BATCH.items()} | {"position_ids": positions}
    losses = []
    for chosen in ("sdpa", attention):
        # The host looks for other names on the Hub.
        given = "sdpa" if chosen == "varlen_flash" else chosen
        model = hfscale.from_pretrained(
            path, dtype=torch.bfloat16, attn_implementation=given
        ).train()
        model.config._attn_implementation = chosen
        losses.append(hfscale.train_step(model, batch).item())
    assert losses[1] == pytest.approx(losses[0], rel=5e-3)


def test_a_dense_step_waits_for_nothing() -> None:
    """As the trace on device `meta` says: see tests/step/test_on_meta.py."""
    model = hfscale.from_config(tiny("llama"), dtype=torch.bfloat16).train()
    hfscale.train_step(model, BATCH)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        hfscale.train_step(model, [BATCH] * 4)
        hfscale.clip_grad_norm_(model, 1.0)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("causal", [False, True])
def test_the_flash_kernel_of_cut_sequences(causal: bool) -> None:
    """Output, log-sum-exp and gradients over two blocks of keys, against the kernel that holds scores."""
    generator = torch.Generator("cuda").manual_seed(3)

    def draw(heads: int) -> torch.Tensor:
        return torch.randn(
            2, heads, 256, 64, generator=generator, device="cuda", dtype=torch.bfloat16
        )

    q = draw(8)
    k = draw(2)
    v = draw(2)
    grad = draw(8)
    fast = FlashOnCuda(0.125)
    slow = ScoreKernel(0.125)
    block = ScoreBlock(causal=causal)
    found = fast.forward(q, k, v, block)
    wanted = slow.forward(q, k, v, block)
    torch.testing.assert_close(found[0], wanted[0], rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(found[1].float(), wanted[1].float(), rtol=1e-3, atol=1e-2)
    for one, other in zip(
        fast.backward(grad, q, k, v, *found, block),
        slow.backward(grad, q, k, v, *wanted, block),
        strict=True,
    ):
        torch.testing.assert_close(one, other, rtol=5e-2, atol=5e-2)

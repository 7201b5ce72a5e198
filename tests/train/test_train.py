"""Training and evaluation through the public names, beyond float64 parity."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

import hfscale
from hfscale import ConfigError, ParallelConfig
from hfscale.models.clone import tiny_clone
from hfscale.testing import RankPool
from hfscale.train.runtime import runtime_of
from hfscale.train.runtime.shards import local_tensor

from ..tiny_models import tiny

Pools = Callable[[int], RankPool]
IDS = torch.randint(3, 67, (4, 12), generator=torch.Generator().manual_seed(1))
TP2 = {"tp_size": 2}
SHARD2 = {"dp_shard_size": 2}
BOTH = {"tp_size": 2, "dp_shard_size": 2}


def save(
    path: Path, family: str = "llama", dtype: torch.dtype = torch.float32, **changes: Any
) -> str:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(tiny(family, **changes), dtype=dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(path)
    return str(path)


def look(path: str, layout: dict[str, int]) -> dict[str, Any]:
    """Logits, losses and generated tokens as a caller sees them."""
    model = hfscale.from_pretrained(path, parallel=ParallelConfig(**layout))
    with torch.no_grad():
        plain = model(input_ids=IDS).logits
        labelled = model(input_ids=IDS, labels=IDS)
        as_tuple = model(input_ids=IDS, labels=IDS, return_dict=False)
    model.train()
    training = model(input_ids=IDS, labels=IDS)
    assert training.logits is None
    assert model(input_ids=IDS, labels=IDS, return_dict=False)[1] is None
    assert model(input_ids=IDS).logits.requires_grad
    model.eval()
    torch.manual_seed(3)
    sampled = model.generate(IDS[:1], do_sample=True, max_new_tokens=8, pad_token_id=0)
    greedy = model.generate(IDS[:1], do_sample=False, max_new_tokens=8, pad_token_id=0)
    return {
        "logits": [plain, labelled.logits, as_tuple[1]],
        "losses": [
            labelled.loss,
            as_tuple[0],
            training.loss.detach(),
            hfscale.eval_step(model, label(IDS)),
        ],
        "sampled": sampled.tolist(),
        "greedy": greedy.tolist(),
    }


def label(ids: torch.Tensor) -> dict[str, torch.Tensor]:
    return {"input_ids": ids, "labels": ids}


@pytest.mark.daily("gpt2-layout1", "llama-layout0")
@pytest.mark.parametrize("layout", [{}, TP2, BOTH])
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_outputs_are_the_stock_ones(
    pools: Pools, tmp_path: Path, family: str, layout: dict[str, int]
) -> None:
    path = save(tmp_path, family)
    stock = AutoModelForCausalLM.from_pretrained(path)
    with torch.no_grad():
        expected = stock(input_ids=IDS, labels=IDS)
    torch.manual_seed(3)
    sampled = stock.generate(IDS[:1], do_sample=True, max_new_tokens=8, pad_token_id=0).tolist()
    greedy = stock.generate(IDS[:1], do_sample=False, max_new_tokens=8, pad_token_id=0).tolist()
    world = ParallelConfig(**layout).total_size
    for found in pools(world).run(look, path, layout) if world > 1 else [look(path, layout)]:
        for logits in found["logits"]:
            torch.testing.assert_close(logits, expected.logits, rtol=1e-4, atol=1e-5)
        for loss in found["losses"]:
            torch.testing.assert_close(loss, expected.loss, rtol=1e-5, atol=1e-6)
        assert found["sampled"] == sampled
        assert found["greedy"] == greedy


def raw_loop(path: str, layout: dict[str, int], steps: int) -> dict[str, torch.Tensor]:
    """The plain PyTorch loop, with accumulation by hand."""
    model = hfscale.from_pretrained(
        path, parallel=ParallelConfig(**layout), dtype=torch.float64
    ).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    per_rank = len(IDS) // hfscale.batch_world(model)
    mine = IDS[per_rank * hfscale.batch_rank(model) :][:per_rank]
    for _ in range(steps):
        for row in mine.split(1):
            (model(**label(row)).loss / len(mine)).backward()
        optimizer.step()
        optimizer.zero_grad()
    runtime = runtime_of(model)
    return {
        planned.name: (local_tensor(p.detach()), planned.cuts, runtime.mesh.ranks)
        for planned, p in runtime.parameters()
    }


@pytest.mark.daily("qwen3-layout1")
@pytest.mark.parametrize("layout", [TP2, SHARD2, BOTH, {"tp_size": 2, "dp_replicate_size": 2}])
@pytest.mark.parametrize("family", ["gpt2", "qwen3"])
def test_a_plain_backward_loop(
    pools: Pools, tmp_path: Path, family: str, layout: dict[str, int]
) -> None:
    path = save(tmp_path, family)
    stock = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64).train()
    optimizer = torch.optim.SGD(stock.parameters(), lr=0.3)
    for _ in range(2):
        stock(**label(IDS)).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    final = stock.state_dict()
    for found in pools(ParallelConfig(**layout).total_size).run(raw_loop, path, layout, 2):
        for name, (share, cuts, ranks) in found.items():
            expected = final[name]
            for cut in cuts:
                expected = cut.take(expected, ranks[cut.axis])
            torch.testing.assert_close(share, expected, rtol=1e-6, atol=1e-6)


def low_precision(path: str, layout: dict[str, int], dtype: str, mixed: str) -> dict[str, Any]:
    kwargs = {
        "parallel": ParallelConfig(**layout),
        "dtype": getattr(torch, dtype),
        "mixed_precision": mixed,
    }
    model = hfscale.from_pretrained(path, **kwargs).train()
    before = [local_tensor(p.detach()).clone() for p in model.parameters()]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    per_rank = len(IDS) // hfscale.batch_world(model)
    mine = IDS[per_rank * hfscale.batch_rank(model) :][:per_rank]
    seen: list[torch.dtype] = []
    model.model.layers[0].mlp.up_proj.register_forward_hook(
        lambda m, a, output: seen.append(output.dtype)
    )
    losses = []
    norms = []
    for _ in range(4):
        losses.append(hfscale.train_step(model, label(mine)).item())
        norms.append(hfscale.clip_grad_norm_(model, 1.0).item())
        optimizer.step()
        optimizer.zero_grad()
    after = [local_tensor(p.detach()) for p in model.parameters()]
    return {
        "losses": losses,
        "norms": norms,
        "weights": {str(p.dtype) for p in model.parameters()},
        "computed": {str(dtype) for dtype in seen},
        "moved": all(
            not torch.equal(a, b) for a, b in zip(before, after, strict=True) if a.numel()
        ),
    }


@pytest.mark.daily("float32-bf16-layout1", "bfloat16-no-layout0")
@pytest.mark.parametrize("layout", [TP2, SHARD2, BOTH])
@pytest.mark.parametrize(
    ("dtype", "mixed"), [("bfloat16", "no"), ("float32", "bf16"), ("float32", "no")]
)
def test_precisions(
    pools: Pools, tmp_path: Path, layout: dict[str, int], dtype: str, mixed: str
) -> None:
    path = save(tmp_path)
    exact = low_precision(path, {}, "float32", "no")
    found = pools(ParallelConfig(**layout).total_size).run(
        low_precision, path, layout, dtype, mixed
    )
    low = dtype == "bfloat16" or mixed == "bf16"
    for result in found:
        assert result["weights"] == {f"torch.{dtype}"}
        assert result["computed"] == {"torch.bfloat16" if low else "torch.float32"}
        assert result["moved"]
        assert result["losses"] == found[0]["losses"]
        assert result["norms"] == found[0]["norms"]
        assert result["losses"] == pytest.approx(exact["losses"], rel=3e-2 if low else 1e-4)
        assert result["norms"] == pytest.approx(exact["norms"], rel=1e-1 if low else 1e-3)


def replicas(path: str, layout: dict[str, int]) -> dict[str, torch.Tensor]:
    """Parameters that every tensor rank holds whole, after some steps with dropout."""
    model = hfscale.from_pretrained(
        path, parallel=ParallelConfig(**layout), dtype=torch.bfloat16
    ).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(5):
        hfscale.train_step(model, label(IDS))
        hfscale.clip_grad_norm_(model, 0.1)
        optimizer.step()
        optimizer.zero_grad()
    parameters = runtime_of(model).parameters()
    return {
        planned.name: parameter.detach()
        for planned, parameter in parameters
        if planned.cut_over("tp") is None
    }


@pytest.mark.daily("qwen3")
@pytest.mark.parametrize("family", ["gpt2", "qwen3", "llama"])
def test_replicas_stay_bit_equal(pools: Pools, tmp_path: Path, family: str) -> None:
    """Trap T6."""
    changes = (
        {"resid_pdrop": 0.2, "attn_pdrop": 0.2} if family == "gpt2" else {"attention_dropout": 0.2}
    )
    first, second = pools(2).run(replicas, save(tmp_path, family, **changes), TP2)
    assert first.keys() == second.keys()
    assert any("norm" in name or "ln_" in name for name in first)
    for name, value in first.items():
        assert torch.equal(value, second[name]), name


def norm_types(path: str, layout: dict[str, int], norm_type: float) -> list[float]:
    model = hfscale.from_pretrained(path, parallel=ParallelConfig(**layout), dtype=torch.float64)
    per_rank = len(IDS) // hfscale.batch_world(model)
    mine = IDS[per_rank * hfscale.batch_rank(model) :][:per_rank]
    hfscale.train_step(model, label(mine))
    return [hfscale.clip_grad_norm_(model, 0.1, norm_type).item() for _ in range(2)]


@pytest.mark.parametrize("norm_type", [1.0, 2.0, float("inf")])
def test_norm_types(pools: Pools, tmp_path: Path, norm_type: float) -> None:
    path = save(tmp_path, tie_word_embeddings=True)
    stock = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64)
    stock(**label(IDS)).loss.backward()
    expected = [
        torch.nn.utils.clip_grad_norm_(stock.parameters(), 0.1, norm_type).item() for _ in range(2)
    ]
    for found in pools(4).run(norm_types, path, BOTH, norm_type):
        assert found == pytest.approx(expected, rel=1e-6)
        assert found[1] == pytest.approx(0.1, rel=1e-4)


def norm_behind_a_frozen_stage(layout: dict[str, int]) -> torch.Tensor:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(tiny("gpt2"), dtype=torch.float64)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("h.1." in name)
    hfscale.parallelize(model, ParallelConfig(**layout))
    hfscale.train_step(model, label(IDS))
    return hfscale.clip_grad_norm_(model, 1.0)


def test_the_norm_is_wide_on_ranks_without_gradients(pools: Pools) -> None:
    expected = norm_behind_a_frozen_stage({})
    for found in pools(2).run(norm_behind_a_frozen_stage, {"pp_size": 2}):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=0.0)


def test_no_valid_label_at_all(tmp_path: Path) -> None:
    model = hfscale.from_pretrained(save(tmp_path))
    loss = hfscale.train_step(model, {"input_ids": IDS, "labels": torch.full_like(IDS, -100)})
    assert loss.item() == 0.0
    assert all(
        parameter.grad is not None and not parameter.grad.any() for parameter in model.parameters()
    )


def test_shifted_labels_of_the_caller(tmp_path: Path) -> None:
    model = hfscale.from_pretrained(save(tmp_path))
    shifted = torch.nn.functional.pad(IDS, (0, 1), value=-100)[:, 1:]
    plain = hfscale.train_step(model, label(IDS))
    assert hfscale.train_step(
        model, {**label(IDS), "shift_labels": shifted}
    ).item() == pytest.approx(plain.item())


def test_gradients_accumulate_between_steps(tmp_path: Path) -> None:
    model = hfscale.from_pretrained(save(tmp_path))
    hfscale.train_step(model, label(IDS))
    once = model.lm_head.weight.grad.clone()
    hfscale.train_step(model, label(IDS))
    torch.testing.assert_close(model.lm_head.weight.grad, 2 * once)


def attention_weights(path: str) -> str:
    model = hfscale.from_pretrained(
        path, parallel=ParallelConfig(**TP2), attn_implementation="eager"
    )
    with pytest.raises(ConfigError) as caught:
        model(input_ids=IDS, output_attentions=True)
    return str(caught.value)


def test_attention_weights_of_some_heads_are_not_handed_out(pools: Pools, tmp_path: Path) -> None:
    for message in pools(2).run(attention_weights, save(tmp_path)):
        assert "tp_size=1" in message


def _after_evaluation() -> tuple[list[bool], bool]:
    """Whether an evaluation before it changes a step's gradients, parameter by parameter; and what parameters are."""
    found = []
    shards = []
    for evaluates in (False, True):
        layout = ParallelConfig(tp_size=2, dp_shard_size=2, sequence_parallel=True)
        model = hfscale.from_config(tiny("llama"), parallel=layout, dtype=torch.float64).train()
        generator = torch.Generator().manual_seed(hfscale.batch_rank(model))
        ids = torch.randint(0, 67, (2, 9), generator=generator)
        batch = {"input_ids": ids, "labels": ids}
        if evaluates:
            hfscale.eval_step(model, batch)
        shards.append([local_tensor(parameter).shape for parameter in model.parameters()])
        with torch.no_grad():
            model(**batch)
        hfscale.train_step(model, batch)
        found.append([local_tensor(tensor.grad) for _, tensor in runtime_of(model).parameters()])
    return [torch.equal(a, b) for a, b in zip(*found, strict=True)], shards[0] == shards[1]


def test_an_evaluation_before_it_changes_nothing_in_a_step(pools: Pools) -> None:
    for same, still_shards in pools(4).run(_after_evaluation):
        assert all(same)
        assert still_shards, "an optimizer that is made now must not get gathered weights"


def test_a_router_loss_is_not_counted_per_microbatch() -> None:
    """Trap T10."""
    config = tiny_clone(AutoConfig.for_model("mixtral"), output_router_logits=True)
    model = hfscale.from_config(config, dtype=torch.float32)
    loss = hfscale.train_step(model, label(IDS)).item()
    assert loss == pytest.approx(model(**label(IDS)).loss.item())
    with pytest.raises(ConfigError, match="2 times in this step"):
        hfscale.train_step(model, [label(IDS[:2]), label(IDS[2:])])
    config.output_router_logits = False
    assert hfscale.from_config(config, dtype=torch.float32)(**label(IDS)).loss.item() < loss


def classify(path: str, layout: dict[str, int]) -> list[float]:
    torch.manual_seed(0)
    model = hfscale.from_pretrained(
        path,
        parallel=ParallelConfig(**layout),
        auto_class=AutoModelForSequenceClassification,
        dtype=torch.float64,
    )
    with torch.no_grad():
        local_tensor(model.score.weight).fill_(0.01)
    loss = model(input_ids=IDS, labels=torch.tensor([0, 1, 1, 0])).loss
    loss.backward()
    found = [
        loss.item(),
        model.model.norm.weight.grad.norm().item(),
        hfscale.clip_grad_norm_(model, 1.0).item(),
    ]
    model.zero_grad()
    step = hfscale.train_step(model, {"input_ids": IDS, "labels": torch.tensor([0, 1, 1, 0])})
    return [*found, step.item(), model.model.norm.weight.grad.norm().item()]


def test_another_head(pools: Pools, tmp_path: Path) -> None:
    """A classifier has no vocabulary to cut: its blocks and embedding are, its loss is the host's."""
    path = save(tmp_path, pad_token_id=0)
    expected = classify(path, {})
    for found in pools(2).run(classify, path, TP2):
        assert found == pytest.approx(expected, rel=1e-6)
    assert expected[3:] == pytest.approx(expected[:2], rel=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_clipping_multiplies_by_a_factor_that_is_not_rounded(dtype: torch.dtype) -> None:
    model = hfscale.from_config(tiny("llama"), dtype=dtype).train()
    hfscale.train_step(
        model, {"input_ids": torch.arange(24).view(2, 12), "labels": torch.arange(24).view(2, 12)}
    )
    before = {name: parameter.grad.double() for name, parameter in model.named_parameters()}
    factor = 0.3337 / (hfscale.clip_grad_norm_(model, 0.3337).double() + 1e-6)
    assert factor < 1
    for name, parameter in model.named_parameters():
        wanted = (before[name] * factor.float().double()).to(dtype)
        torch.testing.assert_close(parameter.grad, wanted, rtol=1e-6, atol=0)


GOLDEN = Path(__file__).parents[1] / "golden"


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_golden_losses(family: str, request: pytest.FixtureRequest) -> None:
    """Losses of 10 steps from a seed, as last looked at: `pytest --write-golden` after a wanted change."""
    model = hfscale.from_config(tiny(family), seed=1, dtype=torch.float64)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(10):
        losses.append(hfscale.train_step(model, [label(IDS[:3]), label(IDS[3:])]).item())
        hfscale.clip_grad_norm_(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()
    file = GOLDEN / f"{family}.txt"
    if request.config.getoption("--write-golden"):
        file.write_text("".join(f"{loss:.9f}\n" for loss in losses))
    assert losses == pytest.approx([float(line) for line in file.read_text().split()], abs=2e-6)

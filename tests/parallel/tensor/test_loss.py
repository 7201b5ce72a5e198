"""The chunked loss in stock models: stock numbers, few bytes, few rows."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoConfig, AutoModelForCausalLM, LlamaForCausalLM

import hfscale
from hfscale import ConfigError, ParallelConfig
from hfscale._compat.transformers.classes import class_name
from hfscale.models.clone import tiny_clone
from hfscale.testing import Case, RankPool, assert_layout_equal, keep_float64
from hfscale.train.runtime import runtime_of
from tests.tiny_models import tiny

Pools = Callable[[int], RankPool]
TP2 = {"tp_size": 2}
B = 3
S = 40
H = 32
V = 67
GENERATOR = torch.Generator().manual_seed(1)
IDS = torch.randint(3, V, (B, S), generator=GENERATOR)
LABELS = IDS.masked_fill(torch.rand(IDS.shape, generator=GENERATOR) < 0.5, -100)
BATCH = {"input_ids": IDS, "labels": LABELS}
VALID = int((LABELS[:, 1:] != -100).sum())


def save(path: Path, family: str = "llama", **changes: Any) -> str:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(tiny(family, **changes), dtype=torch.float64)
    model.save_pretrained(path)
    return str(path)


def load(path: str, layout: dict[str, int], **kwargs: Any) -> Any:
    return hfscale.from_pretrained(
        path, parallel=ParallelConfig(**layout), dtype=torch.float64, **kwargs
    ).train()


# a softcap, a divisor, a factor, a head with a bias (twice)
FAMILIES = {
    "gemma2": {"final_logit_softcapping": 2.0},
    "granite": {"logits_scaling": 3.0},
    "cohere": {"logit_scale": 0.3},
    "phi": {},
    "gptj": {},
}


@pytest.mark.daily("gemma2-2", "granite-1", "phi-2", "cohere-1")
@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("family", FAMILIES)
def test_heads(pools: Pools, family: str, world: int) -> None:
    config = tiny_clone(
        AutoConfig.for_model(family), **{"pad_token_id": None, "vocab_size": V, **FAMILIES[family]}
    )
    case = Case(config, lengths=(24, 9), rows=3)
    assert_layout_equal(case, ParallelConfig(tp_size=world), pools(2) if world == 2 else None)


def smoothed(path: str, layout: dict[str, int]) -> list[tuple[float, Tensor]]:
    model = load(path, layout)
    found = []
    with keep_float64():
        for run in (
            lambda: hfscale.train_step(model, [BATCH], label_smoothing=0.1),
            lambda: model(**BATCH, label_smoothing=0.1).loss,
        ):
            loss = run()
            if loss.requires_grad:
                loss.backward()
            found.append((loss.item(), model.model.norm.weight.grad.clone()))
            model.zero_grad()
        evaluated = hfscale.eval_step(model, BATCH, label_smoothing=0.1).item()
        assert evaluated == pytest.approx(found[0][0], rel=1e-12)
    with pytest.raises(ConfigError, match="of at least 0 and of at most 1"):
        hfscale.train_step(model, BATCH, label_smoothing=1.5)
    return found


@pytest.mark.parametrize("layout", [{}, TP2])
def test_label_smoothing(pools: Pools, tmp_path: Path, layout: dict[str, int]) -> None:
    path = save(tmp_path)
    stock = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64)
    with keep_float64():
        logits = stock(input_ids=IDS).logits[:, :-1].flatten(0, 1)
        expected = F.cross_entropy(logits, LABELS[:, 1:].flatten(), label_smoothing=0.1)
        expected.backward()
    for found in pools(2).run(smoothed, path, layout) if layout else [smoothed(path, layout)]:
        for loss, gradient in found:
            assert loss == pytest.approx(expected.item(), rel=1e-12)
            torch.testing.assert_close(
                gradient, stock.model.norm.weight.grad, rtol=1e-10, atol=1e-14
            )


class Watch(TorchDispatchMode):
    """The largest tensor made with a given last dim, and the rows of every product with the head's weight."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width
        self.largest = 0
        self.rows = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        for made in (leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)):
            # The weight, transposed.
            if made.ndim and made.shape[-1] == self.width and made.shape[0] != H:
                self.largest = max(self.largest, made.numel())
        if (
            func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm)
            and output.shape[-1] == self.width
        ):
            self.rows += output.shape[0]
        return output


def watched(path: str, layout: dict[str, int], evaluate: bool) -> tuple[int, int, int]:
    model = load(path, layout)
    width = model.lm_head.weight.shape[0]
    with Watch(width) as watch, torch.autograd.set_multithreading_enabled(False):
        (hfscale.eval_step if evaluate else hfscale.train_step)(model, BATCH)
    return width, watch.largest, watch.rows


@pytest.mark.parametrize("evaluate", [False, True])
@pytest.mark.parametrize("layout", [{}, TP2])
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_no_logits_of_all_rows(
    pools: Pools, tmp_path: Path, family: str, layout: dict[str, int], evaluate: bool
) -> None:
    path = save(tmp_path, family, vocab_size=1003, tie_word_embeddings=False)
    for width, largest, rows in (
        pools(2).run(watched, path, layout, evaluate)
        if layout
        else [watched(path, layout, evaluate)]
    ):
        assert rows == VALID  # rows without a label never meet the head
        assert largest <= -(-VALID // 2) * width
        assert largest < B * S * width / 2


def test_peak_bytes() -> None:
    """Bytes alive at the worst moment of a step: stock keeps logits several times over, ours less than one copy."""
    config = tiny(
        "llama", vocab_size=4096, hidden_size=16, intermediate_size=16, num_hidden_layers=1
    )
    ids = torch.randint(3, 4096, (4, 256))
    logits_bytes = ids.numel() * 4096 * 4
    models = {
        "stock": AutoModelForCausalLM.from_config(config),
        "hfscale": hfscale.from_config(config),
    }
    peaks = {}
    for name, model in models.items():
        model.train()
        with torch.profiler.profile(profile_memory=True) as profile:
            model(input_ids=ids, labels=ids).loss.backward()
        alive = peak = 0
        for event in profile.profiler.kineto_results.events():
            if event.name() == "[memory]":
                alive += event.nbytes()
                peak = max(peak, alive)
        peaks[name] = peak / logits_bytes
    assert peaks["stock"] > 2.0, peaks
    # A quarter for a chunk, a few blocks for sums, the rest is the model's.
    assert peaks["hfscale"] < 0.7, peaks


def twice(path: str, layout: dict[str, int]) -> None:
    model = load(path, layout)
    weights = [model.lm_head.weight, model.model.norm.weight]
    loss = model(**BATCH).loss
    first = torch.autograd.grad(loss, weights, retain_graph=True)
    second = torch.autograd.grad(3 * loss, weights, retain_graph=True)
    (2 * loss).backward()
    for weight, once, thrice in zip(weights, first, second, strict=True):
        torch.testing.assert_close(thrice, 3 * once)
        torch.testing.assert_close(weight.grad, 2 * once)
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


@pytest.mark.parametrize("layout", [{}, TP2])
def test_backward_twice(pools: Pools, tmp_path: Path, layout: dict[str, int]) -> None:
    path = save(tmp_path)
    pools(2).run(twice, path, layout) if layout else twice(path, layout)


def test_the_kept_gradient_becomes_grad_without_a_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from hfscale.distributed.ops.head_cross_entropy import LinearRows

    kept: list[int] = []
    sums = LinearRows.sums
    monkeypatch.setattr(
        LinearRows, "sums", lambda self: kept.append(sums(self)[0].data_ptr()) or sums(self)
    )
    model = load(save(tmp_path), {})
    hfscale.train_step(model, BATCH)
    assert model.lm_head.weight.grad.data_ptr() == kept[0]


def odd_head(path: str, layout: dict[str, int]) -> tuple[float, Tensor]:
    """The head inside another module's forward, as adapters do it, with an operation nobody foresaw behind it."""
    model = load(path, layout)
    model.lm_head.register_forward_hook(lambda module, args, output: output.sin())
    loss = hfscale.train_step(model, BATCH)
    return loss.item(), model.model.norm.weight.grad


@pytest.mark.parametrize("layout", [{}, TP2])
def test_unknown_operations_get_real_logits(
    pools: Pools, tmp_path: Path, layout: dict[str, int]
) -> None:
    path = save(tmp_path)
    stock = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64)
    stock.lm_head.register_forward_hook(lambda module, args, output: output.sin())
    expected = stock(**BATCH).loss
    expected.backward()
    for loss, gradient in (
        pools(2).run(odd_head, path, layout) if layout else [odd_head(path, layout)]
    ):
        assert loss == pytest.approx(expected.item(), rel=1e-5)
        torch.testing.assert_close(gradient, stock.model.norm.weight.grad, rtol=1e-4, atol=1e-8)


class Adapted(torch.nn.Module):
    """A stand-in for a head with an adapter: a frozen projection and a trained low-rank one."""

    def __init__(self, base: torch.nn.Linear) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.base = base.requires_grad_(False)
        self.down = torch.nn.Parameter(
            torch.randn(2, base.in_features, generator=generator, dtype=torch.float64)
        )
        self.up = torch.nn.Parameter(
            torch.randn(base.out_features, 2, generator=generator, dtype=torch.float64)
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + x @ self.down.T @ self.up.T


def test_a_head_with_an_adapter(tmp_path: Path) -> None:
    path = save(tmp_path)
    stock = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64)
    ours = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64)
    for model in (stock, ours):
        model.lm_head = Adapted(model.lm_head)
    from hfscale.distributed.ops.head_cross_entropy import AnyRows, head_cross_entropy
    from hfscale.distributed.ops.vocab_cross_entropy import VocabularySlice

    hidden = torch.randn(20, H, dtype=torch.float64, requires_grad=True)
    targets = torch.randint(0, V, (20,))
    expected = F.cross_entropy(stock.lm_head(hidden), targets)
    trained = [ours.lm_head.down, ours.lm_head.up]
    rows = AnyRows(ours.lm_head, trained, None, True)
    found = head_cross_entropy(hidden, targets, rows, vocabulary=VocabularySlice(0, V, V))
    torch.testing.assert_close(found, expected)
    wanted = torch.autograd.grad(expected, [hidden, stock.lm_head.down, stock.lm_head.up])
    torch.testing.assert_close(torch.autograd.grad(found, [hidden, *trained]), wanted)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_autocast_and_frozen_weights(tmp_path: Path, dtype: torch.dtype) -> None:
    path = save(tmp_path)
    stock = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    model = hfscale.from_pretrained(path, dtype=torch.float32).train()
    for each in (stock, model):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype == torch.bfloat16):
            each(**BATCH).loss.backward()
    close = (
        {"rtol": 5e-2, "atol": 1e-3} if dtype == torch.bfloat16 else {"rtol": 1e-4, "atol": 1e-7}
    )
    torch.testing.assert_close(model.lm_head.weight.grad, stock.lm_head.weight.grad, **close)
    model.zero_grad()
    model.lm_head.requires_grad_(False)
    hfscale.train_step(model, BATCH)
    assert model.lm_head.weight.grad is None
    assert model.model.norm.weight.grad is not None


def test_number_of_items_and_wrong_lengths(tmp_path: Path) -> None:
    model = load(save(tmp_path), {})
    mean = model(**BATCH).loss
    for count in (2 * VALID, torch.tensor(2 * VALID)):
        torch.testing.assert_close(model(**BATCH, num_items_in_batch=count).loss, mean / 2)
    with pytest.raises(ConfigError, match="logits_to_keep"):
        model(**BATCH, logits_to_keep=5)
    assert model(input_ids=IDS).logits.shape == (B, S, V)  # after an error, too


def sample(path: str) -> tuple[list[int], list[int]]:
    model = load(path, TP2).eval()
    rank = runtime_of(model).mesh.ranks["tp"]
    torch.manual_seed(3 + rank)  # what a script that seeds by rank does
    sampled = model.generate(IDS[:1, :5], do_sample=True, max_new_tokens=12, pad_token_id=0)
    greedy = model.generate(IDS[:1, :5], do_sample=False, max_new_tokens=12, pad_token_id=0)
    return sampled.tolist(), greedy.tolist()


def test_all_ranks_generate_the_same(pools: Pools, tmp_path: Path) -> None:
    """Trap T30."""
    path = save(tmp_path)
    stock = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64)
    torch.manual_seed(3)
    sampled = stock.generate(
        IDS[:1, :5], do_sample=True, max_new_tokens=12, pad_token_id=0
    ).tolist()
    greedy = stock.generate(
        IDS[:1, :5], do_sample=False, max_new_tokens=12, pad_token_id=0
    ).tolist()
    for found in pools(2).run(sample, path):
        assert found == (sampled, greedy)


def _loss_of(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


class OwnLoss(LlamaForCausalLM):
    """A class whose loss is computed out of the plan's sight."""

    def forward(self, input_ids: Tensor, labels: Tensor | None = None, **kwargs: Any) -> Any:
        output = super().forward(input_ids=input_ids, **kwargs)
        output.loss = None if labels is None else _loss_of(output.logits, labels)
        return output


def test_a_loss_of_the_models_own_is_left_alone_where_nothing_is_cut() -> None:
    torch.manual_seed(0)
    plain = OwnLoss(tiny("llama")).train()
    model = OwnLoss(tiny("llama")).train()
    model.load_state_dict(plain.state_dict())
    model = hfscale.parallelize(model, ParallelConfig())
    expected = plain(**BATCH)
    output = model(**BATCH)
    torch.testing.assert_close((output.loss, output.logits), (expected.loss, expected.logits))
    output.loss.backward()
    expected.loss.backward()
    torch.testing.assert_close(model.lm_head.weight.grad, plain.lm_head.weight.grad)
    with pytest.raises(
        ConfigError, match=r"^OwnLoss computes its loss itself .* instead of train_step"
    ):
        hfscale.train_step(model, BATCH)
    model.__class__ = type("FSDPOwnLoss", (FSDPModule, OwnLoss), {})  # as over data axes
    assert class_name(model) == "OwnLoss"

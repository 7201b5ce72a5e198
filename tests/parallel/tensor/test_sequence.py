"""Sequence parallelism: the same arithmetic, the same bytes on the wire, and activations that are cut."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM, PreTrainedConfig

import hfscale
from hfscale import ParallelConfig
from hfscale._compat.transformers.computing import enable_checkpointing
from hfscale.errors import ConfigError, PlanError
from hfscale.models.clone import tiny_clone
from hfscale.parallel.tensor.part import TensorParallel
from hfscale.plan.cut import share_evenly
from hfscale.testing import Case, RankPool, Traffic, assert_layout_equal, count_traffic, plain
from hfscale.train.runtime import runtime_of
from tests.tiny_models import tiny

Pools = Callable[[int], RankPool]
WITH: dict[str, Any] = {"tp_size": 2, "sequence_parallel": True}


def save(path: Path, config: PreTrainedConfig, dtype: torch.dtype = torch.float64) -> str:
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=dtype).save_pretrained(path)
    return str(path)


def test_share_evenly() -> None:
    assert share_evenly(8, 4) == [2, 2, 2, 2]
    assert share_evenly(10, 4) == [3, 3, 2, 2]
    assert share_evenly(2, 4) == [1, 1, 0, 0]


@pytest.mark.daily("llama-extra1")
@pytest.mark.parametrize("extra", [{}, {"sequence_regather": True}, {"overlap": False}])
@pytest.mark.parametrize("family", ["llama", "gpt2", "mistral", "qwen3"])
def test_equals_one_process(pools: Pools, family: str, extra: dict[str, Any]) -> None:
    # 13 tokens over 2 ranks are 7 and 6; of a single one, the second rank has none
    case = Case(tiny(family), lengths=(13, 1, 8), accumulation=3)
    assert_layout_equal(case, ParallelConfig(**WITH, **extra), pools(2))


@pytest.mark.daily("gpt2-extra0")
@pytest.mark.parametrize("extra", [{}, {"sequence_regather": True}])
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_recomputed_and_frozen(pools: Pools, family: str, extra: dict[str, Any]) -> None:
    frozen = (
        ("layers.0.", "k_proj", "norm") if family == "llama" else ("h.0.", "ln_2", "c_proj.bias")
    )
    case = Case(tiny(family), checkpointing=True, frozen=frozen, build="parallelize")
    assert_layout_equal(case, ParallelConfig(**WITH, **extra), pools(2))


FAMILIES: dict[str, dict[str, Any]] = {
    "gemma2": {},  # its embedding scales, so it cannot leave its sum to the first layer
    "opt": {},  # its layers list the tokens of all samples
    "llama4_text": {},  # so do its mixtures, between tokens by sample
    "olmoe": {},  # its attention is run on the whole sequence
    "bloom": {},  # its blocks add the residual
    "bert": {"is_decoder": True},
}


@pytest.mark.daily("gemma2")
@pytest.mark.parametrize("family", FAMILIES)
def test_families(pools: Pools, family: str) -> None:
    config = tiny_clone(AutoConfig.for_model(family), **{"pad_token_id": None, **FAMILIES[family]})
    kwargs = {"experts_implementation": "eager"} if family in ("llama4_text", "olmoe") else {}
    assert_layout_equal(Case(config, hf_kwargs=kwargs), ParallelConfig(**WITH), pools(2))


def test_encoder_and_decoder(pools: Pools) -> None:
    config = tiny_clone(AutoConfig.for_model("bart"), pad_token_id=1)
    case = plain.PlainCase(
        config, auto_class=AutoModelForSeq2SeqLM, make_batch=plain.sequence_to_sequence
    )
    assert_layout_equal(case, ParallelConfig(**WITH), pools(2))


@pytest.mark.parametrize(
    ("family", "why"), [("rwkv", "its blueprint is inferred"), ("gemma4_text", "inputs of their")]
)
def test_what_does_not_fit_is_refused(family: str, why: str) -> None:
    config = tiny_clone(AutoConfig.for_model(family), pad_token_id=None)
    hfscale.plan(config, ParallelConfig(tp_size=2))
    with pytest.raises(
        PlanError, match=f"does not fit '{family}': .*{why}.*use sequence_parallel=False"
    ):
        hfscale.plan(config, ParallelConfig(**WITH))


@pytest.mark.slow
@pytest.mark.parametrize("axis", ["dp_shard_size", "dp_replicate_size"])
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_with_data_axes(pools: Pools, family: str, axis: str) -> None:
    assert_layout_equal(
        Case(tiny(family), checkpointing=True), ParallelConfig(**WITH, **{axis: 2}), pools(4)
    )


def test_four_ranks_and_fewer_tokens(pools: Pools) -> None:
    case = Case(tiny("llama", num_key_value_heads=4), lengths=(7, 2))
    assert_layout_equal(case, ParallelConfig(tp_size=4, sequence_parallel=True), pools(4))


def plain_gradients(
    path: str, layout: dict[str, Any]
) -> tuple[dict[str, Tensor], dict[str, Tensor], list[int]]:
    """Gradients of two accumulated microbatches from a plain loop and from ``train_step``, and tokens in the norms."""
    model = hfscale.from_pretrained(
        path, parallel=ParallelConfig(**layout), dtype=torch.float64
    ).train()
    seen: list[int] = []
    model.model.layers[0].input_layernorm.register_forward_hook(
        lambda _, args, output: seen.append(output.shape[1])
    )
    batches = [
        {"input_ids": ids, "labels": ids}
        for ids in (torch.arange(22).view(2, 11), torch.arange(22, 44)[None])
    ]
    batches = [batches[0], {name: value.view(2, 11) for name, value in batches[1].items()}]
    for batch in batches:
        (model(**batch, use_cache=False).loss / 2).backward()
    plain = {name: p.grad.clone() for name, p in model.named_parameters()}
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)  # gradients add to what is there
    hfscale.train_step(model, batches)
    return plain, {name: p.grad for name, p in model.named_parameters()}, seen


# Qwen3.5's linear attention reads its convolution's weight, and does not call the convolution
@pytest.mark.parametrize("family", ["llama", "qwen3_5_text"])
def test_a_plain_loop_needs_nothing_more(pools: Pools, tmp_path: Path, family: str) -> None:
    path = save(tmp_path, tiny_clone(AutoConfig.for_model(family)))
    for rank, (looped, stepped, seen) in enumerate(pools(2).run(plain_gradients, path, WITH)):
        assert seen == [6 - rank] * 4
        for name, gradient in looped.items():
            torch.testing.assert_close(stepped[name], gradient, rtol=1e-6, atol=1e-9, msg=name)


B = 3
S = 10
H = 32
LAYERS = 2


def count(path: str, layout: dict[str, Any]) -> Traffic:
    model = hfscale.from_pretrained(path, parallel=ParallelConfig(**layout)).train()
    ids = torch.arange(B * S).view(B, S)
    # The first step also agrees on the random stream.
    hfscale.train_step(model, {"input_ids": ids, "labels": ids})
    with count_traffic() as traffic:
        hfscale.train_step(model, {"input_ids": ids, "labels": ids})
    return traffic


def test_same_bytes_on_the_wire(pools: Pools, tmp_path: Path) -> None:
    path = save(tmp_path, tiny("llama"), torch.float32)
    without, cut, again = (
        [traffic.bytes_sent(2) for traffic in pools(2).run(count, path, layout)]
        for layout in ({"tp_size": 2}, WITH, {**WITH, "sequence_regather": True})
    )
    norms = (2 * LAYERS + 1) * H * 4  # their gradients are summed over the ranks once a step
    assert cut == [sent + norms for sent in without]
    half_an_all_reduce = B * S * H * 4 // 2
    assert again == [sent + 2 * LAYERS * half_an_all_reduce for sent in cut]


def saved_bytes(path: str, layout: dict[str, Any]) -> int:
    """Bytes that the first layer's forward pass saves for its backward pass, parameters left out."""
    model = hfscale.from_pretrained(
        path, parallel=ParallelConfig(**layout), attn_implementation="sdpa"
    ).train()
    layer: nn.Module = model.model.layers[1]
    parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}
    storages: dict[int, Tensor] = {}
    seen: list[int] = []

    def keep(tensor: Tensor) -> Tensor:
        if tensor.is_floating_point() and tensor.untyped_storage().data_ptr() not in parameters:
            # Alive, so that no other takes its place.
            storages[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    hooks = torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor)
    outside = {"position_embeddings"}

    def before(_: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        tables = [table for name in outside for table in kwargs[name]]
        parameters.update(table.untyped_storage().data_ptr() for table in tables)
        hooks.__enter__()

    def after(_: nn.Module, args: Any, output: Any) -> None:
        hooks.__exit__(None, None, None)
        seen.append(sum(tensor.untyped_storage().nbytes() for tensor in storages.values()))

    layer.register_forward_pre_hook(before, with_kwargs=True)
    layer.register_forward_hook(after)
    ids = torch.arange(4 * 16).view(4, 16) % 60
    hfscale.train_step(model, {"input_ids": ids, "labels": ids})
    return seen[0]


def test_saved_activations_are_cut(pools: Pools, tmp_path: Path) -> None:
    """Korthikanti et al. 2022, section 4, recounted for LLaMA's layer in one type, per token and hidden unit.

    Between blocks: each of two norms saves its input, the normed input and its output, 6, and one number per token
    each. Attention: queries and result 2, keys and values 2k (k = key/value heads / heads), log-sum-exp of each head.
    MLP: gate, its activation, up, their product: 4f (f = intermediate size / hidden size).
    """
    width = 64
    heads = 4
    tensor = 2
    config = tiny(
        "llama",
        hidden_size=width,
        intermediate_size=160,
        num_attention_heads=heads,
        num_key_value_heads=2,
    )
    path = save(tmp_path, config, torch.float32)
    unit = 4 * 16 * width * 4
    between = 6 + 2 / width
    inside = 2 + 2 * 0.5 + 4 * 2.5 + heads / width
    assert saved_bytes(path, {}) == (between + inside) * unit
    for layout, expected in (
        ({"tp_size": 2}, between + inside / tensor),
        # the gathered inputs of both blocks are kept whole
        (WITH, (between + inside) / tensor + 2 * (1 - 1 / tensor)),
        ({**WITH, "sequence_regather": True}, (between + inside) / tensor),
    ):
        assert pools(2).run(saved_bytes, path, layout) == [expected * unit] * 2


def streams(
    path: str, seed: int, checkpointing: bool
) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """Masks on this rank of GPT-2: after attention's row projection (partial sums), in attention; and gradients."""
    layout = ParallelConfig(**WITH)
    model = hfscale.from_pretrained(
        path, parallel=layout, dtype=torch.float64, attn_implementation="eager"
    ).train()
    if checkpointing:
        enable_checkpointing(model)
    sums: list[Tensor] = []
    weights: list[Tensor] = []
    for layer in model.transformer.h:
        layer.attn.resid_dropout.register_forward_hook(
            lambda _, args, output: sums.append(torch.stack((args[0] != 0, output != 0)))
        )
        layer.attn.attn_dropout.register_forward_hook(
            lambda _, args, output: weights.append(output != 0)
        )
    torch.manual_seed(seed)
    ids = torch.randint(0, 60, (2, 12), generator=torch.Generator().manual_seed(3))
    hfscale.train_step(model, {"input_ids": ids, "labels": ids})
    return sums, weights, [p.grad.clone() for p in model.parameters()]


def test_dropout(pools: Pools, tmp_path: Path) -> None:
    config = tiny("gpt2", resid_pdrop=0.3, attn_pdrop=0.3, embd_pdrop=0.2)
    path = save(tmp_path, config)
    (sums, weights, gradients), (other_sums, other_weights, other_gradients) = pools(2).run(
        streams, path, 5, False
    )
    for mine, others in zip(sums, other_sums, strict=True):
        assert mine[0].shape == (2, 12, 32)
        nonzero = mine[0] & others[0]
        assert nonzero.float().mean() > 0.5
        assert torch.equal(mine[1][nonzero], others[1][nonzero]), (
            "partial sums of one token must be dropped together"
        )
    assert not torch.equal(sums[0][1], sums[1][1])
    assert not any(
        torch.equal(mine, others) for mine, others in zip(weights, other_weights, strict=True)
    )
    for (_, _, again), first in zip(
        pools(2).run(streams, path, 5, True), (gradients, other_gradients), strict=True
    ):
        for found, expected in zip(again, first, strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-9)


def between_blocks(path: str) -> Tensor:
    model = hfscale.from_pretrained(
        path, parallel=ParallelConfig(**WITH), dtype=torch.float64
    ).train()
    masks: list[Tensor] = []
    original = nn.functional.dropout

    def recorded(x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        result = original(x, p, training, inplace)
        if x.shape[1] == 6 and x.ndim == 3:
            masks.append(result != 0)
        return result

    nn.functional.dropout = recorded
    try:
        torch.manual_seed(5)
        ids = torch.arange(24).view(2, 12)
        model(input_ids=ids, labels=ids).loss.backward()
    finally:
        nn.functional.dropout = original
    return torch.stack(masks)


def test_dropout_between_blocks_differs(pools: Pools, tmp_path: Path) -> None:
    from transformers import BloomConfig

    config = BloomConfig(
        hidden_size=32,
        n_layer=2,
        n_head=4,
        vocab_size=67,
        hidden_dropout=0.3,
        attention_dropout=0.0,
    )
    first, second = pools(2).run(between_blocks, save(tmp_path, config))
    assert len(first) == 4
    assert not any(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def evaluate(path: str) -> tuple[Tensor, Tensor, bool]:
    model = hfscale.from_pretrained(path, parallel=ParallelConfig(**WITH), dtype=torch.float64)
    ids = torch.arange(22).view(2, 11)
    with torch.no_grad():
        logits = model(input_ids=ids).logits
        tokens = model.generate(ids, max_new_tokens=5, do_sample=False)
    refused = False
    try:
        model(input_ids=ids, output_hidden_states=True)
    except ConfigError:
        refused = True
    with_graph = model(input_ids=ids).logits  # gradients on: the stream is cut on the way
    assert runtime_of(model).part(TensorParallel).regions[0].lengths(
        ids[..., None], whole=True
    ) == [6, 5]
    torch.testing.assert_close(with_graph, logits)
    return logits, tokens, refused


def test_evaluation_and_generation(pools: Pools, tmp_path: Path) -> None:
    path = save(tmp_path, tiny("llama"))
    stock = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64)
    ids = torch.arange(22).view(2, 11)
    with torch.no_grad():
        expected = stock(input_ids=ids).logits
        tokens = stock.generate(ids, max_new_tokens=5, do_sample=False)
    for logits, generated, refused in pools(2).run(evaluate, path):
        torch.testing.assert_close(logits, expected)
        assert torch.equal(generated, tokens)
        assert refused


def two_at_once(path: str) -> list[Tensor]:
    """Gradients of the sum of two losses over sequences of 13 and 14 tokens, of which rank 0 has 7 each time."""
    layout = ParallelConfig(**WITH, sequence_regather=True)
    model = hfscale.from_pretrained(path, parallel=layout, dtype=torch.float64).train()
    losses = [
        model(input_ids=ids, labels=ids).loss
        for ids in (torch.arange(26).view(2, 13), torch.arange(14)[None])
    ]
    (losses[0] + losses[1]).backward()
    return [parameter.grad for parameter in model.parameters()]


def test_two_forward_passes_before_a_backward_pass(pools: Pools, tmp_path: Path) -> None:
    path = save(tmp_path, tiny("llama"))
    model = hfscale.from_pretrained(path, dtype=torch.float64).train()
    for ids in (torch.arange(26).view(2, 13), torch.arange(14)[None]):
        model(input_ids=ids, labels=ids).loss.backward()
    norms = [grad.grad for name, grad in model.named_parameters() if "norm" in name]
    for rank in pools(2).run(two_at_once, path):
        whole = [grad for grad in rank if grad.shape == (32,)]
        for found, expected in zip(whole, norms, strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-9)


def checkpointed(module: nn.Module, reentrant: bool) -> None:
    """Put a module, with its hooks, into a checkpoint, as transformers 5.17 and torch's wrappers do."""

    class Checkpointed(type(module)):  # type: ignore[misc]
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            if not torch.is_grad_enabled() and not reentrant:
                return super().__call__(*args, **kwargs)
            return checkpoint(super().__call__, *args, use_reentrant=reentrant, **kwargs)

    module.__class__ = Checkpointed


def norms_of(model: nn.Module) -> dict[str, Tensor | None]:
    return {name: each.grad for name, each in model.named_parameters() if "norm" in name}


def assert_equal_norms(pool: RankPool, function: Callable[..., Any], path: str) -> None:
    expected = function(path, {})
    for found in pool.run(function, path, WITH):
        for name, gradient in expected.items():
            torch.testing.assert_close(found[name], gradient, rtol=1e-6, atol=1e-9)


def evaluated_between(path: str, layout: dict[str, Any]) -> dict[str, Tensor | None]:
    model: Any = hfscale.from_pretrained(
        path, parallel=ParallelConfig(**layout), dtype=torch.float64
    ).train()
    for layer in model.model.layers:
        checkpointed(layer, False)
    ids = torch.arange(26).view(2, 13)
    loss = model(input_ids=ids, labels=ids, use_cache=False).loss
    with torch.no_grad():
        model(input_ids=ids[:1])
    loss.backward()
    return norms_of(model)


def test_an_evaluation_before_the_backward_pass(pools: Pools, tmp_path: Path) -> None:
    """The embedding leaves its sum over ranks to the first layer, which is recomputed from this partial sum."""
    assert_equal_norms(pools(2), evaluated_between, save(tmp_path, tiny("llama")))


def nested(path: str, layout: dict[str, Any]) -> dict[str, Tensor | None]:
    model: Any = hfscale.from_pretrained(
        path, parallel=ParallelConfig(**layout), dtype=torch.float64
    ).train()
    enable_checkpointing(model, use_reentrant=True)
    model.enable_input_require_grads()
    for layer in model.model.layers:
        checkpointed(layer.mlp, True)
    losses = [
        model(input_ids=ids, labels=ids, use_cache=False).loss
        for ids in (torch.arange(26).view(2, 13), torch.arange(16)[None])
    ]
    losses[0].backward()
    with ThreadPoolExecutor(1) as thread:  # with its own numbers, as on GPUs
        thread.submit(losses[1].backward).result()
    return norms_of(model)


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
def test_a_backward_pass_inside_a_backward_pass(pools: Pools, tmp_path: Path) -> None:
    assert_equal_norms(pools(2), nested, save(tmp_path, tiny("llama")))

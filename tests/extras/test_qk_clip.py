"""QK-clip with Muon: the weights of a reference that computes every score, in every layout; and what is refused."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
from accelerate.utils import GradScalerKwargs
from peft import LoraConfig
from torch import Tensor
from transformers import BloomConfig, DeepseekV3Config, MixtralConfig, OlmoConfig
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

import hfscale
from hfscale import ConfigError, MemoryConfig, ParallelConfig
from hfscale.extras.qk_clip import clip as qk_clip
from hfscale.models.clone import tiny_clone
from hfscale.models.precision import keep_float64
from hfscale.testing import RankPool
from hfscale.train.runtime import runtime_of
from hfscale.train.runtime.shards import local_tensor

from ..mixtures import EAGER
from ..tiny_models import tiny

Pools = Callable[[int], RankPool]
STEPS = 3
ROWS = 4
TOKENS = 12
MOST = 5.0
CONFIGS: dict[str, Any] = {
    "llama": lambda: tiny("llama"),
    "biases": lambda: tiny("qwen2", num_key_value_heads=4),
    "one_key_head": lambda: tiny("qwen2", num_key_value_heads=1),
    "four_layers": lambda: tiny("llama", num_hidden_layers=4),
    "mixture": lambda: tiny_clone(MixtralConfig()),
    "window": lambda: tiny("mistral", sliding_window=3),
    "three_heads": lambda: tiny(
        "llama", hidden_size=24, num_attention_heads=3, num_key_value_heads=3
    ),
}
OPTIONS: dict[str, Any] = {"lr": 1e-2, "ns_dtype": "float64", "adamw_lr": 3e-3}


def build(kind: str, layout: ParallelConfig | None = None, **options: Any) -> Any:
    """Weights of large queries and keys, so that heads differ, and of biases, which begin as zeros."""
    options |= EAGER if kind == "mixture" else {}
    model = hfscale.from_config(
        CONFIGS[kind](), parallel=layout, seed=3, dtype=torch.float64, **options
    )
    with torch.no_grad():
        for planned, parameter in runtime_of(model).parameters():
            if "q_proj" in planned.name or "k_proj" in planned.name:
                local_tensor(parameter).mul_(12.0).add_(0.05)
    return model


def batches(
    step: int, world: int, rank: int, accumulated: int, rows: str
) -> list[dict[str, Tensor]]:
    ids = torch.randint(3, 67, (ROWS, TOKENS), generator=torch.Generator().manual_seed(step))
    batch = {"input_ids": ids, "labels": ids}
    if rows == "packed":
        lengths = ((5, 7), (12,), (1, 3, 8), (6, 6))
        batch["position_ids"] = torch.stack(
            [torch.cat([torch.arange(n) for n in row]) for row in lengths]
        )
    if rows == "padded":
        mask = torch.ones_like(ids)
        mask[0, :3], mask[1, 8:] = 0, 0
        labels = ids.masked_fill(mask == 0, -100)
        labels[
            0, 3
        ] = -100  # which padding predicts, whose state is another one by each kind of attention
        batch |= {"attention_mask": mask, "labels": labels}
    own = {name: value.chunk(world)[rank].chunk(accumulated) for name, value in batch.items()}
    return [dict(zip(own, parts, strict=True)) for parts in zip(*own.values(), strict=True)]


@contextmanager
def every_score(model: Any, largest: list[Tensor]) -> Iterator[None]:
    """Compute all scores of each layer from what its attention is given, and keep each head's largest one."""

    def look(module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        states = kwargs["hidden_states"]
        q, k = (
            projection(states).unflatten(-1, (-1, module.head_dim)).transpose(1, 2)
            for projection in (module.q_proj, module.k_proj)
        )
        q, k = apply_rotary_pos_emb(q, k, *kwargs["position_embeddings"])
        scores = q @ k.repeat_interleave(q.shape[1] // k.shape[1], 1).mT * module.scaling
        scores = scores.masked_fill(kwargs["attention_mask"] < -1, -torch.inf)
        largest[module.layer_idx] = torch.maximum(
            largest[module.layer_idx], scores.amax((0, 2, 3)).detach()
        )

    hooks = [
        m.register_forward_pre_hook(look, with_kwargs=True)
        for m in model.modules()
        if hasattr(m, "q_proj")
    ]
    yield
    for hook in hooks:
        hook.remove()


def clipped(attention: Any, scores: list[float]) -> None:
    """Multiply the rows of each head of queries and keys, one by one, given each head's largest score."""
    width = attention.head_dim
    shared = attention.num_key_value_groups
    gammas = [MOST / max(score, MOST) for score in scores]
    for head, gamma in enumerate(gammas):
        first = head // shared * shared
        least = min(gammas[first : first + shared])
        for tensor in attention.q_proj.parameters():
            tensor.data[head * width : (head + 1) * width] *= gamma / least**0.5
        for tensor in attention.k_proj.parameters() if head == first else ():
            tensor.data[head // shared * width : (head // shared + 1) * width] *= least**0.5


def reference(kind: str, rows: str) -> tuple[dict[str, Tensor], list[float]]:
    """Weights after some steps of Muon and a clip that is written out head by head; and all largest scores."""
    model = build(kind, attn_implementation="eager").train()
    optimizer = hfscale.create_optimizer(model, "muon", **OPTIONS)
    seen = list[float]()
    for step in range(STEPS):
        nothing = torch.full((model.config.num_attention_heads,), -torch.inf, dtype=torch.float64)
        largest = [nothing] * model.config.num_hidden_layers
        with every_score(model, largest), keep_float64():
            hfscale.train_step(model, batches(step, 1, 0, 1, rows))
        optimizer.step()
        optimizer.zero_grad()
        for layer, scores in zip(model.model.layers, largest, strict=True):
            clipped(layer.self_attn, scores.tolist())
            seen += scores.tolist()
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}, seen


def difference(
    layout: dict[str, Any], kind: str, accumulated: int, rows: str, path: str, **options: Any
) -> float:
    """On a rank: the largest difference from the stored weights, relative to their largest entry."""
    stored = torch.load(path)
    model = build(kind, ParallelConfig(**layout), **options).train()
    runtime = runtime_of(model)
    optimizer = hfscale.create_optimizer(model, "muon", qk_clip=MOST, **OPTIONS)
    world = hfscale.batch_world(model)
    rank = hfscale.batch_rank(model)
    with keep_float64():
        for step in range(STEPS):
            for part in batches(step, world, rank, accumulated, rows):
                hfscale.train_step(model, part)
            for (
                parameter
            ) in model.parameters():  # each call's gradient is that of a mean over its own labels
                parameter.grad = None if parameter.grad is None else parameter.grad / accumulated
            optimizer.step()
            optimizer.zero_grad()
    worst = 0.0
    for planned, parameter in runtime.parameters():
        mine = local_tensor(parameter.detach())
        wanted = planned.take(stored[planned.name], runtime.mesh.ranks)
        if mine.numel():
            worst = max(
                worst, float((mine - wanted).abs().max() / stored[planned.name].abs().max())
            )
    return worst


@pytest.fixture(scope="module")
def wanted(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], str]:
    """The path of a reference's weights, made once."""
    paths = dict[tuple[str, str], str]()

    def path_of(kind: str, rows: str) -> str:
        if (kind, rows) not in paths:
            weights, seen = reference(kind, rows)
            assert min(seen) < MOST < max(seen)
            paths[kind, rows] = str(tmp_path_factory.mktemp("qk_clip") / "weights.pt")
            torch.save(weights, paths[kind, rows])
        return paths[kind, rows]

    return path_of


@pytest.mark.parametrize(
    ("kind", "attention", "rows"),
    [
        ("llama", "sdpa", "plain"),
        ("biases", "sdpa", "packed"),
        ("one_key_head", "eager", "plain"),
        pytest.param("three_heads", "eager", "packed", marks=pytest.mark.slow),
        ("window", "sdpa", "plain"),
        ("llama", "sdpa", "padded"),
        pytest.param("llama", "eager", "padded", marks=pytest.mark.slow),
        pytest.param("window", "eager", "packed", marks=pytest.mark.slow),
    ],
)
def test_one_process(wanted: Any, kind: str, attention: str, rows: str) -> None:
    assert difference({}, kind, 1, rows, wanted(kind, rows), attn_implementation=attention) < 1e-12


@pytest.mark.parametrize(("entries", "rows"), [(1, "packed"), (500, "plain"), (1 << 26, "plain")])
def test_blocks_of_queries(
    wanted: Any, monkeypatch: pytest.MonkeyPatch, entries: int, rows: str
) -> None:
    """Of one query, of two, and of five."""
    monkeypatch.setattr(qk_clip, "_SCORES", entries)
    monkeypatch.setattr(qk_clip, "_ROWS", 5)
    assert difference({}, "llama", 1, rows, wanted("llama", rows)) < 1e-12


SLOW = pytest.mark.slow
LAYOUTS: list[Any] = [
    pytest.param({"tp_size": 2}, "llama", 1, "plain", marks=SLOW),
    pytest.param({"tp_size": 2, "sequence_parallel": True}, "biases", 1, "plain", marks=SLOW),
    ({"tp_size": 2}, "one_key_head", 1, "plain"),
    ({"pp_size": 2}, "llama", 2, "plain"),
    pytest.param(
        {"pp_size": 2, "pipeline_schedule": "zbv"}, "four_layers", 1, "packed", marks=SLOW
    ),
    pytest.param(
        {"pp_size": 2, "pipeline_schedule": "interleaved1f1b"},
        "four_layers",
        1,
        "plain",
        marks=SLOW,
    ),
    ({"cp_size": 2, "cp_method": "heads"}, "llama", 1, "packed"),
    pytest.param({"cp_size": 2, "cp_method": "gather"}, "window", 1, "plain", marks=SLOW),
    ({"cp_size": 2, "cp_method": "ring"}, "one_key_head", 1, "packed"),
    pytest.param({"cp_size": 2, "cp_method": "ring"}, "llama", 1, "padded", marks=SLOW),
    pytest.param({"dp_shard_size": 2}, "llama", 1, "padded", marks=SLOW),
    pytest.param({"cp_size": 4, "cp_method": "heads_ring"}, "one_key_head", 1, "plain", marks=SLOW),
    ({"dp_shard_size": 2}, "biases", 2, "plain"),
    pytest.param({"dp_replicate_size": 2}, "llama", 1, "plain", marks=SLOW),
    pytest.param({"dp_shard_size": 4}, "three_heads", 1, "plain", marks=SLOW),
    ({"tp_size": 2, "dp_shard_size": 2}, "one_key_head", 1, "packed"),
    pytest.param({"tp_size": 4}, "llama", 1, "plain", marks=SLOW),
    pytest.param({"tp_size": 2, "cp_size": 2}, "llama", 1, "packed", marks=SLOW),
    pytest.param({"tp_size": 2, "pp_size": 2}, "one_key_head", 2, "plain", marks=SLOW),
    pytest.param({"ep_size": 2, "dp_shard_size": 2}, "mixture", 1, "plain", marks=SLOW),
]


@pytest.mark.parametrize(("layout", "kind", "accumulated", "rows"), LAYOUTS)
def test_layouts(
    pools: Pools, wanted: Any, layout: dict[str, Any], kind: str, accumulated: int, rows: str
) -> None:
    pool = pools(ParallelConfig(**layout).total_size)
    found = pool.run(difference, layout, kind, accumulated, rows, wanted(kind, rows))
    assert max(found) < 1e-10, found


RECOMPUTED: dict[str, dict[str, Any]] = {
    "full": {"recompute": "full", "recompute_keep": ["aten.bmm", "aten.mm"]},
    "selective": {"recompute": "selective"},
    "elementwise": {"recompute": "elementwise"},
}


@pytest.mark.daily("full")
@pytest.mark.parametrize("levers", RECOMPUTED)
def test_recomputation_measures_nothing(wanted: Any, levers: str) -> None:
    """Nor is a product kept that is measured with, and found in the place of one of eager attention."""
    given = {"memory": MemoryConfig(**RECOMPUTED[levers]), "attn_implementation": "eager"}
    with measured() as calls:
        assert difference({}, "llama", 1, "plain", wanted("llama", "plain"), **given) < 1e-12
    assert len(calls) == STEPS * 2  # layers


@pytest.mark.slow
def test_recomputed_over_context_ranks(pools: Pools, wanted: Any) -> None:
    memory = MemoryConfig(recompute="full")
    found = pools(2).run(
        difference, {"cp_size": 2}, "llama", 1, "packed", wanted("llama", "packed"), memory=memory
    )
    assert max(found) < 1e-10


@contextmanager
def measured() -> Iterator[list[int]]:
    """Note the heads of each measured call; a mock would keep what measures alive."""
    # The proof that it needs measures too.
    hfscale.create_optimizer(build("llama"), "muon", qk_clip=MOST, **OPTIONS)
    stock, calls = qk_clip.LargestScores.measure, list[int]()

    def measure(scores: Any, module: Any, query: Tensor, *given: Any) -> None:
        calls.append(query.shape[1])
        stock(scores, module, query, *given)

    with mock.patch.object(qk_clip.LargestScores, "measure", measure):
        yield calls


def test_scores_are_measured_in_training_alone_and_for_the_newest_optimizer() -> None:
    model = build("llama").train()
    (batch,) = batches(0, 1, 0, 1, rows="plain")
    with measured() as calls:
        hfscale.create_optimizer(model, "muon", **OPTIONS)
        hfscale.train_step(model, batch)
        assert model.config._attn_implementation == "sdpa"
        assert len(calls) == 0
        optimizer = hfscale.create_optimizer(model, "muon", qk_clip=MOST, **OPTIONS)
        hfscale.eval_step(model, batch)
        assert len(calls) == 0
        hfscale.train_step(model.train(), batch)
        assert len(calls) == 2
        hfscale.create_optimizer(model, "adamw_torch", lr=1e-3)
        hfscale.train_step(model, batch)
        assert len(calls) == 2
    with pytest.raises(ConfigError, match="another optimizer was made"):
        optimizer.step()


def weights(model: Any) -> dict[str, Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def test_an_overflow_drops_scores() -> None:
    """The step that follows leaves all weights as they are, and so does what overflowed the next one."""
    scaling = GradScalerKwargs(init_scale=2.0**120, growth_interval=1000)
    model = hfscale.from_config(
        CONFIGS["llama"](),
        seed=3,
        dtype=torch.float32,
        mixed_precision="fp16",
        loss_scaling=scaling,
    ).train()
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.q_proj.weight.mul_(300.0)
    optimizer = hfscale.create_optimizer(model, "muon", qk_clip=0.01, lr=1e-3)
    (batch,) = batches(0, 1, 0, 1, rows="plain")
    before = weights(model)
    hfscale.train_step(model, batch)
    assert hfscale.metrics(model)["step_was_skipped"]
    optimizer.step()
    torch.testing.assert_close(weights(model), before, rtol=0, atol=0)


@pytest.mark.parametrize("strange", [torch.inf, torch.nan, 1e30])
def test_scores_that_are_not_finite_leave_weights(strange: float) -> None:
    """Of a batch whose step the user leaves out: what it measured must not reach the next one."""
    model = build("llama", attn_implementation="eager").train()
    optimizer = hfscale.create_optimizer(model, "muon", qk_clip=1e9, **OPTIONS)
    (batch,) = batches(0, 1, 0, 1, rows="plain")
    kept = model.model.embed_tokens.weight.detach().clone()
    with torch.no_grad():
        model.model.layers[0].self_attn.q_proj.weight.mul_(strange)
    hfscale.train_step(model, batch)
    scores = [each.clone() for each in runtime_of(model).observer._found.values()]
    assert len(scores) == 2
    assert all((each.isneginf() | each.isfinite()).all() for each in scores)
    if strange == 1e30:
        return
    assert scores[0].isneginf().all()
    with torch.no_grad():
        model.model.layers[0].self_attn.q_proj.weight.fill_(0.01)
        model.model.embed_tokens.weight.copy_(kept)
    optimizer.zero_grad()
    hfscale.train_step(model, batch)
    optimizer.step()
    assert all(weight.isfinite().all() for weight in weights(model).values())


def test_products_beyond_float16_are_scaled_first() -> None:
    """Queries times keys are above 65504, scores are not."""
    query = torch.full((1, 2, 3, 64), 40.0, dtype=torch.float16)
    module = torch.nn.Identity()
    scores = qk_clip.LargestScores(
        hfscale.from_config(CONFIGS["llama"](), dtype=torch.float32), [module]
    )
    scores.measure(module, query, query, None, 64**-0.5, causal=True)
    torch.testing.assert_close(scores.take()[module], torch.full((2,), 64 * 1600.0 / 8))


@pytest.mark.parametrize("rows", [1, TOKENS])
def test_masks_of_older_code(rows: int) -> None:
    """That hide by -1e4, in bfloat16 -9984, for all queries alike or for each."""
    query = torch.arange(float(TOKENS)).view(1, 1, TOKENS, 1)
    mask = torch.zeros(1, 1, rows, TOKENS, dtype=torch.bfloat16)
    mask[..., 5:] = -1e4
    module = torch.nn.Identity()
    scores = qk_clip.LargestScores(
        hfscale.from_config(CONFIGS["llama"](), dtype=torch.float32), [module]
    )
    with mock.patch.object(qk_clip, "_SCORES", 1):
        scores.measure(module, query, query, mask, 1.0, causal=False)
    assert float(scores.take()[module]) == (TOKENS - 1) * 4


def test_says_that_nothing_was_measured(caplog: pytest.LogCaptureFixture) -> None:
    model = build("llama").train()
    optimizer = hfscale.create_optimizer(model, "muon", qk_clip=MOST, **OPTIONS)
    model.set_attn_implementation("eager")
    (batch,) = batches(0, 1, 0, 1, rows="plain")
    hfscale.train_step(model, batch)
    optimizer.step()
    assert "qk_clip has measured no attention scores since the last step" in caplog.text


def test_scores_follow_exactly() -> None:
    """Of the first layer, whose input does not change: the largest scores are clipped, others are as they were."""
    model = build("one_key_head").train()
    (batch,) = batches(0, 1, 0, 1, rows="plain")
    optimizer = hfscale.create_optimizer(
        model, "muon", qk_clip=MOST, **{**OPTIONS, "lr": 0.0, "adamw_lr": 0.0}
    )
    stock, seen = qk_clip.LargestScores.take, list[Tensor]()

    def take(scores: Any) -> dict[Any, Tensor]:
        found = stock(scores)
        seen.append(found[model.model.layers[0].self_attn])
        return found

    with mock.patch.object(qk_clip.LargestScores, "take", take), keep_float64():
        for _ in range(2):
            hfscale.train_step(model, batch)
            optimizer.step()
    before, after = seen
    assert (before > MOST).any()
    assert (before < MOST).any()
    torch.testing.assert_close(after, before.clamp(max=MOST), rtol=1e-12, atol=0)


def refused(match: str, kind: Any, **options: Any) -> None:
    config = CONFIGS[kind]() if isinstance(kind, str) else kind
    built = options.pop("built", {})
    model = hfscale.from_config(config, seed=0, dtype=torch.float32, **built)
    if (frozen := options.pop("frozen", None)) is not None:
        model.get_submodule(frozen).requires_grad_(False)
    with pytest.raises(ConfigError, match=match):
        hfscale.create_optimizer(model, **{"name": "muon", "lr": 1e-3, "qk_clip": 100.0, **options})


def test_refusals() -> None:
    refused("q_norm|normalizes, clips or changes queries or keys", tiny("qwen3"))
    refused("normalizes, clips", tiny_clone(OlmoConfig(clip_qkv=8.0)))
    refused("has no linear layers q_proj and k_proj", tiny("gpt2"))
    refused("has no linear layers q_proj and k_proj", tiny_clone(DeepseekV3Config()))
    refused("and BloomForCausalLM does not", tiny_clone(BloomConfig()))
    refused("qk_clip=0.0 is invalid: use a finite number above 0", "llama", qk_clip=0)
    refused("has no option qk_clip", "llama", name="adamw_torch")
    refused(
        "scales model.layers.1.self_attn.k_proj.weight",
        "biases",
        frozen="model.layers.1.self_attn.k_proj",
    )
    refused(
        "scales model.layers.0.self_attn.q_proj.weight",
        "llama",
        built={"peft_config": LoraConfig(r=2)},
    )
    refused("compile=False", "llama", built={"compile": "aot_eager"})
    refused(
        "flex_attention does not use them: load the model with attn",
        "llama",
        built={"attn_implementation": "flex_attention"},
    )


def asynchronous() -> str:
    model = build("llama", ParallelConfig(pp_size=2, pipeline_schedule="pipedream"))
    with pytest.raises(ConfigError) as error:
        hfscale.create_optimizer(model, "muon", qk_clip=MOST, **OPTIONS)
    return str(error.value)


def without_rows() -> str:
    model = build("llama", ParallelConfig(dp_shard_size=2)).train()
    hfscale.create_optimizer(model, "muon", qk_clip=MOST, **OPTIONS)
    (batch,) = batches(0, 1, 0, 1, rows="plain")
    rows = ROWS * (1 - hfscale.batch_rank(model))
    with pytest.raises(ConfigError) as error:
        hfscale.train_step(model, {name: value[:rows] for name, value in batch.items()})
    return str(error.value)


def test_refusals_of_ranks(pools: Pools) -> None:
    assert all(
        "'pipedream' would read attention scores of older weights" in told
        for told in pools(2).run(asynchronous)
    )
    assert "at least one row on every rank for qk_clip" in pools(2).run(without_rows)[1]

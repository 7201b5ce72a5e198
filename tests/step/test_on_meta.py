"""What a step does on a GPU, counted without one: looks of the host, collectives by axis, and what they are given."""

from collections import Counter
from typing import Any

import pytest
import torch
from transformers import PreTrainedConfig, Qwen3MoeConfig

import hfscale
from hfscale import ParallelConfig, RoutingConfig
from hfscale.distributed.ops import collectives
from hfscale.parallel.tensor.part import RandomStreams
from hfscale.train.runtime import runtime_of
from hfscale.train.runtime.batches import Counts

from ..tiny_models import tiny
from .meta import GPU, Seen, pretended_gpus, watched

B = 2
S = 32
H = 64
LAYERS = 2
EXPERTS = 8
ROUTES = 2
ACTIVATION = B * S * H * 2  # bytes of one microbatch's, in bfloat16


def _config(mixture: bool) -> PreTrainedConfig:
    sizes: dict[str, Any] = {
        "hidden_size": H,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 8,
    }
    sizes |= {"intermediate_size": 128, "num_key_value_heads": 2, "vocab_size": 512}
    if not mixture:
        return tiny("llama", **sizes)
    sizes |= {
        "moe_intermediate_size": 32,
        "num_experts": EXPERTS,
        "num_experts_per_tok": ROUTES,
        "head_dim": 8,
    }
    return Qwen3MoeConfig(**sizes)


def _zeros(found: torch.Tensor) -> torch.Tensor:
    return torch.zeros(found.shape, dtype=found.dtype)


def _step(
    layout: ParallelConfig,
    microbatches: int = 1,
    mixture: bool = False,
    answer: tuple[int, ...] | None = None,
) -> Seen:
    """A step and clipping on the first rank.

    Args:
        answer: what the host finds where it looks at batches, which are on the device then.
    """
    with pretended_gpus(layout.total_size):
        model = hfscale.from_config(_config(mixture), parallel=layout, dtype=torch.bfloat16).train()
        runtime_of(model).part(
            RandomStreams
        ).agreed = True  # once in a run; reads the state of a generator
        ids = torch.arange(microbatches * B * S).view(microbatches, B, S) % 500 + 3
        ids = ids if answer is None else ids.to(GPU)
        # Of a rank to each expert.
        routes = [B * S * ROUTES // EXPERTS // (8 if layout.size("tp") == 8 else 1)]
        with watched(
            model, lambda found: torch.tensor(answer or routes * found.numel()).view_as(found)
        ) as seen:
            loss = hfscale.train_step(model, [{"input_ids": one, "labels": one} for one in ids])
            norm = hfscale.clip_grad_norm_(model, 1.0)
        assert loss.device == norm.device == GPU
        assert all(p.grad is not None and p.grad.device == GPU for p in model.parameters())
    assert not seen.faults
    return seen


@pytest.mark.daily("2-4")
@pytest.mark.parametrize("microbatches", [1, 4])
@pytest.mark.parametrize("tp_size", [1, 2, 8])
def test_tensor_ranks(tp_size: int, microbatches: int) -> None:
    seen = _step(ParallelConfig(tp_size=tp_size), microbatches)
    assert not seen.looks
    if tp_size > 1:
        # per layer and microbatch: two edges, both ways; besides, the embedding, the head, and the norm of gradients
        edges = microbatches * (4 * LAYERS + 2)
        assert seen.calls["tp"]["allreduce"] == edges + 1
        assert seen.calls["host"] == {"allgather": 1}
        scalars = seen.sent["tp"] - edges * ACTIVATION
        assert 0 < scalars <= microbatches * B * S * 3 * 4 + 16


def test_sequence_parallel() -> None:
    seen = _step(ParallelConfig(tp_size=2, sequence_parallel=True), 4)
    assert not seen.looks
    edges = 4 * (4 * LAYERS + 2)
    assert seen.calls["tp"]["reduce_scatter_base"] == edges
    assert seen.calls["tp"]["allgather_base"] == edges + 4  # the terms of the loss
    assert seen.calls["tp"]["allreduce"] == 2  # the norm, and what is whole on every rank
    rest = seen.sent["tp"] - edges * ACTIVATION * 3 // 2  # an all-gather is given a half
    assert 0 < rest <= 4 * B * S * 3 * 4 + (2 * LAYERS + 1) * H * 2 + 16


@pytest.mark.daily("exchanged-1")
@pytest.mark.parametrize("microbatches", [1, 4])
@pytest.mark.parametrize(
    "layout",
    [{"tp_size": 8, "ep_size": 8}, {"tp_size": 2, "ep_size": 2}],
    ids=["exchanged", "summed"],
)
def test_mixtures_look_once_a_pass(layout: dict[str, int], microbatches: int) -> None:
    seen = _step(ParallelConfig(**layout), microbatches, mixture=True)
    assert {name for name, _ in seen.looks} == {"_to_copy"}
    assert {where.partition(":")[0] for _, where in seen.looks} == {
        "hfscale/parallel/experts/dispatch.py"
    }
    assert seen.looks.total() == microbatches * LAYERS


@pytest.mark.daily("heads-2")
@pytest.mark.parametrize("microbatches", [1, 2])
@pytest.mark.parametrize("method", ["heads", "gather", "ring", "heads_ring"])
def test_context_ranks(method: str, microbatches: int) -> None:
    """Indices of tokens are made on the device, and labels of a part are counted on the host."""
    assert not _step(ParallelConfig(cp_size=4, cp_method=method), microbatches).looks


def _in_documents(found: torch.Tensor) -> torch.Tensor:
    """Of the tokens, which document each is in."""
    return (torch.arange(found.numel()) % S >= 11).to(found.dtype).view(found.shape)


@pytest.mark.daily("gather-llama-on the host-0")
@pytest.mark.parametrize(
    ("family", "where", "looks"),
    [("llama", "on the host", 0), ("llama", "on the device", 1), ("mistral", "on the host", 1)],
)
@pytest.mark.parametrize("method", ["gather", "ring"])
def test_context_ranks_with_packed_rows(method: str, family: str, where: str, looks: int) -> None:
    """Which pairs of intervals are skipped follows from where documents begin; with a window, from one look a pass."""
    sizes: dict[str, Any] = {"sliding_window": 7} if family == "mistral" else {}
    with pretended_gpus(4):
        layout = ParallelConfig(cp_size=4, cp_method=method)
        model = hfscale.from_config(
            tiny(family, **sizes), parallel=layout, dtype=torch.bfloat16
        ).train()
        runtime_of(model).part(RandomStreams).agreed = True
        ids = torch.ones(B, S, dtype=torch.long)
        positions = torch.cat((torch.arange(11), torch.arange(S - 11)))
        batch = {
            "input_ids": ids,
            "labels": ids,
            "position_ids": positions.expand(B, -1).contiguous(),
        }
        batches = (
            [batch, batch]
            if where == "on the host"
            else [{k: v.to(GPU) for k, v in batch.items()}] * 2
        )
        with watched(model, _in_documents) as seen:
            hfscale.train_step(model, batches)
    here = [where for _, where in seen.looks.elements() if "/parallel/context/" in where]
    assert len(here) == 2 * looks, seen.looks
    assert not seen.faults


def test_weights_of_the_next_mixture_are_asked_for_before_the_host_looks() -> None:
    seen = _step(ParallelConfig(dp_shard_size=4, ep_size=2), mixture=True)
    before = seen.order[: seen.order.index("look")]
    # what is around the layers; of this one and the next one, the layer and its experts
    assert before.count("allgather_base") == 1 + 2 * LAYERS
    assert seen.looks.total() == LAYERS


@pytest.mark.daily("0-pipedream")
@pytest.mark.parametrize("schedule", ["pipedream", "pipedream_2bw"])
@pytest.mark.parametrize("rank", [0, 1])
def test_no_stage_waits_for_its_call_without_a_flush(rank: int, schedule: str) -> None:
    layout = ParallelConfig(pp_size=2, pipeline_schedule=schedule)
    ids = torch.arange(B * S).view(B, S) % 500 + 3
    batch = {"input_ids": ids, "labels": ids}
    with pretended_gpus(2, rank):
        model = hfscale.from_config(_config(False), parallel=layout, dtype=torch.bfloat16).train()
        runtime = runtime_of(model)
        runtime.part(RandomStreams).agreed = True
        runtime.executor.expect((H,), torch.bfloat16)
        with watched(model, _zeros) as seen:
            for _ in range(4):
                loss = hfscale.train_step(model, batch if schedule == "pipedream" else [batch] * 2)
    assert loss.device == GPU
    assert not seen.looks
    assert not seen.faults


def _rows_of_loss(outputs: Any, batch: Any) -> tuple[torch.Tensor, float]:
    return outputs.logits.float().sum(), 3.0


@pytest.mark.daily("fp16", "num_items_on_device")
@pytest.mark.parametrize(
    "case", ["fp16", "num_items_in_batch", "num_items_on_device", "loss_fn", "expert_load"]
)
def test_one_look_at_most(case: str) -> None:
    """fp16 asks whether a gradient overflowed, and a report of experts is read; numbers from the host are filled in."""
    ids = torch.arange(2 * B * S).view(2, B, S) % 500 + 3
    batches = [{"input_ids": one, "labels": one} for one in ids]
    options: dict[str, Any] = {
        "fp16": {"mixed_precision": "fp16"},
        "expert_load": {"routing": RoutingConfig()},
    }
    given: dict[str, Any] = {
        "num_items_in_batch": {"num_items_in_batch": [3, 5]},
        "num_items_on_device": {
            "num_items_in_batch": [torch.ones((), device=GPU), torch.ones(1, device=GPU)]
        },
        "loss_fn": {"loss_fn": _rows_of_loss},
    }
    with pretended_gpus(2):
        layout = ParallelConfig(tp_size=2)
        model = hfscale.from_config(
            _config(case == "expert_load"), parallel=layout, **options.get(case, {})
        ).train()
        runtime_of(model).part(RandomStreams).agreed = True
        if case == "expert_load":
            with watched(model, _zeros) as seen:
                hfscale.expert_load(model)
        else:
            with watched(model, _zeros) as seen:
                hfscale.train_step(model, batches, **given.get(case, {}))
    assert seen.looks.total() == (case in ("fp16", "expert_load"))
    assert not seen.faults


@pytest.mark.parametrize("microbatches", [2, 4])
def test_stages(microbatches: int) -> None:
    seen = _step(ParallelConfig(pp_size=2), microbatches)
    assert not seen.looks
    # the stream of every microbatch one way, and its gradient the other
    assert seen.calls["stages"] == {"send": microbatches, "recv": microbatches}
    assert seen.sent["stages"] == 2 * microbatches * ACTIVATION
    assert seen.calls["pp"] == {"allreduce": 2}  # the loss, the norm
    # In the first step a stage says what it will send.
    assert seen.calls["host"] == {
        "allgather": 1,
        "send": 1,
    }


def test_batches_on_the_device_are_looked_at_once() -> None:
    seen = _step(ParallelConfig(tp_size=2), 4, answer=Counts(B * (S - 1), 0, 0, 0, 0) * 4)
    assert [where.partition(":")[0] for _, where in seen.looks.elements()] == [
        "hfscale/train/runtime/batches.py"
    ]


def _faults(call: Any) -> Seen:
    with pretended_gpus(2):
        model = hfscale.from_config(_config(False), parallel=ParallelConfig(tp_size=2))
        group = runtime_of(model).mesh.group("tp")
        with watched(model, _zeros) as seen:
            call(group)
    return seen


def test_what_the_guard_sees() -> None:
    def wrong(group: Any) -> None:
        collectives.all_reduce(torch.ones(4, 6, device=GPU).t(), group)
        collectives.all_reduce(torch.ones(4, device=GPU, dtype=torch.int16), group)
        torch.ones(4, device=GPU).index_select(0, torch.tensor([1]))

    found = _faults(wrong)
    assert len(found.faults) == 3
    assert found.calls["tp"] == Counter(allreduce=2)

    def waiting(_: Any) -> None:
        x = torch.ones(4, device=GPU)
        torch.tensor([1, 2], device=GPU)
        torch.ones(4).to(GPU)
        torch.ones(4).to(GPU, non_blocking=True)  # the only one that waits for nothing
        for look in (x.tolist, x.sum().item, x.nonzero, (x.sum() > 0).__bool__, x.cpu):
            look()

    assert _faults(waiting).looks.total() == 7

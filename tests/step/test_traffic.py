"""What one step sends is what the formulas say, counted at torch's dispatcher.

Tensor parallelism: per layer and microbatch of ``b x s`` tokens, four all-reduces of ``b s h`` (enter and leave of two
blocks); besides, one all-reduce of ``b s h`` for the embedding (forward) and one for the head (backward), all-gathers
of ``2 b (s - 1)`` numbers for the loss (the last position predicts nothing), and one all-reduce a step for all
parameters that a cut block uses whole. Ranks that share a batch compare it: one all-gather of four numbers a step.

Pipeline stages: per microbatch and pair of neighbours on different ranks, the stream ``b s h`` once forwards and, where
anything in front trains, once backwards; besides, one all-gather a step of a few numbers by which the stages agree, and
all-reduces of scalars. Over sharded data, one all-gather and one reduce-scatter a step of every layer and of the rest.
"""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

import hfscale
from hfscale import ParallelConfig
from hfscale._compat.torch_fsdp import _states
from hfscale._compat.transformers.computing import enable_checkpointing
from hfscale.testing import RankPool, Traffic, count_traffic

from ..tiny_models import tiny

Pools = Callable[[int], RankPool]
B = 3
S = 10
H = 32
LAYERS = 2
AGREEMENT = 4 * 8  # ranks with one batch compare their number of microbatches, shapes and contents


def count(path: str, microbatches: int, checkpointing: bool) -> Traffic:
    model = hfscale.from_pretrained(path, parallel=ParallelConfig(tp_size=2)).train()
    if checkpointing:
        enable_checkpointing(model)
    ids = torch.arange(B * S).view(B, S)
    batch = [{"input_ids": ids, "labels": ids}] * microbatches
    hfscale.train_step(model, batch)  # the first step also agrees on the random stream
    with count_traffic() as traffic:
        hfscale.train_step(model, batch)
    return traffic


# parameters that a cut block uses whole: number per layer, entries of each
@pytest.mark.daily("3-False-gpt2-shared1", "1-True-llama-shared0", "1-False-qwen3-shared2")
@pytest.mark.parametrize(("family", "shared"), [("llama", []), ("gpt2", [H, H]), ("qwen3", [8, 8])])
@pytest.mark.parametrize(("microbatches", "checkpointing"), [(1, False), (3, False), (1, True)])
def test_tensor_parallel_step(
    pools: Pools,
    tmp_path: Path,
    family: str,
    shared: list[int],
    microbatches: int,
    checkpointing: bool,
) -> None:
    AutoModelForCausalLM.from_config(tiny(family), dtype=torch.float32).save_pretrained(tmp_path)
    for traffic in pools(2).run(count, str(tmp_path), microbatches, checkpointing):
        # Recomputation repeats a layer's forward pass up to the last tensor that backward needs, which is the input of
        # the MLP's row projection: one of the two all-reduces.
        edges = (5 if checkpointing else 4) * LAYERS
        activations = microbatches * (edges + 2) * B * S * H * 4
        parameters = LAYERS * sum(shared) * 4
        gathered = microbatches * 2 * B * (S - 1) * 4 + AGREEMENT
        assert traffic.payload == {"allreduce": activations + parameters, "allgather": gathered}
        assert traffic.calls["allreduce"] == microbatches * (edges + 2) + bool(shared)
        # two ranks in a ring: 2 (n - 1) / n of an all-reduce is its payload
        assert traffic.bytes_sent(2) == activations + parameters + gathered


def count_one() -> Traffic:
    model = hfscale.from_config(tiny("llama"))
    ids = torch.arange(B * S).view(B, S)
    with count_traffic() as traffic:
        hfscale.train_step(model, {"input_ids": ids, "labels": ids})
    return traffic


def test_one_process_is_silent() -> None:
    assert not count_one().calls


def count_stages(layout: ParallelConfig, microbatches: int, frozen: str = "") -> Traffic:
    model = hfscale.from_config(tiny("llama", num_hidden_layers=4), parallel=layout).train()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not any(part in name for part in frozen.split()))
    ids = torch.arange(B * S).view(B, S)
    batch = [{"input_ids": ids, "labels": ids}] * microbatches
    # In the first step a stage also tells the next one what it sends.
    hfscale.train_step(model, batch)
    with count_traffic() as traffic:
        hfscale.train_step(model, batch)
    return traffic


STREAM = B * S * H * 4


@pytest.mark.daily("zbv-2-edges3-4", "1f1b-4-edges2-4")
@pytest.mark.parametrize("microbatches", [4, 8])
@pytest.mark.parametrize(
    ("schedule", "pp_size", "edges"),
    [
        ("1f1b", 2, [1, 1]),
        ("gpipe", 4, [1, 2, 2, 1]),
        ("1f1b", 4, [1, 2, 2, 1]),
        ("zbv", 2, [2, 2]),
    ],
)
def test_streams_between_stages(
    pools: Pools, schedule: str, pp_size: int, edges: list[int], microbatches: int
) -> None:
    virtual = 2 if schedule == "zbv" else 1
    layout = ParallelConfig(pp_size=pp_size, pipeline_schedule=schedule, virtual_stages=virtual)
    for traffic, own in zip(
        pools(pp_size).run(count_stages, layout, microbatches), edges, strict=True
    ):
        # At each edge to another rank, the stream of every microbatch goes one way and its gradient the other.
        streams = {"send": microbatches * own, "recv": microbatches * own}
        assert traffic.calls == {**streams, "allgather": 1, "allreduce": 1}
        scalars = {"allgather": AGREEMENT + 8 * (1 + pp_size * virtual), "allreduce": 4}
        assert traffic.payload == {
            **{name: number * STREAM for name, number in streams.items()},
            **scalars,
        }


def test_no_gradient_goes_to_stages_that_do_not_train(pools: Pools) -> None:
    frozen = "embed_tokens layers.0. layers.1."
    ranks = pools(4).run(count_stages, ParallelConfig(pp_size=4), 5, frozen)
    sent = [(traffic.calls["send"], traffic.calls["recv"]) for traffic in ranks]
    # stages 0 and 1 train nothing: stage 2 is the first that anything goes back to
    assert sent == [(5, 0), (5, 5), (5, 10), (5, 5)]


@pytest.mark.daily("5-False")
@pytest.mark.parametrize("regather", [False, True])
@pytest.mark.parametrize("microbatches", [2, 5])
def test_sharded_stages_gather_and_reduce_once(
    pools: Pools, microbatches: int, regather: bool
) -> None:
    layout = ParallelConfig(pp_size=2, dp_shard_size=2, weights_regather=regather)
    # of one stage: what is gathered at once
    layers = 2
    rest = 1
    for traffic in pools(4).run(count_stages, layout, microbatches):
        assert traffic.calls["reduce_scatter"] == layers + rest
        gathers = layers * 2 * microbatches + rest if regather else layers + rest
        assert traffic.calls["allgather"] == gathers + 1  # the agreement
        assert traffic.calls["send"] == traffic.calls["recv"] == microbatches
        assert traffic.payload["send"] == traffic.payload["recv"] == microbatches * STREAM


def count_reductions(layout: ParallelConfig, microbatches: int) -> tuple[Traffic, list[int], int]:
    """Traffic of a step, entries of gradients that wait to be reduced before each forward pass, and of the model."""
    model = hfscale.from_config(tiny("llama", num_hidden_layers=4), parallel=layout).train()
    ids = torch.arange(B * S).view(B, S)
    waiting = []
    numbers = sum(parameter.numel() for parameter in model.parameters())  # of whole tensors

    def note(*_: object) -> None:
        found = 0
        groups = (group for state in _states(model) for group in state._fsdp_param_groups)
        for parameter in (each for group in groups for each in group.fsdp_params):
            added = parameter.unsharded_accumulated_grad
            grads = (added, getattr(parameter, "_unsharded_param", torch.empty(0)).grad)
            found += sum(grad.numel() for grad in grads if grad is not None)
        waiting.append(found)

    model.get_input_embeddings().register_forward_pre_hook(note)
    with count_traffic() as traffic:
        hfscale.train_step(model, [{"input_ids": ids, "labels": ids}] * microbatches)
    note()
    return traffic, waiting, numbers


@pytest.mark.daily("True")
@pytest.mark.parametrize("each", [False, True])
def test_what_waits_to_be_reduced(pools: Pools, each: bool) -> None:
    layers = 4
    rest = 1
    microbatches = 3
    layout = ParallelConfig(dp_shard_size=2, reduce_each_microbatch=each)
    for traffic, waiting, numbers in pools(2).run(count_reductions, layout, microbatches):
        assert traffic.calls["reduce_scatter"] == (layers + rest) * (microbatches if each else 1)
        assert waiting == ([0] * 4 if each else [0, numbers, numbers, 0])
        one = numbers * 4
        assert traffic.payload["reduce_scatter"] == pytest.approx(
            one * (microbatches if each else 1), rel=0.02
        )


@pytest.mark.daily("True")
@pytest.mark.parametrize("each", [False, True])
def test_what_waits_to_be_reduced_on_stages(pools: Pools, each: bool) -> None:
    layers = 2
    rest = 1
    microbatches = 4
    layout = ParallelConfig(pp_size=2, dp_shard_size=2, reduce_each_microbatch=each)
    first, _, last, _ = pools(4).run(count_reductions, layout, microbatches)
    for traffic, _, _ in (first, last):
        assert traffic.calls["reduce_scatter"] == (layers + rest) * (microbatches if each else 1)
    waiting = first[1]  # the first stage runs two forward passes ahead
    assert waiting[:2] == [0, 0]
    assert waiting[-1] == 0
    assert all(found == 0 for found in waiting) == each

"""PipeDream and PipeDream-2BW against a simulation of the same delays in one process, on stock models in float64."""

import gc
import tempfile
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import functional_call
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM, BartConfig

import hfscale
from hfscale import ConfigError, ParallelConfig, PlanError
from hfscale._compat.transformers.computing import enable_checkpointing
from hfscale.models.precision import keep_float64
from hfscale.testing import RankPool
from hfscale.testing.parity import ragged_batch
from hfscale.train.runtime import runtime_of
from tests.tiny_models import assign_stages, tiny

Pools = Callable[[int], RankPool]
RATE = 0.3
MOMENTUM = 0.5


def _batches(
    calls: int, microbatches: int, lengths: tuple[int, ...] = (9, 6)
) -> list[list[dict[str, Tensor]]]:
    generator = torch.Generator().manual_seed(3)
    return [
        [
            ragged_batch(
                generator, 67, 2, lengths[(call + i) % len(lengths)], masked=i == 1 and call == 1
            )
            for i in range(microbatches)
        ]
        for call in range(calls)
    ]


def _optimizer(parameters: list[Any]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=RATE, momentum=MOMENTUM)


def simulate(
    directory: Path, layout: ParallelConfig, calls: list[list[dict[str, Tensor]]]
) -> dict[str, Any]:
    """The papers' delays, written down stage by stage: which weights a batch uses, and when its gradient is applied."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float64).train()
    plan = assign_stages(model, layout)
    p = layout.size("pp")
    stage_of = {name: plan.stage_of(name) for name, _ in model.named_parameters()}
    named = dict(model.named_parameters())
    optimizers = [_optimizer([named[n] for n in named if stage_of[n] == s]) for s in range(p)]
    history = [
        [{n: w.detach().clone() for n, w in named.items() if stage_of[n] == s}] for s in range(p)
    ]
    losses = []
    for k, microbatches in enumerate(calls):
        # Stage s has seen the updates of batches 0 .. k - (p - s).
        if layout.pipeline_schedule == "pipedream":
            versions = [max(k - (p - 1 - s), 0) for s in range(p)]
        else:
            versions = [max(k - 1, 0)] * p
        used = {
            n: w.clone().requires_grad_()
            for s in range(p)
            for n, w in history[s][versions[s]].items()
        }
        counts = [int((m["labels"][:, 1:] != -100).sum()) for m in microbatches]
        total = torch.zeros((), dtype=torch.float64)
        for microbatch, count in zip(microbatches, counts, strict=True):
            if count:
                total = total + functional_call(model, used, (), microbatch).loss * count / sum(
                    counts
                )
        losses.append(total.detach())
        gradients = torch.autograd.grad(total, list(used.values()))
        for name, gradient in zip(used, gradients, strict=True):
            named[name].grad = gradient
        for s in range(p):
            optimizers[s].step()
            history[s].append({n: named[n].detach().clone() for n in history[s][0]})
    return {"losses": losses, "weights": {n: w.detach().clone() for n, w in named.items()}}


def run_rank(
    directory: str, layout: ParallelConfig, calls: list[Any], checkpointing: bool, evaluate: bool
) -> None:
    """One rank: the usual loop, then what is still under way."""
    expected = torch.load(Path(directory) / "expected.pt", weights_only=True)
    model = hfscale.from_pretrained(directory, parallel=layout, dtype=torch.float64).train()
    if checkpointing:
        enable_checkpointing(model, context_fn=lambda: (nullcontext(), keep_float64()))
    optimizer = _optimizer(list(model.parameters()))
    losses = []
    p = layout.size("pp")
    delay = 1 if layout.pipeline_schedule == "pipedream_2bw" else p - 1
    with keep_float64():
        for k, microbatches in enumerate(calls):
            loss = hfscale.train_step(
                model, microbatches if len(microbatches) > 1 else microbatches[0]
            )
            assert bool(torch.isnan(loss)) == (k < delay)
            losses.append(loss)
            optimizer.step()
            optimizer.zero_grad()
            if evaluate:
                assert torch.isfinite(hfscale.eval_step(model, microbatches))
        updates = 0
        for loss in hfscale.drain(model):
            updates += 1
            losses.append(loss)
            optimizer.step()
            optimizer.zero_grad()
    assert updates == min(delay, len(calls))
    torch.testing.assert_close(
        torch.stack(losses[min(delay, len(calls)) :]), torch.stack(expected["losses"])
    )
    runtime = runtime_of(model)
    for planned, parameter in runtime.parameters():
        wanted = planned.take(expected["weights"][planned.name], runtime.mesh.ranks)
        torch.testing.assert_close(
            parameter.detach(), wanted, rtol=1e-11, atol=1e-12, msg=planned.name
        )


def _check(
    pools: Pools,
    layout: ParallelConfig,
    calls: list[list[dict[str, Tensor]]],
    family: str = "llama",
    checkpointing: bool = False,
    evaluate: bool = False,
) -> None:
    depth = {"n_layer": 5} if family == "gpt2" else {"num_hidden_layers": 5}
    tied = {"tie_word_embeddings": True} if family == "gpt2" else {}
    with tempfile.TemporaryDirectory() as name:
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(tiny(family, **depth, **tied), dtype=torch.float64)
        model.save_pretrained(name)
        with keep_float64():
            torch.save(simulate(Path(name), layout, calls), Path(name) / "expected.pt")
        pools(layout.total_size).run(run_rank, name, layout, calls, checkpointing, evaluate)


@pytest.mark.slow
@pytest.mark.parametrize("pp_size", [2, 4])
def test_pipedream(pools: Pools, pp_size: int) -> None:
    layout = ParallelConfig(pp_size=pp_size, pipeline_schedule="pipedream")
    _check(pools, layout, _batches(7, 1))


@pytest.mark.daily("2-5")
@pytest.mark.parametrize(("pp_size", "microbatches"), [(2, 2), (2, 5), (4, 4)])
def test_two_versions(pools: Pools, pp_size: int, microbatches: int) -> None:
    layout = ParallelConfig(pp_size=pp_size, pipeline_schedule="pipedream_2bw")
    _check(pools, layout, _batches(4, microbatches))


@pytest.mark.daily("pipedream")
@pytest.mark.parametrize("schedule", ["pipedream", "pipedream_2bw"])
def test_fewer_calls_than_stages(pools: Pools, schedule: str) -> None:
    layout = ParallelConfig(pp_size=4, pipeline_schedule=schedule)
    _check(pools, layout, _batches(2, 1 if schedule == "pipedream" else 4))


@pytest.mark.daily("pipedream_2bw")
@pytest.mark.parametrize("schedule", ["pipedream", "pipedream_2bw"])
def test_recomputed_with_the_weights_of_the_forward_pass(pools: Pools, schedule: str) -> None:
    layout = ParallelConfig(pp_size=2, pipeline_schedule=schedule)
    _check(
        pools,
        layout,
        _batches(4, 1 if schedule == "pipedream" else 3),
        checkpointing=True,
        evaluate=True,
    )


@pytest.mark.daily("pipedream_2bw")
@pytest.mark.parametrize("schedule", ["pipedream", "pipedream_2bw"])
def test_with_tensor_parallelism(pools: Pools, schedule: str) -> None:
    layout = ParallelConfig(pp_size=2, tp_size=2, pipeline_schedule=schedule)
    _check(pools, layout, _batches(4, 1 if schedule == "pipedream" else 2), family="llama")


def test_a_tied_embedding_has_one_gradient(pools: Pools) -> None:
    layout = ParallelConfig(pp_size=2, pipeline_schedule="pipedream_2bw")
    with pytest.raises(PlanError, match="tie_word_embeddings=False"):
        hfscale.plan(tiny("gpt2"), ParallelConfig(pp_size=2, pipeline_schedule="pipedream"))
    _check(pools, layout, _batches(4, 3), family="gpt2")


def _refused(directory: str) -> list[str]:
    layout = ParallelConfig(pp_size=2, pipeline_schedule="pipedream")
    model = hfscale.from_pretrained(directory, parallel=layout)
    found = []
    for given in (_batches(1, 2)[0], []):
        with pytest.raises(ConfigError) as caught:
            hfscale.train_step(model, given)
        found.append(str(caught.value))
    assert list(hfscale.drain(model)) == []
    return found


def test_what_is_refused(pools: Pools, tmp_path: Path) -> None:
    AutoModelForCausalLM.from_config(tiny("llama", num_hidden_layers=4)).save_pretrained(tmp_path)
    several, none = pools(2).run(_refused, str(tmp_path))[0]
    assert "pass one batch per train_step" in several
    assert "empty list" in none


@pytest.mark.parametrize("schedule", ["pipedream", "pipedream_2bw"])
def test_plans_that_need_a_flush_are_refused(schedule: str) -> None:
    layout = ParallelConfig(pp_size=2, pipeline_schedule=schedule)
    sharded = ParallelConfig(pp_size=2, dp_shard_size=2, pipeline_schedule=schedule)
    with pytest.raises(ConfigError, match=f"{schedule} keeps several versions of the weights"):
        hfscale.plan(tiny("llama"), sharded)
    with pytest.raises(ConfigError, match="later microbatches in flight"):
        hfscale.plan(tiny("llama"), layout, mixed_precision="fp16")
    bart = BartConfig(vocab_size=67, d_model=32, encoder_layers=2, decoder_layers=2)
    with pytest.raises(PlanError, match="has no flush after each step, but the decoder of bart"):
        hfscale.plan(bart, layout, auto_class=AutoModelForSeq2SeqLM)


def _versions(directory: str, schedule: str) -> list[int]:
    """Copies of the weights that a rank holds after every call."""
    microbatches = 1 if schedule == "pipedream" else 4
    model = hfscale.from_pretrained(
        directory, parallel=ParallelConfig(pp_size=4, pipeline_schedule=schedule)
    ).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    own = [
        parameter
        for name, parameter in model.named_parameters()
        if "gate_proj" in name or "up_proj" in name
    ]

    def alive() -> set[int]:
        gc.collect()
        kept = [
            x for x in gc.get_objects() if type(x) is torch.nn.Parameter and x.shape == own[0].shape
        ]
        return {x.data_ptr() for x in kept if not x.is_meta}

    others = alive() - {parameter.data_ptr() for parameter in own}
    found = []
    for given in _batches(7, microbatches):
        hfscale.train_step(model, given if microbatches > 1 else given[0])
        found.append(len(alive() - others) // len(own))
        optimizer.step()
        optimizer.zero_grad()
    own[0].requires_grad_(False)
    with pytest.raises(
        ConfigError, match=r"finish these microbatches first \(for loss in hfscale\.drain"
    ):
        hfscale.train_step(model, given if microbatches > 1 else given[0])
    return found


@pytest.mark.slow
def test_versions_that_are_kept(pools: Pools, tmp_path: Path) -> None:
    AutoModelForCausalLM.from_config(tiny("llama", num_hidden_layers=4)).save_pretrained(tmp_path)
    for stage, found in enumerate(pools(4).run(_versions, str(tmp_path), "pipedream")):
        assert max(found) == found[-1] == 4 - stage
    for stage, found in enumerate(pools(4).run(_versions, str(tmp_path), "pipedream_2bw")):
        assert max(found) == found[-1] == (2 if stage < 3 else 1)


def _one_after_the_other(directory: str, abandon: bool) -> list[float]:
    layout = ParallelConfig(pp_size=2, pipeline_schedule="pipedream")
    for last in (False, True):
        model = hfscale.from_pretrained(directory, parallel=layout).train()
        for (given,) in _batches(3, 1):
            hfscale.train_step(model, given)
        if last:
            return [float(p.grad.norm()) for p in model.parameters() if p.grad is not None]
        if not abandon:
            list(hfscale.drain(model))
    raise AssertionError


def test_what_a_model_left_under_way_does_not_reach_the_next(pools: Pools, tmp_path: Path) -> None:
    AutoModelForCausalLM.from_config(tiny("llama", num_hidden_layers=4)).save_pretrained(tmp_path)
    drained = pools(2).run(_one_after_the_other, str(tmp_path), False)
    assert pools(2).run(_one_after_the_other, str(tmp_path), True) == drained

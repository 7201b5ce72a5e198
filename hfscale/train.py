"""One training step, and the gradient norm, whatever the layout."""

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ._host.transformers.classes import class_name
from ._host.transformers.computing import uses_flash_attention
from .errors import ConfigError
from .guards import before_step, without_gaps
from .parallel.data import one_reduction, reshard, set_gradient_sync
from .parallel.pipeline import AsynchronousPipeline, Pipeline, summed_over_stages
from .parallel.tensor.random import synchronize_random_streams
from .plan import ParameterPlan
from .runtime import Runtime, runtime_of
from .runtime.batches import Microbatch, agree, look_at, to_device, total_of, with_borders
from .runtime.runtime import local_tensor

Batch = Mapping[str, Any]


def train_step(model: nn.Module, batch: Batch | Sequence[Batch], *, label_smoothing: float = 0.0) -> Tensor:
    """Forward and backward over this rank's batch; leaves synchronized gradients in ``.grad``.

    Gradients and loss are those of the mean over *all* valid labels of the step - every microbatch on every distinct
    batch rank counts by its number of labels - so they do not depend on how the step was divided. What
    :class:`hfscale.RoutingConfig` adds to it is a mean over the tokens of the step likewise: it is in the gradients,
    and not in the loss that is returned; see :func:`hfscale.expert_load`. Gradients add to
    what ``.grad`` holds: zero them between steps, as always.

    Args:
        batch: the keyword arguments of one forward pass, ``labels`` included, or a list of such (gradient
            accumulation). Ranks that share a batch (tensor ranks) pass the same one; see :func:`hfscale.batch_rank`.
            Every rank passes the same number of microbatches; one without rows counts nothing. Through pipeline stages,
            the list is what goes through as microbatches; one batch is cut into ``num_microbatches`` along its rows.
            ``use_cache`` is ``False`` where it is left out, as in stock trainers: ``position_ids`` that begin anew then
            keep the examples of a packed row apart.
        label_smoothing: share, 0 to 1, of every target's probability that is spread evenly over the whole vocabulary,
            as in ``torch.nn.functional.cross_entropy``.

    Returns:
        the loss, a scalar without a graph, equal on every rank; 0 where the step has no valid label. Under the
        schedules without a flush, loss and gradients are those of an earlier batch: see :func:`drain`.
    """
    runtime = runtime_of(model)
    before_step(runtime)
    microbatches, count = _prepare(runtime, batch, train=True)
    synchronize_random_streams(runtime)
    with _routing_step(runtime, microbatches, train=model.training):
        return _train(runtime, model, microbatches, count, label_smoothing)


def _train(
    runtime: Runtime, model: nn.Module, microbatches: list[Microbatch], count: Tensor, label_smoothing: float
) -> Tensor:
    if isinstance(runtime.pipeline, AsynchronousPipeline):
        loss = runtime.pipeline.run(microbatches, count, label_smoothing, backward=True)
        _hand_out(runtime, runtime.pipeline)
        return loss
    if runtime.pipeline is not None:
        with summed_over_stages(runtime), _partial_sums_at_the_end(runtime):
            share = _through_stages(runtime, microbatches, count, label_smoothing, backward=True)
        return _sum_over_batches(runtime, share)
    assert runtime.loss is not None
    total: Tensor | None = None
    with _partial_sums_at_the_end(runtime):
        for index, microbatch in enumerate(microbatches):
            last = index == len(microbatches) - 1
            set_gradient_sync(runtime.model, last or bool(runtime.mesh.layout.reduce_each_microbatch))
            loss = runtime.loss.of(model, microbatch, count, label_smoothing)
            # The data axes average gradients over the distinct batches; the loss is a share of a sum.
            (loss * runtime.mesh.batch_world).backward()
            total = loss.detach() if total is None else total + loss.detach()
    assert total is not None
    return _sum_over_batches(runtime, total)


def drain(model: nn.Module) -> Iterator[Tensor]:
    """Finish what a schedule without a flush has under way; nothing under any other schedule.

    ``pipedream`` and ``pipedream_2bw`` hand out gradients of earlier batches than the last one: what is missing when a
    run ends is ``p - 1`` updates, or one. The loop goes on like the one before it::

        for loss in hfscale.drain(model):
            hfscale.clip_grad_norm_(model, 1.0)
            optimizer.step()
            optimizer.zero_grad()

    Yields:
        the next batch's loss, whenever gradients are in ``.grad``; as many times on every rank. With those that
        ``train_step`` returned, these are the losses of all batches, each once.
    """
    runtime = runtime_of(model)
    if isinstance(runtime.pipeline, AsynchronousPipeline):
        for loss in runtime.pipeline.drain():
            _hand_out(runtime, runtime.pipeline)
            yield loss


def _hand_out(runtime: Runtime, pipeline: AsynchronousPipeline) -> None:
    """Add to ``.grad`` what has come to its end; nothing while the pipeline fills."""
    if pipeline.ready():
        with summed_over_stages(runtime):
            pipeline.expose()


@torch.no_grad()
def eval_step(model: nn.Module, batch: Batch | Sequence[Batch], *, label_smoothing: float = 0.0) -> Tensor:
    """The loss :func:`train_step` would return, without gradients, in whatever mode the model is."""
    runtime = runtime_of(model)
    microbatches, count = _prepare(runtime, batch, train=False)
    with _routing_step(runtime, microbatches, train=False):
        if runtime.pipeline is not None:
            share = _through_stages(runtime, microbatches, count, label_smoothing, backward=False)
            return _sum_over_batches(runtime, share)
        assert runtime.loss is not None
        total = sum(runtime.loss.of(model, microbatch, count, label_smoothing) for microbatch in microbatches)
        reshard(runtime.model)  # no backward pass will
    return _sum_over_batches(runtime, torch.as_tensor(total, device=runtime.mesh.device))


def _through_stages(
    runtime: Runtime, microbatches: list[Microbatch], count: Tensor, label_smoothing: float, backward: bool
) -> Tensor:
    """One step of the pipeline: this rank's share of the loss, which only the last stage has."""
    assert runtime.pipeline is not None
    regather = bool(runtime.mesh.layout.weights_regather)
    with one_reduction(runtime.model, backward=backward, regather=regather):
        return runtime.pipeline.run(microbatches, count, label_smoothing, backward)


@torch.no_grad()
def clip_grad_norm_(model: nn.Module, max_norm: float, norm_type: float = 2.0) -> Tensor:
    """Scale gradients so that their global norm is at most ``max_norm``; returns the norm before.

    Every parameter counts once, wherever its pieces are; the result is the same scalar on every rank. Same formula as
    ``torch.nn.utils.clip_grad_norm_``.
    """
    runtime = runtime_of(model)
    mesh, norm_type = runtime.mesh, float(norm_type)
    infinite = norm_type == float("inf")
    # Gradients by the axes their parameter is cut over: their norms are summed over just those ranks.
    by_axes: dict[tuple[str, ...], list[Tensor]] = {tuple(c.axis for c in p.cuts): [] for p in runtime.plan.owned()}
    gradients = []
    for planned, parameter in runtime.parameters():
        held = by_axes[tuple(cut.axis for cut in planned.cuts)]
        if parameter.grad is not None:
            gradients.append(local_tensor(parameter.grad))
            held += _counted(planned, gradients[-1], mesh.ranks) if runtime.counts(planned) else []
    total: Tensor | None = None
    for axes, grads in sorted(by_axes.items()):  # same order on every rank, also where a rank holds none
        wide = torch.float64 if any(grad.dtype == torch.float64 for grad in grads) else torch.float32
        norms = _norms([grad for grad in grads if grad.numel()], norm_type, wide)
        if norms:
            each = torch.stack(norms)
            part = each.max() if infinite else each.pow(norm_type).sum()
        else:
            part = torch.zeros((), dtype=wide, device=mesh.device)
        for group in mesh.groups(*axes):
            dist.all_reduce(part, op=dist.ReduceOp.MAX if infinite else dist.ReduceOp.SUM, group=group)
        total = part if total is None else torch.maximum(total, part) if infinite else total + part
    assert total is not None
    for group in mesh.groups("pp"):
        wide, total = total.dtype, total.double()  # stages may differ in what they hold
        dist.all_reduce(total, op=dist.ReduceOp.MAX if infinite else dist.ReduceOp.SUM, group=group)
        total = total.to(wide)
    norm = total if infinite else total.pow(1.0 / norm_type)
    coefficient = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for same in _alike(gradients):
        torch._foreach_mul_([gradients[i] for i in same], coefficient.to(gradients[same[0]].dtype))
    return norm


def _norms(grads: list[Tensor], norm_type: float, dtype: torch.dtype) -> list[Tensor]:
    """The norm of each, in order, by one launch for all that are alike."""
    found: dict[int, Tensor] = {}
    for same in _alike(grads):
        found.update(zip(same, torch._foreach_norm([grads[i] for i in same], norm_type, dtype=dtype), strict=True))
    return [found[i] for i in range(len(grads))]


def _alike(tensors: list[Tensor]) -> list[list[int]]:
    """Places of the tensors that one launch can take: of one device and type."""
    groups: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for place, tensor in enumerate(tensors):
        groups.setdefault((tensor.device, tensor.dtype), []).append(place)
    return list(groups.values())


def _counted(planned: ParameterPlan, grad: Tensor, ranks: dict[str, int]) -> list[Tensor]:
    """The pieces of this rank's gradient that no earlier rank has a copy of."""
    found = planned.counted(ranks)
    if found is None:
        return [grad]
    dim, spans = found
    return [grad.narrow(dim, start, stop - start) for start, stop in spans]


def batch_rank(model: nn.Module) -> int:
    """Which of the distinct batches of a step this rank gets: ``0 <= batch_rank < batch_world``."""
    return runtime_of(model).mesh.batch_rank


def batch_world(model: nn.Module) -> int:
    """How many distinct batches a step has; ranks that share one (tensor ranks) have the same ``batch_rank``."""
    return runtime_of(model).mesh.batch_world


def _prepare(runtime: Runtime, batch: Batch | Sequence[Batch], train: bool) -> tuple[list[Microbatch], Tensor]:
    """The microbatches on this rank's device, and the number of valid labels in the whole step (at least 1)."""
    _refuse_model(runtime)
    assert runtime.loss is not None
    mesh, pipeline = runtime.mesh, runtime.pipeline
    stages = pipeline if pipeline is not None and pipeline.agrees(train) else None
    if runtime.first_batch is not None:  # a step compares its own
        runtime.first_batch.remove()
    given, rows, refused = list[dict[str, Any]](), list[list[int]](), None
    try:
        given, rows = _agreed(runtime, batch, train, stages)
        runtime.loss.refuse_outside(sum(outside for _, outside, _ in rows))
    except ConfigError as error:  # ranks with other batches must not wait for this one
        refused = error
    valid = sum(valid for valid, _, _ in rows)
    total = total_of(
        valid, refused, mesh.control if mesh.batch_world > 1 else None, mesh.ranks["tp"] == mesh.ranks["pp"] == 0
    )
    if uses_flash_attention(runtime.model):
        given = [with_borders(b, runtime.model) if row[2] else b for b, row in zip(given, rows, strict=True)]
    microbatches = to_device(given, rows, mesh.device)
    if _takes_use_cache(runtime.model):
        for microbatch in microbatches:
            microbatch.setdefault("use_cache", False)  # a cache of keys and values is for generation
    return microbatches, torch.full((), max(total, 1), dtype=torch.int64, device=mesh.device)


def _agreed(
    runtime: Runtime, batch: Batch | Sequence[Batch], train: bool, stages: Pipeline | None
) -> tuple[list[dict[str, Any]], list[list[int]]]:
    """The microbatches, as ranks that share them agree on, and what :func:`agree` says of each."""
    assert runtime.loss is not None
    sharing = runtime.mesh.sharing
    given, seen, refused = list[dict[str, Any]](), None, None
    told: tuple[list[int], list[Tensor]] = [], []
    try:
        given = _microbatches(runtime, batch)
        told = told if stages is None else stages.about(train)
        seen = look_at(given, runtime.loss.look, hashed=sharing is not None)
    except ConfigError as error:  # the others must not wait for this rank
        refused, told = error, told if stages is None else stages.about(False)
    rows, ranks = agree(given, seen, train, sharing if runtime.pipeline is stages else None, *told)
    if refused is not None:
        raise refused
    if stages is not None:
        stages.hear(ranks)
    return given, rows


def _refuse_model(runtime: Runtime) -> None:
    """What no batch can mend."""
    if runtime.loss is None:
        raise ConfigError(
            f"train_step normalizes a causal language model's loss, and {class_name(runtime.model)} has another "
            f"(loss_type {getattr(runtime.model, 'loss_type', None)!r}): loop over loss = model(**batch).loss and "
            "loss.backward() instead"
        )
    if unknown := runtime.unplanned_parameters():
        raise ConfigError(
            f"{len(unknown)} parameters that train are not in the plan, {unknown[0]} for one, so nobody would sum "
            "their gradients: give adapters to hfscale.get_peft_model(model, config), and change a model otherwise "
            "before it is parallelized"
        )


def _microbatches(runtime: Runtime, batch: Batch | Sequence[Batch]) -> list[dict[str, Any]]:
    """What goes through the model, as it was given."""
    given = [dict(each) for each in ([batch] if isinstance(batch, Mapping) else batch)]
    if not given:
        raise ConfigError("train_step got an empty list of microbatches: pass at least one")
    for microbatch in given:
        if microbatch.get("labels") is None:
            raise ConfigError(f"train_step needs 'labels' in every batch, and found only {', '.join(microbatch)}")
        _refuse_half_answers(runtime, microbatch)
    given = [dict(without_gaps(runtime, microbatch)) for microbatch in given]
    if runtime.pipeline is not None:
        given = runtime.pipeline.share_out(given)
    if getattr(runtime.model.config, "output_router_logits", False) and len(given) * runtime.mesh.batch_world > 1:
        raise ConfigError(
            "output_router_logits=True adds the router's loss to every microbatch's share of the token mean, so it "
            f"would count {len(given) * runtime.mesh.batch_world} times in this step: set "
            "config.output_router_logits = False and load the model with routing=hfscale.RoutingConfig(balance_loss="
            "...), whose weight is the same however a step is divided"
        )
    return given


def _refuse_half_answers(runtime: Runtime, microbatch: Batch) -> None:
    """What a rank could compute from its part only, or could not make a loss of."""
    if microbatch.get("logits_to_keep"):
        raise ConfigError(
            "logits_to_keep leaves positions without logits, and the loss is over all of them: leave it out"
        )
    wanted = microbatch.get("output_router_logits")
    if runtime.pipeline is not None and (
        getattr(runtime.model.config, "output_router_logits", False) if wanted is None else wanted
    ):
        raise ConfigError(
            "output_router_logits=True makes a loss of what the layers of all stages compute: leave it out, and load "
            "the model with routing=hfscale.RoutingConfig(balance_loss=...), or use pp_size=1"
        )


def _routing_step(runtime: Runtime, microbatches: list[Microbatch], train: bool) -> AbstractContextManager[None]:
    """Within: one step's passes, as the routing of experts sees them."""
    return nullcontext() if runtime.routing is None else runtime.routing.step(microbatches, train)


def _partial_sums_at_the_end(runtime: Runtime) -> AbstractContextManager[None]:
    """Within: gradients that are partial over the tensor ranks stay so; they are summed once, on leaving."""
    if runtime.sums is None:
        return nullcontext()
    reshard(runtime.model)  # or gathered weights would be taken for the parameters
    partial = [parameter for planned, parameter in runtime.parameters() if "tp" in planned.partial]
    # A hook (an optimizer that steps in backward) must see whole gradients: they are summed at once then.
    if any(p._backward_hooks or getattr(p, "_post_accumulate_grad_hooks", None) for p in partial):
        return nullcontext()
    return runtime.sums.at_the_end([p for p in partial if p.requires_grad], local_tensor)


def _sum_over_batches(runtime: Runtime, total: Tensor) -> Tensor:
    for group in (*runtime.mesh.batch_groups, *runtime.mesh.groups("pp")):
        dist.all_reduce(total, group=group)
    return total


def _takes_use_cache(model: nn.Module) -> bool:
    return "use_cache" in inspect.signature(model.forward).parameters

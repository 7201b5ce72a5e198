"""Train and evaluate a model that is split into pipeline stages.

Data flow of one step::

    batch --share_out--> microbatches, the same on all stages
    order of the schedule --rank programs--> per microbatch and stage: receive, forward or backward pass, send
    last stage: loss of every microbatch, a term of the step's mean over tokens

Every stage gets the full batch (ids, masks, positions) and computes masks and rotary tables from the batch. Stages only
send hidden states to the next stage, and gradients of the hidden states back.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..._compat.replaced import attribute_replaced
from ..._compat.torch import is_compiled
from ..._compat.transformers.classes import class_name
from ..._compat.transformers.computing import encoder_outputs, recomputes
from ...config.parallel import ParallelConfig
from ...errors import ConfigError
from ...plan import Stage
from ...plan.feature_plans import TowersPlan, recomputed
from ...plan.sequence_split import tokens_of
from ...train.runtime import Executor, Objective, Part, Runtime
from ...train.runtime.batches import Microbatch
from .agreement import StageAgreement, TiedGradients
from .csv_table import read_csv
from .microbatches import Batch, hidden_shape, is_of_towers, share_out, targets_of, with_targets
from .orders import check_layout, order_of
from .placeholders import run_stages_apart
from .split import splits_exactly
from .timeline import Order, stage_ranks
from .transfers import ActivationTypes, Step, rank_programs, run_program
from .worker import StagePlace, StageWorker

_LABELS = ("labels", "shift_labels", "num_items_in_batch")


def stage_places(layout: ParallelConfig) -> dict[int, int] | None:
    """Return the pipeline rank of each stage if the schedule is a CSV file, else ``None``.

    Raises:
        ConfigError: the schedule cannot run the layout's stages and microbatches.
    """
    schedule = str(layout.pipeline_schedule)
    if schedule.endswith(".csv"):
        actions_of = read_csv(Path(schedule))
        rank_programs(actions_of, schedule)  # raises if the order cannot be run
        given = 1 + max(action.microbatch for actions in actions_of for action in actions)
        return stage_ranks(order_of(layout, layout.num_microbatches or given))
    check_layout(layout)
    return None


class Pipeline(Executor):
    """Run the stages of one rank under a schedule."""

    reports: StageAgreement

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._mesh = runtime.mesh
        stages = runtime.plan.stages
        layout = runtime.mesh.layout
        assert stages is not None
        self._stages = stages
        self._layout = layout
        self._rank = self._mesh.pp_rank
        group = self._mesh.group("pp")
        assert group is not None
        self._group = group
        own = stages.of_rank(self._rank)
        self._running = run_stages_apart(runtime.model, stages, own)
        self._types = ActivationTypes(runtime.mesh)
        self._ties = TiedGradients(runtime)
        self.workers = [self._worker(stage) for stage in own]
        self.reports = StageAgreement(runtime)
        # cached, because every step calls both
        self._accepts, self._program = (
            cache(self._can_run),
            cache(self._program_of),
        )
        self._batches: Sequence[Microbatch] | dict[int, Microbatch] = ()
        self._objective: Objective | None = None
        self._towers = runtime.plan.feature(TowersPlan)
        self._trains = True
        self._uncut = False
        self._losses: list[Tensor] = []
        runtime.model.register_forward_pre_hook(self._refuse_others)
        runtime.model.generate = self._refuse_generate

    def _worker(self, stage: Stage) -> StageWorker:
        place = StagePlace(
            stage.index, self._stages.ranks, self._group, self._mesh.streams, self._mesh.device
        )
        compute = partial(self._compute, stage)
        shape = partial(self._shape, stage.index)
        worker = StageWorker(place, compute, shape, self._runtime.model.parameters)
        data = self._runtime.data  # installed before the stages
        worker.accumulate = data.accumulate_late_gradients
        worker.reduce = data.after_microbatch
        return worker

    def share_out(self, given: Sequence[Batch]) -> list[dict[str, Any]]:
        """Split batches into the microbatches of one step: see :func:`.microbatches.share_out`."""
        accepts = self._accepts
        towers = self._towers is not None
        if self._stages.stacks is not None:
            model = self._runtime.model
            decoder = model.get_submodule(self._stages.stacks.decoder)
            given = [with_targets(model, decoder, batch) for batch in given]
        wanted = (
            len(given) if self._uncut and accepts(len(given)) else self._layout.num_microbatches
        )
        return share_out(given, wanted, self._layout.pp, accepts, towers)

    def uncut(self) -> AbstractContextManager[None]:
        """Do not split batches inside the ``with`` block: each batch is a microbatch, if the schedule accepts their
        number.
        """
        return attribute_replaced(self, "_uncut", True)

    def fewest_rows(self) -> int:
        """Return the smallest number of rows that a batch can have: the number of microbatches, with
        one row in each.
        """
        # Every schedule can run 2 * pp_size microbatches.
        return int(self._layout.num_microbatches or 2 * self._layout.pp)

    def passes_together(self, microbatches: int) -> int:
        """Return how many passes of a step use collectives over data or expert ranks: to gather weights, reduce
        gradients or exchange tokens.

        Return 0 if no pass does, because weights are gathered and gradients are reduced once per step.
        """
        layout = self._layout
        each = layout.weights_regather or layout.reduce_each_microbatch or layout.expert_batches > 1
        return microbatches if each else 0

    def check_plain_call(self, call: str) -> None:
        """Raise :class:`ConfigError` for ``loss.backward()``, because backward passes run only inside the pipeline's
        schedule.
        """
        raise ConfigError(
            f"{self._layout.describe()}: {call} cannot run backward through pipeline stages: use loss "
            "= hfscale.train_step(model, batch), which leaves the gradients in .grad"
        )

    def run(
        self, model: nn.Module, batches: Sequence[Microbatch], objective: Objective, backward: bool
    ) -> Tensor:
        """Run the passes of one step: see :meth:`hfscale.train.runtime.Executor.run`.

        A stage runs the stock model without wrappers such as ``torch.compile``.
        """
        runtime = self._runtime
        if is_compiled(model):
            raise ConfigError(
                f"{self._layout.describe()}: torch.compile(model) compiles a forward pass that stages do not call: "
                "leave torch.compile out, or compile each layer in place (for layer in model.model.layers: "
                "layer.compile())"
            )
        if not backward:
            return runtime.sum_of_shares(self._all_passes(batches, objective, backward=False))
        with runtime.around(Part.around_gradients), self._ties.summed():
            share = self._all_passes(batches, objective, backward=True)
        return runtime.sum_of_shares(share)

    def _all_passes(
        self, batches: Sequence[Microbatch], objective: Objective, backward: bool
    ) -> Tensor:
        """Run all passes in the schedule's order; return the loss of this rank's batch on the last stage, else 0."""
        runtime = self._runtime
        with runtime.around(Part.around_interleaved, backward):
            self._set_training_stages(backward)
            self._batches = batches
            self._objective = objective
            self._trains = backward
            self._losses = []
            self._tell_workers(backward)
            try:
                program = self._program(len(batches), backward)
                run_program(program, {worker.index: worker for worker in self.workers})
                for worker in self.workers:
                    worker.finish()
                self._types.finish()
            finally:
                self._batches = ()
                self._objective = None
                for worker in self.workers:
                    worker.reset()
            total = torch.zeros((), dtype=self.reports.loss_type, device=self._mesh.device)
            return total + torch.stack(self._losses).sum() if self._losses else total

    def _can_run(self, num_microbatches: int) -> bool:
        try:
            return bool(self._order(num_microbatches))
        except ConfigError:
            return False

    def _order(self, num_microbatches: int) -> Order:
        return order_of(self._layout, num_microbatches)

    def _program_of(self, num_microbatches: int, backward: bool) -> list[Step]:
        actions = self._order(num_microbatches)
        if not backward:
            actions = tuple(
                tuple(a._replace(paired=False) for a in row if a.kind == "forward")
                for row in actions
            )
        return rank_programs(actions)[self._rank]

    def expect(self, trailing: tuple[int, ...], dtype: torch.dtype) -> None:
        """Prepare to run this rank without the other ranks, with an assumed shape and dtype of received hidden states.

        All stages are assumed to train.
        """
        self._types.expect(trailing, dtype)
        self.reports.alone = True

    def _set_training_stages(self, backward: bool) -> None:
        """Tell this rank's stages, before the first transfer of a step, whether they train and whether the stage before
        them does.

        Raises:
            ConfigError: the step has a backward pass, and no parameter of any stage trains.
        """
        trains = self.reports.training_stages()
        if backward and not any(trains):
            raise ConfigError(
                "train_step must have a parameter that trains, got requires_grad=False for every parameter of every "
                "stage: call requires_grad_(True) for those to train, or use hfscale.eval_step"
            )
        for worker in self.workers:
            worker.trains = trains[worker.index]
            worker.trains_before = worker.index > 0 and trains[worker.index - 1]

    def _tell_workers(self, backward: bool) -> None:
        reenters = recomputes(self._runtime.contents.modules)
        planned = recomputed(self._runtime.plan)
        again = reenters or bool(planned.layers or planned.modules)
        again = again or (self._objective is not None and self._objective.recomputes)
        # Backward passes are not split if layers are recomputed, because the second half would recompute a layer once
        # per weight. They are not split if weights are resharded either, because weights that are gathered again
        # between the halves are different tensors.
        regathers = self._layout.weights_regather and self._mesh.data_world > 1
        # a compiled layer is one node of the graph, which cannot be split
        compiled = bool(self._runtime.compiled)
        splits = backward and not (again or regathers or compiled) and splits_exactly()
        for worker in self.workers:
            worker.has_backward = backward
            worker.recomputes = reenters
            worker.splits = splits

    def _compute(self, stage: Stage, arrived: Tensor | None, microbatch: int) -> Tensor:
        batch = self._batches[microbatch]
        last = stage.index == len(self._stages.stages) - 1
        tokens = hidden_shape(batch)[1]
        inputs = batch.like(
            {name: value for name, value in batch.items() if self._reads(stage, name, value)}
        )
        arrives = tokens if arrived is not None else None
        hold = self._runtime.around(Part.around_stage_pass, arrives, not last)
        with hold, self._running(stage) as passage:
            passage.arrive(arrived, tokens_of(batch), targets_of(batch))
            if passage.memory is not None:
                inputs["encoder_outputs"] = encoder_outputs(passage.memory)
            if last:
                assert self._objective is not None
                loss = self._objective.loss(self._runtime.model, inputs, microbatch)
                self._losses.append(loss.detach())
                loss = loss * self._runtime.loss_factor()
            else:
                with inputs.kept_apart():
                    self._runtime.model(**inputs)
            leaving = passage.leaving
            missed = arrived is not None and not passage.arrived
        if missed or (leaving is None and not last):
            raise ConfigError(
                f"{class_name(self._runtime.model)} skipped layers at the ends of stage {stage.index} in this "
                "pass, so no hidden states entered or left the stage: switch off LayerDrop, or use pp_size=1"
            )
        if last:
            return loss
        assert leaving is not None
        if self._stages.ranks[stage.index + 1] != self._rank:
            leading = self._leading(stage.index + 1, batch)
            peer = self._peer(stage.index + 1)
            self._types.announce(stage.index + 1, leaving, leading, peer, self._trains)
        return leaving

    def _reads(self, stage: Stage, name: str, value: Any) -> bool:
        """Return whether a stage gets an input of the batch: labels go only to the last stage, inputs of vision or
        audio towers only to the first, all others to every stage.
        """
        added = self._runtime.plan.batch_fields.get(name)
        if name in _LABELS or (added is not None and added.is_target):
            return stage.index == len(self._stages.stages) - 1
        return stage.index == 0 or self._towers is None or not is_of_towers(value)

    def _shape(self, stage: int, microbatch: int) -> tuple[torch.Size, torch.dtype]:
        leading = self._leading(stage, self._batches[microbatch])
        tail, dtype = self._types.learn(stage, self._peer(stage - 1), self._trains)
        return torch.Size((*leading, *tail)), dtype

    def _leading(self, stage: int, batch: Microbatch) -> tuple[int, int]:
        """Return the numbers of samples and of tokens per sample in the hidden states that a stage receives on this
        rank.

        If hidden states are sharded along the sequence, only this rank's tokens count.
        """
        samples, tokens = hidden_shape(batch)
        if self._stages.stacks is not None:
            return samples, tokens + targets_of(batch)[1] * self._stages.arrives(stage)[1]
        if self._trains:
            tokens = self._runtime.sequence.local_seqlen(tokens)
        return samples, tokens

    def _peer(self, stage: int) -> int:
        return dist.get_global_rank(self._group, self._stages.ranks[stage])

    def _refuse_generate(self, *_: Any, **__: Any) -> None:
        raise ConfigError(
            f"{self._layout.describe()}: generate needs all layers for every token, but a rank has only some: save the "
            "model (hfscale.save_pretrained(model, directory), on every rank), and generate with "
            "hfscale.from_pretrained(directory, parallel=hfscale.ParallelConfig(tp_size=...)), or with stock "
            "transformers"
        )

    def _refuse_others(self, *_: Any) -> None:
        if self._objective is None:
            raise ConfigError(
                f"{self._layout.describe()}: a rank holds {len(self.workers)} of {len(self._stages.stages)} stages, so "
                "its model cannot be called by itself: use hfscale.train_step and hfscale.eval_step"
            )

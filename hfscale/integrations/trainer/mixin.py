"""Define ``hfscale.Trainer``, and the mixin that adapts any subclass of ``transformers.Trainer``.

Data flow of a step whose loss is the model's own (any layout)::

    loader: the rows of this rank's batch --> microbatches wait for the last of their step --> hfscale.train_step
    --> accelerator.clip_grad_norm_ (norm of the full model) --> optimizer --> schedule --> logs, equal on all ranks

If a subclass or a function computes the loss, Trainer's own step runs, in any layout without pipeline stages.
"""

import copy
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from accelerate.utils import is_peft_model
from torch import Tensor, nn
from torch.utils.data import IterableDataset
from transformers import TrainingArguments

from ..._compat.replaced import attribute_replaced
from ..._compat.transformers import trainer
from ..._compat.trl import (
    DataHooks,
    DistillationHooks,
    count_microbatch,
    is_trl,
    remember_generation_sizes,
)
from ...api import build
from ...api.assemble import compile_layers
from ...config.environment import started_processes
from ...config.parallel import ParallelConfig
from ...errors import ConfigError
from ...train.runtime import find_runtime, runtime_of
from ...train.runtime.handover import check_optimizers
from ...train.step import logged_metrics, train_step
from ...train.teacher import Teacher
from . import evaluation
from .agreed_control import AgreedControl
from .files import Checkpoints, resumed_from
from .fused_head import step_of_scores
from .generations import agree_anew, batches_gathered, count_generations, log_difference
from .items_in_batch import scaled_if_divided
from .means_over_ranks import means_over_ranks
from .plain_modules import become_stock, is_of_stock
from .reference_adapter import ReferenceAdapter
from .refusals import (
    check_cached,
    check_dispatch,
    check_engine,
    check_layout_of,
    check_model,
    check_run,
    check_trainer,
)
from .resume_callbacks import TrainerRandomStreams
from .seams import Seams, compiler_of, options_of
from .trainer_accelerator import TrainerAccelerator
from .trainer_arguments import by_name, with_default_config, with_second_models
from .trainer_batches import cut_by_schedule, first_examples, warn_of_repeated
from .trainer_optimizers import OF_BACKWARD, named_optimizer, optimizer_name


class TrainerMixin(Checkpoints, DataHooks):
    """Let a Trainer train parallelized models: ``class MyTrainer(hfscale.TrainerMixin, transformers.Trainer)``.

    Args:
        model: a parallelized model, or a stock model with the same values on every rank, which is sharded in place. In
            one process, any module that the stock Trainer accepts.
        args: positional arguments of the Trainer; ``kwargs`` are its keyword arguments.
        parallel: the layout for a stock model; by default, the layout of the ``PARALLELISM_CONFIG_*`` variables.

    Raises:
        ConfigError: the arguments cannot work in the layout; raised before anything is built.
    """

    optimizer: Any

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        remember_generation_sizes(cls)

    def __init__(
        self, model: Any = None, *args: Any, parallel: ParallelConfig | None = None, **kwargs: Any
    ) -> None:
        init = super().__init__
        if is_of_stock(model, parallel):
            become_stock(self)
            init(model, *args, **kwargs)
            return
        given, named = by_name(init, args, kwargs)
        named = with_default_config(type(self), init, model, named)
        arguments = next(
            (
                argument
                for argument in (*given, *named.values())
                if isinstance(argument, TrainingArguments)
            ),
            None,
        )
        if arguments is not None:
            check_run(arguments)
            if not is_trl(type(self)):  # TRL's trainers raise their own error for streams first
                check_dispatch(arguments)
            check_engine(type(self), arguments)
        self._parallel, self._waiting = parallel, list[Any]()
        self._items: Any = None
        context = ExitStack()
        layout = parallel
        if layout is None and ParallelConfig().total_size == started_processes():
            layout = ParallelConfig()  # the environment's layout
        if isinstance(model, nn.Module):
            model = self._parallelized(model, arguments)
            layout = runtime_of(model).mesh.layout
            context.enter_context(trainer.taken_for_adapted(runtime_of(model).model))
        if arguments is not None and layout is not None:
            count_generations(arguments, layout.batch_world)
        named = with_second_models(
            named, layout or ParallelConfig(), partial(self._cut, layout, arguments)
        )
        seed = {} if arguments is None else {"seed": arguments.seed}
        self._seams = Seams(layout, options_of(arguments) | seed)
        if isinstance(model, nn.Module):
            self._seams.train(model)
            if is_peft_model(model):
                context.enter_context(ReferenceAdapter(model, self._seams.heads).may_be_added())
        self._while_made = (
            context  # models that Trainer's __init__ creates enter contexts into this stack
        )
        with context, self._seams.while_made(type(self)):
            init(model, *given, **named)
        if not isinstance(self, TrainerMixin):  # model_init has created a plain module
            return
        self._while_made = ExitStack()
        if self.optimizer is not None:  # the script's own optimizer
            check_optimizers([self.optimizer], [self.runtime])
        agree_anew(self)
        self._seams.follow_casts()
        self._streams = TrainerRandomStreams(self)
        self._streams.follow(self.callback_handler)
        self._agreed = AgreedControl(self)
        self._agreed.follow(self.callback_handler)
        self.check_loss()

    def check_loss(self) -> None:
        """Raise :class:`ConfigError` for a loss or options that the layout cannot run."""
        evaluation.check_predictions(self)
        check_trainer(self, self._scores_tokens)

    def _parallelized(self, model: Any, arguments: TrainingArguments | None) -> Any:
        """Return a parallelized model unchanged, or parallelize a stock model with the requested layout."""
        runtime = find_runtime(model)
        asked = self._parallel
        if runtime is not None:
            if asked is not None and asked != runtime.mesh.layout:
                raise ConfigError(
                    f"parallel={asked.describe()} was passed to a trainer whose model was already built with "
                    f"{runtime.mesh.layout.describe()}, which cannot be changed: leave parallel out"
                )
            return model
        return self._cut(asked, arguments, model)

    def _cut(
        self, asked: ParallelConfig | None, arguments: TrainingArguments | None, model: Any
    ) -> Any:
        layout = asked or ParallelConfig()
        check_layout_of(model, layout)
        training = model.training
        # Layers are compiled as long as this Trainer uses the model.
        options = options_of(arguments) | {"compile": False}
        return build.parallelize(model, layout, **options).train(training)

    # --- hooks of Trainer ---------------------------------------------------------------------------------------------

    def create_accelerator_and_postprocess(self) -> None:
        """Create Trainer's accelerator, which counts ranks that share a batch (tensor ranks, for example) once."""
        check_run(self.args)
        check_dispatch(self.args)
        with trainer.accelerator_made_by(TrainerAccelerator):
            super().create_accelerator_and_postprocess()
        if self.model is not None:
            self._adopt(self.model)

    def call_model_init(self, trial: Any = None) -> Any:
        """Call the user's ``model_init``, and parallelize a stock model."""
        made = super().call_model_init(trial)
        if is_of_stock(made, self._parallel):
            become_stock(self)
            self.create_accelerator_and_postprocess()
            return made
        model = self._parallelized(made, self.args)
        self._while_made.close()  # it holds the model of an earlier run
        # Trainer sets this only on its first model.
        model.config.use_cache = getattr(self.args, "use_cache", False)
        self._while_made.enter_context(trainer.taken_for_adapted(runtime_of(model).model))
        self._adopt(model)
        return model

    def _adopt(self, model: Any) -> None:
        check_model(runtime := runtime_of(model), self.args)
        compile_layers(runtime, compiler_of(self.args) or runtime.options.compile)
        self.accelerator.adopt(model)

    @property
    def _scores_tokens(self) -> bool:
        """Return whether a TRL loss is computed from the outputs of the fused head: the log-probability of each label,
        the entropy at each position and similar numbers.
        """
        smoothed = bool(self.args.label_smoothing_factor) and not hasattr(
            self, "label_pad_token_id"
        )
        # With some releases of transformers, TRL's trainers set this to a string.
        own_loss = callable(self.compute_loss_func)
        return bool(self._seams.heads) and not own_loss and not smoothed

    @property
    def uses_train_step(self) -> bool:
        """Return whether steps run :func:`hfscale.train_step`, because the loss is the model's own mean over labels.

        If the model does not divide its loss by a step's number of labels, Trainer's loss is the mean, or the sum, of
        the means over the labels of each batch. Trainer's own step computes such a loss, except with pipeline stages,
        with data ranks, or with smoothed labels. In these cases, ``train_step`` runs, and :meth:`_divisor` returns the
        divisor of each batch.
        """
        runtime = self.runtime
        within_backward = optimizer_name(self.args) in OF_BACKWARD
        if not self.knows_loss or runtime.loss is None or within_backward:
            return False
        spread = runtime.plan.stages is not None or runtime.mesh.data_world > 1
        needed = spread or (self.args.label_smoothing_factor and runtime.plan.loss)
        return bool((self.model_accepts_loss_kwargs and runtime.loss.divides) or needed)

    @property
    def knows_loss(self) -> bool:
        """Return whether hfscale can compute the loss: it is the model's own loss, and hfscale knows over what it is a
        mean.
        """
        return trainer.has_stock_loss(self) and self.runtime.loss is not None

    def train(self, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Train like Trainer; resume only from a complete checkpoint."""
        output = self.args.output_dir
        aside = self.states_aside
        newest = partial(aside.newest, self) if aside is not None else None
        # Between the trials of a search for hyperparameters, there is no model.
        mesh = self.accelerator.mesh if self.model is None else self.runtime.mesh
        resume_from_checkpoint = resumed_from(resume_from_checkpoint, Path(output), mesh, newest)
        # an earlier run may have ended within a step
        self._waiting = []
        self.forget_engine()
        try:
            with trainer.batches_skipped_by_accelerator(self), trainer.kernels_left_alone():
                done = super().train(resume_from_checkpoint, *args, **kwargs)
        finally:
            # If it stops within an accumulation, optimizers of later loops in this process would not step.
            self.accelerator.sync_gradients = True
        return done._replace(training_loss=done.metrics["train_loss"])

    def forget_engine(self) -> None:
        """If the trainer generates with an inference engine (vLLM), make it send the weights to the engine again before
        the next generation, because they have changed since they were last sent.
        """
        if hasattr(self, "_last_loaded_step"):
            self._last_loaded_step = -1

    def read_best_weights(self, checkpoint: Path) -> None:
        """Load the weights of the best checkpoint. If the trainer generates with an inference engine (vLLM), make it
        send these weights to the engine before the next generation.
        """
        super().read_best_weights(checkpoint)
        self.forget_engine()

    def around_reports(self) -> AbstractContextManager[None]:
        """Return a context for a step's logs, evaluation and save: all ranks do what callbacks request on any of
        them.
        """
        return self._agreed.while_reported()

    def log(
        self,
        logs: dict[str, float],
        *args: Any,
        **kwargs: Any,
    ) -> None:
        """Log like Trainer, with the run's mean loss over all data ranks."""
        accelerator = self.accelerator
        if "train_loss" in logs and accelerator.num_processes > 1:
            own = torch.tensor(logs["train_loss"], dtype=torch.float64, device=accelerator.device)
            logs["train_loss"] = accelerator.reduce(own, "mean").item()
        if "loss" in logs:  # the log of the latest step
            logs |= logged_metrics(self.model)
        super().log(logs, *args, **kwargs)

    def get_batch_samples(
        self, epoch_iterator: Any, num_batches: int, device: Any
    ) -> tuple[list[Any], Any]:
        """Return a step's batches like Trainer, without the rows that pad data ranks' batches at the end of an
        epoch.
        """
        batches, count = super().get_batch_samples(epoch_iterator, num_batches, device)
        drops = self.uses_train_step
        stream = isinstance(self.train_dataset, IterableDataset)
        if not batches or not (drops or (self._scores_tokens and "labels" in batches[-1])):
            if batches and not stream:
                warn_of_repeated(self, self.accelerator.examples_of(batches[-1]))
            return batches, count
        # Loader workers end one after another.
        looked_at = range(len(batches)) if stream else [len(batches) - 1]
        known = {
            index: self.accelerator.examples_of(batches[index], of_stream=stream)
            for index in looked_at
        }
        if any(known.values()):
            for index in looked_at:
                batches[index] = first_examples(batches[index], known[index], drop=drops)
            count = trainer.labels_of_step(self, batches)
        return batches, count

    def training_step(
        self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None
    ) -> Tensor:
        """Collect microbatches until the last one of their step, then run forward and backward over all of them."""
        staged = self.runtime.plan.stages is not None
        if not self.uses_train_step and not staged:
            if self.accelerator.num_processes == 1:
                return super().training_step(model, inputs, num_items_in_batch)
            with scaled_if_divided(self.args, num_items_in_batch) as items, means_over_ranks(self):
                return super().training_step(model, inputs, items)
        model.train()
        if callable(getattr(self.optimizer, "train", None)):  # schedule-free optimizers
            self.optimizer.train()
        self._waiting.append(trainer.prepared(self, inputs))
        count_microbatch(self)
        self._items = num_items_in_batch
        loss = self.waiting_loss() if self.accelerator.sync_gradients else 0.0
        return torch.as_tensor(loss, dtype=torch.float32, device=self.args.device)

    def waiting_loss(self) -> Tensor | float:
        """Run the microbatches that wait for their step's last one; return their loss, 0 if none waits. If an epoch
        ends within a step, stock Trainer adds the gradients of its microbatches to the next step's gradients.
        """
        if not self._waiting:
            return 0.0
        batches = self._waiting
        self._waiting = []
        return self.run_microbatches(batches, self._items)

    def run_microbatches(self, batches: list[Any], num_items_in_batch: Any) -> Tensor:
        """Run forward and backward passes over the microbatches of a step; return the step's loss."""
        args = self.args
        model = self.model
        staged = self.runtime.plan.stages is not None
        if not self.uses_train_step:
            missing = args.gradient_accumulation_steps - len(batches)
            return step_of_scores(self, batches, num_items_in_batch, missing, self._seams.heads)
        items = self._divisor(num_items_in_batch, batches)
        if staged and isinstance(items, list):
            # Needed for padding microbatches.
            items += [1.0] * (args.gradient_accumulation_steps - len(batches))
        given: dict[str, Any] = {
            "label_smoothing": args.label_smoothing_factor,
            "num_items_in_batch": items,
        }
        if not staged:
            return train_step(model, batches, **given)
        ignores = self.runtime.loss is not None and self.runtime.loss.ignores
        with cut_by_schedule(self.runtime.executor, batches, args, ignores) as microbatches:
            return train_step(model, microbatches, **given)

    def _divisor(self, items: Any, batches: Sequence[Mapping[str, Any]]) -> Any:
        """Return the number by which Trainer divides a summed loss: Trainer's number of labels, ``None`` for the number
        of labels that the step counts, or a list with one number per batch for a mean of the batches' means.
        """
        loss = self.runtime.loss
        assert loss is not None  # otherwise, the step would not run train_step
        given = items is not None and self.model_accepts_loss_kwargs
        if given and loss.divides:
            return items if loss.shift else None
        counts = torch.stack([loss.count_labels(batch)[0].cpu() for batch in batches]).double()
        if self.accelerator.num_processes > 1:
            counts = self.accelerator.reduce(counts.to(self.accelerator.device), "sum")
        # A callback may end the training within a step.
        accumulated = max(self.current_gradient_accumulation_steps, len(batches))
        return [*counts.clamp(min=1.0) * (1 if given else accumulated)]

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        """Evaluate like Trainer, with generated predictions in any layout."""
        with evaluation.while_evaluated(self):
            return super().evaluation_loop(*args, **kwargs)

    def prediction_step(
        self,
        model: nn.Module,
        inputs: Any,
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
        **generates: Any,
    ) -> tuple[Tensor | None, Any, Any]:
        """Evaluate one batch like Trainer, without the rows that pad data ranks' batches."""
        stock = super().prediction_step
        loss_only = prediction_loss_only
        if evaluation.generates(self) and not loss_only:
            loss = self.prediction_step(model, inputs, True, ignore_keys)[0]
            return evaluation.generated_step(self, inputs, loss, ignore_keys, stock, generates)

        def step(batch: Any, loss_only: bool) -> tuple[Tensor | None, Any, Any]:
            # Otherwise Trainer would let models with Liger's kernels leave out logits.
            with attribute_replaced(self.args, "use_liger_kernel", False):
                return stock(model, batch, loss_only, ignore_keys)

        if self._scores_tokens and "labels" in inputs:
            return evaluation.scored_step(self, inputs, loss_only, step)
        if self.knows_loss:
            ignored = evaluation.ignored_outputs(self, ignore_keys)
            return evaluation.prediction_step(self, model, inputs, loss_only, ignored, step)
        known = self.accelerator.examples_of(inputs)
        mapped = isinstance(inputs, Mapping)
        if is_trl(type(self)):
            if known is not None and loss_only and mapped:
                return evaluation.counted_step(self, inputs, known, step)
        elif mapped and self.accelerator.num_processes > 1:
            return evaluation.unknown_step(self, inputs, known, loss_only, step)
        return step(inputs, loss_only)

    def around_inputs(self) -> AbstractContextManager[None]:
        """Return a context for Trainer's preparation of a batch: if a trainer gathers rewards during the preparation,
        each batch counts once, although several ranks share it.
        """
        return batches_gathered(type(self), self.accelerator)

    def create_optimizer(self, model: nn.Module | None = None) -> Any:
        """Create the optimizer named in the arguments over shards, or let Trainer create a subclass's own."""
        if self.optimizer is None:
            self.optimizer = named_optimizer(self, self.model if model is None else model)
        return super().create_optimizer(model)

    def get_total_train_batch_size(self, args: TrainingArguments) -> int:
        """Return the number of rows in a step, over all ranks; ranks that share a batch (tensor ranks, for example)
        count once.
        """
        return int(
            self.accelerator.num_processes
            * args.gradient_accumulation_steps
            * args.train_batch_size
        )

    def floating_point_ops(self, inputs: Any) -> Any:
        """Return this rank's fraction of a batch's FLOPs, which ranks that share the batch divide between them."""
        main = getattr(self.runtime.model, "main_input_name", "input_ids")
        if main not in inputs:  # GRPO's prompts are a list, not a tensor
            return 0.0
        sharing = self.runtime.mesh.layout.total_size / self.runtime.mesh.batch_world
        parameters = self.runtime.model.num_parameters(exclude_embeddings=True)
        return 6.0 * float(inputs[main].numel()) * parameters / sharing

    # --- hooks of TRL's trainers, for rows that are paired or scored once before training --------------------------

    def arguments_of_data(self, arguments: Any) -> Any:
        """Return the config with which TRL prepares rows. For KTO, which combines prompts and completions of a batch
        into pairs, its batch is the batch of all data ranks together, so that the pairs are those of one process.
        """
        if not getattr(self, "calculate_KL", False):  # as KTO's trainer does
            return arguments
        own = copy.copy(arguments)
        own.per_device_train_batch_size *= (
            1 if self._seams.layout is None else self._seams.layout.batch_world
        )
        return own

    def check_cached(self, dataset: Any) -> None:
        """Raise :class:`ConfigError` for a data set in memory if there are several processes: TRL's first process
        caches the reference's log-probabilities in a file next to the data set, which the other ranks read.
        """
        check_cached(dataset, started_processes())

    def scored(self, log_probs: Tensor) -> None:
        """Log how the trained model's log-probabilities of completions, ``log_probs``, differ from those of the
        inference engine (vLLM) that generated the completions.
        """
        log_difference(self, log_probs)


class DistillationMixin(DistillationHooks, TrainerMixin):
    """Adapt TRL's DistillationTrainer; student and teacher may have different layouts."""

    _taught: Teacher | None = None

    def distilled(
        self,
        batch: Mapping[str, Any],
        divisor: Any,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return a batch's divergence from the teacher, the sum of the student's entropies, and the number of
        labels.
        """
        if self._taught is None:
            self._taught = Teacher(
                self.teacher_model, self.model, beta=self.beta, temperature=self.temperature
            )
        return self._taught.loss(batch, divisor)


class Trainer(TrainerMixin, transformers.Trainer):
    """Run ``transformers.Trainer`` in any layout, with its arguments, loop, callbacks and files.

    See :class:`TrainerMixin` for ``parallel``. Start the script with ``accelerate launch``, one process per rank.
    """


class Seq2SeqTrainer(TrainerMixin, transformers.Seq2SeqTrainer):  # type: ignore[misc]
    """Run ``transformers.Seq2SeqTrainer`` in any layout, including ``predict_with_generate``.

    See :class:`TrainerMixin` for ``parallel``, and docs/trainer.md for generation with stages.
    """

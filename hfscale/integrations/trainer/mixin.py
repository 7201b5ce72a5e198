"""``hfscale.Trainer``, and the mixin that adapts any subclass of transformers'.

Data flow of a step whose loss is the model's own (any layout)::

    loader: this distinct batch's rows --> microbatches wait for the last of their step --> hfscale.train_step
    --> accelerator.clip_grad_norm_ (norm of the full model) --> optimizer --> schedule --> logs, equal on all ranks

If a subclass or a function computes the loss, Trainer's own step runs, over every axis but stages.
"""

from collections.abc import Mapping
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.utils.data import IterableDataset
from transformers import TrainingArguments

from ..._compat.transformers.classes import class_name, is_causal_lm
from ..._compat.transformers.trainer import (
    accelerator_made_by,
    batches_skipped_by_accelerator,
    evaluated_with_logits,
    has_stock_loss,
    kernels_left_alone,
    labels_of_step,
    prepared,
    taken_for_adapted,
)
from ..._compat.trl import is_trl
from ...api import build
from ...config.environment import started_processes
from ...config.parallel import ParallelConfig
from ...errors import ConfigError
from ...train import train_step
from ...train.runtime import find_runtime, runtime_of
from . import evaluation, generation, through_stages
from . import trainer_optimizers as optimizers
from .data_sets import DataSets
from .divisor import divisor
from .files import Checkpoints
from .output_directories import resumed_from
from .refusals import (
    check_generation,
    check_layout_of,
    check_losses_of_scores,
    check_model,
    check_packing,
    check_run,
    check_scaled,
    check_step,
)
from .seams import Seams, batches_gathered, count_generations, options_of
from .streams import TrainerRandomStreams
from .trainer_accelerator import TrainerAccelerator
from .trainer_batches import cut_by_schedule, first_examples, warn_of_repeated
from .work import operations


class TrainerMixin(Checkpoints, DataSets):
    """A mixin that lets a Trainer train parallelized models: ``class MyTrainer(hfscale.TrainerMixin,
    transformers.Trainer)``.

    Args:
        model: a parallelized model, or a stock one, the same on every rank, which is cut in place.
        args: arguments of the Trainer, as are ``kwargs``.
        parallel: the layout of a stock model; by default that of the ``PARALLELISM_CONFIG_*`` variables.

    Raises:
        ConfigError: the arguments cannot work in the layout; nothing has been built yet.
    """

    def __init__(self, model: Any = None, *args: Any, parallel: ParallelConfig | None = None, **kwargs: Any) -> None:
        arguments = next((each for each in (*args, *kwargs.values()) if isinstance(each, TrainingArguments)), None)
        if arguments is not None:
            check_run(arguments)
        self._parallel, self._waiting = parallel, list[Any]()
        self._carried: Tensor | float = 0.0  # the loss of a step that the end of the data has cut short
        self._items: Any = None
        layout, context = parallel or _layout_of_environment(), ExitStack()
        if isinstance(model, nn.Module):
            model = self._parallelized(model, arguments)
            layout = runtime_of(model).mesh.layout
            context.enter_context(taken_for_adapted(runtime_of(model).model))
        if arguments is not None and layout is not None:
            count_generations(arguments, layout.batch_world)
        seed = {} if arguments is None else {"seed": arguments.seed}
        self._seams = Seams(layout, options_of(arguments) | seed)
        if isinstance(model, nn.Module):
            self._seams.train(model)
        self._while_made = context  # models made by Trainer's __init__ enter contexts into it
        with context, self._seams.while_made(type(self)):
            super().__init__(model, *args, **kwargs)  # type: ignore[call-arg]
        self._while_made = ExitStack()
        self._seams.follow_casts()
        self._streams = TrainerRandomStreams(self.runtime.mesh)
        self.add_callback(self._streams)  # type: ignore[attr-defined]
        self.check_loss()

    def check_loss(self) -> None:
        """Refuse a loss, and other options, that the layout cannot run."""
        trainer: Any = self
        runtime, own = self.runtime, not has_stock_loss(self)
        check_packing(trainer, runtime)
        check_generation(trainer, runtime)
        generation.check_predictions(trainer)
        if runtime.plan.stages is None:
            check_scaled(trainer, runtime, own_step=not self.uses_train_step)
            check_step(trainer, runtime, self.uses_train_step)
            return
        check_losses_of_scores(trainer, runtime)
        if (own and not self._scores_tokens) or runtime.loss is None:
            whose = f"{type(self).__name__}.compute_loss, or compute_loss_func," if own else class_name(runtime.model)
            raise ConfigError(
                f"{runtime.mesh.layout.describe()}: {whose} needs the model's full output, which only one stage has: "
                "use pp_size=1, or leave the loss as transformers has it; in a loop of your own, "
                "hfscale.train_step(score_loss=) runs a loss of scores of tokens there"
            )
        check_step(trainer, runtime, self.uses_train_step)

    def _parallelized(self, model: Any, arguments: TrainingArguments | None) -> Any:
        """Return the model parallelized: as it is, or by the requested layout."""
        runtime, asked = find_runtime(model), self._parallel
        if runtime is not None:
            if asked is not None and asked != runtime.mesh.layout:
                raise ConfigError(
                    f"parallel={asked.describe()} and a model that was built with "
                    f"{runtime.mesh.layout.describe()}: leave parallel out"
                )
            return model
        layout = asked or ParallelConfig()
        check_layout_of(model, layout, started_processes())
        training = model.training
        return build.parallelize(model, layout, **options_of(arguments)).train(training)

    # --- hooks of Trainer ---------------------------------------------------------------------------------------------

    def create_accelerator_and_postprocess(self) -> None:
        """Create Trainer's accelerator as one that counts distinct batches."""
        trainer: Any = self
        check_run(trainer.args)
        with accelerator_made_by(TrainerAccelerator):
            super().create_accelerator_and_postprocess()  # type: ignore[misc]
        if trainer.model is not None:
            self._adopt(trainer.model)

    def call_model_init(self, trial: Any = None) -> Any:
        """Call the user's ``model_init``, and parallelize a stock model."""
        trainer: Any = self
        model = self._parallelized(super().call_model_init(trial), trainer.args)  # type: ignore[misc]
        model.config.use_cache = getattr(trainer.args, "use_cache", False)  # Trainer sets it on its first model only
        self._while_made.enter_context(taken_for_adapted(runtime_of(model).model))
        self._adopt(model)
        return model

    def _adopt(self, model: Any) -> None:
        trainer: Any = self
        runtime = runtime_of(model)
        smooths = bool(trainer.args.label_smoothing_factor) and runtime.plan.loss is None
        check_model(runtime, trainer.args, smooths and is_causal_lm(class_name(runtime.model)))
        trainer.accelerator.adopt(model)

    @property
    def _scores_tokens(self) -> bool:
        """Whether the loss is computed from token scores: TRL's, by its fused head."""
        trainer: Any = self
        smoothed = bool(trainer.args.label_smoothing_factor) and not hasattr(trainer, "label_pad_token_id")
        return bool(self._seams.heads) and trainer.compute_loss_func is None and not smoothed

    @property
    def uses_train_step(self) -> bool:
        """Whether steps run :func:`hfscale.train_step`: the loss is the model's own mean over labels.

        If the model does not divide by a step's number of labels, Trainer's loss is a mean of means, or their sum. Its
        own step computes that, except through stages, over data ranks, or with smoothed labels; there
        :func:`.divisor.divisor` returns what to divide each batch by.
        """
        trainer: Any = self
        runtime = self.runtime
        if not self.knows_loss or runtime.loss is None:
            return False
        spread = runtime.plan.stages is not None or runtime.mesh.data_world > 1
        needed = spread or (trainer.args.label_smoothing_factor and runtime.plan.loss)
        return bool((trainer.model_accepts_loss_kwargs and runtime.loss.divides) or needed)

    @property
    def knows_loss(self) -> bool:
        """Whether the loss is the model's own, and a mean that hfscale can compute."""
        return has_stock_loss(self) and self.runtime.loss is not None

    def train(self, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Train as Trainer does, resuming from a complete checkpoint."""
        output = self.args.output_dir  # type: ignore[attr-defined]
        resume_from_checkpoint = resumed_from(resume_from_checkpoint, Path(output), self.runtime.mesh)
        self._waiting, self._carried = [], 0.0  # an earlier run may have ended within a step
        with batches_skipped_by_accelerator(self), kernels_left_alone():
            done = super().train(resume_from_checkpoint, *args, **kwargs)  # type: ignore[misc]
        return done._replace(training_loss=done.metrics["train_loss"])

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Log as Trainer does, with the run's mean loss over all data ranks."""
        accelerator = self.accelerator  # type: ignore[attr-defined]
        if "train_loss" in logs and accelerator.num_processes > 1:
            own = torch.tensor(logs["train_loss"], dtype=torch.float64, device=accelerator.device)
            logs["train_loss"] = accelerator.reduce(own, "mean").item()
        super().log(logs, *args, **kwargs)  # type: ignore[misc]

    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: Any) -> tuple[list[Any], Any]:
        """Return a step's batches as Trainer does, without the rows that pad data ranks at the end of an epoch."""
        trainer: Any = self
        if self._waiting:  # the data ended within a step: stock Trainer adds these gradients to the next one's
            self._carried = self._step(self._items)
        batches, count = super().get_batch_samples(epoch_iterator, num_batches, device)  # type: ignore[misc]
        drops, stream = self.uses_train_step, isinstance(trainer.train_dataset, IterableDataset)
        if not batches or not (drops or (self._scores_tokens and "labels" in batches[-1])):
            if batches and not stream:
                warn_of_repeated(self, trainer.accelerator.examples_of(batches[-1]))
            return batches, count
        looked_at = range(len(batches)) if stream else [len(batches) - 1]  # loader workers end one after the other
        known = {index: trainer.accelerator.examples_of(batches[index], of_stream=stream) for index in looked_at}
        if any(known.values()):
            for index in looked_at:
                batches[index] = first_examples(batches[index], known[index], drop=drops)
            count = labels_of_step(trainer, batches)
        return batches, count

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        """Collect microbatches until the last one of their step, then run forward and backward over all of them."""
        trainer: Any = self
        staged = self.runtime.plan.stages is not None
        if not self.uses_train_step and not staged:
            return super().training_step(model, inputs, num_items_in_batch)  # type: ignore[misc,no-any-return]
        model.train()
        if callable(getattr(trainer.optimizer, "train", None)):  # schedule-free optimizers
            trainer.optimizer.train()
        self._waiting.append(prepared(self, inputs))
        loss, self._carried = self._carried, 0.0
        if trainer.accelerator.sync_gradients:
            loss = loss + self._step(num_items_in_batch)
        else:
            self._items = num_items_in_batch
        return torch.as_tensor(loss, dtype=torch.float32, device=trainer.args.device)

    def _step(self, num_items_in_batch: Any) -> Tensor:
        """Run forward and backward over the microbatches that wait."""
        trainer: Any = self
        batches, self._waiting = self._waiting, []
        args, model, staged = trainer.args, trainer.model, self.runtime.plan.stages is not None
        if not self.uses_train_step:
            missing = args.gradient_accumulation_steps - len(batches)
            return through_stages.training_step(self, batches, num_items_in_batch, missing, self._seams.heads)
        loss = self.runtime.loss
        assert loss is not None  # or it would not be train_step's
        items = divisor(self, num_items_in_batch, batches)
        if staged and isinstance(items, list):
            items += [1.0] * (args.gradient_accumulation_steps - len(batches))  # for padding microbatches
        given: dict[str, Any] = {"label_smoothing": args.label_smoothing_factor, "num_items_in_batch": items}
        if not staged:
            return train_step(model, batches, **given)
        with cut_by_schedule(self.runtime.executor, batches, args, ignores=loss.ignores) as microbatches:
            return train_step(model, microbatches, **given)

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        """Evaluate as Trainer does, with generated predictions in any layout."""
        with generation.while_evaluated(self):
            return super().evaluation_loop(*args, **kwargs)  # type: ignore[misc]

    def prediction_step(
        self,
        model: nn.Module,
        inputs: Any,
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
        **generates: Any,
    ) -> tuple[Tensor | None, Any, Any]:
        """Evaluate one batch as Trainer does, without the rows that pad data ranks."""
        stock = evaluated_with_logits(self, super().prediction_step)  # type: ignore[misc]
        if generation.generates(self) and not prediction_loss_only:
            loss = self.prediction_step(model, inputs, True, ignore_keys)[0]
            return generation.generated_step(self, inputs, loss, ignore_keys, stock, generates)
        if self._scores_tokens and "labels" in inputs:
            return evaluation.scored_step(self, model, inputs, prediction_loss_only, ignore_keys, stock)
        if not self.knows_loss:
            known = self.accelerator.examples_of(inputs)  # type: ignore[attr-defined]
            if known is not None and prediction_loss_only and is_trl(type(self)) and isinstance(inputs, Mapping):
                return evaluation.counted_step(self, model, inputs, known, ignore_keys, stock)
            return stock(model, inputs, prediction_loss_only, ignore_keys)  # type: ignore[no-any-return]
        return evaluation.prediction_step(self, model, inputs, prediction_loss_only, ignore_keys, stock)

    def around_inputs(self) -> AbstractContextManager[None]:
        """Return a context for Trainer's preparation of a batch, in which some trainers gather rewards."""
        trainer: Any = self
        return batches_gathered(type(self), trainer.accelerator)

    def create_optimizer(self, model: nn.Module | None = None) -> Any:
        """Create the optimizer named in the arguments over shards, or let Trainer create what a subclass chooses."""
        trainer: Any = self
        if trainer.optimizer is None:
            trainer.optimizer = optimizers.named(trainer, trainer.model if model is None else model)
        return super().create_optimizer(model)  # type: ignore[misc]

    def get_total_train_batch_size(self, args: TrainingArguments) -> int:
        """Return the rows of a step, over the distinct batches."""
        trainer: Any = self
        return int(trainer.accelerator.num_processes * args.gradient_accumulation_steps * args.train_batch_size)

    def floating_point_ops(self, inputs: Any) -> Any:
        """Return this rank's fraction of a batch's FLOPs, which ranks that share the batch divide between them."""
        return operations(self.runtime, inputs)


class Trainer(TrainerMixin, transformers.Trainer):
    """``transformers.Trainer`` in any layout: its arguments, loop, callbacks and files.

    See :class:`TrainerMixin` for ``parallel``. Start the script with ``accelerate launch``, one process per rank.
    """


class Seq2SeqTrainer(TrainerMixin, transformers.Seq2SeqTrainer):  # type: ignore[misc]
    """``transformers.Seq2SeqTrainer`` in any layout, including ``predict_with_generate``.

    See :class:`TrainerMixin` for ``parallel``, and docs/trainer.md for generation with stages.
    """


def _layout_of_environment() -> ParallelConfig | None:
    """Return the layout in the environment, or ``None`` if it does not fit the processes that were started."""
    found = ParallelConfig()
    return found if found.total_size == started_processes() else None

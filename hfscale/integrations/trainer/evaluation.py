"""Run ``Trainer.evaluate`` and ``predict``, with losses, logits or generated tokens, in any layout.

Data ranks get batches of one size; the last batches are padded with rows from the beginning. Trainer drops the outputs
of padding rows. Here, padding rows are also excluded from the loss, which therefore equals the loss of one process.

If each rank has all layers, ``model.generate`` (``predict_with_generate``) runs unchanged. With pipeline stages, one
rank of each distinct batch holds the full model during an evaluation, and generates for the ranks that share the batch.
"""

import copy
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from accelerate.utils import convert_to_fp32, send_to_device
from torch import Tensor, nn

from ..._compat.replaced import attribute_replaced
from ..._compat.torch_device import device_module, fork_random_state, is_accelerator
from ..._compat.transformers.classes import from_config, stock_class
from ..._compat.transformers.trainer import has_own_prediction_step, labels_of_step
from ...checkpoint.stream import whole_tensors
from ...config.options import MIXED_PRECISIONS
from ...config.parallel import UNCUT_SEQUENCES
from ...distributed.mesh import Mesh
from ...errors import ConfigError
from ...parallel.pipeline.microbatches import rows_of
from ...train.runtime import Executor, Runtime
from ...train.step import eval_step
from .items_in_batch import evaluated_as_trained
from .means_over_ranks import means_over_ranks
from .trainer_batches import (
    IGNORED,
    Batch,
    blank_batches,
    first_examples,
    first_of_chunks,
    first_rows,
    pieces,
    unlabelled,
    with_rows,
)

_MOST_ADDED = 64
# Loss, predictions and labels of a step, as Trainer's own step returns them.
_Result = tuple[Tensor | None, Any, Any]
_Step = Callable[..., _Result]
"""Trainer's own step, with the model and the keys to omit: ``(inputs, whether to return only the loss)``."""


def scored_step(trainer: Any, inputs: Batch, loss_only: bool, stock: _Step) -> _Result:
    """Run an evaluation step whose loss the trainer computes itself, as a mean over the labels of this rank's batch;
    return the mean over the labels of all data ranks.
    """
    known = trainer.accelerator.examples_of(inputs)
    counted = inputs if known is None else first_examples(inputs, known, drop=False)
    shifted = counted.get("shift_labels")
    labels: Tensor = counted["labels"][:, 1:] if shifted is None else shifted
    valid = (labels != -100).sum().to(trainer.args.device)
    loss, logits, given = stock(dict(counted), loss_only)
    if loss is not None and trainer.accelerator.num_processes > 1:
        sums = trainer.accelerator.reduce(
            torch.stack((loss.float() * valid, valid.float())),
            "sum",
        )
        loss = sums[0] / sums[1].clamp(min=1)
    return loss, logits, given


def counted_step(trainer: Any, inputs: Batch, known: tuple[int, int], stock: _Step) -> _Result:
    """Run an evaluation step whose loss is TRL's mean over rows or pairs. Of this rank's ``known[0]`` rows or pairs,
    only the first ``known[1]`` count, since the others only pad the batch.
    """
    accelerator = trainer.accelerator
    repeated = accelerator.gather(
        torch.tensor(
            [known[0] - known[1]],
            device=accelerator.device,
        )
    )
    if not repeated.any():
        return stock(inputs, True)
    with accelerator.counting(known[1]):
        loss, *rest = stock(first_of_chunks(inputs, known[0], max(known[1], 1)), True)
        return accelerator.gather(loss).mean(), *rest


def unknown_step(
    trainer: Any,
    inputs: Batch,
    known: tuple[int, int] | None,
    loss_only: bool,
    stock: _Step,
) -> _Result:
    """Run an evaluation step with a loss of unknown kind: a mean over rows, means over labels, or a sum divided by the
    number of labels on all data ranks. Of this rank's ``known[0]`` rows, only the first ``known[1]`` count, since the
    others only pad the batch.
    """
    accelerator = trainer.accelerator
    counts = known is None or known[1] > 0
    with means_over_ranks(trainer, counts) as averaged, evaluated_as_trained(trainer) as divided:
        repeated = 0 if known is None else known[0] - known[1]
        told = torch.tensor([repeated], device=accelerator.device)
        if known is None or not accelerator.gather(told).any():
            return stock(inputs, loss_only)
        predicted: _Result = (None, None, None)
        if not loss_only:
            predicted = stock(dict(inputs), False)
        first = first_rows(inputs, known[0], max(known[1], 1))
        if not known[1]:
            # segmentation ignores other labels than all other losses
            config = trainer.runtime.model.config
            first = unlabelled(
                first, ignored=getattr(config, "semantic_loss_ignore_index", IGNORED)
            )
        loss = stock(first, True)[0]
    if loss is not None:
        over_ranks = (divided and divided[-1]) or (averaged and bool(averaged[-1]))
        share = 1 if over_ranks else known[1]
        weighted = loss.double() * share if share else torch.zeros_like(loss).double()
        sums = torch.stack((weighted, torch.full_like(weighted, share)))
        total, shares = accelerator.reduce(sums.to(accelerator.device), "sum")
        loss = total / shares
    return loss, *predicted[1:]


def prediction_step(
    trainer: Any,
    model: nn.Module,
    inputs: Batch,
    loss_only: bool,
    ignored: Collection[str],
    stock: _Step,
) -> _Result:
    """Return the loss over the batches of all data ranks, and the outputs and labels of this rank's batch; ``stock`` is
    Trainer's own step, which omits the outputs named in ``ignored``.
    """
    smoothing = trainer.args.label_smoothing_factor
    stages = trainer.runtime.plan.stages is not None
    # Also without labels: gathered predictions leave out the rows that pad this batch, not those of an earlier one.
    known = trainer.accelerator.examples_of(inputs)
    if inputs.get("labels") is None and not stages:
        return stock(inputs, loss_only)
    loss_of = trainer.runtime.loss
    counted = inputs if known is None else first_examples(inputs, known, drop=not loss_of.ignores)
    # The trainer's class computes its own loss.
    by_host = bool(smoothing) and trainer.runtime.plan.loss is None
    if stages or ((loss_only or smoothing) and not by_host):
        return _by_steps(trainer, model, inputs, counted, loss_only, ignored)
    masked = loss_of.ignores or known is None
    loss, logits, labels = stock(counted if masked else inputs, loss_only)
    # Trainer assumes that the loss was divided by the labels of all data ranks, and multiplies it by the number of
    # ranks.
    right = masked and (loss_of.divides or trainer.accelerator.num_processes == 1)
    loss = trainer.accelerator.reduce(loss, "mean") if right else eval_step(model, counted).float()
    return loss, convert_to_fp32(logits), labels


def ignored_outputs(trainer: Any, ignore_keys: list[str] | None) -> Collection[str]:
    """Return the names of the model's outputs that predictions omit, besides the loss."""
    if ignore_keys is not None:
        return ignore_keys
    usual: list[str] = getattr(trainer.runtime.model.config, "keys_to_ignore_at_inference", [])
    return usual


def _by_steps(
    trainer: Any,
    model: nn.Module,
    inputs: Batch,
    counted: Batch,
    loss_only: bool,
    ignored: Collection[str],
) -> _Result:
    """Run :func:`hfscale.eval_step`. ``counted`` is the batch ``inputs`` without its padding rows, which repeat other
    rows, or with these rows' labels ignored. Outputs named in ``ignored`` are not returned.
    """
    labelled = inputs.get("labels") is not None
    if loss_only and not labelled:
        return None, None, None
    batches, given, uncut = _step_of(trainer, counted if labelled else inputs, labelled)
    with trainer.runtime.executor.uncut() if uncut else nullcontext():
        if loss_only:
            return eval_step(model, batches, **given).float(), None, None
        _check_outputs(trainer.runtime, ignored)
        loss, outputs = eval_step(model, batches, return_outputs=True, **given)
    named = [name for name in outputs[0] if name not in ignored]
    of_names = tuple(
        convert_to_fp32(_joined(outputs, batches, name))[: rows_of(inputs)] for name in named
    )
    predicted = of_names[0] if len(of_names) == 1 else of_names
    # In a packed row, repeated examples have no labels.
    given_labels = _labels(trainer, counted if trainer.runtime.loss.ignores else inputs)
    if not labelled or given_labels is None:
        return None, predicted, None
    return loss.float(), predicted, given_labels


def _labels(trainer: Any, batch: Batch) -> Any:
    """Return what ``label_names`` names, as Trainer does: a tuple if these are several, ``None`` if one is missing."""
    values = [batch.get(name) for name in trainer.label_names]
    if not values or any(value is None for value in values):
        return None
    labels = send_to_device(tuple(values), trainer.runtime.mesh.device)
    return labels[0] if len(labels) == 1 else labels


def _step_of(
    trainer: Any, batch: Batch, labelled: bool
) -> tuple[list[Batch], dict[str, Any], bool]:
    """Return the batches of a step that evaluates ``batch``, arguments for :func:`hfscale.eval_step`, and whether the
    schedule must not split the batches further.
    """
    loss_of = trainer.runtime.loss
    executor = trainer.runtime.executor
    if trainer.runtime.plan.stages is not None:
        most = _least_rows(executor, trainer.args.per_device_eval_batch_size)
        if labelled and not loss_of.ignores:
            return pieces(executor, [batch], 1, most)[0], {}, True
        batch = with_rows(batch, most)
    if not labelled:  # then no class can compute its loss
        return (
            [batch],
            {"loss_fn": lambda outputs, _: (0 * outputs.logits.double().sum(), 1.0)},
            False,
        )
    given = {
        "label_smoothing": trainer.args.label_smoothing_factor,
        "num_items_in_batch": float(labels_of_step(trainer, [batch])) if loss_of.shift else None,
    }
    return [batch], given, False


def _joined(outputs: Sequence[Any], batches: Sequence[Batch], name: str) -> Tensor:
    """Return the output ``name`` of all ``batches``, without the padding in place of a batch without rows."""
    rows = [output[name][: rows_of(batch)] for output, batch in zip(outputs, batches, strict=True)]
    return torch.cat(rows)


def _check_outputs(runtime: Runtime, ignored: Collection[str]) -> None:
    """Raise :class:`ConfigError` if predictions would contain outputs of all layers."""
    asked = [
        name
        for name in ("hidden_states", "attentions")
        if name not in ignored and getattr(runtime.model.config, f"output_{name}", False)
    ]
    if asked:
        raise ConfigError(
            f"{runtime.mesh.layout.describe()}: predictions would contain {' and '.join(asked)} of all layers "
            f"(config.output_{asked[0]}=True), but an evaluation by stages, or with smoothed labels, returns only the "
            f"model's last outputs: pass ignore_keys={asked}, or set config.output_{asked[0]}=False"
        )


def _least_rows(executor: Executor, rows: int) -> int:
    """Return the smallest number of rows, at least ``rows``, that the schedule can split into microbatches."""
    for more in range(_MOST_ADDED):
        try:
            executor.share_out(blank_batches(rows + more))
        except ConfigError:
            continue
        return rows + more
    return rows


def generates(trainer: Any) -> bool:
    """Return whether predictions are generated tokens instead of logits."""
    return (
        bool(getattr(trainer.args, "predict_with_generate", False))
        and trainer.runtime.model.can_generate()
    )


def check_predictions(trainer: Any) -> None:
    """Raise :class:`ConfigError` if ``predict_with_generate=True`` cannot work: because the trainer's class does not
    generate, context parallelism shards sequences, or the full model cannot be gathered on one rank.
    """
    if not generates(trainer):
        return
    runtime = trainer.runtime
    layout = runtime.mesh.layout.describe()
    if not has_own_prediction_step(trainer):
        raise ConfigError(
            f"predict_with_generate=True needs a trainer that generates, but {type(trainer).__name__} evaluates "
            "logits: use hfscale.Seq2SeqTrainer"
        )
    if runtime.mesh.layout.cuts_sequences:
        raise ConfigError(
            f"{layout}: predict_with_generate=True needs full sequences, but each context rank has only some tokens "
            f"of each sequence: use {UNCUT_SEQUENCES}, or predict_with_generate=False"
        )
    if runtime.plan.stages is None:
        return
    if runtime.plan.quantized is not None:
        raise ConfigError(
            f"{layout}: predict_with_generate=True gathers the full model on one rank, but weights in 4 or 8 bits "
            "cannot be gathered: use pp_size=1, or predict_with_generate=False"
        )
    if is_accelerator(runtime.mesh.device):
        device = device_module(runtime.mesh.device)
        _check_room(runtime, device.get_device_properties(runtime.mesh.device).total_memory)


def _check_room(runtime: Runtime, room: int) -> None:
    size = (
        sum(torch.Size(planned.shape).numel() for planned in runtime.plan.owned())
        * runtime.model.dtype.itemsize
    )
    least = min(runtime.mesh.all_gather_object(room))
    if size > least:
        raise ConfigError(
            f"{runtime.mesh.layout.describe()}: predict_with_generate=True gathers the full model on one rank, which "
            f"needs {size / 2**30:.1f} GiB, but the smallest device has {least / 2**30:.1f} GiB: use pp_size=1 with a "
            "larger tp_size or dp_shard_size, or predict_with_generate=False"
        )


@contextmanager
def while_evaluated(trainer: Any) -> Iterator[None]:
    """Inside the block, let the trainer's model generate also with pipeline stages, and drop the outputs of rows that
    only pad data ranks' last batches, which Seq2SeqTrainer would keep.
    """
    accelerator = trainer.accelerator
    if trainer.gather_function == accelerator.gather:

        def gather(given: Any) -> Any:
            losses = isinstance(given, Tensor) and given.ndim == 1 and given.is_floating_point()
            return accelerator.gather(given) if losses else accelerator.gather_for_metrics(given)

        trainer.gather_function = gather
    replaced: AbstractContextManager[None] = nullcontext()
    if generates(trainer) and trainer.runtime.plan.stages is not None:
        generate = _WholeModel(trainer.runtime).generate
        replaced = attribute_replaced(trainer.runtime.model, "generate", generate)
    with replaced:
        yield


def generated_step(
    trainer: Any,
    inputs: Any,
    loss: Tensor | None,
    ignore_keys: list[str] | None,
    step: Callable[..., Any],
    more: Any,
) -> _Result:
    """Return the loss, generated tokens and labels; tokens and labels are padded to the longest row on any data
    rank.
    """
    given = dict(inputs)
    model = trainer.runtime.model
    mesh = trainer.runtime.mesh
    labels = given.get("labels")
    made = given.get("decoder_input_ids")
    known = trainer.accelerator.examples_of(inputs)
    generate = model.generate
    if labels is not None:
        # These inputs derive from the labels and must not be passed to generate.
        if made is not None and made.shape == labels.shape:
            given = {
                name: value for name, value in given.items() if not name.startswith("decoder_")
            }
        given["labels"] = _padded_rows(mesh, labels, known, -100)

    def generate_as_long(*args: Any, **kwargs: Any) -> Tensor:
        config = kwargs.get("generation_config") or model.generation_config
        pad = config.pad_token_id
        end = config.eos_token_id
        first = end[0] if isinstance(end, list) else end
        # Like generate.
        fill = (pad or first) if (kwargs.get("num_beams") or config.num_beams or 1) > 1 else pad
        tokens = generate(*args, **kwargs)
        return (
            tokens
            if fill is None
            else _padded_rows(mesh, tokens, known, fill, after=int(fill == first))
        )

    with (
        attribute_replaced(trainer, "label_smoother", None),
        attribute_replaced(model, "generate", generate_as_long),
    ):
        _, tokens, labels = step(
            lambda **_: {"loss": loss},
            given,
            False,
            ignore_keys,
            **more,
        )
    return loss, tokens, labels


def _padded_rows(
    mesh: Mesh,
    rows: Tensor,
    known: tuple[int, int] | None,
    fill: int,
    after: int = 0,
) -> Tensor:
    """Bring ``rows`` to the length of the longest row that counts on any data rank, by adding or removing columns of
    ``fill``. ``known`` are the numbers of rows and of rows that count; the others pad the batch. ``after`` is how many
    columns of ``fill`` at the end of a row belong to the row (1 if ``fill`` is its end token).
    """
    width = rows.shape[1]
    if known is not None and known[1] < known[0] == len(rows):
        used = (rows[: known[1]] != fill).any(0).nonzero()
        width = min(width, int(used.max()) + 1 + after) if len(used) else 0
    longest = max(mesh.all_gather_object(width))
    return torch.nn.functional.pad(
        rows,
        (0, longest - rows.shape[1]),
        value=fill,
    )


class _WholeModel:
    """Hold the full model, with weights gathered from all pipeline stages, on the first of the ranks that share a
    batch.
    """

    def __init__(self, runtime: Runtime) -> None:
        mesh = runtime.mesh
        model = runtime.model
        self._runtime = runtime
        self._model: Any = None
        if is_accelerator(mesh.device):
            _check_room(runtime, device_module(mesh.device).mem_get_info(mesh.device)[0])
        said = mesh.all_gather_object((mesh.batch_rank, mesh.speaks_for_batch))
        firsts = {batch: rank for rank, (batch, first) in enumerate(said) if first}
        self._source = firsts[mesh.batch_rank]
        if mesh.speaks_for_batch:
            with fork_random_state(mesh.device), torch.device(mesh.device):
                self._model = from_config(
                    stock_class(model), copy.deepcopy(model.config), dtype=model.dtype
                ).eval()
            self._model.generation_config = model.generation_config
        places = {} if self._model is None else self._model.state_dict()
        with torch.no_grad():
            for name, tensor in whole_tensors(runtime, sorted(firsts.values())):
                if places:
                    places[name].copy_(tensor)

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """Return the tokens that the full model generates for this rank's batch; call it on every rank."""
        mesh = self._runtime.mesh
        made = None
        failure = ""
        # Every rank draws, so that equal RNG states stay equal.
        seed = int(torch.randint(2**31, ()))
        if self._model is not None:
            dtype = MIXED_PRECISIONS[self._runtime.options.mixed_precision]
            autocast = torch.autocast(mesh.device.type, dtype=dtype) if dtype else nullcontext()
            try:
                with fork_random_state(mesh.device), autocast:
                    torch.manual_seed(seed)
                    made = self._model.generate(*args, **{**kwargs, "synced_gpus": False}).cpu()
            except Exception as error:
                failure = f"{type(error).__name__}: {error}"
        every = mesh.all_gather_object((made, failure))
        for rank, (_, text) in enumerate(every):
            if text:
                raise ConfigError(
                    f"generate failed on rank {rank}, so no rank has predictions: correct the cause, which is: {text}"
                )
        return every[self._source][0].to(mesh.device)

"""Generate while a Trainer evaluates (``predict_with_generate``), in any layout.

If each rank has all layers, ``model.generate`` runs as it is. With stages, one rank of each distinct batch holds the
full model during an evaluation, and generates for the ranks that share the batch.
"""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from ..._compat.replaced import attribute_replaced
from ..._compat.torch_device import device_module, is_accelerator
from ..._compat.transformers.classes import from_config, stock_class
from ..._compat.transformers.trainer import has_own_prediction_step
from ...checkpoint.stream import whole_tensors
from ...config.options import MIXED_PRECISIONS
from ...distributed.mesh import Mesh
from ...errors import ConfigError
from ...train.runtime import Runtime


def generates(trainer: Any) -> bool:
    """Return whether predictions are generated tokens instead of logits."""
    return bool(getattr(trainer.args, "predict_with_generate", False)) and trainer.runtime.model.can_generate()


def check_predictions(trainer: Any) -> None:
    """Check a trainer whose predictions are generated.

    Raises:
        ConfigError: its class does not generate, or the full model does not fit on one rank.
    """
    if not generates(trainer):
        return
    runtime = trainer.runtime
    layout = runtime.mesh.layout.describe()
    if not has_own_prediction_step(trainer):
        raise ConfigError(
            f"predict_with_generate=True must be given to a trainer that generates, and {type(trainer).__name__} "
            "evaluates logits: use hfscale.Seq2SeqTrainer"
        )
    if runtime.mesh.layout.cp > 1:
        raise ConfigError(
            f"{layout}: predict_with_generate=True needs full sequences, and each context rank has a part of them: use "
            "cp_size=1, or predict_with_generate=False"
        )
    if runtime.plan.stages is None:
        return
    if runtime.plan.quantized is not None:
        raise ConfigError(
            f"{layout}: predict_with_generate=True gathers the full model on one rank, which weights in 4 or 8 "
            "bits do not allow: use pp_size=1, or predict_with_generate=False"
        )
    if is_accelerator(runtime.mesh.device):
        device = device_module(runtime.mesh.device)
        _check_room(runtime, device.get_device_properties(runtime.mesh.device).total_memory)


def _check_room(runtime: Runtime, room: int) -> None:
    size = sum(torch.Size(planned.shape).numel() for planned in runtime.plan.owned()) * runtime.model.dtype.itemsize
    least = min(runtime.mesh.all_gather_object(room))
    if size > least:
        raise ConfigError(
            f"{runtime.mesh.layout.describe()}: predict_with_generate=True gathers the full model on one rank: "
            f"{size / 2**30:.1f} GiB, of {least / 2**30:.1f}: use pp_size=1 with a larger tp_size or dp_shard_size, or "
            "predict_with_generate=False"
        )


@contextmanager
def while_evaluated(trainer: Any) -> Iterator[None]:
    """Let the trainer's model generate in any layout, and leave repeated rows out, inside the ``with`` block.

    Seq2SeqTrainer keeps such rows, and weights the loss of a smaller last batch like the others.
    """
    accelerator = trainer.accelerator
    if trainer.gather_function == accelerator.gather:
        trainer.gather_function = lambda given: (
            accelerator.gather(given) if _is_losses(given) else accelerator.gather_for_metrics(given)
        )
    if not generates(trainer) or trainer.runtime.plan.stages is None:
        yield
        return
    with attribute_replaced(trainer.runtime.model, "generate", _WholeModel(trainer.runtime).generate):
        yield


def _is_losses(given: Any) -> bool:
    return isinstance(given, Tensor) and given.ndim == 1 and given.is_floating_point()


def generated_step(
    trainer: Any, inputs: Any, loss: Tensor | None, ignore_keys: list[str] | None, step: Callable[..., Any], more: Any
) -> tuple[Tensor | None, Any, Any]:
    """Return the loss, generated tokens, and labels, both padded to the longest of all data ranks.

    Args:
        step: Seq2SeqTrainer's step, which also asks the model for the loss, and gets the one that is known.
        more: arguments of ``generate``.
    """
    given, model, mesh = dict(inputs), trainer.runtime.model, trainer.runtime.mesh
    labels, made = given.get("labels"), given.get("decoder_input_ids")
    known, generate = trainer.accelerator.examples_of(inputs), model.generate
    if labels is not None:
        if made is not None and made.shape == labels.shape:  # made of the labels: not to be generated from
            given = {name: value for name, value in given.items() if not name.startswith("decoder_")}
        given["labels"] = _filled(mesh, labels, known, -100)

    def generate_as_long(*args: Any, **kwargs: Any) -> Tensor:
        config = kwargs.get("generation_config") or model.generation_config
        pad, end = config.pad_token_id, config.eos_token_id
        first = end[0] if isinstance(end, list) else end
        fill = (pad or first) if (kwargs.get("num_beams") or config.num_beams or 1) > 1 else pad  # as generate does
        tokens = generate(*args, **kwargs)
        return tokens if fill is None else _filled(mesh, tokens, known, fill, after=int(fill == first))

    with attribute_replaced(trainer, "label_smoother", None), attribute_replaced(model, "generate", generate_as_long):
        _, tokens, labels = step(lambda **_: {"loss": loss}, given, False, ignore_keys, **more)
    return loss, tokens, labels


def _filled(mesh: Mesh, rows: Tensor, known: tuple[int, int] | None, fill: int, after: int = 0) -> Tensor:
    """Pad rows to their length in one process: that of the longest on any data rank, repeated rows left out.

    Args:
        known: how many rows there are, and how many of these are not repeated; ``None``: all.
        fill: the padding value.
        after: how many columns behind the last unpadded one belong to the rows.
    """
    width = rows.shape[1]
    if known is not None and known[1] < known[0] == len(rows):
        used = (rows[: known[1]] != fill).any(0).nonzero()
        width = min(width, int(used.max()) + 1 + after) if len(used) else 0
    longest = max(mesh.all_gather_object(width))
    return torch.nn.functional.pad(rows, (0, longest - rows.shape[1]), value=fill)


class _WholeModel:
    """The full model on the first rank of each distinct batch, with the weights gathered from all stages."""

    def __init__(self, runtime: Runtime) -> None:
        mesh, model = runtime.mesh, runtime.model
        self._runtime = runtime
        self._model: Any = None
        if is_accelerator(mesh.device):
            _check_room(runtime, device_module(mesh.device).mem_get_info(mesh.device)[0])
        said = mesh.all_gather_object((mesh.batch_rank, mesh.speaks_for_batch))
        firsts = {batch: rank for rank, (batch, first) in enumerate(said) if first}
        self._source = firsts[mesh.batch_rank]
        if mesh.speaks_for_batch:
            with torch.random.fork_rng(_devices(mesh)), torch.device(mesh.device):
                self._model = from_config(stock_class(model), copy.deepcopy(model.config), dtype=model.dtype).eval()
            self._model.generation_config = model.generation_config
        places = {} if self._model is None else _by_name(self._model)
        with torch.no_grad():
            for name, tensor in whole_tensors(runtime, sorted(firsts.values())):
                if places:
                    places[name].copy_(tensor)

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """Return the tokens that the full model generates for this rank's batch; call it on every rank."""
        mesh, made, failure = self._runtime.mesh, None, ""
        seed = int(torch.randint(2**31, ()))  # drawn on every rank, so that equal RNG states stay equal
        if self._model is not None:
            dtype = MIXED_PRECISIONS[self._runtime.options.mixed_precision]
            autocast = torch.autocast(mesh.device.type, dtype=dtype) if dtype else nullcontext()
            try:
                with torch.random.fork_rng(_devices(mesh)), autocast:
                    torch.manual_seed(seed)
                    made = self._model.generate(*args, **{**kwargs, "synced_gpus": False}).cpu()
            except Exception as error:
                failure = f"{type(error).__name__}: {error}"
        every = mesh.all_gather_object((made, failure))
        for rank, (_, text) in enumerate(every):
            if text:
                raise ConfigError(f"generate failed on rank {rank}: {text}")
        return every[self._source][0].to(mesh.device)


def _by_name(model: nn.Module) -> dict[str, Tensor]:
    parameters, buffers = model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False)
    return {**dict(parameters), **dict(buffers)}


def _devices(mesh: Mesh) -> list[torch.device]:
    return [mesh.device] if is_accelerator(mesh.device) else []

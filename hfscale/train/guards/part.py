"""Install the checks for mistakes in user code that would make a parallelized model compute wrong numbers without an
error.
"""

import functools
import inspect
import logging
import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ..._compat.transformers.classes import class_name, empty_copy
from ...config.parallel import ParallelConfig
from ...errors import ConfigError
from ...plan.quantized import BLOCK
from ..runtime import Batch, Part, Runtime
from ..runtime.batches import agree, in_prepared_pass, look_at
from ..runtime.shards import LocalWeights
from .stock_loops import (
    refuse_other_optimizers,
    refuse_stock_accelerator,
    refuse_stock_adapters,
    refuse_stock_clipping,
)
from .structure import Structure

_CHECKED = frozenset({10, 100, 1000, 10000})
_HALF = (torch.bfloat16, torch.float16)
_log = logging.getLogger(__name__)


def count_whole(runtime: Runtime) -> None:
    """Make ``model.num_parameters()`` return the number of parameters of the full model, on every rank, without
    communication.

    With ``only_trainable=True``, a rank does not know which parameters of other pipeline stages are frozen. It counts
    only their adapters as trainable, or, in a model without adapters, all of them.
    """
    model = runtime.model
    plan = runtime.plan
    adapters = {adapter.name: plan.by_name[adapter.name].numel for adapter in plan.adapters}

    @functools.lru_cache
    def whole() -> tuple[dict[str, int], set[str]]:
        """Return the sizes of all parameters of the full model by their names, and the names of its embeddings."""
        empty = empty_copy(model)
        embeddings = {
            f"{name}.weight"
            for name, module in empty.named_modules()
            if isinstance(module, nn.Embedding)
        }
        return {
            **{name: parameter.numel() for name, parameter in empty.named_parameters()},
            **adapters,
        }, embeddings

    def num_parameters(only_trainable: bool = False, exclude_embeddings: bool = False) -> int:
        sizes, embeddings = whole()
        counted = {
            name: size
            for name, size in sizes.items()
            if not (exclude_embeddings and name in embeddings)
        }
        if not only_trainable:
            return sum(counted.values())
        live = {
            name: parameter.requires_grad for name, parameter in runtime.live_parameters().items()
        }
        return sum(
            size
            for name, size in counted.items()
            if live.get(name, name in adapters or not adapters)
        )

    model.num_parameters = num_parameters


def refuse_changes(model: Any, layout: ParallelConfig) -> None:
    """Make ``model.resize_token_embeddings``, and over several ranks also deep copies and pickling of the model, raise
    errors that say what to do instead.
    """
    kind = class_name(model)

    def resize(new_num_tokens: int | None = None, *_: Any, **__: Any) -> Any:
        if new_num_tokens in (None, model.config.get_text_config().vocab_size):
            return model.get_input_embeddings()  # like transformers if the size does not change
        raise ConfigError(
            f"resize_token_embeddings({new_num_tokens}) cannot be called on this {kind} after hfscale has planned it, "
            "because the loss and the saves depend on its planned shapes. Resize the model while it is loaded: "
            f"hfscale.from_pretrained(directory, parallel=..., resize_token_embeddings={new_num_tokens}); "
            "hfscale.parallelize(model, parallel) takes a model that was resized in memory"
        )

    def deepcopy(_: Any) -> Any:
        raise ConfigError(
            f"{kind} is spread over {layout.describe()}, and a deep copy of one rank's shards cannot run: build a "
            "second model with hfscale.from_pretrained(path, parallel=...). To average weights or to restore them "
            "later, clone model.state_dict()'s tensors on every rank"
        )

    def pickled(_: int) -> Any:
        raise ConfigError(
            f"{kind} is spread over {layout.describe()}, and its process groups cannot be pickled, so neither can an "
            "object that contains it (an Accelerator, a trainer, torch.save of the whole model): write it by "
            "hfscale.save_pretrained or hfscale.save_state on every rank, or pickle the containing object before the "
            "model is built"
        )

    model.resize_token_embeddings = resize
    if layout.total_size > 1:
        model.__deepcopy__ = deepcopy
        model.__reduce_ex__ = pickled


class SharedBatch(Part):
    """Check that ranks that must get the same batch (tensor ranks, for example) do get equal batches, also in a plain
    loop that calls the model without ``train_step``.
    """

    _first: RemovableHandle | None = None

    def install(self, runtime: Runtime, weights: LocalWeights | None) -> None:
        """Add a hook that compares the first batch of a plain loop between the ranks that must get the same batch. The
        hook runs after those that make random streams equal.
        """
        sharing = runtime.mesh.sharing
        names = list(inspect.signature(runtime.model.forward).parameters)

        def compare(
            model: nn.Module,
            args: tuple[Any, ...],
            kwargs: dict[str, Any],
        ) -> None:
            if model.training:
                handle.remove()
                batch = {**dict(zip(names, args, strict=False)), **kwargs}
                zero = torch.zeros((), dtype=torch.int64)
                zero = zero.to(
                    next((v.device for v in batch.values() if isinstance(v, Tensor)), zero.device)
                )
                agree(
                    [batch],
                    look_at([batch], lambda _: (zero, zero), hashed=True),
                    True,
                    sharing,
                )

        if sharing is not None and runtime.plan.stages is None:
            self._first = handle = runtime.model.register_forward_pre_hook(
                compare, with_kwargs=True
            )

    def check_step(
        self, runtime: Runtime, batches: Sequence[Batch], user_loss: bool = False
    ) -> None:
        """Remove the hook that compares the first batch of a plain loop, because training steps compare their batches
        themselves.
        """
        if self._first is not None:
            self._first.remove()


class StockCode(Part):
    """Raise errors when stock code is about to treat a rank's shards as the full model, and make
    ``model.save_pretrained`` write the full model by the function ``save``.
    """

    def __init__(self, save: Callable[..., None]) -> None:
        self._save = save
        # record of the modules, parameters and loss as built; ``None`` in one process
        self.structure: Structure | None = None

    def install(self, runtime: Runtime, weights: LocalWeights | None) -> None:
        """Install the checks for stock code. They must be installed last, because they record the model as it is."""
        model = runtime.model
        refuse_changes(model, runtime.mesh.layout)
        # Transformers would save weights under the names of PEFT's wrappers.
        if not runtime.is_alone or runtime.plan.adapters:
            model.save_pretrained = _saves_all_of_it(model, self._save)
        refuse_other_optimizers(runtime)
        if runtime.is_alone:
            return
        refuse_stock_accelerator()
        refuse_stock_adapters()
        refuse_stock_clipping(runtime)
        count_whole(runtime)
        self.structure = Structure(runtime)
        # Pipeline stages run only in training steps, with older weights in some schedules.
        if runtime.plan.stages is None:
            model.register_forward_pre_hook(self._check_called_model, prepend=True)

    def _check_called_model(self, model: nn.Module, args: Any) -> None:
        """Check the model when a loop without ``train_step`` calls it; a step has checked it once."""
        if torch.compiler.is_compiling() or in_prepared_pass.get():
            return
        if self.structure is not None:
            self.structure.check()


def check_model(runtime: Runtime) -> None:
    """Raise :class:`ConfigError` if modules, parameters or the loss of the model were replaced since it was built."""
    stock = runtime.part(StockCode)
    if stock is not None and stock.structure is not None:
        stock.structure.check()


def as_built(runtime: Runtime) -> AbstractContextManager[None]:
    """Restore the modules and parameters with which the model was built, inside the ``with`` block; warn if any had
    been replaced.
    """
    stock = runtime.part(StockCode)
    return nullcontext() if stock is None or stock.structure is None else stock.structure.as_built()


def _saves_all_of_it(model: Any, save: Callable[..., None]) -> Callable[..., None]:
    """Return a replacement for ``model.save_pretrained`` that writes the full model by calling ``save``. Training loops
    call it on every rank, with the arguments that Accelerate passes.
    """

    def save_pretrained(
        save_directory: Any,
        is_main_process: bool = True,
        save_function: Any = None,
        max_shard_size: str | int = "5GB",
        safe_serialization: bool = True,
        **others: Any,
    ) -> None:
        refused = sorted([*others, *([] if safe_serialization else ["safe_serialization"])])
        if refused:
            raise ConfigError(
                f"save_pretrained({', '.join(refused)}=...) cannot be used on a model that is sharded over ranks: "
                "leave it out, and call it on every rank, as hfscale.save_pretrained(model, directory)"
            )
        save(model, save_directory, max_shard_size=max_shard_size)

    return save_pretrained


def before_step(runtime: Runtime) -> None:
    """Check the model before a training step. Raise :class:`ConfigError` if it was changed, if gradients are switched
    off, or, in the first step, if it is in float16. In steps 10, 100, 1000 and 10000, also raise if replicas of a
    parameter differ between ranks.
    """
    check_model(runtime)
    if not torch.is_grad_enabled():
        raise ConfigError(
            "train_step was called within torch.no_grad() or torch.inference_mode(), where nothing has a gradient: "
            "call it outside, or hfscale.eval_step for the loss alone"
        )
    runtime.steps += 1
    if runtime.steps == 1:
        # float16 gradients could not be unscaled; decided by the plan, so that every rank raises
        if name := next(
            (p.name for p in runtime.plan.parameters if p.dtype == torch.float16), None
        ):
            raise ConfigError(
                f"{name} is in float16, where gradients below 6e-8 and most updates are zero: load it with "
                'dtype=torch.float32 and mixed_precision="fp16", which scales the loss and computes in float16, or '
                'mixed_precision="bf16" for bfloat16. eval_step and generate take float16'
            )
        if runtime.mesh.is_first:
            _warn_of_a_base_alone(runtime)
            _warn_of_lost_updates(runtime)
            _warn_of_rounding(runtime)
            _warn_of_misread_rows(runtime)
    elif runtime.steps in _CHECKED:
        from .replicas import check_replicas

        check_replicas(runtime)


def _warn_of_rounding(runtime: Runtime) -> None:
    """Warn if a layout changes the rounding of quantized weights, and if a launcher's option asks for another mixed
    precision than that of the model.
    """
    quantized = runtime.plan.quantized
    for line in [] if quantized is None else quantized.lines(runtime.plan.by_name)[1:]:
        _log.warning(
            "%s, so the loss differs from the loss of one process by the rounding of these weights",
            line,
        )
    asked = os.environ.get("ACCELERATE_MIXED_PRECISION", "no")
    own = runtime.options.mixed_precision
    if asked not in ("no", own, runtime.options.around_products):
        _log.warning(
            "ACCELERATE_MIXED_PRECISION=%s (from accelerate launch, its config file or TrainingArguments) does not "
            "change a model that was built with mixed_precision=%r: build it with mixed_precision=%r if you want "
            "this precision",
            asked,
            own,
            asked,
        )


def _warn_of_misread_rows(runtime: Runtime) -> None:
    """Warn of 4-bit matrices for which this version of bitsandbytes uses wrong scales on CPUs. Stock models have the
    same error, so a comparison with them would not show it.
    """
    quantized = runtime.plan.quantized
    if (
        quantized is None
        or not quantized.by_bitsandbytes
        or quantized.bits != 4
        or runtime.mesh.device.type != "cpu"
    ):
        return
    from ..._compat.bitsandbytes import misreads_rows

    widths = set[int]()
    for name in quantized.weights:
        *_, rows, columns = runtime.plan.by_name[name].local_shape(runtime.mesh.ranks)
        widths.add(rows if name in quantized.transposed else columns)
    misread = [width for width in sorted(widths) if width % BLOCK and misreads_rows(width)]
    if misread:
        _log.warning(
            "on CPUs this version of bitsandbytes uses wrong scales for 4-bit matrices whose rows are not whole "
            "blocks of %d values (%s here), in stock models too: results differ from those of a GPU, so do not "
            "compare the two",
            BLOCK,
            ", ".join(map(str, misread)),
        )


def _warn_of_a_base_alone(runtime: Runtime) -> None:
    """Warn of a model that is quantized in 4 or 8 bits, has no adapters, and has no frozen parameters: its quantized
    weights cannot train, so only its embeddings and norms would.
    """
    quantized = runtime.plan.quantized
    if quantized is None or runtime.plan.adapters:
        return
    rest = [
        (planned.name, p)
        for planned, p in runtime.parameters()
        if planned.name not in quantized.weights
    ]
    if rest and all(parameter.requires_grad for _, parameter in rest):
        _log.warning(
            "the model is held in %d bits, which do not train, and has no adapters: so only its embeddings and norms "
            "train (%s, for one). Add adapters - from_pretrained(..., peft_config=LoraConfig(...)), or "
            "hfscale.get_peft_model(model, config) - or freeze these parameters with requires_grad_(False)",
            quantized.bits,
            rest[0][0],
        )


def _warn_of_lost_updates(runtime: Runtime) -> None:
    """Warn of weights that train in 16 bits: most updates are smaller than half of a weight's last bit, and are lost in
    rounding.
    """
    if runtime.keeps_small_updates:
        return
    trained = [(planned.name, p.dtype) for planned, p in runtime.parameters() if p.requires_grad]
    half = [(name, dtype) for name, dtype in trained if dtype in _HALF]
    if half:
        name, dtype = half[0]
        _log.warning(
            "%d of the %d parameters that train are %s (%s, for one): updates below about 1/512 of a weight are "
            "rounded away, so AdamW at lr=1e-5 leaves nine of ten weights unchanged. Load the model with "
            'dtype=torch.float32, mixed_precision="bf16", which computes in bfloat16 over float32 weights, or make the '
            "optimizer by hfscale.create_optimizer(..., stochastic_rounding=True)",
            len(half),
            len(trained),
            str(dtype).removeprefix("torch."),
            name,
        )

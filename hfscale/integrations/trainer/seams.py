"""Replace functions that TRL's trainers call by name, for parallelized models."""

import hashlib
from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, TrainingArguments

from ..._compat import liger
from ..._compat.torch_fsdp import cast_shards
from ..._compat.trl import DistillationHooks, replaced
from ...api import adapt, build
from ...config.parallel import ParallelConfig
from ...errors import ConfigError
from ...train.runtime import Runtime, find_runtime, local_tensor, runtime_of
from .fused_head import FusedHead
from .generations import engine_over_layout


class Seams:
    """Replace functions of TRL that one trainer calls (to load models, to create vLLM's engine ...) by functions for
    parallelized models. Hold the layout and options of further models that the trainer loads.
    """

    def __init__(self, layout: ParallelConfig | None, options: dict[str, Any]) -> None:
        self.layout = layout
        self.options = options
        self.heads: list[
            FusedHead
        ] = []  # the fused heads of the trainer's models; the first belongs to the trained model
        self._policy: Runtime | None = None
        self._teaches = False  # whether a second model is a teacher, not a reference
        self._made_of: list[tuple[nn.Parameter, Tensor]] = []

    def while_made(self, kind: type) -> AbstractContextManager[None]:
        """Patch the functions that a trainer of this class calls while it is constructed, inside the ``with`` block."""
        self._teaches = issubclass(kind, DistillationHooks)
        return replaced(
            kind,
            {
                "add_fused_lm_head": self._add_fused_lm_head,
                "create_model_from_path": self._create_model_from_path,
                "get_peft_model": self._get_peft_model,
                "hash_module": _hash_module,
                "SyncRefModelCallback": _synchronized,
                "VLLMGeneration": engine_over_layout,
            },
        )

    def train(self, model: Any) -> None:
        """Record the trained model, and the present storage of its trainable parameters for :meth:`follow_casts`."""
        self._policy = runtime_of(model)
        self._made_of = [
            (parameter, parameter.data)
            for parameter in model.parameters()
            if parameter.requires_grad
        ]

    def follow_casts(self) -> None:
        """Repeat TRL's cast to bfloat16 of adapters over 4-bit weights on FSDP2's shards; TRL casts only
        ``parameter.data``.
        """
        sharded: dict[nn.Parameter, torch.dtype] = {}
        for parameter, data in self._made_of:
            if parameter.dtype != data.dtype and isinstance(parameter, DTensor):
                sharded[parameter] = parameter.dtype
                parameter.data = data
        self._made_of = []
        if sharded and self._policy is not None:
            cast_shards(self._policy.model, sharded)

    def _add_fused_lm_head(
        self,
        stock: Any,
        model: Any,
        temperature: float = 1.0,
        cast_lm_head_to_fp32: bool = False,
        outputs: Iterable[str] = ("log_probs",),
    ) -> None:
        runtime = find_runtime(model)
        whole = runtime is None or runtime.is_alone
        if runtime is None or (whole and cast_lm_head_to_fp32):
            stock(model, temperature, cast_lm_head_to_fp32, outputs)
            return
        if cast_lm_head_to_fp32:
            raise ConfigError(
                "cast_lm_head_to_fp32=True needs the full output head, but the head is sharded over ranks: leave "
                "cast_lm_head_to_fp32 out; sums over the vocabulary are computed in float32 without it"
            )
        self.heads.append(FusedHead(model, temperature, tuple(outputs), trains=not self.heads))

    def _get_peft_model(
        self, stock: Any, model: Any, peft_config: Any, *args: Any, **kwargs: Any
    ) -> Any:
        if find_runtime(model) is None:
            return stock(model, peft_config, *args, **kwargs)
        adapted = adapt.get_peft_model(model, peft_config, *args, **kwargs)
        self.train(adapted)
        return adapted

    def _create_model_from_path(
        self, stock: Any, path: str, architecture: Any = None, **kwargs: Any
    ) -> Any:
        if self.layout is None:
            raise ConfigError(
                f"the trainer would load {path!r} in full in every process: pass parallel=hfscale.ParallelConfig(...) "
                "to the trainer, or a model of hfscale.from_pretrained instead of the path"
            )
        given = {
            name: value
            for name, value in kwargs.items()
            if name != "device_map" and value is not None
        }
        dtype = given.pop("dtype", torch.float32)
        dtype = getattr(torch, dtype) if isinstance(dtype, str) and dtype != "auto" else dtype
        # This model is the reference, which equals the trained model before the first step.
        if self._policy is not None and not self._teaches:
            given |= reference_of(self._policy)
            # The dtype of this rank's first parameter, which may be an adapter's.
            if dtype == self._policy.model.dtype:
                dtype = self._policy.plan.parameters[0].dtype
        return build.from_pretrained(
            path,
            parallel=self.layout,
            auto_class=architecture or AutoModelForCausalLM,
            dtype=dtype,
            **self.options,
            **given,
        )


def options_of(arguments: Any) -> dict[str, Any]:
    """Return the options for models that a trainer with these ``TrainingArguments`` (or none) loads itself.

    Kernels that are not installed are left out, because a trainer needs kernels only for training.
    """
    if arguments is None:
        return {}
    kernels = False
    if arguments.use_liger_kernel and liger.is_installed():
        kernels = arguments.liger_kernel_config or True
    precision = str(arguments.mixed_precision)
    return {
        "mixed_precision": precision,
        "use_liger_kernel": kernels,
        "compile": compiler_of(arguments),
    }


def compiler_of(arguments: TrainingArguments) -> bool | str:
    """Return the value of ``from_pretrained``'s ``compile`` that ``TrainingArguments`` request."""
    return arguments.torch_compile and str(arguments.torch_compile_backend)


def reference_of(policy: Runtime) -> dict[str, Any]:
    """Return the arguments of ``from_pretrained`` that load a reference model equal to ``policy``, the trained model,
    before its first step. Raise :class:`ConfigError` if the policy's adapters were created in this run, not loaded from
    a checkpoint.
    """
    quantization = getattr(policy.model.config, "quantization_config", None)
    given = {} if quantization is None else {"quantization_config": quantization}
    adapters = policy.adapters
    if adapters is None:
        return given
    if adapters.source is None:
        raise ConfigError(
            "the trainer would load a second model as the reference, because this model has new adapters: pass the "
            "model without adapters, and peft_config=, to the trainer, which then takes the model with its adapters "
            "switched off as the reference"
        )
    return {**given, "peft_config": adapters.source}


def _synchronized(stock: Any, **kwargs: Any) -> Any:
    """Create TRL's callback that mixes the trained model's weights into a reference model, so that it works on this
    rank's shards of both models, not on gathered weights.
    """
    callback = stock(**kwargs)
    mix = callback.sync_target_model

    def sync_target_model(model: Any, target_model: Any, alpha: float) -> None:
        for runtime in filter(None, map(find_runtime, (model, target_model))):
            runtime.data.release()
        mix(model, target_model, alpha)

    callback.sync_target_model = sync_target_model
    return callback


def _hash_module(stock: Any, module: Any) -> str:
    """Hash the shards of all ranks; TRL's function hashes only this rank's shards."""
    runtime = find_runtime(module)
    if runtime is None:
        return str(stock(module))
    own = hashlib.sha256()
    for planned, parameter in runtime.parameters():
        share = local_tensor(parameter.detach()).cpu().contiguous().view(-1).view(torch.uint8)
        own.update(planned.name.encode() + share.numpy().tobytes())
    return hashlib.sha256(
        "".join(runtime.mesh.all_gather_object(own.hexdigest())).encode()
    ).hexdigest()

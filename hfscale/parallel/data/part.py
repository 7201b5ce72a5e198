"""Install FSDP2, for the data axes ``dp_shard`` and ``dp_replicate``, in a model."""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from ..._compat.torch import has_backward_hook
from ..._compat.torch_fsdp import add_up_gradients, forget_iteration, reduce_now
from ...config.parallel import ParallelConfig
from ...errors import ConfigError
from ...train.runtime import Batch, Part, Runtime
from ...train.runtime.batches import Microbatch
from ...train.runtime.runtime import DataAxes
from ...train.runtime.shards import LocalWeights
from . import shard
from .gradient_compression import Compressor, compresses, install_compression
from .weights import install_local_weights


class DataParallel(Part, DataAxes):
    """Shard the model over the data ranks with FSDP2, once it is sharded over all other axes."""

    state_key = "DataParallel"

    _model: Any  # wrapped by FSDP2
    _layout: ParallelConfig
    _wrapped: list[FSDPModule]

    def __init__(self) -> None:
        self._compressing: list[Compressor] = []

    def install(self, runtime: Runtime, weights: LocalWeights | None) -> None:
        """Wrap the model in FSDP2, and materialize tensors on the meta device."""
        model = runtime.model
        plan = runtime.plan
        mesh = runtime.mesh
        runtime.data = self
        self._model = model
        self._layout = mesh.layout
        shard.apply_data_axes(model, plan, mesh, runtime.options)
        self._wrapped = shard.wrapped_modules(model)
        if weights is not None:
            install_local_weights(model, weights.tensors, plan, mesh)
        # with pipeline stages, placeholders refuse such calls, and hfscale calls the base model for decoder inputs
        if plan.stages is None:
            shard.refuse_calls_past_the_model(model)
        if compresses(plan):
            self._compressing = install_compression(model, plan, mesh, runtime.loss_factor)

    def check_step(
        self, runtime: Runtime, batches: Sequence[Batch], user_loss: bool = False
    ) -> None:
        """Refuse gradient hooks on parameters, which FSDP2 would not run."""
        hooked = next(
            (
                name
                for name, parameter in runtime.live_parameters().items()
                if has_backward_hook(parameter)
            ),
            None,
        )
        if hooked is not None:
            raise ConfigError(
                f"{hooked} has a hook on its gradient (register_hook), which would never run, because over "
                f"{runtime.mesh.layout.describe()} FSDP2 reduces gradients by itself: change parameter.grad between "
                "train_step and the optimizer's step, or use register_post_accumulate_grad_hook"
            )

    @contextmanager
    def around_step(
        self, runtime: Runtime, microbatches: Sequence[Microbatch], train: bool
    ) -> Iterator[None]:
        """If a step raises, drop FSDP2's state of the step, such as a microbatch's gradients, so that the caller can
        try the step again, for example with fewer rows.
        """
        try:
            yield
        except BaseException:
            forget_iteration(self._model)
            raise

    def left_out(self) -> list[Tensor]:
        """Return the tensors that gradient compression keeps between steps, in addition to parameters and optimizer
        state: error feedback and low-rank factors.
        """
        return [tensor for compressor in self._compressing for tensor in compressor.tensors()]

    def state(self, runtime: Runtime) -> dict[str, Any]:
        """Return the state of gradient compression (error feedback), to be saved; only the same layout can load it."""
        if not self._compressing:
            return {}
        return {
            "layout": repr(runtime.mesh.layout),
            "compression": [compressor.state() for compressor in self._compressing],
        }

    def put_state(self, runtime: Runtime, state: dict[str, Any]) -> None:
        """Load the state of gradient compression; if the layout has changed, start without error feedback."""
        if state.get("layout") == repr(runtime.mesh.layout):
            for compressor, saved in zip(self._compressing, state["compression"], strict=True):
                compressor.put_state(saved, runtime.mesh.device)

    def around_interleaved(self, runtime: Runtime, backward: bool) -> AbstractContextManager[None]:
        """Run several passes at once without FSDP2 collectives between layers: gradients are reduced once, at the end
        of the ``with`` block.

        Weights are gathered once for all passes or, with the layout's option ``weights_regather``, again for each pass.
        """
        regather = bool(runtime.mesh.layout.weights_regather)
        return shard.one_reduction(runtime.model, backward=backward, regather=regather)

    def loss_factor(self, runtime: Runtime) -> float:
        return float(runtime.mesh.data_world)

    def before_backward(self, last: bool) -> None:
        for module in self._wrapped:
            module.set_requires_gradient_sync(
                last or bool(self._layout.reduce_each_microbatch), recurse=False
            )

    def accumulate_late_gradients(self) -> None:
        add_up_gradients(self._model)

    def after_microbatch(self) -> None:
        if self._layout.reduce_each_microbatch:
            self._model.set_requires_gradient_sync(True)
            reduce_now(self._model)
            self._model.set_requires_gradient_sync(False)

    def release(self) -> None:
        shard.reshard(self._wrapped)

    def as_shards(self) -> AbstractContextManager[None]:
        return shard.as_shards(self._wrapped)

"""Install mixed precision: autocast or casts of parameters, where FSDP2 does not cast, and loss scaling for float16."""

import math
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from ..._compat.torch import (
    autocast_remembers,
    own_buffers,
    own_parameters,
    tree_map,
    unscale_and_check,
)
from ..._compat.transformers.computing import recomputes, stays_in_32_bits
from ...config.options import MIXED_PRECISIONS
from ...distributed.ops.shared_casts import (
    Casts,
    autocasted_weight,
    cast_weight,
    is_sharing,
    sharing,
)
from ...errors import ConfigError
from ...models.module_kinds import PROJECTIONS
from ...models.precision import WIDENS_INSIDE
from ...train.runtime import Part, Runtime, local_tensor
from ...train.runtime.forward_passes import recomputing
from ...train.runtime.parameter_names import stock_name
from ...train.runtime.shards import LocalWeights, gradients_aside


class Autocast(Part):
    """Autocast the forward pass under mixed precision. With several data ranks FSDP2 casts a layer's weights and
    inputs, so autocast is used there only for families that compute in 32 bits inside their layers. With
    ``mixed_precision="bf16_params"``, where parameters are cast, an autocast of the caller is turned off.
    """

    def install(self, runtime: Runtime, weights: LocalWeights | None) -> None:
        """Wrap ``model.forward`` in autocast."""
        dtype = MIXED_PRECISIONS[runtime.options.mixed_precision]
        model = runtime.model
        cast = runtime.options.casts_parameters
        by_data_ranks = runtime.mesh.data_world > 1 and runtime.plan.family not in WIDENS_INSIDE
        if by_data_ranks and not cast:
            return
        forward: Callable[..., Any] = model.forward
        device = runtime.mesh.device.type

        def autocast_forward(*args: Any, **kwargs: Any) -> Any:
            with torch.autocast(device, dtype=dtype, enabled=not cast):
                return forward(*args, **kwargs)

        autocast_forward.__wrapped__ = forward  # type: ignore[attr-defined]  # transformers inspects its signature
        model.forward = autocast_forward


class ParameterCasts(Part):
    """Replace parameters by 16-bit copies while modules run. All microbatches of a step use the same copies. With
    several data ranks FSDP2 makes the copies.

    Under ``mixed_precision="bf16_params"`` all parameters are copied, and the model computes like one loaded in 16
    bits. Otherwise only the projections in pipeline stages are copied, since autocast would make a copy per microbatch.
    """

    def install(self, runtime: Runtime, weights: LocalWeights | None) -> None:
        """Wrap the forward of modules, inside tensor parallelism's hooks. If all parameters are cast, wrap every module
        that contains parameters, since recomputation may call any of them.
        """
        model = runtime.model
        known = runtime.plan.by_name.keys()
        cast_all = runtime.options.casts_parameters
        stays = stays_in_32_bits(model)
        copies = _Copies(MIXED_PRECISIONS[runtime.options.mixed_precision] if cast_all else None)
        for prefix, module in model.named_modules():
            full = {name: f"{prefix}.{name}".lstrip(".") for name in own_parameters(module)}
            cast = [
                name
                for name, at in full.items()
                if {at, stock_name(at)} & known and not stays(stock_name(at))
            ]
            # A subclass may check the dtype of its weight.
            if cast if cast_all else type(module) in PROJECTIONS:
                copies.places[module] = cast if cast_all else ["weight"]
        for module in model.modules():
            held = (
                any(inner in copies.places for inner in module.modules())
                if cast_all
                else module in copies.places
            )
            # Not embeddings: they get another class under tensor parallelism.
            if held and not isinstance(module, nn.Embedding):
                forward = module.forward
                module.forward = partial(copies.run, module, forward)
                module.forward.__wrapped__ = forward  # transformers inspects its signature

    def around_step(self, runtime: Runtime, *_: Any, **__: Any) -> AbstractContextManager[None]:
        """With ``mixed_precision="bf16_params"``, let all microbatches of a step use the same 16-bit copies of the
        parameters.
        """
        return sharing(Casts()) if runtime.options.casts_parameters else nullcontext()

    @contextmanager
    def around_interleaved(self, runtime: Runtime, backward: bool) -> Iterator[None]:
        """Let all passes inside the with block, in which the weights do not change, use the same 16-bit copies of
        parameters.
        """
        again = recomputes(runtime.contents.modules)
        with sharing(Casts()), nullcontext() if again else autocast_remembers():
            yield


class _Copies:
    """Replace the parameters in ``places`` (module -> attribute names) by copies in ``dtype``; ``None``: autocast's
    dtype.
    """

    def __init__(self, dtype: torch.dtype | None) -> None:
        self._dtype, self.places, self._inside = dtype, dict[nn.Module, list[str]](), False

    def run(
        self,
        module: nn.Module,
        forward: Callable[..., Any],
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Return the result of ``forward`` with copies in place of the parameters of ``module``."""
        if self._inside or (
            self._dtype is None and (torch.compiler.is_compiling() or not is_sharing())
        ):
            return forward(*args, **kwargs)
        if self._dtype is not None and not recomputing():
            args, kwargs = tree_map(self._narrowed, (args, kwargs))
        with nullcontext() if is_sharing() else sharing(Casts()), self._in_place(module):
            return forward(*args, **kwargs)

    def _narrowed(self, given: Any) -> Any:
        wide = isinstance(given, Tensor) and given.dtype == torch.float32
        return given.to(self._dtype) if wide else given

    @contextmanager
    def _in_place(self, module: nn.Module) -> Iterator[None]:
        before = list[tuple[nn.Module, str, Tensor]]()
        try:
            for inner in module.modules():
                held = own_parameters(inner)
                for name in self.places.get(inner, ()):
                    if held.get(name) is not None and held[name].dtype == torch.float32:
                        before.append((inner, name, own := held[name]))
                        held[name] = (
                            autocasted_weight(own)
                            if self._dtype is None
                            else cast_weight(own, self._dtype)
                        )
            self._inside = True
            yield
        finally:
            self._inside = False
            for inner, name, parameter in before:
                own_parameters(inner)[name] = parameter
                # PEFT may have parametrized the copy, and left it as a buffer.
                own_buffers(inner).pop(name, None)


class LossScaling(Part):
    """Scale the loss under ``mixed_precision="fp16"`` (Micikevicius et al. 2018), since gradients of activations below
    6e-8 are zero in float16. All ranks use the same scale, and skip the same steps.

    ::

        loss x scale -> backward passes, sums over ranks -> gradients / scale -> any infinite, on any rank?
          no    .grad is unscaled; after `growth_interval` such steps the scale grows
          yes   .grad is None everywhere, so any optimizer changes nothing; the scale shrinks

    The arithmetic is that of ``torch.amp.GradScaler``, which considers only the gradients of one process. FSDP2
    averages gradients over data ranks, for which the data axes multiply the loss by the number of data ranks. Here the
    loss is divided by this number, and the reduced gradients are multiplied by it, so that the gradients of activations
    are as large as in one process.

    Several calls of ``train_step`` may add up to one step. After an overflow, the remaining calls of the step leave no
    gradients either. Until the optimizer steps, a call belongs to the step of the call before if there are gradients to
    which it adds, or, after an overflow, if the latest step without one had more calls.

    Attributes:
        scale: the current scale of the loss.
        growth: number of steps without overflow since the scale last changed.
        skipped: number of skipped steps so far.
        overflowed: whether the last step was skipped.
    """

    state_key = "LossScaling"
    scale = 1.0
    growth = 0
    skipped = 0
    overflowed = False
    _within = False
    _calls = 0  # of the current step so far
    _usual = 1  # calls of the latest step without an overflow
    _stepped = False  # whether an optimizer has stepped since the last call

    def install(self, runtime: Runtime, weights: LocalWeights | None) -> None:
        """Install a hook that raises :class:`ConfigError` for training passes outside of ``train_step``, whose loss
        would not be scaled.
        """
        self.scale = runtime.options.scaling.init_scale
        runtime.model.register_forward_pre_hook(self._refuse_unscaled)
        _note_steps(weakref.ref(self), runtime.model)

    def loss_factor(self, runtime: Runtime) -> float:
        """Return the factor by which loss scaling multiplies the loss: the scale, divided by the number of data ranks,
        since the data axes multiply the loss by this number.
        """
        return self.scale / runtime.mesh.data_world

    @contextmanager
    def around_gradients(self, runtime: Runtime) -> Iterator[None]:
        """Unscale the gradients at the end of the with block, or set them to ``None`` after an overflow, on all
        ranks.
        """
        parameters = [parameter for _, parameter in runtime.parameters() if parameter.requires_grad]
        adds = any(parameter.grad is not None for parameter in parameters)
        with gradients_aside(parameters):
            self._expect(runtime, self.scale)
            try:
                yield
            finally:
                self._expect(runtime, None)
            gradients = [
                local_tensor(parameter.grad)
                for parameter in parameters
                if parameter.grad is not None
            ]
            here = unscale_and_check(gradients, runtime.mesh.data_world / self.scale)
            told = runtime.mesh.largest(float(here), float(adds), float(self._stepped))
        overflows, adds, self._stepped = map(bool, told)
        begins = self._begin_call(adds)
        how = runtime.options.scaling
        if overflows or self.overflowed:
            for parameter in parameters:
                parameter.grad = None
            runtime.observer.drop()
        if overflows and not self.overflowed:
            self.overflowed = True
            self.scale = self.scale * how.backoff_factor
            self.growth = 0
            self.skipped = self.skipped + 1
        if self.overflowed or not begins:
            return
        self.growth += 1
        if self.growth == how.growth_interval:
            grown = self.scale * how.growth_factor
            self.scale = grown if math.isfinite(grown) else self.scale
            self.growth = 0

    def _begin_call(self, adds: bool) -> bool:
        """Count a call, which ``adds`` to gradients of earlier calls, and return whether it begins another step."""
        goes_on = adds or (self.overflowed and self._calls < self._usual)
        begins = self._stepped or not goes_on
        if begins:
            if self._calls and not self.overflowed:
                self._usual = self._calls
            self._calls = 0
            self.overflowed = False
        self._calls += 1
        self._stepped = False
        return begins

    def note_step(self) -> None:
        """Note that an optimizer has stepped, so that the next call of ``train_step`` begins another step."""
        self._stepped = True

    def _expect(self, runtime: Runtime, scale: float | None) -> None:
        """Set the gradient of the loss, equal to the loss scale, with which backward passes must begin in this step;
        ``None`` outside a step.
        """
        self._within = scale is not None
        # Hfscale's loss computes gradients in the forward pass; a user's loss does not
        if runtime.loss is not None:
            runtime.loss.expected_gradient = 1.0 if scale is None else scale

    def metrics(self, runtime: Runtime) -> Mapping[str, float]:
        """Return the loss scale, the number of steps since it changed, the number of skipped steps, and whether the
        last step was skipped.
        """
        return {
            "loss_scale": self.scale,
            "steps_since_loss_scale_changed": self.growth,
            "skipped_steps": self.skipped,
            "step_was_skipped": float(self.overflowed),
        }

    def state(self, runtime: Runtime) -> dict[str, Any]:
        """Return what a resumed run needs: the loss scale, the steps since it changed, and the skipped steps."""
        return {
            "scale": self.scale,
            "growth": self.growth,
            "skipped": self.skipped,
            "overflowed": self.overflowed,
            "usual": self._usual if self.overflowed else max(1, self._calls),
        }

    def put_state(self, runtime: Runtime, state: dict[str, Any]) -> None:
        """Restore the loss scale, the number of steps since it changed, and the number of skipped steps."""
        self.scale, self.growth = float(state["scale"]), int(state["growth"])
        self.skipped, self.overflowed = int(state["skipped"]), bool(state["overflowed"])
        self._usual = int(state.get("usual", 1))
        self._stepped = True  # states are saved between steps

    def _refuse_unscaled(self, model: nn.Module, _: Any) -> None:
        if model.training and torch.is_grad_enabled() and not self._within:
            raise ConfigError(
                "the model was called in training mode outside of hfscale.train_step, which alone scales the loss as "
                "mixed_precision='fp16' needs it: use loss = hfscale.train_step(model, batch), or build the model "
                "with mixed_precision='bf16' to use loss.backward()"
            )


def _note_steps(part: "weakref.ref[LossScaling]", model: nn.Module) -> None:
    """Tell ``part`` of every step of an optimizer of ``model``, as long as the model exists."""
    known = weakref.ref(model)

    def note(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        scaling, trained = part(), known()
        if scaling is None or trained is None:
            return
        own = set(map(id, trained.parameters()))
        if any(id(p) in own for group in optimizer.param_groups for p in group["params"]):
            scaling.note_step()

    handle = register_optimizer_step_post_hook(note)
    weakref.finalize(model, handle.remove)

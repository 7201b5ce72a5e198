"""Install expert parallelism, and the routing of MoE layers, into a model."""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

from ...errors import ConfigError
from ...train.runtime import Batch, Part, Runtime
from ...train.runtime.batches import Microbatch
from ...train.runtime.shards import LocalWeights
from .layer import Routing
from .mixture import install_experts


class ExpertParallel(Part):
    """Replace the forward of expert modules by one that exchanges tokens with the experts of other ranks."""

    def install(self, runtime: Runtime, weights: LocalWeights | None) -> None:
        """Install the token exchange. Call this before tensor parallelism is installed, whose hooks may replace
        parameters.
        """
        routing = install_experts(runtime, runtime.options.routing)
        part = runtime.part(ExpertRouting)
        if part is not None:
            part.routing = routing


class ExpertRouting(Part):
    """Count the tokens of each expert in each training step and forward pass, and update the routers' biases after a
    step.
    """

    def __init__(self) -> None:
        # routing state of all MoE layers; ``None`` if there are no MoE layers, or all are stock
        self.routing: Routing | None = None

    @property
    def masks_padding(self) -> bool:  # type: ignore[override]
        """Return whether MoE layers need to know which tokens are padding, which count neither in router losses nor for
        capacities.
        """
        return self.routing is not None

    def install(self, runtime: Runtime, weights: LocalWeights | None) -> None:
        """Install hooks on the model's forward passes. Call this after the hooks that seed the ranks'
        random numbers.
        """
        if self.routing is not None and self.routing.passes is not None:
            self.routing.passes.install(runtime.model)

    def check_step(
        self, runtime: Runtime, batches: Sequence[Batch], user_loss: bool = False
    ) -> None:
        """Raise :class:`ConfigError` for router losses that would not be a mean over the tokens of the step:
        transformers' ``output_router_logits`` with several microbatches, and ``routing=`` losses with a ``loss_fn``.
        """
        parts = len(batches) * runtime.mesh.data_world
        if getattr(runtime.model.config, "output_router_logits", False) and parts > 1:
            raise ConfigError(
                f"output_router_logits=True adds the router loss once per microbatch and data rank, {parts} times in "
                "this step, so its weight depends on how a step is split: set config.output_router_logits = False "
                "and load the model with routing=hfscale.RoutingConfig(balance_loss=...), whose weight does not"
            )
        asked = runtime.options.routing
        if user_loss and asked is not None and (asked.balance_loss or asked.z_loss):
            raise ConfigError(
                "RoutingConfig's losses cannot be combined with a loss_fn: the step would divide both losses' "
                "gradients, but routing losses are means over tokens already. Use balance_loss=0 and z_loss=0, and "
                "compute router losses in loss_fn from the outputs' router_logits"
            )

    def around_step(
        self, runtime: Runtime, microbatches: Sequence[Microbatch], train: bool
    ) -> AbstractContextManager[None]:
        """Count tokens during the step, and update router biases at its end."""
        if self.routing is None:
            return nullcontext()
        return self.routing.step(microbatches, train and runtime.model.training)

    @contextmanager
    def around_stage_pass(
        self, runtime: Runtime, arrives: int | None, leaves: bool
    ) -> Iterator[None]:
        """Scale this stage's router losses like the model's loss, before the backward pass of the router losses."""
        yield
        if leaves and self.routing is not None:
            self.routing.note_scale(runtime.loss_factor())

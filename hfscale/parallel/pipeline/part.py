"""Install pipeline parallelism: replace the loop over microbatches by a pipeline of stages."""

from collections.abc import Sequence

from ...errors import ConfigError
from ...extensions import provided
from ...train.runtime import Batch, Part, Runtime
from ...train.runtime.shards import LocalWeights
from .agreement import list_under_first_names
from .run import Pipeline


class PipelineStages(Part):
    """Run a model's training and evaluation steps through pipeline stages."""

    def install(self, runtime: Runtime, weights: LocalWeights | None) -> None:
        """Replace the loop over microbatches by a :class:`Pipeline`, or by an extension's executor for the schedule,
        which runs this rank's stages.
        """
        executor = provided("executors", str(runtime.mesh.layout.pipeline_schedule))
        runtime.executor = (executor or Pipeline)(runtime)
        list_under_first_names(runtime)

    def check_step(
        self, runtime: Runtime, batches: Sequence[Batch], user_loss: bool = False
    ) -> None:
        """Raise :class:`ConfigError` for transformers' router loss (``output_router_logits``), which would need the
        layers of all stages.
        """
        asked = getattr(runtime.model.config, "output_router_logits", False)
        given = (batch.get("output_router_logits") for batch in batches)
        if any(asked if value is None else value for value in given):
            raise ConfigError(
                "output_router_logits=True makes a loss of the router logits of all stages, which no rank has: leave "
                "it out, and load the model with routing=hfscale.RoutingConfig(balance_loss=...), or use pp_size=1"
            )

"""Give a model that holds its rank's stages what runs them."""

from collections.abc import Callable

from ...errors import PlanError
from ...plan import Plan
from ...runtime import Runtime
from ...schedules import ASYNCHRONOUS
from .asynchronous import AsynchronousPipeline
from .run import Pipeline


def check_stages(plan: Plan) -> None:
    """Refuse what a schedule cannot do with the stages of a plan.

    Raises:
        PlanError: as said.
    """
    if plan.stages is not None and plan.ties and plan.layout.pipeline_schedule == "pipedream":
        names = " = ".join(plan.stages.ties[0].names)
        raise PlanError(
            f"pipedream updates every stage with another microbatch, so {names}, which are on several stages, would "
            "drift apart: use pipedream_2bw, a schedule with a flush, or tie_word_embeddings=False"
        )


def install_pipeline(runtime: Runtime, settle: Callable[[], None], reduce: Callable[[], None]) -> None:
    """No-op for one pipeline rank.

    Args:
        settle: called where gradients were made without autograd's hooks.
        reduce: called where a microbatch's gradients are whole, if the layout has them reduced there.
    """
    if runtime.plan.stages is None:
        return
    asynchronous = runtime.mesh.layout.pipeline_schedule in ASYNCHRONOUS
    runtime.pipeline = (AsynchronousPipeline if asynchronous else Pipeline)(runtime)
    if runtime.mesh.batch_world > 1:
        for worker in runtime.pipeline.workers:
            worker.settle = settle
            if runtime.mesh.layout.reduce_each_microbatch:
                worker.reduce = reduce

"""Plan the data axes: check for models that FSDP2 cannot wrap."""

from ...models.names import wild_name
from ...plan.drafting.draft import Draft, Planned


def plan_data(draft: Draft) -> None:
    """Plan the data axes; record problems with models that cannot be sharded over them."""
    if draft.layout.data_world == 1:
        return
    for name, parameter in draft.named():
        if parameter.ndim == 0:
            draft.problem(
                f"{draft.layout.describe()}: {wild_name(name)} is a scalar, which FSDP2 cannot hold: use "
                "dp_shard_size=1 and dp_replicate_size=1"
            )
    for name in draft.layer_drops():
        # A rank that skips a layer would miss an all-gather of FSDP2, in which all other ranks wait.
        draft.problem(
            f"{draft.layout.describe()}: {name}={getattr(draft.config, name)} skips layers at random, different ones "
            "on every rank, but all data ranks must take part in gathering each layer's weights: use "
            f"config.{name} = 0, or one data rank"
        )


def has_data_ranks(model: Planned) -> bool:
    """Return whether ranks get different batches or tokens, so that FSDP2 must wrap the model."""
    return model.plan.layout.data_world > 1


def has_one_batch(model: Planned) -> bool:
    """Return whether all ranks compute on the same tokens."""
    return not has_data_ranks(model)

"""Train only the rows of some tokens (PEFT's ``trainable_token_indices``), in an embedding and a head tied to it.

The rows ``[n, hidden]`` replace ``n`` rows of the weight, which is frozen. All rows are replicated on every tensor
rank. If the weight is sharded along the vocabulary, a rank computes only with the rows of tokens in its shard. The
rank's gradient is zero for all other rows, and the sum of the ranks' gradients is the full gradient::

    tokens 3, 64, 69 of 70, over 2 ranks    rank 0: row 0 at 3    rank 1: rows 1, 2 at 64 - 35, 69 - 35
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..._compat.peft import (
    BASE,
    TOKEN_ROWS,
    layer_of_tokens,
    merge_rows_by,
    put_original_rows,
    replaces_rows,
    wrap_tokens,
)
from ..._compat.torch import own_modules, own_parameters
from ...distributed.mesh import Mesh
from ...errors import ConfigError
from ...parallel.tensor.partial_gradients import PartialSums, read_through
from ...plan import AdapterParameter, ParameterPlan, Plan
from ...plan.cut import share_spans
from ...train.runtime import Runtime
from ...train.runtime.parameter_names import module_at
from ...train.runtime.shards import gather_full


def places_in(
    tokens: Sequence[int], planned: ParameterPlan, ranks: dict[str, int]
) -> tuple[list[int], list[int]]:
    """Return two lists about those ``tokens`` whose rows of a weight are in the shard of the rank at coordinates
    ``ranks``: the tokens' indices in ``tokens``, and their rows' indices in the shard.
    """
    chosen: list[int] = []
    places: list[int] = []
    offset = 0
    for start, stop in share_spans(planned.shape, planned.model_cuts, ranks)[0]:
        for number, token in enumerate(tokens):
            if start <= token < stop:
                chosen.append(number)
                places.append(offset + token - start)
        offset += stop - start
    return chosen, places


def with_rows(weight: Tensor, rows: Tensor, chosen: Sequence[int], places: Sequence[int]) -> Tensor:
    """Return ``weight [v, h]`` with the rows at ``places`` replaced by ``rows[chosen]``, of ``rows [n, h]``. All of
    ``rows`` get a gradient; it is zero for rows that are not chosen.
    """
    index = torch.tensor(places, dtype=torch.int64, device=weight.device)
    numbers = torch.tensor(chosen, dtype=torch.int64, device=weight.device)
    return weight.index_copy(0, index, rows.to(weight).index_select(0, numbers))


def refuse_unfit(plan: Plan) -> None:
    """Raise :class:`ConfigError` for ``trainable_token_indices`` that are outside of the vocabulary, that index a
    quantized weight, or (with several ranks) that contain a token twice.
    """
    for adapter in plan.adapters:
        base = plan.by_name[adapter.base]
        strange = [token for token in adapter.tokens if not 0 <= token < base.shape[0]]
        asked = f"trainable_token_indices of {adapter.base} must be"
        if strange:
            raise ConfigError(
                f"{asked} from 0 to {base.shape[0] - 1}, got {strange[0]}: add the tokens to the model first, by "
                "resize_token_embeddings=len(tokenizer)"
            )
        if adapter.tokens and plan.quantized and adapter.base in plan.quantized.weights:
            raise ConfigError(
                f"{asked} rows of a weight that is not quantized, got a weight that is {plan.quantized.described}: "
                "leave this weight out of quantization, by llm_int8_skip_modules of the BitsAndBytesConfig"
            )
        if len(set(adapter.tokens)) < len(adapter.tokens) and plan.layout.total_size > 1:
            raise ConfigError(
                f"{asked} different tokens, got {list(adapter.tokens)}: name each token once"
            )


def wrap_local(model: nn.Module, adapters: Sequence[AdapterParameter]) -> None:
    """Wrap embeddings and heads of a rank's model in PEFT's ``trainable_token_indices`` wrappers. Wrappers that are
    tied in the full model share their rows.
    """
    paths: dict[str, str] = {}
    for adapter in adapters:
        if adapter.kept_in == TOKEN_ROWS:
            path = adapter.module
            owner = paths.setdefault(adapter.first_name, path)
            tied = None if owner == path else owner
            wrap_tokens(model, adapter.name, path, adapter.tokens, tied)


def first_rows(
    model: nn.Module, plan: Plan, mesh: Mesh, shares: dict[str, Tensor]
) -> dict[str, Tensor]:
    """Return this rank's shards of the initial values ``[n, h]`` of trained token rows: copies of the rows of the
    weight that they replace. Keys are names of parameters in the plan; tied parameters have one entry. Collective over
    the ranks that hold a weight.

    Also store the original rows of each weight in its wrapper on this rank, so that PEFT can restore them when the
    trained rows, which replace them, are unmerged.
    """
    rows: dict[str, Tensor] = {}
    for adapter in plan.adapters:
        if adapter.kept_in != TOKEN_ROWS or not plan.is_local(mesh.pp_rank, adapter.name):
            continue
        owner = adapter.first_name
        if owner not in rows:
            base = plan.by_name[adapter.base]
            share = shares[base.first_name].contiguous()
            # Gather all rows at once, because each row may be on any rank.
            whole = gather_full(share, base.shape, base.cuts, mesh)
            rows[owner] = whole[list(adapter.tokens)]
        name = adapter.name.rpartition(".")[2]
        put_original_rows(_layer(model, adapter), name, rows[owner].to(mesh.device, copy=True))
    return {
        owner: plan.by_name[owner].take(whole, mesh.ranks).clone() for owner, whole in rows.items()
    }


def _layer(model: nn.Module, adapter: AdapterParameter) -> Any:
    return layer_of_tokens(module_at(model, adapter.module))


def install_token_rows(runtime: Runtime, sums: PartialSums) -> None:
    """Make PEFT's wrappers of weights that are sharded along the vocabulary replace only the rows of tokens in this
    rank's shard, and sum the gradients of the trained rows over tensor ranks.
    """
    plan = runtime.plan
    for adapter in plan.adapters:
        partial_here = "tp" in plan.by_name[adapter.name].partial
        if adapter.kept_in == TOKEN_ROWS and partial_here and runtime.is_local(adapter.name):
            _install(runtime, adapter, sums)


def _install(runtime: Runtime, adapter: AdapterParameter, sums: PartialSums) -> None:
    layer = _layer(runtime.model, adapter)
    base = layer.base_layer
    planned = runtime.plan.by_name[adapter.base]
    chosen, places = places_in(adapter.tokens, planned, runtime.mesh.ranks)
    key = adapter.name.rpartition(".")[2]
    holder = getattr(layer, TOKEN_ROWS)

    def merged(weight: Tensor) -> Tensor:
        rows = own_parameters(holder)[key]
        if rows is None or not replaces_rows(layer):
            return weight
        read = sums.read(rows) if rows.requires_grad else rows
        return with_rows(weight, read, chosen, places)

    merge_rows_by(layer, lambda: merged(base.weight))
    if isinstance(base, nn.Embedding):
        # The embedding's own forward looks up ids in its shard of the vocabulary.
        layer.forward = partial(_forward_inside, layer)
        read_through(layer, base, {"weight": merged})


def _forward_inside(layer: nn.Module, *args: Any, **kwargs: Any) -> Any:
    return own_modules(layer)[BASE](*args, **kwargs)  # type: ignore[misc]

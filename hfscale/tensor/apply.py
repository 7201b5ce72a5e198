"""Cut a stock model in place: local parameters, then the edges, in the plan's words.

Data flow of one block (``t`` tensor ranks, ``h`` hidden size)::

    [b, s, h] --enter--> column projections --> [b, s, .../t] --> row projection --> partial [b, s, h] --leave--> whole

Inside the edges every module is the stock one with local sizes and plain tensors, so whatever works on such modules
(adapters, quantized layers, compilers, FSDP) works there.
"""

from typing import Any

from torch import nn

from ..errors import ConfigError
from ..mesh import Mesh
from ..plan import ParameterPlan, Plan
from .edges import install_block_edges
from .embedding import install_vocab_parallel_embedding
from .shared import read_through_enter

# How a projection's size attributes follow its local weight: attribute -> dim of the weight. nn.Linear keeps its weight
# as [out, in], Conv1D as [in, out] = [nx, nf].
_SIZE_ATTRIBUTES = {"out_features": 0, "in_features": 1, "nx": 0, "nf": 1}

_PARTIAL_OUTPUTS = {
    "output_attentions": "would return the attention weights of this rank's heads only",
    "output_router_logits": "adds a loss on the router that every tensor rank would count once",
}


def install_edges(model: nn.Module, plan: Plan, mesh: Mesh) -> None:
    """Make a model that holds this rank's tensor shards compute with the others. No-op for one rank."""
    group = mesh.group("tp")
    if group is None:
        return
    for block in plan.blocks:
        module: Any = model.get_submodule(block.name)
        for attribute in block.local_attributes:
            owner, _, name = attribute.rpartition(".")
            holder = module.get_submodule(owner)
            setattr(holder, name, getattr(holder, name) // mesh.layout.size("tp"))
        if block.local_config:
            module.config = _LocalConfig(module.config, block.local_config, mesh.layout.size("tp"))
        for name in block.shared:
            read_through_enter(model.get_submodule(name), group)
        for name in block.row:
            read_through_enter(model.get_submodule(name), group, names=("bias",), once=mesh.ranks["tp"] == 0)
        install_block_edges(model, block, mesh)
    if plan.blocks:
        model.register_forward_pre_hook(_refuse_partial_outputs, with_kwargs=True)
    if plan.embedding is not None:
        planned = plan.by_name[f"{plan.embedding}.weight"]
        install_vocab_parallel_embedding(model.get_submodule(plan.embedding), planned, mesh)


class _LocalConfig:
    """A config as one block sees it: some fields are local sizes, the others are whatever the model's config says."""

    def __init__(self, config: Any, fields: tuple[str, ...], size: int) -> None:
        self.__dict__.update({field: getattr(config, field) // size for field in fields}, _whole=config)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "_whole":  # asked for by copy and pickle, before there is anything here
            raise AttributeError(name)
        return getattr(self._whole, name)


def _refuse_partial_outputs(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    for name, why in _PARTIAL_OUTPUTS.items():
        wanted = kwargs.get(name)
        if getattr(model.config, name, False) if wanted is None else wanted:
            raise ConfigError(f"{name}=True {why}: leave it out, or load the model with tp_size=1")


def cut_parameters(model: nn.Module, plan: Plan, mesh: Mesh) -> None:
    """Replace every parameter cut over the tensor axis by this rank's share, keeping ties and ``requires_grad``.

    Works on a whole model on any device; on the meta device it only changes shapes.
    """
    replaced: dict[int, nn.Parameter] = {}
    for planned in plan.parameters:
        if planned.cut_over("tp") is None:
            continue
        owner, _, attribute = planned.name.rpartition(".")
        module = model.get_submodule(owner)
        whole = getattr(module, attribute)
        if id(whole) not in replaced:
            replaced[id(whole)] = local_parameter(whole, planned, mesh)
        module._parameters[attribute] = replaced[id(whole)]
        if attribute == "weight":
            _follow_weight(module)


def local_parameter(whole: Any, planned: ParameterPlan, mesh: Mesh) -> nn.Parameter:
    """This rank's tensor share of a whole parameter, in memory of its own."""
    share = planned.take(whole.detach(), mesh.ranks, axes=("tp",))
    share = share.clone() if share.device.type != "meta" else share.new_empty(share.shape)
    return nn.Parameter(share, requires_grad=whole.requires_grad)


def _follow_weight(module: Any) -> None:
    for attribute, dim in _SIZE_ATTRIBUTES.items():
        if attribute in module.__dict__:
            setattr(module, attribute, module.weight.shape[dim])

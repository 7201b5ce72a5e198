"""Make an optimizer by name, over whatever the plan left of each parameter on this rank."""

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import ConfigError
from ..parallel.data import reshard
from ..plan import ParameterPlan
from ..runtime import Runtime, runtime_of
from . import adafactor, muon
from .catalog import Choice, Options, find_choice, parse_arguments
from .decay import owners_of, weight_decay_groups
from .eight_bit import steppers_by_size, stock_class, without_paging
from .sharded import ShardedOptimizer, members_of
from .stock import LocalStepper

_NARROW = (torch.float16, torch.bfloat16)


def create_optimizer(
    model: nn.Module,
    name: str = "adamw_torch_fused",
    *,
    lr: float | None,
    weight_decay: float = 0.0,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    optim_args: str | Mapping[str, Any] | None = None,
    groups: Sequence[Mapping[str, Any]] | None = None,
    **kwargs: Any,
) -> ShardedOptimizer:
    """An optimizer whose update is that of one process, whatever the layout; call it on every rank.

    Make it after the model is parallelized and ``requires_grad`` is set. It is an ordinary ``torch.optim.Optimizer``
    over the model's own parameters for schedulers, Accelerate, :func:`hfscale.save_state` and a loop's ``zero_grad``.

    Names are HF Trainer's (``TrainingArguments.optim``), with ``adam_8bit`` and ``muon``. bitsandbytes' 8-bit states
    have the blocks that they would have in one process. ``adafactor`` keeps averages of rows and columns of the whole
    matrix. ``muon`` orthogonalizes whole matrices of the layers; embeddings, head, vectors and stacks of experts are
    AdamW's. Results equal those of one process bit by bit, except where ranks sum (``adafactor``, to rounding) and
    where a CPU kernel rounds the ends of a tensor otherwise (torch's fused AdamW in float32, SGD in bfloat16).

    No optimizer here keeps a float32 copy of 16-bit weights: bfloat16 has 8 bits of precision, so updates smaller than
    about 1/512 of a weight are lost. Train such models with float32 weights and ``mixed_precision="bf16"``.

    Args:
        name: of the optimizer; an unknown one is answered with the list.
        lr: learning rate; ``None`` only for ``adafactor`` with ``relative_step=True``.
        weight_decay: of what HF Trainer lets decay: neither biases nor norms, by their names in the stock model.
        betas: of the Adam family and Lion; others do not look at it.
        eps: of the Adam family; others do not look at it, but have an option of that name in ``optim_args``.
        optim_args: further options as HF Trainer takes them, ``"momentum=0.9,nesterov=true"``, or as a mapping.
        groups: parameter groups in place of those by decay, with the model's own parameters.
        kwargs: further options; they win over ``optim_args``.

    Raises:
        ConfigError: the name or an option is unknown, a package is missing, or ``groups`` do not fit the model.
    """
    name = str(getattr(name, "value", name))
    choice = find_choice(name)
    options = choice.options(name, {"betas": betas, "eps": eps}, {**parse_arguments(optim_args), **kwargs})
    if lr is None and not options.get("relative_step"):
        raise ConfigError(f"lr=None: {name!r} needs a learning rate, lr=1e-4 say")
    runtime = runtime_of(model)
    reshard(runtime.model)  # or whole weights would be taken for the parameters
    plans = {id(parameter): planned for planned, parameter in runtime.parameters() if parameter.requires_grad}
    by_decay = weight_decay_groups(runtime, weight_decay)
    chosen = by_decay if groups is None else _checked(groups, plans, weight_decay, runtime)
    _warn_of_narrow_weights(name, runtime)
    order = _Order(name, choice, lr, options, chosen, plans, runtime)
    try:
        return _ENGINES[choice.engine](order)
    except ValueError as error:  # of the stock class, about a value
        raise ConfigError(f"{name!r} cannot be made: {error}") from error


@dataclass(frozen=True)
class _Order:
    name: str
    choice: Choice
    lr: Any
    options: Options
    groups: list[dict[str, Any]]
    plans: dict[int, ParameterPlan]
    runtime: Runtime

    def made(self, groups: list[dict[str, Any]], defaults: Options, steppers: Any) -> ShardedOptimizer:
        """The optimizer; ``steppers`` makes its steppers from members and groups with all their options."""
        full = [{**defaults, **group} for group in groups]
        return ShardedOptimizer(self.name, full, defaults, steppers(members_of(full, self.plans), full))


def _torch(order: _Order) -> ShardedOptimizer:
    stock = partial(getattr(torch.optim, order.choice.stock), lr=order.lr, **order.options)
    defaults = stock([{"params": []}]).defaults
    return order.made(order.groups, defaults, lambda members, groups: [LocalStepper(stock, members, groups)])


def _bitsandbytes(order: _Order) -> ShardedOptimizer:
    mesh = order.runtime.mesh
    stock = stock_class(order.name, order.choice.stock)
    options = {**without_paging(order.name, order.options, mesh.device), "lr": order.lr}
    defaults = stock([{"params": []}], **options).defaults
    return order.made(
        order.groups,
        defaults,
        lambda members, groups: steppers_by_size(order.name, stock, options, members, groups, mesh),
    )


def _adafactor(order: _Order) -> ShardedOptimizer:
    options = {**adafactor.DEFAULTS, **order.options}
    if options["relative_step"] and order.lr is not None:
        raise ConfigError("relative_step=True makes a learning rate of the step's number: pass lr=None with it")
    if options["warmup_init"] and not options["relative_step"]:
        raise ConfigError("warmup_init=True is about relative steps: pass relative_step=True with it")
    defaults = {"lr": order.lr, "weight_decay": 0.0, **options}
    mesh = order.runtime.mesh
    return order.made(order.groups, defaults, lambda members, _: [adafactor.AdafactorStepper(members, mesh)])


def _muon(order: _Order) -> ShardedOptimizer:
    """Every group becomes two: matrices of the layers, and the rest."""
    runtime, given = order.runtime, dict(order.options)
    adam = {key: given.pop(key) for key in order.choice.adam}
    other_lr = given.pop("adamw_lr", None)
    stock: Any = partial(torch.optim.AdamW, lr=order.lr if other_lr is None else other_lr, **adam)
    ours, theirs = {"lr": order.lr, **muon.DEFAULTS, **given}, stock([{"params": []}]).defaults
    if ours["adjust_lr_fn"] not in muon.ADJUSTMENTS:
        raise ConfigError(
            f"adjust_lr_fn={ours['adjust_lr_fn']!r} is unknown: use {', '.join(map(repr, muon.ADJUSTMENTS))}"
        )
    owners = owners_of(runtime.model)
    groups: dict[str, list[dict[str, Any]]] = {"muon": [], "adamw": []}
    for group in order.groups:
        parts: dict[str, list[Any]] = {"muon": [], "adamw": []}
        for parameter in group["params"]:
            planned = order.plans[id(parameter)]
            hidden = muon.is_hidden_matrix(planned, owners.get(id(parameter), []), runtime.plan.layers)
            parts["muon" if hidden else "adamw"].append(parameter)
        for kind, defaults in (("muon", ours), ("adamw", theirs)):
            groups[kind].append({**defaults, **group, "params": parts[kind]})

    def steppers(members: Any, groups_of_both: Any) -> Any:
        matrices = [member for member in members if member.group < len(order.groups)]
        rest = [member for member in members if member.group >= len(order.groups)]
        return [muon.MuonStepper(matrices, runtime.mesh), LocalStepper(stock, rest, groups_of_both)]

    return order.made([*groups["muon"], *groups["adamw"]], {"lr": order.lr}, steppers)


_ENGINES: dict[str, Callable[[_Order], ShardedOptimizer]] = {
    "torch": _torch,
    "bitsandbytes": _bitsandbytes,
    "adafactor": _adafactor,
    "muon": _muon,
}


def _checked(
    groups: Sequence[Mapping[str, Any]], plans: dict[int, ParameterPlan], weight_decay: float, runtime: Runtime
) -> list[dict[str, Any]]:
    """A user's groups, as lists."""
    result = []
    names = {id(parameter): name for name, parameter in runtime.model.named_parameters()}
    for group in groups:
        if "params" not in group:
            raise ConfigError(f"a parameter group without 'params', and with {', '.join(group)}: add the parameters")
        given = group["params"]
        parameters = [given] if isinstance(given, Tensor) else list(given)
        for parameter in parameters:
            if id(parameter) not in plans:
                known = names.get(id(parameter))
                what = f"{known} does not train" if known else f"one of shape {tuple(parameter.shape)} is not of it"
                raise ConfigError(f"groups must hold parameters of the model that train, and {what}: leave it out")
        result.append({"weight_decay": weight_decay, **group, "params": parameters})
    return result


def _warn_of_narrow_weights(name: str, runtime: Runtime) -> None:
    narrow = [(planned, p) for planned, p in runtime.parameters() if p.requires_grad and p.dtype in _NARROW]
    if narrow and runtime.mesh.speaks_for_stage:
        planned, parameter = narrow[0]
        warnings.warn(
            f"{len(narrow)} parameters that train are 16-bit ({planned.name} is {parameter.dtype}), and {name!r} keeps "
            "no float32 copy: updates smaller than about 1/512 of a bfloat16 weight are lost, and training stalls at "
            "small learning rates. Load the model with dtype=torch.float32, mixed_precision='bf16'",
            stacklevel=3,
        )

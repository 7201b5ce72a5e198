"""Create an optimizer by name over this rank's shards."""

import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import filterfalse
from typing import Any

import torch
from torch import Tensor, nn

from ..cost.model.optimizer_bytes import WIDE_EMBEDDINGS
from ..errors import ConfigError, check_count, check_number, check_switch
from ..plan import ParameterPlan
from ..plan.feature_plans import offloaded, refuse_aside
from ..train.around import refuse_trained_around
from ..train.runtime import Runtime, runtime_of
from ..train.runtime.runtime import PassObserver
from . import adafactor, muon
from .added_options import Added, split_options
from .catalog import OptimizerChoice, Options, find_choice, parse_arguments
from .eight_bit import by_size, embedding_weights, stock_class, without_paging
from .offloaded import OffloadedStepper, Pair
from .sharded import Groups, Member, ShardedOptimizer, Stepper, members_of
from .stock import Aside, CountUpdates, LocalStepper, OneByOneStepper, Stock

_NEVER = tuple(
    map(re.compile, (r"bias", r"layernorm", r"rmsnorm", r"(?:^|\.)norm(?:$|\.)", r"_norm(?:$|\.)"))
)
"""Patterns of lower-case parameter names that ``transformers.Trainer`` excludes from weight decay."""


def owners_of(model: nn.Module) -> dict[int, list[nn.Module]]:
    """Return, by ``id`` of each parameter, the modules that hold the parameter: several if it is tied."""
    owners: dict[int, list[nn.Module]] = {}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            owners.setdefault(id(parameter), []).append(module)
    return owners


def decays(name: str, owners: list[nn.Module]) -> bool:
    """Return whether weight decay applies to a parameter, by its name and the modules that hold it: it does not apply
    to biases and norms.
    """
    if any(isinstance(owner, nn.LayerNorm) for owner in owners):
        return False
    return not any(pattern.search(name.lower()) for pattern in _NEVER)


def weight_decay_groups(runtime: Runtime, weight_decay: float) -> list[dict[str, Any]]:
    """Return two groups of trainable parameters: with ``weight_decay``, and without. Either may be empty on a rank. The
    name in the plan decides, not the name on this rank, so a parameter is in the same group in every layout.
    """
    owners = owners_of(runtime.around_it)
    decayed = list[Tensor]()
    others = list[Tensor]()
    for planned, parameter in runtime.parameters():
        if parameter.requires_grad:
            decay = decays(planned.name, owners.get(id(parameter), []))
            (decayed if decay else others).append(parameter)
    return [
        {"params": decayed, "weight_decay": weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]


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
    stochastic_rounding: bool = False,
    rounding_seed: int = 0,
    **kwargs: Any,
) -> ShardedOptimizer:
    """Return an optimizer whose update equals that of one process, in every layout. Call it on every rank.

    Create the optimizer after the model is parallelized and ``requires_grad`` is set. Schedulers, Accelerate and
    training loops can use it like any ``torch.optim.Optimizer`` over the model's own parameters.

    Names are HF Trainer's, plus ``adam_8bit`` and ``muon``:

    - bitsandbytes' 8-bit states have the same blocks as in one process. Embeddings have 32-bit states with
      ``embeddings_in_32_bits=True``, which HF Trainer sets.
    - ``adafactor`` averages rows and columns of full matrices.
    - ``muon`` orthogonalizes full matrices of the layers. Embeddings, head and vectors use AdamW; so do stacks of
      experts unless ``experts=True``.

    Results equal those of one process bit by bit, with two exceptions: sums over ranks (``adafactor``, up to rounding),
    and CPU kernels that round the ends of a tensor differently (torch's fused AdamW in float32, SGD in bfloat16).

    No optimizer keeps a float32 copy of 16-bit weights, so updates smaller than about 1/512 of a bfloat16 weight are
    lost. Train with float32 weights and ``mixed_precision="bf16"``, or with ``stochastic_rounding``. With
    ``MemoryConfig(offload_optimizer=True)`` states are kept, and steps computed, on the CPU.

    Args:
        name: name of the optimizer. The error for an unknown name lists all names.
        lr: learning rate; ``None`` only for ``adafactor`` with ``relative_step=True``.
        weight_decay: weight decay. Like in HF Trainer, it does not apply to biases and norms, by their names in the
            stock model.
        betas, eps: options of the Adam family (and ``betas`` of Lion). Other optimizers may have options of these names
            in ``optim_args``.
        optim_args: further options in HF Trainer's form, ``"momentum=0.9,nesterov=true"``, or as a mapping.
        groups: parameter groups of the model's own parameters, in place of the two groups with and without decay.
        stochastic_rounding: step bfloat16 weights in float32 and round them stochastically, so that small updates are
            right on average. The rounding is the same in every layout. For torch's and bitsandbytes' optimizers.
        rounding_seed: seed of the stochastic rounding.
        kwargs: further options; they override ``optim_args``.

    Raises:
        ConfigError: the name or an option is unknown, a package is missing, or ``groups`` do not fit the model.
    """
    choice = find_choice(name := str(getattr(name, "value", name)))
    own, added = split_options(name, {**parse_arguments(optim_args), **kwargs})
    options = choice.options(name, {"betas": betas, "eps": eps}, own)
    if lr is None and not options.get("relative_step"):
        raise ConfigError(f"lr=None: {name!r} needs a learning rate: pass one, such as lr=1e-4")
    numbers = {
        "lr": lr,
        "weight_decay": weight_decay,
        **({"eps": eps} if "eps" in choice.adam else {}),
    }
    _check_numbers(numbers, betas, choice.betas)
    runtime = runtime_of(model)
    refuse_trained_around(runtime, model)
    plans = {
        id(parameter): planned
        for planned, parameter in runtime.parameters()
        if parameter.requires_grad
    }
    checked = _checked(groups, plans, weight_decay, runtime)
    aside = _how_to_copy(name, runtime, stochastic_rounding, rounding_seed)
    _warn_of_narrow_weights(name, runtime)
    order = _Order(name, choice, lr, options, checked, plans, runtime, aside, added)
    try:
        return _ENGINES[choice.engine](order)
    except ValueError as error:  # the stock class raises for invalid values
        raise ConfigError(
            f"{name!r} cannot be made: {error}; change the value of this option"
        ) from error


def _check_numbers(
    given: Mapping[str, Any],
    betas: Any,
    counts: tuple[int, ...],
) -> None:
    """Raise :class:`ConfigError` for values that are not valid numbers. The stock class checks upper limits."""
    for option, value in given.items():
        if not isinstance(value, Tensor) and not (option == "lr" and value is None):
            check_number(option, value, least=0)
    if not isinstance(betas, Sequence) or isinstance(betas, str) or len(betas) not in counts:
        raise ConfigError(
            f"betas={betas!r} is invalid: pass {' or '.join(map(str, counts))} numbers, like (0.9, 0.999)"
        )
    for beta in betas:
        if not isinstance(beta, Tensor):
            check_number("betas", beta, least=0, most=1)


@dataclass(frozen=True)
class _Order:
    name: str
    choice: OptimizerChoice
    lr: Any
    options: Options
    groups: list[dict[str, Any]]
    plans: dict[int, ParameterPlan]
    runtime: Runtime
    aside: Aside | None = None
    added: Added = field(default_factory=dict)
    pair: Pair = field(default_factory=Pair)

    def stepper(
        self, stock: Stock, members: Sequence[Member], groups: Groups, full: bool = False
    ) -> Stepper:
        """Return a stepper that updates the parameters ``members`` with the optimizer class ``stock``. With ``full``,
        it updates full parameters, gathered from their shards.
        """
        mesh = self.runtime.mesh
        if self.aside is None and not full:
            return LocalStepper(stock, members, groups, mesh)
        given = stock, members, groups, mesh, self.aside, full
        if offloaded(self.runtime.plan).optimizer:
            return OffloadedStepper(self.pair, *given)
        return OneByOneStepper(*given)

    def made(
        self, groups: list[dict[str, Any]], defaults: Options, steppers: Any
    ) -> ShardedOptimizer:
        """Return the optimizer of the parameter groups ``groups``, in which missing options get the values in
        ``defaults``. The function ``steppers`` gets the optimizer's parameters and the completed groups, and returns
        the objects that update the parameters.
        """
        self.runtime.observer = PassObserver()  # the present one belongs to an earlier optimizer
        full = [{**defaults, **group} for group in groups]
        members = members_of(full, self.plans)
        made = list(steppers(members, full))
        for option, value in self.added.values():
            made += option.steppers(value, members, self.runtime)
        aside = self.aside
        made += (
            [CountUpdates((), self.runtime.mesh)]
            if aside is not None and aside.seed is not None
            else []
        )
        return ShardedOptimizer(
            self.name, full, defaults, made, None if aside is None else aside.device
        )


def _torch(order: _Order) -> ShardedOptimizer:
    stock = partial(
        getattr(torch.optim, order.choice.stock),
        lr=order.lr,
        **order.options,
    )
    defaults = stock([{"params": []}]).defaults
    return order.made(
        order.groups, defaults, lambda members, groups: [order.stepper(stock, members, groups)]
    )


def _bitsandbytes(order: _Order) -> ShardedOptimizer:
    mesh = order.runtime.mesh
    stock = stock_class(order.name, order.choice.stock)
    options = {**without_paging(order.name, order.options, mesh.device), "lr": order.lr}
    embeddings = (
        embedding_weights(order.runtime) if options.pop(WIDE_EMBEDDINGS, False) else set[str]()
    )
    eight: Stock = partial(stock, **{**options, "optim_bits": 8, "min_8bit_size": 0})
    rest = {key: value for key, value in options.items() if key != "min_8bit_size"}

    def steppers(members: Sequence[Member], groups: Groups) -> list[Stepper]:
        in_place, apart, wide = by_size(order.name, members, options, mesh, embeddings)
        return [
            order.stepper(eight, in_place, groups),
            order.stepper(eight, apart, groups, full=True),
            order.stepper(partial(stock, **{**rest, "optim_bits": 32}), wide, groups),
        ]

    return order.made(
        order.groups,
        stock([{"params": []}], **options).defaults,
        steppers,
    )


def _adafactor(order: _Order) -> ShardedOptimizer:
    options = {**adafactor.DEFAULTS, **order.options}
    if options["relative_step"] and order.lr is not None:
        raise ConfigError(
            f"relative_step=True computes the learning rate from the step, but lr={order.lr} is given: pass lr=None "
            "with relative_step=True"
        )
    if options["warmup_init"] and not options["relative_step"]:
        raise ConfigError(
            "warmup_init=True needs relative_step=True: pass relative_step=True too, or leave warmup_init out"
        )
    defaults = {"lr": order.lr, "weight_decay": 0.0, **options}
    mesh = order.runtime.mesh
    return order.made(
        order.groups, defaults, lambda members, _: [adafactor.AdafactorStepper(members, mesh)]
    )


def _muon(order: _Order) -> ShardedOptimizer:
    """Make a Muon optimizer. Each parameter group is split: Muon updates the matrices of layers, AdamW all other
    parameters.
    """
    runtime, given = order.runtime, dict(order.options)
    adam = {key: given.pop(key) for key in order.choice.adam}
    other_lr = given.pop("adamw_lr", None)
    split = given.pop("split", {})
    dtype = given.pop("ns_dtype", "bfloat16")
    stacks = (
        {mixture.name for mixture in runtime.plan.mixtures}
        if given.pop("experts", False)
        else set()
    )
    stock: Any = partial(
        torch.optim.AdamW,
        lr=order.lr if other_lr is None else other_lr,
        **adam,
    )
    ours = {"lr": order.lr, **muon.DEFAULTS, **given}
    theirs = stock([{"params": []}]).defaults
    if ours["adjust_lr_fn"] not in muon.ADJUSTMENTS:
        raise ConfigError(
            f"adjust_lr_fn={ours['adjust_lr_fn']!r} is unknown: use {', '.join(map(repr, muon.ADJUSTMENTS))}"
        )
    if dtype not in muon.NS_DTYPES:
        raise ConfigError(f"ns_dtype={dtype!r} is unknown: use {', '.join(muon.NS_DTYPES)}")
    if unknown := split.keys() - {
        muon.projection_of(planned) for planned in runtime.plan.parameters
    }:
        raise ConfigError(
            f"split={split!r}: the model has no projection called {', '.join(sorted(unknown))}: use the last parts of "
            "projections' names, like 'qkv_proj'"
        )
    owners = owners_of(runtime.model)
    matrices = list[dict[str, Any]]()
    others = list[dict[str, Any]]()

    def is_hidden(parameter: nn.Parameter) -> bool:
        planned = order.plans[id(parameter)]
        holders = owners.get(id(parameter), [])
        return muon.is_hidden_matrix(planned, holders, runtime.plan.layers, stacks)

    for group in order.groups:
        own = group["params"]
        matrices.append({**ours, **group, "params": list(filter(is_hidden, own))})
        others.append({**theirs, **group, "params": list(filterfalse(is_hidden, own))})

    def steppers(members: Any, groups_of_both: Any) -> Any:
        hidden = [member for member in members if member.group < len(order.groups)]
        rest = [member for member in members if member.group >= len(order.groups)]
        bounds = {
            m.planned.name: muon.bounds_of(
                m.planned,
                owners[id(m.parameter)],
                split,
            )
            for m in hidden
        }
        first = muon.MuonStepper(hidden, runtime.mesh, bounds, muon.NS_DTYPES[dtype])
        return [first, LocalStepper(stock, rest, groups_of_both, runtime.mesh)]

    return order.made(matrices + others, {"lr": order.lr}, steppers)


_ENGINES: dict[str, Callable[[_Order], ShardedOptimizer]] = {
    "torch": _torch,
    "bitsandbytes": _bitsandbytes,
    "adafactor": _adafactor,
    "muon": _muon,
}


def _how_to_copy(name: str, runtime: Runtime, stochastic: Any, rounding_seed: Any) -> Aside | None:
    """Return how weights are copied for offload or stochastic rounding; ``None`` if the optimizer updates weights in
    place.
    """
    check_switch("stochastic_rounding", stochastic)
    check_count("rounding_seed", rounding_seed, least=0)
    seed = rounding_seed if stochastic else None
    host = offloaded(runtime.plan).optimizer
    runtime.keeps_small_updates = seed is not None
    if seed is None and not host:
        return None
    refuse_aside(name, "offload_optimizer=True" if host else "stochastic_rounding=True")
    return Aside(torch.device("cpu") if host else runtime.mesh.device, seed)


def _checked(
    groups: Sequence[Mapping[str, Any]] | None,
    plans: dict[int, ParameterPlan],
    weight_decay: float,
    runtime: Runtime,
) -> list[dict[str, Any]]:
    """Return the user's parameter groups, checked; if ``groups`` is ``None``, two groups with and without weight
    decay.
    """
    if groups is None:
        return weight_decay_groups(runtime, weight_decay)
    result = []
    if (
        not isinstance(groups, Sequence)
        or not all(isinstance(group, Mapping) for group in groups)
        or not groups
    ):
        raise ConfigError(
            f"groups={groups!r} is invalid: pass a list of mappings, like [{{'params': [...], 'lr': 1e-4}}]"
        )
    names = {id(parameter): name for name, parameter in runtime.model.named_parameters()}
    for group in groups:
        if "params" not in group:
            raise ConfigError(
                f"every entry of groups= must have 'params', got an entry with only {', '.join(group)}: add the "
                "parameters of the group"
            )
        given = group["params"]
        parameters = [given] if isinstance(given, Tensor) else list(given)
        for parameter in parameters:
            if id(parameter) not in plans:
                known = names.get(id(parameter))
                what = (
                    f"{known} does not train"
                    if known
                    else f"one of shape {tuple(parameter.shape)} does not belong to the model"
                )
                raise ConfigError(
                    f"groups= must hold parameters of the model that train, but {what}: leave this parameter out of "
                    "groups"
                )
        for option in ("lr", "weight_decay"):
            if not isinstance(value := group.get(option, 0.0), Tensor):
                check_number(f"{option} of a parameter group", value, least=0)
        result.append({"weight_decay": weight_decay, **group, "params": parameters})
    return result


def _warn_of_narrow_weights(name: str, runtime: Runtime) -> None:
    narrow = [
        (planned, p)
        for planned, p in runtime.parameters()
        if p.requires_grad and p.dtype in _NARROW
    ]
    if narrow and not runtime.keeps_small_updates and runtime.mesh.speaks_for_stage:
        planned, parameter = narrow[0]
        warnings.warn(
            f"{len(narrow)} parameters that train are 16-bit ({planned.name} is {parameter.dtype}), and {name!r} keeps "
            "no float32 copy: updates smaller than about 1/512 of a bfloat16 weight are lost, and training stalls at "
            "small learning rates. Load the model with dtype=torch.float32, mixed_precision='bf16'",
            stacklevel=3,
        )

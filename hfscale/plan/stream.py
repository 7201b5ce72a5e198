"""Plan sequence parallelism: where the stream is cut, and which parameters see their rank's tokens only."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers.pytorch_utils import Conv1D

from .clone import tiny_clone
from .draft import Draft
from .families import SEQUENCE_UNFIT
from .plan import BlockPlan, StreamPlan, join_path, wild_name

_TOKENWISE = (nn.Linear, Conv1D, nn.Dropout, nn.Identity, nn.Embedding)


def share_evenly(total: int, size: int) -> list[int]:
    """``total`` entries over ``size`` ranks: lengths that differ by at most one, the longer ones first."""
    return [total // size + (rank < total % size) for rank in range(size)]


def plan_streams(
    draft: Draft, layers: list[str], blocks: list[BlockPlan], embedding: str | None
) -> tuple[StreamPlan, ...]:
    """One stream per layer list; the rules of its parameters go into ``draft``."""
    unfit = SEQUENCE_UNFIT.get(draft.config.model_type)
    if unfit:
        draft.problem(
            f"sequence_parallel=True does not fit {draft.config.model_type!r}: {unfit}: use sequence_parallel=False"
        )
        return ()
    lists: dict[str, list[str]] = {}
    for layer in layers:
        lists.setdefault(layer.rpartition(".")[0], []).append(layer)
    owners = {path.rpartition(".")[0]: members for path, members in lists.items()}
    probe = _probe(draft, {members[0]: owner for owner, members in owners.items()}, embedding)
    streams = []
    for owner, members in owners.items():
        if not any(block.name.startswith(f"{owner}.") for block in blocks):
            continue
        before = probe.before.get(owner)
        rest = [
            name
            for name in _direct_children(draft.modules, owner)
            if name not in lists and _has_parameters(draft, name)
        ]
        if rest and before is None:
            draft.problem(
                f"sequence_parallel=True needs to know which of {', '.join(map(wild_name, rest))} come before the "
                f"layers, and {type(draft.model).__name__} cannot be traced ({probe.failure}): use "
                "sequence_parallel=False"
            )
            continue
        after = [name for name in rest if name not in (before or ())]
        edges = _edges(blocks)
        streams.append(
            StreamPlan(
                owner=owner,
                exit=after[0] if len(after) == 1 else owner,  # an owner may reshape what its only norm returns
                layers=tuple(members),
                gathered=tuple(name for layer in members for name in _gathered(draft, layer, edges)),
                partial=tuple(_partial(draft, [*members, *after])),
                direct=probe.direct == members[0],
                dropout=_drops_out(draft, members),
            )
        )
    return tuple(streams)


def _direct_children(modules: dict[str, Any], owner: str) -> list[str]:
    return [join_path(owner, name) if owner else name for name, _ in modules[owner].named_children()]


def _has_parameters(draft: Draft, name: str) -> bool:
    return next(draft.modules[name].parameters(), None) is not None


def _edges(blocks: list[BlockPlan]) -> set[str]:
    """Modules inside edges, or with an edge on them."""
    return {name for block in blocks for name in (*block.enter, *block.leave, *block.row)}


def _gathered(draft: Draft, path: str, edges: set[str]) -> Iterator[str]:
    """Modules under ``path`` that are outside of all edges and may compute across tokens."""
    for name in _direct_children(draft.modules, path):
        module = draft.modules[name]
        if name in edges or isinstance(module, _TOKENWISE) or "Norm" in type(module).__name__:
            continue
        if any(edge.startswith(f"{name}.") for edge in edges):
            yield from _gathered(draft, name, edges)
        elif _has_parameters(draft, name):
            yield name


def _partial(draft: Draft, roots: list[str]) -> Iterator[str]:
    """Modules under ``roots`` that own parameters without a rule yet; the rule is that their gradients are partial."""
    for root in roots:
        for name, module in draft.modules[root].named_modules(prefix=root):
            own = [f"{name}.{child}" for child, _ in module.named_parameters(recurse=False)]
            free = [parameter for parameter in own if parameter not in draft.rules]
            draft.rules.update(dict.fromkeys(free, (None, ("tp",))))
            if free and len(free) == len(own):
                yield name
            elif free:
                draft.problem(
                    f"sequence_parallel=True: {wild_name(name)} holds parameters that are cut and others that are not: "
                    "use sequence_parallel=False"
                )


def _drops_out(draft: Draft, layers: list[str]) -> bool:
    modules = [module for layer in layers for module in draft.modules[layer].modules()]
    fields: dict[str, Any] = draft.config.to_dict()
    return any(isinstance(module, nn.Dropout) and module.p > 0 for module in modules) or any(
        "drop" in name and isinstance(value, float) and value > 0 for name, value in fields.items()
    )


class _Reached(Exception):
    """Every first layer has been called."""


def _probe(draft: Draft, firsts: dict[str, str], embedding: str | None) -> "_Probe":
    """Trace the model itself (without memory, mostly), or, where its code looks at values, a tiny clone of it."""
    probe = _Probe(draft.model, draft.modules, firsts, embedding)
    if not probe.failure:
        return probe
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        try:
            clone = type(draft.model)._from_config(tiny_clone(draft.config))
        except Exception:  # whatever stock code says of a clone it cannot build
            return probe
    return _Probe(clone, dict(clone.named_modules()), firsts, embedding)


class _Probe(TorchDispatchMode):
    """Run a model on two tokens up to its first layers, and note what was called before them.

    Attributes:
        before: owner -> modules directly below it that were called before its first layer.
        direct: the first layer that got what the embedding returned, when nothing else did.
        failure: why the model could not be run, if so.
    """

    def __init__(self, model: Any, modules: dict[str, Any], firsts: dict[str, str], embedding: str | None) -> None:
        super().__init__()
        self.before: dict[str, set[str]] = {}
        self.direct: str | None = None
        self.failure = ""
        self._embedded: Tensor | None = None
        self._uses = 0
        self._called: set[str] = set()
        handles = []
        for owner in set(firsts.values()):
            for name in _direct_children(modules, owner):
                handles.append(modules[name].register_forward_pre_hook(lambda *_, n=name: self._called.add(n)))
        for layer, owner in firsts.items():
            hook = self._first_layer(layer, owner, len(firsts))
            handles.append(modules[layer].register_forward_pre_hook(hook, with_kwargs=True))
        if embedding is not None:
            handles.append(modules[embedding].register_forward_hook(self._after_embedding))
        try:
            self._run(model)
        except _Reached:
            pass
        except Exception as error:  # whatever stock code says of a run without memory
            self.failure = f"{type(error).__name__}: {error}".split("\n")[0][:100]
        finally:
            for handle in handles:
                handle.remove()

    def _run(self, model: Any) -> None:
        device = next(model.parameters()).device
        ids = torch.full((1, 2), 3, dtype=torch.long, device=device)
        inputs = {"input_ids": ids, **({"decoder_input_ids": ids} if model.config.is_encoder_decoder else {})}
        with torch.no_grad(), torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), self:
            model(**inputs)

    def _first_layer(self, layer: str, owner: str, owners: int) -> Any:
        def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            x = args[0] if args else kwargs.get("hidden_states")
            if x is self._embedded and x is not None and self._uses == 0:
                self.direct = layer
            self.before[owner] = set(self._called)
            if len(self.before) == owners:
                raise _Reached

        return hook

    def _after_embedding(self, _: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
        self._embedded, self._uses = output, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._embedded is not None and any(leaf is self._embedded for leaf in tree_leaves((args, kwargs))):
            self._uses += 1
        return func(*args, **(kwargs or {}))

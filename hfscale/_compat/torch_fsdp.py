"""Private names of FSDP2.

Checked with torch 2.13 to 2.15. FSDP2 reduces gradients in autograd hooks. These hooks fail if several microbatches are
in flight at once, or if a split backward pass computes gradients of weights without calling them. Therefore reductions
are triggered explicitly, like in torch's own pipelines.

The gradients of a group are reduced in one buffer, so all trained parameters of a group need one dtype. But 16-bit
models keep routers, decays or sinks in 32 bits, and adapters train in 32 bits over a 16-bit base. Parameters that are
trained in another dtype than most of a module get a separate group: it is gathered and resharded together with the
other groups, but reduced separately.
"""

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.tensor import DTensor

from .torch_device import keep_for_stream

MARKS = frozenset({"_is_fsdp_managed_module", "_fsdp_use_orig_params"})
"""Attributes that FSDP2 sets on every module inside a wrapped module."""

Agree = Callable[[list[bool]], list[bool]]
# Parameters by dtype, and by whether they keep that dtype in computing.
_ByType = dict[tuple[torch.dtype, bool], list[nn.Parameter]]
_ENDED_BY_HAND = "manual_backward_finalization_active"
_state_of: Callable[[Any], Any] = fully_shard.state  # type: ignore[attr-defined]


def shard_by_type(
    module: nn.Module,
    *,
    ignored: set[nn.Parameter],
    uncast: Collection[nn.Parameter] = (),
    **how: Any,
) -> None:
    """Apply ``fully_shard(module, **how)`` to all parameters except ``ignored`` ones, with one group per trained dtype,
    and one for the parameters in ``uncast``, which keep their dtype in computing.
    """
    others: _ByType = {}  # to be sharded apart: all but the most frequent trained dtype
    for parameter in module.parameters():
        grouped = parameter.requires_grad or parameter in uncast
        if grouped and parameter not in ignored and not isinstance(parameter, DTensor):
            others.setdefault((parameter.dtype, parameter in uncast), []).append(parameter)
    if cast := [key for key in others if not key[1]]:
        del others[
            max(
                cast,
                key=lambda key: sum(parameter.numel() for parameter in others[key]),
            )
        ]
    apart = {parameter for parameters in others.values() for parameter in parameters}
    fully_shard(module, ignored_params=ignored | apart, **how)
    groups: Any = _state_of(module)._fsdp_param_groups if others else []
    given = how["mp_policy"]
    for (_, keeps), parameters in others.items():
        first = groups[0]
        policy = replace(given, param_dtype=None) if keeps else given
        groups.append(
            type(first)(
                parameters, first.modules, first.mesh_info, first.post_forward_mesh_info, first.device,
                how.get("shard_placement_fn"), policy, first.offload_policy,
            )
        )  # fmt: skip


def _sharded_groups(model: nn.Module, inner: bool = True) -> Iterator[tuple[str, Any]]:
    """Yield ``(module name, parameter group)`` for every FSDP2 parameter group of every wrapped module; without
    ``inner``, only for the groups of ``model`` itself.
    """
    for name, module in model.named_modules() if inner else [("", model)]:
        if isinstance(module, FSDPModule):
            yield from ((name, group) for group in _state_of(module)._fsdp_param_groups)


def _managed(model: nn.Module, inner: bool = True) -> Iterator[Any]:
    """Yield FSDP2's objects of all parameters in the groups of :func:`_sharded_groups`."""
    for _, group in _sharded_groups(model, inner):
        yield from group.fsdp_params


def _states(model: nn.Module) -> list[Any]:
    """Return the ``FSDPState`` objects of all modules in ``model`` that FSDP2 wraps, outer modules first."""
    return [_state_of(module) for module in model.modules() if isinstance(module, FSDPModule)]


@dataclass(frozen=True)
class ParameterGroup:
    """Hold an FSDP2 parameter group: parameters whose gradients are reduced together, in one flat buffer."""

    module: str  # the name of the module that FSDP2 wraps
    sizes: list[torch.Size]  # padded sizes of this rank's trained shards, in the buffer's order
    _group: Any

    def average_by(self, hook: Callable[[Tensor], None]) -> None:
        """Call ``hook(buffer)`` when the group's flat buffer of gradients has been reduce-scattered over the ranks that
        shard the parameters.
        """

        def averaged(flat: Tensor) -> None:
            # The buffer belongs to the reduce-scatter stream, and hooks run on another stream. FSDP2 frees the buffer
            # as soon as the hook is called, unless gradients are views of the buffer. Without this call, the next
            # group's reduction would overwrite the buffer.
            keep_for_stream(flat)
            hook(flat)

        self._group._all_reduce_hook = averaged


def parameter_groups(model: nn.Module) -> Iterator[ParameterGroup]:
    """Yield the FSDP2 parameter groups of every wrapped module, outer modules first. Call it before the first forward
    pass.
    """
    for name, group in _sharded_groups(model):
        trained = [p for p in group.fsdp_params if p.sharded_param.requires_grad]
        yield ParameterGroup(name, [p.padded_sharded_param_size for p in trained], group)


def cast_shards(model: nn.Module, types: Mapping[nn.Parameter, torch.dtype]) -> None:
    """Change the dtype of wrapped modules' parameters in place, keeping the parameter objects; call it between steps. A
    group is reduced in one buffer, so a group whose parameters would get different dtypes stays unchanged.
    """
    for _, group in _sharded_groups(model):
        for held in group.fsdp_params:
            held.reset_sharded_param()  # before the first pass FSDP2 may not have the loaded parameters
        trained = [held for held in group.fsdp_params if held.sharded_param.requires_grad]
        wanted = {types.get(held.sharded_param, held.sharded_param.dtype) for held in trained}
        if len(wanted) != 1 or wanted == {held.sharded_param.dtype for held in trained}:
            continue
        for held in trained:
            cast = nn.Parameter(held.sharded_param.detach().to(next(iter(wanted))))
            torch.utils.swap_tensors(held.sharded_param, cast)
            held.reset_sharded_param()
        group._init_mp_dtypes()


def gather_root(model: nn.Module) -> None:
    """All-gather the weights outside the layers, as FSDP2 would when the model is called. This is needed if modules of
    the model are called directly.
    """
    root = _state_of(model)
    root._lazy_init()  # otherwise the first called layer would become the root
    for group in root._fsdp_param_groups:
        group.unshard()
        group.wait_for_unshard()


def reduce_now(model: nn.Module) -> None:
    """Reduce-scatter the gradients that backward passes have accumulated, and end the step."""
    for state in _states(model):
        for group in state._fsdp_param_groups:
            group.post_backward()
    root = _state_of(model)
    iteration = root._state_ctx
    # The hooks of this pass were not called by autograd. torch 2.15 records who ends the pass; `False` means torch
    # itself.
    if getattr(iteration, _ENDED_BY_HAND, False) is None:
        setattr(iteration, _ENDED_BY_HAND, False)
    root._root_post_backward_final_callback()


def forget_iteration(model: nn.Module) -> None:
    """Drop the unreduced gradients of an interrupted step, which ``zero_grad`` does not reach, and the record of where
    the step's passes stopped. Reduced gradients stay in ``.grad``. FSDP2's own ``reset_iter_state`` does not do this:
    before torch 2.15 it keeps unreduced gradients, since 2.15 it drops reduced gradients.
    """
    root: Any = model
    parameters = list(_managed(model))
    reduced = [held.sharded_param.grad for held in parameters]
    for held in parameters:
        if hasattr(held, "unsharded_param"):
            held.unsharded_param.grad = None
        if held.unsharded_accumulated_grad is not None:
            held.unsharded_accumulated_grad = None
    root.reset_iter_state()
    for held, gradient in zip(parameters, reduced, strict=True):
        held.sharded_param.grad = gradient


def agree_on_gradients(model: nn.Module, modules: set[nn.Module], agree: Agree) -> None:
    """Let all ranks reduce the same gradients of ``modules``, even if the batch of a rank did not use the modules. This
    applies to the parameter groups of the root FSDP module. A gradient that this rank lacks but another rank has (found
    by ``agree``) is reduced as zeros; a gradient that no rank has stays ``None``.
    """
    root, *inner = _states(model)
    for group in root._fsdp_param_groups:
        held = [
            p
            for p in group.fsdp_params
            if p._module_info.module in modules and p.sharded_param.requires_grad
        ]
        group.post_backward = partial(_reduce_alike, inner, group, group.post_backward, held, agree)


def _reduce_alike(
    inner: list[Any],
    group: Any,
    reduce: Callable[[], None],
    held: list[Any],
    agree: Agree,
    *_: Any,
) -> None:
    # If no tower ran on this rank and the embedding is frozen, the inputs of the first layers need no gradient. FSDP2
    # would then reduce these layers after the root, while ranks with a tower reduce them before the root.
    for state in reversed(inner):
        for late in reversed(state._fsdp_param_groups):
            if late._training_state != TrainingState.POST_BACKWARD:
                late.post_backward()
    if held and group.reduce_grads and group.is_unsharded:
        here = [
            p.unsharded_accumulated_grad is not None or p.unsharded_param.grad is not None
            for p in held
        ]
        for parameter, has_gradient, anywhere in zip(held, here, agree(here), strict=True):
            if anywhere and not has_gradient:
                parameter.unsharded_param.grad = torch.zeros_like(parameter.unsharded_param)
    reduce()


def add_up_gradients(model: nn.Module) -> None:
    """Add gradients that autograd's hooks have not handled to FSDP2's buffers, in the dtype of the reduction. Since
    torch 2.15 parameters accumulate in that dtype themselves.
    """
    if not hasattr(FSDPParam, "to_accumulated_grad_if_needed"):
        return
    for parameter in _managed(model):
        parameter.accumulate_unsharded_grad_if_needed()
        parameter.to_accumulated_grad_if_needed()


@dataclass(frozen=True)
class ManagedPlace:
    """Describe a module's attribute that holds either FSDP2's shard or the full parameter."""

    module: nn.Module  # the module with the attribute
    name: str  # the attribute's name
    first: Any  # the attribute's value at first; FSDP2 reads it in its first pass
    _parameter: Any

    def has_its_own(self) -> bool:
        """Return whether the attribute holds a tensor that FSDP2 manages, its shard or its gathered parameter, and not
        one that other code put there.
        """
        parameter = self.module._parameters.get(self.name)
        managed = self._parameter
        known = parameter is self.first or parameter is managed.sharded_param
        return known or parameter is getattr(managed, "unsharded_param", None)

    def put_back(self) -> None:
        """Set the attribute to FSDP2's shard if it holds a tensor that FSDP2 does not manage."""
        if not self.has_its_own():
            self.module._parameters[self.name] = self._parameter.sharded_param

    def has_another_type(self) -> bool:
        """Return whether the shard's dtype has changed since FSDP2 allocated its buffers."""
        managed = self._parameter
        return (
            hasattr(managed, "unsharded_param")
            and managed.sharded_param.dtype != managed.orig_dtype
        )

    def is_gathered(self) -> bool:
        """Return whether the attribute holds the full parameter."""
        return not isinstance(self.module._parameters.get(self.name), DTensor)


def managed_places(model: nn.Module, inner: bool = True) -> Iterator[ManagedPlace]:
    """Yield every module attribute that holds a parameter sharded by FSDP2; a tied parameter has several. Without
    ``inner``, yield only those of parameters that the wrapper of ``model`` itself shards.
    """
    for parameter in _managed(model, inner):
        place = parameter._module_info
        names = [(place.module, place.param_name)]
        names += zip(place.shared_modules, place.shared_param_names, strict=True)
        for module, name in names:
            yield ManagedPlace(module, name, module._parameters.get(name), parameter)


class _Whole(FSDPParam):
    """Compute with a shard that is the whole parameter; stock FSDP2 makes a copy of the shard in the first pass."""

    def _is_read_in_place(self) -> bool:
        """Return whether the shard can be read directly: not cast, not offloaded, and alone in its storage."""
        shard = self._sharded_param_data
        alone = shard.untyped_storage().nbytes() == shard.nbytes
        return self.param_dtype is None and not self.offload_to_cpu and alone

    def init_all_gather_outputs(self, *given: Any, **named: Any) -> None:
        """Use the shard as the all-gather's output, so that FSDP2 copies the shard onto itself, which does nothing."""
        if not self._is_read_in_place():
            super().init_all_gather_outputs(*given, **named)
            return
        shard = self._sharded_param_data
        before = self.all_gather_outputs
        if before and before[0].data_ptr() != shard.data_ptr():  # other weights have been loaded
            vars(self).pop("_unsharded_param", None)
        self.all_gather_outputs = [shard]

    def free_unsharded_param(self) -> None:
        """Free the gathered parameter unless its memory is the shard's."""
        outputs = self.all_gather_outputs
        if not outputs or outputs[0].data_ptr() != self._sharded_param_data.data_ptr():
            super().free_unsharded_param()


def read_whole_shards(model: nn.Module) -> None:
    """Compute with the shards themselves where one shard is the whole parameter; call before the first forward pass."""
    for _, group in _sharded_groups(model):
        if group.mesh_info.shard_mesh_size == 1:
            for parameter in group.fsdp_params:
                parameter.__class__ = _Whole


class _Encoded(FSDPParam):
    """All-gather a parameter through FSDP2's extensions (``fsdp_pre_all_gather`` and ``fsdp_post_all_gather``) without
    a tensor subclass. FSDP2 gets an object that has these methods; for loading, optimizers and saving, the shard's
    local tensor stays a plain tensor.
    """

    # ``encode(shard)`` returns bytes of the shard's shape, and metadata that is the same on every rank.
    # ``decode(gathered, metadata, dtype, out)`` returns the full parameter in the memory of ``gathered``; ``out`` is
    # the previous full parameter, to be filled again
    encoding: Any

    @property
    def _sharded_local_tensor(self) -> Any:
        return _Shard(self, self._sharded_param_data)


class _Shard:
    """Replace a shard's local tensor in FSDP2's calls by an object with the methods ``fsdp_pre_all_gather`` and
    ``fsdp_post_all_gather``.
    """

    def __init__(self, of: _Encoded, flat: Tensor) -> None:
        self._of = of
        self._flat = flat

    def to(self, device: torch.device, non_blocking: bool = False) -> "_Shard":
        """Return the shard on the device where it is all-gathered; needed for offloaded shards."""
        return _Shard(self._of, self._flat.to(device, non_blocking=non_blocking))

    def size(self) -> torch.Size:
        """Return the shard's size including the padding that makes all shards equal."""
        return self._of.padded_sharded_param_size

    def fsdp_pre_all_gather(
        self, mesh: Any, outer_size: Any, outer_stride: Any, module: nn.Module, mp_policy: Any
    ) -> tuple[tuple[Tensor, ...], Any]:
        """Return the encoded shard to all-gather, and metadata that :meth:`fsdp_post_all_gather` needs to decode it."""
        sent, known = self._of.encoding.encode(self._flat.view(self.size()))
        return (sent,), known

    def fsdp_post_all_gather(
        self,
        outputs: tuple[Tensor, ...],
        known: Any,
        dtype: torch.dtype,
        *,
        out: Tensor | None = None,
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Return the full parameter, decoded in the memory of the all-gathered ``outputs``, which FSDP2 frees later."""
        rows = self._of.sharded_param.shape[0]  # of the full parameter, without padding
        return self._of.encoding.decode(outputs[0][:rows], known, dtype, out), ()


def gather_encoded(model: nn.Module, encodings: Mapping[nn.Module, Any]) -> None:
    """All-gather the weight of each module in ``encodings`` as bytes, encoded and decoded by the module's encoding.
    Call it before the first forward pass.
    """
    for parameter in _managed(model):
        info = parameter._module_info
        if info.module in encodings and info.param_name == "weight":
            parameter.__class__ = _Encoded
            parameter.encoding = encodings[info.module]
            parameter._init_extensions()

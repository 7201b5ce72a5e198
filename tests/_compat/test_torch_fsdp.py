"""What ``_compat/torch_fsdp.py`` and ``_compat/torch_fake.py`` rely on of FSDP2, over one rank."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from .relied_on import relying

FSDP = "torch.distributed.fsdp._fully_shard"
GROUP = f"{FSDP}._fsdp_param_group.FSDPParamGroup"
PARAMETER = f"{FSDP}._fsdp_param.FSDPParam"
STATE = f"{FSDP}._fsdp_state.FSDPState"
relies_on = relying("torch_fsdp.py")


@pytest.fixture
def model(world_of_one: None) -> Any:
    """Two layers that FSDP2 wraps, and their parent."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    made = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    mesh = init_device_mesh("cpu", (1,))
    for layer in made:
        fully_shard(layer, mesh=mesh)
    fully_shard(made, mesh=mesh)
    return made


def state_of(module: nn.Module) -> Any:
    from torch.distributed.fsdp import fully_shard

    return fully_shard.state(module)


def group_of(module: nn.Module) -> Any:
    return state_of(module)._fsdp_param_groups[0]


@relies_on(f"{STATE}:_fsdp_param_groups", "torch.distributed.fsdp.fully_shard.state")
def test_a_wrapped_module_has_a_state_with_groups(model: Any) -> None:
    """``fully_shard.state(module)`` has a list of the groups of its parameters."""
    from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState

    assert isinstance(state_of(model[0]), FSDPState)
    assert len(group_of(model[0]).fsdp_params) == 2
    assert FSDPState()._fsdp_param_groups == []


@relies_on(
    f"{GROUP}:mesh_info",
    f"{GROUP}:post_forward_mesh_info",
    f"{GROUP}:offload_policy",
)
def test_a_group_is_made_like_another(model: Any) -> None:
    """A group takes parameters, modules, both meshes, a device, a placement and the policies, in this order, and keeps
    all but the placement and the first policy; the ones of a module are gathered and reduced together.
    """
    from torch.distributed.fsdp import MixedPrecisionPolicy

    first = group_of(model[0])
    model[0].added = nn.Parameter(torch.ones(2))
    added = type(first)(
        [model[0].added], first.modules, first.mesh_info, first.post_forward_mesh_info, first.device,
        None, MixedPrecisionPolicy(), first.offload_policy,
    )  # fmt: skip
    assert len(added.fsdp_params) == 1


@relies_on("torch.nn.Module:_is_fsdp_managed_module", "torch.nn.Module:_fsdp_use_orig_params")
def test_modules_inside_of_wrapped_ones_are_marked(model: Any) -> None:
    """FSDP2 sets these two attributes, and no others, on modules inside of wrapped ones."""
    plain = vars(nn.Linear(4, 4)).keys()
    found = vars(model[0]).keys() - plain
    assert {"_is_fsdp_managed_module", "_fsdp_use_orig_params"} == {
        name for name in found if "fsdp" in name
    }


@relies_on(
    f"{STATE}._lazy_init",
    f"{GROUP}.unshard",
    f"{GROUP}.wait_for_unshard",
)
def test_the_root_is_gathered_on_request(model: Any) -> None:
    """``_lazy_init`` makes a state the root; ``unshard`` and ``wait_for_unshard`` of a group gather it."""
    from torch.distributed.tensor import DTensor

    state_of(model)._lazy_init()
    group = group_of(model[0])
    assert isinstance(model[0].weight, DTensor)
    group.unshard()
    group.wait_for_unshard()
    assert not isinstance(model[0].weight, DTensor)
    assert group.is_unsharded


@relies_on(
    f"{GROUP}.post_backward",
    f"{STATE}._root_post_backward_final_callback",
    f"{GROUP}:_training_state",
    f"{FSDP}._fsdp_common.TrainingState.POST_BACKWARD",
    f"{GROUP}:reduce_grads",
    f"{PARAMETER}:unsharded_param",
    f"{STATE}:_state_ctx",
)
def test_post_backward_reduces_what_is_there(model: Any) -> None:
    """``post_backward()`` of a group reduces the gradients of its full parameters and puts it into the state
    ``POST_BACKWARD``; after ``_root_post_backward_final_callback()`` the shards have them. Since torch 2.15
    ``_state_ctx.manual_backward_finalization_active`` is a bool there, and ``None`` before autograd's hooks have run.
    An instance's own ``post_backward`` is called in its place.
    """
    from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState

    root = state_of(model)
    calls = []
    for layer in model:
        group = group_of(layer)

        def noted(*args: Any, stock: Any = group.post_backward) -> None:
            calls.append(args)
            stock(*args)

        group.post_backward = noted
    model(torch.ones(1, 4)).sum().backward()
    assert len(calls) == 2
    shard = model[0].weight.grad.to_local().clone()
    root._lazy_init()
    group = group_of(model[0])
    assert group.reduce_grads
    group.unshard()
    group.wait_for_unshard()
    for held in group.fsdp_params:
        held.unsharded_param.grad = torch.ones_like(held.unsharded_param)
    group.post_backward()
    assert group._training_state == TrainingState.POST_BACKWARD
    if hasattr(root._state_ctx, "manual_backward_finalization_active"):
        assert root._state_ctx.manual_backward_finalization_active is None
        root._state_ctx.manual_backward_finalization_active = False
    root._root_post_backward_final_callback()
    assert torch.equal(model[0].weight.grad.to_local(), shard + 1)


@relies_on(f"{GROUP}:_all_reduce_hook", f"{PARAMETER}:padded_sharded_param_size")
def test_a_hook_gets_the_reduced_buffer(model: Any) -> None:
    """``_all_reduce_hook`` of a group is called with the flat buffer of its reduced gradients, in the parameters'
    order and padded to ``padded_sharded_param_size``, and what it changes there reaches the shards.
    """
    sizes = []

    def halve(flat: Tensor) -> None:
        sizes.append(flat.numel())
        flat.mul_(0.5)

    group = group_of(model[1])
    assert [each.padded_sharded_param_size for each in group.fsdp_params] == [(2, 4), (2,)]
    group._all_reduce_hook = halve
    model(torch.ones(1, 4)).sum().backward()
    assert sizes == [10]
    assert torch.equal(model[1].bias.grad.to_local(), torch.full((2,), 0.5))


@relies_on(
    f"{PARAMETER}:sharded_param",
    f"{PARAMETER}.reset_sharded_param",
    f"{PARAMETER}:orig_dtype",
    f"{GROUP}._init_mp_dtypes",
)
def test_shards_take_another_type(model: Any) -> None:
    """``reset_sharded_param()`` and the group's ``_init_mp_dtypes()`` take over shards whose type has changed, which
    are the module's own parameters; ``orig_dtype`` is their type.
    """
    group = group_of(model[0])
    for held, name in zip(group.fsdp_params, ("weight", "bias"), strict=True):
        assert held.sharded_param is getattr(model[0], name)
        cast = nn.Parameter(held.sharded_param.detach().to(torch.bfloat16))
        torch.utils.swap_tensors(held.sharded_param, cast)
        held.reset_sharded_param()
    group._init_mp_dtypes()
    for held in group.fsdp_params:
        assert held.orig_dtype == torch.bfloat16
    model[0](torch.ones(1, 4, dtype=torch.bfloat16)).sum().backward()
    assert model[0].weight.grad.dtype == torch.bfloat16


@relies_on(
    f"{PARAMETER}:_module_info",
    f"{FSDP}._fsdp_param.ParamModuleInfo:shared_modules",
    f"{FSDP}._fsdp_param.ParamModuleInfo:shared_param_names",
)
def test_a_parameter_knows_its_places(world_of_one: None) -> None:
    """``_module_info`` has the module, the attribute, and those of the same parameter elsewhere."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    tied = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    tied[1].weight = tied[0].weight
    fully_shard(tied, mesh=init_device_mesh("cpu", (1,)))
    (held,) = group_of(tied).fsdp_params
    place = held._module_info
    assert place.module is tied[0]
    assert place.param_name == "weight"
    assert place.shared_modules == [tied[1]]
    assert place.shared_param_names == ["weight"]


@relies_on(f"{PARAMETER}:unsharded_param")
def test_the_full_parameter_is_known_after_the_first_pass(model: Any) -> None:
    """``unsharded_param`` is there from the first gathering on, and is what the module holds while gathered."""
    held = group_of(model[0]).fsdp_params[0]
    assert not hasattr(held, "unsharded_param")
    seen = []

    def look(module: Any, *_: Any) -> None:
        seen.append(module.weight is held.unsharded_param)

    model[0].register_forward_hook(look, prepend=True)
    model(torch.ones(1, 4))
    assert seen == [True]


@relies_on(
    f"{PARAMETER}.accumulate_unsharded_grad_if_needed or {PARAMETER}.unsharded_grad_dtype",
    f"{PARAMETER}.to_accumulated_grad_if_needed or {PARAMETER}.unsharded_grad_dtype",
    f"{PARAMETER}:unsharded_accumulated_grad",
)
def test_gradients_are_added_up_before_they_are_reduced(model: Any) -> None:
    """``to_accumulated_grad_if_needed()`` moves a gradient of another type than the reduction's into
    ``unsharded_accumulated_grad``, to which ``accumulate_unsharded_grad_if_needed()`` adds later ones. Since torch 2.15
    full parameters have a ``grad_dtype``, the reduction's type, in which autograd makes and adds up their gradients.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    layer = nn.Linear(2, 2, bias=False)
    fully_shard(layer, mesh=init_device_mesh("cpu", (1,)), mp_policy=policy)
    layer.set_requires_gradient_sync(False)
    state_of(layer)._lazy_init()
    group = group_of(layer)
    group.unshard()
    group.wait_for_unshard()
    (held,) = group.fsdp_params
    assert held.unsharded_accumulated_grad is None
    weight = held.unsharded_param
    assert weight.dtype == torch.bfloat16
    for _ in range(2):
        (gradient,) = torch.autograd.grad(weight.sum(), weight)
        weight.grad = gradient if weight.grad is None else weight.grad + gradient
        if hasattr(held, "to_accumulated_grad_if_needed"):
            held.accumulate_unsharded_grad_if_needed()
            held.to_accumulated_grad_if_needed()
            assert weight.grad is None
    assert held.unsharded_accumulated_grad.dtype == torch.float32
    assert torch.equal(held.unsharded_accumulated_grad, torch.full((2, 2), 2.0))


@relies_on(
    f"{PARAMETER}._sharded_local_tensor",
    f"{PARAMETER}:_sharded_param_data",
    f"{PARAMETER}._init_extensions",
)
def test_a_parameter_is_gathered_by_its_extensions(model: Any) -> None:
    """FSDP2 gathers ``_sharded_local_tensor``, after ``_init_extensions()`` by its ``fsdp_pre_all_gather`` and
    ``fsdp_post_all_gather``; ``_sharded_param_data`` is the flat padded shard, and ``sharded_param`` has the full size.
    """
    from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam

    calls = []

    class Shard:
        def __init__(self, flat: Tensor) -> None:
            self.flat = flat

        def size(self) -> torch.Size:
            return torch.Size((4, 4))

        def fsdp_pre_all_gather(self, mesh, outer_size, outer_stride, module, mp_policy):  # type: ignore[no-untyped-def]
            calls.append("sent")
            return (self.flat.view(4, 4) * 2,), "known"

        def fsdp_post_all_gather(self, outputs, known, dtype, *, out=None):  # type: ignore[no-untyped-def]
            calls.append(known)
            return outputs[0], ()

    class Own(FSDPParam):
        @property
        def _sharded_local_tensor(self) -> Any:
            return Shard(self._sharded_param_data)

    held = group_of(model[0]).fsdp_params[0]
    assert held.sharded_param.shape == (4, 4)
    assert held._sharded_param_data.shape == (16,)
    before = model[0].weight.to_local().detach().clone()
    held.__class__ = Own
    held._init_extensions()
    seen = []

    def look(module: Any, *_: Any) -> None:
        seen.append(module.weight.detach().clone())

    model[0].register_forward_hook(look, prepend=True)
    model(torch.ones(1, 4))
    assert calls == ["sent", "known"]
    assert torch.equal(seen[0], before * 2)


@relying("torch_fake.py")(
    f"{FSDP}._fully_shard._get_device_from_mesh",
    f"{GROUP}._validate_no_meta_params",
)
def test_fsdp_asks_for_a_device_and_refuses_meta_weights(model: Any) -> None:
    """``fully_shard`` asks ``_get_device_from_mesh`` of its module for the device, and a group refuses weights on the
    meta device in ``_validate_no_meta_params``, without which they pass.
    """
    import importlib

    from torch.distributed.device_mesh import init_device_mesh

    module: Any = importlib.import_module(f"{FSDP}._fully_shard")
    mesh = init_device_mesh("cpu", (1,))
    seen = []
    stock = module._get_device_from_mesh
    module._get_device_from_mesh = lambda mesh: seen.append(mesh) or stock(mesh)
    try:
        layer = nn.Linear(2, 2, device="meta")
        module.fully_shard(layer, mesh=mesh)
    finally:
        module._get_device_from_mesh = stock
    assert seen == [mesh]
    with pytest.raises(RuntimeError, match="meta"):
        group_of(layer)._validate_no_meta_params()


@relies_on(
    f"{PARAMETER}.init_all_gather_outputs",
    f"{PARAMETER}.free_unsharded_param",
    f"{PARAMETER}:_sharded_param_data",
    f"{PARAMETER}:_unsharded_param",
    f"{PARAMETER}:all_gather_outputs",
    f"{PARAMETER}:param_dtype",
    f"{PARAMETER}:offload_to_cpu",
    f"{GROUP}:mesh_info",
)
def test_a_parameter_may_be_gathered_into_its_shard(model: Any) -> None:
    """Of a group of one rank, whose ``mesh_info.shard_mesh_size`` is 1, ``init_all_gather_outputs`` sets
    ``all_gather_outputs``, the memory that FSDP2 fills and computes with, as ``_unsharded_param``. Set to the shard,
    ``_sharded_param_data``, that is what it computes with; nothing frees it but ``free_unsharded_param``.
    ``param_dtype`` is ``None`` where nothing is cast, and ``offload_to_cpu`` says where shards are.
    """
    from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam

    class Same(FSDPParam):
        def init_all_gather_outputs(self, *_: Any, **__: Any) -> None:
            assert self.param_dtype is None
            assert not self.offload_to_cpu
            self.all_gather_outputs = [self._sharded_param_data]

        def free_unsharded_param(self) -> None:
            """Free nothing."""

    group = group_of(model[0])
    assert group.mesh_info.shard_mesh_size == 1
    for parameter in group.fsdp_params:
        parameter.__class__ = Same
    before = [p.detach().to_local().clone() for p in model[0].parameters()]
    model(torch.ones(3, 4)).sum().backward()
    for parameter, value in zip(group.fsdp_params, before, strict=True):
        shard = parameter._sharded_param_data
        assert parameter._unsharded_param.data_ptr() == shard.data_ptr()
        assert torch.equal(shard.view_as(value), value)
        assert parameter.sharded_param.grad is not None

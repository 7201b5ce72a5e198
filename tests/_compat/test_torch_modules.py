"""What ``_compat/torch.py`` relies on of torch's modules, loaders and compiled modules."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from .relied_on import relying

relies_on = relying("torch.py")


@relying("torch.py", "torch_fsdp.py")("torch.nn.Module:_parameters")
def test_parameters_are_a_live_dict() -> None:
    """``_parameters`` is the module's own dict by attribute, takes any tensor, and has second names too."""
    module = nn.Linear(2, 2, bias=False)
    plain = torch.ones(2, 2)
    module._parameters["weight"] = plain
    assert module.weight is plain
    module.register_parameter("second", nn.Parameter(plain))
    module._parameters["third"] = module.second
    assert list(module._parameters) == ["weight", "bias", "second", "third"]
    assert module._parameters["bias"] is None
    assert torch.equal(module(torch.eye(2)), plain)


@relies_on("torch.nn.Module:_buffers")
def test_buffers_are_a_live_dict() -> None:
    """``_buffers`` is the module's own dict by attribute, and changes to it change the module."""
    module = nn.BatchNorm1d(2)
    module._buffers["running_mean"] = torch.ones(2)
    assert module.running_mean.sum() == 2
    assert torch.equal(dict(module.named_buffers())["running_mean"], torch.ones(2))


@relies_on("torch.nn.Module:_modules")
def test_children_are_a_live_dict() -> None:
    """``_modules`` is the module's own dict of children, second names too, and changes to it change the module."""
    module = nn.Sequential(nn.Linear(2, 2))
    module._modules["1"] = module._modules["0"]
    assert len(module) == 2
    assert module[1] is module[0]
    assert [name for name, _ in module.named_children()] == ["0"]
    assert list(module._modules) == ["0", "1"]


@pytest.mark.parametrize(
    "register",
    [
        "register_forward_hook",
        "register_forward_pre_hook",
        "register_full_backward_hook",
        "register_full_backward_pre_hook",
    ],
)
@relies_on("torch.nn.Module.register_forward_hook")
def test_hooks_are_held_by_kind(register: str) -> None:
    """A module keeps its hooks in dicts with ``"hooks"`` in their names, from the number of a hook to the hook; one for
    each kind, and empty in a module without.
    """
    module = nn.Linear(2, 2)
    kinds = {name: held for name, held in vars(module).items() if isinstance(held, dict)}
    before = {name for name, held in kinds.items() if held}

    def hook(*_: Any) -> None:
        pass

    handle = getattr(module, register)(hook)
    (held,) = (name for name, value in kinds.items() if value.get(handle.id) is hook)
    assert "hooks" in held
    assert kinds[held] is getattr(module, held)
    assert held not in before
    handle.remove()
    assert {name for name, value in kinds.items() if value} == before


@relies_on("torch.nn.Module._call_impl")
def test_a_call_asks_the_instance() -> None:
    """``module(...)`` calls the instance's ``_call_impl``, which runs the forward pass with all hooks."""
    module = nn.Linear(2, 2)
    seen = []
    module.register_forward_hook(lambda *_: seen.append("hook"))
    stock = module._call_impl

    def answer(*args: Any, **kwargs: Any) -> Any:
        return stock(*args, **kwargs) + 1

    x = torch.ones(1, 2)
    expected = module.forward(x)
    module._call_impl = answer  # type: ignore[method-assign]
    assert torch.equal(module(x), expected + 1)
    assert seen == ["hook"]


@relies_on("torch.nn.Module._compiled_call_impl")
def test_compiling_in_place_is_undone() -> None:
    """``_compiled_call_impl`` is ``None`` but after ``module.compile()``, and ``None`` undoes that."""
    module = nn.Linear(2, 2)
    assert module._compiled_call_impl is None
    module.compile(backend="eager")
    assert module._compiled_call_impl is not None
    module._compiled_call_impl = None
    assert module(torch.ones(1, 2)).shape == (1, 2)


@relies_on("torch._dynamo.OptimizedModule:_orig_mod")
def test_a_compiled_module_holds_the_original() -> None:
    """``torch.compile(module)`` has the module as ``_orig_mod``."""
    module = nn.Linear(2, 2)
    assert not hasattr(module, "_orig_mod")
    assert torch.compile(module, backend="eager")._orig_mod is module


@relying("torch.py", "lasting.py")("torch.compiler.config.recompile_limit")
def test_the_compiler_has_a_limit_of_graphs() -> None:
    """``torch.compiler.config.recompile_limit`` is the number of graphs of one function, and may be raised."""
    from torch.compiler import config

    before = config.recompile_limit
    assert isinstance(before, int)
    config.recompile_limit = before + 1
    try:
        assert config.recompile_limit == before + 1
    finally:
        config.recompile_limit = before


@relies_on("torch.utils.data.DataLoader._get_iterator")
def test_a_loader_asks_the_instance_for_its_iterator() -> None:
    """``iter(loader)`` calls the instance's ``_get_iterator``, which draws the seed of the workers."""
    loader = DataLoader([1, 2])
    seen = []
    stock = loader._get_iterator

    def get_iterator() -> Any:
        seen.append(torch.initial_seed())
        return stock()

    loader._get_iterator = get_iterator  # type: ignore[method-assign]
    state = torch.get_rng_state()
    assert len(list(loader)) == 2
    assert len(seen) == 1
    assert not torch.equal(state, torch.get_rng_state())


@relies_on("torch.distributed._composable_state._module_state_mapping")
def test_fsdp_records_what_it_wraps(world_of_one: None) -> None:
    """``_module_state_mapping`` maps a module that FSDP2 wraps to its state, and forgets it on request."""
    from torch.distributed import _composable_state
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    module = nn.Linear(2, 2)
    assert module not in _composable_state._module_state_mapping
    fully_shard(module, mesh=init_device_mesh("cpu", (1,)))
    assert module in _composable_state._module_state_mapping
    assert _composable_state._module_state_mapping.pop(module, None) is not None


@relies_on("torch.utils._pytree.tree_map", "torch.utils._pytree.tree_leaves")
def test_trees_are_mapped_and_flattened() -> None:
    """``tree_map`` keeps tuples, lists and dicts; ``tree_leaves`` returns their leaves in order, ``None`` too."""
    from torch.utils._pytree import tree_leaves, tree_map

    tree = {"a": (1, [2]), "b": None}
    assert tree_leaves(tree) == [1, 2, None]
    assert tree_map(lambda leaf: leaf and leaf + 1, tree) == {"a": (2, [3]), "b": None}


@relies_on("torch.overrides._get_current_function_mode_stack")
def test_function_modes_are_told() -> None:
    """``_get_current_function_mode_stack()`` returns the active modes, the outermost first."""
    from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack

    class Mode(TorchFunctionMode):
        pass

    before = len(_get_current_function_mode_stack())
    with Mode() as outer, Mode() as inner:
        found = list(_get_current_function_mode_stack())
    assert found[before:] == [outer, inner]


@relies_on(
    "torch.utils._python_dispatch.TorchDispatchMode",
    "torch.utils._python_dispatch._disable_current_modes",
)
def test_dispatch_modes_see_operators_and_can_be_set_aside() -> None:
    """``TorchDispatchMode`` sees each operator; ``_disable_current_modes()`` is a context in which none does. A mode's
    ``ignore_compile_internals`` is a class method, and torch's own modes of recomputation say yes.
    """
    from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
    from torch.utils.checkpoint import create_selective_checkpoint_contexts

    seen = []

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            seen.append(func)
            return func(*args, **(kwargs or {}))

    with Mode():
        torch.ones(2) + 1
        with _disable_current_modes():
            torch.ones(2) * 2
    assert torch.ops.aten.add.Tensor in seen
    assert torch.ops.aten.mul.Tensor not in seen
    for mode in create_selective_checkpoint_contexts([torch.ops.aten.mm.default]):
        assert isinstance(mode, TorchDispatchMode)
        assert type(mode).ignore_compile_internals()


@relies_on("torch._C.DisableTorchFunctionSubclass")
def test_subclasses_can_be_taken_for_plain_tensors() -> None:
    """In ``DisableTorchFunctionSubclass()`` no ``__torch_function__`` of a subclass is called."""

    class Own(Tensor):
        @classmethod
        def __torch_function__(cls, *_: Any, **__: Any) -> Any:
            return "called"

    own = torch.ones(2).as_subclass(Own)
    assert own.sum() == "called"
    with torch._C.DisableTorchFunctionSubclass():
        assert own.sum() == 2

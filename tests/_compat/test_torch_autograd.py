"""What ``_compat/torch.py`` relies on of torch's tensors, operators and backward passes."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from hfscale._compat import torch as module

from .relied_on import relying

relies_on = relying("torch.py")


def weight() -> Tensor:
    return torch.ones(2, 2, requires_grad=True)


@relies_on("torch.Tensor._backward_hooks")
def test_hooks_on_a_gradient_are_told() -> None:
    """``_backward_hooks`` of a tensor is not empty while a hook waits for its gradient."""
    tensor = weight()
    assert not tensor._backward_hooks
    handle = tensor.register_hook(lambda grad: grad)
    assert tensor._backward_hooks
    handle.remove()
    assert not tensor._backward_hooks


@relies_on("torch.Tensor._post_accumulate_grad_hooks")
def test_hooks_on_an_accumulated_gradient_are_told() -> None:
    """``_post_accumulate_grad_hooks`` of a tensor is not empty while such a hook is there."""
    tensor = weight()
    assert not tensor._post_accumulate_grad_hooks
    handle = tensor.register_post_accumulate_grad_hook(lambda _: None)
    assert tensor._post_accumulate_grad_hooks
    handle.remove()
    assert not tensor._post_accumulate_grad_hooks


@relies_on("torch.Tensor._base")
def test_a_view_knows_its_base() -> None:
    """``_base`` is the tensor that a tensor views, or ``None``."""
    tensor = weight()
    view = tensor[0][1:]
    assert view._base is tensor
    assert tensor._base is None


@relies_on("torch.Tensor._version")
def test_writes_are_counted() -> None:
    """``_version`` goes up with each write in place, through a view too."""
    tensor = torch.ones(2)
    before = tensor._version
    tensor.add_(1)
    tensor[:1].mul_(2)
    assert tensor._version == before + 2


class Counting(torch.autograd.Function):
    """Count what holds an input and its memory."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, counts: list[tuple[int, int]]) -> Tensor:
        memory = torch._C._storage_Use_Count(x.untyped_storage()._cdata)
        counts.append((x._use_count(), memory))
        return x.view_as(x)


@relies_on("torch.Tensor._use_count", "torch._C._storage_Use_Count", "torch.UntypedStorage._cdata")
def test_holders_of_a_tensor_and_of_its_memory_are_counted() -> None:
    """``_use_count`` grows by a graph that saved the tensor, ``_storage_Use_Count`` by another tensor over its memory,
    and neither by variables of Python's that hold the same object.
    """
    alone, saved, viewed = (list[tuple[int, int]]() for _ in range(3))
    x = weight() @ weight()
    variables = [x, x]
    Counting.apply(x, alone)
    kept = x.square()
    Counting.apply(x, saved)
    del kept
    view = x[0]
    Counting.apply(x, viewed)
    del view, variables
    Counting.apply(x, alone)
    assert alone[0] == alone[1]
    assert saved[0][0] > alone[0][0]
    assert viewed[0][1] > alone[0][1]


@pytest.mark.parametrize("device", ["cpu", "meta"])
@relies_on("torch.multiprocessing.reductions.StorageWeakRef")
def test_a_storage_has_an_identity(device: str) -> None:
    """``StorageWeakRef(storage).cdata`` is one number for all tensors over a storage, on the meta device too, where
    addresses are 0, and the same for as long as it lives.
    """
    from torch.multiprocessing.reductions import StorageWeakRef

    def identity(tensor: Tensor) -> int:
        return StorageWeakRef(tensor.untyped_storage()).cdata

    tensor = torch.ones(4, device=device)
    other = torch.ones(4, device=device)
    assert identity(tensor) == identity(tensor) == identity(tensor[1:])
    assert identity(tensor) != identity(other)


@relies_on("torch.UntypedStorage._new_with_weak_ptr")
def test_a_storage_is_found_while_it_lives() -> None:
    """``_new_with_weak_ptr(reference.cdata)`` returns a living storage, and ``None`` for one that was freed."""
    from torch.multiprocessing.reductions import StorageWeakRef

    tensor = torch.ones(4)
    reference = StorageWeakRef(tensor.untyped_storage())
    living = torch.UntypedStorage._new_with_weak_ptr(reference.cdata)
    assert living is not None
    assert living.data_ptr() == tensor.data_ptr()
    del living, tensor
    assert torch.UntypedStorage._new_with_weak_ptr(reference.cdata) is None


@relies_on("torch._C._autograd._top_saved_tensors_default_hooks")
def test_the_innermost_saved_tensor_hooks_are_told() -> None:
    """``_top_saved_tensors_default_hooks(True)`` returns the innermost active pair, or ``None``."""
    top = torch._C._autograd._top_saved_tensors_default_hooks

    def pack(tensor: Tensor) -> Tensor:
        return tensor

    def unpack(tensor: Tensor) -> Tensor:
        return tensor

    assert top(True) is None
    with (
        torch.autograd.graph.saved_tensors_hooks(lambda _: None, unpack),
        torch.autograd.graph.saved_tensors_hooks(pack, unpack),
    ):
        assert top(True) == (pack, unpack)


@relies_on("torch._C._autograd._top_saved_tensors_default_hooks")
def test_a_checkpoint_is_told_by_its_saved_tensor_hooks() -> None:
    """While ``checkpoint`` runs a function, and runs it again, the innermost hooks are of its module; not else."""
    top = torch._C._autograd._top_saved_tensors_default_hooks
    seen = []

    def function(x: Tensor) -> Tensor:
        seen.append(top(True)[0].__module__)
        return x.tanh()

    checkpoint(function, weight(), use_reentrant=False).sum().backward()
    assert seen == ["torch.utils.checkpoint"] * 2
    assert top(True) is None


@relies_on(
    "torch._C._current_graph_task_id",
    "torch._C._autograd._get_current_graph_task_keep_graph",
)
def test_a_backward_pass_has_a_number_and_says_whether_it_keeps_its_graph() -> None:
    """``_current_graph_task_id()`` is another number in each backward pass and -1 outside of one;
    ``_get_current_graph_task_keep_graph()`` is ``retain_graph``.
    """
    found: list[tuple[int, bool]] = []

    def note(_: Tensor) -> None:
        number = torch._C._current_graph_task_id()
        found.append((number, torch._C._autograd._get_current_graph_task_keep_graph()))

    tensor = weight()
    tensor.register_hook(note)
    total = tensor.sum()
    total.backward(retain_graph=True)
    total.backward()
    assert torch._C._current_graph_task_id() == -1
    assert len({number for number, _ in found}) == 2
    assert min(found)[0] >= 0
    assert [keeps for _, keeps in found] == [True, False]


@relies_on(
    "torch.autograd._get_sequence_nr",
    "torch._C._current_autograd_node",
    "torch.autograd.graph.Node:_sequence_nr",
)
def test_nodes_are_numbered_in_the_order_of_the_forward_pass() -> None:
    """``_get_sequence_nr()`` is the number of this thread's next node, and in a backward pass
    ``_current_autograd_node()._sequence_nr()`` that of the node it is at.
    """
    seen = []

    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x * 2

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            seen.append(torch._C._current_autograd_node()._sequence_nr())
            return grad * 2

    expected = torch.autograd._get_sequence_nr()
    doubled = Double.apply(weight())
    assert torch.autograd._get_sequence_nr() > expected
    doubled.sum().backward()
    assert seen == [expected]


@relies_on("torch.autograd.Variable._execution_engine")
def test_a_function_is_called_at_the_end_of_the_outer_backward_pass() -> None:
    """``queue_callback(function)`` calls the function after the backward pass in which it was called, and not after a
    backward pass inside of that one.
    """
    seen: list[str] = []
    outer, inner = weight(), weight()

    def run_inner(_: Tensor) -> None:
        torch.autograd.Variable._execution_engine.queue_callback(lambda: seen.append("end"))
        with torch.enable_grad():
            inner.sum().backward()
        seen.append("inner")

    outer.register_hook(run_inner)
    outer.sum().backward()
    assert seen == ["inner", "end"]


@relies_on("torch._C._will_engine_execute_node")
def test_a_backward_pass_tells_which_nodes_it_will_run() -> None:
    """``_will_engine_execute_node(node)`` says, in a backward pass, whether it goes there, and raises RuntimeError for
    a leaf that ``autograd.grad`` was asked for.
    """
    seen: list[Any] = []

    def runs(node: Any) -> bool | None:
        try:
            return torch._C._will_engine_execute_node(node)
        except RuntimeError:
            return None

    class Sum(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, one: Tensor, other: Tensor) -> Tensor:
            return one + other

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
            seen.append([runs(node) for node, _ in ctx.next_functions])
            return grad, grad

    one, other = weight(), weight()
    total = Sum.apply(one * 2, other * 2).sum()
    torch.autograd.grad(total, [one], retain_graph=True)
    total.backward(retain_graph=True)
    assert seen == [[True, False], [True, True]]
    leaf = weight()
    torch.autograd.grad(Sum.apply(leaf, other).sum(), [leaf])
    assert seen[2] == [None, False]


@relies_on("torch.Tensor._make_wrapper_subclass")
def test_a_subclass_is_made_without_memory() -> None:
    """``_make_wrapper_subclass(kind, shape, dtype=, device=)`` returns an instance with a shape and no values."""

    class Own(Tensor):
        __torch_function__ = torch._C._disabled_torch_function_impl

        @classmethod
        def __torch_dispatch__(cls, *_: Any) -> Any:
            """Run nothing."""

    made = Tensor._make_wrapper_subclass(
        Own, (2, 3), dtype=torch.bfloat16, device=torch.device("cpu")
    )
    assert type(made) is Own
    assert made.shape == (2, 3)
    assert made.dtype == torch.bfloat16


@relying("torch.py", "torch_fake.py")("torch.ops.aten.add_.Tensor._schema")
def test_a_schema_says_what_an_operator_writes_into() -> None:
    """``_schema`` of an operator has named arguments with ``alias_info.is_write``, results with a type and an alias,
    and ``is_mutable``.
    """
    schema = torch.ops.aten.add_.Tensor._schema
    writes = [each.alias_info is not None and each.alias_info.is_write for each in schema.arguments]
    assert [each.name for each in schema.arguments] == ["self", "other", "alpha"]
    assert writes == [True, False, False]
    assert schema.is_mutable
    assert str(schema.returns[0].type) == "Tensor"
    assert not torch.ops.aten.mm.default._schema.is_mutable
    # Those of collectives do not say what they write; all begin with it, and name the work that they return.
    reduce = torch.ops.c10d.allreduce_.default
    assert reduce.namespace == "c10d"
    assert reduce._schema.arguments[0].name == "tensors"
    assert "Work" in str(reduce._schema.returns[1].type)


@relies_on("torch.ops.aten.add.Tensor.name")
def test_overloads_share_a_name() -> None:
    """``name()`` of an operator is its namespace, its name and its overload's; a packet of overloads names these, and
    both have a class of their own.
    """
    assert torch.ops.aten.add.Tensor.name() == "aten::add.Tensor"
    assert torch.ops.c10d.send.default.name() == "c10d::send"
    assert "default" in torch.ops.aten.mm.overloads()
    assert type(torch.ops.aten.mm) is not type(torch.ops.aten.mm.default)
    assert type(torch.ops.aten.mm) is type(torch.ops.aten.add)
    assert type(torch.ops.aten.mm.default) is type(torch.ops.aten.add.Tensor)


@relies_on("torch._foreach_norm", "torch._foreach_mul_")
def test_many_tensors_take_one_launch() -> None:
    """``_foreach_norm(tensors, order, dtype)`` returns the norm of each, and ``_foreach_mul_`` multiplies in place."""
    tensors = [torch.full((4,), 2.0), torch.full((1,), 3.0)]
    norms = torch._foreach_norm(tensors, 2.0, torch.float64)
    assert [float(norm) for norm in norms] == [4.0, 3.0]
    assert norms[0].dtype == torch.float64
    torch._foreach_mul_(tensors, torch.tensor(2.0))
    assert float(tensors[1]) == 6


@relies_on("torch._amp_foreach_non_finite_check_and_unscale_")
def test_gradients_are_unscaled_and_looked_at_at_once() -> None:
    """``_amp_foreach_non_finite_check_and_unscale_(tensors, found, factor)`` multiplies in place and sets ``found`` if
    an entry is not finite; 16-bit tensors by the factor in 32 bits.
    """
    found = torch.zeros(1)
    factor = torch.full((), 1 / 3)
    narrow = torch.ones(1, dtype=torch.float16)
    torch._amp_foreach_non_finite_check_and_unscale_([narrow], found, factor)
    assert float(found) == 0
    assert torch.equal(narrow, (torch.ones(1) * factor).half())
    torch._amp_foreach_non_finite_check_and_unscale_([torch.tensor([torch.inf])], found, factor)
    assert float(found) == 1


@relies_on("torch._scaled_mm")
def test_scaled_products_have_a_function_and_an_operator() -> None:
    """``_scaled_mm`` takes ``scale_a``, ``scale_b``, ``bias``, ``out_dtype`` and ``use_fast_accum``."""
    names = {each.name for each in torch.ops.aten._scaled_mm.default._schema.arguments}
    assert {"scale_a", "scale_b", "bias", "out_dtype", "use_fast_accum"} <= names
    x = torch.eye(16).to(torch.float8_e4m3fn)
    one = torch.ones(())
    found = torch._scaled_mm(x, x.T, scale_a=one, scale_b=one * 2, out_dtype=torch.bfloat16)
    assert torch.equal(found, torch.eye(16, dtype=torch.bfloat16) * 2)


@relies_on("torch._C._are_functorch_transforms_active", "torch.autograd.forward_ad._current_level")
def test_transforms_of_functions_are_told() -> None:
    """``_are_functorch_transforms_active`` is true inside of ``vmap``, and ``_current_level`` is 0 or more inside of a
    dual level, and -1 outside.
    """
    forward_ad: Any = torch.autograd.forward_ad
    inside: Any = torch._C
    assert not inside._are_functorch_transforms_active()
    assert forward_ad._current_level == -1
    seen = []

    def note(x: Tensor) -> Tensor:
        seen.append(inside._are_functorch_transforms_active())
        return x

    torch.func.vmap(note)(torch.ones(2, 2))
    assert seen == [True]
    with forward_ad.dual_level():
        assert forward_ad._current_level == 0


@relies_on("torch._foreach_copy_")
def test_tensors_are_copied_together() -> None:
    """``_foreach_copy_(tensors, sources)`` copies each, also from another type and into views."""
    whole = torch.zeros(2, 3)
    torch._foreach_copy_(
        [whole[:, 0], whole[:, 2]], [torch.ones(2).double(), torch.full((2,), 2.0)]
    )
    assert whole.tolist() == [[1.0, 0.0, 2.0]] * 2


def test_hooks_on_saved_tensors_do_not_see_how_holders_are_counted() -> None:
    """The counts are measured in the first pass that asks, which may count what it saves."""
    seen = list[Tensor]()

    def saved(x: Tensor) -> Tensor:
        seen.append(x)
        return x

    module._counts_of_unshared.cache_clear()
    with saved_tensors_hooks(saved, saved):
        assert not module.is_unshared(weight())
        product = weight() @ weight().detach()
    assert len(seen) == 1
    del product
    assert module._counts_of_unshared() is module._counts_of_unshared()

"""What other files of ``_compat`` rely on of torch's kernels, memory and halves of a backward pass."""

import pytest
import torch
from torch import nn

from .relied_on import relying


@relying("torch_attention.py")(
    "torch.ops.aten._scaled_dot_product_flash_attention_for_cpu",
    "torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward",
)
def test_the_cpus_kernel_returns_the_log_sum_exp() -> None:
    """The CPU's flash kernel returns the output and the log-sum-exp ``[b, h, s]`` for fewer key heads than query heads,
    and its backward takes both back.
    """
    q = torch.randn(1, 2, 3, 4)
    k = torch.randn(1, 1, 3, 4)
    aten = torch.ops.aten
    out, lse = aten._scaled_dot_product_flash_attention_for_cpu(
        q, k, k, 0.0, False, attn_mask=None, scale=0.5
    )
    scores = 0.5 * q @ k.transpose(-1, -2)
    torch.testing.assert_close(lse, scores.logsumexp(-1))
    torch.testing.assert_close(out, scores.softmax(-1) @ k)
    backward = aten._scaled_dot_product_flash_attention_for_cpu_backward
    grads = backward(torch.ones_like(out), q, k, k, out, lse, 0.0, False, attn_mask=None, scale=0.5)
    assert [grad.shape for grad in grads] == [q.shape, k.shape, k.shape]
    value = scores.softmax(-1).sum((1, 2))[..., None].expand(1, 3, 4)
    torch.testing.assert_close(grads[2][0], value)


@relying("torch_attention.py")(
    "torch.ops.aten._scaled_dot_product_flash_attention.default",
    "torch.ops.aten._scaled_dot_product_flash_attention_backward.default",
)
def test_a_gpus_kernel_takes_the_same_arguments() -> None:
    """The GPU's flash kernel takes dropout, causality, a flag and a scale, and returns output and log-sum-exp first;
    its backward takes the lengths, the RNG state and a scale behind them.
    """
    aten = torch.ops.aten
    forward = aten._scaled_dot_product_flash_attention.default._schema
    assert [each.name for each in forward.arguments] == [
        "query", "key", "value", "dropout_p", "is_causal", "return_debug_mask", "scale",
    ]  # fmt: skip
    assert [each.name for each in forward.returns[:2]] == ["output", "logsumexp"]
    backward = aten._scaled_dot_product_flash_attention_backward.default._schema
    assert [each.name for each in backward.arguments] == [
        "grad_out", "query", "key", "value", "out", "logsumexp", "cum_seq_q", "cum_seq_k", "max_q", "max_k",
        "dropout_p", "is_causal", "philox_seed", "philox_offset", "scale",
    ]  # fmt: skip


@relying("torch_device.py")("torch.cuda.memory._dump_snapshot")
def test_a_snapshot_of_memory_is_written_to_a_path() -> None:
    """``_dump_snapshot(path)`` is called with a path alone, and raises no other errors than are expected here."""
    import inspect

    inspect.signature(torch.cuda.memory._dump_snapshot).bind("path")


@relying("torch_pipelining.py")(
    "torch.distributed.pipelining._backward.stage_backward_input",
    "torch.distributed.pipelining._backward.stage_backward_weight",
)
def test_a_backward_pass_is_split_in_halves() -> None:
    """``stage_backward_input`` returns the gradients of the inputs, and the groups of which ``stage_backward_weight``
    makes those of the weights.
    """
    from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight

    layer = nn.Linear(2, 2)
    x = torch.randn(3, 2, requires_grad=True)
    out = layer(x)
    grads, groups = stage_backward_input([out], [torch.ones_like(out)], [x], layer.parameters())
    torch.testing.assert_close(grads[0], torch.ones(3, 2) @ layer.weight)
    assert layer.weight.grad is None
    stage_backward_weight(layer.parameters(), groups)
    torch.testing.assert_close(layer.weight.grad, torch.ones(2, 3) @ x)


@relying("torch_fake.py")(
    "torch._C._distributed_c10d.FakeWork",
    "torch.testing._internal.distributed.fake_pg.FakeStore",
    "torch.distributed.ProcessGroup._set_default_backend",
)
def test_a_fake_group_returns_at_once() -> None:
    """The backend ``fake`` over a ``FakeStore`` is a world of any size in one process, whose collectives leave their
    outputs alone; a group with backends by device takes a default one; ``FakeWork().boxed()`` is a finished work, and
    groups among an operator's arguments are script objects, and ``unbox`` raises RuntimeError for others.
    """
    import torch.distributed as dist
    from torch._C._distributed_c10d import FakeWork
    from torch.testing._internal.distributed.fake_pg import FakeStore
    from torch.utils._python_dispatch import TorchDispatchMode

    seen = []

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            seen.extend(args)
            return func(*args, **(kwargs or {}))

    dist.init_process_group("cpu:fake,meta:fake", store=FakeStore(), rank=1, world_size=4)
    try:
        group = dist.group.WORLD
        group._set_default_backend(dist.ProcessGroup.BackendType.CUSTOM)
        with Mode():
            dist.all_reduce(torch.ones(2))
        boxed = next(each for each in seen if isinstance(each, torch.ScriptObject))
        assert dist.ProcessGroup.unbox(boxed).size() == 4
        with pytest.raises(RuntimeError):
            dist.ProcessGroup.unbox(FakeWork().boxed())
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("name", ["linear", "_grouped_mm"])
@relying("torch_fake.py")("torch._grouped_mm")
def test_products_are_seen_by_their_names(name: str) -> None:
    """A function mode sees a product by its ``__name__``, grouped products too."""
    from torch.overrides import TorchFunctionMode

    seen = []

    class Mode(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            seen.append(func.__name__)
            return func(*args, **(kwargs or {}))

    x = torch.ones(16, 16, dtype=torch.bfloat16)
    with Mode():
        if name == "linear":
            nn.functional.linear(x, x)
        else:
            torch._grouped_mm(x, x[None], offs=torch.tensor([16], dtype=torch.int32))
    assert name in seen

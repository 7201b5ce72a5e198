"""What ``_compat/torch_compiler.py`` relies on of torch's compiler."""

from typing import Any

import torch
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition

from .relied_on import relying

relies_on = relying("torch_compiler.py")


@relies_on("torch._dynamo.lookup_backend")
def test_backends_are_found_by_name() -> None:
    """A name stands for a function of a graph and its inputs; a function stands for itself."""
    from torch._dynamo import lookup_backend

    assert callable(lookup_backend("inductor"))
    assert lookup_backend(len) is len


@relies_on("torch._functorch.config.patch")
def test_the_partitioner_keeps_what_a_product_of_the_backward_pass_reads_if_so_asked() -> None:
    """``ban_recompute_materialized_backward`` decides whether ``x.tanh()`` is kept, or computed again from ``x``."""
    import torch._functorch.config as partitioner
    from torch._dynamo.backends.common import aot_autograd

    kept: list[list[str]] = []

    def compiled(graph: Any, _: Any) -> Any:
        output = next(node for node in graph.graph.nodes if node.op == "output")
        kept.append([str(node.target) for node in output.args[0] if node.op == "call_function"])
        return make_boxed_func(graph)

    def function(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return x.tanh() @ w + x @ w

    for banned in (True, False):
        torch.compiler.reset()
        backend = aot_autograd(
            fw_compiler=compiled,
            bw_compiler=lambda graph, _: make_boxed_func(graph),
            partition_fn=min_cut_rematerialization_partition,
        )
        x = torch.randn(4, 8)
        w = torch.randn(8, 2, requires_grad=True)
        with partitioner.patch({"ban_recompute_materialized_backward": banned}):
            torch.compile(function, backend=backend)(x, w)
    torch.compiler.reset()
    assert len(kept[0]) > 1
    assert len(kept[1]) == 1  # the result alone

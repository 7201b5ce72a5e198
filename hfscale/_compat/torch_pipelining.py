"""Private names of ``torch.distributed.pipelining``: both halves of a split backward pass.

Checked with torch 2.13 to 2.15.
"""

from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight

__all__ = ["stage_backward_input", "stage_backward_weight"]

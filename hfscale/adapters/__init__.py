"""Adapters by PEFT over every axis: LoRA (Hu et al. 2021), DoRA, rsLoRA, PiSSA, OLoRA, IA3, LoHa.

Data flow. The adapters that a config asks for are found by putting them around the *whole* stock model, on the meta
device: that says which modules are wrapped, and the shape of every factor, whatever the layout. From it the plan is
extended. Then PEFT wraps the modules that this rank holds, which have local sizes, so its factors get local sizes too;
they are filled with this rank's share of what PEFT makes of the whole module (:mod:`.initialize`) or of a saved adapter
(:mod:`.storage`). The edges of the blocks are hooked afterwards, around the wrappers.
"""

from .._host.peft import wrapped_by_peft
from .attach import Adapters, attach_adapters
from .coverage import describe_coverage
from .merge import merge_local_weights
from .peft_config import check_config, read_config
from .planned import plan_with_adapters

__all__ = [
    "Adapters",
    "attach_adapters",
    "check_config",
    "describe_coverage",
    "merge_local_weights",
    "plan_with_adapters",
    "read_config",
    "wrapped_by_peft",
]

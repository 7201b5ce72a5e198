"""Adapters by PEFT over every axis: LoRA (Hu et al. 2021), DoRA, rsLoRA, PiSSA, OLoRA, IA3, LoHa.

Data flow. A config's adapters are found by wrapping the *full* stock model on the meta device: that tells which modules
are wrapped, and the shape of every factor, whatever the layout. The plan is extended by them. Then PEFT wraps this
rank's modules, which have local sizes, so its factors get local sizes too; they are filled with this rank's shard of
PEFT's initial values (:mod:`.attach`) or of a saved adapter (:mod:`.storage`). The edges of the blocks are hooked
afterwards, around the wrappers.
"""

from ..._compat.peft import is_a_hosts, wrapped_by_peft
from . import by_peft
from .attach import Adapters, attach_adapters
from .fused_lora import FusedAdapters
from .merge_adapters import merge_local_weights
from .plan import describe_coverage
from .planned import is_known, plan_with_adapters
from .storage import complete_config, read_config

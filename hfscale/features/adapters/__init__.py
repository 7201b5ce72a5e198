"""Support PEFT's adapters over every axis: LoRA (Hu et al. 2021), DoRA, rsLoRA, PiSSA, OLoRA, IA3, LoHa.

Data flow. PEFT wraps the *full* stock model on the meta device, which shows the modules that a config's adapters wrap,
and the shape of every factor, in any layout. These factors are added to the plan. Then PEFT wraps this rank's modules,
which have local sizes, so the factors get local sizes, too. The factors are filled with this rank's shard of PEFT's
initial values (:mod:`.attach`) or of a saved adapter (:mod:`.storage`). Afterwards, the
collectives at the entries and exits of tensor-parallel blocks are installed as hooks around the wrappers.
"""

from ..._compat.peft import is_a_hosts, wrapped_by_peft
from . import by_peft
from .attach import Adapters, attach_adapters
from .fused_lora import FusedAdapters
from .merge_adapters import merge_local_weights
from .plan import describe_coverage
from .planned import is_known, plan_with_adapters
from .storage import complete_config, read_config

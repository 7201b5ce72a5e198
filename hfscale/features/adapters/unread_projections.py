"""Warn of adapters that no forward pass reads, because a layer reads the adapted weight itself."""

import logging

from ..._compat.peft import COPIES
from ...models.family_limits import NEVER_CALLED, READ_BY_MIXERS
from ...models.names import wild_name
from ...plan import Plan

_log = logging.getLogger(__name__)


def warn_of_unread(plan: Plan) -> None:
    """Warn of adapters that get no gradients, as with PEFT alone, on any device or in fused kernels alone."""
    read = READ_BY_MIXERS.get(plan.family, ())
    modules = {adapter.module for adapter in plan.adapters if adapter.kept_in not in COPIES}
    for projection in read:
        found = {wild_name(module) for module in modules if module.endswith(f".{projection}")}
        if found:
            never = projection in NEVER_CALLED
            _log.warning(
                "adapters of %s are %s, as with PEFT alone: their mixer reads the weight and does not call the "
                "projection. To train without them, pass exclude_modules=[%r]",
                ", ".join(sorted(found)),
                "never trained" if never else "not trained where mamba_ssm's kernels run",
                projection,
            )

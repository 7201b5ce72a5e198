"""Plan parameters that are added to a model of one process after planning: adapters by PEFT's own functions, prompts, a
user's module around the model.

In one process nothing is sharded, so such parameters need no decisions, and stock code may change a model freely. When
they are in the plan, norms, optimizers and saved states include them like all other parameters. Over several ranks, a
changed model raises an error instead (:mod:`hfscale.train.guards.structure`).
"""

from collections.abc import Mapping
from dataclasses import replace

from torch import nn

from ...plan import ParameterPlan, Plan


def with_latecomers(plan: Plan, live: Mapping[str, nn.Parameter]) -> Plan:
    """Return the plan with the ``live`` parameters that it lacks; a live parameter may have several names."""
    known = {id(live[planned.name]) for planned in plan.parameters if planned.name in live}
    late: dict[int, ParameterPlan] = {}
    for name, parameter in live.items():
        if id(parameter) not in known and name not in plan.by_name:
            late[id(parameter)] = ParameterPlan(
                name=name, shape=tuple(parameter.shape), dtype=parameter.dtype
            )
    return replace(plan, parameters=(*plan.parameters, *late.values())) if late else plan

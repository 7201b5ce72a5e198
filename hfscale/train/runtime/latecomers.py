"""Plan parameters that join a model of one process after it was planned: adapters by PEFT's own functions, prompts, a
user's module around it.

Where nothing is sharded there is nothing to decide about them, and stock code may change a model as it likes. Once
they are in the plan, norms, optimizers and saved states hold them like any others. Over ranks a changed model is
refused instead (:mod:`hfscale.train.guards.structure`).
"""

from collections.abc import Mapping
from dataclasses import replace

from torch import nn

from ...plan import ParameterPlan, Plan


def with_latecomers(plan: Plan, live: Mapping[str, nn.Parameter]) -> Plan:
    """Return the plan with those of the ``live`` parameters, some of them under several names, that it lacks."""
    known = {id(live[planned.name]) for planned in plan.parameters if planned.name in live}
    late: dict[int, ParameterPlan] = {}
    for name, parameter in live.items():
        if id(parameter) not in known and name not in plan.by_name:
            late[id(parameter)] = ParameterPlan(
                name=name, shape=tuple(parameter.shape), dtype=parameter.dtype
            )
    return replace(plan, parameters=(*plan.parameters, *late.values())) if late else plan

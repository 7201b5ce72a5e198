"""Add parameters to a model's plan that user code adds to the model after planning, in one process: adapters by PEFT's
own functions, prompts, or a module that wraps the model.

In one process nothing is sharded, so such parameters need no decisions, and stock code may change a model freely. When
they are in the plan, norms, optimizers and saved states include them like all other parameters. Over several ranks, a
changed model raises an error instead (:mod:`hfscale.train.guards.structure`).
"""

from collections.abc import Mapping
from dataclasses import replace

from torch import nn

from ...plan import ParameterPlan, Plan


def with_latecomers(plan: Plan, live: Mapping[str, nn.Parameter]) -> Plan:
    """Return the plan with an entry for each parameter that the model has now (``live``, by name) and the plan lacks. A
    parameter in ``live`` may have several names; it gets one entry.
    """
    known = {id(live[planned.name]) for planned in plan.parameters if planned.name in live}
    late: dict[int, ParameterPlan] = {}
    for name, parameter in live.items():
        if id(parameter) not in known and name not in plan.by_name:
            late[id(parameter)] = ParameterPlan(
                name=name, shape=tuple(parameter.shape), dtype=parameter.dtype
            )
    return replace(plan, parameters=(*plan.parameters, *late.values())) if late else plan

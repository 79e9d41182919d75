"""`jax.jit` for programs that run once: what XLA would make faster costs more than it saves.

Not where bits are compared across programs: the older way to compile fusions rounds differently
from one program to the next.
"""

import functools
from typing import Any

import jax

QUICK: dict[str, Any] = {"xla_backend_optimization_level": 0}
if jax.__version_info__ < (0, 11):  # later versions have no such choice
    QUICK["xla_cpu_use_fusion_emitters"] = False
jit = functools.partial(jax.jit, compiler_options=QUICK)

"""Eight fake devices, exact products, no silent rank promotion; quick compilation.

Nearly all of the suite's time is XLA compiling small programs once: without LLVM's
optimisation that is two to three times shorter, and half again without the newer way to
compile fusions. Subprocesses inherit it. `make run` certifies its sweep under full optimisation.
"""

import os
from importlib.metadata import version

QUICK = ["--xla_backend_optimization_level=0"]
if version("jax").startswith("0.10."):  # later ones abort at the flag
    QUICK.append("--xla_cpu_use_fusion_emitters=false")
os.environ["XLA_FLAGS"] = " ".join([os.environ.get("XLA_FLAGS", ""), *QUICK]).strip()

import jax
import pytest

jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_default_matmul_precision", "highest")


@pytest.fixture
def key() -> jax.Array:
    return jax.random.key(0)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--fuzz", type=int, metavar="N", help="N random models, new ones each time; without it 40, always alike"
    )

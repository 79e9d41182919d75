"""Eight fake devices, exact products, no silent rank promotion; quick compilation.

Nearly all of the suite's time is XLA compiling small programs once: without LLVM's
optimisation that is two to three times shorter (tests/quick.py goes further). Subprocesses inherit
it. `make run` certifies its sweep under full optimisation.
"""

import os

os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_backend_optimization_level=0".strip()

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

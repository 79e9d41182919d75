"""Eight fake devices, exact products, no silent rank promotion; quick compilation.

Nearly all of the suite's time is XLA compiling small programs once: without LLVM's
optimisation that is two to three times shorter (tests/quick.py goes further). Subprocesses inherit
it. `make run` certifies its sweep under full optimisation.
"""

import os
from collections.abc import Iterator

os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_backend_optimization_level=0".strip()

import jax
import pytest

jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_default_matmul_precision", "highest")


@pytest.fixture
def key() -> jax.Array:
    return jax.random.key(0)


@pytest.fixture(scope="module")
def quick_decoding() -> Iterator[None]:
    """The programs of decode.py and beam.py compiled as tests/quick.py does: there are many, and each runs once."""
    from tests.quick import jit
    from transformer_jax import beam, decode

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decode, "_write", jit(decode.write, static_argnames=("config", "room")))
        patch.setattr(decode, "_begin", jit(decode.begin, static_argnames=("config", "room")))
        patch.setattr(decode, "_advance", jit(decode.advance, static_argnames="config", donate_argnames="state"))
        patch.setattr(beam, "_search", jit(beam.search, static_argnames=("config", "room", "beam", "n_best")))
        yield


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--fuzz", type=int, metavar="N", help="N random models, new ones each time; without it 40, always alike"
    )

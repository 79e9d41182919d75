"""Eight fake devices, exact products, no silent rank promotion; quick compilation.

Nearly all of the suite's time is tracing small programs and XLA compiling them: without LLVM's optimisation the
latter is two to three times shorter (tests/quick.py goes further), and a program that another test, worker or
subprocess has compiled is read from a folder of this session (or from $JAX_COMPILATION_CACHE_DIR, which stays).
A sixth less for one module for LLVM instead of 32, operations that do not carry the frames that made them, and a
garbage collector that looks less often. `make run` certifies its sweep under full optimisation.
"""

import atexit
import gc
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

os.environ["XLA_FLAGS"] = " ".join(
    [
        os.environ.get("XLA_FLAGS", ""),
        "--xla_backend_optimization_level=0",
        "--xla_cpu_parallel_codegen_split_count=1",
    ]
).strip()
os.environ["JAX_TRACEBACK_IN_LOCATIONS_LIMIT"] = "0"

if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
    os.environ["JAX_COMPILATION_CACHE_DIR"] = tempfile.mkdtemp(prefix="compiled-")
    # Here it is made once, before there are workers: this is the process that outlives them.
    atexit.register(shutil.rmtree, os.environ["JAX_COMPILATION_CACHE_DIR"], ignore_errors=True)
os.environ |= {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0", "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1"}

import jax
import pytest

gc.set_threshold(100_000, 20, 100)
jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_default_matmul_precision", "highest")


# A process may hold 65,530 mappings on Linux by default, and each compiled program takes a few: past that the
# compiler aborts. Far below it, what was compiled is dropped.
MAPPINGS = 16_000


@pytest.fixture(autouse=True, scope="module")
def bounded_mappings() -> Iterator[None]:
    yield
    maps = Path("/proc/self/maps")
    if maps.exists() and maps.read_bytes().count(b"\n") > MAPPINGS:
        jax.clear_caches()
        gc.collect()


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
        patch.setattr(beam, "_search", jit(beam.search, static_argnames=("beam", "n_best")))
        yield


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--fuzz", type=int, metavar="N", help="N random models, new ones each time; without it 40, always alike"
    )

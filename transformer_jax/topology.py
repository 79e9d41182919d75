"""TPU slices that are not there: their devices, to compile for, and what a chip of them can hold.

    devices, chip = topology.slice_of("v5e:4x4")     16 devices, of 16 GiB each

libtpu makes the description and the compiler (the extra [tpu]); no TPU, and no network, is used.
"""

import dataclasses
import os
from typing import Any

import jax

from transformer_jax.errors import ConfigError, unknown

GIB = 2**30


@dataclasses.dataclass(frozen=True)
class Chip:
    """memory: HBM bytes. flops: peak bfloat16 FLOP/s. type, cores: an accelerator type is type-(chips times cores)."""

    memory: int
    flops: float
    type: str
    cores: int


# Google's documentation of Cloud TPU, "System architecture", the page of each version. A device of JAX is one chip
# on these three; on v4 and before it may be a core, and they are left out.
CHIPS = {
    "v5e": Chip(16 * GIB, 197e12, "v5litepod", 1),
    "v5p": Chip(95 * GIB, 459e12, "v5p", 2),
    "v6e": Chip(32 * GIB, 918e12, "v6e", 1),
}


def slice_of(name: str) -> tuple[list[Any], Chip]:
    """Devices of the slice `name`, such as v5e:4x4 or v5p:4x4x4, and its kind of chip; call before the first array.

    Raises ConfigError for a version that is not in CHIPS, a layout that libtpu refuses (with its
    words), and where libtpu is not installed.
    """
    version, colon, layout = name.partition(":")
    if version not in CHIPS:
        raise unknown("TPU version", version, CHIPS)
    sizes = layout.split("x")
    if not colon or not all(size.isascii() and size.isdecimal() and int(size) > 0 for size in sizes):
        raise ConfigError(f"--topology={name}: VERSION:LAYOUT is wanted, as in v5e:4x4 or v5p:4x4x4")
    chip, count = CHIPS[version], 1
    for size in sizes:
        count *= int(size)
    # libtpu asks the metadata server of a TPU machine for these, and waits for it, unless they are given.
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    os.environ["TPU_ACCELERATOR_TYPE"] = f"{chip.type}-{count * chip.cores}"
    os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")
    # Of those that own TPUs there may be one on a machine; compilers do not exclude each other.
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
    jax.config.update("jax_platforms", "cpu")  # arrays stay here: only the compiler is libtpu's
    from jax.experimental import topologies

    try:
        found = topologies.get_topology_desc(topology_name=name, platform="tpu")
    except Exception as error:  # a layout it does not know, or no libtpu at all
        hint = " (pip install with the extra [tpu])" if "not installed" in str(error) else ""
        raise ConfigError(f"--topology={name}: {str(error).splitlines()[0]}{hint}") from error
    return list(found.devices), chip

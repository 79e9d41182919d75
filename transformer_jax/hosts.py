"""What the processes of a run tell one another, with nothing left under way when they know it.

Programs with collectives that overlap can wait for one another for ever on the CPU devices of jax 0.10 (seen, rarely).
What is here starts one program at a time and returns when all of its devices are done.
"""

from typing import Any

import jax
import numpy as np

from transformer_jax.sharding import Mesh, NamedSharding, PartitionSpec, replicated


def gather(own: Any) -> np.ndarray:
    """Each process's numbers, a row a process: [...] of a 32-bit type -> [processes, ...], the same everywhere.

    Collective: all must call it, with one shape and type. One device of each process takes part.
    """
    own = np.asarray(own)
    if jax.process_count() == 1:
        return own[None]
    mesh = Mesh([jax.local_devices(process_index=i)[0] for i in range(jax.process_count())], "processes")
    rows = NamedSharding(mesh, PartitionSpec("processes"))
    mine = jax.device_put(own[None], mesh.local_devices[0])
    every = jax.make_array_from_single_device_arrays((jax.process_count(), *own.shape), rows, [mine])
    return np.asarray(whole(every))


def whole(array: jax.Array) -> np.ndarray:
    """All of an array on every host. Collective where it is spread over processes."""
    if not array.is_fully_addressable and not array.is_fully_replicated:
        sharding = array.sharding
        assert isinstance(sharding, NamedSharding) and isinstance(sharding.mesh, Mesh), sharding
        array = jax.block_until_ready(jax.jit(_same, out_shardings=replicated(sharding.mesh))(array))
    return np.asarray(array.addressable_data(0) if array.is_fully_replicated else array)


def _same(x: jax.Array) -> jax.Array:
    """At the top level, so that it is compiled once a shape."""
    return x

"""Several processes as one run: joining, agreeing on what only a clock or a signal tells one, ending together.

    python launch.py … --coordinator=host0:1234 --num_processes=2 --process_id=0      on host0
    python launch.py … --coordinator=host0:1234 --num_processes=2 --process_id=1      on host1

Under Slurm (srun), Open MPI (mpirun) and on Kubernetes and TPU pods no flag is needed where their variables stand
in the environment: jax.distributed finds the others itself. Every process runs the same program on its own
devices; process 0 alone writes files and speaks. The workdir must be a folder that all of them see.
"""

import os
import sys
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from transformer_jax.errors import ConfigError, UserError

T = TypeVar("T")

FLAGS = ("coordinator", "num_processes", "process_id")

# A process that is silent for so long is dead: JAX then ends the others, with a message. A minute at most in all.
HEARTBEAT_SECONDS = 30
# What a launcher sets for each process: all of a row must be there, and the count, if it has one, above 1.
LAUNCHERS: Mapping[str, tuple[tuple[str, ...], str]] = {
    "Slurm": (("SLURM_JOB_ID", "SLURM_STEP_NODELIST", "SLURM_PROCID", "SLURM_LOCALID"), "SLURM_NTASKS"),
    "Open MPI": (("OMPI_MCA_orte_hnp_uri", "OMPI_COMM_WORLD_RANK"), "OMPI_COMM_WORLD_SIZE"),
    "Kubernetes": (("KUBERNETES_SERVICE_HOST", "JOB_COMPLETION_INDEX"), ""),
    "GKE TPU": (("TPU_WORKER_ID",), "TPU_WORKER_HOSTNAMES"),
}

_index, _count = 0, 1


def launcher(environment: Mapping[str, str]) -> str:
    """The launcher that started this process as one of several, by its variables; "" if none did."""
    for name, (wanted, count) in LAUNCHERS.items():
        if all(variable in environment for variable in wanted) and _several(environment, count):
            return name
    return ""


def _several(environment: Mapping[str, str], count: str) -> bool:
    if not count:
        return True
    said = environment.get(count, "1")
    return int(said) > 1 if said.isdecimal() else "," in said  # a number, or names of hosts


def join(coordinator: str, num_processes: int, process_id: int) -> None:
    """Become one of the processes that the flags, or a launcher, name; nothing where neither does.

    Call before the first array. coordinator: HOST:PORT of process 0; num_processes 0, process_id -1: not given.
    Raises ConfigError, naming the values, for flags that are incomplete or at odds.
    """
    global _index, _count
    given = [bool(coordinator), num_processes > 0, process_id >= 0]
    if any(given) and not all(given):
        raise ConfigError(
            f"--coordinator={coordinator} --num_processes={num_processes} --process_id={process_id}: "
            "all three are wanted, or none"
        )
    if any(given):
        host, _, port = coordinator.rpartition(":")
        if not host or not port.isdecimal():
            raise ConfigError(f"--coordinator={coordinator}: HOST:PORT of process 0 is wanted")
        if process_id >= num_processes:
            raise ConfigError(f"--process_id={process_id} of --num_processes={num_processes}: they count from 0")
        if num_processes == 1:
            return
    elif not launcher(os.environ):
        return
    import jax

    from transformer_jax import sharding

    by_hand: dict[str, Any] = {}
    if any(given):
        by_hand = {"coordinator_address": coordinator, "num_processes": num_processes, "process_id": process_id}
    # Its handler would swallow a SIGTERM that comes before ours is there; of those after, `agree` tells the others.
    jax.config.update("jax_enable_preemption_service", False)
    try:
        jax.distributed.initialize(**by_hand, heartbeat_timeout_seconds=HEARTBEAT_SECONDS)
    except (RuntimeError, ValueError) as error:
        how = f"--coordinator={coordinator}" if any(given) else launcher(os.environ)
        raise ConfigError(f"cannot join the other processes ({how}): {str(error).splitlines()[0]}") from error
    sharding.use_cpu_cores()
    _index, _count = jax.process_index(), jax.process_count()
    if not first():
        sys.stdout = open(os.devnull, "w", encoding="utf-8")


def first() -> bool:
    """Whether this is the process that writes files and speaks; true where there is only one."""
    return _index == 0


def index() -> int:
    """Which of the processes this is, from 0."""
    return _index


def count() -> int:
    """How many processes make this run."""
    return _count


def name() -> str:
    """ "process 1 of 2: ", for what it says on stderr; "" where there is only one."""
    return f"process {_index} of {_count}: " if _count > 1 else ""


def agree(*own: int) -> Sequence[Sequence[int]]:
    """Each process's numbers, a row a process. Collective: all must call it, with as many numbers."""
    if _count == 1:
        return [own]
    import numpy as np

    from transformer_jax import hosts

    return hosts.gather(np.asarray(own, np.int32)).tolist()


def same(what: str, value: int) -> None:
    """Raise UserError on every process where they differ in `value`. Collective."""
    found = [row[0] for row in agree(value)]
    if len(set(found)) > 1:
        raise UserError(f"the {_count} processes differ in {what} ({', '.join(map(str, found))})")


def same_flags(values: Mapping[str, Any]) -> None:
    """Raise UserError, naming them, on every process where flags differ that steer the run. Collective.

    values: each flag, given or not. What says who a process is, where it writes and how long it may take is its own.
    """
    names = sorted(values.keys() - {*FLAGS, "workdir", "minutes"})
    rows = agree(*(zlib.crc32(repr(values[name]).encode()) & 0x7FFFFFFF for name in names))
    odd = [name for name, *found in zip(names, *rows, strict=True) if len(set(found)) > 1]
    if odd:
        raise UserError(f"the {_count} processes differ in --{', --'.join(odd)}")


def by_first(make: Callable[[], T]) -> T | None:
    """make() on process 0, and its error if it has one; None on the others, or their own UserError if it failed."""
    made, failed = None, None
    if first():
        try:
            made = make()
        except UserError as error:
            failed = error
    if agree(int(failed is not None))[0][0]:
        raise failed or UserError("process 0 was refused, and said why")
    return made


def lost(error: Exception) -> bool:
    """Whether an error of a collective says that another process is gone, in the words of Gloo, NCCL or gRPC."""
    words = ("Gloo", "NCCL", "UNAVAILABLE", "heartbeat", "Connection reset", "closed by peer")
    return _count > 1 and any(word in str(error) for word in words)


def leave(code: int) -> None:
    """End this process at once if it is one of several: it has failed.

    A regular end waits for all processes to reach it, minutes where they never will: dying lets
    the others be told within HEARTBEAT_SECONDS.
    """
    if _count > 1:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)

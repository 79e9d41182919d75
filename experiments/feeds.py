"""Where a training run's batches come from: made on the device from a key, or read by a host pipeline.

Both take a state to a step and say what happened in each update; where they stand goes into the
checkpoint. A batch made on the device follows from (key, step): its place is the step itself.
"""

from typing import Any, Protocol

import jax
import numpy as np

from experiments.program import take_steps
from transformer_jax import sharding
from transformer_jax.batch import Batch
from transformer_jax.config import Config, Hyper
from transformer_jax.data import Task
from transformer_jax.train import TrainState, train_step

LOGGED = ("loss", "accuracy", "grad_norm", "learning_rate", "tokens")
Record = dict[str, np.ndarray]


class Batches(Protocol):
    """An iterator that says where it stands, and goes on from there."""

    def __next__(self) -> Batch: ...

    def get_state(self) -> Any: ...

    def set_state(self, state: Any) -> None: ...


class Feed(Protocol):
    """A run's data and its compiled step."""

    def advance(self, state: TrainState, stop: int) -> tuple[TrainState, Record]:
        """The state (donated) at step `stop`, and LOGGED for each update on the way; every device is done with it."""
        ...

    def cursor(self) -> Any:
        """Where the data stands, for JSON; None where the step says it."""
        ...


class OnDevice:
    """Batches made from (key, step) inside one program, at most `chunk` updates a call."""

    def __init__(
        self,
        config: Config,
        hyper: Hyper,
        task: Task,
        chunk: int,
        places: TrainState | None,
        mesh: sharding.Mesh | None,
    ):
        constrain = sharding.constrain(mesh)

        def advance(state: TrainState, hyper: Hyper, stop: jax.Array, data: Any) -> tuple[TrainState, Any]:
            return take_steps(config, task, state, hyper, stop, chunk, data, LOGGED, constrain)

        # The state comes out as it goes in: the second call is the first one's program.
        record = None if mesh is None else sharding.replicated(mesh)
        self._advance = jax.jit(advance, donate_argnums=0, out_shardings=(places, record))
        self._hyper, self._data = hyper, task.data

    def advance(self, state: TrainState, stop: int) -> tuple[TrainState, Record]:
        start = int(state.step)
        state, record = jax.block_until_ready(self._advance(state, self._hyper, np.int32(stop), self._data))
        return state, {name: np.asarray(x)[: stop - start] for name, x in record.items()}

    def cursor(self) -> None:
        return None


class FromHost:
    """Batches of a few shapes from an iterator with get_state and set_state; one program a shape.

    cursor: where to go on from; None: at the beginning. parts: in how many parts, as sharding.row_share says,
    the processes read a batch.
    """

    def __init__(
        self,
        config: Config,
        hyper: Hyper,
        batches: Batches,
        cursor: Any,
        places: TrainState | None,
        mesh: sharding.Mesh | None,
        parts: int = 1,
    ):
        constrain = sharding.constrain(mesh)

        def advance(state: TrainState, hyper: Hyper, batch: Batch) -> tuple[TrainState, Any]:
            state, metrics = train_step(config, state, hyper, batch, constrain)
            return state, {name: metrics[name] for name in LOGGED}

        record = None if mesh is None else sharding.replicated(mesh)
        self._advance = jax.jit(advance, donate_argnums=0, out_shardings=(places, record))
        self._hyper, self._mesh, self._parts, self._batches = hyper, mesh, parts, batches
        if cursor is not None:
            batches.set_state(cursor)

    def advance(self, state: TrainState, stop: int) -> tuple[TrainState, Record]:
        rows: list[dict[str, jax.Array]] = []
        for _ in range(int(state.step), stop):
            batch = next(self._batches)
            batch = batch if self._mesh is None else sharding.place_rows(batch, self._mesh, self._parts)
            # An update is under way while the next batch is read, and none is queued behind it: programs
            # with collectives can deadlock there on the CPU devices of jax 0.10.
            if rows:
                jax.block_until_ready(rows[-1])
            state, metrics = self._advance(state, self._hyper, batch)
            rows.append(metrics)
        jax.block_until_ready(state)
        return state, {name: np.asarray([row[name] for row in jax.device_get(rows)]) for name in LOGGED}

    def cursor(self) -> Any:
        return self._batches.get_state()

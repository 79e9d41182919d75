"""How do trained models fare under settings they were not trained with?

    python launch.py --experiment=matrix --restore=runs/dk --workdir=runs/dk_matrix
    python launch.py --experiment=matrix --restore=runs/masking --workdir=runs/masking_matrix

The models of a finished sweep (each arm at its best learning rate, mean over its seeds) or of
`train` are evaluated on the whole reported split under other attention temperatures, exponents of d_k,
RoPE bases and masks; nothing is trained. The answer is a loss less the one under the arm's own
settings: a matrix of arms and settings. Settings that are numbers share one program.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from experiments import evaluate, restoring, results, trained
from experiments.flags import Settings
from experiments.program import stack
from experiments.workdir import TOKENIZERS, WorkdirError, open_workdir, read_json
from transformer_jax import checkpoint, masks, sharding, train
from transformer_jax.config import Config, Hyper, to_dict
from transformer_jax.data import Task, Tokenizers, make_task, resolve
from transformer_jax.encoder_decoder import Transformer
from transformer_jax.errors import ConfigError

FLAGS = ("restore", "workdir", "overwrite")
TITLE = "How do trained models fare under settings they were not trained with?"
AS_TRAINED = "as trained"
NUMBERS = {
    "attention_temperature": (0.25, 0.5, 1.0, 2.0, 4.0),
    "dk_exponent": (0.0, 0.25, 0.5, 0.75, 1.0),
    "rope_base": (1e3, 1e4, 1e5),
}
MASKS = ("causal", "none", "inverted")
SIZED_MASKS = {"window": (4, 16, 64), "prefix": (4, 16)}


@dataclasses.dataclass(frozen=True)
class Row:
    """An arm: its settings, the parameters of each seed, on the host, and the steps that these were trained for.

    notes: lines on checkpoints that were passed over. tokenizers: of a run that had them; None: as its data has them.
    """

    name: str
    config: Config
    hyper: Hyper
    params: Sequence[Transformer]
    step: int
    notes: Sequence[str] = ()
    tokenizers: Tokenizers | None = None


@dataclasses.dataclass(frozen=True)
class Setting:
    """What is changed before a model is evaluated: fields of Config and Hyper."""

    name: str
    changes: Mapping[str, Any]


def rows_of(restore: str) -> list[Row]:
    """The arms of a finished sweep, or the one model of `train`. Raises UserError for any other folder."""
    if not restore:
        raise ConfigError("--restore=WORKDIR names the trained models")
    folder = Path(restore)
    held = read_json(folder / "config.json")
    if held is None:
        raise WorkdirError(f"--restore={restore}: no config.json there")
    if held["identity"]["experiment"] == "train":
        from experiments.loop import abstract_state

        config, hyper = evaluate.saved_configuration(restore)
        found = checkpoint.restore_latest(folder / "checkpoints", abstract_state(config, hyper))
        own = restoring.saved_tokenizers(restore)
        return [Row("trained", config, hyper, [found.state.weights], found.step, found.notes, own)]
    rows = []
    for arm in trained.arms(folder):
        one = arm.models[0]
        own = trained.tokenizers_of(restore, arm) if (folder / TOKENIZERS).exists() else None
        params = [model.params for model in arm.models]
        rows.append(Row(arm.name, one.config, one.hyper, params, one.step, tokenizers=own))
    return rows


def settings_of(rows: Sequence[Row]) -> tuple[list[Setting], list[str]]:
    """What makes sense for all rows, and notes on masks that do not.

    Masks where there is a decoder that can have them, RoPE's base with RoPE. A mask under which t5 positions
    have buckets in both directions where the training had one, or the other way round, would ask about the buckets.
    """
    configs = [row.config for row in rows]
    made = [Setting(AS_TRAINED, {})]
    for name, values in NUMBERS.items():
        if name == "rope_base" and any(config.positions != "rope" for config in configs):
            continue
        made += [Setting(f"{name} {value:g}", {name: value}) for value in values]
    if any(config.architecture == "encoder" or config.attention_implementation == "linear" for config in configs):
        return made, []
    shortest = min(config.seq_len for config in configs)
    tried = [Setting(f"mask {mask}", {"mask": mask}) for mask in MASKS]
    for mask, sizes in SIZED_MASKS.items():
        tried += [Setting(f"mask {mask} {n}", {"mask": mask, mask: n}) for n in sizes if n <= shortest]
    out = [one.name for one in tried if any(_other_buckets(config, one.changes["mask"]) for config in configs)]
    made += [one for one in tried if one.name not in out]
    return made, [f"left out, as the buckets of t5 positions would be others: {', '.join(out)}"] if out else []


def _other_buckets(config: Config, mask: str) -> bool:
    """Whether another mask changes which distances t5's buckets are for."""
    ways = (masks.looks_back(masks.from_config(one, Hyper())) for one in (config, config.replace(mask=mask)))
    return config.positions == "t5" and len(set(ways)) > 1


def losses(rows: Sequence[Row], settings: Sequence[Setting]) -> np.ndarray:
    """Mean loss on the reported split, [rows, settings, seeds]. One program for each Config that occurs."""
    jobs: dict[Config, list[tuple[int, int, Hyper]]] = {}
    for i, row in enumerate(rows):
        for j, setting in enumerate(settings):
            config, hyper = restoring.changed(row.config, row.hyper, setting.changes)
            jobs.setdefault(config, []).append((i, j, hyper))
    out = np.full((len(rows), len(settings), len(rows[0].params)), np.nan)
    for config, of in jobs.items():
        used = sorted({i for i, _, _ in of})
        where = {(i, seed): n for n, (i, seed) in enumerate((i, s) for i in used for s in range(out.shape[2]))}
        params = jax.tree.map(lambda *x: np.stack(x), *(p for i in used for p in rows[i].params))
        every = [(i, j, seed, hyper) for i, j, hyper in of for seed in range(out.shape[2])]
        task = make_task(config, rows[used[0]].tokenizers)
        found = _evaluate(config, task, params, [where[i, seed] for i, _, seed, _ in every], [h for *_, h in every])
        for (i, j, seed, _), loss in zip(every, found, strict=True):
            out[i, j, seed] = loss
    return out


def _evaluate(config: Config, task: Task, params_R: Any, which: Sequence[int], hypers: Sequence[Hyper]) -> np.ndarray:
    """The loss of model which[n] under hypers[n], [n]; spread over the devices, one program."""
    mesh = sharding.runs_mesh()

    def one(which: jax.Array, hyper: Hyper, params_R: Any, data: Any) -> jax.Array:
        params = jax.tree.map(lambda x: x[which], params_R)
        batches = task.eval_batches["report"]
        return train.evaluate(config, params, hyper, lambda i: task.eval_batch(data, "report", i), batches).loss

    # The first job is repeated to fill the devices.
    filled = list(zip(which, hypers, strict=True))
    filled += filled[:1] * (-len(filled) % mesh.size)
    jobs = (np.asarray([r for r, _ in filled], np.int32), stack([hyper for _, hyper in filled]))
    every = sharding.over_runs(one, mesh, shared=2, donate=False)
    args = (*sharding.place_runs(jobs, mesh), *sharding.place_shared((params_R, task.data), mesh))
    return np.asarray(every(*args))[: len(which)]


def build(
    rows: Sequence[Row], settings: Sequence[Setting], found: np.ndarray, restore: str, notes: Sequence[str] = ()
) -> dict[str, Any]:
    """results.json: each setting is a metric of each arm; `difference` is less the arm's own, seed by seed."""
    arms = []
    for row, losses in zip(rows, found, strict=True):
        per_setting = {}
        for setting, loss in zip(settings, losses, strict=True):
            values, apart = ([results.number(x) for x in of] for of in (loss, loss - losses[0]))
            per_setting[setting.name] = results.summarise(values) | {"difference": results.summarise(apart)}
        hyper = to_dict(row.hyper)
        config = to_dict(row.config)
        arms.append({"name": row.name, "config": config, "hyper": hyper, "step": row.step, "metrics": per_setting})
    return {
        "experiment": "matrix",
        "title": TITLE,
        "restored": restore,
        "unit": "nats per token",
        "seeds": len(rows[0].params),
        "settings": [{"name": setting.name, "changes": dict(setting.changes)} for setting in settings],
        "arms": arms,
        "notes": [*notes],
    }


def run(settings: Settings) -> int:
    """Restore, evaluate, draw, print; exit code 0. A finished folder answers from its file."""
    if settings.overrides:
        raise ConfigError(f"--{min(settings.overrides)} has no effect in --experiment=matrix: leave it out")
    sharding.use_cpu_cores()
    rows = rows_of(settings.restore)
    columns, notes = settings_of(rows)
    notes += [note for row in rows for note in row.notes]
    identity = {
        "experiment": "matrix",
        "restored": str(Path(settings.restore).resolve()),
        "arms": {
            row.name: {"config": to_dict(row.config), "hyper": to_dict(row.hyper), "step": row.step} for row in rows
        },
        "seeds": len(rows[0].params),
        "settings": [setting.name for setting in columns],
        "data": make_task(resolve(rows[0].config), rows[0].tokenizers).sha256,
    }
    workdir = open_workdir(settings.workdir or "runs/matrix", identity, {}, overwrite=settings.overwrite)
    from experiments import report_matrix

    found = workdir.finished()
    if found is None:
        found = build(rows, columns, losses(rows, columns), settings.restore, notes)
        report_matrix.write(workdir.path, found)
        workdir.write("results.json", found)  # last: it says that the run is finished
    report_matrix.show(found, workdir.path)
    return 0

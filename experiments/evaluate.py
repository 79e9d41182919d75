"""Measure a trained model: loss, perplexity, accuracy and samples on both held-out splits.

    python launch.py --experiment=evaluate --restore=runs/lm
    python launch.py --experiment=evaluate --restore=runs/lm --text=other.txt --attention_temperature=1.5

The newest good checkpoint is used, or that of --restore_step (a step, or best); --mesh splits the
model over devices, whatever it was trained on. Numbers in Hyper, the mask and the text may differ
from training; what changes a parameter's shape is refused with a list of what differs.
"""

from pathlib import Path

from experiments import processes, restoring
from experiments.flags import Settings
from experiments.workdir import WorkdirError, read_json
from transformer_jax import sharding
from transformer_jax.config import Config, Hyper, from_dict
from transformer_jax.data import make_task
from transformer_jax.errors import ConfigError

FLAGS = ("restore", "restore_step", "mesh", *processes.FLAGS)


def saved_configuration(restore: str) -> tuple[Config, Hyper]:
    """The Config and Hyper that a workdir of `train` was made with."""
    if not restore:
        raise ConfigError("--restore=WORKDIR names the trained model")
    held = read_json(Path(restore) / "config.json")
    if held is None:
        raise WorkdirError(f"--restore={restore}: no config.json there")
    what = held["identity"]
    if what["experiment"] != "train":
        raise WorkdirError(f"--restore={restore} holds {what['experiment']}; a workdir of train is wanted")
    steps = held["free"]["steps"]
    return from_dict(Config, what["config"] | {"steps": steps}), from_dict(Hyper, what["hyper"])


def run(settings: Settings) -> int:
    """Print the numbers of each split."""
    from experiments import loop

    mesh = sharding.from_text(settings.mesh)
    trained, trained_hyper = saved_configuration(settings.restore)
    config, hyper = restoring.changed(trained, trained_hyper, settings.overrides)
    task = loop.place_task(make_task(config), mesh)
    saves = Path(settings.restore) / "checkpoints"
    restored = restoring.restore_state(saves, loop.abstract_state(config, hyper, mesh), settings.restore_step)
    for note in restored.notes:
        print(note)
    print(f"{settings.restore}, step {restored.step}")
    numbers = loop.device_hyper(hyper, mesh)
    for split in task.eval_batches:
        sums = loop.measure(config, task, split, mesh)(restored.state.weights, numbers, task.data)
        found = loop.in_words(loop.describe(sums, task), ".4f")
        print(f"{split:>10}  {found}  over {float(sums.count):,.0f} tokens")
    print("\n".join(loop.samples(config, restored.state.weights, numbers, task)))
    return 0

"""Measure a trained model: loss, perplexity, accuracy and samples on both held-out splits.

    python launch.py --experiment=evaluate --restore=runs/lm
    python launch.py --experiment=evaluate --restore=runs/lm --text=other.txt --attention_temperature=1.5
    python launch.py --experiment=evaluate --restore=runs/g2p --pairs=test.tsv --beam=5
    python launch.py --experiment=evaluate --restore=runs/bytes --metrics=phone_error_rate,word_error_rate
    python launch.py --experiment=evaluate --restore=runs/a,runs/b --dev=dev.tsv --show="chat|oiseau"

The newest good checkpoint is used, or that of --restore_step (a step, or best); --mesh splits the
model over devices, whatever it was trained on. Numbers in Hyper, the mask and the text may differ
from training; what changes a parameter's shape is refused with a list of what differs.

A model of pairs is judged by what it writes for --pairs, --dev or --test, or for its own dev and
test: word and phone error rates or BLEU and chrF, as the target side suggests or --metrics says
(transformer_jax/data/metrics.py), exact match, loss and perplexity by tokens. --workdir, by default a folder
RESTORE/evaluation… that follows from what is asked, gets outputs.tsv, results.json and report.html: errors by
length, the worst ones, mistaken symbols, attention of the pairs in --show. --beam, --average and several models
as in translate.
"""

from pathlib import Path

from experiments import evaluation, processes, restoring
from experiments.flags import Settings
from experiments.restoring import saved_configuration
from transformer_jax import sharding
from transformer_jax.data import make_task
from transformer_jax.errors import ConfigError

FLAGS = ("mesh", *evaluation.FLAGS, *processes.FLAGS)


def run(settings: Settings) -> int:
    """Print the numbers of each split."""
    from experiments import loop

    if evaluation.of_pairs(settings.restore):
        return evaluation.run(settings)
    trained, trained_hyper = saved_configuration(settings.restore)
    idle = sorted((settings.given & {*evaluation.FLAGS, "metrics"}) - {"restore", "restore_step", "average"})
    if idle:
        raise ConfigError(f"--{idle[0]} has no effect on a model of task {trained.task}: leave it out")
    mesh = sharding.from_text(settings.mesh)
    config, hyper = restoring.changed(trained, trained_hyper, settings.overrides)
    task = loop.place_task(make_task(config, restoring.saved_tokenizers(settings.restore)), mesh)
    saves = Path(settings.restore) / "checkpoints"
    like = loop.abstract_state(config, hyper, mesh)
    restored = restoring.restore_weights(saves, like, settings.restore_step, settings.average)
    processes.same("the step that is read", restored.step)
    for note in restored.notes:
        print(note)
    print(f"{settings.restore}, step {restored.step}")
    numbers = loop.device_hyper(hyper, mesh)
    for split in task.eval_batches:
        sums = loop.measure(config, task, split, mesh)(restored.state, numbers, task.data)
        found = loop.in_words(loop.describe(sums, task), ".4f")
        print(f"{split:>10}  {found}  over {float(sums.count):,.0f} tokens")
    print("\n".join(loop.samples(config, restored.state, numbers, task)))
    return 0

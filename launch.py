"""Ask a question about Transformers: `python launch.py --experiment=NAME`.

`--list` names the experiments, `--help` every flag. A mistake is one line on stderr and
exit code 2; `--debug` shows its traceback.
"""

import importlib
import os
import signal
import sys
import textwrap
import traceback
from collections.abc import Sequence

from experiments import REGISTRY, processes

LOST, REFUSED = 1, 2  # exit codes: another process is gone; a mistake in what was asked for
INTERRUPTED = 128 + signal.SIGINT

EXAMPLES = """\
python launch.py --experiment=dk_scaling --workdir=runs/dk          a sweep: table, results.json, report.html
python launch.py --experiment=dk_scaling --plan                     what that would train, and how long
python launch.py --experiment=train --text=book.txt --steps=2000 --workdir=runs/lm
python launch.py --experiment=evaluate --restore=runs/lm
python launch.py --experiment=sample --restore=runs/lm --prompt="The " --sample_temperature=0.8 --top_p=0.95
python launch.py --experiment=translate --restore=runs/g2p --beam=5 < words.txt > phones.txt
python launch.py --experiment=shapes"""


def overview() -> str:
    """What the program can do, for a person who typed its name alone."""
    width = max(map(len, REGISTRY))
    listed = "\n".join(f"  {name:{width}}  {line}" for name, line in REGISTRY.items())
    examples = textwrap.indent(EXAMPLES, "  ")
    return (
        "A laboratory for Transformers: train, ablate and prove them.\n\n"
        f"Experiments (--experiment=NAME):\n{listed}\n\nFor example:\n{examples}\n\n"
        "--help describes every flag; every field of the configuration is one."
    )


def describe_flags() -> str:
    """Every flag with its help, range and default."""
    from experiments import flags
    from experiments.grid import CONFIG_FIELDS, HYPER_FIELDS

    parts = [overview(), "\nThe run:"]
    parts += [f"  --{name}: {note}" for name, (_, _, note, _) in flags.RUN_FLAGS.items()]
    for title, fields in (
        ("\nConfig, what changes the program:", CONFIG_FIELDS),
        ("\nHyper, numbers in it:", HYPER_FIELDS),
    ):
        parts += [title, *(f"  --{name}: {flags.describe(field)}" for name, field in fields.items())]
    return "\n".join(parts)


def main(argv: Sequence[str]) -> int:
    """Run the command line; returns the exit code."""
    if len(argv) == 1:
        print(overview())
        return 0
    from transformer_jax.errors import UserError

    debug = "--debug" in argv
    try:
        from experiments import flags, workdir

        uses = {name: importlib.import_module(f"experiments.{name}").FLAGS for name in _needed(argv)}
        settings, switches = flags.parse(argv, uses)
        if switches["help"]:
            print(describe_flags())
        elif switches["list"]:
            print("\n".join(f"{name}: {line}" for name, line in REGISTRY.items()))
        elif not settings.experiment:
            raise UserError("no --experiment given; --list names them")
        else:
            if set(processes.FLAGS) <= set(uses[settings.experiment]):
                processes.join(settings.coordinator, settings.num_processes, settings.process_id)
                processes.same_flags(settings.values())
            try:
                return importlib.import_module(f"experiments.{settings.experiment}").run(settings)
            finally:
                workdir.release()
        return 0
    except BrokenPipeError:  # nobody reads on: not a mistake
        raise
    except KeyboardInterrupt:
        if debug or processes.count() > 1:
            raise
        print("launch.py: interrupted; what was saved is there for the same command", file=sys.stderr)
        return INTERRUPTED
    except (UserError, OSError) as error:
        if debug:
            raise
        print(f"launch.py: {processes.name()}{' '.join(str(error).split())}", file=sys.stderr)
        return REFUSED
    except (RuntimeError, ValueError) as error:  # what a collective raises depends on who waits for it
        if debug or not processes.lost(error):
            raise
        print(
            f"launch.py: {processes.name()}another process has ended or cannot be reached "
            f"({str(error).splitlines()[0]}); the same commands go on from what was saved",
            file=sys.stderr,
        )
        return LOST


def _needed(argv: Sequence[str]) -> list[str]:
    """The experiments whose modules must be known: all are small at import, but --help wants none."""
    return [] if "--help" in argv or "--list" in argv else list(REGISTRY)


if __name__ == "__main__":
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    # main() ends here: interpreter shutdown must not outlive a closed pipe (| head).
    try:
        code = main(sys.argv)
        if code in (LOST, REFUSED):
            processes.leave(code)
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 1
        processes.leave(code)
    except BaseException:
        if processes.count() == 1:
            raise
        traceback.print_exc()
        processes.leave(1)
        raise
    sys.exit(code)

"""Every claim of the four articles, checked: is it true, what is the number, and which function shows it?

    python launch.py --experiment=claims --workdir=runs/claims
    python launch.py --experiment=claims --only=B12,D07
    python launch.py --experiment=claims --depth=full --workdir=runs/claims_full

A chapter a file (rope, scaling, …, optimisation), a record a claim (record.py). --depth=quick runs the analytic checks,
--depth=full the trainings too; their sweeps go on where they were stopped. --only takes ids and letters
of chapters. Writes claims.json and claims.html (English and Chinese, formulas in MathML, nothing loaded from a
network). Quick checks are made anew each time; what --depth=full has trained is kept, even if the library has changed
since: --overwrite trains it again. A folder's ledger of another depth or of other claims is kept as old-claims.json.
The exit code is 1 where a measured number leaves its tolerance, or a check raises: that one is reported as broken
after the others are finished.
"""

import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from experiments.claims.record import Chapter
    from experiments.flags import Settings

FLAGS = ("workdir", "overwrite", "depth", "only")


def chapters() -> list["Chapter"]:
    """All of them, A to J."""
    from experiments.claims import (
        attention,
        complexity,
        information,
        masks,
        norms,
        optimisation,
        positions,
        rope,
        scaling,
        softmax,
    )

    parts = (rope, scaling, norms, masks, information, softmax, positions, attention, complexity, optimisation)
    return [part.chapter for part in parts]


def run(settings: "Settings") -> int:
    """Check, print and write; 0 if every check that ran holds, else 1."""
    from experiments.claims import ledger, page, table
    from experiments.workdir import open_workdir
    from transformer_jax import sharding

    sharding.use_cpu_cores()
    book = chapters()
    claims = ledger.chosen(book, settings.only)
    workdir = open_workdir(
        settings.workdir or "runs/claims",
        {"experiment": "claims"},
        {"depth": settings.depth, "only": settings.only},
        overwrite=settings.overwrite,
    )
    if workdir.held and workdir.held["free"] != {"depth": settings.depth, "only": settings.only}:
        for path in filter(Path.exists, (workdir.path / "claims.json", workdir.path / "claims.html")):
            os.replace(path, path.with_name(f"old-{path.name}"))
    checked, code = [], 0
    try:
        for one in table.watch(claims, settings.depth, Path(workdir.path)):
            checked.append(one)
    except KeyboardInterrupt as stopped:
        why = str(stopped) or "interrupted"
        print(f"stopped: {why}; finished sweeps are saved, the same command goes on", file=sys.stderr)
        code = 128 + (signal.SIGTERM if signal.Signals.SIGTERM.name in why else signal.SIGINT)
    workdir.write("claims.json", [ledger.record(one) for one in checked])
    page.write(workdir.path, book, checked, settings.depth)
    return table.conclude(checked, workdir.path) if not code else code

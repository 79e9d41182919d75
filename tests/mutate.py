"""Break the library on purpose, and ask the ledger: one process for each mutant, forked after the heavy imports.

    python -m tests.mutate < mutants.json     a list of [module, old, new, [ids]]; a JSON line of {id: status} for each

A mutant replaces the only occurrence of a text in a module's source, before anything imports it.
"""

import importlib.util
import json
import os
import sys
import tempfile
from importlib.machinery import ModuleSpec, SourceFileLoader
from pathlib import Path
from types import CodeType
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
AT_ONCE = 2


class Mutant(SourceFileLoader):
    """Loads a module from its source with a text replaced; nothing is cached."""

    def __init__(self, fullname: str, path: str, old: str, new: str):
        super().__init__(fullname, path)
        self._texts = old, new

    def get_code(self, fullname: str) -> CodeType:
        source = Path(self.path).read_text(encoding="utf-8")
        if source.count(self._texts[0]) != 1:
            raise ValueError(f"{source.count(self._texts[0])} places in {fullname} read {self._texts[0]!r}: not one")
        return compile(source.replace(*self._texts), self.path, "exec")


class Finder:
    """Finds one module as a mutant of itself."""

    def __init__(self, module: str, old: str, new: str):
        path = str(ROOT / Path(*module.split("."))) + ".py"
        self.module, self.loader = module, Mutant(module, path, old, new)

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        return importlib.util.spec_from_loader(name, self.loader) if name == self.module else None


def statuses(module: str, old: str, new: str, ids: list[str]) -> dict[str, str]:
    """What the quick ledger says of the claims when the library is broken so."""
    sys.meta_path.insert(0, Finder(module, old, new))  # pyright: ignore[reportArgumentType]
    from experiments import claims
    from experiments.claims import ledger

    with tempfile.TemporaryDirectory() as folder:
        found = ledger.chosen(claims.chapters(), ",".join(ids))
        return {claim.id: ledger.check(claim, ledger.QUICK, Path(folder)).status for claim in found}


def child(mutant: list[Any], pipe: int) -> None:
    """Answer on the pipe, and end."""
    try:
        answer: dict[str, str] = statuses(*mutant)
    except BaseException as error:
        answer = {"error": f"{type(error).__name__}: {error}"}
    with os.fdopen(pipe, "w") as out:
        json.dump(answer, out)
    os._exit(0)


def main() -> None:
    """Read the mutants, fork, print the answers in order."""
    import jax  # not its devices: these would have threads, which a fork does not copy
    import optax  # noqa: F401
    import scipy.stats  # noqa: F401
    from flax import struct  # noqa: F401

    jax.config.update("jax_default_matmul_precision", "highest")
    mutants = json.load(sys.stdin)
    for start in range(0, len(mutants), AT_ONCE):
        pipes = []
        for mutant in mutants[start : start + AT_ONCE]:
            read, write = os.pipe()
            sys.stdout.flush()
            if os.fork() == 0:
                os.close(read)
                child(mutant, write)
            os.close(write)
            pipes.append(read)
        for read in pipes:
            with os.fdopen(read) as answer:
                print(answer.read(), flush=True)
    while True:
        try:
            os.wait()
        except ChildProcessError:
            return


if __name__ == "__main__":
    main()

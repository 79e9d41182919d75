"""The direction of imports, read from the source: the house stands only as long as this holds."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
# A module may import what stands before it.
ORDER = (
    "errors", "keys", "config", "presets", "batch", "data", "masks", "numerics", "rope_scaling", "rope", "positions",
    "relative", "norms", "ffn", "moe", "scores", "embedding", "dense", "blockwise", "banded", "linear_attention",
    "attention", "ring", "layers", "encoder_decoder", "importing", "samplers", "cache", "decode", "beam", "exact",
    "dependencies", "losses", "optim", "train", "topology", "sharding", "hosts", "checkpoint", "saver", "meter",
    "collectives",
)  # fmt: skip
# Each of these has one doorway.
DOORWAYS = {
    "orbax": {"transformer_jax/checkpoint.py"},
    "jax.sharding": {"transformer_jax/sharding.py", "transformer_jax/ring.py"},
    "optax": {"transformer_jax/optim.py", "transformer_jax/train.py"},
    "absl": {"experiments/flags.py"},
}
DATA_MAY = {"errors", "keys", "config", "presets", "batch", "data"}


def sources() -> list[Path]:
    folders = [ROOT / "transformer_jax", ROOT / "experiments"]
    return [ROOT / "launch.py", *(path for folder in folders for path in sorted(folder.rglob("*.py")))]


def imported(path: Path) -> set[str]:
    """Dotted names of everything that a file imports, wherever the statement stands."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return names


def library_part(name: str) -> str | None:
    """`masks` of `transformer_jax.masks.Mask`; None for another package."""
    parts = name.split(".")
    return parts[1] if parts[0] == "transformer_jax" and len(parts) > 1 else None


def test_every_library_module_has_its_place() -> None:
    found = {path.stem for path in (ROOT / "transformer_jax").glob("*.py")} - {"__init__"} | {"data"}
    assert found == set(ORDER)


def test_library_imports_point_one_way() -> None:
    for path in sources():
        part = library_part(".".join(path.relative_to(ROOT).with_suffix("").parts))
        if part is None or part not in ORDER:
            continue
        uses = {library_part(name) for name in imported(path)} & set(ORDER)
        allowed = DATA_MAY if part == "data" else set(ORDER[: ORDER.index(part)])
        assert uses <= allowed, f"{path.name} imports {sorted(uses - allowed)}"


def test_library_knows_neither_flags_nor_experiments() -> None:
    for path in sorted((ROOT / "transformer_jax").rglob("*.py")):
        roots = {name.split(".")[0] for name in imported(path)}
        assert not roots & {"absl", "experiments", "launch", "matplotlib", "rich", "jinja2"}, path.name


@pytest.mark.parametrize("package", DOORWAYS)
def test_one_doorway_for_each_dependency(package: str) -> None:
    users = {
        path.relative_to(ROOT).as_posix()
        for path in sources()
        if any(name == package or name.startswith(f"{package}.") for name in imported(path))
    }
    assert users <= DOORWAYS[package]
    assert users, f"nobody imports {package}: this test looks for the wrong name"


def test_import_reads_no_file_and_makes_no_array() -> None:
    code = (
        "import sys, builtins; import jax, flax.struct, optax, einops\n"
        "real = builtins.open\n"
        "def watched(file, *a, **k):\n"
        "    assert str(file).endswith(('.py', '.pyc', '.so')), file\n"
        "    return real(file, *a, **k)\n"
        "builtins.open = watched\n"
        "import transformer_jax.train, transformer_jax.data, transformer_jax.sharding, transformer_jax.checkpoint\n"
        "from jax._src import xla_bridge\n"
        "assert not xla_bridge._backends, 'import started a backend'\n"
        "assert 'orbax' not in sys.modules, 'orbax is imported where it is not used'\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_files_stay_short() -> None:
    long = {p.relative_to(ROOT).as_posix(): n for p in sources() if (n := len(p.read_text().splitlines())) > 420}
    assert not long, f"split these: {long}"

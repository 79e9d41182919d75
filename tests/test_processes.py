"""Several processes as one run: joined by flags, equal to one process, saved for any, ending together."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import launch
from experiments import processes
from experiments.interrupt import Stopper
from experiments.processes import join, launcher
from experiments.workdir import open_workdir
from transformer_jax import checkpoint
from transformer_jax.errors import ConfigError, UserError

ROOT = Path(__file__).resolve().parent.parent
TINY = [
    "--experiment=train", "--task=copy", "--d_model=8", "--num_heads=2", "--num_layers=2", "--seq_len=13",
    "--batch_size=8", "--dropout_rate=0.2", "--schedule=constant", "--warmup_steps=2", "--eval_every=5",
    "--clip_norm=0.5",
]  # fmt: skip
ENDLESS = ["--steps=100000", "--eval_every=100000"]
# As `python launch.py`, with a shorter patience, so that the tests need not wait for a dead process as long.
PROGRAM = """
    import faulthandler, os, signal, sys, runpy
    faulthandler.register(signal.SIGUSR1)
    from experiments import processes
    processes.HEARTBEAT_SECONDS = 10
    sys.argv[0] = "launch.py"
    runpy.run_path("launch.py", run_name="__main__")
"""


def port() -> int:
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return probe.getsockname()[1]


def start_two(code: str, *args: str) -> list[subprocess.Popen[str]]:
    """Two processes of two CPU devices each."""
    together = [f"--coordinator=localhost:{port()}", "--num_processes=2"]
    return [
        subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(code), *args, *together, f"--process_id={rank}"],
            cwd=ROOT,
            env=os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT), "JAX_NUM_CPU_DEVICES": "2"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]


def end(children: list[subprocess.Popen[str]], seconds: float) -> list[tuple[str, str]]:
    """What each wrote, ended within that time; else all are killed, and the failure shows where they were."""
    try:
        return [child.communicate(timeout=seconds) for child in children]
    except subprocess.TimeoutExpired:
        for child in children:
            child.send_signal(signal.SIGUSR1)
        time.sleep(2)
        for child in children:
            child.kill()
        pytest.fail("\n".join(f"{child.args}\n{''.join(child.communicate())}" for child in children))
    finally:
        for child in children:
            child.kill()


def wait_for(ready: Callable[[], bool], children: list[subprocess.Popen[str]]) -> None:
    """Until `ready`, 100 s at most; else as `end`, with what the children were at."""
    deadline = time.monotonic() + 100
    while not ready():
        if time.monotonic() > deadline or any(child.poll() is not None for child in children):
            raise AssertionError(end(children, 1))
        time.sleep(0.2)


def rows(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def assert_near(a: list[dict], b: list[dict]) -> None:
    assert [row["step"] for row in a] == [row["step"] for row in b]
    for x, y in zip(a, b, strict=True):
        for name in ("loss", "accuracy", "grad_norm"):
            if name in x:
                assert x[name] == pytest.approx(y[name], abs=1e-5, rel=1e-5), (x["step"], name)


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One process on one device, 25 steps."""
    folder = tmp_path_factory.mktemp("processes") / "one"
    assert launch.main(["launch.py", *TINY, "--steps=10", f"--workdir={folder}"]) == 0
    shutil.copytree(folder, folder.with_name("ten"))
    assert launch.main(["launch.py", *TINY, "--steps=25", f"--workdir={folder}"]) == 0
    return folder


def test_two_processes_equal_one_and_each_opens_what_the_other_saved(straight: Path) -> None:
    """Ten steps by one process, to 15 by two (saving at every step), to 25 by one: the losses of one run."""
    shared = straight.with_name("ten")
    flags = [*TINY, f"--workdir={shared}", "--mesh=data:2,fsdp:2", "--checkpoint_every=1", "--steps=15"]
    children = start_two(PROGRAM, *flags)
    (said, told), (silent, quiet) = end(children, 120)
    assert [child.returncode for child in children] == [0, 0], (told, quiet)
    assert "resumed at step 10" in told and "resumed" not in quiet
    # Gloo, which carries the collectives of CPUs, writes lines of its own, from threads and into one another.
    assert "15 steps" in said and not any(words in silent for words in ("steps", "input", "loss", "config.json"))
    assert checkpoint.steps(shared / "checkpoints") == [14, 15]
    assert launch.main(["launch.py", *TINY, "--steps=25", f"--workdir={shared}"]) == 0
    assert_near(rows(shared), rows(straight))
    assert len(rows(shared)) == 30


def test_a_signal_to_one_stops_both_saved(tmp_path: Path) -> None:
    folder = tmp_path / "w"
    children = start_two(PROGRAM, *TINY, f"--workdir={folder}", *ENDLESS)
    wait_for(lambda: (folder / "metrics.jsonl").exists() and len(rows(folder)) > 3, children)
    children[1].send_signal(signal.SIGTERM)
    (_, told), (_, quiet) = end(children, 60)
    assert [child.returncode for child in children] == [128 + signal.SIGTERM] * 2, (told, quiet)
    assert "another process was told to stop; saved" in told
    step = checkpoint.steps(folder / "checkpoints")[-1]
    assert f"stopped at step {step}" in told


def test_a_signal_in_the_midst_of_agreeing_waits_for_the_next_time(tmp_path: Path) -> None:
    """Noted after this process has said that it goes on: were it heeded at once, the other would step on alone."""
    code = """
        import os, signal, sys, runpy
        from experiments import processes
        agree, calls = processes.agree, []
        def agree_when_told(*own):
            calls.extend([own] * (len(own) == 5))  # what is agreed after each chunk
            if processes._index == 1 and len(own) == 5 and len(calls) == 3:
                assert own[-1] == -1, own
                os.kill(os.getpid(), signal.SIGTERM)
            return agree(*own)
        processes.agree = agree_when_told
        sys.argv[0] = "launch.py"
        runpy.run_path("launch.py", run_name="__main__")
    """
    children = start_two(code, *TINY, f"--workdir={tmp_path / 'w'}", *ENDLESS)
    (_, told), (_, quiet) = end(children, 100)
    assert [child.returncode for child in children] == [128 + signal.SIGTERM] * 2, (told, quiet)
    assert "another process was told to stop; saved" in told


def start_two_unlike(second: str, *args: str) -> list[subprocess.Popen[str]]:
    """Two runs of the program; process 1 begins with the code `second`."""
    return start_two(f"import sys\nif '--process_id=1' in sys.argv:\n    {second}\n" + textwrap.dedent(PROGRAM), *args)


def test_a_process_that_judges_otherwise_goes_with_the_first(tmp_path: Path) -> None:
    """Were process 1 to save when its own floats say so, its collectives would meet other ones: here they never do."""
    second = (
        "from experiments import loop; was = loop.describe; "
        "loop.describe = lambda *given: {name: -x for name, x in was(*given).items()}"
    )
    flags = ["--steps=40", "--keep_best", "--patience=3", "--learning_rate=1e-3"]
    children = start_two_unlike(second, *TINY, f"--workdir={tmp_path / 'w'}", *flags)
    (said, told), (_, quiet) = end(children, 100)
    assert [child.returncode for child in children] == [0, 0], (told, quiet)
    assert "40 steps" in said and checkpoint.steps(tmp_path / "w" / "checkpoints")[-1] == 40


@pytest.mark.parametrize(
    ("second", "flags", "named"),
    [
        ("sys.argv.append('--eval_every=7')", [], "differ in --eval_every"),
        ("sys.argv.append('--dropout_rate=0.1')", [], "differ in --dropout_rate"),
        (
            "from experiments import restoring; restoring.sound_step = lambda *_: (1, [])",
            ["--restore={source}"],
            "differ in the step that --restore takes",
        ),
    ],
)
def test_processes_that_would_part_are_refused(
    second: str, flags: list[str], named: str, straight: Path, tmp_path: Path
) -> None:
    flags = [flag.format(source=straight.with_name("ten")) for flag in flags]
    children = start_two_unlike(second, *TINY, "--steps=5", f"--workdir={tmp_path / 'w'}", *flags)
    found = end(children, 60)
    assert [child.returncode for child in children] == [2, 2], found
    assert all(named in err for _, err in found) and not (tmp_path / "w").exists()


@pytest.mark.parametrize(
    ("what", "begun", "flags"),
    [
        ("whether the run has begun", False, ["--steps=5"]),
        ("whether the run has finished", True, ["--steps=25"]),
        ("the step that they start from", True, ["--steps=30"]),
        ("the best step", False, ["--steps=5", "--keep_best"]),
    ],
)
def test_what_each_process_finds_in_the_workdir_is_compared(
    what: str, begun: bool, flags: list[str], straight: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As if the other process saw another folder: it would go on by itself."""
    same = processes.same

    def compare(said: str, value: int) -> None:
        if said.startswith(what):
            monkeypatch.setattr(processes, "_count", 2)
            monkeypatch.setattr(processes, "agree", lambda *own: [own, (own[0] + 1,)])
        same(said, value)

    monkeypatch.setattr(processes, "same", compare)
    folder = tmp_path / "w"
    if begun:
        shutil.copytree(straight, folder)
    with pytest.raises(UserError, match=f"the 2 processes differ in {what}"):
        launch.main(["launch.py", *TINY, *flags, f"--workdir={folder}", "--debug"])


def test_a_signal_before_the_first_step_ends_a_process(tmp_path: Path) -> None:
    """JAX's preemption service, on by default, notes a SIGTERM and goes on: `kill` would do nothing until we listen."""
    code = """
        import os, sys, time
        from experiments import processes
        processes.join(sys.argv[2].split("=")[1], 2, int(sys.argv[4].split("=")[1]))
        open(f"{sys.argv[1]}/{processes.index()}", "w").close()
        time.sleep(60)
    """
    children = start_two(code, str(tmp_path))
    wait_for(lambda: len(list(tmp_path.iterdir())) == 2, children)
    time.sleep(2)  # the service's handler is set by a thread of its own
    children[1].send_signal(signal.SIGTERM)
    try:
        assert children[1].wait(20) == -signal.SIGTERM
    finally:
        children[0].kill()
        end(children, 5)


@pytest.mark.parametrize("way", ["killed", "raises"])
def test_a_process_that_dies_ends_the_other_with_a_message(way: str, tmp_path: Path) -> None:
    """After its third chunk process 1 is gone, or has an error of its own: seconds later so is process 0."""
    dies = {"killed": "os.kill(os.getpid(), 9)", "raises": "raise RuntimeError('the loader broke')"}[way]
    code = f"""
        import os, sys, runpy
        from experiments import processes
        processes.HEARTBEAT_SECONDS = 10
        agree, calls = processes.agree, []
        def agree_then_die(*own):
            calls.extend([own] * (len(own) == 5))  # what is agreed after each chunk
            if processes._index == 1 and len(calls) > 2:
                {dies}
            return agree(*own)
        processes.agree = agree_then_die
        sys.argv[0] = "launch.py"
        runpy.run_path("launch.py", run_name="__main__")
    """
    # A save is always under way: its end is agreed on by both, which a dying process must not wait for.
    children = start_two(code, *TINY, f"--workdir={tmp_path / 'w'}", *ENDLESS, "--checkpoint_every=1")
    _, err = children[1].communicate(timeout=100)
    begun = time.monotonic()
    told = end(children[:1], 60)[0][1]
    assert time.monotonic() - begun < 60
    assert children[0].returncode != 0
    assert "process 0 of 2: another process has ended" in told or "another task died" in told, told[-2000:]
    assert children[1].returncode == (-9 if way == "killed" else 1)
    assert way == "killed" or "the loader broke" in err


def test_rows_of_the_batch_are_disjoint_and_cover_it() -> None:
    """Which rows of a training batch each process holds, and what stands in them."""
    code = """
        import sys, json
        from experiments import processes
        processes.join(sys.argv[1].split("=")[1], 2, int(sys.argv[3].split("=")[1]))
        import jax, numpy as np
        from jax.experimental import multihost_utils
        from transformer_jax import hosts, sharding
        from transformer_jax.config import Config
        from transformer_jax.data import make_task, resolve
        own = np.arange(6, dtype=np.int32).reshape(2, 3) + 100 * processes.index()
        assert hosts.gather(own).tolist() == [[[0, 1, 2], [3, 4, 5]], [[100, 101, 102], [103, 104, 105]]]
        assert hosts.gather(np.float32(processes.index() / 2)).tolist() == [0, 0.5]
        config = resolve(Config(task="copy", seq_len=13, batch_size=12))
        mesh, task = sharding.from_text("data:2,fsdp:2"), make_task(config)
        lay = sharding.constrain(mesh)
        batch = jax.jit(lambda key: lay(task.train_batch(task.data, key).tokens_BT, "BT"))(jax.random.key(5))
        want = jax.jit(lambda key: task.train_batch(task.data, key).tokens_BT)(jax.random.key(5))
        assert (hosts.whole(batch) == np.asarray(want)).all()
        multihost_utils.assert_equal = None  # what device_put would compare every leaf with, by a program each
        shared = sharding.place_shared({"a": np.arange(3.0), "b": jax.numpy.ones((2, 2))}, mesh)
        assert shared["a"].is_fully_replicated and hosts.whole(shared["a"]).tolist() == [0, 1, 2]
        held = {s.index[0].start or 0: np.asarray(s.data).tolist() for s in batch.addressable_shards}
        print(json.dumps(held), file=sys.stderr)
    """
    children = start_two(code)
    ended = end(children, 100)
    assert [child.returncode for child in children] == [0, 0], ended
    held: dict[str, list[list[int]]] = {}
    for _, err in ended:
        found = json.loads(next(line for line in err.splitlines() if line.startswith("{")))
        assert not held.keys() & found.keys()
        held |= found
    import jax

    from transformer_jax.config import Config
    from transformer_jax.data import make_task, resolve

    task = make_task(resolve(Config(task="copy", seq_len=13, batch_size=12)))
    want = np.asarray(task.train_batch(task.data, jax.random.key(5)).tokens_BT)
    assert sorted(held, key=int) == ["0", "3", "6", "9"]
    np.testing.assert_array_equal(np.concatenate([held[begin] for begin in sorted(held, key=int)]), want)


# --- joining -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (("host:1", 0, 0), "all three are wanted"),
        (("", 2, 0), "all three are wanted"),
        (("host:1", 2, -1), "--process_id=-1: all three"),
        (("host", 2, 0), "--coordinator=host: HOST:PORT"),
        (("host:", 2, 0), "--coordinator=host:: HOST:PORT"),
        ((":80", 2, 0), "--coordinator=:80: HOST:PORT"),
        (("host:1", 2, 2), "--process_id=2 of --num_processes=2"),
    ],
)
def test_flags_at_odds_are_refused(flags: tuple[str, int, int], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        join(*flags)


def test_processes_that_differ_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "_count", 2)
    monkeypatch.setattr(processes, "agree", lambda value: [[value], [7]])
    processes.same("their seed", 7)
    with pytest.raises(UserError, match=r"the 2 processes differ in their seed \(3, 7\)"):
        processes.same("their seed", 3)
    with pytest.raises(UserError, match="settings"):
        open_workdir("nowhere", {"seed": 1}, {})


def test_what_another_process_was_told_holds_here() -> None:
    stop = Stopper()
    assert (stop.reason, stop.exit_code) == ("", 0)
    stop.told(-1)
    assert stop.reason == ""
    stop.told(143)
    assert (stop.reason, stop.exit_code) == ("another process was told to stop", 143)


def test_one_process_needs_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "LAUNCHERS", {})
    join("", 0, -1)
    join("localhost:1", 1, 0)
    assert processes.first() and processes.count() == 1 and processes.name() == ""
    assert processes.agree(3, 4) == [(3, 4)]
    assert processes.by_first(lambda: "made") == "made"


OPEN_MPI = {"OMPI_MCA_orte_hnp_uri": "1.0;tcp://h:1", "OMPI_COMM_WORLD_RANK": "0"}
SLURM = {"SLURM_JOB_ID": "7", "SLURM_STEP_NODELIST": "n[1-2]", "SLURM_PROCID": "1", "SLURM_LOCALID": "0"}


@pytest.mark.parametrize(
    ("environment", "found"),
    [
        ({}, ""),
        (SLURM | {"SLURM_NTASKS": "2"}, "Slurm"),
        (SLURM | {"SLURM_NTASKS": "1"}, ""),
        ({"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4"}, ""),  # in an allocation, outside srun
        (OPEN_MPI | {"OMPI_COMM_WORLD_SIZE": "2"}, "Open MPI"),
        (OPEN_MPI | {"OMPI_COMM_WORLD_SIZE": "1"}, ""),
        ({"KUBERNETES_SERVICE_HOST": "h", "JOB_COMPLETION_INDEX": "0"}, "Kubernetes"),
        ({"KUBERNETES_SERVICE_HOST": "h"}, ""),
        ({"TPU_WORKER_ID": "0", "TPU_WORKER_HOSTNAMES": "a,b"}, "GKE TPU"),
        ({"TPU_WORKER_ID": "0", "TPU_WORKER_HOSTNAMES": "localhost"}, ""),
    ],
)
def test_launchers_by_their_variables(environment: dict[str, str], found: str) -> None:
    assert launcher(environment) == found


def test_wrong_flags_are_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert launch.main(["launch.py", *TINY, "--coordinator=host", "--num_processes=2", "--process_id=0"]) == 2
    assert launch.main(["launch.py", "--experiment=shapes", "--num_processes=2"]) == 2
    first, second = capsys.readouterr().err.splitlines()
    assert "HOST:PORT" in first and "--num_processes has no effect in --experiment=shapes" in second

"""What the README says to type works: its library example, and its question in one file."""

import json
import re
import sys
import types
from pathlib import Path

import pytest

import experiments
import launch

README = (Path(__file__).resolve().parent.parent / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```python\n(.*?)```", README, re.S)


def test_the_library_in_ten_lines(capsys: pytest.CaptureFixture[str]) -> None:
    (code,) = [block for block in BLOCKS if "train.run" in block]
    assert "steps=200" in code
    exec(compile(code.replace("steps=200", "steps=3, seq_len=8"), "README", "exec"), {})
    assert "floor 0.0" in capsys.readouterr().out


def test_a_question_in_one_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (code,) = [block for block in BLOCKS if "Question(" in block]
    module = types.ModuleType("experiments.my_question")
    exec(compile(code, "README", "exec"), module.__dict__)
    monkeypatch.setitem(sys.modules, "experiments.my_question", module)
    monkeypatch.setitem(experiments.REGISTRY, "my_question", "pre or post?")
    asked = ["--d_model=8", "--d_ff=8", "--num_heads=1", "--num_layers=1", "--seq_len=8", "--batch_size=2", "--steps=3",
             "--task=copy", "--seeds=1", f"--workdir={tmp_path / 'w'}"]  # fmt: skip
    assert launch.main(["launch.py", "--experiment=my_question", *asked]) == 0
    found = json.loads((tmp_path / "w" / "results.json").read_text())
    assert [arm["name"] for arm in found["arms"]] == ["pre", "post", "sandwich"]
    assert (tmp_path / "w" / "report.html").exists()


def test_every_command_parses() -> None:
    """Each `python launch.py …` line names flags that exist and that its experiment uses."""
    import importlib
    import shlex

    from experiments import flags

    uses = {name: importlib.import_module(f"experiments.{name}").FLAGS for name in experiments.REGISTRY}
    texts = [README, (Path(__file__).resolve().parent.parent / "README.zh.md").read_text(encoding="utf-8")]
    lines = [line for text in texts for line in text.splitlines() if line.startswith("python launch.py --experiment")]
    assert len(lines) >= 6
    for line in lines:
        words = shlex.split(line, comments=True)[1:]
        words = words[: words.index("<")] if "<" in words else words
        settings, _ = flags.parse(words, uses)
        assert settings.experiment in uses

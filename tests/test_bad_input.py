"""Bad input through the command line: one clear sentence, the right exit code, no traceback, nothing written.

Most of it calls the command's entry point in this process; what needs the kernel or signals, the installed command.
"""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import time
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import pytest

import cli
from tests import runs
from tests.test_docs import EXAMPLES

PLAIT = Path(sys.executable).with_name("plait")


def plait(*arguments: str, cwd: Path, prefix: str = "") -> subprocess.CompletedProcess[str]:
    """The command in `cwd`; with `prefix`, shell text before it, in a process of its own."""
    if not prefix:
        return in_process(*arguments, cwd=cwd)
    command = ["bash", "-c", f'{prefix}; exec "$@"', "bash", str(PLAIT), *arguments]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=120, check=False)


def in_process(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """`cli.main`, which the installed command calls, with what it leaves: exit code and both outputs."""
    out, err, code = io.StringIO(), io.StringIO(), 0
    before, handler = os.getcwd(), signal.getsignal(signal.SIGINT)
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(err):
        patch.chdir(cwd)
        patch.setattr(sys, "argv", ["plait", *arguments])
        try:
            cli.main()
        except SystemExit as done:
            code = done.code if isinstance(done.code, int) else int(done.code is not None)
    signal.signal(signal.SIGINT, handler)
    assert os.getcwd() == before
    return subprocess.CompletedProcess(arguments, code, out.getvalue(), err.getvalue())


def refusal(*arguments: str, cwd: Path, code: int = 2, prefix: str = "") -> str:
    """The one sentence that the command ends with."""
    before = sorted(cwd.rglob("*"))
    result = plait(*arguments, cwd=cwd, prefix=prefix)
    assert result.returncode == code, result.stderr
    lines = result.stderr.splitlines()
    assert len(lines) == 1, result.stderr
    assert lines[0].startswith("plait: ")
    assert lines[0].endswith((".", "?"))
    assert "Traceback" not in result.stdout
    assert sorted(cwd.rglob("*")) == before, "a refused command wrote something"
    return lines[0]


SHORT = ("--global-batch", "64", "--seq-len", "512")
PLAN = ("--global-batch", "64", "--seq-len", "4096", "-o", "plan.json")


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("plan", "--model", "llama-3-80b", "--cluster", "h100x8", *PLAN), "unknown model 'llama-3-80b', did you mean"),
        (("plan", "--model", "gpt2", "--cluster", "h100x0", *PLAN), "cluster h100x0 has no devices"),
        (("plan", "--model", "gpt2", "--cluster", "h100x12", *PLAN), "Use h100x8 or h100x16"),
        (("plan", "--model", "gpt2", "--cluster", "h900x8", *PLAN), "unknown device 'h900'"),
        (("plan", "--model", "no/model.json", "--cluster", "h100x8", *PLAN), "no/model.json does not exist"),
        (
            ("plan", "--model", "gpt2", "--cluster", "h100x8", "--profile", "none.json", *PLAN),
            "none.json does not exist",
        ),
        (("plan", "--model", "gpt2", "--cluster", "h100x8", "--global-batch", "0", "--seq-len", "512"), "global-batch"),
        (("plan", "--model", "gpt2", "--cluster", "h100x8", "--global-batch", "8", "--seq-len", "-1"), "seq-len"),
        (("plan", "--model", "gpt2", "--cluster", "h100x8", "--global-batch", "x", "--seq-len", "512"), "global-batch"),
        (("plan", "--model", "gpt2", "--cluster", "h100x8", *PLAN), "1024"),  # sequences longer than GPT-2 knows
        (("plan", "--cluster", "h100x8", *PLAN), "--model"),
        (("plan", "--model", "gpt2", *SHORT), "no cluster is given"),
        (("plan", "--model", "gpt2", "--cluster", "h100x8", *SHORT, "--memory-cap", "lots"), "'lots' is not a size"),
        (("plan", "--model", "gpt2", "--cluster", "a10gx8", *SHORT, "--precision", "fp8"), "no shipped data for fp8"),
        (("plan", "--model", "gpt2", "--cluster", "h100x8", *SHORT, "--objective", "fun"), "'fun' is not one of"),
        (
            ("plan", "--model", "tiny", "--cluster", "h100x512", "--global-batch", "1", "--seq-len", "64"),
            "multiple of 512",
        ),
        (
            ("plan", "--model", "tiny", "--cluster", "h100x64", "--global-batch", "1", "--seq-len", "4"),
            "multiple of 64",
        ),
        (("estimate", "none.json"), "none.json does not exist"),
        (("simulate", "none.json"), "none.json does not exist"),
        (("simulate", "none.json", "--days", "0"), "--days"),
        (("fit-failures",), "Missing argument"),
        (("profile", "--nproc", "0"), "--nproc"),
        (("train", "none.json", "--out", "r", "--learning-rate", "-1"), "--learning-rate"),
        (("train", "none.json", "--out", "r", "--learning-rate", "nan"), "--learning-rate"),
        (("compare", "none"), "run folder none does not exist"),
        (("schema", "plans"), "'plans' is not one of"),
        (("schema",), "Missing argument"),
        (("trian",), "No such command 'trian'"),
        (("--nope",), "No such option"),
        (("train", "none.json", "--out", "run"), "plan none.json does not exist"),
        (("train", ".", "--out", "run"), "is a folder, a JSON file is needed"),
        (("export", "none.json", "--to", "megatron"), "none.json does not exist"),
        (("export", "none.json", "--to", "deepspeed"), "'deepspeed' is not one of"),
        (("export", "none.json"), "Missing option '--to'"),
        (("report", "none.json"), "none.json does not exist"),
        (("report", "none.json", "--days", "x"), "--days"),
        (("trace", "."), "plan.json does not exist"),
        (("explain", "none.json"), "none.json does not exist"),
        (("diff", "none.json"), "Missing argument"),
        (("eval", "none"), "none does not exist"),
        (("generate", "none", "--prompt", "x"), "none does not exist"),
    ],
    ids=lambda value: " ".join(value)[:50] if isinstance(value, tuple) else "",
)
def test_refused(arguments: tuple[str, ...], expected: str, tmp_path: Path) -> None:
    assert expected in refusal(*arguments, cwd=tmp_path)


@pytest.mark.parametrize("arguments", [("plan", "--model", "gpt2", *SHORT), ("trian",), ("compare", "none")])
def test_refused_by_the_installed_command(arguments: tuple[str, ...], tmp_path: Path) -> None:
    """Word for word as in this process."""
    assert refusal(*arguments, cwd=tmp_path, prefix=":") == refusal(*arguments, cwd=tmp_path)


def test_a_model_that_fits_nowhere(tmp_path: Path) -> None:
    """The documentation shows the same of a large model."""
    arguments = ("plan", "--model", "gpt2", "--cluster", "h100x8", *SHORT, "--memory-cap", "100MiB", "-o", "plan.json")
    assert "no plan fits 100 MiB" in refusal(*arguments, cwd=tmp_path, code=3)


def test_a_profile_of_another_machine(tmp_path: Path) -> None:
    profile = next(block.text for block in EXAMPLES if block.info == "json profile")
    (tmp_path / "profile.json").write_text(profile)
    arguments = ("plan", "--model", "gpt2", "--cluster", "a100x8", "--profile", "profile.json", *SHORT)
    assert "measured on H100, the cluster a100x8 has A100-80G" in refusal(*arguments, cwd=tmp_path)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"model_type": "llama", "hidden_size": 64}, "is missing"),
        ({"model_type": "mamba"}, "model_type 'mamba' is not supported"),
        ({"hidden_size": 64}, "neither a plait model"),
        ([], "neither a plait model"),
    ],
)
def test_bad_model_files(config: object, expected: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    message = refusal("plan", "--model", "config.json", "--cluster", "h100x8", *PLAN, cwd=tmp_path)
    assert expected in message


def test_a_degree_that_leaves_a_shard_empty(tmp_path: Path) -> None:
    data = runs.plan().model_dump(mode="json")
    data["pipelines"][0]["stages"][0]["modules"][2]["cuts"] = [[0, 172, 172]]
    (tmp_path / "plan.json").write_text(json.dumps(data))
    assert "rank 1 of the block of 2 would hold nothing" in refusal("train", "plan.json", "--out", "run", cwd=tmp_path)


def test_a_run_folder_in_use_and_one_without_a_run(tmp_path: Path) -> None:
    runs.write(tmp_path / "run", runs.whole_run())
    assert "--resume" in refusal("train", "run/plan.json", "--out", "run", cwd=tmp_path)
    assert "no run to resume" in refusal("train", "run/plan.json", "--out", "other", "--resume", cwd=tmp_path)


def test_a_plan_that_an_engine_cannot_run(tmp_path: Path) -> None:
    data = runs.plan().model_dump(mode="json")
    data["pipelines"][0]["stages"][0]["modules"][2]["blocks"] = [1, 1]
    (tmp_path / "plan.json").write_text(json.dumps(data))
    message = refusal("export", "plan.json", "--to", "megatron", "-o", "args.sh", cwd=tmp_path)
    assert "the plan mixes tensor-parallel degrees" in message
    assert "--nearest" in message


def test_a_page_of_a_plan_without_predictions(tmp_path: Path) -> None:
    data = runs.plan().model_dump(mode="json")
    (tmp_path / "plan.json").write_text(json.dumps(data | {"predicted": None}))
    assert "no predicted numbers" in refusal("report", "plan.json", "-o", "report.html", cwd=tmp_path)


def test_a_run_without_steps(tmp_path: Path) -> None:
    runs.write(tmp_path / "run", [runs.start(1.0)])
    assert "the log has no step" in refusal("compare", "run", cwd=tmp_path)


def test_a_run_with_a_damaged_log(tmp_path: Path) -> None:
    folder = runs.write(tmp_path / "run", runs.whole_run())
    log = folder / "log.jsonl"
    lines = log.read_text().splitlines()
    log.write_text("\n".join([lines[0], lines[1][:20], *lines[2:]]) + "\n")
    assert "line 2 is not valid JSON" in refusal("compare", "run", cwd=tmp_path)


def test_a_full_disk(tmp_path: Path) -> None:
    """The kernel refuses every byte written to a file."""
    runs.write(tmp_path / "run", runs.whole_run())
    # Matplotlib keeps a list of fonts from its first use on; it must exist before nothing can be written.
    assert plait("compare", "run", "--plot", "before.svg", cwd=tmp_path).returncode == 0
    message = refusal("compare", "run", "--plot", "terms.svg", cwd=tmp_path, prefix="ulimit -f 0")
    assert "terms.svg cannot be written" in message


def test_a_plan_on_a_full_disk(tmp_path: Path) -> None:
    arguments = ("plan", "--model", "gpt2", "--cluster", "h100x8", "--global-batch", "64", "--seq-len", "512")
    result = plait(*arguments, "-o", "plan.json", cwd=tmp_path, prefix="ulimit -f 0")
    assert result.returncode == 2
    assert "plan.json cannot be written" in result.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("delay", [0.1, 0.2, 0.3])
def test_ctrl_c_says_so_and_writes_nothing(delay: float, tmp_path: Path) -> None:
    """A plan that takes longer than that; at any moment after Python itself has started."""
    process = subprocess.Popen(
        [str(PLAIT), "plan", "--model", "llama-3-405b", "--cluster", "h100x16384", *PLAN],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )
    time.sleep(delay)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert err.splitlines()[-1] == "plait: interrupted."
    assert "Traceback" not in err
    assert list(tmp_path.iterdir()) == []

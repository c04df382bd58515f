"""Job parameters, the batch script, and errors of the command."""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from backlight.cli import app as application
from backlight.launch.slurm import ClusterError, Job, batch_script, minutes_of, parameters

COMMAND = ("-m", "backlight", "run", "--out", "/shared/run", "train.py", "a b", "it's")


def job(**given: object) -> Job:
    return Job.of(dict(given), COMMAND, Path("/shared/run"))


def test_parameters_use_the_names_of_sbatch() -> None:
    items = ["nodes=2", "--gpus-per-node=a100:8", "time=1-02:00:00", "partition = gpu"]
    given = parameters(items)
    assert given == {"nodes": 2, "gpus_per_node": "a100:8", "time": "1-02:00:00", "partition": "gpu"}
    made = job(**given)
    assert (made.nodes, made.per_node, made.minutes) == (2, 8, 26 * 60)
    assert made.directives == {"gpus_per_node": "a100:8", "partition": "gpu"}
    assert made.logs == Path("/shared/run.slurm")


@pytest.mark.parametrize(
    ("limit", "minutes"),
    [(90, 90), ("90:30", 91), ("2:00:00", 120), ("1-0", 1440), ("1-02:30", 1590), ("0-00:00:01", 1)],
)
def test_time_limits(limit: int | str, minutes: int) -> None:
    assert minutes_of(limit) == minutes


@pytest.mark.parametrize("limit", ["soon", "0", "1:2:3:4", "-5", ""])
def test_invalid_time_limits_are_rejected(limit: str) -> None:
    with pytest.raises(ClusterError, match="expected minutes, H:MM:SS or D-HH:MM:SS"):
        minutes_of(limit)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"ntasks_per_node": 8}, "ntasks_per_node=8: Slurm starts one torchrun per node"),
        ({"nodes": "two"}, "nodes=two: expected a whole number, at least 1"),
        ({"nproc_per_node": 0}, "nproc_per_node=0: expected a whole number, at least 1"),
        ({"gpus_per_node": "a100"}, "nproc_per_node=a100: expected a whole number"),
        ({"max_restarts": -1}, "max_restarts=-1: expected a whole number, at least 0"),
    ],
)
def test_invalid_jobs_are_rejected(given: dict[str, object], message: str) -> None:
    with pytest.raises(ClusterError, match=message):
        job(**given)


def test_script_starts_one_torchrun_per_node() -> None:
    text = batch_script(job(nodes=2, gpus_per_node=8, time="2:00:00", mem_gb=64, partition="gpu"))
    head, _, body = text.partition("\n\n")
    assert head.splitlines() == [
        "#!/bin/bash",
        "#SBATCH --job-name=run",
        "#SBATCH --nodes=2",
        "#SBATCH --ntasks-per-node=1",
        "#SBATCH --output=/shared/run.slurm/%j.out",
        "#SBATCH --open-mode=append",
        "#SBATCH --time=120",
        "#SBATCH --gpus-per-node=8",
        "#SBATCH --mem=64G",
        "#SBATCH --partition=gpu",
        "#SBATCH --requeue",
    ]
    assert 'BACKLIGHT_RUN_ID="slurm-${SLURM_JOB_ID}+${SLURM_RESTART_COUNT:-0}"' in body
    assert 'scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1' in body
    assert "exec srun --kill-on-bad-exit=1 bash -c 'exec " in body
    assert f"{sys.executable} -m torch.distributed.run --nnodes=2 --nproc-per-node=8 " in body
    assert '--rdzv-backend=c10d --rdzv-endpoint="$BACKLIGHT_ENDPOINT"' in body
    assert "--rdzv-conf=is_host=$((SLURM_NODEID == 0))" in body
    assert "--signals-to-handle" not in body


def test_script_forwards_signals_and_setup() -> None:
    text = batch_script(job(signal="B:USR1@120", setup="module load cuda", max_restarts=3))
    assert "#SBATCH --signal=B:USR1@120\n" in text
    assert "bash -c 'module load cuda && exec " in text
    assert "--max-restarts=3" in text
    assert "--signals-to-handle=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1" in text


def test_arguments_reach_the_nodes_unchanged(tmp_path: Path) -> None:
    """Run the script in bash with a fake srun for one node and a fake torchrun that prints."""
    words = ("train.py", "a b", "it's", "$HOME", '"', "*", "--every")
    made = Job("x", words, tmp_path / "run")
    text = batch_script(made).replace(f"{sys.executable} -m torch.distributed.run", "printf '%s\\n' ran")
    for name, body in {"srun": 'shift; SLURM_NODEID=0 "$@"', "scontrol": "echo node7; echo node8"}.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{body}\n")
        (tmp_path / name).chmod(0o755)
    text = text.replace("printf '%s\\n' ran", "printf %s\\\\n ran")
    done = subprocess.run(
        ["bash", "-c", text],
        env={"PATH": f"{tmp_path}:/usr/bin:/bin", "SLURM_JOB_ID": "61234", "SLURM_JOB_NODELIST": "node[7-8]"},
        capture_output=True,
        text=True,
        check=True,
    )
    lines = done.stdout.splitlines()
    assert lines[-len(words) :] == list(words)
    assert "--rdzv-id=61234" in lines
    assert "--rdzv-endpoint=node7:21234" in lines
    assert "--rdzv-conf=is_host=1" in lines


def test_values_with_spaces_stay_one_argument(tmp_path: Path) -> None:
    given = {"nodes": 2, "comment": "second try", "constraint": "a100|h100", "mem_gb": 64}
    text = batch_script(Job.of(given, ["train.py"], tmp_path / "my runs" / "big one"))
    lines = [line.removeprefix("#SBATCH ") for line in text.splitlines() if line.startswith("#SBATCH")]
    options = dict(
        part.removeprefix("--").split("=", 1) for line in lines for part in shlex.split(line) if "=" in part
    )
    assert options["comment"] == "second try"
    assert options["constraint"] == "a100|h100"
    assert options["job-name"] == "big one"
    assert options["output"] == f"{tmp_path}/my runs/big one.slurm/%j.out"
    assert options["mem"] == "64G"


def test_command_writes_the_script_or_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "train.py").write_text("raise SystemExit(7)\n")
    monkeypatch.chdir(tmp_path)

    def call(*arguments: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as leaving:
            application.main(["run", *arguments])
        captured = capsys.readouterr()
        return int(leaving.value.code or 0), captured.out, captured.err

    options = [
        "--slurm",
        "nodes=2",
        "--monitors",
        "health",
        "--every",
        "3",
        "--set",
        "groups.a=x",
    ]
    code, out, errors = call(
        *options,
        "--set",
        "health.histogram=true",
        "--out",
        "r",
        "--slurm-script",
        "j.sh",
        "train.py",
        "--every",
        "5",
    )
    assert (code, out) == (0, "j.sh\n")
    text = (tmp_path / "j.sh").read_text()
    changes = "--set groups.a=x --set health.histogram=true --monitors health --every 3"
    own = f"--out {tmp_path / 'r'} {changes}"
    assert f"-m backlight run {own} train.py --every 5" in text
    assert "which other nodes may not see" in errors
    (tmp_path / "j.sh").write_text(f"{text}# by hand\n")
    code, _, errors = call("--slurm", "nodes=4", "--slurm-script", "j.sh", "train.py")
    assert code == 2
    assert "--slurm-script j.sh: exists with other content" in errors
    assert (tmp_path / "j.sh").read_text() == f"{text}# by hand\n"
    code, _, errors = call("--slurm", "nodes=2", "--slurm-script", "gone/j.sh", "train.py")
    assert code == 2
    assert "--slurm-script gone/j.sh: cannot be written: No such file or directory" in errors
    code, _, errors = call("--slurm", "nodes=2", "train.py")
    assert code == 2
    assert errors.startswith("backlight: --slurm sets options of a batch script: add --slurm-script FILE")
    assert call("--slurm", "nodes", "train.py")[2].startswith(
        "backlight: --slurm 'nodes': expected key=value"
    )
    assert "no such script" in call("--slurm", "nodes=2", "gone.py")[2]
    assert not (tmp_path / "runs").exists()

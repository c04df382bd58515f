"""A driver of Ray Train for test_ray.py: ``python ray_driver.py FOLDER CASE``; one ray.init per process."""

from __future__ import annotations

import json
import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

os.environ |= {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_AUTH_MODE": "disabled",  # else a token is written to the home directory
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.5",
    "TORCH_PROCESS_GROUP_SHUTDOWN_TIMEOUT_S": "1",
}

import ray
from pyarrow import fs
from ray.cluster_utils import Cluster
from ray.train import FailureConfig, RunConfig, ScalingConfig, TrainingFailedError, UserCallback
from ray.train.torch import TorchTrainer

from backlight.integrations.ray import BacklightCallback
from backlight.store.write.writer import RunWriter
from integrations import ray_loop

STORE_BYTES = 80_000_000


class Reports(UserCallback):
    """Writes what the workers have reported."""

    def __init__(self, folder: str) -> None:
        self._folder = folder

    def after_report(self, run_context: Any, metrics: Any, checkpoint: Any) -> None:
        Path(self._folder, "reports.json").write_text(json.dumps(metrics))


def fit(folder: Path, case: str, *, fail_after: float | None = None, **config: Any) -> str:
    """Fit; return the error."""
    callbacks = [BacklightCallback(fail_after=fail_after), Reports(str(folder))]
    storage = {"storage_path": str(folder)}
    if case == "remote":
        base = fs.SubTreeFileSystem(str(folder), fs.LocalFileSystem())
        storage = {"storage_path": "bucket", "storage_filesystem": base}
    scaling = ScalingConfig(num_workers=2)
    if case == "elastic":
        scaling = ScalingConfig(num_workers=(1, 2), elastic_resize_monitor_interval_s=1.0)
    trainer = TorchTrainer(
        getattr(ray_loop, case),
        train_loop_config={"folder": str(folder)},
        scaling_config=scaling,
        run_config=RunConfig(name=case, callbacks=callbacks, **storage, **config),
    )
    try:
        trainer.fit()
    except TrainingFailedError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def write_logs(folder: Path) -> None:
    """Copy what controller and workers have written: Ray does not forward all before the driver ends."""
    logs = [
        p.read_text() for p in Path(ray._private.worker._global_node.get_logs_dir_path()).glob("worker-*.err")
    ]
    for name, actor in {"controller": "TrainController", "workers": "RayTrainWorker"}.items():
        texts = [text for text in logs if f":actor_name:{actor}\n" in text]
        (folder / f"{name}.txt").write_text("".join(texts))


def fit_elastic(folder: Path) -> str:
    """Fit on a node of one core, to which another one is added once the first worker group has begun."""
    head = {"num_cpus": 1, "include_dashboard": False, "object_store_memory": STORE_BYTES}
    cluster = Cluster(initialize_head=True, connect=True, head_node_args=head)
    with ThreadPoolExecutor() as pool:
        fitted = pool.submit(fit, folder, "elastic")
        while not ((folder / "begun").exists() or fitted.done()):
            time.sleep(0.1)
        cluster.add_node(num_cpus=1, object_store_memory=STORE_BYTES)  # in the main thread: it sets signals
        error = fitted.result()
    write_logs(folder)
    ray.shutdown()
    cluster.shutdown()
    return error


def main() -> None:
    folder, case = Path(sys.argv[1]), sys.argv[2]
    if case == "elastic":
        (folder / "error.txt").write_text(fit_elastic(folder))
        return
    given: dict[str, Any] = {"fail_after": 0.0} if case in {"hang", "held", "retry", "remote"} else {}
    if case == "retry":
        given["failure_config"] = FailureConfig(max_failures=1)
    ray.init("local", num_cpus=2, include_dashboard=False, object_store_memory=STORE_BYTES)
    before = None
    if case == "held":  # as by a worker of an earlier group that Ray has not ended
        before = RunWriter.create(folder / case / "backlight", world_size=2, run_id="ray-held+before")
    (folder / "error.txt").write_text(fit(folder, case, **given))
    if before is not None:
        before.close()
    write_logs(folder)
    ray.shutdown()


if __name__ == "__main__":
    main()

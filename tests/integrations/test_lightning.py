"""The Lightning callback in Lightning's own loop."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import backlight
from integrations.torchrun import environment
from processes import run_captured

pytestmark = [
    # Warnings of Lightning's imports and of its use of torch, each matched by its text.
    pytest.mark.filterwarnings("ignore:.*does not have many workers:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*LeafSpec:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*pkg_resources:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*`training_step` returned `None`:UserWarning"),
]


def fit(folder: Path, name: str = "Net", watched: bool = True, **settings: Any) -> tuple[Any, Any, Any]:
    from backlight.integrations.lightning import BacklightCallback
    from integrations import lit

    model = getattr(lit, name)()
    own = {k: settings.pop(k) for k in ("every", "on_end", "monitors", "groups") if k in settings}
    callback = BacklightCallback(folder / "run", **own)
    trainer = lit.trainer(folder, *([callback] if watched else []), **settings)
    trainer.fit(model, lit.data(), lit.data(16) if name == "Net" else None)
    return model, trainer, callback


def test_fit_is_recorded_and_weights_are_unchanged(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from integrations.lit import digest

    options: dict[str, Any] = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.2, "log_every_n_steps": 2}
    plain, _, _ = fit(tmp_path / "plain", watched=False, **options)
    capsys.readouterr()
    model, trainer, callback = fit(tmp_path, every=1, groups={"body": "net.*"}, **options)
    assert digest(model) == digest(plain)

    run = backlight.open_run(tmp_path / "run")
    assert run.status.value == "finished"
    assert run.last_step() + 1 == trainer.global_step == 8
    assert run.scalar("backwards").values.tolist() == [2.0] * 8
    # The norm before clipping, which exceeds the limit.
    total, before = run.scalar("total_norm").values, run.scalar("clip/norm").values
    np.testing.assert_allclose(total, before, rtol=1e-5)
    assert run.scalar("clip/limit").values.tolist() == [0.2] * 8
    assert total.max() > 0.2
    assert run.scalar("lr/0/0").values.tolist() == [0.01] * 4 + [0.005] * 4
    logged = run.scalar("train_loss", source="user")
    assert logged.steps.tolist() == [1, 3, 5, 7]
    assert run.scalar("step", source="user").values.tolist() == [2.0, 4.0, 6.0, 8.0]
    assert len(run.scalar("val_loss", source="user").steps) == 2
    assert {"unused.weight", "unused.bias"} == set(run.events("no_grad_at_step")[0].payload["parameters"])
    assert "no_gradient" in [finding.rule for finding in callback.findings]
    output = capsys.readouterr().err
    assert output.count("`unused.weight` and `unused.bias` never received a gradient") == 1
    assert "next: backlight report" in output


@pytest.mark.parametrize("every", [1, 10**6], ids=["recorded", "not_recorded"])
def test_loss_of_every_step_is_the_mean_of_its_batches(tmp_path: Path, every: int) -> None:
    import lightning as L

    from backlight.integrations.lightning import BacklightCallback
    from integrations import lit

    class Losses(L.Callback):
        def on_train_start(self, *_: Any) -> None:
            self.values: list[float] = []

        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, *_: Any) -> None:
            self.values.append(float(trainer.callback_metrics["train_loss"]))

    losses = Losses()
    options: dict[str, Any] = {"accumulate_grad_batches": 4, "gradient_clip_val": 0.2, "max_epochs": 5}
    trainer = lit.trainer(tmp_path, losses, BacklightCallback(tmp_path / "run", every=every), **options)
    trainer.fit(lit.Net(), lit.data(), lit.data(16))
    run = backlight.open_run(tmp_path / "run")
    assert run.scalar("loss").steps.tolist() == list(range(trainer.global_step)) == list(range(10))
    expected = np.reshape(losses.values, (-1, 4)).mean(axis=1)
    np.testing.assert_allclose(run.scalar("loss").values, expected, rtol=1e-6)
    assert run.scalar("clip/norm").steps.tolist() == list(range(10))
    assert run.loss_label() == "loss"


@pytest.mark.full
def test_manual_optimization_counts_one_step_per_backward(tmp_path: Path) -> None:
    from integrations.lit import digest

    plain, _, _ = fit(tmp_path / "plain", "Pair", watched=False)
    model, trainer, _ = fit(tmp_path, "Pair")
    assert digest(model) == digest(plain)
    run = backlight.open_run(tmp_path / "run")
    assert run.last_step() + 1 == trainer.global_step == 32
    assert run.scalar("clip/limit").steps.tolist() == list(range(0, 32, 2))
    assert run.scalar("lr/0/0").steps.tolist() == list(range(0, 32, 2))
    assert run.scalar("lr/1/0").steps.tolist() == list(range(1, 32, 2))


@pytest.mark.full
@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true", "64-true"])
def test_every_precision_is_measured_and_unchanged(tmp_path: Path, precision: str) -> None:
    from integrations.lit import digest

    plain, _, _ = fit(tmp_path / "plain", watched=False, precision=precision)
    model, trainer, _ = fit(tmp_path, precision=precision)
    assert digest(model) == digest(plain)
    assert len(backlight.open_run(tmp_path / "run").scalar("total_norm").steps) == trainer.global_step


@pytest.mark.full
def test_lightning_fp16_scaler_and_skipped_steps_are_recorded(tmp_path: Path) -> None:
    import torch
    from lightning.pytorch.plugins import MixedPrecision

    from integrations.lit import digest

    def plugin() -> Any:
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**20)
        return MixedPrecision("16-mixed", "cpu", scaler=scaler)

    plain, _, _ = fit(tmp_path / "plain", watched=False, plugins=[plugin()], max_epochs=4)
    model, trainer, _ = fit(tmp_path, plugins=[plugin()], max_epochs=4)
    assert digest(model) == digest(plain)
    run = backlight.open_run(tmp_path / "run")
    assert run.last_step() + 1 == trainer.global_step
    skipped = run.scalar("scaler/skipped").values
    assert skipped[0] == 1.0
    assert skipped[-1] == 0.0
    assert run.scalar("total_norm").values[-1] < 100


@pytest.mark.full
@pytest.mark.parametrize("kind", [ValueError, KeyboardInterrupt])
def test_every_end_of_a_fit_closes_its_run(tmp_path: Path, kind: type[BaseException]) -> None:
    import lightning as L

    from backlight.integrations.lightning import BacklightCallback
    from integrations import lit

    class Ends(L.Callback):
        def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
            if trainer.global_step == 5:
                raise kind("injected")

    callback = BacklightCallback(tmp_path / "run")
    trainer = lit.trainer(tmp_path, Ends(), callback)
    with pytest.raises(SystemExit if kind is KeyboardInterrupt else kind):
        trainer.fit(lit.Net(), lit.data(), lit.data(16))
    run = backlight.open_run(tmp_path / "run")
    assert run.status.value == "failed"
    assert run.last_step() == 4
    assert run.events("exception")[0].payload["type"] == kind.__name__


@pytest.mark.full
def test_second_fit_continues_from_the_checkpoint_step(tmp_path: Path) -> None:
    from backlight.integrations.lightning import BacklightCallback
    from integrations import lit

    callback = BacklightCallback(tmp_path / "run")
    model = lit.Net()
    trainer = lit.trainer(tmp_path, callback, max_epochs=1)
    trainer.fit(model, lit.data(), lit.data(16))
    trainer.save_checkpoint(tmp_path / "c.ckpt")
    trainer.fit_loop.max_epochs = 2
    trainer.fit(model, lit.data(), lit.data(16))
    run = backlight.open_run(tmp_path / "run")
    assert [a.step_offset for a in run.attempts] == [0, 8]
    assert run.scalar("loss").steps.tolist() == list(range(16))

    resumed = BacklightCallback(tmp_path / "resumed")
    again = lit.trainer(tmp_path, resumed, max_epochs=3)
    again.fit(lit.Net(), lit.data(), lit.data(16), ckpt_path=tmp_path / "c.ckpt")
    run = backlight.open_run(tmp_path / "resumed")
    assert run.scalar("loss").steps.tolist() == list(range(8, 24))


@pytest.mark.full
def test_internal_error_warns_once_and_fit_continues(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from backlight.integrations.lightning import BacklightCallback
    from integrations import lit

    def breaks(*_: Any, **__: Any) -> None:
        raise ZeroDivisionError("injected")

    plain = lit.Net()
    lit.trainer(tmp_path).fit(plain, lit.data(), lit.data(16))
    (tmp_path / "taken").write_text("a file")
    model = lit.Net()
    with pytest.warns(RuntimeWarning, match=r"BacklightCallback.begin: not recorded: anything of this"):
        lit.trainer(tmp_path, BacklightCallback(tmp_path / "taken")).fit(model, lit.data(), lit.data(16))
    assert lit.digest(model) == lit.digest(plain)

    monkeypatch.setattr("backlight.session.watch.Watch.log", breaks)
    model = lit.Net()
    callback = BacklightCallback(tmp_path / "run", on_end=breaks)
    with pytest.warns(RuntimeWarning, match="injected") as caught:
        lit.trainer(tmp_path, callback, log_every_n_steps=1).fit(model, lit.data(), lit.data(16))
    assert lit.digest(model) == lit.digest(plain)
    messages = [str(w.message) for w in caught if "backlight" in str(w.message)]
    assert [text.split(":")[1].strip() for text in messages] == [
        "BacklightCallback.log",
        "BacklightCallback.on_end",
    ]
    assert "what test_internal_error" in messages[1]
    run = backlight.open_run(tmp_path / "run")
    assert run.status.value == "finished"
    assert run.last_step() == 15


@pytest.mark.full
def test_ddp_on_two_ranks_writes_one_run_with_one_summary(tmp_path: Path) -> None:
    script = Path(__file__).parent / "lit_ddp.py"
    results = {}
    for mode in ("plain", "watched"):
        done = run_captured(
            [sys.executable, str(script), str(tmp_path), mode], env=environment(), timeout=200
        )
        assert done.returncode == 0, done.stderr[-3000:]
        results[mode] = [(tmp_path / mode / f"digest-{rank}").read_text() for rank in range(2)]
        assert done.stderr.count("next: backlight report") == (mode == "watched")
    assert results["plain"] == results["watched"]
    (path,) = (tmp_path / "watched" / "runs").iterdir()
    assert path.name.startswith("Net-")
    run = backlight.open_run(path)
    assert run.attempts[0].world_size == 2
    assert run.attempts[0].ranks == (0, 1)
    np.testing.assert_allclose(run.scalar("total_norm").values, run.scalar("clip/norm").values, rtol=1e-5)


@pytest.mark.full
def test_script_exits_cleanly_after_the_requested_steps(tmp_path: Path) -> None:
    from backlight.integrations.lightning import BacklightCallback
    from integrations import lit

    callback = BacklightCallback(tmp_path / "run", steps=5)
    with pytest.raises(SystemExit) as ended:
        lit.trainer(tmp_path, callback).fit(lit.Net(), lit.data(), lit.data(16))
    assert ended.value.code == 0
    run = backlight.open_run(tmp_path / "run")
    assert run.status.value == "finished"
    assert run.last_step() == 4


@pytest.mark.full
def test_pytorch_lightning_script_gets_a_matching_callback(tmp_path: Path) -> None:
    program = f"""
import sys, pytorch_lightning as L, torch
from torch.utils.data import DataLoader, TensorDataset
from backlight.integrations.lightning import BacklightCallback
class Model(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(4, 1)
    def training_step(self, batch, index):
        return self.net(batch[0]).square().mean()
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.01)
quiet = dict(logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
callback = BacklightCallback({str(tmp_path / "run")!r})
trainer = L.Trainer(max_epochs=1, accelerator="cpu", callbacks=[callback], **quiet)
trainer.fit(Model(), DataLoader(TensorDataset(torch.randn(32, 4)), 8))
assert issubclass(BacklightCallback, L.Callback) and "lightning.pytorch" not in sys.modules
"""
    done = run_captured([sys.executable, "-c", program], env=environment(), timeout=200)
    assert done.returncode == 0, done.stderr[-3000:]
    assert backlight.open_run(tmp_path / "run").last_step() == 3

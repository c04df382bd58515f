"""The callback in the Trainer's own loop, and Accelerate under torchrun."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import backlight
from integrations.torchrun import start

pytestmark = [
    # Warnings of transformers' imports and of its use of torch, each matched by its text.
    pytest.mark.filterwarnings("ignore:.*swigvarlink:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*pin_memory.*:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*torch.cpu.amp.autocast:FutureWarning"),  # of transformers 4.50
]


@pytest.fixture(autouse=True)
def _offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


def test_gradients_are_read_before_clipping_and_weights_are_unchanged(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from backlight.integrations.huggingface import BacklightCallback
    from integrations import tiny

    options: dict[str, Any] = {"eval_strategy": "steps", "eval_steps": 3}
    plain = tiny.trainer(tmp_path, **options)
    plain.train()
    capsys.readouterr()
    callback = BacklightCallback(tmp_path / "run", every=1)
    trainer = tiny.trainer(tmp_path, callback, **options)
    trainer.train()
    assert tiny.digest(trainer.model) == tiny.digest(plain.model)

    run = backlight.open_run(tmp_path / "run")
    assert run.status.value == "finished"
    assert run.last_step() + 1 == trainer.state.global_step == 6
    assert run.scalar("backwards").values.tolist() == [2.0] * 6
    assert run.scalar("batch").values.tolist() == [1.0, 3.0, 5.0, 7.0, 9.0, 11.0]
    total = run.scalar("total_norm").values
    assert (total > 0.05).all()
    np.testing.assert_allclose(total, run.scalar("clip/norm").values, rtol=1e-5)
    logged = [entry for entry in trainer.state.log_history if "grad_norm" in entry]
    recorded = run.scalar("grad_norm", source="user")
    assert recorded.steps.tolist() == [entry["step"] - 1 for entry in logged] == [1, 3, 5]
    np.testing.assert_allclose(recorded.values, [entry["grad_norm"] for entry in logged], rtol=1e-6)
    assert run.scalar("eval_loss", source="user").steps.tolist() == [2, 5]
    names = [record.name for record in run.parameters()]
    assert "bert.encoder.layer.0.attention.self.query.weight" in names
    assert capsys.readouterr().err.count("next: backlight report") == 1


@pytest.mark.parametrize("every", [1, 10**6], ids=["recorded", "not_recorded"])
def test_loss_of_every_step_is_the_one_that_the_trainer_logs(tmp_path: Path, every: int) -> None:
    from backlight.integrations.huggingface import BacklightCallback
    from integrations import tiny

    options: dict[str, Any] = {"gradient_accumulation_steps": 4, "logging_steps": 1, "max_steps": 12}
    trainer = tiny.trainer(tmp_path, BacklightCallback(tmp_path / "run", every=every), **options)
    trainer.train()
    logged = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    norms = [entry["grad_norm"] for entry in trainer.state.log_history if "loss" in entry]
    run = backlight.open_run(tmp_path / "run")
    assert run.scalar("backwards").values.tolist()[:1] == [4.0]
    assert run.scalar("loss").steps.tolist() == list(range(12))
    np.testing.assert_allclose(run.scalar("loss").values, logged, rtol=1e-5)
    np.testing.assert_allclose(run.scalar("clip/norm").values, norms, rtol=1e-6)
    assert run.loss_label() == "loss"


@pytest.mark.full
def test_bf16_training_is_unchanged_and_measured(tmp_path: Path) -> None:
    from backlight.integrations.huggingface import BacklightCallback
    from integrations import tiny

    plain = tiny.trainer(tmp_path, bf16=True)
    plain.train()
    trainer = tiny.trainer(tmp_path, BacklightCallback(tmp_path / "run"), bf16=True)
    trainer.train()
    assert tiny.digest(trainer.model) == tiny.digest(plain.model)
    run = backlight.open_run(tmp_path / "run")
    assert len(run.scalar("total_norm").steps) == 6


@pytest.mark.full
@pytest.mark.parametrize("kind", [ValueError, KeyboardInterrupt])
def test_every_end_of_a_training_closes_its_run(tmp_path: Path, kind: type[BaseException]) -> None:
    from transformers import TrainerCallback

    from backlight.integrations.huggingface import BacklightCallback
    from integrations import tiny

    class Ends(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step == 3:
                raise kind("injected")

    callback = BacklightCallback(tmp_path / "run", resume=True)
    trainer = tiny.trainer(tmp_path, callback, Ends())
    with pytest.raises(kind, match="injected"):
        trainer.train()
    run = backlight.open_run(tmp_path / "run")
    assert run.status.value == "failed"
    assert run.last_step() == 2
    assert run.events("exception")[0].payload["type"] == kind.__name__
    # The next run is watched normally.
    tiny.trainer(tmp_path, callback).train()
    assert len(backlight.open_run(tmp_path / "run").attempts) == 2


@pytest.mark.full
def test_resumed_training_continues_from_its_step(tmp_path: Path) -> None:
    from backlight.integrations.huggingface import BacklightCallback
    from integrations import tiny

    saving = {"save_strategy": "steps", "save_steps": 4}
    tiny.trainer(tmp_path, BacklightCallback(tmp_path / "run"), **saving).train()
    again = tiny.trainer(tmp_path, BacklightCallback(tmp_path / "run"), **saving, max_steps=8)
    again.train(resume_from_checkpoint=True)
    run = backlight.open_run(tmp_path / "run")
    assert [attempt.step_offset for attempt in run.attempts] == [0, 6]
    assert run.last_step() + 1 == again.state.global_step == 8


@pytest.mark.full
def test_internal_error_warns_once_and_training_continues(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from backlight.integrations.huggingface import BacklightCallback
    from integrations import tiny

    def breaks(*_: Any, **__: Any) -> None:
        raise ZeroDivisionError("injected")

    monkeypatch.setattr("backlight.session.watch.Watch.log", breaks)
    plain = tiny.trainer(tmp_path)
    plain.train()
    trainer = tiny.trainer(tmp_path, BacklightCallback(tmp_path / "run"))
    with pytest.warns(
        RuntimeWarning, match=r"BacklightCallback.log: not recorded: what the framework"
    ) as caught:
        trainer.train()
    assert len([w for w in caught if "backlight" in str(w.message)]) == 1
    assert tiny.digest(trainer.model) == tiny.digest(plain.model)
    run = backlight.open_run(tmp_path / "run")
    assert run.status.value == "finished"
    assert any("injected" in event.payload["reason"] for event in run.events("unmeasured"))


def test_invalid_setting_is_rejected_at_construction() -> None:
    from backlight.integrations.huggingface import BacklightCallback

    with pytest.raises(TypeError, match=r"no parameter 'evry'; did you mean 'every'\?"):
        BacklightCallback(evry=3)


@pytest.mark.full
@pytest.mark.parametrize("loop", ["trainer", "accelerate"])
def test_two_ranks_write_one_run_with_correct_norms(tmp_path: Path, loop: str) -> None:
    digests = {}
    for mode in ("plain", "watched"):
        output = start(2, "hf_ddp.py", str(tmp_path), loop, mode)
        assert output.count("next: backlight report") == (mode == "watched")
        digests[mode] = [(tmp_path / mode / f"digest-{rank}").read_text() for rank in range(2)]
    assert digests["plain"] == digests["watched"]
    run = backlight.open_run(tmp_path / "watched" / "run")
    assert run.attempts[0].ranks == (0, 1)
    total, clip = run.scalar("total_norm"), run.scalar("clip/norm")
    assert len(total.steps) == (6 if loop == "trainer" else 4)
    np.testing.assert_allclose(total.values, clip.values, rtol=1e-5)

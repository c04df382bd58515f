"""A fit of Keras on torch; run by test_keras.py, because a process has one backend of Keras.

python keras_fit.py RUN|- float32|mixed_float16|raises
"""

from __future__ import annotations

import hashlib
import os
import sys

os.environ["KERAS_BACKEND"] = "torch"

import keras
import numpy as np
import torch

torch.set_num_threads(1)


class Raises(keras.callbacks.Callback):  # type: ignore[misc]
    """Raises in the second epoch."""

    def on_epoch_begin(self, epoch: int, logs: object = None) -> None:
        if epoch == 1:
            raise ValueError("injected")


if __name__ == "__main__":
    keras.utils.set_random_seed(0)
    if sys.argv[2] == "mixed_float16":
        keras.mixed_precision.set_global_policy("mixed_float16")
    layers = [keras.Input((8,)), keras.layers.Dense(16, activation="relu"), keras.layers.Dense(1)]
    model = keras.Sequential(layers, name="small")
    model.compile(keras.optimizers.Adam(1e-2, clipnorm=0.1), loss="mse", metrics=["mae"])
    callbacks = [Raises()] if sys.argv[2] == "raises" else []
    if sys.argv[1] != "-":
        from backlight.integrations.keras import BacklightCallback

        callbacks.append(BacklightCallback(sys.argv[1]))
    x = np.random.default_rng(0).normal(size=(64, 8)).astype("float32")
    try:
        model.fit(x, x[:, :1], batch_size=8, epochs=2, validation_split=0.25, verbose=0, callbacks=callbacks)
    except ValueError as error:
        print(error)
    assert "apply" not in vars(model.optimizer)
    print(hashlib.sha256(b"".join(weight.tobytes() for weight in model.get_weights())).hexdigest())

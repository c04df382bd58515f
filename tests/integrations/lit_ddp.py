"""Lightning with DDP over gloo, two ranks; run by test_lightning.py.

python lit_ddp.py FOLDER plain|watched
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch

from integrations import lit

torch.set_num_threads(1)

if __name__ == "__main__":
    folder = Path(sys.argv[1]) / sys.argv[2]
    folder.mkdir(parents=True, exist_ok=True)
    os.chdir(folder)
    callbacks = []
    if sys.argv[2] == "watched":
        from backlight.integrations.lightning import BacklightCallback

        callbacks = [BacklightCallback()]
    options = {"devices": 2, "strategy": "ddp_find_unused_parameters_true", "gradient_clip_val": 0.2}
    model = lit.Net()
    lit.trainer(folder, *callbacks, **options).fit(model, lit.data(), lit.data(16))
    (folder / f"digest-{os.environ['LOCAL_RANK']}").write_text(lit.digest(model))

"""The average gradient outer product with respect to the input, E[J^T J].

J ``[c, d]`` is the Jacobian of a sample's outputs with respect to its input. Source: Radhakrishnan et al.,
2212.13881; for grokking, Mallinar et al., 2407.20199.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from backlight.capture.model_state import preserve_state
from backlight.capture.modules import unwrapped
from backlight.capture.per_sample import accumulated
from backlight.monitors.grokking.instrument.gram.checks import GramError
from backlight.monitors.grokking.instrument.gram.inputs import eager


def input_agop(model: nn.Module, inputs: Tensor) -> Tensor:
    """Return E[J^T J] over N samples, float64 ``[d, d]``, one backward for each output.

    The model is left as it was: gradients, buffers, training mode, random state. ``inputs`` are real
    ``[N, ...]``, d numbers to a sample.

    Raises
    ------
    GramError
        If inputs are not real, a parameter is sharded, or outputs do not have N rows that depend on inputs.
    """
    if not inputs.is_floating_point() or inputs.dim() < 2 or not inputs.shape[0]:
        raise GramError(
            f"agop: expected real inputs [N, ...] of at least one sample, got {list(inputs.shape)} of "
            f"{inputs.dtype}; of token ids take the embedded input"
        )
    sharded = next((name for name, p in model.named_parameters() if hasattr(p, "placements")), None)
    if sharded is not None:
        raise GramError(
            f"agop: parameter {sharded!r} is sharded over processes (DTensor), so that every process would "
            "have to take the same passes; have a watch gather it: grokking={'gather': True}"
        )
    n = inputs.shape[0]
    x = inputs.detach().clone().requires_grad_()
    model = unwrapped(model)
    with preserve_state(model), torch.enable_grad(), eager(model):
        outputs = _outputs(model, x)
        total = x.new_zeros(x[0].numel(), x[0].numel(), dtype=torch.float64)
        parameters = [p for p in model.parameters() if p.requires_grad]
        reentrant = False
        for c in range(outputs.shape[1]):
            found = None
            if not reentrant:
                retain = c + 1 < outputs.shape[1]
                try:
                    (found,) = torch.autograd.grad(
                        outputs[:, c].sum(), x, retain_graph=retain, allow_unused=True
                    )
                except RuntimeError:
                    reentrant = True  # or something else, which then fails again
            if reentrant:
                # Re-entrant checkpointing knows only backward, and each backward uses its graph up.
                (found,) = accumulated(_outputs(model, x)[:, c].sum(), [x], others=parameters)
            if found is None:
                raise GramError("agop: the outputs do not depend on the inputs")
            rows = found.reshape(n, -1).double()
            total.addmm_(rows.T, rows)
    return total / n


def _outputs(model: nn.Module, x: Tensor) -> Tensor:
    out: Tensor = model(x)
    if out.shape[:1] != x.shape[:1] or not out.requires_grad:
        raise GramError(
            f"agop: expected outputs [{len(x)}, ...] that depend on the inputs, got {list(out.shape)}"
        )
    return out.reshape(len(x), -1)

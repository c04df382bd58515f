"""The average gradient outer product with respect to the input, E[J^T J].

J ``[c, d]`` is the Jacobian of a sample's outputs with respect to its input. Source: Radhakrishnan et al.,
2212.13881; for grokking, Mallinar et al., 2407.20199.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from backlight.capture.untouched import untouched
from backlight.grokking.gram.gates import GramError


def input_agop(
    model: nn.Module, inputs: Tensor, *, function: Callable[[nn.Module, Tensor], Tensor] | None = None
) -> Tensor:
    """Return E[J^T J] over N samples, one backward for each output.

    Parameters
    ----------
    model
        It is left as it was: gradients, buffers, training mode, random state.
    inputs
        Real ``[N, ...]``, d numbers to a sample.
    function
        ``function(model, inputs)`` gives outputs ``[N, ...]``; the model itself by default.

    Returns
    -------
    Tensor
        float64 ``[d, d]``.

    Raises
    ------
    GramError
        If inputs are not real, or outputs do not have N rows that depend on them.
    """
    if not inputs.is_floating_point() or inputs.dim() < 2 or not inputs.shape[0]:
        raise GramError(
            f"agop: expected real inputs [N, ...] of at least one sample, got {list(inputs.shape)} of "
            f"{inputs.dtype}; of token ids take the embedded input, with function=..."
        )
    n = inputs.shape[0]
    x = inputs.detach().clone().requires_grad_()
    with untouched(model), torch.enable_grad():
        out = model(x) if function is None else function(model, x)
        if out.shape[:1] != (n,) or not out.requires_grad:
            raise GramError(
                f"agop: expected outputs [{n}, ...] that depend on the inputs, got {list(out.shape)}"
            )
        outputs = out.reshape(n, -1)
        total = x.new_zeros(x[0].numel(), x[0].numel(), dtype=torch.float64)
        for c in range(outputs.shape[1]):
            (found,) = torch.autograd.grad(
                outputs[:, c].sum(), x, retain_graph=c + 1 < outputs.shape[1], allow_unused=True
            )
            if found is None:
                raise GramError("agop: the outputs do not depend on the inputs")
            rows = found.reshape(n, -1).double()
            total.addmm_(rows.T, rows)
    return total / n

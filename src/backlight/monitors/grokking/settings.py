"""The settings of the monitor grokking: the measures of gradient geometry and their cadences.

All cadences count logged steps: with ``every = 10`` and ``gram = 5``, steps 0, 50, 100, … have a Gram.
A cadence of 0 is off.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated, ClassVar

from backlight.settings import MonitorSettings, Option, SettingError

SCOPES = ("full", "layers")
EIGENVALUE_DEVICES = ("host", "device")
PRECISIONS = ("float32", "float64")

SAMPLED = ("mean_gradient", "gram", "vectors", "agop", "influence", "ntk")
"""Measures that need per-sample gradients."""


@dataclass(frozen=True)
class Measures(MonitorSettings):
    """Cadences and sizes of the measurements of one run."""

    name: ClassVar[str] = "grokking"

    every: Annotated[
        int, Option("Steps between two logged steps; 0 takes the run's own spacing.", at_least=0)
    ] = 0
    gradients: Annotated[
        int, Option("Exact training gradient of every parameter, as backward left it.", at_least=0)
    ] = 1
    products: Annotated[
        int,
        Option(
            "Eigenvalues of G Gᵀ of each matrix gradient, which are those of GᵀG, and their metrics.",
            at_least=0,
        ),
    ] = 10
    window: Annotated[
        int,
        Option(
            "Temporal product: the Gram of the last ``window_steps`` logged gradients, and its spectrum.",
            at_least=0,
        ),
    ] = 10
    window_steps: Annotated[
        int,
        Option(
            "Temporal product: the Gram of the last ``window_steps`` logged gradients, and its spectrum.",
            at_least=2,
        ),
    ] = 32
    mean_gradient: Annotated[
        int,
        Option(
            "Mean per-sample gradient of the probe batch; needs samples, as Gram, vectors and AGOP do.",
            at_least=0,
        ),
    ] = 10
    gram: Annotated[
        int,
        Option(
            "Gram of the per-sample gradients, its spectra, uncentred and centred, and their metrics.",
            at_least=0,
        ),
    ] = 10
    vectors: Annotated[
        int,
        Option("The ``top_k`` leading eigenvectors in parameter space: k x M numbers each time.", at_least=0),
    ] = 100
    agop: Annotated[
        int,
        Option(
            "Average outer product of the gradients by the input, where the input is real-valued.", at_least=0
        ),
    ] = 10
    influence: Annotated[
        int,
        Option(
            "Which samples of the probe batch carry the drop of the loss of a held-out batch; needs one.",
            at_least=0,
        ),
    ] = 10
    ntk: Annotated[
        int,
        Option(
            "Empirical neural tangent kernel of the first samples of a fixed probe batch: "
            "trace, alignment with the labels, distance from the first one measured.",
            at_least=0,
        ),
    ] = 0
    sketch: Annotated[
        int,
        Option(
            "Frequent Directions sketch of all logged training gradients so far, with its certificate.",
            at_least=0,
        ),
    ] = 0
    sketch_rows: Annotated[
        int,
        Option(
            "Frequent Directions sketch of all logged training gradients so far, with its certificate.",
            at_least=2,
        ),
    ] = 32
    scope: Annotated[
        str, Option("``full``: the model, its blocks and its layers; ``layers``: layers only.")
    ] = "full"
    top_k: Annotated[
        int,
        Option("The ``top_k`` leading eigenvectors in parameter space: k x M numbers each time.", at_least=1),
    ] = 100
    matrices: Annotated[
        bool, Option("Store the matrices (Gram, window, AGOP) themselves and not their spectra alone.")
    ] = True
    spectra: Annotated[bool, Option("Store spectra as arrays; without them only the scalars are left.")] = (
        True
    )
    eigenvalues: Annotated[
        str, Option("Where eigenvalues are computed: on the ``host`` or on the ``device`` of the model.")
    ] = "host"
    precision: Annotated[str, Option("Type in which gradients are stored; a Gram is always in float64.")] = (
        "float32"
    )
    gather: Annotated[
        bool,
        Option(
            "Gather sharded parameters (FSDP2, tensor parallelism) at measured steps, on "
            "every rank; all ranks must be watched with the same measures. Without it a "
            "sharded model has no Gram and its gradients are not stored."
        ),
    ] = False

    def __post_init__(self) -> None:
        """Check the bounds and the choices."""
        super().__post_init__()
        for name, choices in (
            ("scope", SCOPES),
            ("eigenvalues", EIGENVALUE_DEVICES),
            ("precision", PRECISIONS),
        ):
            if getattr(self, name) not in choices:
                raise SettingError(
                    f"grokking.{name}", f"{getattr(self, name)!r}: expected {' or '.join(choices)}"
                )

    def logs(self, step: int) -> bool:
        """Return whether ``step`` is a logged step."""
        return self.every > 0 and step % self.every == 0

    def due(self, cadence: int, step: int) -> bool:
        """Return whether a measurement of this cadence is due at ``step``."""
        return cadence > 0 and self.logs(step) and (step // self.every) % cadence == 0

    def samples_at(self, step: int) -> bool:
        """Return whether something that needs samples is due at ``step``."""
        return any(self.due(getattr(self, name), step) for name in SAMPLED)

    def logged_every(self, steps: int) -> Measures:
        """Return these measures with ``steps`` between logged steps if ``every`` is 0."""
        return self if self.every else replace(self, every=max(1, steps))

    @property
    def sampled(self) -> bool:
        """Whether a measure needs per-sample gradients."""
        return any(getattr(self, name) for name in SAMPLED)

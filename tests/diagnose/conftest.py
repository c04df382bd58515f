"""Names of parameters must not depend on models that earlier tests of the same process left behind."""

from earlier_models import _frozen, _no_models_of_others  # noqa: F401 - fixtures

"""The columns that this floor fills are those that the store keeps; neither imports the other."""

from backlight.measure.stats import histogram, statistics, update
from backlight.store.format.schema import GRADIENT, HISTOGRAM, HISTOGRAM_BINS, HISTOGRAM_LOWEST, UPDATE


def test_measured_columns_equal_store_schema():
    assert GRADIENT.floats == statistics.FLOATS
    assert GRADIENT.integers == statistics.INTEGERS
    assert UPDATE.floats == update.FLOATS
    assert UPDATE.integers == update.INTEGERS
    assert histogram.LOWEST == HISTOGRAM_LOWEST
    assert histogram.BINS == HISTOGRAM_BINS
    assert len(HISTOGRAM.integers) == 1 + histogram.BINS
    assert HISTOGRAM.floats == ()

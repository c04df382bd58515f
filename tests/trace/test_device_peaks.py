import pytest

from backlight.trace.device_peaks import peak_of


@pytest.mark.parametrize(
    ("name", "flops", "bandwidth"),
    [
        ("NVIDIA A100-SXM4-40GB", 312e12, 1.555e12),
        ("NVIDIA H100 80GB HBM3", 989e12, 3.35e12),
        ("NVIDIA A10G", 70e12, 600e9),
        ("Tesla V100-SXM2-16GB", 125e12, 900e9),
        ("AMD Instinct MI250X", 191.5e12, 1.638e12),
    ],
)
def test_a_device_is_known_by_the_words_of_its_name(name: str, flops: float, bandwidth: float) -> None:
    assert peak_of(name) == (flops, bandwidth)


@pytest.mark.parametrize("name", ["NVIDIA L40", "NVIDIA RTX A1000", "NVIDIA T400", "an NPU"])
def test_a_part_of_a_word_is_no_name(name: str) -> None:
    assert peak_of(name) is None

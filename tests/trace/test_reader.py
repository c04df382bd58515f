"""Events are read completely and exactly in every layout and with any chunk size."""

from __future__ import annotations

import gzip
import json
from decimal import Decimal
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from backlight.trace import chunks
from backlight.trace.events import TraceError
from backlight.trace.reader import nanoseconds, rank_in_name, read_trace
from synthetic_traces import LAYOUTS, REAL, SKIP_REASON, comparable, reference, rows_of, text_of, write

ODD = [
    "aten::mm", 'q"uote', "back\\slash", "}, {\n", '"traceEvents": [', '},{"ph":"X"', "é→中😀", "\u2028",
    "]}", "",
]  # fmt: skip
NAMES = st.one_of(st.sampled_from(ODD), st.text(max_size=12))
WHOLE = st.integers(0, 2**53)
NESTED = st.recursive(
    st.one_of(WHOLE, NAMES, st.none(), st.booleans()),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(NAMES, inner, max_size=3)),
    max_leaves=6,
)
ARGS = st.fixed_dictionaries(
    {},
    optional={
        "External id": WHOLE,
        "correlation": st.one_of(WHOLE, WHOLE.map(str), WHOLE.map(hex)),
        "Sequence number": WHOLE,
        "Fwd thread id": st.integers(0, 9),
        "stream": st.one_of(st.integers(0, 99), st.just("0x0")),
        "bytes": WHOLE,
        "Input type": st.lists(NAMES, max_size=3),
        "Input Dims": st.lists(st.lists(WHOLE, max_size=3), max_size=3),
        "Call stack": NAMES,
        "name": NAMES,
        "something else": NESTED,
        "list of objects": st.lists(
            st.fixed_dictionaries({"ph": NAMES, "name": NAMES, "args": NESTED}), max_size=3
        ),
    },
)
TIMES = st.one_of(WHOLE, st.decimals(0, 2 * 10**15, places=3), st.integers(0, 10**9).map(str))
EVENT = st.fixed_dictionaries(
    {"ph": st.sampled_from("XsfMiCbe"), "name": NAMES, "ts": TIMES},
    optional={
        "cat": st.sampled_from(["cpu_op", "kernel", "fwdbwd"]),
        "pid": st.one_of(st.integers(0, 9), NAMES),
        "tid": st.one_of(st.integers(0, 9), NAMES),
        "dur": st.one_of(WHOLE, st.decimals(0, 10**9, places=3)),
        "id": WHOLE,
        "bp": st.just("e"),
        "args": ARGS,
    },
)
ANCHOR: dict[str, Any] = {"ph": "X", "cat": "cpu_op", "name": "aten::anchor", "ts": 1, "dur": 2}


@pytest.mark.slow
@settings(max_examples=60, suppress_health_check=[HealthCheck.too_slow], deadline=None)
@given(events=st.lists(EVENT, max_size=30), layout=st.sampled_from(LAYOUTS), size=st.integers(30, 900))
def test_reader_equals_slow_reference(
    events: list[dict[str, Any]], layout: str, size: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("made") / "made.json"
    text = text_of([*events, ANCHOR], layout, distributedInfo={"rank": 3})
    path.write_text(text, encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chunks, "CHUNK_BYTES", size)
        trace = read_trace(path)
    assert [comparable(row) for row in rows_of(trace.events)] == reference(text)
    assert trace.count == len(events) + 1
    assert trace.rank == (None if layout == "array" else 3)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_file_is_read_in_small_chunks(layout: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    events = [
        {**ANCHOR, "name": f"op {n} }}, {{", "ts": n, "args": {"x": [{"ph": 1}, {"ph": 2}]}}
        for n in range(300)
    ]
    path = write(tmp_path / "made.json", events, layout)
    monkeypatch.setattr(chunks, "CHUNK_BYTES", 2000)
    slices: list[int] = []
    decode = chunks.cuts

    def counted(text: bytes) -> Any:
        slices.append(len(text))
        return decode(text)

    monkeypatch.setattr(chunks, "cuts", counted)
    trace = read_trace(path)
    assert len(trace.events) == 300
    assert len(slices) > 5
    assert max(slices) < path.stat().st_size / 2
    assert trace.notes == ()


@pytest.mark.skipif(not REAL.is_dir(), reason=SKIP_REASON)
@pytest.mark.parametrize("name", ["alexnet", "amd_mi250", "cpu_only", "no_rank"])
def test_real_trace_equals_reference(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    path = REAL / f"{name}.json.gz"
    monkeypatch.setattr(chunks, "CHUNK_BYTES", 50_000)
    trace = read_trace(path)
    assert [comparable(r) for r in rows_of(trace.events)] == reference(
        gzip.decompress(path.read_bytes()).decode()
    )
    assert trace.notes == ()


@pytest.mark.full
@pytest.mark.skipif(not REAL.is_dir(), reason=SKIP_REASON)
def test_large_real_trace_keeps_every_event_and_nanosecond() -> None:
    path = REAL / "training_one_gpu.json.gz"
    plain = json.loads(gzip.decompress(path.read_bytes()), parse_float=Decimal)["traceEvents"]
    trace = read_trace(path)
    assert trace.count == len(plain) == 68_692
    plain = [event for event in plain if event["ph"] == "X"]
    assert trace.events["start"].tolist() == [int(e["ts"] * 1000) for e in plain]
    assert trace.events["duration"].tolist() == [int(e["dur"] * 1000) for e in plain]
    assert trace.device_names[0] == "Tesla V100-SXM2-32GB"
    assert (trace.rank, trace.world_size) == (0, 1)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (b"1712195495519689.047", 1712195495519689047),
        (b"9300000000000000.001", 9300000000000000001),
        (b"0.0005", 0), (b"0.0006", 1), (b"12", 12000), (b"1.5", 1500), (b"1.5e3", 1_500_000),
        (b'"17.25"', 17250), (b"-3.5", -3500), (b"", 0), (b"null", 0), (b"1e40", 0), (b"7" * 60, 0),
    ],
)  # fmt: skip
def test_nanoseconds(text: bytes, expected: int) -> None:
    texts = [msgspec.Raw(text), msgspec.Raw(b"1.001")]
    assert nanoseconds(texts).tolist() == [expected if expected < 2**63 else 0, 1001]


def test_inf_and_nan_are_repaired_with_note(tmp_path: Path) -> None:
    path = tmp_path / "made.json"
    event = '{"ph": "X", "cat": "kernel", "name": "k", "ts": 1, "args": {"blocks per SM": inf, "bytes": nan}}'
    path.write_text(f'{{"traceEvents": [{event}, {event},\n]}}')
    trace = read_trace(path)
    assert len(trace.events) == 2
    assert trace.events["bytes"].tolist() == [-1, -1]
    assert any("repaired" in note or "inf" in note for note in trace.notes)


def test_invalid_utf8_is_read_with_note(tmp_path: Path) -> None:
    path = tmp_path / "made.json"
    path.write_bytes(b'{"traceEvents": [{"ph": "X", "cat": "kernel", "name": "a\xff", "ts": 1, "dur": 2}]}')
    trace = read_trace(path)
    assert trace.events.word("name", 0) == "a\ufffd"
    assert trace.notes


def test_events_key_in_string_is_not_events(tmp_path: Path) -> None:
    path = tmp_path / "made.json"
    document = {"note": '"traceEvents": [', "deep": {"traceEvents": [1]}, "traceEvents": [ANCHOR]}
    path.write_text(json.dumps(document))
    assert len(read_trace(path).events) == 1


def _refused(tmp_path: Path, data: bytes, name: str = "made.json") -> str:
    path = tmp_path / name
    path.write_bytes(data)
    with pytest.raises(TraceError) as caught:
        read_trace(path)
    text = str(caught.value)
    assert text.startswith(str(path))
    assert "\n" not in text
    return text


def test_truncated_files(tmp_path: Path) -> None:
    whole = text_of([ANCHOR] * 50).encode()
    assert "truncated" in _refused(tmp_path, whole[: len(whole) // 2])
    assert "ends before its end mark" in _refused(tmp_path, gzip.compress(whole)[:-20], "made.json.gz")
    packed = bytearray(gzip.compress(whole))
    packed[-6] ^= 0xFF
    assert "damaged gzip" in _refused(tmp_path, bytes(packed), "made.json.gz")
    assert "truncated" in _refused(tmp_path, b'{"schemaVersion": 1, "deviceProperties": [')


def test_files_of_other_tools(tmp_path: Path) -> None:
    assert "is empty" in _refused(tmp_path, b"")
    assert "is not JSON" in _refused(tmp_path, b"\x89PNG....")
    assert "Nsight" in _refused(tmp_path, b"SQLite format 3\0....")
    assert "Nsight" in _refused(tmp_path, b'{"Type":80,"CudaEvent":{"startNs":"1"}}\n{"Type":80}\n')
    assert "keys: 'a'" in _refused(tmp_path, b'{"a": 1}')
    chrome = {"traceEvents": [{"ph": "X", "cat": "devtools.timeline", "name": "Paint", "ts": 1, "dur": 2}]}
    text = _refused(tmp_path, json.dumps(chrome).encode())
    assert "Chrome's developer tools" in text
    assert "devtools.timeline" in text
    assert "recorded no step" in _refused(tmp_path, b'{"traceEvents": []}')
    assert "expected an object" in _refused(tmp_path, b'{"traceEvents": [1, 2]}')


def test_folders_and_missing_files(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="is a folder"):
        read_trace(tmp_path)
    with pytest.raises(FileNotFoundError):
        read_trace(tmp_path / "none.json")


def test_rank_in_names() -> None:
    assert rank_in_name("trace_rank-12.json.gz") == 12
    assert rank_in_name("rank3.json") == 3
    assert rank_in_name("trace.json") is None

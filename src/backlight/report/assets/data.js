// Arrays as Python packed them: base64 of deflated bytes, grouped by significance.

const ARRAYS = { f8: Float64Array, f4: Float32Array, i4: Int32Array, u2: Uint16Array, u1: Uint8Array };

/** @type {WeakMap<object, Promise<any>>} */
const unpacked = new WeakMap();

const bytesOf = (text) => {
  if ("fromBase64" in Uint8Array) return /** @type {any} */ (Uint8Array).fromBase64(text);
  const raw = atob(text);
  const bytes = new Uint8Array(raw.length);
  for (let i = 0; i < raw.length; i += 1) bytes[i] = raw.charCodeAt(i);
  return bytes;
};

const inflate = async (text) => {
  const stream = new Blob([bytesOf(text)]).stream().pipeThrough(new DecompressionStream("deflate"));
  return new Uint8Array(await new Response(stream).arrayBuffer());
};

const ungroup = (bytes, width) => {
  if (width === 1) return bytes;
  const length = bytes.length / width;
  const plain = new Uint8Array(bytes.length);
  for (let place = 0; place < width; place += 1) {
    const offset = place * length;
    for (let i = 0; i < length; i += 1) plain[i * width + place] = bytes[offset + i];
  }
  return plain;
};

const dequantise = (codes, { scale, low, step }) => {
  const values = new Float64Array(codes.length);
  for (let i = 0; i < codes.length; i += 1) {
    const code = codes[i];
    if (scale === "share") values[i] = code === 0 ? NaN : (code - 1) / 65000;
    else if (code > 1 && code < 65535) values[i] = 2 ** (low + (code - 2) * step);
    else values[i] = code === 0 ? NaN : code === 1 ? 0 : Infinity;
  }
  return values;
};

const unpackNow = async (node) => {
  const kind = ARRAYS[node.type];
  const plain = ungroup(await inflate(node.data), kind.BYTES_PER_ELEMENT);
  const values = new kind(plain.buffer, plain.byteOffset, plain.byteLength / kind.BYTES_PER_ELEMENT);
  return node.scale ? dequantise(values, node) : values;
};

// Resolve to a typed array; the same promise for the same node, so that nothing is inflated twice.
const unpack = async (node) => {
  if (ArrayBuffer.isView(node)) return node;
  if (!unpacked.has(node)) unpacked.set(node, unpackNow(node));
  return unpacked.get(node);
};

// The data of a panel with its arrays unpacked, except large ones of reduced precision: they are unpacked when they are shown.
const unpackAll = async (data) => {
  if (data === null || typeof data !== "object") return data;
  if (data.type in ARRAYS && typeof data.data === "string") return data.scale ? data : unpack(data);
  if (Array.isArray(data)) return Promise.all(data.map(unpackAll));
  return Object.fromEntries(await Promise.all(Object.entries(data).map(async ([name, value]) => [name, await unpackAll(value)])));
};

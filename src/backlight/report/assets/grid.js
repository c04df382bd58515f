// A heat map on a canvas: ranges of steps across, rows down. It draws codes of the palette and knows nothing
// of what they mean; its options (types.d.ts) give it words and the colour of a cell.

const AXIS = 40;
const TOP = 6;
const RIGHT = 14;

// How far each range reaches on the axis: to the next one, unless the gap is a pause in the recording.
const reachOf = (first, last) => {
  const gaps = Array.from(first.slice(1), (step, i) => step - last[i]).sort((a, b) => a - b);
  const usual = Math.max(1, gaps[Math.floor(gaps.length / 2)] ?? 1);
  return Float64Array.from(first, (_, i) => {
    const gap = i + 1 < first.length ? first[i + 1] - last[i] : usual;
    return last[i] + (gap > 3 * usual ? usual : gap);
  });
};

// Neighbours with the same text, as [from, to).
const runsOf = (rows, textOf) => {
  /** @type {{ from: number, to: number, text: string }[]} */
  const runs = [];
  rows.forEach((row, place) => {
    const text = textOf(row);
    if (runs.at(-1)?.text === text) runs.at(-1).to = place + 1;
    else runs.push({ from: place, to: place + 1, text });
  });
  return runs;
};

// Neighbours whose dotted names begin alike, as deep as `most` labels have room; where even the first level has too many,
// those that would overlap are left out when they are drawn.
const namedRuns = (rows, partsOf, deepest, most) => {
  let best = [];
  for (let depth = 1; depth <= deepest; depth += 1) {
    const runs = runsOf(rows, (row) => partsOf(row).slice(0, depth).join("."));
    if (best.length > 3 && runs.length > most) break;
    best = runs;
  }
  return best;
};

class Grid {
  /** @type {{ x: number, y: number, toX: number, toY: number, moved: boolean, tall: boolean } | null} */
  drag = null;

  /** @type {{ row: number, bucket: number, step?: number } | null} */
  cursor = null;

  /** @type {number[]} */
  shown = [];

  /** @param {HTMLElement} host @param {ArrayLike<number>} first @param {ArrayLike<number>} last @param {GridOptions} options */
  constructor(host, first, last, options) {
    this.options = options;
    this.host = host;
    this.cut(first, last);
    this.map = el("canvas", { class: "grid-map" });
    this.over = el("canvas", { class: "grid-over", tabindex: "0", role: "img", "aria-label": options.name });
    this.tip = el("div", { class: "tip", role: "status", hidden: true });
    host.append(el("div", { class: "grid" }, this.map, this.over), this.tip);
    this.listen();
    new ResizeObserver(() => this.draw()).observe(host);
    view.on("range theme", () => this.draw(), this.map);
    view.on("row focus cursor findings", () => this.drawOver(), this.map);
  }

  cut(first, last) {
    this.first = first;
    this.last = last;
    this.reach = reachOf(first, last);
    this.cursor = null;
  }

  // Whether columns of pixels are left without a range: they are hatched as cells without a value are.
  get isSparse() {
    return this.reach.some((end, i) => end < (this.first[i + 1] ?? view.full[1]));
  }

  layout() {
    const width = this.host.clientWidth;
    this.shown = this.options.rows();
    this.left = this.options.gutter ?? Math.round(width < 560 ? Math.min(112, width * 0.3) : Math.min(260, width * 0.28));
    this.wide = Math.max(10, width - this.left - RIGHT);
    this.high = this.options.height(this.shown.length);
    this.ratio = Math.max(1, Math.min(3, devicePixelRatio));
    for (const canvas of [this.map, this.over]) {
      canvas.width = Math.round(width * this.ratio);
      canvas.height = Math.round((this.high + TOP + AXIS) * this.ratio);
      canvas.style.height = `${this.high + TOP + AXIS}px`;
    }
  }

  x(step) {
    const [from, to] = view.range;
    return this.left + ((step - from) / (to + 1 - from)) * this.wide;
  }

  stepAt(x) {
    const [from, to] = view.range;
    return from + ((x - this.left) / this.wide) * (to + 1 - from);
  }

  y(place) {
    return TOP + (place / this.shown.length) * this.high;
  }

  // The first range that reaches beyond a step.
  bucketAt(step) {
    let [low, high] = [0, this.reach.length];
    while (low < high) {
      const middle = (low + high) >> 1;
      if (this.reach[middle] <= step) low = middle + 1;
      else high = middle;
    }
    return low;
  }

  draw() {
    if (!this.host.clientWidth) return;
    this.layout();
    const context = this.map.getContext("2d");
    context.setTransform(1, 0, 0, 1, 0, 0);
    context.clearRect(0, 0, this.map.width, this.map.height);
    this.cells(context);
    context.setTransform(this.ratio, 0, 0, this.ratio, 0, 0);
    this.axis(context);
    this.labels(context);
    this.drawOver();
  }

  // The ranges that each column of pixels covers, as [first, after]; empty where nothing was recorded.
  columns(width) {
    const [from, to] = view.range;
    const span = (to + 1 - from) / width;
    const columns = new Int32Array(2 * width);
    for (let x = 0; x < width; x += 1) {
      const begin = from + x * span;
      const low = this.bucketAt(begin);
      let high = low;
      while (high < this.first.length && this.first[high] < begin + span) high += 1;
      columns[2 * x] = low;
      columns[2 * x + 1] = high;
    }
    return columns;
  }

  cells(context) {
    const width = Math.round(this.wide * this.ratio);
    const height = Math.round(this.high * this.ratio);
    const amount = this.shown.length;
    if (!amount || !width) return;
    const columns = this.columns(width);
    const { table, hatch } = pixels();
    const image = new ImageData(width, height);
    const out = new Uint32Array(image.data.buffer);
    const codes = new Uint8Array(width);
    let done = -1;
    for (let y = 0; y < height; y += 1) {
      const low = Math.floor((y * amount) / height);
      const high = Math.max(low + 1, Math.ceil(((y + 1) * amount) / height - 1e-9));
      if (low !== done || high - low > 1) {
        this.line(codes, columns, low, Math.min(high, amount));
        done = low;
      }
      const start = y * width;
      for (let x = 0; x < width; x += 1) {
        const code = codes[x];
        out[start + x] = code === UNMEASURED ? hatch[(x + y) % 7 < 2 ? 1 : 0] : table[code];
      }
    }
    context.putImageData(image, Math.round(this.left * this.ratio), Math.round(TOP * this.ratio));
  }

  // One row of pixels: the worst or largest of all cells that share a pixel, as `merge` has it.
  line(codes, columns, low, high) {
    for (let x = 0; x < codes.length; x += 1) {
      let code = UNMEASURED;
      for (let place = low; place < high; place += 1) {
        const row = this.shown[place];
        for (let bucket = columns[2 * x]; bucket < columns[2 * x + 1]; bucket += 1) {
          code = this.options.merge(code, this.options.code(row, bucket));
        }
      }
      codes[x] = code;
    }
  }

  axis(context) {
    const [from, to] = view.range;
    const room = this.wide < 420 ? 80 : 110;
    const size = spacingOf(((to - from) / this.wide) * room || 1);
    context.font = `12px ${css("font")}`;
    context.fillStyle = css("ink-soft");
    context.strokeStyle = css("line-strong");
    context.textAlign = "center";
    context.textBaseline = "top";
    const bottom = TOP + this.high;
    const ticks = [];
    for (let step = Math.ceil(from / size) * size; step <= to - 0.5 * size; step += size) ticks.push(step);
    for (const step of [...ticks, Math.floor(to)]) {
      const x = Math.round(this.x(step + 0.5)) + 0.5;
      context.beginPath();
      context.moveTo(x, bottom);
      context.lineTo(x, bottom + 4);
      context.stroke();
      const text = number(Math.round(step));
      const half = context.measureText(text).width / 2;
      context.fillText(text, Math.min(x, this.left + this.wide + RIGHT - half), bottom + 7);
    }
    context.fillStyle = css("ink-faint");
    context.fillText("step", this.left + this.wide / 2, bottom + 24);
  }

  labels(context) {
    const each = this.high / Math.max(1, this.shown.length);
    context.font = `12px ${css("font")}`;
    context.textBaseline = "middle";
    context.textAlign = "right";
    context.fillStyle = css("ink-soft");
    const within = (room) => (text) => context.measureText(text).width <= room;
    const fits = within(this.left - 16);
    const narrow = this.host.clientWidth < 560 && !this.options.gutter;
    const blocks = this.options.block ? this.blocks() : [];
    this.separate(context, blocks);
    if (each >= 12 && !narrow) {
      this.blockLabels(context, blocks, within);
      return;
    }
    let lowest = -Infinity;
    context.strokeStyle = css("line-strong");
    for (const { from, to, text } of namedRuns(this.shown, this.options.group, narrow ? 2 : 6, Math.max(1, Math.floor(this.high / 14)))) {
      const [begin, end] = [this.y(from), this.y(to)];
      const middle = (begin + end) / 2;
      context.beginPath();
      context.moveTo(this.left - 3.5, begin + 1);
      context.lineTo(this.left - 3.5, Math.max(begin + 2, end - 1));
      context.stroke();
      const at = Math.max(TOP + 6, middle);
      if (at - 7 < lowest) continue;
      context.fillText(shortened(text, fits), this.left - 10, at);
      lowest = at + 7;
    }
  }

  // Neighbours in one block of the model; `inside` is where the rest of a row's name begins, 0 where a row is alone.
  blocks() {
    return runsOf(this.shown, this.options.block).map((run) => ({ ...run, inside: run.to - run.from > 1 ? run.text.length + 1 : 0 }));
  }

  // A gap between blocks, where they are high enough to be seen apart.
  separate(context, blocks) {
    if (this.high < 8 * blocks.length) return;
    context.fillStyle = css("card");
    for (const { from } of blocks.slice(1)) context.fillRect(this.left, Math.round(this.y(from)) - 1, this.wide, 2);
    context.fillStyle = css("ink-soft");
  }

  // The name of each block once, beside a bracket, and the rest of each row's name.
  blockLabels(context, blocks, within) {
    const several = blocks.filter(({ inside }) => inside);
    context.font = `600 12px ${css("font")}`;
    const widest = Math.max(0, ...several.map(({ text }) => context.measureText(text).width));
    const column = several.length ? Math.min(widest + 14, 0.45 * this.left) : 0;
    context.font = `12px ${css("font")}`;
    for (const { from, to, text, inside } of blocks.length ? blocks : [{ from: 0, to: this.shown.length, inside: 0 }]) {
      const room = within(this.left - 14 - (inside ? column : 0));
      for (let place = from; place < to; place += 1) {
        context.fillText(shortened(this.options.label(this.shown[place]).slice(inside), room), this.left - 8, this.y(place + 0.5));
      }
      if (!inside) continue;
      const [begin, end] = [this.y(from) + 2, this.y(to) - 2];
      context.fillRect(column - 6, begin, 1, end - begin);
      context.font = `600 12px ${css("font")}`;
      context.fillText(shortened(text, within(column - 12)), column - 11, Math.min((begin + end) / 2, begin + 60));
      context.font = `12px ${css("font")}`;
    }
  }

  drawOver() {
    if (!this.host.clientWidth) return;
    const context = this.over.getContext("2d");
    context.setTransform(this.ratio, 0, 0, this.ratio, 0, 0);
    context.clearRect(0, 0, this.over.width, this.over.height);
    const bottom = TOP + this.high;
    const right = this.left + this.wide;
    for (const { place, label } of this.options.lines?.() ?? []) {
      const y = Math.round(this.y(place)) + 0.5;
      context.strokeStyle = css("over");
      context.setLineDash([5, 4]);
      context.beginPath();
      context.moveTo(this.left, y);
      context.lineTo(right, y);
      context.stroke();
      context.setLineDash([]);
      context.font = `11px ${css("font")}`;
      const width = context.measureText(label).width + 8;
      context.fillStyle = css("card");
      context.fillRect(right - width - 4, y - 17, width, 15);
      context.fillStyle = css("ink");
      context.textAlign = "left";
      context.textBaseline = "middle";
      context.fillText(label, right - width, y - 9);
    }
    context.fillStyle = css("accent");
    for (const row of this.options.marked?.() ?? []) {
      const place = this.shown.indexOf(row);
      if (place >= 0) context.fillRect(this.left - 7, this.y(place), 5, Math.max(1.5, this.y(place + 1) - this.y(place) - 0.5));
    }
    for (const [step, { severity }] of findingsAt()) {
      if (step >= view.range[0] && step <= view.range[1]) marker(context, this.x(step + 0.5), bottom + 5, 4, severity);
    }
    this.frame(context, this.options.chosen ? this.options.chosen() : view.row, css("accent"));
    this.upright(context, view.focus, css("accent"));
    if (this.cursor) {
      this.frame(context, this.cursor.row, css("ink"));
      this.upright(context, (this.first[this.cursor.bucket] + this.last[this.cursor.bucket]) / 2, css("ink"));
    } else this.upright(context, view.cursor, css("ink"));
    if (!this.drag?.moved) return;
    const [x0, x1] = [this.drag.x, this.drag.toX].sort((a, b) => a - b);
    const [y0, y1] = this.drag.tall ? [this.drag.y, this.drag.toY].sort((a, b) => a - b) : [TOP, bottom];
    context.fillStyle = faded(css("accent"), 0.25);
    context.fillRect(x0, y0, x1 - x0, y1 - y0);
    context.strokeStyle = css("accent");
    context.strokeRect(x0 + 0.5, y0 + 0.5, x1 - x0 - 1, y1 - y0 - 1);
  }

  // A frame around a row, and its place in the gutter so that it shows where rows are thin.
  frame(context, row, colour) {
    const place = this.shown.indexOf(row);
    if (place < 0) return;
    const [y0, y1] = [this.y(place), this.y(place + 1)];
    context.beginPath();
    context.rect(this.left - 1, Math.round(y0) - 0.5, this.wide + 2, Math.max(2, Math.round(y1 - y0)) + 1);
    this.stroke(context, colour);
    context.fillStyle = colour;
    const middle = (y0 + y1) / 2;
    context.beginPath();
    context.moveTo(this.left - 1, middle);
    context.lineTo(this.left - 8, middle - 4.5);
    context.lineTo(this.left - 8, middle + 4.5);
    context.fill();
  }

  // Lines over the map are seen on dark and on light cells: a pale one below, the coloured one above.
  stroke(context, colour) {
    context.lineWidth = 3;
    context.strokeStyle = faded(css("card"), 0.75);
    context.stroke();
    context.lineWidth = 1;
    context.strokeStyle = colour;
    context.stroke();
  }

  upright(context, step, colour) {
    if (step === null || step < view.range[0] || step > view.range[1] + 1) return;
    const x = Math.round(this.x(step + 0.5)) + 0.5;
    context.beginPath();
    context.moveTo(x, TOP);
    context.lineTo(x, TOP + this.high + 5);
    this.stroke(context, colour);
  }

  at(x, y) {
    const inside = x >= this.left && x < this.left + this.wide && y >= TOP && y < TOP + this.high;
    if (!inside || !this.shown.length) return null;
    const place = Math.floor(((y - TOP) / this.high) * this.shown.length);
    const step = this.stepAt(x);
    const span = (view.range[1] + 1 - view.range[0]) / this.wide;
    const bucket = this.bucketAt(step);
    // Where several ranges share a pixel, or none covers it, the nearest one that begins in it is meant.
    if (bucket >= this.first.length || this.first[bucket] > step + span) return { row: this.shown[place], bucket: null, step };
    return { row: this.shown[place], bucket, step };
  }

  listen() {
    const canvas = this.over;
    const spot = (event) => {
      const box = canvas.getBoundingClientRect();
      return [event.clientX - box.left, event.clientY - box.top];
    };
    canvas.addEventListener("pointerdown", (event) => {
      const [x, y] = spot(event);
      if (event.button !== 0 || !this.at(x, y)) return;
      this.drag = { x, y, toX: x, toY: y, moved: false, tall: false };
      canvas.setPointerCapture(event.pointerId);
    });
    canvas.addEventListener("pointermove", (event) => {
      const [x, y] = spot(event);
      if (this.drag) {
        this.drag.toX = Math.min(Math.max(x, this.left), this.left + this.wide);
        this.drag.toY = Math.min(Math.max(y, TOP), TOP + this.high);
        const [dx, dy] = [Math.abs(this.drag.toX - this.drag.x), Math.abs(this.drag.toY - this.drag.y)];
        this.drag.tall = Boolean(this.options.zoomRows) && dy > 12;
        this.drag.moved ||= dx > 5 || this.drag.tall;
      }
      this.point(this.at(x, y), event.clientX, event.clientY);
    });
    canvas.addEventListener("pointerup", (event) => {
      const { drag } = this;
      this.drag = null;
      if (!drag) return;
      if (drag.moved) this.select(drag);
      else {
        const cell = this.at(...spot(event));
        if (cell) this.options.pick?.(cell.row, cell.bucket);
      }
      this.drawOver();
    });
    canvas.addEventListener("pointercancel", () => (this.drag = null));
    canvas.addEventListener("pointerleave", () => this.point(null));
    canvas.addEventListener("blur", () => this.point(null));
    canvas.addEventListener("dblclick", () => {
      this.options.zoomRows?.(null);
      view.reset();
    });
    canvas.addEventListener("keydown", (event) => this.key(event));
  }

  select({ x, y, toX, toY, tall }) {
    if (Math.abs(toX - x) > 5) {
      const [from, to] = [this.stepAt(x), this.stepAt(toX)].sort((a, b) => a - b);
      view.zoom(Math.floor(from), Math.max(Math.floor(from), Math.ceil(to) - 1));
    }
    if (!tall) return;
    const [low, high] = [y, toY].sort((a, b) => a - b).map((at) => ((at - TOP) / this.high) * this.shown.length);
    this.options.zoomRows(this.shown.slice(Math.floor(low), Math.max(Math.floor(low) + 1, Math.ceil(high))));
  }

  key(event) {
    const moves = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] };
    if (event.key === "Escape") {
      this.options.zoomRows?.(null);
      view.reset();
      return;
    }
    if (event.key === "Enter" && this.cursor) {
      this.options.pick?.(this.cursor.row, this.cursor.bucket);
      return;
    }
    if (["+", "=", "-"].includes(event.key)) {
      const [from, to] = view.range;
      const middle = this.cursor ? this.first[this.cursor.bucket] : (from + to) / 2;
      const half = ((to - from) / 2) * (event.key === "-" ? 2 : 0.5);
      view.zoom(middle - half, middle + half);
      return;
    }
    if (!moves[event.key] || !this.shown.length) return;
    event.preventDefault();
    const [down, along] = moves[event.key];
    const times = event.shiftKey ? 10 : 1;
    const now = this.cursor ?? { row: view.row ?? this.shown[0], bucket: this.bucketAt(view.focus ?? view.range[0]) };
    const clamp = (value, top) => Math.min(Math.max(value, 0), top);
    const place = clamp(Math.max(0, this.shown.indexOf(now.row)) + down * times, this.shown.length - 1);
    const bucket = clamp(now.bucket + along * times, this.first.length - 1);
    const box = this.over.getBoundingClientRect();
    const x = box.left + this.x((this.first[bucket] + this.reach[bucket]) / 2);
    this.point({ row: this.shown[place], bucket }, x, box.top + this.y(place + 0.5));
  }

  point(cell, x, y) {
    this.cursor = cell && cell.bucket !== null ? cell : null;
    view.point(cell ? Math.floor(cell.step ?? this.first[cell.bucket]) : null, this);
    this.tip.hidden = !cell || Boolean(this.drag?.moved);
    if (cell) {
      const tip = cell.bucket === null ? { title: this.options.label(cell.row), rows: [[`step ${number(Math.floor(cell.step))}`, "nothing recorded"]] } : this.options.describe(cell.row, cell.bucket);
      fill(this.tip, el("strong", {}, tip.title), el("dl", {}, pairList(tip.rows)));
      placeTip(this.tip, x, y);
    }
    this.drawOver();
  }
}

// Beside the pointer, on the side that has room.
const placeTip = (tip, x, y) => {
  const { width, height } = tip.getBoundingClientRect();
  const left = x + 18 + width < innerWidth ? x + 18 : Math.max(8, x - width - 18);
  const top = Math.min(Math.max(8, y + 18), innerHeight - height - 8);
  Object.assign(tip.style, { left: `${left}px`, top: `${top}px` });
};

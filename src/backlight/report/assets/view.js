// The state of the view, which all parts of the page share: steps, parameter, search, and what the reader did to each panel.

/** @type {ReportData} */
const report = JSON.parse(document.getElementById("report").textContent);

/** @type {Record<string, Drawer>} Drawers by kind of panel; each file in `kinds` adds its own. */
const KINDS = {};

const view = {
  full: [0, 1], // steps of the run
  range: [0, 1], // steps that every axis of steps shows
  focus: /** @type {number | null} */ (null), // the step that a finding points to
  cursor: /** @type {number | null} */ (null), // the step under the pointer, on any axis of steps
  pointer: /** @type {unknown} */ (null), // what the pointer is on
  row: /** @type {number | null} */ (null), // the chosen parameter
  layer: /** @type {string | null} */ (null), // the layer whose spectra are shown
  column: /** @type {string | null} */ (null), // the column that the heat map shows
  bucket: /** @type {number | null} */ (null), // the range of steps that the depth chart shows
  query: "", // what is searched for
  matches: /** @type {number[] | null} */ (null), // rows that match the search; null where nothing is searched for
  onlyMatches: true,
  grid: /** @type {ParameterGrid | null} */ (null), // the data of the heat map
  unfolded: /** @type {Set<string>} */ (new Set()), // rules of which the reader wants every finding
  fresh: /** @type {Map<string, boolean>} */ (new Map()), // by finding: whether it came while the page was open
  started: false, // whether the page was drawn once
  panels: /** @type {Record<string, any>} */ ({}), // by panel: what is drawn, hidden, sorted, chosen there
  listeners: /** @type {Record<string, Listener[]>} */ ({}),
  late: /** @type {Map<() => unknown, Element>} */ (new Map()), // listeners of what is far from the screen, called once it is near

  of(name) {
    return (this.panels[name] ??= {});
  },

  // A listener lives as long as its owner is on the page.
  on(topics, listener, owner = document.documentElement) {
    for (const topic of topics.split(" ")) (this.listeners[topic] ??= []).push({ listener, owner });
  },

  notify(topic) {
    const alive = (this.listeners[topic] ?? []).filter(({ owner }) => owner.isConnected);
    this.listeners[topic] = alive;
    for (const { listener, owner } of alive) {
      if (this.isFar(owner)) this.late.set(listener, owner);
      else listener();
    }
  },

  // Whether an element is so far from the screen that it can wait: on a live page most are.
  isFar: (/** @type {Element} */ _owner) => false,

  // Between two parts of a long drawing: a live page lets the screen have its turn.
  rest: async () => {},

  wake() {
    for (const [listener, owner] of this.late) {
      if (owner.isConnected && this.isFar(owner)) continue;
      this.late.delete(listener);
      if (owner.isConnected) listener();
    }
  },

  set(topic, value) {
    if (this[topic] === value) return;
    this[topic] = value;
    this.notify(topic);
  },

  // The steps of the run; a live page grows while the reader is zoomed in.
  reach([first, last]) {
    const zoomed = this.zoomed ? this.range : null;
    const before = this.full.join();
    this.full = first === last ? [first - 0.5, last + 0.5] : [first, last];
    this.range = zoomed ?? [...this.full];
    if (!zoomed && before !== this.full.join()) this.notify("range");
  },

  point(step, pointer) {
    this.pointer = pointer;
    this.set("cursor", step);
  },

  zoom(from, to) {
    const least = Math.min(2, this.full[1] - this.full[0]);
    let [low, high] = from < to ? [from, to] : [to, from];
    if (high - low < least) {
      const middle = (low + high) / 2;
      [low, high] = [middle - least / 2, middle + least / 2];
    }
    low = Math.max(this.full[0], Math.min(low, this.full[1] - least));
    high = Math.min(this.full[1], Math.max(high, this.full[0] + least));
    if (low === this.range[0] && high === this.range[1]) return;
    this.range = [low, high];
    this.notify("range");
  },

  reset() {
    this.focus = null;
    this.range = [...this.full];
    this.notify("range");
  },

  get zoomed() {
    return this.range[0] > this.full[0] || this.range[1] < this.full[1];
  },

  search(text) {
    this.query = text.trim();
    const words = this.query.toLowerCase().split(/\s+/).filter(Boolean);
    const has = ({ name, aliases }) => words.every((word) => [name, ...aliases].some((each) => each.toLowerCase().includes(word)));
    this.matches = words.length ? report.parameters.flatMap((parameter, row) => (has(parameter) ? [row] : [])) : null;
    this.notify("matches");
  },
};

// What the parts of the page share: the range of steps, the step in focus, the chosen parameter, the search.

const report = JSON.parse(document.getElementById("report").textContent);

// Drawers by kind; each file in `kinds` adds its own.
const KINDS = {};

const view = {
  full: [0, 1],
  range: [0, 1],
  focus: null, // the step that a finding points to
  cursor: null, // the step under the pointer, on any axis of steps
  pointer: null, // what the pointer is on
  row: null, // the chosen parameter
  layer: null, // the layer whose spectra are shown
  column: null, // the column that the heat map shows
  bucket: null, // the range of steps that the depth chart shows
  search: "",
  matches: null, // rows that match the search; null where nothing is searched for
  onlyMatches: true,
  listeners: {},
  late: new Map(), // listeners of what is far from the screen, told once it comes near
  sleeps: () => false, // whether an element is far from the screen: the live page knows

  // A listener lives as long as its owner is on the page.
  on(topics, listener, owner = document.documentElement) {
    for (const topic of topics.split(" ")) (this.listeners[topic] ??= []).push({ listener, owner });
  },

  tell(topic) {
    const known = (this.listeners[topic] ?? []).filter(({ owner }) => owner.isConnected);
    this.listeners[topic] = known;
    for (const { listener, owner } of known) {
      if (this.sleeps(owner)) this.late.set(listener, owner);
      else listener();
    }
  },

  // Between two parts of a long drawing: a live page lets the screen have its turn.
  rest: async () => {},

  wake() {
    for (const [listener, owner] of this.late) {
      if (owner.isConnected && this.sleeps(owner)) continue;
      this.late.delete(listener);
      if (owner.isConnected) listener();
    }
  },

  set(topic, value) {
    if (this[topic] === value) return;
    this[topic] = value;
    this.tell(topic);
  },

  // The steps of the run, which every axis of steps shows; a live page grows while the reader is zoomed in.
  reaches([first, last]) {
    const kept = this.zoomed ? this.range : null;
    this.full = first === last ? [first - 0.5, last + 0.5] : [first, last];
    this.range = kept ?? [...this.full];
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
    this.tell("range");
  },

  reset() {
    this.focus = null;
    this.zoom(...this.full);
    this.tell("range");
  },

  get zoomed() {
    return this.range[0] > this.full[0] || this.range[1] < this.full[1];
  },

  find(text) {
    this.search = text.trim();
    const words = this.search.toLowerCase().split(/\s+/).filter(Boolean);
    const has = ({ name, aliases }) =>
      words.every((word) => [name, ...aliases].some((known) => known.toLowerCase().includes(word)));
    this.matches = words.length
      ? report.parameters.flatMap((parameter, row) => (has(parameter) ? [row] : []))
      : null;
    this.tell("matches");
  },
};

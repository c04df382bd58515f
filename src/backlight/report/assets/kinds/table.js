// Rows of names and values with the tree of modules behind a fold, plain text, tables, files of evidence, flame graphs.

KINDS.table = (body, { rows, tree }) => {
  const modules = tree.length ? el("details", {}, el("summary", {}, `Module tree (${count(tree.length, "module")})`), table({ name: "Module tree", rows: tree })) : null;
  fill(body, el("dl", { class: "pairs" }, pairList(rows)), modules);
};

KINDS.words = (body, { text }) => fill(body, el("p", {}, text));

KINDS.failed = (body, { reason }) => fill(body, el("p", { class: "empty" }, reason));

KINDS.listing = (body, data) => fill(body, table(data));

/** @param {(TableData & { title: string })[]} tables */
const figureTables = (tables) => tables.map(({ title, ...data }) => [title ? el("h3", {}, title) : null, table({ name: title || data.heads[0], ...data })]);

KINDS.figures = (body, { tables }) => fill(body, figureTables(tables));

// Files of evidence behind folds, and a list of what could not be collected.
KINDS.dumps = (body, { files, missing }) => {
  const file = ({ path, text }) =>
    el("details", { data: { key: path } }, el("summary", {}, path), el("pre", { class: "scroll tall dump", tabindex: "0", role: "region", "aria-label": path }, text));
  const gaps = missing.length
    ? el("ul", {}, missing.map(({ rank, reason }) => el("li", {}, `rank ${rank}: ${reason}`)))
    : el("p", {}, "None: whatever was asked for was there.");
  fill(body, files.map(file), el("h4", {}, "Evidence that could not be collected"), gaps);
};

const FLAME_ROW = 20;

// Stacks as bars, each on top of its caller and as wide as its time; a click spreads one over the whole width.
KINDS.flame = (body, data, state) => {
  const { bars, tables } = data;
  const keyOf = (bar) => `${bar.label} ${bar.level} ${bar.begin}`;
  const { begin, width } = bars.find((bar) => keyOf(bar) === state.spread) ?? { begin: 0, width: 1 };
  const button = (bar) => {
    const [left, right] = [Math.max(0, (bar.begin - begin) / width), Math.min(1, (bar.begin + bar.width - begin) / width)];
    const style = {
      bottom: `${bar.level * FLAME_ROW}px`, left: `${100 * left}%`, width: `${100 * (right - left)}%`,
      "--swatch": `var(--tone-${TONES[bar.phase % TONES.length]})`,
    };
    const spread = () => {
      state.spread = state.spread === keyOf(bar) ? null : keyOf(bar);
      KINDS.flame(body, data, state);
    };
    return el("button", { type: "button", title: bar.label, hidden: right - left < 1e-3, style, onclick: spread }, bar.label);
  };
  const levels = 1 + Math.max(...bars.map(({ level }) => level));
  const graph = el("div", { class: "flame", role: "group", "aria-label": "Flame graph", style: { height: `${levels * FLAME_ROW}px` } }, bars.map(button));
  fill(body, graph, figureTables(tables));
};

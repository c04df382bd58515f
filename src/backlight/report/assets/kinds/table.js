// Rows of names and values with the tree of modules behind a fold, plain text, and tables.

KINDS.table = async (host, { rows, tree }) => () => {
  host.append(el("dl", { class: "pairs" }, rows.map(([label, value]) => [el("dt", {}, label), el("dd", {}, value)])));
  if (tree.length) host.append(el("details", {}, el("summary", {}, `Module tree (${count(tree.length, "module")})`), table({ name: "Module tree", rows: tree })));
};

KINDS.words = async (host, { text }) => () => host.append(el("p", {}, text));

KINDS.failed = async (host, { reason }) => () => host.append(el("p", { class: "empty" }, reason));

KINDS.listing = async (host, data) => () => host.append(table(data));

KINDS.figures = async (host, { tables }) => () => {
  for (const { title, ...data } of tables) {
    if (title) host.append(el("h3", {}, title));
    host.append(table({ name: title || data.heads[0], ...data }));
  }
};

// Elements. Text reaches the page through text nodes only: no name in a run can become markup.

/**
 * @template {keyof HTMLElementTagNameMap} K
 * @param {K} tag
 * @param {Record<string, any>} [attributes] `data`, `style` and handlers (`onclick`) among them; null and false are left out
 * @param {...any} children
 * @returns {HTMLElementTagNameMap[K]}
 */
const el = (tag, attributes = {}, ...children) => {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name === "data") Object.assign(node.dataset, value);
    else if (name === "style") for (const [property, text] of Object.entries(value)) node.style.setProperty(property, text);
    else if (name.startsWith("on") || name === "value" || name === "checked") Object.assign(node, { [name]: value });
    else node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...present(children));
  return node;
};

const present = (children) => children.flat(4).filter((child) => child !== null && child !== undefined);

const svg = (tag, attributes, ...children) => {
  const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.append(...children);
  return node;
};

// Let `host` hold `children`. A node of it that is like a new one (tag, id, `data-key`) stays and takes over what the new
// one holds, so that focus, scrolling and open folds outlive newer data. What subscribes to the view must be made once.
const fill = (host, ...children) => {
  const wanted = present(children).map((child) => (typeof child === "string" ? document.createTextNode(child) : child));
  const kept = new Set(wanted);
  const spare = [...host.childNodes].filter((node) => !kept.has(node));
  const nodes = wanted.map((next) => {
    const at = next.parentNode === host ? -1 : spare.findIndex((old) => isLike(old, next));
    return at < 0 ? next : takeOver(spare.splice(at, 1)[0], next);
  });
  for (const node of spare) node.remove();
  nodes.forEach((node, i) => host.childNodes[i] !== node && host.insertBefore(node, host.childNodes[i] ?? null));
};

const isLike = (old, next) => old.nodeName === next.nodeName && old.id === next.id && old.dataset?.key === next.dataset?.key;

const HANDLERS = ["onclick", "onchange", "oninput", "onkeydown"];

const takeOver = (old, next) => {
  if (old.nodeType === Node.TEXT_NODE) {
    if (old.data !== next.data) old.data = next.data;
    return old;
  }
  for (const { name } of [...old.attributes]) if (name !== "open" && !next.hasAttribute(name)) old.removeAttribute(name);
  for (const { name, value } of next.attributes) if (name !== "style" && old.getAttribute(name) !== value) old.setAttribute(name, value);
  if (old.style.cssText !== next.style.cssText) old.style.cssText = next.style.cssText; // the policy forbids the attribute
  for (const name of HANDLERS) old[name] = next[name];
  fill(old, ...next.childNodes);
  return old;
};

// What is between backticks is code; an unpaired backtick, as of a hostile name, leaves the text as it is.
const prose = (text) => {
  const parts = text.split("`");
  return parts.length % 2 ? parts.map((part, i) => (i % 2 ? el("code", {}, part) : part)) : text;
};

// A dotted name that may break after its dots, and only there.
const breakable = (name) => name.split(/(?<=[._])/).flatMap((part) => [part, el("wbr")]);

const check = (name, checked, change) => {
  const box = el("input", { type: "checkbox", checked, onchange: () => change(box.checked) });
  return el("label", { class: "check" }, box, name);
};

/** @param {Labelled[]} facts */
const factList = (facts, attributes = {}) =>
  el("dl", { class: "facts", ...attributes }, facts.map(({ label, value }) => el("div", {}, el("dt", {}, label), el("dd", {}, value))));

const pairList = (rows) => rows.map(([label, value]) => [el("dt", {}, label), el("dd", {}, value)]);

/**
 * Rows of cells under heads, each text or elements. `figures` are the columns of numbers, `first` is the one that names the
 * row; `sort` makes the heads buttons. A long table scrolls.
 * @param {TableData} data
 */
const table = ({ name, heads = [], figures = [], rows, id = null, first = 0, sort = null, kind = "", row = () => ({}) }) => {
  const words = heads.length - 1;
  const look = (i) => (figures.includes(i) ? "figure" : i > 0 && i === words ? "words" : null);
  const head = (text, i) => {
    const order = sort && (sort.column !== i ? "none" : sort.down ? "descending" : "ascending");
    return el("th", { scope: "col", class: look(i), "aria-sort": order }, sort ? el("button", { type: "button", onclick: () => sort.by(i) }, text) : text);
  };
  const cell = (content, i) => el(i === first ? "th" : "td", { scope: i === first ? "row" : null, class: look(i) }, typeof content === "string" ? prose(content) : content);
  return el(
    "div",
    { class: `scroll ${kind || (rows.length > 15 ? "tall" : "")}`.trim(), tabindex: "0", role: "region", "aria-label": name },
    el(
      "table",
      { class: "plain", id },
      heads.length ? el("thead", {}, el("tr", {}, heads.map(head))) : null,
      el("tbody", {}, rows.map((cells, i) => el("tr", row(i), cells.map(cell)))),
    ),
  );
};

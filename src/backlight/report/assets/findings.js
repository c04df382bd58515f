// Findings as cards: title, sparkline, detail, fix; the evidence folded, each piece a link to its place on the page.

const WORDS = { error: "Error", warning: "Warning", info: "Note" };
const GLYPHS = { error: "✕", warning: "!", info: "i", clear: "✓", unmeasured: "?" };

const glyph = (kind) => el("span", { class: `glyph ${kind}`, "aria-hidden": "true" }, GLYPHS[kind]);
const OFTEN = 3; // findings of one rule that are shown before the rest is folded

const calm = () => matchMedia("(prefers-reduced-motion: reduce)").matches;

// To the panel that shows a piece of evidence: its parameter chosen, its step in the middle.
const goTo = (place) => {
  const section = document.getElementById(`panel-${place.panel}`);
  if (!section) return;
  for (let fold = section.closest("details"); fold; fold = fold.parentElement.closest("details")) fold.open = true;
  if (place.row !== null) {
    if (view.matches && !view.matches.includes(place.row)) clearSearch();
    if (place.column && view.grid?.column(place.column)) view.set("column", place.column);
    view.set("row", place.row);
  }
  if (place.layer) view.set("layer", place.layer);
  if (place.step !== null) {
    const [from, to] = view.full;
    const half = Math.max(10, (to - from) * 0.02);
    view.zoom(place.step - half, place.step + half);
    view.set("focus", place.step);
    if (view.grid) {
      const bucket = view.grid.last.findIndex((last) => last >= place.step);
      if (bucket >= 0) view.set("bucket", bucket);
    }
  }
  section.scrollIntoView({ behavior: calm() ? "auto" : "smooth", block: "start" });
  section.focus({ preventScroll: true });
  section.classList.remove("reached");
  requestAnimationFrame(() => section.classList.add("reached"));
};

const jump = (place, text, kind) =>
  place
    ? el("a", { href: `#panel-${place.panel}`, class: kind, onclick: (event) => (event.preventDefault(), goTo(place)) }, text)
    : el("span", { class: kind }, text);

// What stands between backticks is code; an unpaired backtick, as of a hostile name, leaves the text as it is.
const prose = (text) => {
  const parts = text.split("`");
  return parts.length % 2 ? parts.map((part, i) => (i % 2 ? el("code", {}, part) : part)) : text;
};

// Advice as paragraphs; code that a colon announces stands in a line of its own.
const advice = (text) => {
  const parts = text.split("`");
  if (parts.length % 2 === 0) return el("p", {}, text);
  const blocks = [el("p", {})];
  parts.forEach((part, i) => {
    const announced = i % 2 && /:\s*$/.test(parts[i - 1]);
    if (announced) blocks.push(el("pre", {}, el("code", {}, part)), el("p", {}));
    else blocks.at(-1).append(i % 2 ? el("code", {}, part) : blocks.length > 1 && !blocks.at(-1).childNodes.length ? part.replace(/^[.,;]?\s*/, "") : part);
  });
  return blocks.filter(({ childNodes }) => childNodes.length);
};

const renewals = new WeakMap(); // of cards with a sparkline: what draws newer numbers into it

const svg = (tag, attributes, ...children) => {
  const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.append(...children);
  return node;
};

// The series of the evidence as a line without axes, with a mark at its step.
const [SPARK_WIDTH, SPARK_HEIGHT] = [160, 40];

const sparkline = () => {
  const path = svg("path", { class: "spark-line" });
  const mark = svg("line", { class: "spark-mark", y1: 0, y2: SPARK_HEIGHT });
  const node = svg("svg", { class: "spark", role: "img", viewBox: `-2 -2 ${SPARK_WIDTH + 4} ${SPARK_HEIGHT + 4}`, preserveAspectRatio: "none" }, mark, path);
  const fill = ({ path: name, steps, values, cuts, sampled, log, step }) => {
    const heights = values.map((value) => (value === null || (log && value <= 0) ? null : log ? Math.log(value) : value));
    const known = heights.filter((value) => value !== null);
    const [low, high] = [Math.min(...known), Math.max(...known)];
    const [first, last] = [steps[0], steps.at(-1)];
    const x = (at) => ((at - first) / (last - first)) * SPARK_WIDTH;
    const y = (value) => SPARK_HEIGHT * (high === low ? 0.5 : 1 - (value - low) / (high - low));
    let drawn = "";
    heights.forEach((value, i) => {
      if (value === null) return;
      const joined = drawn && heights[i - 1] !== null && !cuts.includes(i);
      drawn += `${joined ? "L" : "M"}${x(steps[i]).toFixed(1)} ${y(value).toFixed(1)}${joined ? "" : "h0"}`; // a point is a dot
    });
    path.setAttribute("d", drawn);
    path.classList.toggle("sampled", sampled);
    const inside = step !== null && step >= first && step <= last;
    for (const end of ["x1", "x2"]) mark.setAttribute(end, inside ? x(step) : -9);
    node.setAttribute("aria-label", `${name}, ${between(first, last)}${inside ? `; marked: step ${number(step)}` : ""}`);
  };
  return { node, fill };
};

// The documentation of a rule, written when it is opened.
const rulePage = (rule) => {
  const fold = el("details", { class: "page", ontoggle: () => fold.childElementCount === 1 && fold.append(...report.pages[rule].map(block)) }, el("summary", {}, "More about such findings"));
  return fold;
};

const BLOCKS = { heading: "h4", paragraph: "p", item: "p", cell: "p" };

const block = ([kind, text]) => el(BLOCKS[kind], { class: kind }, prose(text));

const bestPlace = ({ evidence }) => evidence.find(({ place }) => place)?.place ?? null;

// A finding; the one that the headline names is a part of the verdict and has its title there.
const findingCard = (finding, isLead = false) => {
  const line = finding.line ? sparkline() : null;
  line?.fill(finding.line);
  const evidence = finding.evidence.map(({ path, label, step, value, place }) =>
    el(
      "li",
      { title: path },
      jump(place, label, "label"),
      step ? el("span", { class: "at" }, `step ${step}`) : null,
      value ? el("span", { class: "value" }, value) : null,
    ),
  );
  const card = el(
    "article",
    { class: `finding ${finding.severity}${isLead ? " lead" : ""}` },
    isLead ? null : el("header", {}, glyph(finding.severity), el("span", { class: "severity" }, WORDS[finding.severity])),
    isLead ? null : el("h3", {}, jump(bestPlace(finding), prose(finding.title), "title")),
    line?.node,
    el("p", { class: "what" }, prose(finding.detail)),
    el("div", { class: "fix" }, el("h4", {}, "Fix"), advice(finding.fix)),
    el("p", { class: "where" }, finding.where.map(({ label, value }) => el("span", {}, el("i", {}, label), " ", el("b", {}, value)))),
    el(
      "details",
      {},
      el("summary", {}, "Evidence, and what would refute it"),
      el(
        "dl",
        {},
        evidence.length ? [el("dt", {}, "Evidence"), el("dd", {}, el("ul", { class: "evidence" }, evidence))] : null,
        [el("dt", {}, "Refuted if"), el("dd", {}, prose(finding.refuted))],
        [el("dt", {}, "Rule"), el("dd", {}, el("code", {}, finding.rule))],
        finding.overridden.length ? [el("dt", {}, "Thresholds changed"), el("dd", {}, finding.overridden.map((text) => el("code", {}, text)))] : null,
      ),
    ),
  );
  if (report.pages[finding.rule]?.length) card.append(rulePage(finding.rule));
  if (line) renewals.set(card, line.fill);
  return card;
};

// Cards by severity and rule, the worst first; of many of one rule most are folded until asked for.
const findingGroups = (findings, cardOf, isOpen = () => false, opened = () => {}) => {
  const rules = new Map();
  for (const finding of findings) {
    const key = `${finding.severity} ${finding.rule}`;
    rules.set(key, [...(rules.get(key) ?? []), finding]);
  }
  return [...rules].map(([key, alike]) => {
    const rest = alike.length > OFTEN + 1 && !isOpen(key) ? alike.slice(OFTEN) : [];
    const box = el("div", { class: "alike" }, alike.slice(0, alike.length - rest.length).map(cardOf));
    const more = () => {
      opened(key);
      button.replaceWith(...rest.map(cardOf));
    };
    const button = el("button", { type: "button", class: "quiet", onclick: more }, `Show ${number(rest.length)} more like ${rest.length > 1 ? "these" : "this"}`);
    if (rest.length) box.append(button);
    return box;
  });
};

// Findings as cards: title, sparkline, detail, fix; the evidence folded, each piece a link to its place on the page.

const WORDS = { error: "Error", warning: "Warning", info: "Note" };
const GLYPHS = { error: "✕", warning: "!", info: "i", clear: "✓", unmeasured: "?" };

const glyph = (kind) => el("span", { class: `glyph ${kind}`, "aria-hidden": "true" }, GLYPHS[kind]);
const OFTEN = 3; // findings of one rule that are shown before the rest is folded

const calm = () => matchMedia("(prefers-reduced-motion: reduce)").matches;

// To the panel that shows a piece of evidence: its parameter chosen, its step in the middle.
/** @param {Place} place */
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

/** @type {(place: Place | null, text: any, kind: string) => HTMLElement} */
const jump = (place, text, kind) => {
  if (!place) return el("span", { class: kind }, text);
  const follow = (event) => {
    event.preventDefault();
    goTo(place);
  };
  return el("a", { href: `#panel-${place.panel}`, class: kind, onclick: follow }, text);
};

// Advice as paragraphs; code that a colon announces stands in a line of its own.
const advice = (text) => {
  const parts = text.split("`");
  if (parts.length % 2 === 0) return el("p", {}, text);
  /** @type {HTMLElement[]} */
  const blocks = [el("p", {})];
  parts.forEach((part, i) => {
    const announced = i % 2 && /:\s*$/.test(parts[i - 1]);
    if (announced) blocks.push(el("pre", {}, el("code", {}, part)), el("p", {}));
    else blocks.at(-1).append(i % 2 ? el("code", {}, part) : blocks.length > 1 && !blocks.at(-1).childNodes.length ? part.replace(/^[.,;]?\s*/, "") : part);
  });
  return blocks.filter(({ childNodes }) => childNodes.length);
};

// The series of the evidence as a line without axes, with a mark at its step.
const [SPARK_WIDTH, SPARK_HEIGHT] = [160, 40];

/** @param {SparklineData} line */
const sparkline = ({ path, steps, values, cuts, sampled, log, step }) => {
  const heights = values.map((value) => (value === null || (log && value <= 0) ? null : log ? Math.log(value) : value));
  const drawable = heights.filter((value) => value !== null);
  const [low, high] = [Math.min(...drawable), Math.max(...drawable)];
  const [first, last] = [steps[0], steps.at(-1)];
  const x = (at) => ((at - first) / (last - first)) * SPARK_WIDTH;
  const y = (value) => SPARK_HEIGHT * (high === low ? 0.5 : 1 - (value - low) / (high - low));
  let way = "";
  heights.forEach((value, i) => {
    if (value === null) return;
    const joined = way && heights[i - 1] !== null && !cuts.includes(i);
    way += `${joined ? "L" : "M"}${x(steps[i]).toFixed(1)} ${y(value).toFixed(1)}${joined ? "" : "h0"}`; // a point is a dot
  });
  const inside = step !== null && step >= first && step <= last;
  const at = inside ? x(step) : -9;
  return svg(
    "svg",
    {
      class: "spark", role: "img", viewBox: `-2 -2 ${SPARK_WIDTH + 4} ${SPARK_HEIGHT + 4}`, preserveAspectRatio: "none",
      "aria-label": `${path}, ${between(first, last)}${inside ? `; marked: step ${number(step)}` : ""}`,
    },
    svg("line", { class: "spark-mark", x1: at, x2: at, y1: 0, y2: SPARK_HEIGHT }),
    svg("path", { class: `spark-line${sampled ? " sampled" : ""}`, d: way }),
  );
};

const BLOCKS = { heading: "h4", paragraph: "p", item: "p", cell: "p" };

// The documentation of a rule.
const rulePage = (rule) =>
  el("details", { class: "page", data: { key: "page" } }, el("summary", {}, "More about such findings"), report.pages[rule].map(([kind, text]) => el(BLOCKS[kind], { class: kind }, prose(text))));

/** @type {(finding: Finding) => Place | null} */
const bestPlace = ({ evidence }) => evidence.find(({ place }) => place)?.place ?? null;

/**
 * A finding; the one that the headline names is a part of the verdict and has its title there.
 * @param {Finding} finding
 */
const findingCard = (finding, isLead = false) => {
  const evidence = finding.evidence.map(({ path, label, step, value, place }) =>
    el(
      "li",
      { title: path },
      jump(place, label, "label"),
      step ? el("span", { class: "at" }, `step ${step}`) : null,
      value ? el("span", { class: "value" }, value) : null,
    ),
  );
  const subject = `${isLead} ${finding.rule} ${finding.where.map(({ value }) => value)}`;
  if (!view.fresh.has(subject)) view.fresh.set(subject, view.started);
  return el(
    "article",
    { class: `finding ${finding.severity}${isLead ? " lead" : ""}${view.fresh.get(subject) ? " fresh" : ""}`, data: { key: subject } },
    isLead ? null : el("header", {}, glyph(finding.severity), el("span", { class: "severity" }, WORDS[finding.severity])),
    isLead ? null : el("h3", {}, jump(bestPlace(finding), prose(finding.title), "title")),
    finding.line ? sparkline(finding.line) : null,
    el("p", { class: "what" }, prose(finding.detail)),
    el("div", { class: "fix" }, el("h4", {}, "Fix"), advice(finding.fix)),
    el("p", { class: "where" }, finding.where.map(({ label, value }) => el("span", {}, el("i", {}, label), " ", el("b", {}, value)))),
    el(
      "details",
      { data: { key: "evidence" } },
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
    report.pages[finding.rule]?.length ? rulePage(finding.rule) : null,
  );
};

/**
 * Cards by severity and rule, the worst first; of many of one rule most are folded until asked for.
 * @param {Finding[]} findings
 */
const findingGroups = (findings) => {
  /** @type {Map<string, Finding[]>} */
  const rules = new Map();
  for (const finding of findings) {
    const key = `${finding.severity} ${finding.rule}`;
    rules.set(key, [...(rules.get(key) ?? []), finding]);
  }
  return [...rules].map(([key, alike]) => {
    const cards = (some) => some.map((finding) => findingCard(finding));
    const rest = alike.length > OFTEN + 1 && !view.unfolded.has(key) ? alike.slice(OFTEN) : [];
    const more = (event) => {
      view.unfolded.add(key);
      event.currentTarget.replaceWith(...cards(rest));
    };
    const button = el("button", { type: "button", class: "quiet", onclick: more }, `Show ${number(rest.length)} more like ${rest.length > 1 ? "these" : "this"}`);
    return el("div", { class: "alike", data: { key } }, cards(alike.slice(0, alike.length - rest.length)), rest.length ? button : null);
  });
};

// The page: the verdict first, then the findings, then one section per panel.

// What was not measured, and why; of many names none until they are asked for.
const unmeasuredList = () => {
  const list = (names) => [names.slice(0, 500).map((name) => [el("code", {}, name), " "]), names.length > 500 ? `and ${number(names.length - 500)} more` : ""];
  const items = report.verdict.unmeasured.map(({ what, reason, names }) =>
    el(
      "li",
      { data: { key: what.map(({ text }) => text).join() } },
      what.map(({ text, panel }, i) => [i ? ", " : "", el("b", { id: panel && `panel-${panel}`, tabindex: panel && "-1" }, text)]),
      ": ",
      el("span", {}, reason),
      names.length && names.length <= 3 ? el("span", { class: "names" }, names.map((name) => [" ", el("code", {}, name)])) : null,
      names.length > 3 ? el("details", {}, el("summary", {}, `show ${number(names.length)}`), el("p", { class: "names" }, list(names))) : null,
    ),
  );
  return el("section", { class: "panel not-measured", id: "not-measured" }, el("h2", {}, "Not measured"), el("ul", {}, items));
};

// The verdict; the finding that the headline names continues below it, without its title.
const verdictPart = () => {
  const { tone: mood, headline, detail, status, about, lines, losses, figures, lead } = report.verdict;
  const title = lead === null ? prose(headline) : jump(bestPlace(report.findings[lead]), prose(headline), "title");
  return el(
    "section",
    { class: `verdict ${mood}`, "aria-labelledby": "headline" },
    el("div", { class: "headline" }, glyph(mood), el("div", {}, el("h1", { id: "headline" }, title), el("p", {}, detail))),
    lead === null ? null : findingCard(report.findings[lead], true),
    el("p", { class: "status" }, el("span", { class: `pill ${report.run.status}` }, report.run.status), status),
    about.length ? el("p", { class: "about" }, about.map((text) => el("span", {}, text))) : null,
    lines.map((line) => el("p", { class: "line" }, line)),
    losses.map((loss) => el("p", { class: "loss" }, loss)),
    el("dl", { class: "figures" }, figures.map(({ label, value, note }) => el("div", {}, el("dt", {}, label), el("dd", { class: value === "not measured" ? "none" : "" }, value), el("dd", { class: "note" }, note)))),
  );
};

// Panels whose values never changed: a line of text each.
const statedList = () => {
  const items = report.panels.filter(({ stated }) => stated);
  if (!items.length) return null;
  const lines = items.map(({ name, title, stated }) => [el("dt", { id: `panel-${name}`, tabindex: "-1" }, title), el("dd", {}, stated)]);
  return el("section", { class: "panel", id: "stated", "aria-labelledby": "title-stated" }, el("header", {}, el("h2", { id: "title-stated" }, "Without change")), el("dl", { class: "pairs panel-body" }, lines));
};

// Panels by name: what is drawn of them is in `view.of(name)`.
/** @type {Map<string, Part>} */
const parts = new Map();

const partOf = ({ name }) => {
  if (parts.has(name)) return parts.get(name);
  const section = el("section", { class: "panel", id: `panel-${name}`, tabindex: "-1", "aria-labelledby": `title-${name}`, data: { panel: name } });
  const part = { section, body: el("div", { class: "panel-body awaited" }), stamp: "", version: -1, near: false, coarse: false };
  parts.set(name, part);
  return part;
};

// Around the drawing of a panel: its title, the facts and remarks that came with the data.
/** @param {Part} part @param {Panel} panel */
const frame = ({ section, body }, { name, title, note, facts, remarks }) =>
  fill(
    section,
    el("header", {}, el("h2", { id: `title-${name}` }, title), facts?.length ? factList(facts) : null),
    note ? el("p", { class: "note" }, note) : null,
    body,
    remarks?.length ? el("p", { class: "remark" }, remarks.join(" ")) : null,
  );

// Draw a panel whose arrays are unpacked, the first time or with newer data.
/** @param {Panel} panel */
const drawPanel = async (panel) => {
  const part = partOf(panel);
  const { body } = part;
  let state = view.of(panel.name);
  frame(part, panel);
  body.style.minHeight = `${body.offsetHeight}px`; // what is below stays where it is
  if (state.kind !== panel.kind) {
    for (const box of body.querySelectorAll(".plot")) /** @type {any} */ (box).plot?.destroy();
    body.replaceChildren();
    body.classList.remove("awaited");
    state = view.panels[panel.name] = { kind: panel.kind };
  }
  await KINDS[panel.kind](body, panel.data, state);
  body.style.minHeight = "";
};

// Panels that share a row where there is room; one that has no neighbour takes the whole row.
/** @param {Panel[]} panels */
const arrange = (panels) => {
  let alone = null;
  for (const { name, place } of panels) {
    const { section } = parts.get(name);
    section.classList.toggle("half", place === "half");
    if (place !== "half") alone?.classList.remove("half");
    alone = place === "half" && !alone ? section : null;
  }
  alone?.classList.remove("half");
};

let clearSearch = () => {};

// The parts of the page, from top to bottom; each is made once and filled anew.
const slots = {
  search: el("span", { class: "search", hidden: true }),
  nav: el("nav", { class: "contents", "aria-label": "On this page" }),
  saying: el("p", { class: "saying", id: "saying", hidden: true }),
  verdict: el("div", { class: "slot" }),
  findings: el("section", { class: "findings", "aria-label": "Findings", "aria-live": "polite", hidden: true }),
  panels: el("div", { class: "panels" }),
  stated: el("div", { class: "slot" }),
  hints: el("div", { class: "findings" }),
  gaps: el("div", { class: "slot" }),
  folded: el("div", { class: "panels" }),
  footer: el("footer"),
};

// What few readers need, behind folds: advice that is no finding, and what was not measured, thresholds, events, fingerprint.
const folds = {
  hints: el("details", { class: "details", id: "hints", hidden: true }, el("summary", {}, el("h2", {}, "Hints"), el("span", { class: "hint" }, "advice on style and speed; no errors")), slots.hints),
  details: el("details", { class: "details", id: "details" }, el("summary", {}, el("h2", {}, "Details"), el("span", { class: "hint" }, "not measured, thresholds, events, fingerprint")), slots.gaps, slots.folded),
};

// `name` and `status` are what a live page has there.
const topBar = (name, status) => {
  const switchTheme = followTheme();
  const search = el("input", {
    type: "search", id: "search", placeholder: "Search parameters", autocomplete: "off", spellcheck: "false", "aria-label": "Search parameters",
    oninput: () => view.search(search.value),
    onkeydown: (event) => {
      if (event.key !== "Enter" || !view.matches?.length) return;
      goTo({ panel: "parameters", row: view.matches[0], column: null, step: null });
    },
  });
  clearSearch = () => {
    search.value = "";
    view.search("");
  };
  const matches = el("span", { class: "found", role: "status" });
  view.on("matches", () => (matches.textContent = view.matches ? `${number(view.matches.length)} of ${number(report.parameters.length)}` : ""));
  slots.search.append(search, matches);
  const reset = el("button", { type: "button", class: "range", hidden: true, onclick: () => view.reset() });
  view.on("range", () => {
    reset.hidden = !view.zoomed;
    reset.textContent = `${between(Math.ceil(view.range[0]), Math.floor(view.range[1]))} · show all`;
  });
  const theme = el("button", { type: "button", class: "theme", onclick: switchTheme });
  const label = () => {
    theme.textContent = dark() ? "Light" : "Dark";
    theme.setAttribute("aria-label", `Switch to the ${dark() ? "light" : "dark"} theme`);
  };
  view.on("theme", label);
  label();
  return el(
    "header",
    { class: "bar" },
    el("span", { class: "brand" }, "backlight"),
    name ?? el("span", { class: "run-name", title: report.run.name }, report.run.name),
    status,
    slots.search,
    reset,
    theme,
  );
};

/** @param {Panel[]} panels */
const contents = (panels) =>
  present([
    el("a", { href: "#top" }, "Verdict"),
    panels.filter(({ kind, place }) => kind && place !== "details").map((panel) => el("a", { href: `#panel-${panel.name}` }, panel.title)),
    panels.some(({ stated }) => stated) ? el("a", { href: "#stated" }, "Without change") : null,
    report.hints.length ? el("a", { href: "#hints" }, "Hints") : null,
    report.verdict.unmeasured.length || panels.some(({ place }) => place === "details") ? el("a", { href: "#details" }, "Details") : null,
  ]);

const openPage = (name = null, status = null) => {
  const { nav, saying, verdict, findings, panels, stated, footer } = slots;
  const main = el("main", { id: "top" }, saying, verdict, findings, panels, stated, folds.hints, folds.details, footer);
  document.body.append(topBar(name, status), el("div", { class: "frame" }, nav, main));
};

/**
 * Draw everything but the data of the panels, the first time or with newer data.
 * @param {ReportData} data
 */
const draw = (data) => {
  if (!view.started && data.verdict.tone === "unmeasured") folds.details.open = true;
  Object.assign(report, data);
  view.reach(report.steps);
  slots.search.hidden = !report.parameters.length;
  const { lead, unmeasured } = report.verdict;
  const others = findingGroups(report.findings.filter((_, i) => i !== lead));
  fill(slots.verdict, verdictPart());
  fill(slots.findings, others);
  slots.findings.hidden = !others.length;
  fill(slots.stated, statedList());
  fill(slots.hints, findingGroups(report.hints));
  folds.hints.hidden = !report.hints.length;
  fill(slots.gaps, unmeasured.length ? unmeasuredList() : null);
  const drawn = report.panels.filter(({ kind }) => kind);
  for (const panel of drawn) if (!parts.has(panel.name)) frame(partOf(panel), panel);
  for (const [name, { section }] of parts) {
    if (drawn.some((panel) => panel.name === name)) continue;
    section.remove();
    parts.delete(name);
    delete view.panels[name];
  }
  const [open, folded] = [false, true].map((details) => drawn.filter(({ place }) => (place === "details") === details));
  arrange(open);
  fill(slots.panels, open.map(({ name }) => parts.get(name).section));
  fill(slots.folded, folded.map(({ name }) => parts.get(name).section));
  fill(slots.nav, contents(report.panels));
  view.notify("findings");
  view.started = true;
};

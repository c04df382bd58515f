// The page: the verdict first, then the findings, then one section per panel.

const WORDS = { error: "Error", warning: "Warning", info: "Note" };
const GLYPHS = { error: "✕", warning: "!", info: "i", clear: "✓", unmeasured: "?" };
const OFTEN = 3; // findings of one rule that are shown before the rest is folded

const calm = () => matchMedia("(prefers-reduced-motion: reduce)").matches;

const glyph = (kind) => el("span", { class: `glyph ${kind}`, "aria-hidden": "true" }, GLYPHS[kind]);

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
  if (place.step !== null && view.known) {
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

const findingCard = (finding) => {
  const best = finding.evidence.find(({ place }) => place)?.place ?? null;
  const evidence = finding.evidence.map(({ path, step, value, place }) =>
    el(
      "li",
      {},
      jump(place, path, "path"),
      step ? el("span", { class: "at" }, `step ${step}`) : null,
      value ? el("span", { class: "value" }, value) : null,
    ),
  );
  return el(
    "article",
    { class: `finding ${finding.severity}` },
    el(
      "header",
      {},
      glyph(finding.severity),
      el("span", { class: "severity" }, WORDS[finding.severity]),
      el("span", { class: "rule" }, finding.rule.replaceAll("_", " ")),
      el("span", { class: "made" }, finding.made === "live" ? "found while training" : "found on reading"),
    ),
    el("h3", {}, jump(best, prose(finding.title), "title")),
    el("p", { class: "what" }, prose(finding.detail)),
    el("p", { class: "where" }, finding.where.map(({ label, value }) => el("span", {}, el("i", {}, label), " ", el("b", {}, value)))),
    el(
      "dl",
      {},
      evidence.length ? [el("dt", {}, "Evidence"), el("dd", {}, el("ul", { class: "evidence" }, evidence))] : null,
      [el("dt", {}, "Fix"), el("dd", {}, prose(finding.fix))],
      [el("dt", {}, "Refuted if"), el("dd", {}, prose(finding.refuted))],
      finding.overridden.length ? [el("dt", {}, "Overridden"), el("dd", {}, finding.overridden.map((text) => el("code", {}, text)))] : null,
    ),
  );
};

// Findings of one rule stand together, the worst rule first; where there are many, most are folded.
const findingList = () => {
  const rules = new Map();
  for (const finding of report.findings) {
    const key = `${finding.severity} ${finding.rule}`;
    rules.set(key, [...(rules.get(key) ?? []), finding]);
  }
  return [...rules.values()].map((alike) => {
    const rest = alike.slice(alike.length > OFTEN + 1 ? OFTEN : alike.length);
    const box = el("div", { class: "alike" }, alike.slice(0, alike.length - rest.length).map(findingCard));
    if (rest.length) {
      const button = el(
        "button",
        { type: "button", class: "quiet", onclick: () => button.replaceWith(...rest.map(findingCard)) },
        `Show ${number(rest.length)} more of ${alike[0].rule.replaceAll("_", " ")}`,
      );
      box.append(button);
    }
    return box;
  });
};

const unmeasuredList = () => {
  const items = [
    ...report.verdict.unmeasured.map(({ what, reason, names }) =>
      el(
        "li",
        {},
        what.map(({ text, panel }, i) => [i ? ", " : "", el("b", { id: panel && `panel-${panel}`, tabindex: panel && "-1" }, text)]),
        ": ",
        el("span", {}, reason),
        names.length && names.length <= 3
          ? el("span", { class: "names" }, names.map((name) => [" ", el("code", {}, name)]))
          : names.length
          ? el("details", {}, el("summary", {}, `show ${number(names.length)}`), el("p", { class: "names" }, names.slice(0, 500).map((name) => [el("code", {}, name), " "]), names.length > 500 ? `and ${number(names.length - 500)} more` : ""))
          : null,
      ),
    ),
  ];
  if (!items.length) return null;
  return el("section", { class: "panel not-measured", id: "not-measured" }, el("h2", {}, "Not measured"), el("ul", {}, items));
};

const verdictPart = () => {
  const { tone: mood, headline, detail, status, about, losses, figures } = report.verdict;
  return el(
    "section",
    { class: `verdict ${mood}`, "aria-labelledby": "headline" },
    el("div", { class: "headline" }, glyph(mood), el("div", {}, el("h1", { id: "headline" }, prose(headline)), el("p", {}, detail))),
    el("p", { class: "status" }, el("span", { class: `pill ${report.run.status}` }, report.run.status), status),
    about.length ? el("p", { class: "about" }, about.map((text) => el("span", {}, text))) : null,
    losses.map((loss) => el("p", { class: "loss" }, loss)),
    el("dl", { class: "figures" }, figures.map(({ label, value, note }) => el("div", {}, el("dt", {}, label), el("dd", { class: value === "not measured" ? "none" : "" }, value), el("dd", { class: "note" }, note)))),
  );
};

const panelPart = (panel) => {
  const body = el("div", { class: "panel-body" });
  const facts = panel.facts?.length ? el("dl", { class: "facts" }, panel.facts.map(({ label, value }) => el("div", {}, el("dt", {}, label), el("dd", {}, value)))) : null;
  const section = el(
    "section",
    { class: "panel", id: `panel-${panel.name}`, tabindex: "-1", "aria-labelledby": `title-${panel.name}` },
    el("header", {}, el("h2", { id: `title-${panel.name}` }, panel.title), facts),
    panel.note ? el("p", { class: "note" }, panel.note) : null,
    body,
    panel.remarks?.length ? el("p", { class: "remark" }, panel.remarks.join(" ")) : null,
  );
  return { section, body };
};

// Panels that share a row where there is room; one that has no neighbour takes the whole row.
const arrange = (parts) => {
  let alone = null;
  for (const { place, section } of parts) {
    section.classList.toggle("half", place === "half");
    if (place !== "half") alone?.classList.remove("half");
    alone = place === "half" && !alone ? section : null;
  }
  alone?.classList.remove("half");
};

// What few readers need, folded: what was not measured, thresholds, events, fingerprint.
const detailsPart = (...content) =>
  el("details", { class: "details", id: "details", open: report.verdict?.tone === "unmeasured" }, el("summary", {}, el("h2", {}, "Details"), el("span", { class: "hint" }, "not measured, thresholds, events, fingerprint")), el("div", { class: "panels" }, content));

let clearSearch = () => {};

const topBar = (switchTheme, named = null) => {
  const search = el("input", {
    type: "search", id: "search", placeholder: "Search parameters", autocomplete: "off", spellcheck: "false", "aria-label": "Search parameters",
    oninput: () => view.find(search.value),
    onkeydown: (event) => {
      if (event.key !== "Enter" || !view.matches?.length) return;
      goTo({ panel: "parameters", row: view.matches[0], column: null, step: null });
    },
  });
  clearSearch = () => {
    search.value = "";
    view.find("");
  };
  const found = el("span", { class: "found", role: "status" });
  view.on("matches", () => (found.textContent = view.matches ? `${number(view.matches.length)} of ${number(report.parameters.length)}` : ""));
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
    named ?? el("span", { class: "run-name", title: report.run.name }, report.run.name),
    report.parameters.length || named ? el("span", { class: "search" }, search, found) : null,
    reset,
    theme,
  );
};

const contents = (panels) =>
  el(
    "nav",
    { class: "contents", "aria-label": "On this page" },
    el("a", { href: "#top" }, "Verdict"),
    panels.filter(({ kind, place }) => kind && place !== "details").map((panel) => el("a", { href: `#panel-${panel.name}` }, panel.title)),
    el("a", { href: "#details" }, "Details"),
  );

const footer = () =>
  el(
    "footer",
    {},
    `Written by backlight ${report.version}. `,
    view.grid && !view.grid.precise
      ? `Values under the pointer in the heat map are within ${report.precision} of what was recorded; all others are exact.`
      : "Every value under the pointer is exact.",
  );

// The whole page from what it holds; the static report is drawn once.
const drawOnce = async () => {
  const switchTheme = followTheme();
  const parts = report.panels.filter(({ kind }) => kind).map((panel) => ({ panel, place: panel.place, ...panelPart(panel) }));
  const [folded, open] = [true, false].map((yes) => parts.filter(({ place }) => (place === "details") === yes));
  arrange(open);
  const main = el(
    "main",
    { id: "top" },
    verdictPart(),
    report.findings.length ? el("section", { class: "findings", "aria-label": "Findings" }, findingList()) : null,
    el("div", { class: "panels" }, open.map(({ section }) => section)),
    detailsPart(unmeasuredList(), folded.map(({ section }) => section)),
  );
  document.body.append(topBar(switchTheme), el("div", { class: "frame" }, contents(report.panels), main));
  const drawers = await Promise.all(parts.map(({ panel, body }) => KINDS[panel.kind](body, panel.data)));
  for (const draw of drawers) await draw();
  main.append(footer());
  document.documentElement.dataset.ready = "yes";
  performance.mark("backlight-ready");
};

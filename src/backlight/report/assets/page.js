// The page: the verdict first, then the findings, then one section per panel.

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

// The verdict; the finding that the headline names continues below it, without its title.
const verdictPart = (leadCard) => {
  const { tone: mood, headline, detail, status, about, losses, figures, lead } = report.verdict;
  const title = lead === null ? prose(headline) : jump(bestPlace(report.findings[lead]), prose(headline), "title");
  return el(
    "section",
    { class: `verdict ${mood}`, "aria-labelledby": "headline" },
    el("div", { class: "headline" }, glyph(mood), el("div", {}, el("h1", { id: "headline" }, title), el("p", {}, detail))),
    lead === null ? null : leadCard,
    el("p", { class: "status" }, el("span", { class: `pill ${report.run.status}` }, report.run.status), status),
    about.length ? el("p", { class: "about" }, about.map((text) => el("span", {}, text))) : null,
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

// Advice that is no finding, folded: style and performance.
const hintsFold = (content) => el("details", { class: "details", id: "hints", hidden: !report.hints?.length }, el("summary", {}, el("h2", {}, "Hints"), el("span", { class: "hint" }, "advice on style and speed; no errors")), el("div", { class: "findings" }, content));

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
    panels.some(({ stated }) => stated) ? el("a", { href: "#stated" }, "Without change") : null,
    report.hints.length ? el("a", { href: "#hints" }, "Hints") : null,
    report.verdict.unmeasured.length || panels.some(({ place }) => place === "details") ? el("a", { href: "#details" }, "Details") : null,
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
  view.reaches(report.steps);
  const switchTheme = followTheme();
  const { lead } = report.verdict;
  const cards = findingGroups(report.findings.filter((_, i) => i !== lead), (finding) => findingCard(finding));
  const parts = report.panels.filter(({ kind }) => kind).map((panel) => ({ panel, place: panel.place, ...panelPart(panel) }));
  const [folded, open] = [true, false].map((yes) => parts.filter(({ place }) => (place === "details") === yes));
  arrange(open);
  const main = el(
    "main",
    { id: "top" },
    verdictPart(lead === null ? null : findingCard(report.findings[lead], true)),
    cards.length ? el("section", { class: "findings", "aria-label": "Findings" }, cards) : null,
    el("div", { class: "panels" }, open.map(({ section }) => section)),
    statedList(),
    hintsFold(findingGroups(report.hints, (hint) => findingCard(hint))),
    detailsPart(unmeasuredList(), folded.map(({ section }) => section)),
  );
  document.body.append(topBar(switchTheme), el("div", { class: "frame" }, contents(report.panels), main));
  const drawers = await Promise.all(parts.map(({ panel, body }) => KINDS[panel.kind](body, panel.data)));
  for (const draw of drawers) await draw();
  main.append(footer());
  document.documentElement.dataset.ready = "yes";
  performance.mark("backlight-ready");
};

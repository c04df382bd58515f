// A page that follows a run: it asks for news, and what is on the screen takes them where it stands.

const NEAR = "500px"; // how far from the screen a panel is kept up to date
const CALM = 160; // ms without scrolling before anything is drawn
const LONGEST = 400; // ms for which scrolling holds a drawing back
const RETRY = [1000, 2000, 4000, 8000, 15000]; // ms until the server is asked again once it is silent

const shown = new Map(); // panels by name: { entry, section, body, facts, remark, stamp, version, renew, near }
const cards = new Map(); // findings that are on the page, by what they say
const page = { scrolled: 0, silent: 0, over: false, version: -1, table: "", busy: false, drawn: 0 };

Object.assign(report, { verdict: null, findings: [], hints: [], panels: [], reasons: {} });

const pause = (ms) => new Promise((resolve) => setTimeout(resolve, ms));

// One task of the page per drawing, and none in the midst of a short scroll: scrolling stays smooth.
const turn = async () => {
  const begun = performance.now();
  await pause(0);
  while (performance.now() - page.scrolled < CALM && performance.now() - begun < LONGEST) await pause(CALM);
};

view.rest = () => pause(0);

const panelUrl = (name, options) => `panel/${encodeURIComponent(name)}?${new URLSearchParams(options)}`;

// The steps that are looked at closely, where the whole run is drawn more coarsely than it was recorded.
const closely = ({ entry, coarse }) =>
  entry.name === "parameters" && coarse && view.zoomed ? { from: Math.max(0, Math.floor(view.range[0])), to: Math.ceil(view.range[1]) } : {};

// A column of the heat map that the page does not hold yet.
report.column = async (name) => {
  const answer = await fetch(panelUrl("parameters", { column: name, ...closely(shown.get("parameters")) }), { cache: "no-store" });
  const { data } = await answer.json();
  return data.columns.find((column) => column.name === name);
};

// What is at the top of the screen stays there, whatever grows or shrinks above it.
const keepingPlace = (change) => {
  const anchor = scrollY > 0 ? [...document.querySelectorAll("section.panel, article.finding")].find((node) => node.getBoundingClientRect().bottom > 80) : null;
  const before = anchor?.getBoundingClientRect().top;
  const result = change();
  if (anchor?.isConnected) scrollBy({ top: anchor.getBoundingClientRect().top - before, behavior: "instant" });
  return result;
};

// What the user did to a panel that is drawn anew: scrolled, opened, chosen, hidden.
const remembered = (body) => ({
  scrolls: [...body.querySelectorAll(".scroll")].map(({ scrollTop, scrollLeft }) => [scrollTop, scrollLeft]),
  open: new Set([...body.querySelectorAll("details[open] > summary")].map(({ textContent }) => textContent)),
  hidden: new Set([...body.querySelectorAll('.legend-entry[aria-pressed="false"]')].map(({ title }) => title)),
  fields: [...body.querySelectorAll("select, input")].map(({ type, value, checked }) => (type === "checkbox" ? checked : value)),
  focused: [...body.querySelectorAll("button, select, input, [tabindex]")].indexOf(document.activeElement),
});

const restore = (body, { scrolls, open, hidden, fields, focused }) => {
  for (const summary of body.querySelectorAll("details > summary")) summary.parentElement.open = open.has(summary.textContent);
  for (const entry of body.querySelectorAll(".legend-entry")) if (hidden.has(entry.title)) entry.click();
  [...body.querySelectorAll("select, input")].forEach((field, i) => {
    const kind = field.type === "checkbox" ? "checked" : "value";
    if (i >= fields.length || field[kind] === fields[i] || field.type === "range") return;
    if (field.tagName === "SELECT" && ![...field.options].some(({ value }) => value === fields[i])) return;
    field[kind] = fields[i];
    field.dispatchEvent(new Event(field.tagName === "SELECT" || kind === "checked" ? "change" : "input"));
  });
  [...body.querySelectorAll(".scroll")].forEach((node, i) => scrolls[i] && ([node.scrollTop, node.scrollLeft] = scrolls[i]));
  if (focused >= 0) [...body.querySelectorAll("button, select, input, [tabindex]")][focused]?.focus({ preventScroll: true });
};

const rebuild = async (part, content) => {
  const { body } = part;
  const draw = await KINDS[content.kind](body, content.data);
  const state = remembered(body);
  if (part.renew !== undefined) body.style.minHeight = `${body.offsetHeight}px`;
  for (const box of body.querySelectorAll(".plot")) box.plot?.destroy();
  body.replaceChildren();
  body.classList.remove("awaited");
  part.renew = (await draw()) ?? null;
  part.kind = content.kind;
  restore(body, state);
  body.style.minHeight = "";
};

const words = (part, content) => {
  const facts = content.facts?.length ? el("dl", { class: "facts" }, content.facts.map(({ label, value }) => el("div", {}, el("dt", {}, label), el("dd", {}, value)))) : el("dl", { class: "facts" });
  part.facts.replaceWith(facts);
  part.facts = facts;
  part.remark.textContent = (content.remarks ?? []).join(" ");
  part.remark.hidden = !content.remarks?.length;
};

// Bring one panel to the newest version of the run, if it has news.
const refresh = async (part) => {
  const { version } = page;
  const answer = await fetch(panelUrl(part.entry.name, { have: part.stamp, column: view.column ?? "", ...closely(part) }), { cache: "no-store" });
  if (answer.status === 200) {
    const content = JSON.parse(await answer.text());
    part.stamp = answer.headers.get("x-stamp");
    if (!content.kind) return;
    if (content.kind === "parameters" && !content.data.window) part.coarse = !content.data.exact;
    await turn();
    const taken = part.renew && part.kind === content.kind ? await part.renew(content.data) : false;
    if (!taken) await rebuild(part, content);
    words(part, content);
  }
  part.version = version;
  page.drawn += 1;
  document.documentElement.dataset.drawn = String(page.drawn);
};

const newest = () => [...shown.values()].filter(({ version, near, stamp }) => version !== page.version && (near || !stamp));

// Panels one after the other, those on the screen first; what comes meanwhile waits for the next round.
const refreshAll = async () => {
  if (page.busy) return;
  page.busy = true;
  try {
    const map = shown.get("parameters");
    if (map && !map.stamp) await refresh(map); // others read what it holds
    for (let left = newest(); left.length; left = newest()) {
      const part = left.find(({ near }) => near) ?? left[0];
      await refresh(part);
      if (part.version !== page.version) part.version = page.version;
    }
    document.documentElement.dataset.ready = "yes";
    document.documentElement.dataset.version = String(page.version);
  } finally {
    page.busy = false;
  }
};

const near = new IntersectionObserver(
  (entries) => {
    for (const { target, isIntersecting } of entries) {
      const part = shown.get(target.dataset.panel);
      if (part) part.near = isIntersecting;
    }
    view.wake();
    refreshAll().catch(lost);
  },
  { rootMargin: `${NEAR} 0px` },
);

view.sleeps = (owner) => {
  const name = owner.closest?.("section.panel")?.dataset.panel;
  return Boolean(name) && shown.get(name)?.near === false;
};

const livePart = (entry) => {
  const { section, body } = panelPart(entry);
  section.dataset.panel = entry.name;
  body.classList.add("awaited");
  const facts = el("dl", { class: "facts" });
  section.querySelector("header").append(facts);
  const remark = el("p", { class: "remark", hidden: true });
  section.append(remark);
  const part = { entry, section, body, facts, remark, stamp: "", version: -1, renew: undefined, near: false };
  shown.set(entry.name, part);
  near.observe(section);
  return part;
};

const STANDS = { unreadable: "not readable", lost: "not connected" };

const stand = el("span", { class: "stand reading", id: "stand", role: "status" });
const saying = el("p", { class: "saying", id: "saying" });

const say = ({ word, detail }) => {
  const text = STANDS[word] ?? word;
  if (stand.textContent !== text) stand.replaceChildren(el("i", { "aria-hidden": "true" }), text);
  stand.className = `stand ${word}`;
  stand.title = detail;
  saying.textContent = detail;
  document.documentElement.dataset.stand = word;
};

const slots = { verdict: el("div", { class: "slot" }), findings: el("section", { class: "findings", "aria-label": "Findings", "aria-live": "polite" }), stated: el("div", { class: "slot" }), gaps: el("div", { class: "slot" }), nav: el("nav", {}), panels: el("div", { class: "panels" }), folded: el("div", { class: "panels" }) };

const everyFinding = () => [...report.findings, ...report.hints];

const isLead = (finding) => report.findings[report.verdict.lead] === finding;

// What a card says, and where it stands; its sparkline is renewed in place.
const sayingOf = (finding) => JSON.stringify({ ...finding, line: Boolean(finding.line), lead: isLead(finding) });

// Newer content in a card; its folds stay the elements that they are, open and focused.
const renewCard = (card, next) => {
  const folds = [...card.querySelectorAll(":scope > details")];
  for (const node of [...card.childNodes]) if (!folds.includes(node)) node.remove();
  for (const node of [...next.childNodes]) {
    if (node.tagName !== "DETAILS") {
      folds.length ? folds[0].before(node) : card.append(node);
      continue;
    }
    const fold = folds.shift();
    if (fold.matches(".page")) continue;
    for (const old of [...fold.children].slice(1)) old.remove();
    fold.append(...[...node.children].slice(1));
  }
  renewals.set(card, renewals.get(next));
};

// The card of a finding: one that is there already stays the element that it is, also where it says more now.
const cardOf = (finding) => {
  const says = sayingOf(finding);
  if (cards.has(says)) return cards.get(says);
  const subject = `${isLead(finding)} ${finding.rule} ${finding.where.map(({ value }) => value)}`;
  const current = new Set(everyFinding().map(sayingOf));
  const [before, known] = [...cards].find(([key, card]) => card.dataset.subject === subject && !current.has(key)) ?? [];
  const next = findingCard(finding, isLead(finding));
  if (known) {
    renewCard(known, next);
    known.className = `${next.className}${known.classList.contains("fresh") ? " fresh" : ""}`;
  }
  const card = known ?? next;
  cards.delete(before);
  card.dataset.subject = subject;
  if (page.entry && !known) card.classList.add("fresh"); // pointed out once
  cards.set(says, card);
  return card;
};

const unfolded = new Set(); // rules of which the reader wants every finding

const tellFindings = () => {
  const others = report.findings.filter((finding) => !isLead(finding));
  const boxes = findingGroups(others, cardOf, (key) => unfolded.has(key), (key) => unfolded.add(key));
  const current = new Set(everyFinding().map(sayingOf));
  for (const says of cards.keys()) if (!current.has(says)) cards.delete(says);
  slots.findings.replaceChildren(...boxes);
  slots.findings.hidden = !boxes.length;
  hints.querySelector(".findings").replaceChildren(...findingGroups(report.hints, cardOf, (key) => unfolded.has(key), (key) => unfolded.add(key)));
  hints.hidden = !report.hints.length;
  page.entry = true;
};

const hints = hintsFold([]);

// The verdict with the finding that its headline names.
const tellVerdict = () => {
  const { lead } = report.verdict;
  slots.verdict.replaceChildren(verdictPart(lead === null ? null : cardOf(report.findings[lead])));
};

const changed = (what, value) => {
  const text = JSON.stringify(value);
  page.texts ??= {};
  if (page.texts[what] === text) return false;
  page.texts[what] = text;
  return true;
};

// What stands on the page before there is anything to draw.
const FIRST = { reading: "Reading the run", waiting: "Waiting for the first step", unreadable: "This cannot be read" };

const before = ({ word, detail }) =>
  el(
    "section",
    { class: `verdict ${word}`, "aria-labelledby": "headline" },
    el("div", { class: "headline" }, el("span", { class: `glyph pulse ${word === "unreadable" ? "warning" : "info"}`, "aria-hidden": "true" }, word === "unreadable" ? "!" : "…"), el("div", {}, el("h1", { id: "headline" }, FIRST[word] ?? "Nothing to show"), el("p", {}, (word === "waiting" ? detail.split(": ").at(-1) : detail).replace(/^./, (first) => first.toUpperCase())))),
    word === "waiting" ? el("p", { class: "status" }, "Start it with ", el("code", {}, "backlight run --out FOLDER train.py"), " or ", el("code", {}, "with backlight.watch(model, optimizer, run=FOLDER):"), " and leave this page open.") : null,
  );

const apply = (head) => {
  page.version = head.news;
  page.over = head.stand.over;
  say(head.stand);
  if (!head.run) {
    slots.verdict.replaceChildren(before(head.stand));
    saying.hidden = true; // the same words stand there
    return;
  }
  saying.hidden = false;
  const [was, others] = [view.full.join(), head.parameters && head.table !== page.table];
  page.table = head.table;
  Object.assign(report, head);
  view.reaches(report.steps);
  if (was !== view.full.join() && !view.zoomed) view.tell("range");
  if (others) {
    for (const part of shown.values()) Object.assign(part, { stamp: "", renew: undefined });
    view.set("row", null);
    view.find(view.search);
    bar.search.hidden = !report.parameters.length;
  }
  document.title = `${head.stand.word === "running" ? "● " : ""}${report.run.name} · backlight`;
  keepingPlace(() => {
    const focused = document.activeElement;
    const news = changed("findings", everyFinding().map(sayingOf));
    if (changed("verdict", [report.verdict, report.run]) || news) tellVerdict();
    if (news) tellFindings();
    if (focused.isConnected) focused.focus({ preventScroll: true });
    if (news) view.tell("findings");
    for (const finding of everyFinding()) if (finding.line) renewals.get(cards.get(sayingOf(finding)))?.(finding.line);
    if (changed("stated", report.panels.filter(({ stated }) => stated))) slots.stated.replaceChildren(...[statedList()].filter(Boolean));
    if (changed("gaps", report.verdict.unmeasured)) slots.gaps.replaceChildren(...[unmeasuredList()].filter(Boolean));
    const drawn = report.panels.filter(({ kind }) => kind);
    if (changed("panels", report.panels.map(({ name, kind, stated }) => [name, Boolean(kind), Boolean(stated)]))) {
      const wanted = new Set(drawn.map(({ name }) => name));
      for (const [name, { section }] of shown) {
        if (wanted.has(name)) continue;
        near.unobserve(section);
        section.remove();
        shown.delete(name);
      }
      const parts = drawn.map((entry) => ({ place: entry.place, section: (shown.get(entry.name) ?? livePart(entry)).section }));
      for (const [slot, folded] of [[slots.panels, false], [slots.folded, true]]) {
        let last = null;
        for (const { section } of parts.filter(({ place }) => (place === "details") === folded)) {
          if (last ? last.nextSibling !== section : slot.firstChild !== section) last ? last.after(section) : slot.prepend(section);
          last = section;
        }
      }
      arrange(parts.filter(({ place }) => place !== "details"));
      const menu = contents(report.panels);
      slots.nav.replaceWith(menu);
      slots.nav = menu;
    }
  });
};

const lost = () => {
  if (page.over) return;
  saying.hidden = false;
  say({ word: "lost", detail: "backlight open does not answer: it was closed, or the connection broke. What is shown stays." });
};

const bar = {};

const names = () => {
  const { views } = report.live;
  if (views.length < 2) return el("span", { class: "run-name", title: report.run.name }, report.run.name);
  return el("nav", { class: "run-name views", "aria-label": "Runs" }, views.map(({ key, name, here }) => el("a", { href: `../${encodeURIComponent(key)}/`, "aria-current": here ? "page" : null }, name)));
};

const follow = async () => {
  for (;;) {
    try {
      const answer = await fetch(`news?${new URLSearchParams({ after: page.version, table: page.table })}`, { cache: "no-store" });
      if (answer.status === 200) {
        const head = JSON.parse(await answer.text());
        await turn();
        apply(head);
        if (head.run) refreshAll().catch(lost);
      } else if (answer.status !== 204) throw new Error(`status ${answer.status}`);
      page.silent = 0;
    } catch {
      lost();
      if (page.silent >= RETRY.length) return;
      await pause(RETRY[page.silent]);
      page.silent += 1;
      continue;
    }
    if (page.over) return;
    if (document.hidden) await new Promise((resolve) => document.addEventListener("visibilitychange", resolve, { once: true }));
  }
};

const open = () => {
  const switchTheme = followTheme();
  const top = topBar(switchTheme, names());
  bar.search = top.querySelector(".search");
  bar.search.hidden = true;
  top.querySelector(".search").before(stand);
  say({ word: "reading", detail: "The run is being read." });
  saying.hidden = true;
  const main = el("main", { id: "top" }, saying, slots.verdict, slots.findings, slots.panels, slots.stated, hints, detailsPart(slots.gaps, slots.folded), el("footer", {}, "Followed by backlight. Nothing here changes the run or leaves this machine."));
  slots.findings.hidden = true;
  slots.verdict.append(before({ word: "reading", detail: "This takes a moment where a run is long." }));
  document.body.append(top, el("div", { class: "frame" }, slots.nav, main));
  let soon = null;
  view.on("range", () => {
    clearTimeout(soon);
    soon = setTimeout(() => {
      const map = shown.get("parameters");
      if (!map?.coarse) return;
      map.version = -1;
      refreshAll().catch(lost);
    }, 250);
  });
  addEventListener("scroll", () => (page.scrolled = performance.now()), { passive: true });
  follow();
};

open();

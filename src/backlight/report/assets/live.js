// A page that follows a run: it asks for news, and what is on the screen takes them where it is.

const NEAR = "500px"; // how far from the screen a panel is kept up to date
const CALM = 160; // ms without scrolling before anything is drawn
const LONGEST = 400; // ms for which scrolling holds a drawing back
const RETRY = [1000, 2000, 4000, 8000, 15000]; // ms until the server is asked again once it is silent

const connection = { scrolled: 0, silent: 0, over: false, version: -1, table: "", busy: false, drawn: 0 };

const { views } = report.live;

Object.assign(report, { verdict: null, findings: [], hints: [], panels: [], reasons: {} });

const pause = (ms) => new Promise((resolve) => setTimeout(resolve, ms));

// One task of the page per drawing, and none in the midst of a short scroll: scrolling stays smooth.
const turn = async () => {
  const begun = performance.now();
  await pause(0);
  while (performance.now() - connection.scrolled < CALM && performance.now() - begun < LONGEST) await pause(CALM);
};

view.rest = () => pause(0);

view.isFar = (owner) => {
  const section = /** @type {HTMLElement | null} */ (owner.closest("section.panel"));
  return parts.get(section?.dataset.panel)?.near === false;
};

const panelUrl = (name, options) => `panel/${encodeURIComponent(name)}?${new URLSearchParams(options)}`;

// The steps that are looked at closely, where the whole run is drawn more coarsely than it was recorded.
/** @type {(part: Part) => Record<string, string>} */
const closely = (part) => (part.coarse && view.zoomed ? { from: String(Math.max(0, Math.floor(view.range[0]))), to: String(Math.ceil(view.range[1])) } : {});

// A column of the heat map that the page does not hold yet.
report.column = async (name) => {
  const answer = await fetch(panelUrl("parameters", { column: name, ...closely(parts.get("parameters")) }), { cache: "no-store" });
  const { data } = await answer.json();
  return data.columns.find((column) => column.name === name);
};

// What is at the top of the screen stays there, whatever grows or shrinks above it.
const keepingPlace = (change) => {
  const anchor = scrollY > 0 ? [...document.querySelectorAll("section.panel, article.finding")].find((node) => node.getBoundingClientRect().bottom > 80) : null;
  const before = anchor?.getBoundingClientRect().top;
  change();
  if (anchor?.isConnected) scrollBy({ top: anchor.getBoundingClientRect().top - before, behavior: "instant" });
};

// Bring one panel to the newest version of the run, if it has news.
/** @param {string} name @param {Part} part */
const refresh = async (name, part) => {
  const { version } = connection;
  const answer = await fetch(panelUrl(name, { have: part.stamp, column: view.column ?? "", ...closely(part) }), { cache: "no-store" });
  if (answer.status === 200) {
    const panel = JSON.parse(await answer.text());
    part.stamp = answer.headers.get("x-stamp");
    if (!panel.kind) return;
    if (panel.kind === "parameters" && !panel.data.window) part.coarse = !panel.data.exact;
    panel.data = await unpackAll(panel.data);
    await turn();
    await drawPanel(panel);
  }
  part.version = version;
  connection.drawn += 1;
  document.documentElement.dataset.drawn = String(connection.drawn);
};

// Panels one after the other, those on the screen first; what comes meanwhile waits for the next round.
const refreshAll = async () => {
  if (connection.busy) return;
  connection.busy = true;
  try {
    const map = parts.get("parameters");
    if (map && !map.stamp) await refresh("parameters", map); // others read what it holds
    const stale = () => [...parts].filter(([, { version, near, stamp }]) => version !== connection.version && (near || !stamp));
    for (let left = stale(); left.length; left = stale()) {
      const [name, part] = left.find(([, { near }]) => near) ?? left[0];
      await refresh(name, part);
      part.version = connection.version;
    }
    document.documentElement.dataset.ready = "yes";
    document.documentElement.dataset.version = String(connection.version);
  } finally {
    connection.busy = false;
  }
};

const near = new IntersectionObserver(
  (entries) => {
    for (const { target, isIntersecting } of entries) {
      const part = parts.get(/** @type {HTMLElement} */ (target).dataset.panel);
      if (part) part.near = isIntersecting;
    }
    view.wake();
    refreshAll().catch(lost);
  },
  { rootMargin: `${NEAR} 0px` },
);

const STANDS = { unreadable: "not readable", lost: "not connected" };

const stand = el("span", { class: "stand reading", id: "stand", role: "status" });

const show = ({ word, detail }) => {
  fill(stand, el("i", { "aria-hidden": "true" }), STANDS[word] ?? word);
  stand.className = `stand ${word}`;
  stand.title = detail;
  slots.saying.textContent = detail;
  document.documentElement.dataset.stand = word;
};

// What is on the page before there is anything to draw.
const FIRST = { reading: "Reading the run", waiting: "Waiting for the first step", unreadable: "This cannot be read" };

const drawBefore = ({ word, detail }) => {
  const failed = word === "unreadable";
  const text = (word === "waiting" ? detail.split(": ").at(-1) : detail).replace(/^./, (first) => first.toUpperCase());
  const sign = el("span", { class: `glyph pulse ${failed ? "warning" : "info"}`, "aria-hidden": "true" }, failed ? "!" : "…");
  const start = ["Start it with ", el("code", {}, "backlight run --out FOLDER train.py"), " or ", el("code", {}, "with backlight.watch(model, optimizer, run=FOLDER):"), " and leave this page open."];
  fill(
    slots.verdict,
    el(
      "section",
      { class: `verdict ${word}`, "aria-labelledby": "headline" },
      el("div", { class: "headline" }, sign, el("div", {}, el("h1", { id: "headline" }, FIRST[word] ?? "Nothing to show"), el("p", {}, text))),
      word === "waiting" ? el("p", { class: "status" }, start) : null,
    ),
  );
};

/** @param {News} news */
const take = (news) => {
  connection.version = news.news;
  connection.over = news.stand.over;
  show(news.stand);
  slots.saying.hidden = !news.run; // the same words are in the verdict
  if (!news.run) return drawBefore(news.stand);
  const others = news.parameters && news.table !== connection.table;
  connection.table = news.table;
  keepingPlace(() => draw(news));
  for (const { section } of parts.values()) near.observe(section);
  document.title = `${news.stand.word === "running" ? "● " : ""}${report.run.name} · backlight`;
  if (!others) return;
  view.panels = {}; // other parameters: everything is drawn anew
  for (const part of parts.values()) part.stamp = "";
  view.set("row", null);
  view.search(view.query);
};

const lost = () => {
  if (connection.over) return;
  slots.saying.hidden = false;
  show({ word: "lost", detail: "backlight open does not answer: it was closed, or the connection broke. What is shown stays." });
};

const runNames = () => {
  if (views.length < 2) return null;
  return el("nav", { class: "run-name views", "aria-label": "Runs" }, views.map(({ key, name, here }) => el("a", { href: `../${encodeURIComponent(key)}/`, "aria-current": here ? "page" : null }, name)));
};

const follow = async () => {
  while (!connection.over) {
    try {
      const answer = await fetch(`news?${new URLSearchParams({ after: String(connection.version), table: connection.table })}`, { cache: "no-store" });
      if (answer.status === 200) {
        const news = JSON.parse(await answer.text());
        await turn();
        take(news);
        if (news.run) refreshAll().catch(lost);
      } else if (answer.status !== 204) throw new Error(`status ${answer.status}`);
      connection.silent = 0;
    } catch {
      lost();
      if (connection.silent >= RETRY.length) return;
      await pause(RETRY[connection.silent]);
      connection.silent += 1;
      continue;
    }
    if (document.hidden) await new Promise((resolve) => document.addEventListener("visibilitychange", resolve, { once: true }));
  }
};

openPage(runNames(), stand);
show({ word: "reading", detail: "The run is being read." });
drawBefore({ word: "reading", detail: "This takes a moment where a run is long." });
slots.footer.textContent = "Followed by backlight. Nothing here changes the run or leaves this machine.";
let soon = null;
view.on("range", () => {
  clearTimeout(soon);
  soon = setTimeout(() => {
    const map = parts.get("parameters");
    if (!map?.coarse) return;
    map.version = -1;
    refreshAll().catch(lost);
  }, 250);
});
addEventListener("scroll", () => (connection.scrolled = performance.now()), { passive: true });
follow();

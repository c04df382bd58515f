// Colours. They live in the style sheet, so that light and dark are one place; a canvas asks for them here.

const TONES = ["first", "second", "third", "fourth", "fifth", "sixth", "seventh", "eighth"];

const swatchOf = (colour, kind) => el("span", { class: `swatch ${kind}`, style: { "--swatch": `var(--tone-${colour})` } });

const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();

const tone = (name) => css(`tone-${name}`) || css("tone-first");

/** @type {(text: string) => number[]} */
const rgb = (text) => {
  const value = Number.parseInt(text.slice(1), 16);
  return [(value >> 16) & 255, (value >> 8) & 255, value & 255];
};

const faded = (text, alpha) => `rgba(${rgb(text).join(",")},${alpha})`;

// Codes of a cell: what a value cannot be comes first, then a ramp from small to large.
const UNMEASURED = 0;
const UNDEFINED = 1; // an update over weights that are zero
const ZERO = 2;
const BROKEN = 3;
const NONE = 4; // a count of nothing
const RAMP = 5;
const STEPS = 256 - RAMP;

const little = new Uint8Array(new Uint32Array([1]).buffer)[0] === 1;

/** @param {number[]} colour */
const pixel = ([red, green, blue]) =>
  (little ? (255 << 24) | (blue << 16) | (green << 8) | red : (red << 24) | (green << 16) | (blue << 8) | 255) >>> 0;

const rampColour = (share) => {
  const stops = css("ramp").split(/\s+/).map(rgb);
  const place = Math.min(Math.max(share, 0), 1) * (stops.length - 1);
  const below = Math.min(Math.floor(place), stops.length - 2);
  return stops[below].map((value, i) => Math.round(value + (stops[below + 1][i] - value) * (place - below)));
};

const pixels = () => {
  const table = new Uint32Array(256);
  table[UNDEFINED] = pixel(rgb(css("cell-undefined")));
  table[ZERO] = pixel(rgb(css("cell-zero")));
  table[NONE] = pixel(rgb(css("cell-none")));
  table[BROKEN] = pixel(rgb(css("cell-broken")));
  for (let i = 0; i < STEPS; i += 1) table[RAMP + i] = pixel(rampColour(i / (STEPS - 1)));
  return { table, hatch: [pixel(rgb(css("cell-void"))), pixel(rgb(css("cell-hatch")))] };
};

const system = matchMedia("(prefers-color-scheme: dark)");

const dark = () => document.documentElement.dataset.theme === "dark";

// The reader's choice, else what the system prefers, also when that changes while the page is open.
const followTheme = () => {
  let chosen = null;
  try {
    chosen = localStorage.getItem("backlight-theme");
  } catch {
    // A page opened from a file may have no storage: a choice then lasts as long as the page.
  }
  const apply = () => {
    document.documentElement.dataset.theme = (chosen ?? (system.matches ? "dark" : "light")) === "dark" ? "dark" : "light";
    view.notify("theme");
  };
  system.addEventListener("change", apply);
  apply();
  return () => {
    chosen = dark() ? "light" : "dark";
    try {
      localStorage.setItem("backlight-theme", chosen);
    } catch {
      // As above.
    }
    apply();
  };
};

// The colours from small to large with their values, and the cells that are no value.
/** @type {(host: Element, range: ColourRange | null, has: (code: number) => boolean, title?: string) => void} */
const legendBar = (host, range, has, title = "") => {
  const chips = [];
  if (has(UNMEASURED)) chips.push(el("span", { class: "cell void" }, "not measured"));
  if (has(UNDEFINED)) chips.push(el("span", { class: "cell undefined" }, "not defined: from zero weights"));
  if (has(ZERO)) chips.push(el("span", { class: "cell zero" }, "exactly zero"));
  if (has(NONE)) chips.push(el("span", { class: "cell none" }, "none"));
  if (has(BROKEN)) chips.push(el("span", { class: "cell broken" }, "NaN or Inf"));
  const cells = el("div", { class: "cells" }, chips);
  if (!range) return host.replaceChildren(cells); // nothing but such cells
  const canvas = el("canvas", { class: "ramp", width: "256", height: "1", role: "img", "aria-label": "Colours from small to large" });
  const context = canvas.getContext("2d");
  for (let i = 0; i < 256; i += 1) {
    context.fillStyle = `rgb(${rampColour(i / 255).join(",")})`;
    context.fillRect(i, 0, 1, 1);
  }
  /** @type {[number, string][]} */
  const ticks = [];
  if (range.log) {
    const [from, to] = [Math.log10(range.low), Math.log10(range.high)];
    const every = Math.max(1, Math.ceil((to - from) / 5));
    for (let exponent = Math.ceil(from - 1e-9); exponent <= to + 1e-9; exponent += every) ticks.push([(exponent - from) / (to - from), logTick(10 ** exponent)]);
    if (ticks.length < 2) ticks.splice(0, ticks.length, [0, number(range.low, 2)], [1, number(range.high, 2)]);
  } else for (const share of [0, 0.25, 0.5, 0.75, 1]) ticks.push([share, `${100 * share} %`]);
  const [below, above] = range.clamped;
  const marks = ticks.map(([share, text]) => {
    const label = share < 0.001 && below ? `≤ ${text}` : share > 0.999 && above ? `≥ ${text}` : text;
    return el("span", { style: { left: `${100 * share}%` } }, label);
  });
  return host.replaceChildren(
    title ? el("span", { class: "ramp-title" }, title) : "",
    el("div", { class: "ramp-box" }, canvas, el("div", { class: "ramp-ticks" }, marks)),
    cells,
  );
};

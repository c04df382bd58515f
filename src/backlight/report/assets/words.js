// Numbers and names in words.

const grouped = (text) => text.replace(/\B(?=(\d{3})+(?!\d))/g, ",");

const trimmed = (text) => (text.includes(".") ? text.replace(/\.?0+$/, "") : text);

// At most `digits` significant digits, in the way of the Python side: 12,345 · 0.0123 · 1.2e-9.
const number = (value, digits = 4) => {
  if (value === null || value === undefined) return "not measured";
  if (typeof value === "string") return value;
  if (Number.isNaN(value)) return "NaN";
  if (!Number.isFinite(value)) return value > 0 ? "inf" : "-inf";
  if (value === 0) return "0";
  const magnitude = Math.abs(value);
  if (Number.isInteger(value) && magnitude < 1e7) return (value < 0 ? "-" : "") + grouped(String(magnitude));
  if (magnitude >= 1e-3 && magnitude < 1e7) {
    const decimals = Math.min(20, Math.max(0, digits - 1 - Math.floor(Math.log10(magnitude))));
    const [whole, fraction] = trimmed(value.toFixed(decimals)).split(".");
    return grouped(whole) + (fraction ? `.${fraction}` : "");
  }
  const [mantissa, exponent] = value.toExponential(digits - 1).split("e");
  return `${trimmed(mantissa)}e${Number(exponent)}`;
};

const count = (amount, one, many = `${one}s`) => `${number(amount)} ${amount === 1 ? one : many}`;

const between = (first, last) => (first === last ? `step ${number(first)}` : `steps ${number(first)} to ${number(last)}`);

const RAISED = { "-": "⁻", 0: "⁰", 1: "¹", 2: "²", 3: "³", 4: "⁴", 5: "⁵", 6: "⁶", 7: "⁷", 8: "⁸", 9: "⁹" };

const power = (base, exponent) => base + [...String(exponent)].map((sign) => RAISED[sign]).join("");

// A tick of a logarithmic axis: powers of ten as such, what lies between them only where it is needed.
const logTick = (value) => {
  const exponent = Math.log10(value);
  const whole = Math.round(exponent);
  if (Math.abs(exponent - whole) > 1e-9) return number(value, 2);
  return whole >= -2 && whole <= 3 ? number(10 ** whole, 3) : power("10", whole);
};

// The end of a dotted name tells parameters apart, its beginning tells where they are: cut in the middle.
const shortened = (text, fits) => {
  if (fits(text)) return text;
  let low = 1;
  let high = text.length - 1;
  const cut = (kept) => `${text.slice(0, Math.ceil(kept * 0.4))}…${text.slice(text.length - Math.floor(kept * 0.6))}`;
  while (low < high) {
    const middle = Math.ceil((low + high) / 2);
    if (fits(cut(middle))) low = middle;
    else high = middle - 1;
  }
  return cut(low);
};

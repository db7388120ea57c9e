// Small helpers: elements whose content is always text (names come from other machines), and how numbers are written.

export const byId = (id) => document.getElementById(id);

export function el(name, attributes = {}, ...children) {
  return fill(document.createElement(name), attributes, children);
}

export function svg(name, attributes = {}, ...children) {
  return fill(document.createElementNS("http://www.w3.org/2000/svg", name), attributes, children);
}

function fill(node, attributes, children) {
  for (const [key, value] of Object.entries(attributes)) if (value !== undefined) node.setAttribute(key, value);
  node.append(...children.filter((child) => child !== null && child !== undefined));
  return node;
}

// Writing what stands there already would make a screen reader say it again, and the browser lay the page out anew.
export function setText(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

export function setAttribute(node, name, value) {
  if (node.getAttribute(name) !== String(value)) node.setAttribute(name, value);
}

export function colour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
}

export const percent = (share) => `${Math.round(100 * share)} %`;
export const number = (value, digits = 4) => (typeof value === "number" && isFinite(value) ? value.toFixed(digits) : "–");

export function bytes(count) {
  if (!count) return "0 B";
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  const power = Math.min(units.length - 1, Math.floor(Math.log2(count) / 10));
  const value = count / 1024 ** power;
  return `${value < 10 && power ? value.toFixed(1) : Math.round(value)} ${units[power]}`;
}

export function seconds(value) {
  if (typeof value !== "number") return "–";
  if (value < 1) return `${(value * 1000).toFixed(value < 0.01 ? 1 : 0)} ms`;
  if (value < 60) return `${value.toFixed(1)} s`;
  if (value < 3600) return `${Math.floor(value / 60)} min ${String(Math.round(value % 60)).padStart(2, "0")} s`;
  return `${Math.floor(value / 3600)} h ${String(Math.round((value % 3600) / 60)).padStart(2, "0")} min`;
}

export function blocks(start, stop) {
  return stop > start ? (stop - start === 1 ? `block ${start}` : `blocks ${start}–${stop - 1}`) : "no blocks";
}

export function table(titles, rows) {
  const head = el("thead", {}, el("tr", {}, ...titles.map((title) => el("th", { scope: "col" }, title))));
  const body = el("tbody");
  for (const row of rows) body.append(el("tr", {}, ...row.map((cell) => el("td", {}, String(cell)))));
  return el("table", {}, head, body);
}

// Tables that say the same as a drawing are made only while somebody has them open.
export function whenOpen(details, target, make) {
  const show = () => {
    if (details.open) target.replaceChildren(make());
  };
  details.addEventListener("toggle", show);
  return show;
}

export const units = (ranges, unit) => ranges.some(([start, stop]) => start <= unit && unit < stop);

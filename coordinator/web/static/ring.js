// The ring as a drawing: each node is an arc with a cell for each block, links are curves inside as wide as their traffic.

import { blocks, bytes, byId, el, percent, setAttribute, setText, svg, table, units, whenOpen } from "./dom.js";

const FEW = 28; // with more nodes only some get a label
const CELLS = 24; // thickness of the blocks
const BAND = 7; // thickness of the band that says who is busy

let shape = null; // what the drawing was laid out for
let parts = new Map(); // node -> its elements
let links = new Map(); // "a>b" -> its elements

export function initiatorOf(state) {
  return state.run.is_over ? "" : (state.run.last?.initiator ?? "");
}

export function isLost(state, node) {
  return Boolean(state.nodes[node]?.lost || state.members[node]?.[0] === "lost");
}

export function drawRing(state) {
  const place = byId("ring");
  const nodes = state.plan.nodes ?? [];
  const width = Math.max(260, Math.min(place.clientWidth || 320, 600));
  const layout = JSON.stringify([width, state.plan.num_blocks, nodes.map((one) => [one.node, one.start, one.stop, one.owner, one.helps])]);
  if (layout !== shape) {
    shape = layout;
    place.replaceChildren(nodes.length ? layOut(state, nodes, width) : el("p", { class: "hint" }, "The ring is drawn when there is a plan."));
  }
  if (!nodes.length) return;
  for (const one of nodes) update(state, one);
  updateLinks(state);
  showLinks(state);
}

function layOut(state, nodes, width) {
  const few = nodes.length <= FEW;
  const margin = few ? Math.min(92, width * 0.2) : Math.min(74, width * 0.17);
  const radius = width / 2 - margin;
  const height = 2 * radius + (few ? 76 : 60);
  const centre = [width / 2, height / 2];
  const gap = few ? 0.07 : 0.6 / nodes.length;
  const weights = nodes.map((one) => Math.max(0.7, one.stop - one.start));
  const unit = (2 * Math.PI - gap * nodes.length) / weights.reduce((a, b) => a + b, 0);
  const root = svg("svg", { width, height, viewBox: `0 0 ${width} ${height}`, role: "group", "aria-label": summary(state, nodes) });
  root.append(svg("g", { class: "links" }));
  parts = new Map();
  links = new Map();
  let angle = -Math.PI / 2;
  nodes.forEach((one, index) => {
    const end = angle + weights[index] * unit;
    const made = arcOf(one, centre, radius, angle, end, few || index % Math.ceil(nodes.length / 20) === 0);
    setAttribute(made.group, "tabindex", index === 0 ? 0 : -1);
    parts.set(one.node, made);
    root.append(made.group);
    angle = end + gap;
  });
  root.addEventListener("keydown", (event) => move(event, nodes));
  return root;
}

function summary(state, nodes) {
  return `A ring of ${nodes.length} nodes with ${state.plan.num_blocks} blocks. Arrow keys go from node to node.`;
}

function arcOf(one, centre, radius, start, end, labelled) {
  const group = svg("g", { class: "node", role: "img", "data-node": one.node });
  const inner = radius - BAND - 3 - CELLS;
  const middle = (start + end) / 2;
  const cells = [];
  const count = one.stop - one.start;
  for (let at = 0; at < count; at += 1) {
    const from = start + ((end - start) * at) / count;
    const to = start + ((end - start) * (at + 1)) / count;
    const cell = svg("path", { class: "cell frozen", d: arc(centre, inner, radius - BAND - 3, from, to), "data-block": one.start + at });
    const [x, y] = polar(centre, (inner + radius - BAND - 3) / 2, (from + to) / 2);
    const text = (to - from) * inner > 15 ? svg("text", { class: "block", x, y }, String(one.start + at)) : null;
    cells.push([cell, text]);
    group.append(cell, ...(text ? [text] : []));
  }
  if (!count) group.append(svg("path", { class: "empty", d: arc(centre, inner, radius - BAND - 3, start, end) }));
  const shares = ["busy", "waiting", "idle"].map((kind) => svg("path", { class: `share ${kind}` }));
  group.append(...shares);
  const [x, y] = polar(centre, inner - 9, middle);
  if (one.owner) group.append(svg("circle", { class: "owner", cx: x, cy: y, r: labelled ? 5 : 2.5 }));
  group.append(svg("path", { class: "focus", d: arc(centre, inner - 3, radius + 3, start, end) }));
  const label = labelOf(one, centre, radius, middle, labelled);
  if (label) group.append(...label);
  const title = svg("title");
  group.append(title);
  return { group, cells, shares, label, title, centre, radius, inner, start, end, middle };
}

function labelOf(one, centre, radius, angle, labelled) {
  if (!labelled) return null;
  const [x, y] = polar(centre, radius + 9, angle);
  const side = Math.cos(angle);
  const anchor = side > 0.25 ? "start" : side < -0.25 ? "end" : "middle";
  const down = Math.sin(angle);
  const top = y + (down > 0.4 ? 10 : down < -0.4 ? -14 : -2);
  const name = one.node.length > 13 ? `${one.node.slice(0, 12)}…` : one.node;
  return [
    svg("text", { class: "name", x, y: top, "text-anchor": anchor }, name),
    svg("text", { class: "small", x, y: top + 14, "text-anchor": anchor }),
  ];
}

function update(state, one) {
  const made = parts.get(one.node);
  const shares = state.nodes[one.node]?.shares;
  const lost = isLost(state, one.node);
  const trained = [];
  made.cells.forEach(([cell, text], at) => {
    const isTrained = units(state.trains, one.start + at);
    if (isTrained) trained.push(one.start + at);
    setAttribute(cell, "class", `cell ${isTrained ? "trained" : "frozen"}`);
    if (text) setAttribute(text, "class", `block ${isTrained ? "trained" : ""}`);
  });
  let from = made.start;
  made.shares.forEach((path, at) => {
    const share = shares ? shares[at] : at === 2 ? 1 : 0;
    const to = from + (made.end - made.start) * share;
    setAttribute(path, "d", share > 0.002 ? arc(made.centre, made.radius - BAND, made.radius, from, to) : "");
    from = to;
  });
  const isInitiator = one.node === initiatorOf(state);
  setAttribute(made.group, "class", `node${lost ? " lost" : ""}${isInitiator ? " initiator" : ""}`);
  if (made.label) setText(made.label[1], lost ? "lost" : one.helps ? `helps ${one.helps}` : shares ? `waits ${percent(shares[1])}` : blocks(one.start, one.stop));
  const said = [
    `${one.node}: ${blocks(one.start, one.stop)}, ${trained.length} trained`,
    lost ? "lost" : shares ? `busy ${percent(shares[0])}, waiting ${percent(shares[1])}, idle ${percent(shares[2])}` : "",
    isInitiator ? "initiator" : one.owner ? `owns ${one.rows} rows` : "",
    one.helps ? `helps ${one.helps}` : "",
  ].filter(Boolean).join("; ");
  setText(made.title, said);
  setAttribute(made.group, "aria-label", said);
}

function updateLinks(state) {
  const most = Math.max(1, ...state.links.map((link) => link[3]));
  const layer = byId("ring").querySelector("g.links");
  const mostSoFar = Math.max(1, ...state.links.map((link) => link[2]));
  for (const [source, target, total, last] of state.links) {
    const from = parts.get(source);
    const to = parts.get(target);
    if (!from || !to || source === target) continue;
    const key = `${source}>${target}`;
    if (!links.has(key)) {
      const path = svg("path", { class: "link", "data-link": key, d: curve(from, to) }, svg("title"));
      const head = svg("path", { class: "head" });
      layer.append(path, head);
      links.set(key, { path, head, from, to });
    }
    const made = links.get(key);
    const share = last / most;
    const widest = parts.size > FEW ? 5 : Math.min(13, from.radius / 14);
    const thick = last ? Math.max(1.4, widest * share) : Math.max(0.7, 2 * (total / mostSoFar));
    setAttribute(made.path, "stroke-width", thick.toFixed(2));
    setAttribute(made.path, "class", last ? "link" : "link quiet");
    setAttribute(made.head, "class", last && parts.size <= FEW ? "head" : "head quiet");
    setAttribute(made.head, "d", arrow(made, thick));
    setText(made.path.firstChild, `${source} to ${target}: ${bytes(last)} in the newest step, ${bytes(total)} so far`);
  }
}

// The two directions between a pair of nodes leave and arrive at different places of their arcs.
function ends(from, to) {
  const spread = (one) => Math.min(0.16, (one.end - one.start) * 0.22);
  const leaves = polar(from.centre, from.inner - 17, from.middle + spread(from));
  const arrives = polar(to.centre, to.inner - 27, to.middle - spread(to));
  const [cx, cy] = from.centre;
  const middle = [(leaves[0] + arrives[0]) / 2, (leaves[1] + arrives[1]) / 2];
  // neighbours' links stay near the ring, those across go through the middle
  const apart = Math.abs(Math.atan2(Math.sin(to.middle - from.middle), Math.cos(to.middle - from.middle))) / Math.PI;
  const near = Math.max(0, 0.95 - 1.2 * apart);
  const bend = [cx + (middle[0] - cx) * near, cy + (middle[1] - cy) * near];
  return { leaves, arrives, bend };
}

function curve(from, to) {
  const { leaves, arrives, bend } = ends(from, to);
  return `M${point(leaves)}Q${point(bend)} ${point(arrives)}`;
}

function arrow({ from, to }, thick) {
  const { arrives, bend } = ends(from, to);
  const length = Math.hypot(arrives[0] - bend[0], arrives[1] - bend[1]) || 1;
  const [dx, dy] = [(arrives[0] - bend[0]) / length, (arrives[1] - bend[1]) / length];
  const half = 2.5 + thick * 0.7;
  const tip = [arrives[0] + dx * (5 + half), arrives[1] + dy * (5 + half)];
  return `M${point(tip)}L${point([arrives[0] - dy * half, arrives[1] + dx * half])}L${point([arrives[0] + dy * half, arrives[1] - dx * half])}Z`;
}

function polar([cx, cy], radius, angle) {
  return [cx + radius * Math.cos(angle), cy + radius * Math.sin(angle)];
}

const point = ([x, y]) => `${x.toFixed(1)} ${y.toFixed(1)}`;

function arc(centre, inner, outer, from, to) {
  const end = Math.min(to, from + 2 * Math.PI - 0.001);
  const large = end - from > Math.PI ? 1 : 0;
  const [a, b, c, d] = [polar(centre, outer, from), polar(centre, outer, end), polar(centre, inner, end), polar(centre, inner, from)];
  return `M${point(a)}A${outer} ${outer} 0 ${large} 1 ${point(b)}L${point(c)}A${inner} ${inner} 0 ${large} 0 ${point(d)}Z`;
}

function move(event, nodes) {
  const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
  const here = event.target.getAttribute("data-node");
  if (!step || !here) return;
  event.preventDefault();
  const index = nodes.findIndex((one) => one.node === here);
  const next = parts.get(nodes[(index + step + nodes.length) % nodes.length].node).group;
  setAttribute(event.target, "tabindex", -1);
  setAttribute(next, "tabindex", 0);
  next.focus();
}

let newest = null;
const show = whenOpen(byId("links-details"), byId("links-table"), () =>
  table(
    ["from", "to", "newest step", "so far", "rate"],
    (newest?.links ?? []).map(([source, target, total, last, rate]) => [source, target, bytes(last), bytes(total), rate ? `${bytes(rate)}/s` : "not measured"]),
  ),
);

function showLinks(state) {
  newest = state;
  show();
}

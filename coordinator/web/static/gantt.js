// What each node did in the last step, a bar for each action; arrow keys go from action to action.

import { byId, colour, el, seconds, setAttribute, setText, table, whenOpen } from "./dom.js";

const NAMES = { E: "embed", f: "forward, frozen", F: "forward", H: "head and loss", B: "backward", U: "update" };
const MORE = { S: "skip", W: "keep", R: "read", C: "ship pairs", A: "fit", K: "save" };
const AXIS = 22;

const canvas = byId("gantt");
let gantt = {};
let order = [];
let bars = []; // [x, y, width, height, span], in the order of their starts
let here = -1;

for (const [letter, name] of Object.entries(NAMES)) {
  const box = el("i");
  box.style.background = `var(--op-${letter})`;
  byId("gantt-legend").append(el("li", {}, box, `${letter} ${name}`));
}

const opColour = (letter) => colour(letter in NAMES || letter === "S" ? `op-${letter}` : "op-other");
const begins = (at) => (at < 0 ? `${seconds(-at / 1000)} before the step` : `at ${seconds(at / 1000)}`);
const textOf = ([node, letter, micro, start, stop, at, takes]) => {
  const what = NAMES[letter] ?? MORE[letter] ?? letter;
  const range = "fFBSCA".includes(letter) ? ` of blocks ${start}–${stop - 1}` : "";
  return `${node}: ${what}${range}${micro >= 0 ? `, micro-batch ${micro}` : ""}, ${begins(at)} for ${seconds(takes / 1000)}`;
};

export function drawGantt(state) {
  const spans = state.gantt.spans ?? [];
  if (gantt !== state.gantt) here = -1;
  gantt = state.gantt;
  const known = (state.plan.nodes ?? []).map((one) => one.node);
  const busy = new Set(spans.map((span) => span[0]));
  order = known.filter((node) => busy.has(node));
  const end = spans.reduce((most, span) => Math.max(most, span[5] + span[6]), 0);
  canvas.hidden = !spans.length;
  paint(spans, end);
  const cut = gantt.left_out ? ` ${gantt.left_out} more are left out.` : "";
  const ahead = spans.filter((span) => span[5] < 0);
  const early = ahead.length ? ` ${ahead.length} of them ran ahead, ${seconds(-Math.min(...ahead.map((span) => span[5])) / 1000)} before it at most: marks at the left edge.` : "";
  setText(byId("gantt-text"), spans.length ? `Step ${gantt.step}, begun by ${gantt.initiator || "?"}: ${spans.length} actions of ${order.length} nodes in ${seconds(end / 1000)}.${early}${cut}` : "Shown when a turn is done.");
  setText(byId("waits-text"), spans.length ? waitsText(spans, gantt.waits ?? {}, end) : "");
  show();
}

const MOST_WAITING = 3;

// What a node waits for, most of it first: [node, ms, ms of them for its messages]; keys are "a", and "a>" for messages.
function causes(waits) {
  const found = new Map();
  for (const [of, took] of Object.entries(waits)) {
    const [node, isMessage] = [of.replace(">", ""), of.endsWith(">")];
    const had = found.get(node) ?? [node, 0, 0];
    found.set(node, [node, had[1] + 1000 * took, had[2] + (isMessage ? 1000 * took : 0)]);
  }
  return [...found.values()].sort((one, other) => other[1] - one[1]);
}

// Who sets the pace of the step, and who waits how long for whom.
function waitsText(spans, waits, end) {
  if (!end || order.length < 2) return "";
  const busy = new Map(order.map((node) => [node, 0]));
  for (const [node, , , , , at, takes] of spans) busy.set(node, busy.get(node) + Math.max(0, at + takes - Math.max(0, at)));
  const [pace, most] = [...busy].reduce((best, one) => (one[1] > best[1] ? one : best));
  const share = (ms) => `${Math.round((100 * ms) / end)} %`;
  const waiting = order
    .map((node) => ({ node, of: causes(waits[node] ?? {}) }))
    .map((one) => ({ ...one, all: one.of.reduce((sum, cause) => sum + cause[1], 0) }))
    .filter((one) => one.all >= 0.01 * end)
    .sort((one, other) => other.all - one.all);
  const told = waiting.slice(0, MOST_WAITING).map(({ node, of: [[whom, all, sent], ...others], all: sum }) => {
    const itself = whom === node ? "its own messages" : sent > all / 2 ? `messages of ${whom}` : whom;
    return `${node} waits ${share(sum)} of it, ${others.length && all < 0.99 * sum ? "mostly " : ""}for ${itself}`;
  });
  const more = waiting.length > MOST_WAITING ? `; ${waiting.length - MOST_WAITING} more wait less` : "";
  return `${pace} computes longest, ${share(most)} of the step${told.length ? `; ${told.join("; ")}${more}` : ", and nobody waits"}.`;
}

function paint(spans, end) {
  const scale = Math.min(2, devicePixelRatio || 1);
  const width = canvas.parentElement.clientWidth || 320;
  const row = order.length > 40 ? Math.max(2, Math.floor(420 / order.length)) : order.length > 14 ? 14 : 28;
  const labels = order.length > 40 ? 0 : Math.min(120, width * 0.24);
  const height = Math.max(60, order.length * row + AXIS + 4);
  canvas.width = width * scale;
  canvas.height = height * scale;
  canvas.style.height = `${height}px`;
  const pen = canvas.getContext("2d");
  pen.scale(scale, scale);
  pen.clearRect(0, 0, width, height);
  pen.font = "12px system-ui, DejaVu Sans, sans-serif";
  pen.textBaseline = "middle";
  if (!end) return;
  const room = width - labels - 8;
  drawAxis(pen, labels, room, height, end);
  const rows = new Map(order.map((node, at) => [node, at]));
  pen.fillStyle = colour("ink");
  if (labels) order.forEach((node, at) => pen.fillText(shorten(pen, node, labels - 10), 0, at * row + row / 2));
  const colours = new Map();
  bars = [];
  for (const span of spans) {
    const at = rows.get(span[0]);
    if (at === undefined) continue;
    const [from, until] = [Math.max(0, span[5]), Math.max(0, span[5] + span[6])];
    const bar = [labels + (from / end) * room - (until ? 0 : 3), at * row + (row > 8 ? 2 : 0), until ? Math.max(0.8, ((until - from) / end) * room - 0.6) : 2, row - (row > 8 ? 4 : row > 3 ? 1 : 0), span];
    bars.push(bar);
    if (!colours.has(span[1])) colours.set(span[1], opColour(span[1]));
    pen.fillStyle = colours.get(span[1]);
    pen.beginPath();
    pen.roundRect(bar[0], bar[1], bar[2], bar[3], row > 8 ? Math.min(4, bar[2] / 3) : 0);
    pen.fill();
    if (bar[2] > 15 && row > 20) {
      pen.fillStyle = colour("card");
      pen.fillText(span[1], bar[0] + bar[2] / 2 - 4, bar[1] + bar[3] / 2 + 0.5);
    }
  }
  if (here >= 0 && bars[here]) {
    pen.strokeStyle = colour("ink");
    pen.lineWidth = 2;
    pen.strokeRect(bars[here][0] - 1, bars[here][1] - 1, bars[here][2] + 2, bars[here][3] + 2);
  }
}

function drawAxis(pen, left, room, height, end) {
  const raw = end / Math.max(2, Math.floor(room / 110));
  const power = 10 ** Math.floor(Math.log10(raw));
  const tick = [1, 2, 5, 10].map((one) => one * power).find((one) => one >= raw);
  pen.lineWidth = 1;
  for (let at = 0; at <= end; at += tick) {
    const x = left + (at / end) * room;
    pen.strokeStyle = colour("line");
    pen.beginPath();
    pen.moveTo(x, 0);
    pen.lineTo(x, height - AXIS);
    pen.stroke();
    pen.fillStyle = colour("muted");
    const text = at === 0 ? "0" : seconds(at / 1000);
    pen.fillText(text, Math.min(x, left + room - pen.measureText(text).width), height - AXIS / 2);
  }
}

function shorten(pen, text, room) {
  let cut = text;
  while (cut.length > 3 && pen.measureText(cut).width > room) cut = `${cut.slice(0, -2)}…`;
  return cut;
}

function choose(at) {
  here = at;
  const end = (gantt.spans ?? []).reduce((most, span) => Math.max(most, span[5] + span[6]), 0);
  paint(gantt.spans ?? [], end);
  setText(byId("gantt-here"), bars[here] ? textOf(bars[here][4]) : "");
}

canvas.addEventListener("keydown", (event) => {
  const step = { ArrowRight: 1, ArrowLeft: -1, Home: -Infinity, End: Infinity }[event.key];
  if (step === undefined || !bars.length) return;
  event.preventDefault();
  choose(Math.max(0, Math.min(bars.length - 1, here + step)));
});

canvas.addEventListener("pointermove", (event) => {
  const box = canvas.getBoundingClientRect();
  const [x, y] = [event.clientX - box.left, event.clientY - box.top];
  const at = bars.findIndex(([left, top, wide, high]) => x >= left && x <= left + wide && y >= top && y <= top + high);
  if (at !== here && at >= 0) choose(at);
});

const show = whenOpen(byId("gantt-details"), byId("gantt-table"), () =>
  table(
    ["node", "action", "micro-batch", "begins", "takes"],
    (gantt.spans ?? []).slice(0, 400).map(([node, letter, micro, start, stop, at, takes]) => [
      node,
      `${letter} ${NAMES[letter] ?? MORE[letter] ?? ""}${"fFBSCA".includes(letter) ? ` [${start}, ${stop})` : ""}`,
      micro >= 0 ? micro : "",
      begins(at).replace("at ", ""),
      seconds(takes / 1000),
    ]),
  ),
);
setAttribute(canvas, "height", 60);
